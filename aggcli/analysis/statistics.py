"""Statistics of a comparison: seeds are the unit; intervals are Student's t, differences are paired by seed.

The interval of a mean whose numbers have bounds is taken on a scale of the mean without them, so that it stays inside: for a
share m the logit, logit(m) plus or minus t * se / (m (1 - m)); for what is never below 0, such as a length, the logarithm,
log(m) plus or minus t * se / m. Both are Student's interval to first order (the delta method), and of the arithmetic mean.
Where a law is known to be skewed to above, more than a few seeds can show, such an interval lies below its mean too often; then
it reaches up to a higher quantile of Student's t than 97.5 %, which was measured for that outcome. The
difference of two shares lies within the distance of the bounds, where its interval is cut: it stays the one of the t-test.

Decisions use the paired t-test at 5 %, corrected by Holm over all tests of a comparison. The exact sign-flip permutation
p-value stands beside it: it assumes no law of the differences but that they are as likely of one sign as of the other, and it
cannot fall below its floor of 2/2^n, so below 6 seeds it never reaches 5 %.

Runs whose seeds are not known, as those of other trainers may be, are not paired: their means are compared by Welch's t-test
(Welch, 1947), which assumes no common spread of the two arms. It is nearly exact: of normal numbers that differ in nothing,
with 3 to 10 runs an arm, it tells 3.4 to 5.3 % apart at 5 %, and 6.6 % where 3 runs have three times the spread of 5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aggcli.measurement.words import plural

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
"""A difference is called shown where its corrected p is below this."""
RESAMPLES = 2**14
"""Sign flips are enumerated up to this many, that is up to 14 seeds; beyond, this many are drawn, from a fixed seed."""
_FURTHEST = 300.0
"""No interval on a log scale reaches further up, which no number could hold."""
_ROUNDING = 1e-12
"""Differences whose spread is below this share of their size are equal but for rounding, as are sums so near to each other."""


@dataclass(frozen=True)
class Interval:
    """Mean over `n` seeds, with its 95 % interval; `low` and `high` are None where there is none."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def without(self, each: str = "seed") -> str:
        """Why there is no interval; empty where there is one. `each`: what the numbers are of, seed or run."""
        if self.low is not None:
            return ""
        return f"one {each}" if self.n == 1 else f"the same in all {plural(self.n, each)}"


@dataclass(frozen=True)
class SignFlip:
    """Two-sided p-value of a sign-flip permutation test; `floor` is the smallest one that n differences can give."""

    p: float
    floor: float
    exact: bool


@dataclass(frozen=True)
class DifferenceTest:
    """A difference of two arms, paired by seed or not, and what speaks against it being 0.

    Paired: `p` is the paired t-test's; None for a single seed, as is `sign_flip`. A difference that is the same in all seeds,
    be it 0, has no interval: a spread of 0 over a few seeds is a matter of luck, not of certainty. `std`: of the differences,
    with n-1; None where there is no interval.

    Not paired: `runs` are the numbers of runs of the arm and of the baseline, None where paired; `difference.n` is the smaller;
    `p` is Welch's, None where an arm is of one run or neither has a spread, and there is no interval then; no `sign_flip`;
    `std`: root of the mean of the two `variances`, those of the arm and of the baseline with n-1.
    """

    difference: Interval
    p: float | None
    sign_flip: SignFlip | None
    std: float | None = None
    runs: tuple[int, int] | None = None
    variances: tuple[float, float] | None = None


_UP_TO = (1 + CONFIDENCE) / 2


def student_t(freedom: float, up_to: float = _UP_TO) -> float:
    """A quantile of Student's t with these degrees of freedom; by default how many standard errors a two-sided 95 % interval
    reaches."""
    from scipy.special import stdtrit  # takes long to import, and a single run needs no statistics

    return float(stdtrit(freedom, up_to))


def two_sided_p(t: float, freedom: float) -> float:
    """The chance of a Student-t value as far from 0 as `t`, either way, with these degrees of freedom."""
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -abs(t)))


Bounds = tuple[float, float]
SHARE: Bounds = (0.0, 1.0)
POSITIVE: Bounds = (0.0, math.inf)


def interval(values: Sequence[float], bounds: Bounds | None = None, *, up_to: float = _UP_TO) -> Interval:
    """The mean of `values` (one a seed) and its 95 % interval, standard deviation with n-1.

    `bounds`: what the numbers lie between by their meaning; the interval is then taken on the logit scale of the mean, or with
    `POSITIVE` on its log scale, unless a number lies outside of them. `up_to`: with `POSITIVE`, the quantile of Student's t
    that it reaches up to, for a law with a long upper end. One value has no interval, and equal ones (but for rounding) have
    none either: an interval without width would claim that the next seed must come out the same. Raises ValueError for no
    values.
    """
    n = len(values)
    if not n:
        raise ValueError("no values to average")
    mean = math.fsum(values) / n
    if n == 1 or max(values) - min(values) <= _ROUNDING * max(map(abs, values)):
        return Interval(mean, None, None, n)
    spread = _distance(values, mean) / math.sqrt((n - 1) * n)
    reach = student_t(n - 1) * spread
    if bounds is None or not (bounds[0] <= min(values) and max(values) <= bounds[1]):
        return Interval(mean, mean - reach, mean + reach, n)
    if bounds == POSITIVE:
        up = student_t(n - 1, up_to) * spread
        return Interval(mean, mean * math.exp(-reach / mean), mean * math.exp(min(up / mean, _FURTHEST)), n)
    from scipy.special import expit, logit

    width = bounds[1] - bounds[0]
    share = (mean - bounds[0]) / width
    reach /= width * share * (1 - share)
    low, high = (float(bounds[0] + width * expit(logit(share) + step)) for step in (-reach, reach))
    return Interval(mean, low, high, n)


def cut(found: Interval, bounds: Bounds | None) -> Interval:
    """The interval of a difference of two numbers with these bounds, cut at the largest difference that they can have."""
    if bounds is None or bounds == POSITIVE or found.low is None or found.high is None:
        return found
    width = bounds[1] - bounds[0]
    return dataclasses.replace(found, low=max(found.low, -width), high=min(found.high, width))


def geometric_interval(values: Sequence[float]) -> Interval:
    """`interval` of the logarithms, taken back: the geometric mean of positive values, with bounds that stay positive."""
    return exponential(interval([math.log(value) for value in values]))


def exponential(found: Interval) -> Interval:
    """An interval of logarithms, taken back."""
    low, high = (None if bound is None else math.exp(bound) for bound in (found.low, found.high))
    return Interval(math.exp(found.mean), low, high, found.n)


def standard_deviation(values: Sequence[float]) -> float | None:
    """Standard deviation with n-1; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    return _distance(values, math.fsum(values) / n) / math.sqrt(n - 1)


def _distance(values: Sequence[float], mean: float) -> float:
    """The root of the sum of squares of `value - mean`, also where float64 has 0 for those squares."""
    return math.hypot(*(value - mean for value in values))


def interquartile_mean(values: Sequence[float]) -> float | None:
    """Mean of the middle half of the seeds; None below 4 seeds, where there is no half to cut.

    Whole values are cut, floor(n/4) from each end, so 5 seeds keep 3 and 7 keep 5: `scipy.stats.trim_mean(values, 0.25)`, the
    definition of rliable (Agarwal et al., 2021, arXiv:2108.13264), and not the one that weighs the edge values by fractions.
    """
    n, cut = len(values), len(values) // 4
    if not cut:
        return None
    middle = np.partition(np.asarray(values, dtype=np.float64), (cut, n - cut - 1))[cut : n - cut]
    return float(middle.mean())


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], bounds: Bounds | None = None
) -> Interval | None:
    """The mean difference to the baseline over the seeds that both have, with its interval; None without a common seed."""
    common = sorted(values.keys() & baseline.keys())
    return cut(interval([values[seed] - baseline[seed] for seed in common]), bounds) if common else None


def sign_flip(differences: Sequence[float]) -> SignFlip | None:
    """Exact permutation test of a mean difference of 0: the share of the 2^n sign patterns with a mean at least as far out, or
    nearer by no more than rounding (1e-12 of the sum of sizes).

    Two-sided; the floor is 2/2^n (every sign the same, both ways). Above 14 differences `RESAMPLES` patterns are drawn, from a
    fixed seed, and p is (count + 1)/(RESAMPLES + 1) (Phipson and Smyth, 2010). None for fewer than two.
    """
    n = len(differences)
    if n < 2:
        return None
    values = np.asarray(differences, dtype=np.float64)
    exact = 2**n <= RESAMPLES
    if exact:
        flips = np.arange(2**n)[:, None] >> np.arange(n) & 1
    else:
        flips = np.random.default_rng(0).integers(0, 2, (RESAMPLES, n), dtype=np.int8)
    least = abs(values.sum()) - _ROUNDING * np.abs(values).sum()
    further = int((np.abs((flips * 2.0 - 1) @ values) >= least).sum())
    if exact:
        return SignFlip(further / 2**n, 2 / 2**n, exact=True)
    return SignFlip((further + 1) / (RESAMPLES + 1), 1 / (RESAMPLES + 1), exact=False)


def paired_test(
    values: Mapping[int, float], baseline: Mapping[int, float], bounds: Bounds | None = None
) -> DifferenceTest | None:
    """Difference, interval, t-test and sign-flip test over the seeds that both have; None without a common seed.

    Equal differences (but for rounding), of 0 too, have no spread that a t-test could measure them by: their p is the
    sign-flip's, and they have no interval.
    """
    common = sorted(values.keys() & baseline.keys())
    if not common:
        return None
    differences = [values[seed] - baseline[seed] for seed in common]
    found, flipped = cut(interval(differences), bounds), sign_flip(differences)
    if flipped is None:
        return DifferenceTest(found, None, None)
    if max(differences) - min(differences) <= _ROUNDING * max(map(abs, differences)):
        return DifferenceTest(found, flipped.p, flipped)
    n, scaled = len(differences), np.array(differences) / max(map(abs, differences))  # whose squares do not underflow
    t = float(np.mean(scaled)) / math.sqrt(float(np.var(scaled)) * (n / (n - 1)) / n)
    return DifferenceTest(found, two_sided_p(t, n - 1), flipped, standard_deviation(differences))


def welch_test(values: Sequence[float], baseline: Sequence[float], bounds: Bounds | None = None) -> DifferenceTest:
    """Difference of the means, its 95 % interval and p, both Welch's, of runs that are not paired: one value a run, one at
    least in each arm."""
    runs = (len(values), len(baseline))
    difference = math.fsum(values) / runs[0] - math.fsum(baseline) / runs[1]
    largest = max(map(abs, (*values, *baseline)))
    spreads = [max(own) - min(own) for own in (values, baseline)]
    varies = min(runs) > 1 and max(spreads) > _ROUNDING * largest
    variances = (float(np.var(values, ddof=1)), float(np.var(baseline, ddof=1))) if varies else (0.0, 0.0)
    if not any(variances):  # also of squares that underflow
        return DifferenceTest(Interval(difference, None, None, min(runs)), None, None, runs=runs)
    error, freedom = welch_error(variances, runs)
    reach = student_t(freedom) * error
    told = cut(Interval(difference, difference - reach, difference + reach, min(runs)), bounds)
    return DifferenceTest(told, two_sided_p(difference / error, freedom), None, math.sqrt(sum(variances) / 2), runs, variances)


def welch_error(variances: tuple[float, float], runs: tuple[int, int]) -> tuple[float, float]:
    """The standard error of a difference of two means, and its degrees of freedom by Welch and Satterthwaite."""
    parts = [variance / n for variance, n in zip(variances, runs, strict=True)]
    shares = [part / max(parts) for part in parts]  # whose squares do not underflow
    freedom = sum(shares) ** 2 / sum(share**2 / (n - 1) for share, n in zip(shares, runs, strict=True))
    return math.sqrt(sum(parts)), freedom


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction (Holm, 1979): the i-th smallest of m p-values times m - i + 1, never decreasing, at most 1.

    It holds the chance of any false positive among the m at the nominal level, whatever their dependence. None (no test could
    be made) stays None and does not count in m.
    """
    order = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[at] = largest
    return corrected


def is_shown(p: float | None) -> bool:
    """Whether a corrected p-value shows a difference."""
    return p is not None and p < ALPHA


def holm_levels(corrected: Sequence[float | None]) -> list[float | None]:
    """What each uncorrected p-value must be below to be shown, given the others: 5 % over the number of tests that are not
    shown, itself among them. None for one that was not made.

    By Holm's steps: were k others shown, a further one of m is shown if and only if its p is below 5 % / (m - k).
    """
    tested = [p for p in corrected if p is not None]
    shown = sum(map(is_shown, tested))
    return [None if p is None else ALPHA / (len(tested) - shown + is_shown(p)) for p in corrected]
