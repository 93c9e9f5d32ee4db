"""Which mode is ahead, in words: by accuracy (or reward) at equal steps and at equal tokens, and never by pg_loss.

pg_loss is no measure of success: its scale is the mode's own, and at the start of a step it is near 0 for every mode whatever
the policy has learned. A mode is called ahead or behind when the paired t-test against the baseline, corrected by Holm over the
pairs of the ranking, is below 5 %; otherwise no difference is shown, which is not the same as none being there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aggcli.analysis.outcomes import Common, Comparison, Outcome
from aggcli.analysis.statistics import CONFIDENCE, Interval

ALPHA = 1 - CONFIDENCE
_MEASURES = ("accuracy", "raw_reward")
"""What modes are ranked by: the first of these that was measured."""

Word = Literal["baseline", "higher", "lower", "no difference shown", "not paired"]


@dataclass(frozen=True)
class Standing:
    """A mode's place. `difference`: to the baseline, paired by seed; `word`: what is shown of it at 5 % after Holm."""

    label: str
    mean: float
    difference: Interval | None
    p_holm: float | None
    word: Word
    common: Common | None


@dataclass(frozen=True)
class Ranking:
    """Modes by their paired difference to the baseline (which is 0), best first. `shown`: whether any difference is.

    Each pair is taken where its own runs are equal: at its last common steps, or at the most tokens that all of its runs saw.
    """

    measure: str
    axis: Literal["steps", "tokens"]
    baseline: str
    standings: tuple[Standing, ...]
    shown: bool
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """The rankings that could be made, and one sentence for all."""

    rankings: tuple[Ranking, ...]
    sentence: str


def verdict(comparison: Comparison) -> Verdict:
    """The verdict of a comparison."""
    measure = next((name for name in _MEASURES if name in comparison.outcomes), None)
    if measure is None:
        return Verdict((), "No verdict: neither accuracy nor reward was recorded, and pg_loss says nothing about success.")
    if len(comparison.labels) == 1:
        return Verdict((), f"No verdict: {comparison.baseline} is the only mode here; there is nothing to compare it with.")
    axes: tuple[tuple[Literal["steps", "tokens"], str], ...] = (
        ("steps", measure),
        ("tokens", f"{measure}_at_equal_tokens"),
    )
    rankings = tuple(_ranking(comparison, measure, axis, name) for axis, name in axes if name in comparison.outcomes)
    text = "; ".join(one.sentence for one in rankings)
    return Verdict(rankings, text[0].upper() + text[1:] + ".")


def _ranking(comparison: Comparison, measure: str, axis: Literal["steps", "tokens"], figure: str) -> Ranking:
    outcomes = comparison.outcomes[figure]
    found = [_standing(outcome, comparison.baseline) for outcome in outcomes.values()]
    found.sort(key=lambda one: (one.word == "not paired", 0.0 if one.difference is None else -one.difference.mean))
    shown = any(one.word in ("higher", "lower") for one in found)
    words = "accuracy" if measure == "accuracy" else "raw reward"
    return Ranking(measure, axis, comparison.baseline, tuple(found), shown, _sentence(words, axis, comparison.baseline, found))


def _standing(outcome: Outcome, baseline: str) -> Standing:
    pair = outcome.pair
    if outcome.label == baseline:
        return Standing(outcome.label, outcome.mean, None, None, "baseline", outcome.common)
    if pair is None:
        return Standing(outcome.label, outcome.mean, None, None, "not paired", outcome.common)
    difference = pair.test.difference
    word: Word = "no difference shown"
    if pair.p_holm is not None and pair.p_holm < ALPHA:
        word = "higher" if difference.mean > 0 else "lower"
    return Standing(outcome.label, outcome.mean, difference, pair.p_holm, word, pair.common)


def _sentence(measure: str, axis: str, baseline: str, standings: list[Standing]) -> str:
    """`at equal steps, accuracy is higher under prompt_mean than under constant by 0.04 [0.01, 0.07] (5 seeds, p = 0.02)`."""
    parts = []
    for word in ("higher", "lower"):
        those = [one for one in standings if one.word == word]
        if those:
            parts.append(f"{measure} is {word} under " + " and ".join(_named(one) for one in those))
    rest = [one for one in standings if one.word == "no difference shown"]
    if rest:
        parts.append(f"no difference in {measure} is shown for " + " and ".join(_named(one) for one in rest))
    apart = [one.label for one in standings if one.word == "not paired"]
    if apart:
        parts.append(f"{' and '.join(apart)} cannot be paired")
    return f"at equal {axis}{_where(standings)}, against {baseline}: " + ", ".join(parts)


def _where(standings: list[Standing]) -> str:
    """` (to step 99)`, ` (to 80,000 to 90,000 tokens)`: where the pairs were compared."""
    commons = [one.common for one in standings if one.difference is not None and one.common is not None]
    if not commons:
        return ""
    ends = sorted({f"{common.end:,.0f}" for common in commons}, key=lambda text: float(text.replace(",", "")))
    span = ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]} by pair"
    return f" (at step {span})" if commons[0].axis == "steps" else f" (at {span})"


def _named(one: Standing) -> str:
    assert one.difference is not None
    found = one.difference
    if one.p_holm is None:
        return f"{one.label} ({found.mean:+.3g}; one seed, so no interval)"
    if found.low is None or found.high is None:
        return f"{one.label} ({found.mean:+.3g} in all {found.n} seeds, so no interval; p {_p(one.p_holm)})"
    bounds = f"{found.mean:+.3g} [{found.low:+.3g}, {found.high:+.3g}]"
    return f"{one.label} ({bounds}, {found.n} seeds, p {_p(one.p_holm)})"


def _p(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"
