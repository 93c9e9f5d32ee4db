"""Training on real ranks ends where training on one process does, for every mode, recipe and cut into micro-batches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli import ROOT, on_ranks
from tests.fixtures import MODES
from tests.train_worker import CASES, RECIPES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict[str, Any]]:
    output = tmp_path_factory.mktemp("ranks") / "trained.json"
    done = on_ranks(4, "tests.train_worker", output, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {(e["recipe"], e["cut"], e["layout"]): e for e in json.loads(output.read_text())}


@pytest.mark.parametrize(("recipe", "cut", "layout"), CASES)
def test_every_layout_ends_with_the_parameters_and_metrics_of_one_rank(trained, recipe: str, cut: str, layout: str) -> None:
    entry = trained[recipe, cut, layout]
    assert entry["parameters"] == pytest.approx(dict.fromkeys(MODES, 0.0), abs=1e-10)
    assert entry["metrics"] < 1e-10
    assert entry["ranks"] == 0.0, "ranks must hold the same parameters to the bit"


def test_bfloat16_under_context_parallelism_moves_the_parameters_where_one_rank_moves_them(trained) -> None:
    entry = trained["bfloat16", "all", "dp1cp2"]
    assert entry["moved"] > 1e-4
    assert len(entry["parted"]) == len(MODES)
    assert all(0 < share < 0.1 for share in entry["parted"]), "autocast rounds, and that is all it does"


def test_the_ratio_of_a_whole_response_is_that_of_one_rank_where_context_parallel_ranks_hold_its_parts(trained) -> None:
    entry = trained["gspo", "all", "dp2cp2"]
    assert entry["moved"] > 1e-4
    assert entry["parameters"] == pytest.approx(dict.fromkeys(MODES, 0.0), abs=1e-10)
    assert entry["metrics"] < 1e-10


def test_ranks_without_a_sample_change_nothing(trained) -> None:
    entry = trained["idle ranks", "all", "dp4"]
    assert entry["moved"] > 1e-4
    assert entry["parameters"] == pytest.approx(dict.fromkeys(MODES, 0.0), abs=1e-10)
    assert entry["metrics"] < 1e-10


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_runs_that_are_compared_have_moved_and_the_modes_have_parted(trained, recipe: str) -> None:
    entry = trained[recipe, "all", "dp1"]
    assert entry["moved"] > 1e-4
    assert entry["apart"] > 1e-5
