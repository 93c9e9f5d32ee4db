"""The outcomes of a comparison: per arm over its seeds, and paired with the baseline's, seed by seed.

Every number of an arm, and every difference of a pair, is made from the runs of that arm or pair alone: another arm beside
them changes none. Only Holm's correction counts them: one family is all pairs of all outcomes, and the exponents of fitted
curves where there are any, so that runs which differ in nothing are told apart anywhere in 5 % of comparisons at most. The p
of a pair is that one wherever it stands, and a difference is called shown where it is below 5 %.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggcli.analysis.efficiency import EfficiencyPair
from aggcli.analysis.histories import History, with_labels
from aggcli.analysis.outcomes import (
    LOGGED_BEFORE,
    OUTCOMES,
    WINDOW,
    Common,
    Outcome,
    Terms,
    bounds_of,
    default_reach,
    span_of,
    steps_to_reach,
    steps_trained,
    values_in,
)
from aggcli.analysis.power import Power, power_of
from aggcli.analysis.statistics import (
    Bounds,
    DifferenceTest,
    Interval,
    holm,
    holm_levels,
    interquartile_mean,
    interval,
    is_shown,
    paired_test,
    standard_deviation,
    welch_test,
)
from aggcli.errors import SettingError, nearest, some
from aggcli.measurement.words import plural


@dataclass(frozen=True)
class Pair:
    """An arm against the baseline. `mean` and `baseline_mean`: the two whose difference it is, over the pair's seeds (all runs
    where these are not paired) and where its own runs are equal; `p_holm` and `sign_flip_holm`: corrected over all tests of the
    comparison; `level`: what `test.p` must be below for a difference to be shown, given the other tests; None where there is no
    test; `most`: the largest difference that there can be.
    """

    baseline: str
    common: Common | None
    test: DifferenceTest
    mean: float
    baseline_mean: float
    p_holm: float | None = None
    sign_flip_holm: float | None = None
    level: float | None = None
    most: float = math.inf

    @property
    def shown(self) -> bool:
        """Whether a difference is."""
        return is_shown(self.p_holm)

    @functools.cached_property
    def power(self) -> Power | None:
        """What the pair could have shown; None where its differences have no spread."""
        return power_of(self.test, self.level, self.most)


@dataclass(frozen=True)
class Estimate:
    """An outcome of an arm: `values` a seed, their mean with its interval, and the pair where it is not the baseline's own;
    `unpaired`: why there is none. The mean is arithmetic; the interval of a share stays within 0 and 1 (`statistics.interval`),
    and that of a length below the response limit, where it is known.
    """

    label: str
    values: Mapping[int, float]
    mean: float
    std: float | None
    low: float | None
    high: float | None
    interquartile_mean: float | None
    common: Common | None
    pair: Pair | None = None
    unpaired: str = ""

    def without(self, each: str = "seed") -> str:
        """Why the mean has no interval; empty where it has one."""
        return Interval(self.mean, self.low, self.high, len(self.values)).without(each)


@dataclass(frozen=True)
class Comparison:
    """`outcomes`: name -> label -> estimate, the baseline first; without the outcomes and arms that have nothing to show.

    `defined`: what each of them is, by name; `window`: the share of the common range that they are means of; `length_unit`:
    what the lengths are counted in; `recorded`: whether the rollouts were recorded before, so that nothing was left to chance.
    `ratios`: the exponents of fitted curves, which are tested too; `tests`: how many tests Holm's correction is over; `paired`:
    whether arms are compared seed by seed, or run against run without pairs; `of_others`: whether runs are among them that
    other trainers made, whose arms may differ in anything.
    """

    baseline: str
    labels: tuple[str, ...]
    outcomes: Mapping[str, Mapping[str, Estimate]]
    reach: float | None
    notes: tuple[str, ...]
    defined: Mapping[str, Outcome] = dataclasses.field(default_factory=lambda: OUTCOMES)
    window: float = WINDOW
    length_unit: str = "tokens"
    recorded: bool = False
    ratios: tuple[EfficiencyPair, ...] = ()
    tests: int = 0
    paired: bool = True
    of_others: bool = False

    @property
    def each(self) -> str:
        """What a number of an arm is of: a seed, or a run whose seed is not known."""
        return "seed" if self.paired else "run"

    @property
    def arm(self) -> str:
        """What is compared: modes, or arms that may differ in anything."""
        return "arm" if self.of_others else "mode"

    def named(self, outcome: str) -> str:
        """An outcome as the table names it: `tokens to accuracy 0.75`."""
        head = self.defined[outcome].head
        return f"{head} {self.reach:g}" if outcome == "tokens_to_accuracy" and self.reach is not None else head


def compare(
    runs: Sequence[History],
    baseline: str | None = None,
    *,
    window: float = WINDOW,
    reach: float | None = None,
    ends: Mapping[str, Mapping[Path, float]] | None = None,
    ratios: Sequence[EfficiencyPair] = (),
    paired: bool = True,
) -> Comparison:
    """Every outcome of every arm. `baseline`: its label, default the first; `reach`: the accuracy of tokens_to_accuracy.

    `window`: share of the common range that an outcome is the mean of; 0 takes the last point alone. `ends`: what
    `aggcli.analysis.evaluations` read of the policies that the runs ended with; `ratios`: the exponents of their fitted curves,
    tested with the rest; `paired`: by seed, else all runs of an arm against all of the baseline (Welch's test). Raises
    `SettingError` for a baseline that is not among the labels.
    """
    arms = arms_of(runs, baseline)
    base = next(iter(arms))
    terms = Terms(window, default_reach(arms[base], window) if reach is None else reach, ends or {})
    outcomes: dict[str, dict[str, Estimate]] = {}
    of_others = any(run.source for run in runs)
    defined = {**OUTCOMES, "tokens": LOGGED_BEFORE} if of_others else OUTCOMES
    for outcome in defined.values():
        if outcome.measure == "raw_reward" and _reward_is_accuracy(runs):
            continue
        found = {label: _estimate(outcome, label, own, terms) for label, own in arms.items()}
        present = {label: estimate for label, estimate in found.items() if estimate is not None}
        if present:
            outcomes[outcome.name] = _with_pairs(outcome, present, arms, base, terms, _pair if paired else _unpaired)
    notes = [*_notes(arms, base, outcomes, paired), *_not_reached(arms, outcomes, terms.reach), *_all_wrong(outcomes)]
    notes += _unequal_ends(arms, base) if terms.ends else []
    found = Comparison(base, tuple(arms), outcomes, terms.reach, tuple(notes), defined, window)
    return _corrected(dataclasses.replace(found, ratios=tuple(ratios), paired=paired, of_others=of_others))


def _corrected(comparison: Comparison) -> Comparison:
    """The comparison with its tests corrected together."""
    pairs = {
        (name, label): estimate.pair
        for name, of_arm in comparison.outcomes.items()
        for label, estimate in of_arm.items()
        if estimate.pair is not None
    }
    tests = [*(pair.test for pair in pairs.values()), *(one.test for one in comparison.ratios)]
    p_holm = holm([test.p for test in tests])
    flips = holm([None if test.sign_flip is None else test.sign_flip.p for test in tests])
    levels = holm_levels(p_holm)
    done = {
        at: dataclasses.replace(pair, p_holm=p_holm[k], sign_flip_holm=flips[k], level=levels[k])
        for k, (at, pair) in enumerate(pairs.items())
    }
    outcomes = {
        name: {label: dataclasses.replace(one, pair=done.get((name, label))) for label, one in of_arm.items()}
        for name, of_arm in comparison.outcomes.items()
    }
    ratios = tuple(
        dataclasses.replace(one, p_holm=p_holm[k], level=levels[k]) for k, one in enumerate(comparison.ratios, len(pairs))
    )
    tested = sum(p is not None for p in p_holm)
    return dataclasses.replace(comparison, outcomes=outcomes, ratios=ratios, tests=tested)


def arms_of(runs: Sequence[History], baseline: str | None) -> dict[str, list[History]]:
    """Runs by label, the baseline (default: the first) first. Raises `SettingError` for one that is not among them."""
    arms = with_labels(runs)
    base = baseline or next(iter(arms))
    if base not in arms:
        raise SettingError(f"--baseline {base}: is not among the compared runs{nearest(base, arms)}")
    return {base: arms[base], **arms}


def estimate_of(
    outcome: Outcome, label: str, values: Mapping[int, float], common: Common | None, bounds: Bounds | None = None
) -> Estimate:
    """The estimate of an arm's values of an outcome, one a seed (at least one), cut at the upper end of `bounds`."""
    own = list(values.values())
    found = interval(own, outcome.bounds, up_to=outcome.up_to)
    high = found.high if bounds is None or found.high is None else min(found.high, bounds[1])
    return Estimate(label, values, found.mean, standard_deviation(own), found.low, high, interquartile_mean(own), common)


def _estimate(outcome: Outcome, label: str, runs: Sequence[History], terms: Terms) -> Estimate | None:
    span = span_of(outcome, runs, terms.window)
    values = values_in(outcome, runs, span, terms)
    return estimate_of(outcome, label, values, span and span.common, bounds_of(outcome, runs)) if values else None


def _with_pairs(
    outcome: Outcome,
    present: Mapping[str, Estimate],
    arms: Mapping[str, Sequence[History]],
    base: str,
    terms: Terms,
    against: Callable[[Outcome, Sequence[History], Sequence[History], Terms], Pair | str],
) -> dict[str, Estimate]:
    done = {}
    for label, estimate in present.items():
        pair = against(outcome, arms[label], arms[base], terms) if label != base else None
        unpaired = pair if isinstance(pair, str) else ""
        done[label] = dataclasses.replace(estimate, pair=pair if isinstance(pair, Pair) else None, unpaired=unpaired)
    return done


def _pair(outcome: Outcome, arm: Sequence[History], base: Sequence[History], terms: Terms) -> Pair | str:
    """The pair, or why there is none."""
    shared = {run.seed for run in arm} & {run.seed for run in base}
    mine, theirs = ([run for run in runs if run.seed in shared] for runs in (arm, base))
    if not shared:
        return f"not paired: no seed in common with {base[0].label}"
    span = span_of(outcome, [*mine, *theirs], terms.window)
    values, against = (values_in(outcome, runs, span, terms) for runs in (mine, theirs))
    bounds = bounds_of(outcome, [*mine, *theirs])
    test, seeds = paired_test(values, against, bounds), values.keys() & against.keys()
    if test is None:
        return f"not paired: no seed has a number in both it and {base[0].label} where they are equal"
    means = (interval([of[seed] for seed in sorted(seeds)]).mean for of in (values, against))
    most = math.inf if bounds is None else bounds[1] - bounds[0]
    return Pair(base[0].label, span and span.common, test, *means, most=most)


def _unpaired(outcome: Outcome, arm: Sequence[History], base: Sequence[History], terms: Terms) -> Pair | str:
    """All runs of the arm against all of the baseline where they are equal, or why they are not compared."""
    span, bounds = span_of(outcome, [*arm, *base], terms.window), bounds_of(outcome, [*arm, *base])
    mine, theirs = (list(values_in(outcome, runs, span, terms).values()) for runs in (arm, base))
    if not mine or not theirs:
        return f"not compared: no run of it or of {base[0].label} has a number where they are equal"
    means = (interval(own).mean for own in (mine, theirs))
    most = math.inf if bounds is None else bounds[1] - bounds[0]
    return Pair(base[0].label, span and span.common, welch_test(mine, theirs, bounds), *means, most=most)


def _reward_is_accuracy(runs: Sequence[History]) -> bool:
    """Whether the reward is 1 for right and 0 for wrong, so that its mean is the accuracy."""
    return all(
        np.allclose(run.measures["raw_reward"], run.measures["accuracy"], rtol=0, atol=1e-9, equal_nan=True) for run in runs
    )


# -- what is said beside the numbers ----------------------------------------------------------------------------------


def _notes(
    arms: Mapping[str, Sequence[History]], base: str, outcomes: Mapping[str, Mapping[str, Estimate]], paired: bool
) -> list[str]:
    said = []
    for label, runs in arms.items():
        seeds = {run.seed for run in runs}
        shared = seeds & {run.seed for run in arms[base]}
        if paired and not shared:
            said.append(f"{label} and {base} have no seed in common, so they are not paired")
        elif paired and label != base and len(shared) < max(len(seeds), len(arms[base])):
            said.append(f"{label} and {base} are paired by the {plural(len(shared), 'seed')} that both have")
        holes = [run for run in runs if np.isnan(run.tokens).any() and not run.source]
        if holes:
            said.append(f"{label}: no tokens are counted behind a missing step, in {len(holes)} of {plural(len(runs), 'run')}")
    for label, estimate in next(iter(outcomes.values()), {}).items():
        own, paired_with = estimate.common, estimate.pair.common if estimate.pair else None
        for against, common in (("", own), (f" and {base}", paired_with)):
            if common is not None and common.dropped:
                steps = plural(common.points, "common step")
                said.append(f"{label}{against}: {steps}; {plural(common.dropped, 'is', 'are')} missing in some run, left out")
    return said


def _not_reached(
    arms: Mapping[str, Sequence[History]], outcomes: Mapping[str, Mapping[str, Estimate]], reach: float | None
) -> list[str]:
    """Which runs have no tokens to the accuracy `reach`: those that never reach it, and those whose tokens are not known."""
    if reach is None or "accuracy" not in outcomes:
        return []
    found = outcomes.get("tokens_to_accuracy", {})
    reached = {label: [run for run in runs if math.isfinite(steps_to_reach(run, reach))] for label, runs in arms.items()}
    if not found and not any(reached.values()):
        return [f"no run reaches an accuracy of {reach:g}"]
    said = []
    for label, runs in arms.items():
        there, total = len(reached[label]), plural(len(runs), "run")
        if (told := len(found[label].values) if label in found else 0) < there:
            said.append(
                f"{label}: {there} of {total} reached an accuracy of {reach:g};"
                f" the tokens that it took are known of {told or 'none'}"
            )
        elif not there:
            said.append(f"{label}: none of its {total} reached an accuracy of {reach:g}")
        elif there < len(runs):
            said.append(
                f"{label}: only {there} of {total} reached the accuracy, so its tokens to accuracy are those of the faster ones"
            )
    return said


def _all_wrong(outcomes: Mapping[str, Mapping[str, Estimate]]) -> list[str]:
    ends = [value for estimate in outcomes.get("accuracy", {}).values() for value in estimate.values.values()]
    if not ends or any(ends):
        return []
    return [
        "every run ends at an accuracy of 0 in its training rollouts: the policies have collapsed or never learned, and no mode"
        " can be told from another by it"
    ]


def _unequal_ends(arms: Mapping[str, Sequence[History]], base: str) -> list[str]:
    """Where the policies that training ended with cannot be compared, since they had different numbers of steps."""
    steps = {label: sorted({steps_trained(run) for run in runs}) for label, runs in arms.items()}
    said = []
    for label, own in steps.items():
        if len(own) > 1:
            said.append(
                f"{label}: its runs were trained for {some(own)} steps, so the policies they ended with are not averaged"
            )
        elif own != steps[base]:
            said.append(
                f"{label} was trained for {plural(own[0], 'step')} and {base} for {some(steps[base])}, so the policies they"
                " ended with are not compared"
            )
    return said
