"""Which mode is ahead, in words: by accuracy (or reward) at equal steps and at equal tokens, and never by pg_loss.

pg_loss is no measure of success: its scale is the mode's own, and at the start of a step it is near 0 for every mode whatever
the policy has learned. A mode is called ahead or behind when the paired t-test against the baseline is below 5 %, corrected by
Holm over all pairs of the verdict, those at equal steps and at equal tokens together: runs that differ in nothing are then told
apart in 5 % of verdicts at most, and not in 5 % of rankings (`experiments/05-null-calibration.py` counts it). Otherwise no
difference is shown, which is not the same as none being there. Modes other than the baseline are not tested against each other,
and no word says so.

What the table shows besides is named in the headline too, so that it never says less than the numbers under it: every other
outcome with a difference below 5 %, each tested by itself. Of many such outcomes some will differ by chance, and so none of
them makes a mode the better one.

At equal steps the verdict is by accuracy on fresh prompts where that is sound: every compared run was evaluated at its end, all
were trained for the same number of steps, and the pairs have the same seeds as in the training rollouts. Then it is the better
measure: it is of the policy that training ended with, and not a mean over those of the last tenth of the steps; the prompts and
the noise are the same for every mode of a seed; and nothing has chosen among the rollouts, as dynamic sampling does when it
drops groups of equal rewards. Otherwise the verdict is by the training rollouts of the last common steps. What was recorded
decides, never what came out, and the other one stands in the table. At equal tokens it is always by training rollouts: a run
is evaluated once, at the tokens that it happened to end with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from aggcli.analysis.comparison import Comparison, Estimate
from aggcli.analysis.efficiency import EfficiencyPair
from aggcli.analysis.outcomes import Common
from aggcli.analysis.statistics import CONFIDENCE, Interval, SignFlip, holm
from aggcli.errors import some
from aggcli.measurement.words import listed

ALPHA = 1 - CONFIDENCE
_MOST_OTHERS = 4
"""Outcomes outside of the rankings that the headline names; the rest are counted."""
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

    `outcome`: what it is by, a name in the comparison; `heading`: that as the table names it, and where it is taken. Each
    pair is taken where its own runs are equal: at its last common steps, or at the most tokens that all of its runs saw.
    """

    axis: Literal["steps", "tokens"]
    outcome: str
    baseline: str
    standings: tuple[Standing, ...]
    shown: bool
    heading: str


@dataclass(frozen=True)
class Other:
    """An outcome outside of the rankings in which these arms differ from the baseline, tested by itself; `name` as in the
    table.
    """

    name: str
    outcome: str
    higher: tuple[str, ...]
    lower: tuple[str, ...]

    @property
    def text(self) -> str:
        """`tokens to accuracy 0.75 (lower under b, higher under c and d)`."""
        sides = (("lower", self.lower), ("higher", self.higher))
        return f"{self.name} ({', '.join(f'{word} under {_few(labels)}' for word, labels in sides if labels)})"


@dataclass(frozen=True)
class Verdict:
    """A headline, and the lines under it: those of the rankings that could be made, or `remarks` (a heading and its lines)
    where there is nothing to test. `pairs`: tests that Holm's correction is over, those of all rankings together; `others`:
    what else the table shows; `warnings`: what stands before all of it.
    """

    headline: str
    rankings: tuple[Ranking, ...] = ()
    remarks: tuple[str, tuple[str, ...]] | None = None
    pairs: int = 0
    others: tuple[Other, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def lists(self) -> list[tuple[str, tuple[str, ...]]]:
        """Headings, each with its lines (one at least)."""
        told = [(one.heading, tuple(standing.text for standing in one.standings if standing.text)) for one in self.rankings]
        return [one for one in (*told, self.remarks) if one is not None and one[1]]


def verdict(comparison: Comparison, ratios: Sequence[EfficiencyPair] = ()) -> Verdict:
    """The verdict of a comparison of runs that sampled their own rollouts. `ratios`: the exponents of their fitted curves."""
    measure = next((name for name in _MEASURES if name in comparison.outcomes), None)
    if measure is None:
        return Verdict("No verdict: neither accuracy nor reward was recorded, and pg_loss says nothing about success.")
    if len(comparison.labels) == 1:
        return Verdict(f"No verdict: {comparison.baseline} is the only mode here; there is nothing to compare it with.")
    axes: tuple[tuple[Literal["steps", "tokens"], str], ...] = (
        ("steps", _at_equal_steps(comparison, measure)),
        ("tokens", f"{measure}_at_equal_tokens"),
    )
    axes = tuple((axis, outcome) for axis, outcome in axes if outcome in comparison.outcomes)
    p_holm = _corrected(comparison, [outcome for _, outcome in axes])
    rankings = tuple(_ranking(comparison, axis, outcome, p_holm) for axis, outcome in axes)
    ranked = {outcome for _, outcome in axes}
    others, tested = tuple(_others(comparison, ranked, ratios)), _tested_besides(comparison, ranked, ratios)
    said = " ".join(filter(None, (_headline(_MEASURES[measure], rankings), _others_in_words(others, tested))))
    return Verdict(said, rankings, pairs=_tested(p_holm), others=others)


def with_verdict_p(comparison: Comparison, found: Verdict) -> Comparison:
    """The comparison with the p-values of the verdict on the outcomes that it ranks by: one number has one p wherever it is."""
    p_holm = {(one.outcome, standing.label): standing.p_holm for one in found.rankings for standing in one.standings}
    outcomes = {
        name: {
            label: replace(one, pair=replace(one.pair, p_holm=p_holm[name, label]))
            if one.pair is not None and (name, label) in p_holm
            else one
            for label, one in of_arm.items()
        }
        for name, of_arm in comparison.outcomes.items()
    }
    return replace(comparison, outcomes=outcomes)


def _corrected(comparison: Comparison, ranked: Sequence[str]) -> dict[tuple[str, str], float | None]:
    """(outcome, label) -> p of the paired t-test, corrected by Holm over all pairs of these outcomes."""
    pairs = {
        (name, label): estimate.pair.test.p
        for name in ranked
        for label, estimate in comparison.outcomes[name].items()
        if estimate.pair is not None
    }
    return dict(zip(pairs, holm(list(pairs.values())), strict=True))


def _tested(p_holm: Mapping[tuple[str, str], float | None]) -> int:
    return sum(p is not None for p in p_holm.values())


def _at_equal_steps(comparison: Comparison, measure: str) -> str:
    """The outcome that stands for `measure` at equal steps; the module says which, and why."""
    rollouts = comparison.outcomes[measure]
    fresh = comparison.outcomes.get(f"{measure}_on_fresh_prompts", {})
    sound = all(label in fresh and _seeds(fresh[label]) == _seeds(own) for label, own in rollouts.items())
    return f"{measure}_on_fresh_prompts" if sound else measure


def _seeds(outcome: Estimate) -> int:
    """Seeds that an arm shares with the baseline in an outcome."""
    return 0 if outcome.pair is None else outcome.pair.test.difference.n


def _ranking(
    comparison: Comparison,
    axis: Literal["steps", "tokens"],
    outcome: str,
    p_holm: Mapping[tuple[str, str], float | None],
) -> Ranking:
    outcomes, baseline = comparison.outcomes[outcome], comparison.baseline
    found = [_standing(one, baseline, p_holm.get((outcome, label))) for label, one in outcomes.items()]
    found.sort(key=lambda one: (one.word == "not paired", 0.0 if one.difference is None else -one.difference.mean))
    shown = any(one.word in ("higher", "lower") for one in found)
    pairs, both = _tested(p_holm), len({outcome for outcome, _ in p_holm}) > 1
    corrected = f" (Holm over the {pairs} pairs{' of both lists' if both else ''})" if pairs > 1 else ""
    head, equal = comparison.defined[outcome].head, f"equal {axis}"
    named = head if head.endswith(equal) else f"at {equal}, {head}"
    heading = f"{named}{_where(found, comparison.window)}, against {baseline}{corrected}"
    return Ranking(axis, outcome, baseline, tuple(found), shown, heading)


def _standing(outcome: Estimate, baseline: str, p_holm: float | None) -> Standing:
    pair = outcome.pair
    if outcome.label == baseline:
        return Standing(outcome.label, outcome.mean, None, None, None, "baseline", outcome.common)
    if pair is None:
        text = f"{outcome.label}: {outcome.unpaired or f'cannot be paired with {baseline}'}"
        return Standing(outcome.label, outcome.mean, None, None, None, "not paired", outcome.common, text)
    difference, flip = pair.test.difference, pair.test.sign_flip
    word: Word = "no difference shown"
    if _is_shown(p_holm):
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


def _others(comparison: Comparison, ranked: set[str], ratios: Sequence[EfficiencyPair]) -> Iterator[Other]:
    """What success there is besides comes first, then what only describes the policies."""
    names = sorted(comparison.outcomes.keys() - ranked, key=list(comparison.outcomes).index)
    for name in sorted(names, key=lambda name: comparison.defined[name].better is None):
        pairs = {label: one.pair for label, one in comparison.outcomes[name].items() if one.pair is not None}
        signs = {label: pair.test.difference.mean for label, pair in pairs.items() if _is_shown(pair.p_holm)}
        if signs:
            yield _other(comparison.named(name), name, signs)
    signs = {one.label: math.log(one.ratio.mean) for one in ratios if _is_shown(one.p_holm)}
    if signs:
        yield _other("efficiency exponent B under a common A", "curve/exponent_ratio", signs)


def _tested_besides(comparison: Comparison, ranked: set[str], ratios: Sequence[EfficiencyPair]) -> int:
    """How many outcomes outside of the rankings have a p-value."""
    names = comparison.outcomes.keys() - ranked
    found = [
        any(e.pair is not None and e.pair.p_holm is not None for e in comparison.outcomes[name].values()) for name in names
    ]
    return sum(found) + any(one.p_holm is not None for one in ratios)


def _other(named: str, name: str, signs: Mapping[str, float]) -> Other:
    sides = ([label for label, sign in signs.items() if (sign > 0) == up] for up in (True, False))
    return Other(named, name, *map(tuple, sides))


def _is_shown(p: float | None) -> bool:
    return p is not None and p < ALPHA


def _others_in_words(others: Sequence[Other], tested: int) -> str:
    """`Of the 12 other outcomes, each tested by itself at 5 %, ...`; empty without any. `tested`: how many were."""
    if not others:
        return ""
    told = [one.text for one in others[:_MOST_OTHERS]]
    more = [f"{len(others) - _MOST_OTHERS} more in the table"] if len(others) > _MOST_OTHERS else []
    differ = "this differs" if len(others) == 1 else "these differ"
    by_chance = f"about {ALPHA * tested:.2g} of {tested} would by chance"
    return f"Of the other outcomes, each tested by itself at 5 % ({by_chance}), {differ}: {listed([*told, *more])}."


def _few(labels: Sequence[str], last: str = "and") -> str:
    return listed(list(labels), last) if len(labels) <= 4 else some(labels, 4)


def _claim(measure: str, ranking: Ranking) -> str:
    """`accuracy is higher under b and lower under c than under a`."""
    parts = []
    for word in ("higher", "lower"):
        those = [one for one in ranking.standings if one.word == word]
        if those:
            parts.append(f"{word} under {_named(those)}")
    return f"{measure} is {' and '.join(parts)} than under {ranking.baseline}"


def _named(standings: Sequence[Standing], last: str = "and") -> str:
    return _few([one.label for one in standings], last)


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
