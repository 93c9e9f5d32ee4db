"""The layout check of a training run: it fails where a layout moves a number, and everything is recorded all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT, aggcli, environment, exactly, records
from tests.faults import averaged, ranks_add_up_to
from tests.train_worker import flags

ONE_STEP = [*flags(steps=1), "--layouts=dp1,dp2,dp4"]


@pytest.mark.parametrize(
    "command",
    [["run", "--loss-aggregation=token_mean"], ["compare", "--modes=token_mean", "--seeds=1"]],
    ids=["run", "compare"],
)
def test_a_training_run_whose_layouts_disagree_ends_with_exit_code_1_and_keeps_its_records(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    assert aggcli(capsys, *command, *ONE_STEP, "--output", tmp_path / "right").code == 0
    ranks_add_up_to(monkeypatch, averaged)
    told = aggcli(capsys, *command, *ONE_STEP, "--output", tmp_path / "wrong")
    assert told.code == 1
    last = told.err.splitlines()[-1]
    assert last.startswith("aggcli: ")
    assert "a layout changed " in last
    run = "." if command[0] == "run" else "token_mean/seed-0"
    (step,) = records(tmp_path / "wrong" / run / "metrics.jsonl")
    (right,) = records(tmp_path / "right" / run / "metrics.jsonl")
    assert step.pop("layout_deviation") > 0.5 > 1e-12 > right.pop("layout_deviation")
    assert step == right
    lines = records(tmp_path / "wrong" / run / "layouts.jsonl")
    assert [line["pg_loss"] for line in lines] == [exactly(step["pg_loss"] / dp) for dp in (1, 2, 4)]


# -- which steps are checked ------------------------------------------------------------------------------------------


def test_the_first_step_the_last_and_each_before_a_checkpoint_are_checked_and_the_record_says_so(
    capsys, tmp_path: Path
) -> None:
    """7 steps, a checkpoint after every third: steps 0, 2, 5 and 6."""
    options = [*flags(steps=7), "--checkpoint-every=3", "--layouts=dp1,dp2"]
    told = aggcli(capsys, "run", *options, "--output", tmp_path / "out")
    assert told.code == 0, told.err
    steps = records(tmp_path / "out" / "metrics.jsonl")
    assert [step["layout_deviation"] is not None for step in steps] == [True, False, True, False, False, True, True]
    lines = records(tmp_path / "out" / "layouts.jsonl")
    assert [(line["step"], line["layout"]) for line in lines] == [
        (at, layout) for at in (0, 2, 5, 6) for layout in ("dp1", "dp2")
    ]
    assert (
        "note: 4 optimizer steps were evaluated under several layouts (0, 2, 5, 6); between the layouts dp1 and dp2,"
        in told.err
    )


def test_one_layout_is_not_said_to_be_several(capsys, tmp_path: Path) -> None:
    told = aggcli(capsys, "run", *flags(steps=1), "--layouts=dp1", "--output", tmp_path / "out")
    assert "note: one layout, dp1: nothing was compared" in told.err
    assert "several layouts" not in told.err


def test_without_layout_records_nothing_is_said_of_layouts(capsys, tmp_path: Path) -> None:
    told = aggcli(capsys, "run", *flags(steps=1), "--no-layout-records", "--output", tmp_path / "out")
    assert told.code == 0
    assert "layouts" not in told.err
    assert records(tmp_path / "out" / "metrics.jsonl")[0]["layout_deviation"] is None


# -- real ranks -------------------------------------------------------------------------------------------------------


def _on_ranks(ranks: int, fault: str, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [*launcher, f"--nproc-per-node={ranks}", "-m", "tests.faulty_rank", fault, "run", *flags(steps=2), *more]
    given: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "cwd": ROOT, "env": environment()}
    return subprocess.run([*command, "--output", str(output)], **given)


@pytest.mark.slow
def test_the_layout_in_force_is_recorded_from_its_processes_context_parallel_ones_too(tmp_path: Path) -> None:
    """Beside it stand the other layouts, in-process; without a fault everything agrees, the twin included."""
    done = _on_ranks(4, "none", tmp_path / "out", "--dp=2", "--cp=2")
    assert done.returncode == 0, done.stderr
    lines = records(tmp_path / "out" / "layouts.jsonl")
    assert [(line["layout"], line["evaluated"]) for line in lines[:2]] == [
        ("dp2cp2:first-fit", "processes"),
        ("dp1:first-fit", "in-process"),
    ]
    own, one = lines[0], lines[1]
    assert [sum(rank["cp_tokens"]) for rank in own["ranks"]] == [rank["response_tokens"] for rank in own["ranks"]]
    assert all(min(rank["cp_tokens"]) > 0 for rank in own["ranks"])
    assert sum(rank["pg_loss"] for rank in own["ranks"]) == exactly(one["pg_loss"])
    assert "dp2cp2:first-fit, dp2cp2:first-fit in one process, dp1:first-fit," in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("slice", "layout dp2:first-fit: rank 1 does not hold the samples that the layout gives it"),
        ("entropy", "a layout changed a number: under sample_mean, "),
        ("token", "a layout changed a number: under sample_mean, "),
    ],
)
def test_a_fault_in_the_slice_of_a_real_rank_ends_the_run_with_exit_code_1(tmp_path: Path, fault: str, said: str) -> None:
    done = _on_ranks(2, fault, tmp_path / "out", "--dp=2")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("aggcli: ")]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("aggcli: step 0: ")
    assert said in told[0]
    assert len(records(tmp_path / "out" / "metrics.jsonl")) == 2, "everything is recorded all the same"
