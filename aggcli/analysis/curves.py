"""Compute-performance curves of single runs, as ScaleRL fits them (Khatri et al., 2025, arXiv:2510.13786).

    R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

R_C: reward or accuracy after compute C (tokens, steps or seconds); R_0: at the start; A: the asymptote that it approaches;
C_mid: compute at half of the gain; B: the efficiency exponent. The search is the paper's, over a grid
(`aggcli.analysis.sigmoid`); from its best cell on, `scipy.optimize.least_squares` polishes all parameters, which gives the
intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import fdtrc, stdtr

from aggcli.analysis.sigmoid import EXPONENTS, CurveParameters, Floats, Grid, Search, adapted_grid, grid_search, sigmoid, slopes
from aggcli.analysis.statistics import Interval, student_t, welch_error
from aggcli.measurement.words import plural

MOST_POINTS = 100
"""Longer curves are averaged in this many groups of consecutive points; a group keeps its mean compute and mean reward."""
LEAST_POINTS = 8
BENT_ALPHA = 0.01
"""A curve counts as bent when an F-test at this level prefers the sigmoid to the power law that it is before it bends."""


@dataclass(frozen=True)
class FitOptions:
    """How a curve is fitted."""

    start: float | None = None
    """R_0, where it is known; None fits it along, as the least-squares value at every cell."""
    grid: Grid | None = None
    """Cells to search; None makes them from the range of the data."""


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


def fit(compute: ArrayLike, reward: ArrayLike, options: FitOptions = FitOptions()) -> Curve | Refused:
    """Fit one run's curve, or say why not.

    `compute`, `reward`: [points]; points without a number are left out. A curve is refused when it has too few points, does not
    rise, has not reached half of its fitted gain within the data, or is not shown to be better than the power law R_0 + k C^B,
    the sigmoid's own limit for C far below C_mid: from such data A can be anything (the paper's power law fits gave 1.0). That
    is an F-test with 1 degree of freedom, at `BENT_ALPHA`.
    """
    C, R = points_of(compute, reward)
    if len(C) < LEAST_POINTS:
        return Refused(f"{plural(len(C), 'point')}; a curve needs at least {LEAST_POINTS}")
    if not _rises(R):
        return Refused("the last quarter is not above the first (one-sided t-test at 5 %): nothing has been learned yet")
    search = grid_search(C, R, options.grid or adapted_grid(C, R), options.start)
    found, squares = _polished(C, R, search, options.start)
    if found.midpoint > C[-1]:
        return Refused(f"not bent: the data end at {C[-1]:.4g}, before half of the gain (fitted C_mid {found.midpoint:.4g})")
    p = bent_p_value(C, R, squares, options.start)
    if p >= BENT_ALPHA:
        return Refused(f"the bend is not shown at {BENT_ALPHA:.0%}: F-test against a power law p = {p:.2g}".replace("%", " %"))
    return _curve(C, found, squares, options)


def bent_p_value(C: Floats, R: Floats, squares: float, start: float | None) -> float:
    """p of the F-test of the sigmoid, whose sum of squared residuals is given, against R_0 + k C^B with one parameter less.

    Small when the power law fits worse. The power law is solved exactly in R_0 and k, and by a bounded search in B.
    """

    target = R - R.mean() if start is None else R - start

    def left_over(log_B: ArrayLike) -> Floats:
        powered = (C / C[-1]) ** np.exp(np.asarray(log_B))[..., None]
        column = powered - powered.mean(-1, keepdims=True) if start is None else powered  # R_0 makes up for its mean
        k = (column @ target) / np.maximum((column * column).sum(-1), 1e-300)
        return ((target - k[..., None] * column) ** 2).sum(-1)

    from scipy import optimize  # half a second to import, and only fits come here

    trials = np.linspace(math.log(EXPONENTS[0]), math.log(EXPONENTS[1]), 40)
    nearest = int(left_over(trials).argmin())
    around = (trials[max(nearest - 1, 0)], trials[min(nearest + 1, len(trials) - 1)])
    power = float(optimize.minimize_scalar(left_over, bounds=around, method="bounded").fun)  # pyright: ignore[reportAttributeAccessIssue]
    total = float(((R - R.mean()) ** 2).sum())
    if power <= 1e-12 * total:
        return 1.0
    freedom = len(C) - (4 if start is None else 3)
    return float(fdtrc(1, freedom, max(power - squares, 0.0) / max(squares / freedom, 1e-300)))


# -- parts ----------------------------------------------------------------------------------------------------------


def points_of(compute: ArrayLike, reward: ArrayLike) -> tuple[Floats, Floats]:
    """The points that are fitted, sorted by compute: those with numbers, at most `MOST_POINTS` averages."""
    C, R = np.asarray(compute, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    known = np.isfinite(C) & np.isfinite(R) & (C >= 0)
    order = np.argsort(C[known], kind="stable")
    C, R = C[known][order], R[known][order]
    if len(C) <= MOST_POINTS:
        return C, R
    groups = np.array_split(np.arange(len(C)), MOST_POINTS)
    return np.array([C[group].mean() for group in groups]), np.array([R[group].mean() for group in groups])


def _rises(R: Floats) -> bool:
    quarter = max(2, len(R) // 4)
    first, last = R[:quarter], R[-quarter:]
    scale = max(float(np.ptp(part)) for part in (first, last))
    if scale == 0:
        return bool(last[0] > first[0])
    variances = (float(np.var(last / scale, ddof=1)), float(np.var(first / scale, ddof=1)))
    error, freedom = welch_error(variances, (quarter, quarter))
    return bool(stdtr(freedom, (first.mean() - last.mean()) / scale / error) < 0.05)


def _polished(C: Floats, R: Floats, search: Search, start: float | None) -> tuple[CurveParameters, float]:
    """The free fit that starts from the best cell, and its sum of squares; the cell itself where it finds nothing better."""
    from scipy import optimize

    best = search.best
    columns = slice(None, 4 if start is None else 3)

    def at(p: Floats) -> CurveParameters:
        base = float(p[3]) if start is None else start
        return CurveParameters(base, float(p[0]), math.exp(min(p[1], 30.0)), math.exp(min(p[2], 700.0)))

    found = optimize.least_squares(
        lambda p: sigmoid(C, *at(p)) - R,
        [best.asymptote, math.log(best.exponent), math.log(best.midpoint), best.start][columns],
        jac=lambda p: slopes(C, at(p))[:, columns],  # pyright: ignore[reportArgumentType]
        x_scale="jac",
        max_nfev=200,
    )
    if 2 * found.cost > search.squares.min():
        return best, float(search.squares.min())
    return at(found.x), 2 * float(found.cost)


def _curve(C: Floats, found: CurveParameters, squares: float, options: FitOptions) -> Curve:
    free, n = 4 if options.start is None else 3, len(C)
    residual = math.sqrt(squares / (n - free))
    by = slopes(C, found)[:, :free]
    deviations = residual * np.sqrt(np.diag(np.linalg.pinv(by.T @ by, rcond=1e-14)))
    A, log_B, log_mid = (student_t(n - free) * deviations[:3]).tolist()
    asymptote = Interval(found.asymptote, found.asymptote - A, found.asymptote + A, n)
    return Curve(found.start, asymptote, _by_log(found.exponent, log_B, n), _by_log(found.midpoint, log_mid, n), residual, n)


def _by_log(value: float, reach: float, n: int) -> Interval:
    reach = min(reach, 50.0)
    return Interval(value, value * math.exp(-reach), value * math.exp(reach), n)
