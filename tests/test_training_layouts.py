"""The layout check of a training run: it fails where a layout moves a number, and everything is recorded all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import aggcli, exactly, records
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
    assert step == records(tmp_path / "right" / run / "metrics.jsonl")[0]
    lines = records(tmp_path / "wrong" / run / "layouts.jsonl")
    assert [line["pg_loss"] for line in lines] == [exactly(step["pg_loss"] / dp) for dp in (1, 2, 4)]
