"""The same run twice gives the same bytes, and `run --check-determinism` says where it does not; what other machines' threads,
processes and ranks may change, and by how much."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aggcli.cli.determinism import compare_records
from aggcli.errors import CheckFailed
from tests.cli import aggcli, completed, environment, records, refused, results_of, write_jsonl

TRAINED = ["--task=control", "--rollout-batch-size=4", "--n-samples-per-prompt=4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results_of("run", *TRAINED, "--steps=4", "--output", tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def two(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A training run, and a copy of it to be changed."""
    return trained, Path(shutil.copytree(trained, tmp_path / "again"))


def test_records_that_are_the_same_are_counted_and_what_was_not_compared_is_named(capsys, two: tuple[Path, Path]) -> None:
    (two[1] / "timings.jsonl").write_text("")
    compare_records(*two)
    lines = [len(records(two[0] / name)) for name in ("metrics.jsonl", "layouts.jsonl")]
    tensors = len(load_file(two[0] / "checkpoint.safetensors"))
    assert lines[0] == 4
    assert capsys.readouterr().err == (
        f"note: run twice: metrics.jsonl ({lines[0]} lines), layouts.jsonl ({lines[1]} lines), checkpoint.safetensors"
        f" ({tensors} tensors) are the same byte for byte; not compared: the manifest, timings, samples\n"
    )


def test_the_first_line_that_differs_is_named_with_its_field_and_both_values(two: tuple[Path, Path]) -> None:
    path = two[1] / "layouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    changed = json.loads(lines[2])
    tokens = changed["ranks"][0]["tokens"]
    changed["ranks"][0]["tokens"] = tokens + 1
    lines[2] = json.dumps(changed, separators=(",", ":")) + "\n"
    lines[3] = lines[3].replace(":", ": ", 1)
    path.write_text("".join(lines))
    with pytest.raises(CheckFailed) as told:
        compare_records(*two)
    assert (
        str(told.value)
        == f"run twice, layouts.jsonl differs first in line 3: ranks[0].tokens is {tokens} and then {tokens + 1}"
    )


def test_a_line_that_is_missing_and_one_written_otherwise_are_differences(two: tuple[Path, Path]) -> None:
    path = two[1] / "metrics.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(CheckFailed, match=r"^run twice, metrics.jsonl has 4 lines and then 3$"):
        compare_records(*two)
    path.write_text(whole.replace(":", ": ", 1))
    with pytest.raises(CheckFailed, match=r"differs first in line 1: the same fields, written in another way$"):
        compare_records(*two)


def test_one_bit_of_the_checkpoint_is_a_difference(two: tuple[Path, Path]) -> None:
    path = two[1] / "checkpoint.safetensors"
    tensors = load_file(path)
    tensors["parameters"].view(np.uint32).reshape(-1)[7] ^= 1
    save_file(tensors, path)
    with pytest.raises(CheckFailed, match=r"^run twice, checkpoint.safetensors differs first in the tensor parameters$"):
        compare_records(*two)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--dp=2"]], ids=["one process", "two ranks"])
def test_training_run_twice_is_the_same_byte_for_byte(tmp_path: Path, more: list[str]) -> None:
    told = completed("-m", "aggcli", "run", *TRAINED, "--steps=3", *more, "--check-determinism", "--output", tmp_path / "run")
    assert told.returncode == 0, told.stderr
    assert told.stderr.splitlines()[-1].startswith("note: run twice: metrics.jsonl (3 lines), layouts.jsonl (")
    assert "checkpoint.safetensors (" in told.stderr.splitlines()[-1]
    assert "accuracy" in told.stdout
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert "--check-determinism" not in manifest["arguments"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--dp=2"]], ids=["one process", "two ranks"])
def test_a_replay_run_twice_is_the_same_and_has_no_checkpoint(tmp_path: Path, more: list[str]) -> None:
    told = completed("-m", "aggcli", "run", "example", *more, "--check-determinism", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    lines = [len(records(tmp_path / "results" / "run-twice" / name)) for name in ("metrics.jsonl", "layouts.jsonl")]
    assert lines[0] == 3
    assert told.stderr.splitlines()[-1] == (
        f"note: run twice: metrics.jsonl (3 lines), layouts.jsonl ({lines[1]} lines) are the same byte for byte;"
        " not compared: the manifest, timings, samples"
    )


@pytest.mark.slow
def test_a_reducer_that_is_another_in_every_process_ends_in_one_line_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import os\n"
        "def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    return lambda x: x.sum() * (1 + os.getpid())\n"
    )
    told = completed(
        *("-m", "aggcli", "run", "example", "--custom-pg-loss-reducer-function-path=other:reducer", "--check-determinism"),
        *("--output", tmp_path / "run"),
        cwd=tmp_path, env=environment(PYTHONPATH=f"{environment()['PYTHONPATH']}{os.pathsep}{tmp_path}"),
    )  # fmt: skip
    assert told.returncode == 1, told.stderr
    last = told.stderr.splitlines()[-1]
    assert last.startswith("aggcli: run twice, metrics.jsonl differs first in line 1: "), told.stderr
    assert " and then " in last


def test_what_cannot_be_run_twice_is_refused(capsys, monkeypatch, tmp_path: Path) -> None:
    assert "--resume" in refused(aggcli(capsys, "run", "--check-determinism", "--resume", "--output", tmp_path / "a"))
    os.mkfifo(tmp_path / "pipe")
    assert "can be read once" in refused(aggcli(capsys, "run", tmp_path / "pipe", "--check-determinism"))
    assert "can be read once" in refused(aggcli(capsys, "run", "/dev/stdin", "--check-determinism"))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    assert "starts the ranks itself" in refused(aggcli(capsys, "run", "--check-determinism"))


def test_a_refusal_of_the_run_itself_is_said_once_and_with_its_exit_code(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"reward": 1.0}])
    told = completed("-m", "aggcli", "run", path, "--check-determinism", "--output", tmp_path / "run")
    assert told.returncode == 2
    assert len([line for line in told.stderr.splitlines() if line.startswith("aggcli: ")]) == 1


# -- what may differ ----------------------------------------------------------------------------------------------------


def _numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, f"{where}.{name}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield where, float(value)


def _apart(first: Path, second: Path) -> tuple[float, float]:
    """The largest difference between two comparisons: of a number of metrics.jsonl, relative to it or to 1 where it is below,
    and of the parameters, relative to the largest of them. What a layout is asked to change (micro-batches) is left out."""
    metrics = []
    for path in sorted(first.rglob("metrics.jsonl")):
        pairs = zip(records(path), records(second / path.relative_to(first)), strict=True)
        for one, other in ((dict(_numbers(line)), dict(_numbers(again))) for line, again in pairs):
            assert one.keys() == other.keys()
            metrics += [abs(one[name] - other[name]) / max(1, abs(one[name])) for name in one if name != ".micro_batches"]
    assert len(metrics) > 1000
    ours, again = (
        np.concatenate([load_file(share)["parameters"].astype(float) for share in sorted(path.glob("checkpoint*"))])
        for path in (first, second)
    )
    return max(metrics), float(np.abs(ours - again).max() / np.abs(ours).max())


BOUNDS = {
    "threads": {"float64": 0.0, "float32": 0.0},
    "shares": {"float64": 1e-14, "float32": 1e-5},
    "ranks": {"float64": 1e-12, "float32": 1e-4},
}
"""What the README says, of metrics and of parameters."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_threads_shares_and_ranks_change_no_more_than_the_readme_says(tmp_path: Path, dtype: str) -> None:
    def trained(name: str, threads: int, *more: str) -> Path:
        flags = [*TRAINED, "--steps=20", "--modes=sample_mean,token_mean", "--seeds=1", f"--dtype={dtype}", *more]
        told = completed(
            "-m", "aggcli", "compare", *flags, "--output", tmp_path / name, env=environment(OMP_NUM_THREADS=str(threads))
        )
        assert told.returncode == 0, told.stderr
        return tmp_path / name

    first = trained("first", 1, "--launcher=here")
    found = {
        "threads": _apart(first, trained("threads", 2, "--launcher=here")),
        "shares": _apart(first, trained("shares", 1, "--workers=2")),
        "ranks": _apart(first, trained("ranks", 1, "--dp=2")),
    }
    for what, (metrics, parameters) in found.items():
        assert max(metrics, parameters) <= BOUNDS[what][dtype], (what, metrics, parameters)
