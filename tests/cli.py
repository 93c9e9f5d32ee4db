"""Calling the command line as a user does, in this process or as a process of its own: the one way in which tests call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aggcli.cli.main import main
from aggcli.cli.results import print_comparison
from aggcli.errors import FAULT
from aggcli.jobs.compare import ComparisonOptions, compare

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Result:
    """Exit code, standard output and error of one call, and the folder after its `--output`, if it was given one."""

    code: int
    out: str
    err: str
    folder: Path | None = None

    @property
    def output(self) -> Path:
        assert self.folder is not None, "the call had no --output"
        return self.folder

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of a `--json` answer, parsed strictly."""
        assert self.code == 0, self.err
        return strict_json(self.out)["steps"]

    @property
    def step(self) -> dict[str, Any]:
        (step,) = self.steps
        return step

    @property
    def modes(self) -> dict[str, dict[str, Any]]:
        return self.step["modes"]


def strict_json(text: str) -> Any:
    """Parse JSON that may not hold NaN or Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in strict JSON")

    return json.loads(text, parse_constant=refuse)


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file, each strict JSON."""
    return [strict_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def aggcli(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run `aggcli` with these arguments; a fault of its own, which it tells in a line, fails the test."""
    capsys.readouterr()
    words = [str(argument) for argument in arguments]
    code = main(words)
    captured = capsys.readouterr()
    assert FAULT not in captured.err, captured.err
    return Result(code, captured.out, captured.err, _output_in(words))


def results_of(*arguments: object) -> Path:
    """The `--output` of a call that must succeed, where nothing captures what it says: in the fixture of a module."""
    words = [str(argument) for argument in arguments]
    assert main(words) == 0
    folder = _output_in(words)
    assert folder is not None
    return folder


def environment(**more: str) -> dict[str, str]:
    """Of a process of its own: it imports this repository, and takes one thread for an operation."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def started(*arguments: object) -> subprocess.Popen[str]:
    """`aggcli` as a process of its own, whose stderr the test reads."""
    command = [sys.executable, "-m", "aggcli", *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def completed(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python process with these arguments, run to its end; `options` are those of `subprocess.run`."""
    options = {"env": environment(), "timeout": 600, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, **options)


def on_ranks(ranks: int, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A module on that many ranks of torchrun, as a user starts them."""
    torchrun = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    return completed(*torchrun, f"--nproc-per-node={ranks}", "-m", *arguments, **options)


def _output_in(words: Sequence[str]) -> Path | None:
    for at, word in enumerate(words):
        if word in ("--output", "-o"):
            return Path(words[at + 1])
        if word.startswith("--output="):
            return Path(word.removeprefix("--output="))
    return None


def replay(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    rollouts: Path | str | Iterable[Mapping[str, Any]],
    *flags: object,
    command: str = "compare",
) -> Result:
    """`compare` (or `run`) on a path, or on samples written to a file, into a new folder; its exit code is not judged."""
    if not isinstance(rollouts, (Path, str)):
        rollouts = write_jsonl(_new(folder, "rollouts-{}.jsonl"), rollouts)
    return aggcli(capsys, command, "--rollouts", rollouts, "--output", _new(folder, "results-{}"), *flags)


def compared(
    capsys: pytest.CaptureFixture[str], folder: Path, rollouts: Path | str | Iterable[Mapping[str, Any]], *flags: object
) -> Result:
    """A `compare --json` that must succeed; prompt_mean is the strict mean over prompts, and constant divides by 10."""
    scale = ("--prompt-mean-scale", "prompts", "--loss-aggregation-divisor", 10)
    told = replay(capsys, folder, rollouts, "--json", *scale, *flags)
    assert told.code == 0, told.err
    return told


def _new(folder: Path, name: str) -> Path:
    """The first path of this name that is not there yet, counted from 1."""
    number = 1
    while (folder / name.format(number)).exists():
        number += 1
    return folder / name.format(number)


def compared_directories(
    capsys: pytest.CaptureFixture[str], directories: Sequence[Path], form: str = "table", **options: Any
) -> tuple[str, str]:
    """Standard output and error of a comparison of results directories, with the command's options by name."""
    capsys.readouterr()
    print_comparison(compare(directories, ComparisonOptions(**options)), form)
    captured = capsys.readouterr()
    return captured.out, captured.err


def refused(result: Result) -> str:
    """The one line of a refusal: exit code 2, nothing on stdout, no traceback, nothing but notes before it."""
    assert (result.code, result.out) == (2, ""), result.err
    *notes, line = result.err.splitlines()
    assert all(note.startswith("note: ") for note in notes), result.err
    assert line.startswith("aggcli: ")
    return line


def per_layout(told: Result, mode: str, name: str) -> list[Any]:
    """A number under the layout in force and under each layout."""
    values = told.modes[mode]
    return [values[name], *(layout[name] for layout in values["layouts"].values())]


def exactly(value: float | None) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-15)


def write_jsonl(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """One sample a line; NaN and infinity are written bare, as trainers do."""
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path
