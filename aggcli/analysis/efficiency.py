"""Compute-performance curves of modes: A, B and C_mid over seeds, and the efficiency B under a common asymptote.

ScaleRL compares recipes that end within its noise margin of each other (0.02 in A) by B alone, refitted under a common A
(Khatri et al., 2025, arXiv:2510.13786). Here the common A is one of a pair, a mode and the baseline, and B is compared seed by
seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from aggcli.analysis.curves import Curve, FitOptions, Refused, fit, points_of
from aggcli.analysis.histories import AXES, History, with_labels
from aggcli.analysis.power import Power, power_of
from aggcli.analysis.sigmoid import CurveParameters, Floats, sigmoid, slopes
from aggcli.analysis.statistics import (
    SHARE,
    Bounds,
    DifferenceTest,
    Interval,
    exponential,
    geometric_interval,
    interval,
    paired_test,
    welch_test,
)


@dataclass(frozen=True)
class FittedRun:
    """A run and its curve, or why it has none."""

    run: History
    curve: Curve | Refused


@dataclass(frozen=True)
class ModeCurve:
    """A mode's curves over the seeds that have bent: `n` of the intervals is their number, and `refused` says why the rest have
    none. B and C_mid are positive: their intervals are those of their logarithms. All None where no seed has bent.
    `values`: the numbers of the seeds, by the name of the interval.
    """

    label: str
    asymptote: Interval | None
    exponent: Interval | None
    midpoint: Interval | None
    refused: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class EfficiencyPair:
    """B of a mode over B of the baseline, both fitted under one A. `ratio`: geometric mean over seeds, with its interval; of
    runs that are not paired the ratio of the geometric means; `test`: of ln B, paired by seed or not; `p_holm`: corrected over
    all tests of the comparison, None until it stands in one, as is `level`, what `test.p` must be below for a difference to be
    shown.
    """

    label: str
    baseline: str
    asymptote: float
    exponents: Mapping[str, Mapping[int, float]]
    ratio: Interval
    test: DifferenceTest
    p_holm: float | None = None
    level: float | None = None

    @property
    def power(self) -> Power | None:
        """What the pair could have shown, in ln B; None where its differences have no spread."""
        return power_of(self.test, self.level)


def fit_runs(
    runs: Sequence[History], axis: str = "tokens", measure: str = "accuracy", options: FitOptions = FitOptions()
) -> list[FittedRun]:
    """The curve of every run, of `measure` against `axis` (tokens, steps or seconds)."""
    fitted = []
    for run in runs:
        C = run.axis(axis)
        if not np.isfinite(C).any():
            fitted.append(FittedRun(run, Refused(f"the {AXES[axis]} of this run were not recorded")))
        else:
            fitted.append(FittedRun(run, fit(C, run.measures[measure], options)))
    return fitted


def _within(found: Interval, bounds: Bounds | None) -> Interval:
    if bounds is None or found.low is None or found.high is None:
        return found
    high = min(found.high, bounds[1]) if found.mean <= bounds[1] else found.high
    return dataclasses.replace(found, low=max(found.low, bounds[0]), high=high)


MOST_FITS = 40
"""Curves are fitted unasked for up to this many runs (a tenth of a second each)."""


def mode_curves(fitted: Sequence[FittedRun], measure: str = "accuracy") -> dict[str, ModeCurve]:
    """Label -> A, B and C_mid over its seeds. Of accuracy, A is a share (see `statistics.interval`); where the fit of some seed
    lies above 1, the interval is Student's, cut at 0 and 1 (a mean above 1 keeps its upper end)."""
    bounds = SHARE if measure == "accuracy" else None
    found = {}
    for label in with_labels(one.run for one in fitted):
        own = [one for one in fitted if one.run.label == label]
        bent = [one.curve for one in own if isinstance(one.curve, Curve)]
        values = {name: tuple(getattr(curve, name).mean for curve in bent) for name in ("asymptote", "exponent", "midpoint")}
        found[label] = ModeCurve(
            label,
            _within(interval(values["asymptote"], bounds), bounds) if bent else None,
            geometric_interval(values["exponent"]) if bent else None,
            geometric_interval(values["midpoint"]) if bent else None,
            tuple(
                f"{one.run.source or f'seed {one.run.seed}'}: {one.curve.reason}"
                for one in own
                if isinstance(one.curve, Refused)
            ),
            values,
        )
    return found


def efficiency(
    fitted: Sequence[FittedRun],
    baseline: str,
    axis: str = "tokens",
    measure: str = "accuracy",
    options: FitOptions = FitOptions(),
    *,
    paired: bool = True,
) -> list[EfficiencyPair]:
    """Every mode's B against the baseline's under a common A, over the seeds whose curves have bent in both; where runs are not
    `paired`, over all runs whose curves have bent."""
    curves = {(one.run.label, one.run.seed): one for one in fitted if isinstance(one.curve, Curve)}
    pairs = []
    for label in with_labels(one.run for one in fitted):
        seeds, others = ([seed for of, seed in curves if of == arm] for arm in (label, baseline))
        if paired:
            seeds = others = [seed for seed in seeds if seed in others]
        if label == baseline or not seeds or not others:
            continue
        both = [*(curves[label, seed] for seed in seeds), *(curves[baseline, seed] for seed in others)]
        asymptote, found = common_asymptote(both, axis, measure, options)
        exponents = [one.exponent for one in found]
        mine, theirs = dict(zip(seeds, exponents, strict=False)), dict(zip(others, exponents[len(seeds) :], strict=True))
        logs, against = ({seed: math.log(B) for seed, B in own.items()} for own in (mine, theirs))
        test = paired_test(logs, against) if paired else welch_test([*logs.values()], [*against.values()])
        assert test is not None
        ratio = geometric_interval([mine[seed] / theirs[seed] for seed in seeds]) if paired else exponential(test.difference)
        pairs.append(EfficiencyPair(label, baseline, asymptote, {label: mine, baseline: theirs}, ratio, test))
    return pairs


def common_asymptote(
    fitted: Sequence[FittedRun], axis: str, measure: str, options: FitOptions = FitOptions()
) -> tuple[float, list[CurveParameters]]:
    """The A under which all these runs together fit best (least squares over all points), each with its own B, C_mid and R_0.

    Starts from the runs' own fits; refused runs are left aside. Returns A and the parameters of each of the others.
    """
    from scipy import optimize  # half a second to import, and only fits come here

    bent = [(one.run, one.curve) for one in fitted if isinstance(one.curve, Curve)]
    data = [points_of(run.axis(axis), run.measures[measure]) for run, _ in bent]
    own = [curve for _, curve in bent]
    free = 3 if options.start is None else 2
    first = [float(np.mean([curve.asymptote.mean for curve in own]))]
    for curve in own:
        first += [math.log(curve.exponent.mean), math.log(curve.midpoint.mean), curve.start][:free]

    def at(p: Floats, run: int) -> CurveParameters:
        log_B, log_mid, *base = p[1 + free * run : 1 + free * (run + 1)]
        start = float(base[0]) if options.start is None else options.start
        return CurveParameters(start, float(p[0]), math.exp(min(log_B, 30.0)), math.exp(min(log_mid, 700.0)))

    def residuals(p: Floats) -> Floats:
        return np.concatenate([sigmoid(C, *at(p, run)) - R for run, (C, R) in enumerate(data)])

    def jacobian(p: Floats) -> Floats:
        blocks = []
        for run, (C, _) in enumerate(data):
            by = slopes(C, at(p, run))
            block = np.zeros((len(C), len(p)))
            block[:, 0] = by[:, 0]
            block[:, 1 + free * run : 1 + free * (run + 1)] = by[:, 1 : 1 + free]
            blocks.append(block)
        return np.concatenate(blocks)

    found = optimize.least_squares(residuals, first, jac=jacobian, x_scale="jac", max_nfev=200)  # pyright: ignore[reportArgumentType]
    return float(found.x[0]), [at(found.x, run) for run in range(len(data))]
