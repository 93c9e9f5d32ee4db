"""timings.jsonl: what the clock says, apart from the records that are the same in every run of the same settings."""

from __future__ import annotations

import json
import math
import resource
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aggcli import grid
from aggcli.analysis.curves import Curve, FitOptions
from aggcli.analysis.efficiency import fit_runs
from aggcli.analysis.histories import History, read_histories, read_history, shared_seconds
from aggcli.analysis.sigmoid import CurveParameters, Grid, sigmoid
from aggcli.errors import RecordError
from aggcli.jobs import recording
from aggcli.training import loop
from aggcli.training.memory import begin_peak, peak_bytes
from aggcli.training.stack import RunSpec
from tests.cli import aggcli, compared_directories, records, results_of, write_jsonl
from tests.fixtures import fx_b
from tests.train_worker import flags

FLAGS = flags(steps=None)
RUN = ["run", *FLAGS, "--checkpoint-every=2", "--no-layout-records"]
COMPARE = ["compare", "--modes=sample_mean,token_mean", "--seeds=2", *FLAGS, "--no-layout-records", "--global-batch-size=8"]


def write_run(directory: Path, rollout_steps: list[int], timings: str | None, seed: int = 0, accuracy: Any = None) -> Path:
    """A run directory by hand: an optimizer step for each of these rollout steps."""
    directory.mkdir(parents=True)
    manifest = {"schema": 1, "kind": "run", "mode": "sample_mean", "seed": seed, "status": "done", "settings": {"seed": seed}}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    right = [0.5] * len(rollout_steps) if accuracy is None else accuracy
    with (directory / "metrics.jsonl").open("w") as file:
        for step, rollout_step in enumerate(rollout_steps):
            counts = {"correct/count": right[step], "incorrect/count": 1 - right[step], "samples": 1, "response_tokens": 10}
            file.write(json.dumps({"step": step, "rollout_step": rollout_step, **counts}) + "\n")
    if timings is not None:
        (directory / "timings.jsonl").write_text(timings)
    return directory


def tokens_of(runs: list[Path]) -> list[int]:
    """Response tokens of these runs together in each of three rollout steps of two optimizer steps, each with half of them."""
    found = [0, 0, 0]
    for run in runs:
        for line in records(run / "metrics.jsonl"):
            found[line["rollout_step"]] += line["response_tokens"]
    return found


def timing(*steps: tuple[int, float, int]) -> str:
    return "".join(
        json.dumps({"rollout_step": step, "seconds": seconds, "runs": runs, "tokens": 99}) + "\n"
        for step, seconds, runs in steps
    )


def history(directory: Path) -> History:
    found = read_history(directory)
    assert found is not None
    return found


# -- writing --------------------------------------------------------------------------------------------------------


def test_every_run_of_a_stack_has_a_line_a_rollout_step_with_the_stacks_seconds_runs_and_tokens(tmp_path: Path) -> None:
    began = time.perf_counter()
    directory = results_of(*COMPARE, "--steps=3", "--launcher=here", "--output", tmp_path / "out")
    took = time.perf_counter() - began
    runs = [directory / mode / f"seed-{seed}" for mode in ("sample_mean", "token_mean") for seed in (0, 1)]
    (found,) = {(run / "timings.jsonl").read_text() for run in runs}
    told = [json.loads(line) for line in found.splitlines()]
    assert [list(line) for line in told] == [["rollout_step", "seconds", "runs", "tokens", "peak_bytes"]] * 3
    assert [(line["rollout_step"], line["runs"]) for line in told] == [(0, 4), (1, 4), (2, 4)]
    assert all(line["seconds"] > 0 for line in told)
    assert sum(line["seconds"] for line in told) < took
    assert [line["tokens"] for line in told] == tokens_of(runs)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert resident >= told[-1]["peak_bytes"] >= told[0]["peak_bytes"] > resident / 2
    assert not any("seconds" in line for run in runs for line in records(run / "metrics.jsonl"))
    (note,) = shared_seconds(read_histories([directory])[0])
    assert note.startswith("4 of the compared runs")


@pytest.mark.slow
def test_runs_of_a_share_have_the_times_of_their_own_stack(tmp_path: Path) -> None:
    directory = results_of(*COMPARE, "--steps=3", "--shares=2", "--launcher=here", "--output", tmp_path / "out")
    stacks: dict[str, list[Path]] = {}
    for path in directory.glob("*/*/timings.jsonl"):
        stacks.setdefault(path.read_text(), []).append(path.parent)
    assert [len(runs) for runs in stacks.values()] == [2, 2]
    for text, runs in stacks.items():
        told = [json.loads(line) for line in text.splitlines()]
        assert [line["runs"] for line in told] == [2, 2, 2]
        assert [line["tokens"] for line in told] == tokens_of(runs)
    assert shared_seconds(read_histories([runs[0] for runs in stacks.values()])[0]) == []


def test_on_a_gpu_the_memory_is_what_torch_held_there_during_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, asked = torch.device("cuda:1"), []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {cuda: 12345}.get)
    begin_peak(cuda)
    assert asked == [cuda]
    assert peak_bytes(cuda) == 12345


def test_the_seconds_are_those_of_the_step_from_its_sampling_on_and_not_of_writing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A clock that moves when rollouts are sampled (by 2 s), when an optimizer step is taken (3 s) and written (100 s)."""
    now = [0.0]
    sampled, updated, written = grid.Sampler.step, loop.Trainer._update, recording.write

    def passing(seconds: float, function: Any) -> Any:
        def called(*given: Any) -> Any:
            now[0] += seconds
            return function(*given)

        return called

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(grid.Sampler, "step", passing(2.0, sampled))
    monkeypatch.setattr(loop.Trainer, "_update", passing(3.0, updated))
    monkeypatch.setattr(recording, "write", passing(100.0, written))
    results_of(*RUN, "--steps=3", "--global-batch-size=8", "--output", tmp_path / "out")
    assert [line["seconds"] for line in records(tmp_path / "out" / "timings.jsonl")] == [8.0, 8.0, 8.0]
    assert [line["runs"] for line in records(tmp_path / "out" / "timings.jsonl")] == [1, 1, 1]


@pytest.mark.slow
def test_a_resumed_run_cuts_the_timings_past_its_checkpoint_and_has_one_of_each_step(capsys, tmp_path: Path) -> None:
    directory, checkpoint = tmp_path / "out", tmp_path / "out" / "checkpoint.safetensors"
    run = [*RUN, "--output", directory]
    assert aggcli(capsys, *run, "--steps=5").code == 0
    shutil.copy(checkpoint, tmp_path)
    first = (directory / "timings.jsonl").read_bytes()
    assert aggcli(capsys, *run, "--steps=8", "--resume").code == 0
    longer = (directory / "timings.jsonl").read_bytes()
    assert longer.startswith(first)
    assert not list(directory.glob("*.before-resume*"))
    shutil.copy(tmp_path / checkpoint.name, checkpoint)
    assert aggcli(capsys, *run, "--steps=8", "--resume").code == 0
    again = (directory / "timings.jsonl").read_bytes()
    assert again.startswith(first)
    assert [json.loads(line)["rollout_step"] for line in again.splitlines()] == list(range(8))
    assert (directory / "timings.jsonl.before-resume").read_bytes() == longer
    assert aggcli(capsys, *run, "--steps=1", "--overwrite").code == 0, "timings and their backups are aggcli's own"


@pytest.mark.slow
def test_a_run_that_diverges_shares_the_steps_that_it_was_in_and_no_others(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs_of = grid.runs_of

    def one_wild(*given: Any) -> list[RunSpec]:
        runs = runs_of(*given)
        return [runs[0].__class__(**{**vars(run), "lr": 1e6}) if run.mode == "constant" else run for run in runs]

    monkeypatch.setattr(grid, "runs_of", one_wild)
    wild = ["--optimizer=sgd", "--clip-grad=0", "--lr=0.01", "--num-iterations=2", "--kl-coef=0.1", "--steps=5"]
    command = ["compare", "--modes=sample_mean,token_mean,constant", "--seeds=1", *FLAGS, *wild, "--no-layout-records"]
    assert aggcli(capsys, *command, "--launcher=here", "--output", tmp_path / "out").code == 1
    gone, tame = (records(tmp_path / "out" / mode / "seed-0" / "timings.jsonl") for mode in ("constant", "token_mean"))
    said = json.loads((tmp_path / "out" / "constant" / "seed-0" / "manifest.json").read_text())["diverged"]
    at = int(said.split("diverged in step ")[1].split(":")[0])
    assert at < 4
    assert [line["runs"] for line in gone] == [3] * (at + 1)
    assert [line["runs"] for line in tame] == [3] * (at + 1) + [2] * (4 - at)


def test_a_replay_has_no_steps_that_take_time(capsys, tmp_path: Path) -> None:
    rollouts = write_jsonl(tmp_path / "x.jsonl", fx_b())
    assert aggcli(capsys, "run", "--rollouts", rollouts, "--output", tmp_path / "out").code == 0
    assert not (tmp_path / "out" / "timings.jsonl").exists()


# -- reading --------------------------------------------------------------------------------------------------------


def test_seconds_are_the_share_of_a_run_in_what_the_earlier_rollout_steps_of_its_stack_took(tmp_path: Path) -> None:
    told = timing((0, 4.0, 2), (1, 6.0, 2), (2, 5.0, 1), (3, 7.0, 1))
    found = history(write_run(tmp_path / "a", [0, 0, 1, 1, 2, 2, 3, 3], told))
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.axis("seconds").tolist() == [0.0, 2.0, 5.0, 10.0]
    assert found.tokens.tolist() == [0, 20, 40, 60]


def test_timings_are_aligned_by_rollout_step_and_unknown_behind_a_missing_one(tmp_path: Path) -> None:
    more = timing((3, 1.0, 1), (1, 2.0, 1), (0, 9.0, 1), (0, 4.0, 1), (7, 1.0, 1)) + '{"rollout_step": 2, "sec'
    found = history(write_run(tmp_path / "a", [0, 1, 2, 3, 4], more))
    assert found.seconds.tolist()[:3] == [0.0, 4.0, 6.0], "of step 0 the last line counts"
    assert np.isnan(found.seconds[3:]).all(), "nobody knows what step 2 took"
    holes = history(write_run(tmp_path / "b", [0, 1, 3], timing((0, 1.0, 1), (1, 1.0, 1), (2, 1.0, 1), (3, 1.0, 1))))
    assert holes.seconds.tolist()[:2] == [0.0, 1.0]
    assert math.isnan(holes.seconds[2])


def test_no_timings_are_no_seconds_and_broken_ones_are_refused_by_file(tmp_path: Path) -> None:
    for name, told in (("none", None), ("empty", "")):
        found = history(write_run(tmp_path / name, [0, 1], told))
        assert np.isnan(found.seconds).all()
        assert found.stack is None
    with pytest.raises(RecordError, match=r"timings\.jsonl: line 1 is not the record of a step: it is no JSON"):
        read_history(write_run(tmp_path / "broken", [0, 1], '{"rollout_step": 0, \n'))
    with pytest.raises(RecordError, match=r"timings\.jsonl: line 1 is not the record of a step"):
        read_history(write_run(tmp_path / "other", [0, 1], '{"seconds": 1.0, "runs": 1}\n'))


def test_a_curve_by_seconds_is_the_curve_by_steps_at_the_rate_of_the_run(tmp_path: Path) -> None:
    """Every step takes 3 s of a stack of two, so a run has one each 1.5 s: C_mid is 1.5 times as large, A and B are equal."""
    steps = np.arange(60.0)
    truth = CurveParameters(0.3, 0.8, 1.8, 12.0)
    right = sigmoid(steps, *truth) + np.random.default_rng(3).normal(0, 0.01, 60)
    run = history(
        write_run(tmp_path / "a", list(range(60)), timing(*((at, 3.0, 2) for at in range(60))), accuracy=right.tolist())
    )
    by = {}
    for axis, scale in (("steps", 1.0), ("seconds", 1.5)):
        options = FitOptions(grid=Grid(np.linspace(0.7, 1.4, 10), scale * np.geomspace(3, 120, 14)))
        (fitted,) = fit_runs([run], axis, options=options)
        assert isinstance(fitted.curve, Curve)
        by[axis] = fitted.curve
    assert by["steps"].midpoint.mean == pytest.approx(12.0, rel=0.1)
    assert by["seconds"].midpoint.mean == pytest.approx(1.5 * by["steps"].midpoint.mean, rel=1e-6)
    assert by["seconds"].exponent.mean == pytest.approx(by["steps"].exponent.mean, rel=1e-6)
    assert by["seconds"].asymptote.mean == pytest.approx(by["steps"].asymptote.mean, rel=1e-6)


def test_compare_by_seconds_refuses_runs_without_timings_with_the_reason(capsys, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), list(range(12)), None, seed) for seed in (0, 1)]
    _, err = compared_directories(capsys, runs, axis="seconds")
    assert "the seconds of this run were not recorded" in err


def test_runs_of_one_stack_are_told_from_runs_of_others(tmp_path: Path) -> None:
    one, other, alone = timing((0, 4.0, 2), (1, 6.0, 2)), timing((0, 4.5, 2), (1, 6.0, 2)), timing((0, 4.0, 1), (1, 6.0, 1))
    told = {"a": one, "b": one, "c": other, "d": alone, "e": None, "f": None}
    runs, _ = read_histories([write_run(tmp_path / name, [0, 1], text, seed) for seed, (name, text) in enumerate(told.items())])
    (note,) = shared_seconds(runs)
    assert note.startswith("2 of the compared runs were trained in one stack with others")
    assert shared_seconds(runs[1:]) == []
    assert shared_seconds(runs[4:]) == []
