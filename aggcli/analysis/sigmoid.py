"""The sigmoid of compute-performance curves, and the search of its parameters over a grid.

    R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

ScaleRL's method (Khatri et al., 2025, arXiv:2510.13786): a grid over A and C_mid, the exponent B solved at each cell, the cell
with the least sum of squared residuals. The solve is Gauss-Newton in ln B for all cells at once, in place of one
`scipy.optimize.curve_fit` a cell. Axes of arrays: I asymptotes, J midpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

EXPONENTS = (0.05, 20.0)
"""Exponents that are searched."""
_TINY = 1e-300


class CurveParameters(NamedTuple):
    """R_0, A, B and C_mid."""

    start: float
    asymptote: float
    exponent: float
    midpoint: float


@dataclass(frozen=True)
class Grid:
    """The cells of the search: `asymptotes` [I] in the unit of the reward, `midpoints` [J] in the unit of the compute."""

    asymptotes: Floats
    midpoints: Floats


@dataclass(frozen=True)
class Search:
    """What a grid search found: sum of squared residuals, ln B and R_0 of every cell, each [I, J]."""

    grid: Grid
    squares: Floats
    log_exponents: Floats
    starts: Floats = field(repr=False)

    @property
    def best(self) -> CurveParameters:
        """The parameters of the best cell."""
        i, j = np.unravel_index(int(self.squares.argmin()), self.squares.shape)
        return self.cell(int(i), int(j))

    def cell(self, i: int, j: int) -> CurveParameters:
        """The parameters of cell (i, j)."""
        exponent = math.exp(self.log_exponents[i, j])
        return CurveParameters(
            float(self.starts[i, j]), float(self.grid.asymptotes[i]), exponent, float(self.grid.midpoints[j])
        )


def sigmoid(compute: ArrayLike, start: float, asymptote: float, exponent: float, midpoint: float) -> Floats:
    """R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B), and R_0 at C = 0."""
    return start + (asymptote - start) * _share(_log(compute), math.log(max(midpoint, _TINY)), exponent)


def adapted_grid(C: Floats, R: Floats, asymptotes: int = 16, midpoints: int = 20) -> Grid:
    """Cells over the range of the data, fewer than the paper's, since the best one is only where the polish starts.

    A from a tenth of the gain below the last tenth's mean to twice the gain above it; C_mid geometrically from a 200th of the
    compute (or half the first point) to twice it. What lies beyond has not bent within the data.
    """
    tenth = max(1, len(R) // 10)
    top, gain = float(R[-tenth:].mean()), float(R[-tenth:].mean() - R[:tenth].mean())
    smallest = max(C[-1] / 200, float(C[C > 0].min()) / 2)
    return Grid(np.linspace(top - 0.1 * gain, top + 2 * gain, asymptotes), np.geomspace(smallest, 2 * C[-1], midpoints))


def grid_search(C: Floats, R: Floats, grid: Grid, start: float | None = None, rounds: int = 12) -> Search:
    """The best exponent of every cell (with R_0, unless `start` gives it) and its sum of squared residuals, all at once.

    C, R: [points], sorted, with a number everywhere. A step that makes a cell worse is taken back and tried shorter.
    """
    log_C = _log(C)
    distance = _finite(log_C - np.log(grid.midpoints)[:, None])
    A_IJ = np.broadcast_to(grid.asymptotes[:, None], (grid.asymptotes.size, grid.midpoints.size))
    first = float(R[: max(1, len(R) // 10)].mean()) if start is None else start
    tried_IJ = np.log(_first_exponents(log_C, R, grid, first))
    best = Search(grid, np.full(A_IJ.shape, np.inf), tried_IJ, np.full(A_IJ.shape, first))
    step_IJ = np.zeros(A_IJ.shape)
    for _ in range(rounds):
        share = _share(log_C, np.log(grid.midpoints)[:, None], np.exp(tried_IJ)[..., None])
        rest = 1 - share
        over = np.maximum((rest * rest).sum(2), _TINY)
        R_0_IJ = np.full(A_IJ.shape, first) if start is not None else ((R - A_IJ[..., None] * share) * rest).sum(2) / over
        gain = (A_IJ - R_0_IJ)[..., None]
        residual = R - R_0_IJ[..., None] - gain * share
        squares_IJ = (residual * residual).sum(2)
        slope = gain * share * rest * np.exp(tried_IJ)[..., None] * distance
        if start is None:  # the part of the slope that R_0 cannot make up for
            slope -= rest * ((slope * rest).sum(2) / over)[..., None]
        newton_IJ = np.clip((residual * slope).sum(2) / np.maximum((slope * slope).sum(2), _TINY), -0.7, 0.7)
        better = squares_IJ < best.squares
        best = Search(
            grid,
            np.where(better, squares_IJ, best.squares),
            np.where(better, tried_IJ, best.log_exponents),
            np.where(better, R_0_IJ, best.starts),
        )
        step_IJ = np.where(better, newton_IJ, step_IJ / 4)
        tried_IJ = np.clip(best.log_exponents + step_IJ, *np.log(EXPONENTS))
    return best


def slopes(C: Floats, at: CurveParameters) -> Floats:
    """Slopes of R_C by A, ln B, ln C_mid and R_0, [points, 4]."""
    log_C = _log(C)
    share = _share(log_C, math.log(at.midpoint), at.exponent)
    bell = (at.asymptote - at.start) * share * (1 - share) * at.exponent
    return np.stack([share, bell * _finite(log_C - math.log(at.midpoint)), -bell, 1 - share], 1)


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
    found = (weight * logit) @ x.T / np.maximum(weight @ (x * x).T, _TINY)
    return np.clip(np.where(found > 0, found, 1.0), *EXPONENTS)
