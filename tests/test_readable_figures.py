"""Figures and tables of records that are uneven: repeated steps, seeds of unequal length, blank series, rounding."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from aggcli.analysis.frames import numbers, read_frames
from aggcli.analysis.histories import read_histories
from aggcli.analysis.settings import labelled
from aggcli.report.base import NothingToDraw
from aggcli.report.curves import learning_curves
from aggcli.report.figures import modes_over_steps
from aggcli.report.layout_deviation import layout_deviation
from aggcli.report.ranks import pg_loss_by_rank
from tests.cli import aggcli
from tests.test_results import step, write_run


def test_of_a_repeated_step_every_reader_takes_the_last_line_and_says_so(tmp_path: Path, capsys) -> None:
    """0.625 and 0.825 for step 1: the last one is drawn, and not their mean 0.725."""
    lines = [step(0, raw_reward=0.5), step(1, raw_reward=0.625), step(1, raw_reward=0.825)]
    run = write_run(tmp_path / "a", "sample_mean", 0, lines)
    rank = {"rank": 0, "pg_loss": 0.25, "partition": [0]}
    layouts = [{"step": at, "layout": "dp1", "pg_loss": 0.25, "ranks": [rank]} for at in (0, 1, 1)]
    (run / "layouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in layouts))
    frames = read_frames([run])
    assert numbers(frames.metrics, "raw_reward").tolist() == [0.5, 0.825]
    assert (len(frames.layouts), len(frames.ranks)) == (2, 2)
    said = "1 recorded step is a repetition (a run that was resumed writes them again); the last one counts"
    for command in (("compare", run), ("plot", run, "--output", tmp_path / "figures")):
        assert said in aggcli(capsys, *command).err


def test_the_mean_line_ends_with_the_shortest_seed(tmp_path: Path) -> None:
    """Seeds of 10, 10 and 4 steps whose rewards rise by a tenth a step: the line ends at step 3, at 0.3."""
    runs = [
        write_run(
            tmp_path / str(seed), "sample_mean", seed, [step(at, raw_reward=at / 10 + seed / 1000) for at in range(length)]
        )
        for seed, length in enumerate((10, 10, 4))
    ]
    frames, (read, _) = read_frames(runs), read_histories(runs)
    figure = learning_curves(frames, labelled(read))
    line = np.asarray(figure.axes[0].get_lines()[0].get_ydata(), dtype=float)
    assert line[:4] == pytest.approx([0.001, 0.101, 0.201, 0.301])
    assert np.isnan(line[4:]).all()


def test_a_series_that_is_null_everywhere_keeps_a_panel_with_its_name(tmp_path: Path) -> None:
    lines = [{"step": at, "pg_loss": 0.1 * at, "ppo_kl": None} for at in range(3)]
    run = write_run(tmp_path / "a", "sample_mean", 0, lines, settings={"rollouts": ["dump"]}, length_unit="tokens")
    panels = {axes.get_ylabel(): [text.get_text() for text in axes.texts] for axes in modes_over_steps(read_frames([run])).axes}
    assert panels["pg_loss"] == []
    assert panels["ppo_kl [nats]"] == ["null in every record"]
    trained = write_run(tmp_path / "b", "sample_mean", 0, [step(at, raw_reward=at, ppo_kl=None) for at in range(3)])
    frames, (read, _) = read_frames([trained]), read_histories([trained])
    drawn = learning_curves(frames, labelled(read)).axes
    assert [[text.get_text() for text in axes.texts] for axes in drawn] == [[], ["null in every record"]]


def test_rounding_is_not_drawn_at_full_height(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "sample_mean", 0, [step(0)])

    def record(noise: float) -> None:
        shares = [{"rank": at, "pg_loss": sign * noise, "partition": [at]} for at, sign in enumerate((1, -1))]
        layouts = [
            {"step": 0, "layout": name, "pg_loss": value, "sizes": {"pg_loss": 1.0}, "ranks": shares}
            for name, value in (("dp1", 0.0), ("dp2", noise))
        ]
        (run / "layouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in layouts))

    record(2e-17)
    assert pg_loss_by_rank(read_frames([run])).axes[0].get_xlim() == (-1.0, 1.0)
    with pytest.raises(NothingToDraw, match=r"the layouts differ by at most 2\.0e-17 of the absolute terms of pg_loss"):
        layout_deviation(read_frames([run]))
    record(0.25)
    assert max(pg_loss_by_rank(read_frames([run])).axes[0].get_xlim()) < 0.5
    assert layout_deviation(read_frames([run])).axes


def test_the_table_says_by_whose_weights_a_column_has_its_metrics(capsys, tmp_path: Path) -> None:
    told = aggcli(
        capsys, "compare", "--rollouts", "synthetic", "--modes", "sample_mean,token_mean,verl:token-mean", "-o", tmp_path / "r"
    )
    found = {line.split("by")[0].strip(): line.split("by")[1].split() for line in told.out.splitlines() if " by " in line[:24]}
    assert found["weighted"] == ["sample_mean", "token_mean", "sample_mean"]
    assert found["KL and entropy"] == ["sample_mean", "token_mean", "verl:token-mean"]
    rules = json.loads((tmp_path / "r" / "manifest.json").read_text())["metric_rules"]
    assert json.loads((tmp_path / "r" / "token_mean" / "manifest.json").read_text())["metric_rules"] == rules
    assert rules["token_mean"] == dict.fromkeys(("metrics", "kl_loss", "entropy_loss"), "token_mean")
    own = dict.fromkeys(("kl_loss", "entropy_loss"), "verl:token-mean")
    assert rules["verl:token-mean"] == {"metrics": "sample_mean"} | own
    matched = ("--metric-aggregation", "matched", "--json", "-o", tmp_path / "m")
    told = aggcli(capsys, "compare", "--rollouts", "synthetic", "--modes", "prompt_mean,verl:token-mean", *matched)
    assert {mode: rules["metrics"] for mode, rules in json.loads(told.out)["metric_rules"].items()} == {
        "prompt_mean": "prompt_mean",
        "verl:token-mean": "verl:token-mean",
    }


@pytest.mark.parametrize("steps", [2, 8, 20])
def test_short_runs_raise_no_warning_of_a_library(tmp_path: Path, capsys, steps: int) -> None:
    runs = [
        write_run(tmp_path / f"{mode}{seed}", mode, seed, [step(at, 5 if at else 4, 5) for at in range(steps)])
        for mode in ("sample_mean", "token_mean")
        for seed in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert aggcli(capsys, "compare", *runs).code == 0
        assert aggcli(capsys, "plot", *runs, "--html", "--output", tmp_path / "figures").code == 0


def test_results_are_listed_in_natural_order(tmp_path: Path, capsys) -> None:
    for name in ("compare-10", "compare-2", "compare"):
        write_run(tmp_path / name, "sample_mean", 0, [step(0)])
    listed = json.loads(aggcli(capsys, "runs", "list", tmp_path, "--json").out)["runs"]
    assert [one["name"] for one in listed] == ["compare", "compare-2", "compare-10"]
