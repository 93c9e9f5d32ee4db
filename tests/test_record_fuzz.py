"""Damaged records end in an answer or in one line with exit code 2, never in a traceback, a warning or a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from aggcli.analysis.frames import read_frames
from aggcli.analysis.histories import read_histories
from aggcli.report.figures import weight_shares
from tests.cli import aggcli, refused
from tests.fuzz_records import fuzz
from tests.test_results import step, write_run


def test_sixty_damaged_results_directories_are_read_or_refused_in_one_line() -> None:
    assert fuzz(60, 1, draw_every=30, tell=lambda _: None) == []


@pytest.mark.parametrize("file", ["metrics.jsonl", "layouts.jsonl", "timings.jsonl"])
@pytest.mark.parametrize(
    "line", ["null", "[]", "3", "{}", '{"step": null}', '{"step": "x"}', '{"step": -1}', '{"step": 1}{"step": 2}']
)
def test_a_line_that_is_no_record_of_a_step_is_refused_by_its_number(tmp_path: Path, capsys, file: str, line: str) -> None:
    run = write_run(tmp_path / "a", "sample_mean", 0, [step(0), step(1)])
    known = {"step": 0, "layout": "dp1", "ranks": [], "rollout_step": 0, "seconds": 1.0, "runs": 1}
    before = f"{json.dumps(known)}\n" if file != "metrics.jsonl" else (run / file).read_text()
    (run / file).write_text(f"{before}{line}\n")
    number = before.count("\n") + 1
    said = refused(aggcli(capsys, "plot", run, "--html", "--output", tmp_path / "figures"))
    assert f"{file}: line {number} is not the record of a step" in said


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"environment": {"packages": 3}}, "environment.packages: Input should be a valid dictionary"),
        ({"evaluation": {"accuracy": "high"}}, "evaluation.accuracy"),
        ({"settings": {"steps": "ten"}}, "settings.steps"),
        ({"diverged": "in step 1"}, "only one of diverged and diverged_step is there"),
        ({"modes": [None]}, "modes.0"),
    ],
)
def test_a_manifest_of_other_types_is_refused_by_its_field(tmp_path: Path, capsys, facts: dict, said: str) -> None:
    run = write_run(tmp_path / "a", "sample_mean", 0, [step(0)], **facts)
    assert said in refused(aggcli(capsys, "compare", run))


def test_a_deep_manifest_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path / "a", "sample_mean", 0, [step(0)])
    (run / "manifest.json").write_text('{"schema":1,"a":' + "[" * 50_000)
    assert "is not a results directory" in refused(aggcli(capsys, "compare", run))


def test_a_number_that_overflows_a_mean_counts_as_not_measured(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a", "sample_mean", 0, [step(at, response_length=length) for at, length in enumerate((7.5, 1e308))]
    )
    found = read_histories([run])[0][0].measures["response_length"]
    assert found.tolist() == [7.5, pytest.approx(float("nan"), nan_ok=True)]


def test_a_share_beyond_1_is_not_drawn_as_one(tmp_path: Path) -> None:
    shares: list[dict[str, Any]] = [{"weight_share/correct": share, "weight_share/incorrect": 0.5} for share in (0.5, 2.0**70)]
    run = write_run(tmp_path / "a", "sample_mean", 0, [step(at) | share for at, share in enumerate(shares)])
    figure = weight_shares(read_frames([run]))
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == [50.0, 50.0]
    assert axes.get_xlim() == (0.0, 100.0)
