"""What a comparison could have shown: closed forms by hand, Cohen's tables, scipy's noncentral t, and planted differences."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from aggcli.analysis.power import (
    POWER,
    power_at,
    power_of,
    runs_needed,
    seeds_needed,
    smallest_difference,
    welch_power_at,
)
from aggcli.analysis.statistics import DifferenceTest, Interval, holm, holm_levels, paired_test, welch_error, welch_test
from tests.cli import aggcli, refused
from tests.test_results import comparison


def test_the_smallest_difference_of_two_seeds_is_that_of_the_cauchy_law():
    """One degree of freedom: the quantile of p is tan(pi (p - 1/2)), so 12.7062 + 1.3764, over the root of 2 seeds."""
    by_hand = 0.3 * (math.tan(math.pi * 0.475) + math.tan(math.pi * 0.3)) / math.sqrt(2)
    assert smallest_difference(0.3, 2, 0.05) == pytest.approx(by_hand, rel=1e-9)
    found = power_of(DifferenceTest(Interval(0.1, -1, 1, 2), 0.5, None, 0.3), 0.05)
    assert found is not None
    assert (found.smallest, found.each) == (pytest.approx(by_hand, rel=1e-9), "seeds")


@pytest.mark.parametrize(("effect", "runs"), [(0.2, 394), (0.5, 64), (0.8, 26)])
def test_the_runs_of_two_arms_that_are_not_paired_are_those_of_the_tables(effect: float, runs: int):
    """Cohen (1988): two-sided 5 %, power 80 %, two samples of one spread, where Welch's freedom is the pooled one."""
    assert runs_needed(effect, (1.0, 1.0), 0.05) == runs_needed(-2 * effect, (4.0, 4.0), 0.05) == runs


def test_what_welchs_test_could_have_shown_where_the_baseline_has_no_spread_is_that_of_one_sample():
    """Two runs against two that are equal: one degree of freedom, and the error is that of the two."""
    test = welch_test([1.0, 2.0], [4.0, 4.0])
    found = power_of(test, 0.05)
    assert found is not None
    assert found.smallest == pytest.approx(
        math.sqrt(0.5) * (math.tan(math.pi * 0.475) + math.tan(math.pi * 0.3)) / math.sqrt(2)
    )
    assert found.each == "runs an arm"
    assert power_of(welch_test([1.0], [4.0, 5.0]), 0.05) is None


def test_the_power_of_welchs_test_is_the_share_of_planted_differences_that_it_shows():
    """Standard deviations 1 and 3, six runs each: 20000 comparisons drawn; the share may be 0.01 off, three of its errors."""
    rng, level = np.random.default_rng(0), 0.01
    mine, base = rng.normal(4.0, 1.0, (20000, 6)), rng.normal(0.0, 3.0, (20000, 6))
    p = np.asarray(stats.ttest_ind(mine, base, axis=1, equal_var=False).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
    assert welch_power_at(4.0, (1.0, 9.0), 6, level) == pytest.approx(float((p < level).mean()), abs=0.01)


@pytest.mark.parametrize(
    ("runs", "spreads", "alarms"),
    [
        ((3, 3), (1, 1), 0.034),
        ((3, 3), (1, 3), 0.051),
        ((3, 5), (3, 1), 0.066),
        ((5, 5), (1, 3), 0.053),
        ((10, 10), (1, 1), 0.048),
    ],
)
def test_welchs_test_is_as_nearly_exact_as_the_docstrings_say(runs: tuple[int, int], spreads: tuple[int, int], alarms: float):
    """20000 comparisons of normal numbers that differ in nothing: 5 % of them told apart, and 80 % no further below 0 than
    what lies between the threshold and the smallest difference at 80 % power; errors of 0.0016 and 0.0028."""
    rng = np.random.default_rng(1)
    mine, base = (rng.normal(0, spread, (20000, n)) for n, spread in zip(runs, spreads, strict=True))
    variances, less = (mine.var(1, ddof=1), base.var(1, ddof=1)), mine.mean(1) - base.mean(1)
    error, freedom = np.array([welch_error((a, b), runs) for a, b in zip(*variances, strict=True)]).T
    assert float((np.abs(less) > stats.t.ppf(0.975, freedom) * error).mean()) == pytest.approx(alarms, abs=0.005)
    assert float((less > -stats.t.ppf(POWER, freedom) * error).mean()) == pytest.approx(0.804, abs=0.012)


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_seeds_of_a_small_a_medium_and_a_large_effect_are_those_of_the_tables(effect: float, seeds: int):
    """Cohen (1988): two-sided 5 %, power 80 %, one sample of differences."""
    assert seeds_needed(effect, 1.0, 0.05) == seeds_needed(-2 * effect, 2.0, 0.05) == seeds


@pytest.mark.parametrize("level", [0.05, 0.05 / 26])
@pytest.mark.parametrize("effect", [0.3, 1.0, 2.5])
def test_the_seeds_needed_are_the_fewest_whose_power_by_the_noncentral_t_is_80_percent(effect: float, level: float):
    def power(n: int) -> float:
        critical = stats.t.ppf(1 - level / 2, n - 1)
        away = effect * math.sqrt(n)
        return float(stats.nct.sf(critical, n - 1, away) + stats.nct.cdf(-critical, n - 1, away))

    found = seeds_needed(effect, 1.0, level)
    assert found is not None
    assert power(found) >= POWER > power(found - 1)
    assert power_at(effect, 1.0, found, level) == pytest.approx(power(found), abs=1e-6)


def test_power_is_known_where_scipy_has_no_noncentral_t():
    """Noncentrality 332 with one degree of freedom: |Z + 332| > 331 |S|, so about P(|S| < 1.004) = 0.685 of a normal S."""
    assert power_at(332 / math.sqrt(2), 1.0, 2, float(2 * stats.t.sf(331, 1))) == pytest.approx(
        2 * stats.norm.cdf(332 / 331) - 1, abs=2e-3
    )
    assert seeds_needed(1e-3, 1.0, 0.05) is None, "beyond the most that are counted"


def test_a_pair_is_tested_at_5_percent_over_the_tests_that_are_not_shown():
    """p of 0.01, 0.026 and 0.03: Holm shows the first (0.03), and the second would need 0.05 / 2, as would the third."""
    p_holm = holm([0.01, 0.026, None, 0.03])
    assert p_holm == pytest.approx([0.03, 0.052, None, 0.052])
    assert holm_levels(p_holm) == pytest.approx([0.05 / 3, 0.025, None, 0.025])
    assert holm([0.01, 0.0249, None, 0.03])[1] == pytest.approx(0.0498)


@pytest.mark.parametrize(("n", "tests"), [(3, 1), (5, 13), (10, 13)])
def test_a_difference_planted_at_the_stated_size_is_shown_in_80_percent_of_comparisons(n: int, tests: int):
    """Each comparison states its own size from its own spread; 2,000 of them, within 3.5 binomial standard errors (3.1 %)."""
    rng, level, found = np.random.default_rng([n, tests]), 0.05 / tests, 0
    for differences in rng.normal(0, 0.02, (2000, n)).tolist():
        size = smallest_difference(float(np.std(differences, ddof=1)), n, level)
        tested = paired_test({seed: 0.6 + one + size for seed, one in enumerate(differences)}, dict.fromkeys(range(n), 0.6))
        assert tested is not None
        assert tested.p is not None
        found += tested.p < level
    assert abs(found / 2000 - POWER) < 3.5 * math.sqrt(POWER * (1 - POWER) / 2000)


# -- planning ---------------------------------------------------------------------------------------------------------


def paired(folder: Path) -> list[Path]:
    """Right rollouts of 100 in every step: prompt_mean is ahead by 0.08, 0.10 and 0.12, with a standard deviation of 0.02."""
    return comparison(folder, {"sample_mean": [50, 51, 50], "prompt_mean": [58, 61, 62]})


def test_the_plan_says_how_many_seeds_show_a_difference_at_the_level_of_this_comparison_and_alone(
    tmp_path: Path, capsys
) -> None:
    runs = paired(tmp_path)
    found = json.loads(aggcli(capsys, "compare", *runs, "--no-fit", "--plan", "0.02", "--json").out)
    plan = found["plan"]
    (one,) = plan["pairs"]
    assert (plan["outcome"], plan["difference"], one["mode"], one["n"]) == ("accuracy", 0.02, "prompt_mean", 3)
    own = next(row for row in found["outcomes"] if (row["outcome"], row["mode"]) == ("accuracy", "prompt_mean"))
    spread = math.sqrt(3) * (own["difference_high"] - own["difference"]) / 4.302652729911275
    assert one["std"] == pytest.approx(spread)
    assert plan["level"] == pytest.approx(0.05 / plan["tests"])
    for seeds, level in ((one["seeds"], plan["level"]), (one["seeds_alone"], 0.05)):
        assert power_at(0.02, spread, seeds, level) >= 0.8 > power_at(0.02, spread, seeds - 1, level)
    out = " ".join(aggcli(capsys, "compare", *runs, "--no-fit", "--plan", "0.02").out.split())
    assert "Seeds that show a difference of 0.02 in accuracy in training rollouts, equal steps with 80 % power" in out
    assert (
        f"prompt_mean: {one['seeds']} seeds among 4 tests corrected by Holm, {one['seeds_alone']} seeds as the only test" in out
    )


def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, capsys) -> None:
    runs = paired(tmp_path)
    assert "must be a difference above 0" in refused(aggcli(capsys, "compare", *runs, "--plan", "0"))
    assert "is not in the comparison" in refused(aggcli(capsys, "compare", *runs, "--plan", "0.1", "--plan-outcome", "accurcy"))
    assert refused(aggcli(capsys, "compare", *runs, "--plan", "1.4")).endswith(
        "--plan 1.4: accuracy in training rollouts, equal steps cannot differ by more than 1"
    )
    assert "give the difference to plan for" in refused(aggcli(capsys, "compare", *runs, "--plan-outcome", "accuracy"))
