"""Statistics of a comparison: seeds are the unit; intervals are Student's t, differences are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Mean over `n` seeds, with its 95 % Student-t interval; `low` and `high` are None for a single seed."""

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float]) -> Interval:
    """The mean of `values` (one a seed) and its Student-t interval, standard deviation with n-1.

    Raises ValueError for no values.
    """
    n = len(values)
    if not n:
        raise ValueError("no values to average")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * spread
    return Interval(mean, mean - reach, mean + reach, n)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """The mean difference to the baseline over the seeds that both have, with its interval; None without a common seed."""
    common = sorted(values.keys() & baseline.keys())
    return interval([values[seed] - baseline[seed] for seed in common]) if common else None
