"""Processes that share the runs of a stack: what they exchange, and what happens when one of them ends."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from aggcli import grid
from aggcli import team as team_module
from aggcli.cli import live
from aggcli.config import ObjectiveConfig
from aggcli.errors import RecordError
from aggcli.jobs import training
from aggcli.jobs.listening import heard_by
from aggcli.measurement.comparison import LayoutComparison
from aggcli.measurement.report import StepReport
from aggcli.rules import SAMPLE_MEAN
from aggcli.team import MemberFailed, Team, together
from aggcli.training.loop import TrainedStep
from aggcli.training.report import RunReport
from aggcli.training.stack import RunSpec
from tests.cli import aggcli, records, refused, results_of, started
from tests.fixtures import MODES
from tests.train_worker import flags

FLAGS = flags(steps=None)


def test_every_member_has_its_number_and_the_root_gets_all_results_in_order() -> None:
    assert together(3, lambda team: (team.rank, team.size, os.getpid() == root)) == [(0, 3, True), (1, 3, False), (2, 3, False)]


root = os.getpid()


def test_everyone_tells_every_member_the_items_of_all_and_gather_only_the_root() -> None:
    def work(team: Team) -> tuple[list[int], list[int]]:
        return team.everyone(10 * team.rank), team.gather(team.rank)

    assert together(3, work) == [([0, 10, 20], [0, 1, 2]), ([0, 10, 20], []), ([0, 10, 20], [])]


def test_a_member_that_is_killed_is_named_with_its_signal() -> None:
    def work(team: Team) -> None:
        if team.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        team.everyone(None)

    with pytest.raises(MemberFailed, match=r"process 2 \(pid \d+\), which trained .* was ended by SIGKILL") as caught:
        together(3, work)
    assert caught.value.exit_code == 1


def test_a_member_that_says_no_is_heard_at_the_root_in_its_own_words_and_code() -> None:
    def work(team: Team) -> None:
        if team.rank == 1:
            raise RecordError("no room")
        team.everyone(None)

    with pytest.raises(MemberFailed, match=r"^no room$") as caught:
        together(2, work)
    assert caught.value.exit_code == 2


def test_a_member_that_cannot_write_is_heard_as_this_process_would_say_it() -> None:
    def work(team: Team) -> None:
        if team.rank == 1:
            raise OSError(28, "No space left on device", "out/metrics.jsonl")
        team.everyone(None)

    with pytest.raises(MemberFailed, match=r"^out/metrics\.jsonl: No space left on device$") as caught:
        together(2, work)
    assert caught.value.exit_code == 2


def test_a_signal_without_a_name_is_given_by_its_number() -> None:
    def work(team: Team) -> None:
        if team.rank == 1:
            os.kill(os.getpid(), 35)
        team.everyone(None)

    with pytest.raises(MemberFailed, match="was ended by signal 35; what was recorded is kept"):
        together(2, work)


def test_a_member_that_is_interrupted_interrupts_the_root() -> None:
    def work(team: Team) -> None:
        if team.rank == 1:
            raise KeyboardInterrupt
        team.everyone(None)

    with pytest.raises(KeyboardInterrupt):
        together(2, work)


def test_an_interrupted_root_interrupts_a_member_that_waits_for_it(tmp_path: Path) -> None:
    def work(team: Team) -> None:
        if team.is_root:
            team.gather(None)
            raise KeyboardInterrupt
        try:
            team.everyone(None)
        except KeyboardInterrupt:
            (tmp_path / "told").touch()
            raise

    with pytest.raises(KeyboardInterrupt):
        together(2, work)
    assert (tmp_path / "told").exists()


def test_a_member_that_is_stopped_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "KILL_AFTER", 0.1)
    members = []

    def work(team: Team) -> None:
        if team.is_root:
            members.append(team.gather(None)[1])
            os.kill(members[0], signal.SIGSTOP)
            raise KeyboardInterrupt
        team.everyone(os.getpid())

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        together(2, work)
    assert time.monotonic() - began < 5
    with pytest.raises(ProcessLookupError):
        os.kill(members[0], 0)


def test_closed_standard_streams_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert together(2, lambda team: team.rank) == [0, 1]


def test_members_end_with_a_root_that_fails(tmp_path: Path) -> None:
    def work(team: Team) -> None:
        if team.is_root:
            (tmp_path / "0").touch()
            raise ValueError("root")
        (tmp_path / "1").write_text(str(os.getpid()))
        team.everyone(None)

    with pytest.raises(ValueError, match="root"):
        together(2, work)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "1").read_text()), 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone") / "out"
    return results_of("compare", *FLAGS, "--seeds=2", "--steps=4", "--processes=1", "--output", directory)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_runs_shared_out_are_the_runs_of_one_process(capsys, tmp_path: Path, alone: Path, processes: int) -> None:
    directory = tmp_path / "out"
    alone = Path(shutil.copytree(alone, tmp_path / "alone"))
    told = aggcli(
        capsys, "compare", *FLAGS, "--seeds=2", "--steps=4", f"--processes={processes}", "--output", directory, "--json"
    )
    assert told.code == 0, told.err
    manifest, expected = (json.loads((one / "manifest.json").read_text()) for one in (directory, alone))
    assert manifest["processes"] == processes
    assert manifest["runs"] == expected["runs"]
    assert json.loads(told.out)["modes"] == manifest["final"]["modes"]
    for name in manifest["runs"]:
        for file in ("metrics.jsonl", "layouts.jsonl"):
            assert _close(records(directory / name / file), records(alone / name / file)) < 1e-10
        own, other = (json.loads((one / name / "manifest.json").read_text()) for one in (directory, alone))
        assert own["evaluation"] == other["evaluation"]
    longer = [*FLAGS, "--seeds=2", "--steps=6", "--resume", "--output"]
    assert aggcli(capsys, "compare", *longer, directory).code == 0
    assert json.loads((directory / "manifest.json").read_text())["processes"] == processes, "goes on as it was begun"
    assert aggcli(capsys, "compare", *longer, alone).code == 0
    last = Path(manifest["runs"][-1], "metrics.jsonl")
    assert _close(records(directory / last), records(alone / last)) < 1e-10
    assert len(records(alone / last)) == 6


def _close(a: object, b: object) -> float:
    """The largest difference of numbers at the same place; everything else must be equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        return max((_close(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b)
        return max((_close(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b)
    assert a == b
    return 0.0


def test_no_more_processes_than_runs_and_none_for_a_single_run(capsys, tmp_path: Path) -> None:
    assert aggcli(capsys, "run", *FLAGS, "--steps=1", "--processes=4", "--output", tmp_path / "run").code == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["processes"] == 1
    wide = [*FLAGS, "--modes=token_mean,constant", "--seeds=1", "--steps=1", "--processes=9"]
    assert aggcli(capsys, "compare", *wide, "--output", tmp_path / "two").code == 0
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["processes"] == 2
    assert "--processes 0: must be at least 1" in refused(aggcli(capsys, "compare", *FLAGS, "--processes=0"))


@pytest.mark.slow
def test_a_run_that_diverges_in_another_process_is_named_once_and_the_others_go_on(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grid.runs_of
    monkeypatch.setattr(
        grid,
        "runs_of",
        lambda *given: [dataclasses.replace(run, lr=1e6) if run.mode == "constant" else run for run in made(*given)],
    )
    wild = ["--optimizer=sgd", "--clip-grad=0", "--lr=0.01", "--num-iterations=2", "--kl-coef=0.1", "--no-layout-records"]
    command = ["compare", *FLAGS, *wild, "--modes=token_mean,constant", "--seeds=1", "--processes=2"]
    told = aggcli(capsys, *command, "--steps=5", "--output", tmp_path / "out")
    assert told.code == 1
    assert told.err.count("note: run constant, seed 0 diverged in step ") == 1
    assert told.err.splitlines()[-1].startswith("aggcli: 1 of 2 runs diverged: run constant, seed 0 diverged in step ")
    assert len(records(tmp_path / "out" / "token_mean" / "seed-0" / "metrics.jsonl")) == 10
    assert 1 <= len(records(tmp_path / "out" / "constant" / "seed-0" / "metrics.jsonl")) < 10
    told = aggcli(capsys, *command, "--steps=6", "--output", tmp_path / "out", "--resume")
    assert told.code == 1
    assert told.err.count("note: run constant, seed 0 diverged in step ") == 1, "it stays where it was, and is still named"
    assert len(records(tmp_path / "out" / "token_mean" / "seed-0" / "metrics.jsonl")) == 12


def test_the_live_table_has_a_row_for_each_mode_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "is_terminal", lambda: True)
    rules = [dataclasses.replace(SAMPLE_MEAN, name=mode) for mode in ("a", "b")]
    runs = [RunSpec(rule.name, 0, ObjectiveConfig(loss_aggregation=rule), 1e-3) for rule in rules]
    values = [{"samples": 4, "correct/count": 3, "raw_reward": 0.75, "pg_loss": None}, {"samples": 0, "raw_reward": None}]
    comparison = LayoutComparison(("dp1",), (), None, {})
    steps = [
        StepReport(0, "", (run.mode,), {run.mode: value}, [], comparison, "", False, [], {}, {}, {})
        for run, value in zip(runs, values, strict=True)
    ]
    reports = [RunReport(run, step, False) for run, step in zip(runs, steps, strict=True)]
    with heard_by(live.Terminal()):
        shown = training._numbers(TrainedStep(0, [(0, []), (1, reports)], [], 1.0, 4))
    assert shown == [("a", values[0]), ("b", values[1])]
    other = ("a", {"raw_reward": 0.25, "correct/count": 2, "samples": 4, "pg_loss": -1.0})
    table = live._table("step 1/2", [*shown, other], "caption")
    assert [list(column.cells) for column in table.columns] == [["a", "b"], ["0.5000", ""], ["0.6250", ""], ["-1.0000", ""]]
    monkeypatch.setattr(live, "is_terminal", lambda: False)
    with heard_by(live.Terminal()):
        assert training._numbers(TrainedStep(0, [(1, reports)], [], 1.0, 4)) == []


@pytest.mark.slow
def test_a_killed_member_ends_the_whole_within_seconds_and_the_stack_is_resumable(tmp_path: Path, alone: Path) -> None:
    directory = tmp_path / "out"
    command = ["compare", *FLAGS, "--seeds=2", "--checkpoint-every=2", "--processes=2", "--output", directory]
    process = started(*command, "--steps=4000")
    metrics = directory / MODES[1] / "seed-0" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    (member,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(member), signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith(f"aggcli: process 1 (pid {member}), which trained a share of the runs, was ended by SIGKILL")
    assert "Traceback" not in errors
    assert json.loads((directory / "manifest.json").read_text())["status"] == "failed"
    done = metrics.read_bytes().count(b"\n")
    process = started(*command, f"--steps={done + 4}", "--resume")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    for run in json.loads((directory / "manifest.json").read_text())["runs"]:
        lines = records(directory / run / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(done + 4))
        whole = records(alone / run / "metrics.jsonl")[:4]
        for line in [*lines, *whole]:  # evaluated where there is a checkpoint, which the two runs have at different steps
            line.pop("layout_deviation")
        assert _close(lines[:4], whole) < 1e-10
