"""Which mode is ahead: the answer in a few sentences, and under it accuracy (or reward) at equal steps and at equal tokens.

Never by pg_loss, which is no measure of success: its scale is the mode's own, and at the start of a step it is near 0 for every
mode whatever the policy has learned. A mode is called higher or lower when the paired t-test against the baseline is below 5 %,
corrected by Holm over every test of the comparison, all outcomes and modes together (`aggcli.analysis.comparison`): runs that
differ in nothing are then told apart, in any outcome, in 5 % of comparisons at most (`experiments/05-null-calibration.py`
counts it). Otherwise no difference is shown, which is not the same as none being there: beside it stands what could have been
shown. Modes other than the baseline are not tested against each other, and no word says so.

At equal steps the ranking is by accuracy on fresh prompts where that is sound: every compared run was evaluated at its end, all
were trained for the same number of steps, and the pairs have the same seeds as in the training rollouts. Then it is the better
measure: it is of the policy that training ended with, and not a mean over those of the last tenth of the steps; the prompts and
the noise are the same for every mode of a seed; and nothing has chosen among the rollouts, as dynamic sampling does when it
drops groups of equal rewards. Otherwise the ranking is by the training rollouts of the last common steps. What was recorded
decides, never what came out, and the other one stands in the table. At equal tokens it is always by training rollouts: a run
is evaluated once, at the tokens that it happened to end with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aggcli.analysis.answer import Answer
from aggcli.analysis.comparison import Comparison, Estimate, Pair
from aggcli.analysis.outcomes import Common
from aggcli.analysis.power import Power
from aggcli.analysis.statistics import Interval, SignFlip
from aggcli.measurement.words import number, plural, signed

_MEASURES = ("accuracy", "raw_reward")
"""What modes are ranked by: the first of these that was measured."""

Word = Literal["baseline", "higher", "lower", "no difference shown", "not paired"]


@dataclass(frozen=True)
class Standing:
    """A mode's place. `difference`: to the baseline, paired by seed; `p_holm`: corrected over all tests of the comparison;
    `word`: what is shown of it at 5 % after that; `text`: the same as a line to read, empty for the baseline; `power`: what
    could have been shown, where no difference is.
    """

    label: str
    mean: float
    difference: Interval | None
    p_holm: float | None
    sign_flip: SignFlip | None
    word: Word
    common: Common | None
    text: str = ""
    power: Power | None = None


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
class Verdict:
    """The answer, and the lines under it: those of the rankings that could be made, or `remarks` (a heading and its lines)
    where there is nothing to test. `warnings`: what stands before all of it; `plan`: how many seeds a difference takes, where
    that was asked for.
    """

    answer: Answer
    rankings: tuple[Ranking, ...] = ()
    remarks: tuple[str, tuple[str, ...]] | None = None
    warnings: tuple[str, ...] = ()
    plan: tuple[str, tuple[str, ...]] | None = None

    @property
    def lists(self) -> list[tuple[str, tuple[str, ...]]]:
        """Headings, each with its lines (one at least)."""
        told = [(one.heading, tuple(standing.text for standing in one.standings if standing.text)) for one in self.rankings]
        return [one for one in (self.plan, *told, self.remarks) if one is not None and one[1]]


def rankings_of(comparison: Comparison) -> tuple[Ranking, ...]:
    """The rankings of a comparison of runs that sampled their own rollouts; none without success or another mode."""
    measure = next((name for name in _MEASURES if name in comparison.outcomes), None)
    if measure is None or len(comparison.labels) == 1:
        return ()
    axes: tuple[tuple[Literal["steps", "tokens"], str], ...] = (
        ("steps", outcome_at_equal_steps(comparison, measure)),
        ("tokens", f"{measure}_at_equal_tokens"),
    )
    return tuple(_ranking(comparison, axis, outcome) for axis, outcome in axes if outcome in comparison.outcomes)


def outcome_at_equal_steps(comparison: Comparison, measure: str) -> str:
    """The outcome that stands for `measure` at equal steps; the module says which, and why."""
    rollouts = comparison.outcomes[measure]
    fresh = comparison.outcomes.get(f"{measure}_on_fresh_prompts", {})
    sound = all(label in fresh and _seeds(fresh[label]) == _seeds(own) for label, own in rollouts.items())
    return f"{measure}_on_fresh_prompts" if sound else measure


def _seeds(outcome: Estimate) -> int:
    """Seeds that an arm shares with the baseline in an outcome."""
    return 0 if outcome.pair is None else outcome.pair.test.difference.n


def _ranking(comparison: Comparison, axis: Literal["steps", "tokens"], outcome: str) -> Ranking:
    baseline = comparison.baseline
    found = [_standing(one, baseline) for one in comparison.outcomes[outcome].values()]
    found.sort(key=lambda one: (one.word == "not paired", 0.0 if one.difference is None else -one.difference.mean))
    shown = any(one.word in ("higher", "lower") for one in found)
    tests = f" (Holm over the {comparison.tests} tests of this comparison)" if comparison.tests > 1 else ""
    head, equal = comparison.defined[outcome].head, f"equal {axis}"
    named = head if head.endswith(equal) else f"at {equal}, {head}"
    heading = f"{named}{_where(found, comparison.window)}, against {baseline}{tests}"
    return Ranking(axis, outcome, baseline, tuple(found), shown, heading)


def _standing(outcome: Estimate, baseline: str) -> Standing:
    pair = outcome.pair
    if outcome.label == baseline:
        return Standing(outcome.label, outcome.mean, None, None, None, "baseline", outcome.common)
    if pair is None:
        text = f"{outcome.label}: {outcome.unpaired or f'cannot be paired with {baseline}'}"
        return Standing(outcome.label, outcome.mean, None, None, None, "not paired", outcome.common, text)
    difference, flip = pair.test.difference, pair.test.sign_flip
    word: Word = "no difference shown"
    if pair.shown:
        word = "higher" if difference.mean > 0 else "lower"
    power = None if pair.shown else pair.power
    told = word if pair.test.runs is None or pair.p_holm is not None else "not tested"
    text = f"{outcome.label}: {told}, {_evidence(pair)}{could_show(power)}"
    return Standing(outcome.label, outcome.mean, difference, pair.p_holm, flip, word, pair.common, text, power)


# -- in words -----------------------------------------------------------------------------------------------------------


def could_show(power: Power | None) -> str:
    """`; smallest difference at 80 % power 0.021, half of it with 14 seeds`; empty without."""
    if power is None:
        return ""
    if not power.possible:
        return "; at this spread no possible difference would have been shown with 80 % power"
    half = "" if power.seeds_for_half is None else f", half of it with {power.seeds_for_half} {power.each}"
    return f"; smallest difference at 80 % power {number(power.smallest, 3)}{half}"


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


def _evidence(pair: Pair) -> str:
    """`+0.107 [+0.078, +0.135], Holm p = 0.0039, sign-flip p = 0.25 (floor 0.25), 3 seeds`; of runs that are not paired
    `+0.107 [+0.078, +0.135], Holm p = 0.0039, 3 runs against 4`."""
    found, p_holm, flip = pair.test.difference, pair.p_holm, pair.test.sign_flip
    mean = signed(found.mean, 3)
    if pair.test.runs is not None:
        counts = f"{plural(pair.test.runs[0], 'run')} against {pair.test.runs[1]}"
        if p_holm is None or found.low is None or found.high is None:
            return f"{mean}, {counts}: no interval and no test"
        return f"{mean} [{signed(found.low, 3)}, {signed(found.high, 3)}], Holm p {_p(p_holm)}, {counts}"
    if p_holm is None or flip is None:
        return f"{mean}; one seed: no interval and no test"
    tested = f"Holm p {_p(p_holm)}, sign-flip p {_p(flip.p)} (floor {flip.floor:.2g})"
    if found.low is None or found.high is None:
        return f"{mean} in all {found.n} seeds, so no interval, {tested}"
    return f"{mean} [{signed(found.low, 3)}, {signed(found.high, 3)}], {tested}, {plural(found.n, 'seed')}"


def _p(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"= {value:.2g}"
