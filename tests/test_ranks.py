"""Real processes give the in-process numbers, under torchrun and under the tool's own launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT, completed, environment, on_ranks
from tests.rank_worker import FIXTURES, LAYOUTS

pytestmark = pytest.mark.slow

DUMP = Path(__file__).parent / "data" / "slime_rollout" / "0.pt"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    output = tmp_path_factory.mktemp("ranks") / "numbers.json"
    done = on_ranks(4, "tests.rank_worker", output, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {(entry["layout"], entry["fixture"]): entry for entry in json.loads(output.read_text())}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fixture", FIXTURES)
def test_each_real_rank_and_their_sum_give_the_in_process_numbers(measured, layout: str, fixture: str) -> None:
    entry = measured[layout, fixture]
    assert len(entry["ranks"]) == len(entry["twins"]) > 1 or layout == "dp1cp4"
    for rank, twin in zip(entry["ranks"], entry["twins"], strict=True):
        assert rank == pytest.approx(twin, rel=1e-12, abs=1e-15)
    assert entry["total"] == pytest.approx(entry["twin_total"], rel=1e-12, abs=1e-15)
    assert entry["maxima"] == entry["twin_maxima"]
    assert entry["lengths"] == entry["twin_lengths"]


def test_a_rank_without_samples_takes_part_and_adds_nothing(measured) -> None:
    entry = measured["dp3", "two samples"]
    assert entry["idle"] == 1
    assert any(not any(rank) for rank in entry["ranks"])


def _json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["steps"][0]["modes"]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    layouts = "dp2cp2:first-fit,dp3:first-fit"
    return _json(completed("-m", "aggcli", *_arguments(folder), "--layouts", layouts))


def _arguments(folder: Path) -> list[str]:
    return ["compare", "--rollouts", str(DUMP), "--json", "--output", str(folder / "out")]


def _same_numbers(real: dict[str, Any], twin: dict[str, Any]) -> None:
    assert real.keys() == twin.keys()
    for name, value in real.items():
        if name == "ranks":
            for a, b in zip(value, twin[name], strict=True):
                _same_numbers(a, b)
        elif isinstance(value, dict):
            _same_numbers(value, twin[name])
        elif isinstance(value, float):
            assert value == pytest.approx(twin[name], rel=1e-12, abs=1e-15), name
        else:
            assert value == twin[name], name


def test_our_own_launcher_on_dp2_cp2_gives_the_in_process_report(tmp_path: Path, in_process: dict[str, Any]) -> None:
    done = completed("-m", "aggcli", *_arguments(tmp_path), "--dp", 2, "--cp", 2)
    for mode, values in _json(done).items():
        _same_numbers(values["layouts"]["dp2cp2:first-fit"], in_process[mode]["layouts"]["dp2cp2:first-fit"])
    layouts = (tmp_path / "out" / "sample_mean" / "layouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["evaluated"] for line in layouts] == ["processes", *["in-process"] * 4]


def test_a_users_torchrun_is_joined_and_gives_the_in_process_report(tmp_path: Path, in_process: dict[str, Any]) -> None:
    done = on_ranks(3, "aggcli", *_arguments(tmp_path))
    for mode, values in _json(done).items():
        _same_numbers(values["layouts"]["dp3:first-fit"], in_process[mode]["layouts"]["dp3:first-fit"])


def test_a_users_mistake_on_real_ranks_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = completed("-m", "aggcli", "run", "--rollouts", tmp_path / "nothing.pt", "--dp", 2)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "nothing.pt" in done.stderr


# -- ranks and their launcher -----------------------------------------------------------------------------------------


def _children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _gone(process: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with their launcher on Linux")
@pytest.mark.slow
@pytest.mark.parametrize("later", [0.0, 0.2, 1.0])
def test_ranks_end_with_a_launcher_that_is_killed_while_they_still_import_and_leave_nothing(
    tmp_path: Path, later: float
) -> None:
    (tmp_path / "tmp").mkdir()
    small = ["--task=control", "--steps=100000", "--rollout-batch-size=2", "--n-samples-per-prompt=2"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "aggcli", "run", *small, "--dp=2", "--output=out"],
        cwd=tmp_path, env=environment(TMPDIR=str(tmp_path / "tmp")),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ranks: list[int] = []
    until = time.monotonic() + 60
    while len(ranks) < 2 and launcher.poll() is None and time.monotonic() < until:
        ranks = [
            child for child in _children(launcher.pid) if b"-m\0aggcli\0run" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
    time.sleep(later)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait(60)
    assert len(ranks) == 2
    until = time.monotonic() + 5
    while not all(map(_gone, ranks)) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(map(_gone, ranks))
    assert os.listdir(tmp_path / "tmp") == [], "no scratch folder of the launcher's is left"


def test_a_rank_whose_launcher_is_gone_before_its_first_line_does_not_begin() -> None:
    done = completed("-m", "aggcli", "--version", env=environment(AGGCLI_LAUNCHER="1"))  # the init process, no parent of ours
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    done = completed("-m", "aggcli", "--version", env=environment(AGGCLI_LAUNCHER=str(os.getpid())))
    assert done.stdout.startswith("aggcli ")
