"""What a comparison needs of each run: its settings, and its accuracy, reward and lengths over the rollout steps.

Of metrics.jsonl only the needed numbers are kept: a thousand runs of a thousand steps in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggcli.analysis.reading import Lines, read_lines, repeated_in_words, run_directories, run_manifest
from aggcli.analysis.units import length_unit_of
from aggcli.errors import RecordError, some
from aggcli.records import METRICS, TIMINGS

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
MEASURES = ("accuracy", *_MEANS, "kl")
"""`kl`, the divergence from the reference policy, is in other trainers' logs only: in our records the mode weights it."""
AXES = {"steps": "rollout steps", "tokens": "response tokens", "seconds": "seconds"}
"""What a curve can be drawn against, and its unit."""
LOGGED_TOKENS = "tokens as logged"
"""Unit of the tokens of other trainers: most count those of prompts too."""


@dataclass(frozen=True)
class History:
    """A run over its E recorded rollout steps, sorted; arrays are [E], NaN where nothing was measured.

    `tokens` and `seconds` count what the policy had been trained on, or for, *before* the step: the rollouts of a step were
    sampled by the policy that the earlier steps made. Both are NaN behind a missing step, since nobody knows what it took.
    `seconds` are the run's share of those of its stack. `measures` has the names in `MEASURES`. `repeated`: lines that record
    an optimizer step again; the last one counts. `stack`: what tells the stack that the run was trained in from others; None
    where no seconds are recorded. `evaluation`: on fresh prompts after training, None where the run was not evaluated.
    `diverged`: the rollout step in which it diverged, and what is said of it; None where it did not. `length_unit`: what
    lengths and tokens are counted in. `modes`: in a replay, those asked for, the first the baseline of its gradients.
    `source`: the log that another trainer left, which the run was read from; empty for a results directory of ours.
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
    length_unit: str = "tokens"
    modes: tuple[str, ...] = ()
    source: str = ""

    def axis(self, name: str) -> Floats:
        """`steps`, `tokens` or `seconds`, as float64 [E]."""
        return {"steps": self.steps.astype(np.float64), "tokens": self.tokens, "seconds": self.seconds}[name]


def read_histories(directories: Sequence[Path]) -> tuple[list[History], list[str]]:
    """The runs of these results directories (runs, or comparisons of several), in their order, and notes on what was left out.

    A directory that is given twice counts once; runs without a recorded step are left out. Raises `RecordError` for a folder
    that is no results directory or a record that cannot be read, and when no step is recorded at all.
    """
    found = run_directories(directories)
    read = [read_history(directory) for directory in found]
    histories = [history for history in read if history is not None]
    if not histories:
        raise RecordError(f"{some(directories)}: no steps are recorded")
    empty = [directory for directory, history in zip(found, read, strict=True) if history is None]
    notes = [f"no steps are recorded, left out: {some(empty)}"] if empty else []
    return histories, [*notes, *repeated_in_words({history.directory: history.repeated for history in histories})]


def without_steps(directories: Sequence[Path], read: Iterable[History]) -> list[Path]:
    """The runs of these results directories that `read_histories` left out, since no step of them is recorded."""
    known = {run.directory for run in read}
    return [directory for directory in run_directories(directories) if directory not in known]


def read_history(directory: Path) -> History | None:
    """One run directory; None when no step is recorded. Raises `RecordError`."""
    manifest = run_manifest(directory)
    lines = read_lines(directory / METRICS, ("rollout_step", *_COUNTS, *_MEANS))
    if not lines.rows:
        return None
    rollout_step = np.array([row.get("rollout_step", row["step"]) for row in lines.rows], dtype=np.int64)
    order = np.argsort(rollout_step, kind="stable")
    steps, starts = np.unique(rollout_step[order], return_index=True)
    parts = {name: _column(lines, name)[order] for name in (*_COUNTS, *_MEANS)}
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
        repeated=lines.repeated,
        stack=stack,
        evaluation=manifest.get("evaluation"),
        diverged=when_diverged(manifest),
        length_unit=length_unit_of(manifest),
        modes=tuple(manifest.get("modes", ())),
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


def _column(lines: Lines, name: str) -> Floats:
    """A number of each line as float64, NaN where it is blank."""
    return np.array([row.get(name) for row in lines.rows], dtype=np.float64)


def _shares(path: Path, steps: NDArray[np.int64]) -> tuple[Floats, tuple[float, float] | None]:
    """The run's share of its stack's seconds in each of these rollout steps [E], and what tells the stack from others.

    Two runs of a stack have the same first line, and no two stacks have it: a step's seconds are measured to the nanosecond.
    """
    share = np.full(len(steps), np.nan)
    lines = read_lines(path)
    if not lines.rows:
        return share, None
    timed, seconds, runs = (_column(lines, name) for name in ("rollout_step", "seconds", "runs"))
    _, at, there = np.intersect1d(steps, timed, assume_unique=True, return_indices=True)
    share[at] = (seconds / runs)[there]
    return share, (float(seconds[0]), float(runs[0]))


def _sums(values: Floats, starts: NDArray[np.intp]) -> Floats:
    return np.add.reduceat(values, starts)


def _measures(parts: Mapping[str, Floats], totals: Mapping[str, Floats], starts: NDArray[np.intp]) -> dict[str, Floats]:
    """Means over a rollout step from those of its optimizer steps, each by the number of things it averaged."""
    scored = parts["correct/count"] + parts["incorrect/count"]
    weights = {**parts, "scored": scored}
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # what is beyond float64 counts as not measured
        found = {"accuracy": totals["correct/count"] / _sums(scored, starts)}
        for name, over in _MEANS.items():
            known = np.isfinite(parts[name])
            weight = np.where(known, np.where(np.isnan(weights[over]), 1.0, weights[over]), 0.0)
            found[name] = _sums(np.where(known, parts[name], 0.0) * weight, starts) / _sums(weight, starts)
    found["kl"] = np.full(len(starts), np.nan)
    return {name: np.where(np.isfinite(values), values, np.nan) for name, values in found.items()}


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
