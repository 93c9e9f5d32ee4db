"""Compute-performance curves: the paper's parameters by its own grid, planted parameters, refusals, and modes over seeds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, stats

from aggcli.analysis.comparison import compare
from aggcli.analysis.curves import Curve, FitOptions, Refused, bent_p_value, fit, points_of
from aggcli.analysis.efficiency import common_asymptote, efficiency, fit_runs, mode_curves
from aggcli.analysis.histories import MEASURES, History
from aggcli.analysis.sigmoid import CurveParameters, Grid, grid_search, sigmoid, slopes
from tests.speed import few

SCALE_RL = {
    "ScaleRL": (2542, 1.92, 0.610),
    "32k context": (11272, 1.89, 0.645),
    "batch 2048": (10909, 1.70, 0.645),
    "batch 512": (2818, 1.77, 0.605),
    "Scout": (4242, 1.65, 0.710),
    "8 generations": (2542, 2.44, 0.585),
    "24 generations": (3054, 2.22, 0.590),
    "32 generations": (2936, 2.07, 0.595),
}
"""C_mid, B and A as the paper prints them (arXiv:2510.13786)."""
PAPER_GRID = Grid(np.round(np.arange(0.450, 0.8001, 0.005), 3), np.linspace(100.0, 40000.0, 100))
"""The paper's own, for pass rates against GPU-hours: A in 0.450, 0.455, ..., 0.800 and 100 values of C_mid in [100, 40000]."""
TRUTH = CurveParameters(0.3, 0.8, 1.8, 2e5)
C_60 = np.linspace(0, 1e6, 60)
COARSE = Grid(np.linspace(0.7, 1.4, 10), np.geomspace(5e4, 2e6, 14))


def noisy(seed: int, truth: CurveParameters = TRUTH, deviation: float = 0.02) -> np.ndarray:
    return sigmoid(C_60, *truth) + np.random.default_rng([seed, 17]).normal(0, deviation, 60)


def run(label: str, seed: int, accuracy: np.ndarray, tokens: np.ndarray = C_60) -> History:
    steps = np.arange(len(tokens))
    blank = np.full(len(tokens), np.nan)
    measures = {name: accuracy if name == "accuracy" else blank for name in MEASURES}
    return History(Path(label), label, seed, "done", {}, {}, steps, tokens, blank, measures, label=label)


def test_the_sigmoid_starts_at_r0_is_half_way_at_the_midpoint_and_ends_at_a():
    assert sigmoid(0, *TRUTH) == 0.3
    assert sigmoid(2e5, *TRUTH) == pytest.approx(0.55)
    assert sigmoid(1e300, *TRUTH) == pytest.approx(0.8)
    assert sigmoid(4e5, *TRUTH) == pytest.approx(0.3 + 0.5 / (1 + 0.5**1.8))


def test_the_slopes_are_those_of_finite_differences():
    found = slopes(C_60, TRUTH)
    ways = [(lambda h: CurveParameters(0.3, 0.8 + h, 1.8, 2e5)), (lambda h: CurveParameters(0.3, 0.8, 1.8 * math.exp(h), 2e5))]
    ways += [(lambda h: CurveParameters(0.3, 0.8, 1.8, 2e5 * math.exp(h))), (lambda h: CurveParameters(0.3 + h, 0.8, 1.8, 2e5))]
    for column, way in enumerate(ways):
        by_hand = (sigmoid(C_60, *way(1e-5)) - sigmoid(C_60, *way(-1e-5))) / 2e-5
        np.testing.assert_allclose(found[:, column], by_hand, atol=1e-8)


@pytest.mark.parametrize("name", few(SCALE_RL))
def test_the_papers_own_grid_gives_its_own_parameters_back(name: str):
    """Off its cells the best one is near: A within three cells of 0.005, C_mid within two of 403 GPU-hours, B within 0.1."""
    midpoint, exponent, asymptote = SCALE_RL[name]
    C = np.arange(1500.0, 50001, 500)
    found = grid_search(C, sigmoid(C, 0.3, asymptote, exponent, midpoint), PAPER_GRID, 0.3).best
    assert abs(found.asymptote - asymptote) <= 0.0151
    assert abs(found.midpoint - midpoint) <= 2 * 403.1
    assert abs(found.exponent - exponent) <= 0.1
    polished = fit(C, sigmoid(C, 0.3, asymptote, exponent, midpoint), FitOptions(0.3, PAPER_GRID))
    assert isinstance(polished, Curve)
    assert [polished.asymptote.mean, polished.exponent.mean, polished.midpoint.mean] == pytest.approx(
        [asymptote, exponent, midpoint], rel=1e-5
    )


def test_parameters_that_lie_on_the_papers_grid_come_back_exactly():
    midpoint = float(PAPER_GRID.midpoints[9])
    C = np.arange(1500.0, 30000, 400)
    search = grid_search(C, sigmoid(C, 0.3, 0.61, 1.92, midpoint), PAPER_GRID, 0.3)
    assert search.best == pytest.approx((0.3, 0.61, 1.92, midpoint), rel=1e-6)
    assert (len(PAPER_GRID.asymptotes), len(PAPER_GRID.midpoints)) == (71, 100)


@pytest.mark.parametrize("start", [None, 0.3])
def test_the_exponent_of_every_cell_is_as_good_as_scipys_curve_fit_makes_it(start: float | None):
    """Cells around the truth, where the paper's method would call curve_fit one by one."""
    R = noisy(0)
    grid = Grid(np.array([0.74, 0.8, 0.95]), np.array([1.2e5, 2e5, 3.5e5]))
    search = grid_search(C_60, R, grid, start)
    for i, asymptote in enumerate(grid.asymptotes):
        for j, midpoint in enumerate(grid.midpoints):

            def model(C: np.ndarray, exponent: float, base: float = 0.3, A=asymptote, mid=midpoint) -> np.ndarray:
                return sigmoid(C, base, A, exponent, mid)

            first = [1.0, 0.3] if start is None else [1.0]
            best = optimize.curve_fit(model, C_60, R, p0=first, bounds=(1e-2, 20))[0]
            least = float(((model(C_60, *best) - R) ** 2).sum())
            assert search.squares[i, j] <= least * (1 + 1e-4)
            assert search.cell(i, j).exponent == pytest.approx(best[0], rel=0.02)


@pytest.mark.slow
def test_planted_parameters_lie_in_their_own_intervals_in_95_percent_of_noisy_trials():
    """150 trials; 0.95 minus 3.5 binomial standard errors (1.8 %) is 0.888."""
    truth = np.array([TRUTH.asymptote, TRUTH.exponent, TRUTH.midpoint])
    inside = []
    for seed in range(150):
        found = fit(C_60, noisy(seed), FitOptions(grid=COARSE))
        assert isinstance(found, Curve)
        bounds = np.array([(one.low, one.high) for one in (found.asymptote, found.exponent, found.midpoint)])
        inside.append((bounds[:, 0] <= truth) & (truth <= bounds[:, 1]))
    covered = np.mean(inside, axis=0)
    assert (covered >= 0.888).all(), covered
    assert (covered < 1).all(), covered


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.03])
def test_curves_that_have_not_bent_are_refused(deviation: float):
    """A sixth of C_mid, a power law and a straight line; at most 1 in 30 is let through, where the level says 1 %."""
    early = sigmoid(C_60, 0.3, 0.8, 1.5, 6e6)
    for shape in (early, 0.3 + 0.3 * (C_60 / 1e6) ** 0.5, 0.3 + 0.3 * C_60 / 1e6):
        rng = np.random.default_rng(8)
        gain = (shape[-1] - shape[0]) / 0.3
        trials = [fit(C_60, shape + gain * rng.normal(0, deviation, 60), FitOptions()) for _ in range(10 if deviation else 1)]
        assert sum(isinstance(found, Curve) for found in trials) <= (1 if deviation else 0)
        assert any("not bent" in found.reason for found in trials if isinstance(found, Refused))


@pytest.mark.parametrize("start", [None, 0.3])
def test_the_p_of_a_bend_is_by_the_power_law_that_scipy_fits(start: float | None):
    """R_0 + k C^B by `curve_fit`, and the F-test by `scipy.stats`."""
    R = noisy(3, deviation=0.1)

    def power_law(C: np.ndarray, k: float, B: float, R_0: float = 0.3) -> np.ndarray:
        return R_0 + k * (C / C_60[-1]) ** B

    found, _ = optimize.curve_fit(power_law, C_60, R, [0.4, 0.4] if start else [0.4, 0.4, 0.3], ftol=1e-14, xtol=1e-14)
    left, freedom = float(((R - power_law(C_60, *found)) ** 2).sum()), 57 if start else 56
    squares = 0.93 * left
    expected = stats.f.sf((left - squares) / (squares / freedom), 1, freedom)
    assert bent_p_value(C_60, R, squares, start) == pytest.approx(expected, rel=1e-6)


def test_the_refusal_says_why():
    flat = fit(C_60, 0.5 + np.random.default_rng(0).normal(0, 0.02, 60))
    assert isinstance(flat, Refused)
    assert "nothing has been learned yet" in flat.reason
    short = fit(C_60[:7], noisy(0)[:7])
    assert short == Refused("7 points; a curve needs at least 8")
    early = fit(C_60[:10], sigmoid(C_60[:10], *TRUTH._replace(midpoint=1e6)))
    assert isinstance(early, Refused)
    assert "before half of the gain" in early.reason


def test_points_without_a_number_are_left_out_and_long_curves_are_averaged():
    C = np.arange(1000.0)
    compute, reward = points_of(C, np.where(C < 200, np.nan, 1.0))
    assert (compute.min(), len(compute), set(reward)) == (203.5, 100, {1.0})
    found = fit(C_60, np.where(C_60 < 1e5, np.nan, noisy(1, deviation=0.005)), FitOptions(start=0.3))
    assert isinstance(found, Curve)
    assert found.asymptote.mean == pytest.approx(0.8, abs=0.02)
    assert found.at(2e5) == pytest.approx(0.55, abs=0.02)


def test_modes_are_summed_up_over_their_bent_seeds_and_the_rest_is_said():
    runs = [run("a", seed, noisy(seed)) for seed in range(4)] + [run("a", 9, noisy(9)[:5], C_60[:5])]
    found = mode_curves(fit_runs(runs, options=FitOptions(grid=COARSE)))["a"]
    assert found.asymptote is not None
    assert found.asymptote.n == 4
    assert found.refused == ("seed 9: 5 points; a curve needs at least 8",)
    asymptotes = [
        curve.curve.asymptote.mean
        for curve in fit_runs(runs[:4], options=FitOptions(grid=COARSE))
        if isinstance(curve.curve, Curve)
    ]
    assert found.asymptote.mean == pytest.approx(np.mean(asymptotes))
    timed = mode_curves(fit_runs(runs, "seconds"))["a"]
    assert timed.exponent is None
    assert "the seconds of this run were not recorded" in timed.refused[0]


def test_a_common_asymptote_shows_the_planted_ratio_of_efficiencies():
    fast, slow = TRUTH._replace(exponent=2.4), TRUTH._replace(exponent=1.6)
    runs = [run("slow", s, noisy(s, slow)) for s in range(5)] + [run("fast", s, noisy(50 + s, fast)) for s in range(5)]
    fitted = fit_runs(runs, options=FitOptions(grid=COARSE))
    (pair,) = efficiency(fitted, "slow")
    assert pair.asymptote == pytest.approx(0.8, abs=0.02)
    assert pair.ratio.low is not None
    assert pair.ratio.high is not None
    assert pair.ratio.low < 1.5 < pair.ratio.high
    assert pair.test.p is not None
    assert pair.test.p < 0.05
    (tested,) = compare(runs, "slow", ratios=[pair]).ratios
    assert tested.p_holm is not None
    assert tested.p_holm > pair.test.p, "corrected with the other outcomes"
    assert pair.test.difference.mean == pytest.approx(math.log(pair.ratio.mean))


def test_the_common_asymptote_is_the_one_under_which_all_runs_together_fit_best():
    """Second route: A held fixed there, and 0.002 to either side, each run refitted by scipy's curve_fit."""
    runs = [run("a", s, noisy(s, TRUTH._replace(exponent=1.5 + s / 4)), C_60) for s in range(3)]
    found, fitted = common_asymptote(fit_runs(runs, options=FitOptions(grid=COARSE)), "tokens", "accuracy")

    def left_over(asymptote: float) -> float:
        def model(C: np.ndarray, exponent: float, log_midpoint: float, start: float) -> np.ndarray:
            return sigmoid(C, start, asymptote, exponent, math.exp(log_midpoint))

        total = 0.0
        for one in runs:
            R = one.measures["accuracy"]
            best = optimize.curve_fit(model, one.tokens, R, p0=(1.8, math.log(2e5), 0.3))[0]
            total += float(((model(one.tokens, *best) - R) ** 2).sum())
        return total

    own = sum(
        float(((sigmoid(one.tokens, *at) - one.measures["accuracy"]) ** 2).sum()) for one, at in zip(runs, fitted, strict=True)
    )
    assert own == pytest.approx(left_over(found), rel=1e-6)
    assert left_over(found) < min(left_over(found - 0.002), left_over(found + 0.002))
