"""What a comparison needs of each run: its settings, and its accuracy, reward and lengths over the rollout steps.

Only the needed columns of metrics.jsonl and timings.jsonl are read, by pyarrow's JSON reader: a thousand runs of a thousand
steps in seconds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggcli.errors import RecordError, some
from aggcli.records import METRICS, TIMINGS, read_manifest, run_directories

Floats = NDArray[np.float64]

_COUNTS = ("correct/count", "incorrect/count", "samples", "response_tokens")
_MEANS = {
    "raw_reward": "scored",
    "response_length": "samples",
    "correct/response_length": "correct/count",
    "incorrect/response_length": "incorrect/count",
    "entropy_loss": "samples",
}
"""Column -> what it was averaged over: its weight where a rollout step has several optimizer steps."""
MEASURES = ("accuracy", *_MEANS)
AXES = {"steps": "rollout steps", "tokens": "response tokens", "seconds": "seconds"}
"""What a curve can be drawn against, and its unit."""


@dataclass(frozen=True)
class History:
    """A run over its E recorded rollout steps, sorted; arrays are [E], NaN where nothing was measured.

    `tokens` and `seconds` count what the policy had been trained on, or for, *before* the step: the rollouts of a step were
    sampled by the policy that the earlier steps made. Both are NaN behind a missing step, since nobody knows what it took.
    `seconds` are the run's share of those of its stack. `measures` has the names in `MEASURES`. `repeated`: lines that record
    an optimizer step again; the last one counts. `stack`: what tells the stack that the run was trained in from others; None
    where no seconds are recorded. `evaluation`: on fresh prompts after training, None where the run was not evaluated.
    `diverged`: the rollout step in which it diverged, and what is said of it; None where it did not.
    """

    directory: Path
    mode: str
    seed: int
    status: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    steps: NDArray[np.int64]
    tokens: Floats
    seconds: Floats
    measures: Mapping[str, Floats]
    repeated: int = 0
    label: str = ""
    stack: tuple[float, float] | None = None
    evaluation: Mapping[str, Any] | None = None
    diverged: tuple[int, str] | None = None

    def axis(self, name: str) -> Floats:
        """`steps`, `tokens` or `seconds`, as float64 [E]."""
        return {"steps": self.steps.astype(np.float64), "tokens": self.tokens, "seconds": self.seconds}[name]


def read_histories(directories: Sequence[Path]) -> tuple[list[History], list[str]]:
    """The runs of these results directories (runs, or comparisons of several), in their order, and notes on what was left out.

    A directory that is given twice counts once; runs without a recorded step are left out. Raises `RecordError` for a folder
    that is no results directory or a record that cannot be read, and when no step is recorded at all.
    """
    found = _distinct(directories)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:  # the JSON reader works outside Python's lock
        read = list(pool.map(read_history, found))
    histories = [history for history in read if history is not None]
    if not histories:
        raise RecordError(f"{some(directories)}: no steps are recorded")
    empty = [directory for directory, history in zip(found, read, strict=True) if history is None]
    notes = [f"no steps are recorded, left out: {some(empty)}"] if empty else []
    repeated = [history for history in histories if history.repeated]
    if repeated:
        lines = sum(history.repeated for history in repeated)
        notes.append(
            f"{lines} recorded {'step is a repetition' if lines == 1 else 'steps are repetitions'} (a run that was resumed"
            f" writes them again); the last one counts: {some(history.directory for history in repeated)}"
        )
    return histories, notes


def without_steps(directories: Sequence[Path], read: Iterable[History]) -> list[Path]:
    """The runs of these results directories that `read_histories` left out, since no step of them is recorded."""
    known = {run.directory for run in read}
    return [directory for directory in _distinct(directories) if directory not in known]


def _distinct(directories: Sequence[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for given in directories:
        for directory in run_directories(given):
            found.setdefault(directory.resolve(), directory)
    return list(found.values())


def read_history(directory: Path) -> History | None:
    """One run directory; None when no step is recorded. Raises `RecordError`."""
    manifest = read_manifest(directory)
    columns = _columns(directory / METRICS, ("step", "rollout_step", *_COUNTS, *_MEANS))
    if columns is None:
        return None
    step, last = _last_of_each(columns.pop("step"))
    rollout_step = columns.pop("rollout_step")[last]
    rollout_step = np.where(np.isnan(rollout_step), step, rollout_step).astype(np.int64)
    order = np.argsort(rollout_step, kind="stable")
    steps, starts = np.unique(rollout_step[order], return_index=True)
    parts = {name: values[last][order] for name, values in columns.items()}
    totals = {name: _sums(parts[name], starts) for name in _COUNTS}
    share, stack = _shares(directory / TIMINGS, steps)
    return History(
        directory=directory,
        mode=manifest.get("mode", "custom"),
        seed=manifest.get("seed", manifest.get("settings", {}).get("seed", 0)),
        status=manifest.get("status", ""),
        settings=resolved_settings(manifest),
        provenance=_provenance(manifest),
        steps=steps,
        tokens=_before(totals["response_tokens"], steps),
        seconds=_before(share, steps),
        measures=_measures(parts, totals, starts),
        repeated=columns["samples"].size - len(last),
        stack=stack,
        evaluation=manifest.get("evaluation"),
        diverged=when_diverged(manifest),
    )


def resolved_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a run's manifest, with what the run made of them: its own divisor and the response limit."""
    resolved = {"loss_aggregation_divisor": manifest.get("divisor"), "max_response_length": manifest.get("response_limit")}
    given = manifest.get("settings", {})
    return {**given, **{name: value for name, value in resolved.items() if value is not None}}


def when_diverged(manifest: Mapping[str, Any]) -> tuple[int, str] | None:
    """The rollout step in which a run diverged, and what is said of it."""
    return (manifest["diverged_step"], manifest["diverged"]) if "diverged" in manifest else None


def _provenance(manifest: Mapping[str, Any]) -> dict[str, Any]:
    environment = manifest.get("environment", {})
    packages = environment.get("packages") or {}
    found = {
        "aggcli": environment.get("aggcli"),
        "git_commit": environment.get("git_commit"),
        "torch": packages.get("torch"),
        "device": environment.get("device"),
        "ranks": manifest.get("ranks"),
    }
    return {name: value for name, value in found.items() if value is not None}


# -- columns --------------------------------------------------------------------------------------------------------


def _columns(path: Path, names: Sequence[str]) -> dict[str, Floats] | None:
    """These columns of a record file as float64, NaN but in the first one where blank; None for no file, or one
    without a line.

    A half-written last line (a killed writer) is left out. Raises `RecordError` for a line without the first column.
    """
    import pyarrow
    import pyarrow.json

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    whole = memoryview(data)[: data.rfind(b"\n") + 1]
    if not data[: len(whole)].strip():
        return None
    schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
    try:
        table = pyarrow.json.read_json(
            pyarrow.BufferReader(whole),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(whole), 1)),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pyarrow.ArrowException as error:
        raise RecordError(f"{path}: cannot be read ({error})") from error
    columns = {name: table.column(name).to_numpy().astype(np.float64, copy=True) for name in names}
    if np.isnan(columns[names[0]]).any():
        raise RecordError(f"{path}: line {int(np.isnan(columns[names[0]]).argmax()) + 1} is not the record of a step")
    return columns


def _shares(path: Path, steps: NDArray[np.int64]) -> tuple[Floats, tuple[float, float] | None]:
    """The run's share of its stack's seconds in each of these rollout steps [E], and what tells the stack from others.

    Two runs of a stack have the same first line, and no two stacks have it: a step's seconds are measured to the nanosecond.
    """
    share = np.full(len(steps), np.nan)
    columns = _columns(path, ("rollout_step", "seconds", "runs")) if path.exists() else None
    if columns is None:
        return share, None
    timed, last = _last_of_each(columns["rollout_step"])
    seconds, runs = columns["seconds"][last], columns["runs"][last]
    _, at, there = np.intersect1d(steps, timed, assume_unique=True, return_indices=True)
    share[at] = (seconds / runs)[there]
    return share, (float(seconds[0]), float(runs[0]))


def _last_of_each(step: Floats) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The distinct optimizer steps, sorted, and the position of the last line of each."""
    distinct, from_behind = np.unique(step[::-1], return_index=True)
    return distinct.astype(np.int64), len(step) - 1 - from_behind


def _sums(values: Floats, starts: NDArray[np.intp]) -> Floats:
    return np.add.reduceat(values, starts)


def _measures(parts: Mapping[str, Floats], totals: Mapping[str, Floats], starts: NDArray[np.intp]) -> dict[str, Floats]:
    """Means over a rollout step from those of its optimizer steps, each by the number of things it averaged."""
    scored = parts["correct/count"] + parts["incorrect/count"]
    weights = {**parts, "scored": scored}
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {"accuracy": totals["correct/count"] / _sums(scored, starts)}
        for name, over in _MEANS.items():
            known = np.isfinite(parts[name])
            weight = np.where(known, np.where(np.isnan(weights[over]), 1.0, weights[over]), 0.0)
            found[name] = _sums(np.where(known, parts[name], 0.0) * weight, starts) / _sums(weight, starts)
    return found


def _before(amount: Floats, steps: NDArray[np.int64]) -> Floats:
    """The sum over the earlier steps, from 0; NaN from the first missing step on."""
    before = np.concatenate([[0.0], np.cumsum(amount)[:-1]])
    before[steps != np.arange(len(steps))] = np.nan
    return before if np.isfinite(amount).any() else np.full(len(steps), np.nan)


def shared_seconds(runs: Iterable[History]) -> list[str]:
    """A note for whoever compares these runs by their seconds: which of them only share those of one stack."""
    stacks = Counter(run.stack for run in runs if run.stack is not None)
    together = sum(count for count in stacks.values() if count > 1)
    if not together:
        return []
    return [
        f"{together} of the compared runs were trained in one stack with others, which share its seconds evenly: by seconds"
        " they can differ only in what they do in a step"
    ]


def with_labels(histories: Iterable[History]) -> dict[str, list[History]]:
    """Runs by their label, in the order of first appearance."""
    found: dict[str, list[History]] = {}
    for history in histories:
        found.setdefault(history.label, []).append(history)
    return found
