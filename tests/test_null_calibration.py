"""The statistics of `compare` on real runs that differ in nothing but their seed: a difference may be called in 5 % only.

480 runs of three steps are trained, evaluated, recorded and read back by the functions of `experiments/05-null-calibration.py`,
which does the same at length. They make 80 comparisons of 3 seeds against 3 others, all disjoint, so the counts follow a
binomial law. The seeds are fixed. Were they drawn afresh, a right tool would fail a check by chance in 0.1 % of draws at most:
each refuses what lies outside the middle 99.9 % of the law.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from aggcli.analysis import statistics
from aggcli.analysis.histories import History, read_histories

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent.parent / "experiments" / "05-null-calibration.py"
RUNS, SEEDS, WINDOW = 480, 3, 2 / 3
CONFIDENCE = 0.999
FIGURES = ("accuracy", "response_length")


def _experiment() -> ModuleType:
    """The script as a module; its name is none that `import` could say."""
    spec = importlib.util.spec_from_file_location("null_calibration", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


experiment = _experiment()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[History]:
    folder = tmp_path_factory.mktemp("null")
    experiment.record(folder, RUNS, {**experiment.SETTINGS, "steps": 3})
    read, notes = read_histories([folder])
    assert (len(read), notes) == (RUNS, [])
    return read


def _is_within(count: Any) -> bool:
    """Whether a `Count` of the script lies where a right tool's does."""
    low, high = count.band(CONFIDENCE)
    return low <= count.hits <= high


def test_the_runs_learn_and_no_two_of_them_are_the_same(pool: list[History]) -> None:
    accuracy_RE = np.stack([run.measures["accuracy"] for run in pool])
    assert accuracy_RE[:, -1].mean() > accuracy_RE[:, 0].mean() + 0.1
    assert len({run.measures["entropy_loss"].tobytes() for run in pool}) == RUNS


@pytest.mark.parametrize("figure", FIGURES)
def test_seeds_alone_are_called_a_difference_in_5_percent_of_comparisons(pool: list[History], figure: str) -> None:
    count = experiment.false_positives(experiment.compared(pool, SEEDS, window=WINDOW), figure)
    assert count.trials == RUNS // (2 * SEEDS)
    assert _is_within(count), str(count)


@pytest.mark.parametrize("figure", FIGURES)
def test_intervals_of_three_seeds_hold_the_mean_of_all_runs_in_95_percent(pool: list[History], figure: str) -> None:
    """The mean of all 480 stands for the true one: an arm of it is nearer to it by 0.3 % of the interval."""
    truth = float(np.mean(experiment.values_of_all(pool, WINDOW)[figure]))
    count = experiment.coverage_of_the_mean(experiment.compared(pool, SEEDS, window=WINDOW), figure, truth)
    values_AS = np.reshape(experiment.values_of_all(pool, WINDOW)[figure], (-1, SEEDS))
    assert count.trials == (np.ptp(values_AS, axis=1) > 0).sum() >= 0.95 * RUNS // SEEDS, "equal values have no interval"
    assert _is_within(count), str(count)


def test_an_answer_says_a_difference_in_any_outcome_in_5_percent_of_comparisons_at_most(pool: list[History]) -> None:
    found = experiment.compared(pool, SEEDS, window=WINDOW)
    assert {one.tests for one in found} <= {9, 10, 11, 12}, "all outcomes are tested that both arms have"
    count = experiment.said(found)
    assert count.hits <= count.band(CONFIDENCE)[1], str(count)
    uncorrected = experiment.each_for_itself(found)
    assert uncorrected.hits > uncorrected.band(CONFIDENCE)[1], "what the correction is for"


def test_a_difference_planted_at_the_stated_size_is_shown_in_80_percent_of_comparisons(pool: list[History]) -> None:
    count = experiment.planted(pool, SEEDS, "accuracy_on_fresh_prompts", trials=200)
    assert count.trials >= 195
    assert _is_within(count), str(count)


def test_intervals_with_a_normal_quantile_would_be_refused(pool: list[History], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks above are for: 1.96 standard errors over 3 seeds hold the truth in 81 %, and 0 as rarely."""
    monkeypatch.setattr(statistics, "student_t", lambda freedom, up_to=0.975: 1.959964)
    found = experiment.compared(pool, SEEDS, window=WINDOW)
    for figure in FIGURES:
        truth = float(np.mean(experiment.values_of_all(pool, WINDOW)[figure]))
        assert not _is_within(experiment.coverage_of_the_mean(found, figure, truth))
        assert not _is_within(experiment.coverage_of_zero(found, figure))


def test_the_interval_of_a_difference_leaves_0_out_exactly_where_p_is_below_5_percent(pool: list[History]) -> None:
    for figure in FIGURES:
        pairs = list(experiment.pairs(experiment.compared(pool, SEEDS, window=WINDOW), figure))
        known = [pair.test for pair in pairs if pair.test.difference.low is not None]
        assert len(known) >= 0.95 * len(pairs) > 0
        assert all((test.difference.low <= 0 <= test.difference.high) == (test.p >= 0.05) for test in known)
