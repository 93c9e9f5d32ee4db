"""Which mode is ahead, in words: by accuracy (or reward) at equal steps and at equal tokens, and never by pg_loss.

pg_loss is no measure of success: its scale is the mode's own, and at the start of a step it is near 0 for every mode whatever
the policy has learned. A mode is called ahead or behind when the paired t-test against the baseline is below 5 %, corrected by
Holm over all pairs of the verdict, those at equal steps and at equal tokens together: runs that differ in nothing are then told
apart in 5 % of verdicts at most, and not in 5 % of rankings (`experiments/05-null-calibration.py` counts it). Otherwise no
difference is shown, which is not the same as none being there. Modes other than the baseline are not tested against each other,
and no word says so.

At equal steps the verdict is by accuracy on fresh prompts where that is sound: every compared run was evaluated at its end, all
were trained for the same number of steps, and the pairs have the same seeds as in the training rollouts. Then it is the better
measure: it is of the policy that training ended with, and not a mean over those of the last tenth of the steps; the prompts and
the noise are the same for every mode of a seed; and nothing has chosen among the rollouts, as dynamic sampling does when it
drops groups of equal rewards. Otherwise the verdict is by the training rollouts of the last common steps. What was recorded
decides, never what came out, and the other figure stands in the table. At equal tokens it is always by training rollouts: a run
is evaluated once, at the tokens that it happened to end with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aggcli.analysis.outcomes import Comparison, Outcome
from aggcli.analysis.run_figures import Common
from aggcli.analysis.statistics import CONFIDENCE, Interval, SignFlip, holm
from aggcli.errors import some
from aggcli.measurement.words import listed

ALPHA = 1 - CONFIDENCE
_MEASURES = {"accuracy": "accuracy", "raw_reward": "raw reward"}
"""What modes are ranked by, and its name in a sentence: the first of these that was measured."""

Word = Literal["baseline", "higher", "lower", "no difference shown", "not paired"]


@dataclass(frozen=True)
class Standing:
    """A mode's place. `difference`: to the baseline, paired by seed; `p_holm`: corrected over the pairs of all rankings of the
    verdict; `word`: what is shown of it at 5 % after that; `text`: the same as a line to read, empty for the baseline.
    """

    label: str
    mean: float
    difference: Interval | None
    p_holm: float | None
    sign_flip: SignFlip | None
    word: Word
    common: Common | None
    text: str = ""


@dataclass(frozen=True)
class Ranking:
    """Modes by their paired difference to the baseline (which is 0), best first. `shown`: whether any difference is.

    `figure`: the figure of the comparison that it is by; `heading`: that figure as the table names it, and where it is taken.
    Each pair is taken where its own runs are equal: at its last common steps, or at the most tokens that all of its runs saw.
    """

    axis: Literal["steps", "tokens"]
    figure: str
    baseline: str
    standings: tuple[Standing, ...]
    shown: bool
    heading: str


@dataclass(frozen=True)
class Verdict:
    """One sentence, and the lines under it: those of the rankings that could be made, or `remarks` (a heading and its lines)
    where there is nothing to test. `pairs`: tests that Holm's correction is over, those of all rankings together.
    """

    headline: str
    rankings: tuple[Ranking, ...] = ()
    remarks: tuple[str, tuple[str, ...]] | None = None
    pairs: int = 0

    @property
    def lists(self) -> list[tuple[str, tuple[str, ...]]]:
        """Headings, each with its lines (one at least)."""
        told = [(one.heading, tuple(standing.text for standing in one.standings if standing.text)) for one in self.rankings]
        return [one for one in (*told, self.remarks) if one is not None and one[1]]


def verdict(comparison: Comparison) -> Verdict:
    """The verdict of a comparison of runs that sampled their own rollouts."""
    measure = next((name for name in _MEASURES if name in comparison.outcomes), None)
    if measure is None:
        return Verdict("No verdict: neither accuracy nor reward was recorded, and pg_loss says nothing about success.")
    if len(comparison.labels) == 1:
        return Verdict(f"No verdict: {comparison.baseline} is the only mode here; there is nothing to compare it with.")
    axes: tuple[tuple[Literal["steps", "tokens"], str], ...] = (
        ("steps", _at_equal_steps(comparison, measure)),
        ("tokens", f"{measure}_at_equal_tokens"),
    )
    axes = tuple((axis, figure) for axis, figure in axes if figure in comparison.outcomes)
    p_holm = _corrected(comparison, [figure for _, figure in axes])
    rankings = tuple(_ranking(comparison, axis, figure, p_holm) for axis, figure in axes)
    return Verdict(_headline(_MEASURES[measure], rankings), rankings, pairs=_tested(p_holm))


def _corrected(comparison: Comparison, figures: Sequence[str]) -> dict[tuple[str, str], float | None]:
    """(figure, label) -> p of the paired t-test, corrected by Holm over all pairs of these figures."""
    pairs = {
        (figure, label): outcome.pair.test.p
        for figure in figures
        for label, outcome in comparison.outcomes[figure].items()
        if outcome.pair is not None
    }
    return dict(zip(pairs, holm(list(pairs.values())), strict=True))


def _tested(p_holm: Mapping[tuple[str, str], float | None]) -> int:
    return sum(p is not None for p in p_holm.values())


def _at_equal_steps(comparison: Comparison, measure: str) -> str:
    """The figure that stands for `measure` at equal steps; the module says which, and why."""
    rollouts = comparison.outcomes[measure]
    fresh = comparison.outcomes.get(f"{measure}_on_fresh_prompts", {})
    sound = all(label in fresh and _seeds(fresh[label]) == _seeds(own) for label, own in rollouts.items())
    return f"{measure}_on_fresh_prompts" if sound else measure


def _seeds(outcome: Outcome) -> int:
    """Seeds that an arm shares with the baseline in a figure."""
    return 0 if outcome.pair is None else outcome.pair.test.difference.n


def _ranking(
    comparison: Comparison,
    axis: Literal["steps", "tokens"],
    figure: str,
    p_holm: Mapping[tuple[str, str], float | None],
) -> Ranking:
    outcomes, baseline = comparison.outcomes[figure], comparison.baseline
    found = [_standing(outcome, baseline, p_holm.get((figure, label))) for label, outcome in outcomes.items()]
    found.sort(key=lambda one: (one.word == "not paired", 0.0 if one.difference is None else -one.difference.mean))
    shown = any(one.word in ("higher", "lower") for one in found)
    pairs, both = _tested(p_holm), len({figure for figure, _ in p_holm}) > 1
    corrected = f" (Holm over the {pairs} pairs{' of both lists' if both else ''})" if pairs > 1 else ""
    head, equal = comparison.figures[figure].head, f"equal {axis}"
    named = head if head.endswith(equal) else f"at {equal}, {head}"
    heading = f"{named}{_where(found, comparison.window)}, against {baseline}{corrected}"
    return Ranking(axis, figure, baseline, tuple(found), shown, heading)


def _standing(outcome: Outcome, baseline: str, p_holm: float | None) -> Standing:
    pair = outcome.pair
    if outcome.label == baseline:
        return Standing(outcome.label, outcome.mean, None, None, None, "baseline", outcome.common)
    if pair is None:
        text = f"{outcome.label}: cannot be paired with {baseline}"
        return Standing(outcome.label, outcome.mean, None, None, None, "not paired", outcome.common, text)
    difference, flip = pair.test.difference, pair.test.sign_flip
    word: Word = "no difference shown"
    if p_holm is not None and p_holm < ALPHA:
        word = "higher" if difference.mean > 0 else "lower"
    text = f"{outcome.label}: {word}, {_evidence(difference, p_holm, flip)}"
    return Standing(outcome.label, outcome.mean, difference, p_holm, flip, word, pair.common, text)


# -- in words -----------------------------------------------------------------------------------------------------------


def _headline(measure: str, rankings: Sequence[Ranking]) -> str:
    """Who is ahead and on which axis, without numbers; where nobody is, why not."""
    shown = [one for one in rankings if one.shown]
    axes = listed([f"at equal {one.axis}" for one in rankings], "or")
    if not shown:
        return _nothing_shown(measure, rankings[0], axes)
    claims = {one.axis: _claim(measure, one) for one in shown}
    if len(shown) == len(rankings) and len(set(claims.values())) == 1:
        said = f"{claims[shown[0].axis]}, {listed([f'at equal {one.axis}' for one in shown])}"
        return f"{said[0].upper()}{said[1:]}."
    parts = [
        f"at equal {one.axis}, {claims[one.axis]}" if one.shown else f"at equal {one.axis} no difference is shown"
        for one in rankings
    ]
    said = "; ".join(parts)
    return f"{said[0].upper()}{said[1:]}."


def _nothing_shown(measure: str, ranking: Ranking, axes: str) -> str:
    baseline, others = ranking.baseline, [one for one in ranking.standings if one.word == "no difference shown"]
    if not others:
        return f"No verdict: no other mode can be paired with {baseline}."
    between = f"between {baseline} and {_named(others, 'or')}"
    if all(one.p_holm is None for one in others):
        return f"One seed: no interval and no test, so no difference in {measure} can be shown {between}."
    return f"No difference in {measure} is shown {between}, {axes}."


def _claim(measure: str, ranking: Ranking) -> str:
    """`accuracy is higher under b and lower under c than under a`."""
    parts = []
    for word in ("higher", "lower"):
        those = [one for one in ranking.standings if one.word == word]
        if those:
            parts.append(f"{word} under {_named(those)}")
    return f"{measure} is {' and '.join(parts)} than under {ranking.baseline}"


def _named(standings: Sequence[Standing], last: str = "and") -> str:
    labels = [one.label for one in standings]
    return listed(labels, last) if len(labels) <= 4 else some(labels, 4)


def _where(standings: Sequence[Standing], window: float) -> str:
    """`, after step 19`, or for training rollouts what part of them it is the mean of; empty where no pair has any."""
    commons = [one.common for one in standings if one.common is not None and one.word not in ("baseline", "not paired")]
    if not commons:
        return ""
    starts, ends = sorted({common.start for common in commons}), sorted({common.end for common in commons})
    end, by_pair = f"{ends[0]:,.0f}", ""
    if len(ends) > 1:
        end, by_pair = f"{end} to {ends[-1]:,.0f}", " by pair"
    if commons[0].axis == "end":
        return f", after step {end}{by_pair}"
    share = f"{100 * window:.3g} %"
    if commons[0].axis == "tokens":
        if window == 0:
            return f", at {end} tokens{by_pair}"
        part = f"all of the {end} tokens" if window == 1 else f"the last {share} of the tokens up to {end}"
        return f", mean over {part}{by_pair}"
    if starts == ends:
        return f", step {end}{by_pair}"
    part = "all steps" if window == 1 else f"the last {share} of the steps"
    steps = f"up to {end}{by_pair}" if len(starts) > 1 or by_pair else f"{starts[0]:,.0f} to {end}"
    return f", mean of {part}, {steps}"


def _evidence(found: Interval, p_holm: float | None, flip: SignFlip | None) -> str:
    """`+0.107 [+0.078, +0.135], Holm p = 0.0039, sign-flip p = 0.25 (floor 0.25), 3 seeds`."""
    if p_holm is None or flip is None:
        return f"{found.mean:+.3g}; one seed: no interval and no test"
    tested = f"Holm p {_p(p_holm)}, sign-flip p {_p(flip.p)} (floor {flip.floor:.2g})"
    if found.low is None or found.high is None:
        return f"{found.mean:+.3g} in all {found.n} seeds, so no interval, {tested}"
    return f"{found.mean:+.3g} [{found.low:+.3g}, {found.high:+.3g}], {tested}, {found.n} seeds"


def _p(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"
