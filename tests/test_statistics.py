"""Paired statistics: hand-worked numbers, scipy and brute force as second routes, and calibration by many seeded trials."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from aggcli.analysis.statistics import (
    POSITIVE,
    RESAMPLES,
    geometric_interval,
    holm,
    interquartile_mean,
    interval,
    paired_test,
    sign_flip,
    standard_deviation,
    welch_test,
)


def by_brute_force(differences: list[float]) -> float:
    """Share of all sign patterns whose sum is at least as far from 0 as the observed one."""
    observed = abs(sum(differences)) * (1 - 1e-12)
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(one >= observed for one in sums) / len(sums)


def seeds(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


def test_mean_deviation_and_interval_are_those_worked_by_hand():
    found = interval([0.2, 0.4, 0.9])
    assert found.mean == pytest.approx(0.5)
    assert standard_deviation([0.2, 0.4, 0.9]) == pytest.approx(math.sqrt(0.13))  # (0.09 + 0.01 + 0.16) / 2
    reach = 4.302652729696142 * math.sqrt(0.13 / 3)  # t of 0.975 with 2 degrees of freedom
    assert (found.low, found.high, found.n) == (pytest.approx(0.5 - reach), pytest.approx(0.5 + reach), 3)


@pytest.mark.parametrize("size", [1.0, 1e-90, 1e-170, 1e-300])
def test_the_size_of_what_is_compared_does_not_matter(size: float):
    """Squares of the smallest are below what float64 holds."""
    found = paired_test(seeds([0.0, size, 3 * size]), seeds([0.0, 0.0, 0.0]))
    assert found is not None
    assert found.p == pytest.approx(0.2697, abs=1e-4)  # t = 4 / sqrt(7), and 1 - t / sqrt(2 + t^2)
    assert found.difference.mean / size == pytest.approx(4 / 3)
    assert standard_deviation([0.0, size, 3 * size]) == pytest.approx(size * math.sqrt(7 / 3), rel=1e-12, abs=0)
    reach = 4.302652729696142 * math.sqrt(7) / 3  # t of 0.975 with 2 degrees of freedom
    assert found.difference.low is not None
    assert found.difference.high is not None
    assert found.difference.low / size == pytest.approx(4 / 3 - reach)
    assert found.difference.high / size == pytest.approx(4 / 3 + reach)
    apart = welch_test([size, 2 * size, 3 * size], [4 * size, 6 * size, 8 * size])
    assert apart.difference.mean / size == pytest.approx(-4)
    assert apart.p == (pytest.approx(welch_test([1, 2, 3], [4, 6, 8]).p) if size > 1e-150 else None)


def test_one_seed_has_no_deviation_no_interval_and_no_test():
    assert standard_deviation([0.4]) is None
    found = paired_test({7: 0.5}, {7: 0.25, 8: 1.0})
    assert found is not None
    assert (found.difference.mean, found.difference.low, found.difference.n) == (0.25, None, 1)
    assert found.p is None
    assert found.sign_flip is None
    assert paired_test({1: 0.5}, {2: 0.5}) is None


def test_the_interval_of_positive_values_is_that_of_their_logarithms():
    found = geometric_interval([1.0, 4.0, 16.0])
    assert found.mean == pytest.approx(4.0)
    reach = 4.302652729696142 * math.log(4) / math.sqrt(3)
    assert found.low == pytest.approx(4 * math.exp(-reach))
    assert found.high == pytest.approx(4 * math.exp(reach))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_sign_flip_p_is_the_share_of_sign_patterns_counted_one_by_one(n: int):
    for seed in range(5):
        differences = (np.random.default_rng([n, seed]).normal(size=n) + 0.5).tolist()
        found = sign_flip(differences)
        assert found is not None
        assert found.exact
        assert found.p == pytest.approx(by_brute_force(differences))


def test_differences_that_cancel_but_for_rounding_are_no_further_out_than_any_others():
    """0.1 + 0.2 - 0.3 is 0, and no sum of these numbers with other signs is nearer to it; 0.7 + 0.1 - 0.8 likewise."""
    for differences in ([0.1, 0.2, -0.3], [0.7, 0.1, -0.8], [0.1, 0.7, -0.8, 0.4, -0.4]):
        found = sign_flip(differences)
        assert found is not None
        assert found.p == 1.0


@pytest.mark.parametrize("n", [4, 5, 7, 10])
def test_the_t_test_and_the_interquartile_mean_are_those_of_scipy(n: int):
    for seed in range(5):
        values = np.random.default_rng([n, seed]).normal(0.3, 1.0, n).tolist()
        found = paired_test(seeds(values), seeds([0.0] * n))
        assert found is not None
        assert found.p == pytest.approx(stats.ttest_1samp(values, 0.0)[1], rel=1e-12)
        assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 14])
def test_differences_of_one_sign_reach_the_floor_of_two_in_two_to_the_n(n: int):
    found = sign_flip([0.1 + 0.01 * at for at in range(n)])
    assert found is not None
    assert found.p == found.floor == 2 / 2**n


def test_beyond_fourteen_seeds_sign_patterns_are_drawn_and_it_is_said():
    differences = (np.random.default_rng(3).normal(size=18) + 0.4).tolist()
    found, again = sign_flip(differences), sign_flip(differences)
    assert found is not None
    assert found == again
    assert not found.exact
    exact = by_brute_force(differences)
    assert abs(found.p - exact) < 4 * math.sqrt(exact * (1 - exact) / RESAMPLES) + 1 / RESAMPLES


def test_the_paired_p_is_scipys_related_samples_t_test():
    a, b = [0.61, 0.72, 0.66, 0.70], [0.58, 0.70, 0.67, 0.62]
    found = paired_test(seeds(a), seeds(b))
    assert found is not None
    expected = stats.ttest_rel(a, b)
    assert found.p == pytest.approx(expected[1])
    assert found.difference.mean == pytest.approx(0.03)


def test_differences_without_spread_are_not_taken_for_certain():
    found = paired_test(seeds([0.5, 0.625]), seeds([0.25, 0.375]))
    assert found is not None
    assert (found.p, found.difference.low, found.difference.n) == (0.5, None, 2)
    same = paired_test(seeds([0.5, 0.6, 0.7]), seeds([0.5, 0.6, 0.7]))
    assert same is not None
    assert (same.p, same.difference.mean, same.difference.low, same.difference.high) == (1.0, 0.0, None, None)


def test_holm_multiplies_the_smallest_most_never_decreases_and_leaves_out_what_was_not_tested():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([None, 0.02, None, 0.03]) == [None, 0.04, None, 0.04]
    assert holm([]) == []


def test_the_interquartile_mean_cuts_whole_quarters_and_needs_four_seeds():
    assert interquartile_mean([1, 2, 3]) is None
    assert interquartile_mean([0, 2, 4, 100]) == 3.0
    assert interquartile_mean([0, 2, 4, 6, 100]) == 4.0  # one from each end: 2, 4, 6
    assert interquartile_mean(list(range(8))) == 3.5  # two from each end: 2, 3, 4, 5


# -- calibration ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 10])
def test_intervals_cover_the_truth_in_93_to_97_percent_of_trials(n: int):
    """4,000 trials: the standard error of a coverage of 95 % is 0.34 %, so the bounds are 5.8 of them away."""
    draws = np.random.default_rng(n).normal(0.6, 0.05, (4000, n))
    found = [interval(row) for row in draws.tolist()]
    covered = np.mean([one.low <= 0.6 <= one.high for one in found if one.low is not None and one.high is not None])
    assert 0.93 <= covered <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("n", "effect"), [(3, 3.0), (5, 1.5), (10, 1.0)])
def test_planted_differences_are_found_with_the_power_of_a_t_test(n: int, effect: float):
    """Power of the two-sided 5 % t-test from the noncentral t; 400 to 1,000 trials, within 4 standard errors of a share."""
    critical = stats.t.ppf(0.975, n - 1)
    trials, away = (1000 if n < 10 else 400), effect * math.sqrt(n)
    power = float(stats.nct.sf(critical, n - 1, away) + stats.nct.cdf(-critical, n - 1, away))
    rng = np.random.default_rng([n, 11])
    shared = rng.normal(0.6, 0.1, (trials, n))
    moved = shared + rng.normal(effect, 1.0, (trials, n)) * 0.02
    found = [paired_test(seeds(a), seeds(b)) for a, b in zip(moved.tolist(), shared.tolist(), strict=True)]
    share = np.mean([one is not None and one.p is not None and one.p < 0.05 for one in found])
    assert abs(share - power) < 4 * math.sqrt(power * (1 - power) / trials)


@pytest.mark.slow
def test_the_sign_flip_test_never_exceeds_its_level_on_skewed_differences_that_are_symmetric_under_the_null():
    """Differences of two skewed draws are symmetric: at 6 seeds p <= 2/64 happens in exactly 2 of 64; 1,500 trials."""
    rng = np.random.default_rng(5)
    differences = rng.exponential(size=(1500, 6)) - rng.exponential(size=(1500, 6))
    found = [sign_flip(row) for row in differences.tolist()]
    share = np.mean([one is not None and one.p <= 2 / 64 + 1e-9 for one in found])
    assert abs(share - 2 / 64) < 4 * math.sqrt(2 / 64 * 62 / 64 / 1500)


def test_the_interval_of_a_length_is_students_on_the_log_scale_of_the_mean():
    """1, 2, 4: mean 7/3, standard error sqrt(7)/3, t of 2 degrees 4.302653, so a factor exp(4.302653 / sqrt(7)) each way."""
    factor = math.exp(4.302652729696142 * math.sqrt(7) / 3 / (7 / 3))
    found = interval([1.0, 2.0, 4.0], POSITIVE)
    assert (found.low, found.high) == (pytest.approx(7 / 3 / factor), pytest.approx(7 / 3 * factor))
    plain = interval([1.0, 2.0, 4.0])
    assert plain.low is not None
    assert found.low is not None
    assert plain.low < 0 < found.low
    signed = interval([-1.0, 2.0, 4.0], POSITIVE)
    assert signed == interval([-1.0, 2.0, 4.0]), "what can be below 0 has no log scale"


def test_the_interval_of_a_skewed_length_reaches_further_up_and_as_far_down():
    """The quantile 99.5 % of t with 2 degrees is 9.924843."""
    found, symmetric = interval([1.0, 2.0, 4.0], POSITIVE, up_to=0.995), interval([1.0, 2.0, 4.0], POSITIVE)
    assert found.low == symmetric.low
    assert found.high == pytest.approx(7 / 3 * math.exp(9.924843200918 * math.sqrt(7) / 3 / (7 / 3)))


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 10])
def test_intervals_of_lengths_cover_their_mean_in_93_to_97_percent_of_trials_and_stay_above_0(n: int):
    """Lengths of a lognormal law with a coefficient of variation of 0.2 (skewness 0.6): 4,000 trials. As often those of a law
    with a long upper end, gamma of shape 1 on top of 20 (skewness 2), by the interval for such."""
    rng = np.random.default_rng([n, 2])
    near = rng.lognormal(-0.02, 0.2, (4000, n)), 1.0, 0.975
    far = 20 + rng.gamma(1, 1, (4000, n)), 21.0, 0.995
    for draws, truth, up_to in (near, far):
        found = [interval(row, POSITIVE, up_to=up_to) for row in draws.tolist()]
        covered = np.mean([one.low is not None and one.high is not None and one.low <= truth <= one.high for one in found])
        assert 0.93 <= covered <= 0.97, (n, up_to, covered)
        assert all(one.low is not None and one.low > 0 for one in found)
