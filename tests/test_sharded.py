"""A language model that is cut over ranks learns what it learns in one process, and goes on with any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT, completed
from tests.fixtures import MODES
from tests.sharded_worker import QUICK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("sharded")
    done = completed("-m", "tests.sharded_worker", folder, folder / "found.json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(("name", "layout"), QUICK.trained)
def test_gradients_parameters_and_metrics_are_those_of_one_process_in_every_mode(found, name: str, layout: str) -> None:
    (entry,) = [one for one in found["trained"] if (one["settings"], one["layout"]) == (name, layout)]
    assert entry["gradient"] == pytest.approx(dict.fromkeys(MODES, 0.0), abs=1e-10)
    assert entry["parameters"] == pytest.approx(dict.fromkeys(MODES, 0.0), abs=1e-10)
    assert entry["metrics"] < 1e-10
    assert entry["size"] > 1e-3
    assert entry["moved"] > 1e-4
    assert entry["apart"] > 1e-6 or name == "idle rank"  # whose three responses may be of one length


def test_each_rank_holds_its_share_of_the_parameters(found) -> None:
    for entry in found["trained"]:
        ranks = len(entry["held"])
        assert ranks in (2, 4)
        assert sum(entry["held"]) == entry["all"]
        assert max(entry["held"]) <= 1.05 * entry["all"] / ranks + 64, entry


@pytest.mark.parametrize(("family", "cp"), QUICK.families)
def test_every_family_has_the_log_probs_and_gradient_of_one_process_on_four_ranks(found, family: str, cp: int) -> None:
    """Five rows; one of them is empty. Qwen2 here ties its embeddings, GPT-2 has learned positions."""
    (entry,) = [one for one in found["families"] if (one["family"], one["cp"]) == (family, cp)]
    assert max(entry["apart"]) < 1e-12 * max(entry["size"], 1)
    assert entry["size"] > 1e-2


@pytest.mark.parametrize(("begun", "layout"), QUICK.resumed)
def test_a_run_goes_on_with_another_number_of_ranks(found, begun: str, layout: str) -> None:
    (entry,) = [one for one in found["resumed"] if (one["begun"], one["layout"]) == (begun, layout)]
    assert entry["parameters"] == pytest.approx(dict.fromkeys(MODES, 0.0), abs=1e-10)
    assert entry["metrics"] < 1e-10
