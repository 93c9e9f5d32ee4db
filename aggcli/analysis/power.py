"""What a t-test can show, paired or Welch's: the smallest difference at 80 % power, and the seeds that a difference needs.

A comparison of n seeds whose paired differences have standard deviation s (with n - 1) shows a difference, two-sided at level
a, if its mean lies beyond t(1 - a/2) s / sqrt(n), t with n - 1 degrees of freedom. The mean that comes out lies above the true
difference less t(power) s / sqrt(n) in `power` of comparisons, whatever the true spread, since (mean - truth) sqrt(n) / s has
Student's law. So each comparison states its own `(t(1 - a/2) + t(power)) s / sqrt(n)`, and a difference of that size is shown
in that share of them.

The seeds that a difference of size d needs are counted for a spread that is known and stays what it was: the smallest n whose
power by the noncentral t, n - 1 degrees of freedom and noncentrality d sqrt(n) / s, is at least that (Cohen, 1988, chapter 2).

Of runs that are not paired, the standard error of the difference of the two means, the root of v1/n1 + v2/n2 (the variances of
the arms), stands for s / sqrt(n), and the degrees of freedom are those of Welch and Satterthwaite: nearly right, and not
exactly. A difference of the size that each comparison states was shown in 79.9 to 80.9 % of them, with 3 to 10 runs an arm and
spreads up to 1 to 3. Runs are counted for as many in the one arm as in the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtri, nctdtr, ndtr, stdtrit

from aggcli.analysis.statistics import DifferenceTest, welch_error

POWER = 0.8
MOST_SEEDS = 10_000
"""No more seeds are counted."""
_POINTS = 2**9


@dataclass(frozen=True)
class Power:
    """What a pair of n seeds could have shown. `std`: of its paired differences, with n - 1, or that of `DifferenceTest`;
    `level`: that it was tested at, after Holm; `smallest`: the smallest difference shown in 80 % of such comparisons, in the
    unit of the outcome; `seeds_for_half`: seeds (`each`: or runs of each arm) that half of it needs at this level, None beyond
    `MOST_SEEDS`; `possible`: whether the outcome can differ by as much as `smallest`, which is otherwise of no use but to
    compute with.
    """

    std: float
    level: float
    smallest: float
    seeds_for_half: int | None
    possible: bool = True
    each: str = "seeds"


def power_of(test: DifferenceTest, level: float | None, most: float = math.inf) -> Power | None:
    """What a test could have shown, at `level`; None where it was not made, or has no spread to tell by. `most`: the largest
    difference that the outcome can have."""
    if level is None or not test.std:
        return None
    if test.variances is None or test.runs is None:
        smallest = smallest_difference(test.std, test.difference.n, level)
        return Power(test.std, level, smallest, seeds_needed(smallest / 2, test.std, level), smallest <= most)
    smallest = _smallest(*welch_error(test.variances, test.runs), level, POWER)
    needed = runs_needed(smallest / 2, test.variances, level)
    return Power(test.std, level, smallest, needed, smallest <= most, "runs an arm")


def smallest_difference(std: float, n: int, level: float, power: float = POWER) -> float:
    """The difference that a two-sided paired t-test at `level` shows in a share `power` of comparisons."""
    return _smallest(std / math.sqrt(n), n - 1, level, power)


def _smallest(error: float, freedom: float, level: float, power: float) -> float:
    return float(stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, power)) * error


def power_at(difference: float, std: float, n: int, level: float) -> float:
    """The share of comparisons of n seeds that a true difference of this size is shown in, where the true spread is `std`."""
    return _power(difference, std / math.sqrt(n), n - 1, level)


def welch_power_at(difference: float, variances: tuple[float, float], n: int, level: float) -> float:
    """The same of Welch's test of n runs in each of two arms, where their true variances are these (not both 0)."""
    return _power(difference, *welch_error(variances, (n, n)), level)


def _power(difference: float, error: float, freedom: float, level: float) -> float:
    critical, away = float(stdtrit(freedom, 1 - level / 2)), abs(difference) / error
    below = _noncentral_t(freedom, away, critical)
    return 1 - below + _noncentral_t(freedom, away, -critical)


def _noncentral_t(freedom: float, away: float, t: float) -> float:
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
    return _fewest(lambda n: power_at(difference, std, n, level) >= power)


def runs_needed(difference: float, variances: tuple[float, float], level: float, power: float = POWER) -> int | None:
    """The fewest runs of each of two arms that are not paired, two at least, likewise."""
    return _fewest(lambda n: welch_power_at(difference, variances, n, level) >= power)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high if high <= MOST_SEEDS else None
