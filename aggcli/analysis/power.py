"""What a paired t-test can show: the smallest difference at 80 % power, and the seeds that a difference needs.

A comparison of n seeds whose paired differences have standard deviation s (with n - 1) shows a difference, two-sided at level
a, if its mean lies beyond t(1 - a/2) s / sqrt(n), t with n - 1 degrees of freedom. The mean that comes out lies above the true
difference less t(power) s / sqrt(n) in `power` of comparisons, whatever the true spread, since (mean - truth) sqrt(n) / s has
Student's law. So each comparison states its own `(t(1 - a/2) + t(power)) s / sqrt(n)`, and a difference of that size is shown
in that share of them.

The seeds that a difference of size d needs are counted for a spread that is known and stays what it was: the smallest n whose
power by the noncentral t, n - 1 degrees of freedom and noncentrality d sqrt(n) / s, is at least that (Cohen, 1988, chapter 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtri, nctdtr, ndtr, stdtrit

POWER = 0.8
MOST_SEEDS = 10_000
"""No more seeds are counted."""
_POINTS = 2**9


@dataclass(frozen=True)
class Power:
    """What a pair of n seeds could have shown. `std`: of its paired differences, with n - 1; `level`: that it was tested at,
    after Holm; `smallest`: the smallest difference shown in 80 % of such comparisons, in the unit of the outcome;
    `seeds_for_half`: seeds that half of it needs at this level, None beyond `MOST_SEEDS`; `possible`: whether the outcome can
    differ by as much as `smallest`, which is otherwise of no use but to compute with.
    """

    std: float
    level: float
    smallest: float
    seeds_for_half: int | None
    possible: bool = True


def power_of(std: float, n: int, level: float, most: float = math.inf) -> Power:
    """See `Power`. `n`: seeds, two at least; `std` above 0; `most`: the largest difference that the outcome can have."""
    smallest = smallest_difference(std, n, level)
    return Power(std, level, smallest, seeds_needed(smallest / 2, std, level), smallest <= most)


def smallest_difference(std: float, n: int, level: float, power: float = POWER) -> float:
    """The difference that a two-sided paired t-test at `level` shows in a share `power` of comparisons."""
    return float(stdtrit(n - 1, 1 - level / 2) + stdtrit(n - 1, power)) * std / math.sqrt(n)


def power_at(difference: float, std: float, n: int, level: float) -> float:
    """The share of comparisons of n seeds that a true difference of this size is shown in, where the true spread is `std`."""
    critical, away = float(stdtrit(n - 1, 1 - level / 2)), abs(difference) / std * math.sqrt(n)
    below = _noncentral_t(n - 1, away, critical)
    return 1 - below + _noncentral_t(n - 1, away, -critical)


def _noncentral_t(freedom: int, away: float, t: float) -> float:
    """Its distribution function at t: P(Z + away <= t S), S the root of a mean square of `freedom` normal numbers.

    scipy gives no number for large noncentralities; there the mean over S is taken at `_POINTS` of its quantiles.
    """
    found = float(nctdtr(freedom, away, t))
    if math.isfinite(found):
        return found
    S = np.sqrt(chdtri(freedom, (np.arange(_POINTS) + 0.5) / _POINTS) / freedom)
    return float(ndtr(t * S - away).mean())


def seeds_needed(difference: float, std: float, level: float, power: float = POWER) -> int | None:
    """The fewest seeds, two at least, that show a difference of this size with this power; None beyond `MOST_SEEDS`."""
    low, high = 1, 2
    while power_at(difference, std, high, level) < power:
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_at(difference, std, middle, level) >= power else (middle, high)
    return high if high <= MOST_SEEDS else None
