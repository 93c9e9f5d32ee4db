"""Compute-performance curves of single runs, as ScaleRL fits them (Khatri et al., 2025, arXiv:2510.13786).

    R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

R_C: reward or accuracy after compute C (tokens, steps or seconds); R_0: at the start; A: the asymptote that it approaches; C_mid:
compute at half of the gain; B: the efficiency exponent. The paper's method is kept: a grid over A and C_mid, the exponent
solved at each cell, the cell with the least sum of squared residuals. The solve is Gauss-Newton in ln B for all cells at once,
in place of one `scipy.optimize.curve_fit` a cell; the best cell is then polished by `curve_fit`, which gives the intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from aggcli.analysis.statistics import CONFIDENCE, Interval

Floats = NDArray[np.float64]

MOST_POINTS = 100
"""Longer curves are averaged in this many groups of consecutive points; a group keeps its mean compute and mean reward."""
LEAST_POINTS = 8
BENT_ALPHA = 0.01
"""A curve counts as bent when an F-test at this level prefers the sigmoid to the power law that it is before it bends."""
_EXPONENTS = (0.05, 20.0)


@dataclass(frozen=True)
class Grid:
    """The cells of the search: `asymptotes` [I] in the unit of the reward, `midpoints` [J] in the unit of the compute."""

    asymptotes: Floats
    midpoints: Floats


PAPER_GRID = Grid(np.round(np.arange(0.450, 0.8001, 0.005), 3), np.linspace(100.0, 40000.0, 100))
"""The paper's own, for pass rates against GPU-hours: A in 0.450, 0.455, ..., 0.800 and 100 values of C_mid in [100, 40000]."""


@dataclass(frozen=True)
class FitOptions:
    """How a curve is fitted."""

    skip: float = 0.0
    """The early part that is left out: points with compute below this. (The paper: about the first 1,500 GPU-hours.)"""
    start: float | None = None
    """R_0, where it is known; None fits it along, as the least-squares value at every cell."""
    grid: Grid | None = None
    """Cells to search; None makes them from the range of the data."""
    polish: bool = True
    """Start from the best cell and fit A, C_mid and B (and R_0) freely; False keeps the cell, as the paper does: no intervals."""


@dataclass(frozen=True)
class Curve:
    """A fitted curve. The intervals are 95 %, from the covariance of the residuals (C_mid's and B's by their logarithms);
    their `n` is the number of points. `residual`: standard deviation of the points around the curve.
    """

    start: float
    asymptote: Interval
    exponent: Interval
    midpoint: Interval
    residual: float
    points: int

    def at(self, compute: ArrayLike) -> Floats:
        """R_C at these computes."""
        return sigmoid(compute, self.start, self.asymptote.mean, self.exponent.mean, self.midpoint.mean)


@dataclass(frozen=True)
class Refused:
    """Why no curve is fitted, in one line."""

    reason: str


@dataclass(frozen=True)
class Search:
    """What a grid search found: sum of squared residuals, exponent and R_0 of every cell, each [I, J]."""

    grid: Grid
    squares: Floats
    exponents: Floats
    starts: Floats = field(repr=False)

    @property
    def best(self) -> tuple[float, float, float, float]:
        """R_0, A, B, C_mid of the best cell."""
        i, j = np.unravel_index(int(self.squares.argmin()), self.squares.shape)
        return (
            float(self.starts[i, j]),
            float(self.grid.asymptotes[i]),
            float(self.exponents[i, j]),
            float(self.grid.midpoints[j]),
        )


def sigmoid(compute: ArrayLike, start: float, asymptote: float, exponent: float, midpoint: float) -> Floats:
    """R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B), and R_0 at C = 0."""
    return start + (asymptote - start) * _share(_log(compute), math.log(midpoint), exponent)


def fit(compute: ArrayLike, reward: ArrayLike, options: FitOptions = FitOptions()) -> Curve | Refused:
    """Fit one run's curve, or say why not.

    `compute`, `reward`: [points]; points without a number, and those of the early part, are left out. A curve is refused when
    it has too few points, does not rise, has not reached half of its fitted gain within the data, or is described as well
    by the power law R_0 + k C^B, the sigmoid's own limit for C far below C_mid: from such data A can be anything (the paper's power
    law fits gave 1.0). That is an F-test with 1 degree of freedom, at `BENT_ALPHA`.
    """
    C, R = _points(compute, reward, options.skip)
    free = 4 if options.start is None else 3
    if len(C) < LEAST_POINTS:
        return Refused(f"{len(C)} points; a curve needs at least {LEAST_POINTS}")
    if not _rises(R):
        return Refused("the last quarter is not above the first (one-sided t-test at 5 %): nothing has been learned yet")
    search = grid_search(C, R, options.grid or adapted_grid(C, R), options.start)
    parameters, squares = _polished(C, R, search, options) if options.polish else (search.best, float(search.squares.min()))
    if parameters[3] > C[-1]:
        return Refused(f"not bent: the data end at {C[-1]:.4g}, before half of the gain (fitted C_mid {parameters[3]:.4g})")
    p = bent_p_value(C, R, squares, free, options.start)
    if p >= BENT_ALPHA:
        return Refused(f"not bent: a power law without an asymptote fits as well (F-test p = {p:.2g})")
    if not options.polish:
        return _curve(C, parameters, squares, free, None)
    return _curve(C, parameters, squares, free, _covariance(C, parameters, squares, options.start is None))


def adapted_grid(C: Floats, R: Floats) -> Grid:
    """71 asymptotes and 100 midpoints, as many as the paper's, over the range of the data.

    A from a tenth of the gain below the last tenth's mean to twice the gain above it; C_mid geometrically from a hundredth of the
    compute to twice it. No data without a bend beyond that can tell these apart.
    """
    tenth = max(1, len(R) // 10)
    top, gain = float(R[-tenth:].mean()), float(R[-tenth:].mean() - R[:tenth].mean())
    smallest = max(C[-1] / 200, float(C[C > 0].min()) / 2)
    return Grid(np.linspace(top - 0.1 * gain, top + 2 * gain, 71), np.geomspace(smallest, 2 * C[-1], 100))


def grid_search(C: Floats, R: Floats, grid: Grid, start: float | None = None, rounds: int = 12) -> Search:
    """The best exponent of every cell (with R_0, unless `start` gives it) and its sum of squared residuals, all at once."""
    log_C = _log(C)
    A = grid.asymptotes[:, None, None]
    log_mid = np.log(grid.midpoints)[None, :, None]
    shape = (grid.asymptotes.size, grid.midpoints.size)
    first = float(R[: max(1, len(R) // 10)].mean()) if start is None else start
    log_B = np.log(_first_exponents(log_C, R, grid, first))
    best = np.full(shape, np.inf)
    best_B, best_start = np.ones(shape), np.full(shape, first)
    low, high = np.log(_EXPONENTS)
    for _ in range(rounds):
        share = _share(log_C, log_mid, np.exp(log_B)[..., None])
        rest = 1 - share
        if start is None:
            R_0 = ((R - A * share) * rest).sum(2) / np.maximum((rest * rest).sum(2), 1e-300)
        else:
            R_0 = np.full(shape, start)
        gain = A - R_0[..., None]
        residual = R - R_0[..., None] - gain * share
        squares = (residual * residual).sum(2)
        better = squares < best
        best, best_B, best_start = (
            np.where(better, squares, best),
            np.where(better, np.exp(log_B), best_B),
            np.where(better, R_0, best_start),
        )
        slope = gain * share * rest * np.exp(log_B)[..., None] * _finite(log_C - log_mid)
        if start is None:  # the part of the slope that R_0 cannot make up for
            slope = slope - rest * ((slope * rest).sum(2) / np.maximum((rest * rest).sum(2), 1e-300))[..., None]
        step = (residual * slope).sum(2) / np.maximum((slope * slope).sum(2), 1e-300)
        log_B = np.clip(np.where(better, log_B, np.log(best_B)) + np.where(better, 1.0, 0.3) * np.clip(step, -0.7, 0.7), low, high)
    return Search(grid, best, best_B, best_start)


def bent_p_value(C: Floats, R: Floats, squares: float, free: int, start: float | None) -> float:
    """p of the F-test of the sigmoid (residual `squares`, `free` parameters) against R_0 + k C^B, which has one less.

    Small when the power law fits worse. The power law is solved exactly in R_0 and k, and by a bounded search in B.
    """

    def left_over(log_B: float) -> float:
        powered = (C / C[-1]) ** math.exp(log_B)
        columns = powered[:, None] if start is not None else np.stack([np.ones_like(C), powered], 1)
        target = R - (start or 0.0)
        solved = np.linalg.lstsq(columns, target, rcond=None)[0]
        return float(((target - columns @ solved) ** 2).sum())

    trials = np.linspace(*np.log(_EXPONENTS), 40)
    nearest = int(np.argmin([left_over(one) for one in trials]))
    around = (trials[max(nearest - 1, 0)], trials[min(nearest + 1, len(trials) - 1)])
    power = float(optimize.minimize_scalar(left_over, bounds=around, method="bounded").fun)  # pyright: ignore[reportAttributeAccessIssue]
    total = float(((R - R.mean()) ** 2).sum())
    if power <= 1e-12 * total:
        return 1.0
    freedom = len(C) - free
    return float(stats.f.sf(max(power - squares, 0.0) / max(squares / freedom, 1e-300), 1, freedom))


# -- parts ----------------------------------------------------------------------------------------------------------


def _points(compute: ArrayLike, reward: ArrayLike, skip: float) -> tuple[Floats, Floats]:
    C, R = np.asarray(compute, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    known = np.isfinite(C) & np.isfinite(R) & (skip <= C) & (C >= 0)
    C, R = C[known], R[known]
    order = np.argsort(C, kind="stable")
    C, R = C[order], R[order]
    if len(C) <= MOST_POINTS:
        return C, R
    groups = np.array_split(np.arange(len(C)), MOST_POINTS)
    return np.array([C[group].mean() for group in groups]), np.array([R[group].mean() for group in groups])


def _rises(R: Floats) -> bool:
    quarter = max(2, len(R) // 4)
    first, last = R[:quarter], R[-quarter:]
    if np.ptp(first) == 0 and np.ptp(last) == 0:
        return bool(last[0] > first[0])
    return float(stats.ttest_ind(last, first, equal_var=False, alternative="greater").pvalue) < 0.05


def _log(compute: ArrayLike) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(compute, dtype=np.float64))


def _finite(x: Floats) -> Floats:
    """0 where C is 0: the slope in B vanishes there."""
    return np.where(np.isfinite(x), x, 0.0)


def _share(log_C: Floats, log_mid: ArrayLike, exponent: ArrayLike) -> Floats:
    """1 / (1 + (C_mid / C)^B), the share of the gain that is reached; 0 at C = 0."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(np.asarray(exponent) * (np.asarray(log_mid) - log_C)))


def _first_exponents(log_C: Floats, R: Floats, grid: Grid, start: float) -> Floats:
    """A first B a cell, [I, J]: the slope of logit((R - R_0) / (A - R_0)) against ln(C / C_mid), weighted by its precision."""
    share = np.clip((R - start) / np.maximum(grid.asymptotes[:, None] - start, 1e-12), 0.02, 0.98)
    weight = np.where(np.isfinite(log_C), (share * (1 - share)) ** 2, 0.0)
    logit = np.log(share / (1 - share))
    x = _finite(log_C - np.log(grid.midpoints)[:, None])
    found = (weight * logit) @ x.T / np.maximum(weight @ (x * x).T, 1e-300)
    return np.clip(np.where(found > 0, found, 1.0), *_EXPONENTS)


def _model(log_C: Floats, start: float | None):
    def free(_: object, asymptote: float, log_B: float, log_mid: float, first: float = 0.0) -> Floats:
        base = first if start is None else start
        return base + (asymptote - base) * _share(log_C, log_mid, math.exp(min(log_B, 30.0)))

    return free if start is None else lambda x, asymptote, log_B, log_mid: free(x, asymptote, log_B, log_mid)


def _jacobian(C: Floats, parameters: tuple[float, float, float, float], start_is_free: bool) -> Floats:
    """Slopes by A, ln B, ln C_mid (and R_0), [points, 3 or 4]."""
    start, asymptote, exponent, midpoint = parameters
    log_C = _log(C)
    share = _share(log_C, math.log(midpoint), exponent)
    bell = (asymptote - start) * share * (1 - share) * exponent
    columns = [share, bell * _finite(log_C - math.log(midpoint)), -bell]
    return np.stack([*columns, 1 - share] if start_is_free else columns, 1)


def _polished(
    C: Floats, R: Floats, search: Search, options: FitOptions
) -> tuple[tuple[float, float, float, float], float]:
    """The free fit that starts from the best cell, and its sum of squares; the cell itself where it finds nothing better."""
    start, asymptote, exponent, midpoint = search.best
    first = [asymptote, math.log(exponent), math.log(midpoint), *([start] if options.start is None else [])]
    log_C = _log(C)
    model = _model(log_C, options.start)

    def slopes(_: object, A: float, log_B: float, log_mid: float, base: float = 0.0) -> Floats:
        base = base if options.start is None else options.start
        return _jacobian(C, (base, A, math.exp(min(log_B, 30.0)), math.exp(log_mid)), options.start is None)

    found = optimize.least_squares(
        lambda p: model(C, *p) - R, first, jac=lambda p: slopes(C, *p), method="trf", x_scale="jac", max_nfev=200
    )
    if 2 * found.cost > search.squares.min():
        return search.best, float(search.squares.min())
    A, log_B, log_mid, *base = (float(value) for value in found.x)
    return (base[0] if base else float(options.start or 0.0), A, math.exp(log_B), math.exp(log_mid)), 2 * float(found.cost)


def _covariance(
    C: Floats, parameters: tuple[float, float, float, float], squares: float, start_is_free: bool
) -> Floats:
    slopes = _jacobian(C, parameters, start_is_free)
    return np.linalg.pinv(slopes.T @ slopes) * squares / (len(C) - slopes.shape[1])


def _curve(
    C: Floats, parameters: tuple[float, float, float, float], squares: float, free: int, covariance: Floats | None
) -> Curve:
    start, asymptote, exponent, midpoint = parameters
    n = len(C)
    residual = math.sqrt(squares / (n - free))
    if covariance is None:
        exact = [Interval(value, None, None, n) for value in (asymptote, exponent, midpoint)]
        return Curve(start, exact[0], exact[1], exact[2], residual, n)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - free)) * np.sqrt(np.diag(covariance))
    return Curve(
        start,
        Interval(asymptote, asymptote - reach[0], asymptote + reach[0], n),
        _log_interval(exponent, float(reach[1]), n),
        _log_interval(midpoint, float(reach[2]), n),
        residual,
        n,
    )


def _log_interval(value: float, reach: float, n: int) -> Interval:
    reach = min(reach, 50.0)
    return Interval(value, value * math.exp(-reach), value * math.exp(reach), n)
