"""`aggcli plot`: what stands in the figures is what stands in the records, and the files are the same every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from aggcli.analysis.frames import numbers, read_frames, rows, token_weights
from aggcli.cli.plot import plot
from aggcli.errors import RecordError, SettingError
from aggcli.report.base import NothingToDraw
from aggcli.report.figures import all_figures, modes_over_steps, weight_shares
from aggcli.report.ranks import largest_difference, pg_loss_by_rank
from aggcli.report.weights import weight_by_length

# Two prompt groups: rollouts of 2 and 8 trained tokens, and of 10 with 0 and 4 trained ones. N = 4, L = 10.
LENGTHS, TRAINED, GROUPS = [2, 8, 10, 10], [2, 8, 0, 4], ["a", "a", "b", "b"]
WEIGHTS = {
    "sample_mean": [1 / 4, 1 / 4, 0, 1 / 4],
    "prompt_mean": [2 / 40, 8 / 40, 0, 4 / 16],
    "token_mean": [2 / 14, 8 / 14, 0, 4 / 14],
    "constant": [2 / 40, 8 / 40, 0, 4 / 40],
}
SHARES = {"dp1:first-fit": [0.25], "dp4:balanced": [0.5, -0.75, 0.5, 0.0]}  # rank 3 is idle


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps({"schema": 1, **line}) + "\n" for line in lines), encoding="utf-8")


def write_run(directory: Path, mode: str = "sample_mean", steps: list[dict] | None = None, *, samples: bool = True) -> Path:
    """A run directory by hand, a replay of recorded rollouts unless its steps name a rollout step; `steps`: the metrics of each
    step.
    """
    steps = [{"pg_loss": 0.25}] if steps is None else steps
    directory.mkdir(parents=True)
    settings = {} if any("rollout_step" in step for step in steps) else {"rollouts": ["example"]}
    manifest = {
        "schema": 1,
        "kind": "run",
        "mode": mode,
        "command": "run",
        "settings": settings,
        "status": "done",
        "length_unit": "tokens",
    }
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    write_lines(directory / "metrics.jsonl", [{"step": i, "mode": mode, **values} for i, values in enumerate(steps)])
    write_lines(directory / "layouts.jsonl", [layout(i, mode, name) for i in range(len(steps)) for name in SHARES])
    (directory / "samples").mkdir()
    for step in range(len(steps) if samples else 0):
        columns = {
            "sample": [0, 1, 2, 3],
            "rollout": ["0", "1", "2", "3"],
            "group": GROUPS,
            "response_length": LENGTHS,
            "trained_tokens": TRAINED,
            "reward": [1.0, None, 0.0, 1.0],
            "correct": [True, None, False, True],
            "weight": WEIGHTS[mode],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), directory / "samples" / f"step-{step:06d}.parquet")
    return directory


def layout(step: int, mode: str, name: str) -> dict:
    partitions = [[0, 1, 2, 3]] if len(SHARES[name]) == 1 else [[0], [1], [2, 3], []]
    ranks = [
        {"rank": rank, "partition": part, "cp_tokens": [len(part)], "pg_loss": share, "raw_reward": 0.5 if part else None}
        for rank, (share, part) in enumerate(zip(SHARES[name], partitions, strict=True))
    ]
    return {
        "step": step,
        "layout": name,
        "mode": mode,
        "evaluated": "in-process",
        "pg_loss": 0.25,
        "sizes": {"pg_loss": 1.0},
        "ranks": ranks,
    }


def write_comparison(directory: Path) -> Path:
    directory.mkdir()
    manifest = {"schema": 1, "kind": "comparison", "runs": list(WEIGHTS)}
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    shares = {
        f"weight_share/length_{bin_}": share
        for bin_, share in zip(("p25", "p50", "p75", "p100"), (0.5, 0.25, 0.25, 0), strict=True)
    }
    for mode in WEIGHTS:
        write_run(
            directory / mode, mode, [{"pg_loss": 0.25, "ppo_kl": None, **shares}, {"pg_loss": 0.5, "ppo_kl": 0.125, **shares}]
        )
    return directory


def points(axes) -> list[tuple[float, float]]:
    return [
        tuple(point)
        for drawn in axes.collections
        for point in np.ma.getdata(drawn.get_offsets()).tolist()
        if len(drawn.get_offsets()) > 1
    ]


# -- frames ---------------------------------------------------------------------------------------------------------


def test_every_record_is_one_row_and_null_is_nan(tmp_path: Path) -> None:
    frames = read_frames([write_comparison(tmp_path / "c")])
    assert [run.label for run in frames.runs] == list(WEIGHTS)
    assert (len(frames.metrics), len(frames.layouts), len(frames.ranks), len(frames.samples)) == (8, 16, 40, 32)
    assert frames.steps == [0, 1]
    kl = numbers(rows(frames.metrics, run="constant"), "ppo_kl")
    assert np.isnan(kl[0])
    assert kl[1] == 0.125
    idle = rows(frames.ranks, run="constant", step=1, layout="dp4:balanced")
    assert idle["idle"].tolist() == [False, False, False, True]
    assert np.isnan(numbers(idle, "raw_reward")).tolist() == [False, False, False, True]
    assert np.isnan(numbers(frames.metrics, "kl_loss")).all()


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"schema": 1, "step": 1, "pg_')
    assert read_frames([run]).steps == [0]


def test_runs_of_one_mode_are_told_apart_by_their_directory_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    comparison = write_comparison(tmp_path / "third")
    labels = [run.label for run in read_frames([one, two, one, comparison]).runs]
    assert labels == [
        "sample_mean (first)",
        "sample_mean (second)",
        "sample_mean (third)",
        "prompt_mean",
        "token_mean",
        "constant",
    ]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # tokens 14 in total; weight of a token over the average token's, by hand
        ("sample_mean", [1 / 8 / (0.75 / 14), 1 / 32 / (0.75 / 14), np.nan, 1 / 16 / (0.75 / 14)]),
        ("prompt_mean", [1 / 40 / (0.5 / 14), 1 / 40 / (0.5 / 14), np.nan, 1 / 16 / (0.5 / 14)]),
        ("token_mean", [1, 1, np.nan, 1]),
        ("constant", [1, 1, np.nan, 1]),
    ],
)
def test_the_relative_weight_is_the_tokens_weight_over_the_average_tokens(tmp_path: Path, mode: str, expected: list) -> None:
    samples = token_weights(read_frames([write_run(tmp_path / "run", mode)]).samples)
    np.testing.assert_allclose(numbers(samples, "relative_weight"), expected, rtol=1e-12)


# -- figures --------------------------------------------------------------------------------------------------------


def test_the_points_of_weight_by_length_are_the_recorded_weights(tmp_path: Path) -> None:
    figure = weight_by_length(read_frames([write_comparison(tmp_path / "c")]))
    sample_mean, prompt_mean, token_mean = figure.axes[:3]
    assert points(sample_mean) == pytest.approx(np.array([(2, 7 / 3), (8, 7 / 12), (10, 7 / 6)] * 2))
    assert points(prompt_mean) == pytest.approx(np.array([(2, 0.7), (8, 0.7), (10, 1.75)] * 2))
    assert points(token_mean) == pytest.approx(np.array([(2, 1), (8, 1), (10, 1)] * 2))
    assert sample_mean.get_yscale() == "log"
    assert sample_mean.get_xscale() == "linear"  # 2 to 10 tokens is no decade
    titles = [axes.get_title(loc="left").replace("\n", " ") for axes in figure.axes]
    assert titles == [
        "sample_mean: tokens weigh differently, up to 4 times apart within a step",
        "prompt_mean: equal within a prompt group, between groups up to 2.5 times apart within a step",
        "token_mean and constant: all tokens of a step weigh the same",  # the same numbers are drawn once
    ]
    said = "lengths include untrained tokens; left out of each run: 2 samples without a trained token"
    assert said in [text.get_text() for text in figure.texts]


def test_the_reduced_markers_coincide_and_the_bars_of_the_ranks_end_there(tmp_path: Path) -> None:
    figure = pg_loss_by_rank(read_frames([write_run(tmp_path / "run")]))
    axes = figure.axes[0]
    rows_of = {tick.get_text(): y for tick, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}
    assert [(x, y) for x, y in points(axes)] == [(0.25, rows_of["dp1:first-fit"]), (0.25, rows_of["dp4:balanced"])]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bars in axes.containers for bar in bars]
    assert bars == [(0, 0.25), (0, 0.5), (0.5, -0.25), (-0.25, 0.25), (0.25, 0.25)]
    assert sum(SHARES["dp4:balanced"]) == 0.25
    assert [text.get_text() for text in axes.texts] == ["idle: no samples"]
    assert "the same in 2 layouts, to the last bit" in axes.get_title(loc="left").replace("\n", " ")
    assert figure.get_label() == "In every layout the ranks' shares add up to the same loss (step 0)"


@pytest.mark.parametrize(("moved", "said"), [(0.5, "25"), (0.501, "26"), (0.39, "14")])
def test_a_layout_that_moves_the_loss_is_seen_in_the_marker_and_in_the_title(tmp_path: Path, moved: float, said: str) -> None:
    run = write_run(tmp_path / "run")
    lines = [layout(0, "sample_mean", name) for name in SHARES]
    lines[1]["pg_loss"] = moved
    write_lines(run / "layouts.jsonl", lines)
    figure = pg_loss_by_rank(read_frames([run]))
    axes = figure.axes[0]
    assert [x for x, _ in points(axes)] == [0.25, moved]
    title = axes.get_title(loc="left").replace("\n", " ")
    assert f"2 layouts, apart by up to {said} % of the absolute" in title  # the absolute terms are 1
    assert figure.get_label() == "The layout changes the loss under sample_mean (step 0)"


def test_the_difference_between_layouts_is_relative_to_the_absolute_terms_where_the_loss_cancels() -> None:
    import pandas as pd

    def between(*losses: float | None, size: float) -> float:
        frame = pd.DataFrame({"pg_loss": losses}, dtype="float64")
        return largest_difference(frame.assign(sizes=[{"pg_loss": size}] * len(frame)))

    assert between(1e-17, -1e-17, size=1.0) == 2e-17
    assert between(1e-17, -1e-17, size=1e-4) == pytest.approx(2e-13)
    assert between(4.0, 5.0, size=1.0) == 0.2
    assert between(None, 1.0, size=1.0) == float("inf")
    assert between(0.0, 0.0, size=0.0) == 0


def test_weight_shares_are_means_over_the_steps_that_recorded_them(tmp_path: Path) -> None:
    steps = [
        {"weight_share/correct": share, "weight_share/incorrect": None if share is None else 1 - share}
        for share in (0.25, None, 0.75)
    ]
    figure = weight_shares(read_frames([write_run(tmp_path / "run", steps=steps)]))
    axes = figure.axes[0]
    assert [(bar.get_x(), bar.get_width()) for bars in axes.containers for bar in bars] == [(0, 50), (50, 50)]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["sample_mean (n\u00a0=\u00a02)"]
    assert len(figure.axes) == 1  # the families that nothing recorded have no axes


def test_blank_metrics_and_missing_steps_leave_gaps_and_unrecorded_metrics_no_panel(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", steps=[{"pg_loss": value} for value in (1.0, None, 3.0, 4.0)])
    two = write_run(tmp_path / "two", "constant", steps=[{"pg_loss": value, "ppo_kl": None} for value in (5.0, 6.0)])
    figure = modes_over_steps(read_frames([one, two]))
    axes, blank = figure.axes
    assert (blank.get_ylabel(), [text.get_text() for text in blank.texts]) == ("ppo_kl [nats]", ["null in every record"])
    first, second = axes.lines
    np.testing.assert_array_equal(first.get_ydata(), [1, np.nan, 3, 4])
    np.testing.assert_array_equal(second.get_ydata(), [5, 6, np.nan, np.nan])
    assert axes.get_ylabel() == "pg_loss"
    assert "over trained tokens, by the mode's weights" in axes.get_title(loc="left")


def test_a_lone_point_of_a_long_run_is_marked(tmp_path: Path) -> None:
    losses = [None if step in (9, 11) else 1.0 for step in range(60)]
    figure = modes_over_steps(
        read_frames([write_run(tmp_path / "run", steps=[{"pg_loss": loss} for loss in losses], samples=False)])
    )
    assert figure.axes[0].lines[0].get_markevery() == [10]


def test_figures_without_their_records_are_left_out_with_the_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=False)
    write_lines(run / "layouts.jsonl", [{**layout(0, "sample_mean", "dp1:first-fit"), "pg_loss": None}])
    figures, notes = all_figures(read_frames([run]))
    assert figures == {}
    assert notes == [
        "no figure weight_by_length: no samples are recorded",
        "no figure pg_loss_by_rank: no layout has a pg_loss",
        "no figure weight_shares: no weight_share/* metric is recorded",
        "no figure modes_over_steps: only step 0 is recorded, and a curve needs two",
    ]
    with pytest.raises(NothingToDraw, match="no samples are recorded"):
        weight_by_length(read_frames([run]))


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_written_files_are_printed_and_a_second_run_writes_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = write_comparison(tmp_path / "c")
    names = ["weight_by_length", "pg_loss_by_rank", "weight_shares", "modes_over_steps"]
    plot([comparison], formats=["svg,pdf", "svg"])
    expected = [str(comparison / "figures" / f"{name}.{ending}") for name in names for ending in ("svg", "pdf")]
    assert capsys.readouterr().out.splitlines() == expected
    plot([comparison], output=tmp_path / "a" / "b", formats=["svg", "pdf"], json_=True)
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert [figure["name"] for figure in told["figures"][::2]] == names
    for first, second in zip(expected, told["figures"], strict=True):
        assert Path(first).read_bytes() == Path(second["path"]).read_bytes()
        if first.endswith("svg"):
            assert xml.etree.ElementTree.parse(first).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_step_can_be_chosen_and_an_unknown_one_is_refused_with_the_range(tmp_path: Path) -> None:
    frames = read_frames([write_comparison(tmp_path / "c")])
    figures, _ = all_figures(frames, 0)
    title = figures["pg_loss_by_rank"].get_suptitle()
    assert title == "In every layout the ranks' shares add up to the same loss (step 0)"
    with pytest.raises(RecordError, match="--step 7: is not recorded; steps 0 to 1 are"):
        all_figures(frames, 7)


def test_an_unknown_format_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--format pgn: cannot be written; did you mean 'png'\?"):
        plot([tmp_path / "nowhere"], output=tmp_path / "out", formats=["svg,pgn"])
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    run, file = write_run(tmp_path / "run"), tmp_path / "file"
    file.write_text("")
    with pytest.raises(RecordError, match="file: is a file; the figures need a folder"):
        plot([run], output=file / "deeper")
    with pytest.raises(RecordError, match="is not a results directory"):
        plot([tmp_path])
    assert not (tmp_path / "figures").exists()
    with pytest.raises(RecordError, match="no steps are recorded"):
        plot([write_run(tmp_path / "empty", steps=[])])
    (run / "samples" / "step-000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(RecordError, match=r"step-000000\.parquet: cannot be read as Parquet"):
        plot([run])


@pytest.mark.slow
def test_it_works_without_a_display_whatever_backend_is_set_and_without_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from aggcli.cli.plot import plot; plot([Path(sys.argv[1])]);"
        "print(sorted({'torch', 'matplotlib.pyplot', 'tkinter'} & set(sys.modules)))"
    )
    for backend in ("TkAgg", "no-such-backend"):
        environment = {**os.environ, "MPLBACKEND": backend, "DISPLAY": ":99"}
        told = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, str(run)], env=environment, capture_output=True, text=True
        )
        assert told.returncode == 0, told.stderr
        assert told.stdout.splitlines()[-1] == "[]"
        assert (run / "figures" / "weight_by_length.png").read_bytes().startswith(b"\x89PNG")
