"""Ranks that are killed, interrupted or orphaned end the whole run at once, and the run goes on where it was.

One training run on two ranks is disturbed four times over, so that everything is started as few times as possible.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.cli import started
from tests.train_worker import flags

pytestmark = pytest.mark.slow

STEPS = 30


@dataclass(frozen=True)
class Ended:
    """How a disturbed run ended: exit code, what was said, seconds from the signal on, pids of its ranks, manifest status."""

    code: int
    said: list[str]
    seconds: float
    ranks: list[int]
    status: str


def _start(output: Path, *more: str) -> subprocess.Popen[str]:
    small = flags(steps=STEPS, dtype=None)
    return started("run", *small, "--checkpoint-every=3", "--dp=2", "--output", output, *more)


def _ranks(launcher: int) -> list[int]:
    """Process ids of the ranks, by rank, from /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except (OSError, ValueError):
            continue
        found |= {int(item[5:]): int(entry.name) for item in variables if item.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


def _alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def _lines(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _disturb(output: Path, at: int, number: int, victim: int | None, *more: str) -> Ended:
    """Send a signal to one rank, or to the launcher (None), once so many steps are recorded."""
    process = _start(output, *more)
    until = time.monotonic() + 120
    while _lines(output) < at and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    ranks = _ranks(process.pid)
    assert len(ranks) == 2, process.communicate(timeout=60)
    began = time.monotonic()
    os.kill(process.pid if victim is None else ranks[victim], number)
    _, said = process.communicate(timeout=120)
    while any(map(_alive, ranks)) and time.monotonic() < began + 60:
        time.sleep(0.01)
    status = json.loads((output / "manifest.json").read_text())["status"]
    return Ended(process.returncode, said.splitlines(), time.monotonic() - began, ranks, status)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "out"


@pytest.fixture(scope="module")
def disturbed(output: Path) -> dict[str, Ended]:
    return {
        "rank 1 killed": _disturb(output, 4, signal.SIGKILL, 1),
        "rank 0 killed": _disturb(output, 10, signal.SIGKILL, 0, "--resume"),
        "Ctrl-C": _disturb(output, 16, signal.SIGINT, None, "--resume"),
        "launcher killed": _disturb(output, 22, signal.SIGKILL, None, "--resume"),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_within_30_seconds_with_one_line_that_names_it(
    disturbed: dict[str, Ended], rank: int
) -> None:
    ended = disturbed[f"rank {rank} killed"]
    assert ended.code == 1
    assert ended.seconds < 30
    errors = [line for line in ended.said if not line.startswith("note: ")]
    assert errors == [f"aggcli: rank {rank} (process {ended.ranks[rank]}) was ended by SIGKILL; what was recorded is kept"]


def test_ctrl_c_on_ranks_finishes_the_step_and_exits_130(disturbed: dict[str, Ended]) -> None:
    ended = disturbed["Ctrl-C"]
    assert (ended.code, ended.status) == (130, "interrupted")
    assert ended.seconds < 30
    assert not any("Traceback" in line for line in ended.said)
    assert sum("go on with --resume --output" in line for line in ended.said) == 1
    assert sum("interrupted: finishing the step in hand" in line for line in ended.said) == 1
    assert all(line.startswith(("note: ", "aggcli: interrupted")) for line in ended.said)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with their launcher on Linux")
def test_ranks_do_not_outlive_a_killed_launcher(disturbed: dict[str, Ended]) -> None:
    ended = disturbed["launcher killed"]
    assert ended.code == -signal.SIGKILL
    assert ended.seconds < 30
    assert not any(map(_alive, ended.ranks))


def _parameters(directory: Path) -> dict[str, bytes]:
    with safe_open(directory / "checkpoint.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 (not a dict)


def test_after_all_of_it_the_records_and_parameters_are_those_of_the_undisturbed_run(
    disturbed: dict[str, Ended], output: Path, tmp_path: Path
) -> None:
    assert disturbed.keys() == {"rank 1 killed", "rank 0 killed", "Ctrl-C", "launcher killed"}
    for directory, more in ((output, ["--resume"]), (tmp_path / "out", [])):
        process = _start(directory, *more)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    for name in ("metrics.jsonl", "layouts.jsonl"):
        assert (output / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert _lines(output) == STEPS
    assert _parameters(output) == _parameters(tmp_path / "out")
    assert json.loads((output / "manifest.json").read_text())["status"] == "done"
    assert list(output.glob("metrics.jsonl.before-resume*")), "what was cut is kept"


def test_a_mistake_that_only_the_ranks_can_see_is_said_once_with_exit_code_2(disturbed: dict[str, Ended], output: Path) -> None:
    assert disturbed
    process = _start(output, "--resume", "--lr=0.1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    assert errors.startswith("aggcli: --resume: lr is 0.1 now and was 0.0003")
    assert errors.count("\n") == 1
