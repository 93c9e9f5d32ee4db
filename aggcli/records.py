"""Results on disk: one directory per run, or per comparison with one run directory per mode inside.

    manifest.json   schema number, command, arguments, resolved settings, versions, git commit, device, threads, seed, status
    metrics.jsonl   one line per optimizer step: the numbers under the layout in force
    layouts.jsonl   one line per optimizer step and layout: reduced numbers, and each rank's
    timings.jsonl   in training, one line per rollout step: seconds it took, runs that shared them, their response tokens
    samples/        one Parquet file per optimizer step: the weight, length and reward of each training sample
    tensorboard/    with --log-to: a mirror of metrics.jsonl, which nothing reads back (see `aggcli.sinks`); as is
    trackio/        in the directory of the whole comparison

Append-only and flushed line by line, so a killed run keeps what it had; strict JSON, null and never NaN. A resumed run writes
the lines that an undisturbed one would have, byte for byte; so what the clock says stands apart, in timings.jsonl. Its seconds
are those of all runs that the process trains as one stack, sampling included and writing not; a run's own share is
`seconds / runs`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import orjson

import aggcli
from aggcli.errors import RecordError, some

SCHEMA = 1
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
LAYOUTS = "layouts.jsonl"
TIMINGS = "timings.jsonl"
SAMPLES = "samples"
TENSORBOARD = "tensorboard"
TRACKIO = "trackio"


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity become null."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent, ensure_ascii=True)
    except ValueError:  # rare, so that the common case is not copied
        return json.dumps(_strict(value), allow_nan=False, indent=indent, ensure_ascii=True)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def environment(device: str, threads: int) -> dict[str, Any]:
    """Versions, commit, device and threads, as they stand in every manifest."""
    packages = ("torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "typer", "rich")
    return {
        "aggcli": aggcli.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "git_commit": git_commit(),
        "device": device,
        "cores": os.cpu_count(),
        "threads": threads,
    }


@functools.cache
def git_commit() -> str | None:
    """The commit of aggcli's own checkout; None when it is installed from a package."""
    here = Path(aggcli.__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    try:
        told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None if told.returncode == 0 else None


def first_free(folder: Path, name: str) -> Path:
    """`folder/name`, or the first of `name-2`, `name-3`, ... that is not there."""
    number, path = 1, folder / name
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path


class Sink(Protocol):
    """A mirror of metrics.jsonl; see `aggcli.sinks`."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Take one line of metrics.jsonl."""
        ...

    def close(self) -> None: ...


OpenSinks = Callable[[Path, Mapping[str, Any]], Sequence[Sink]]
"""(run directory, manifest) -> its sinks, which hold the steps that its metrics.jsonl holds."""


def no_sinks(directory: Path, manifest: Mapping[str, Any]) -> Sequence[Sink]:
    """Records without a mirror."""
    return ()


class RunWriter:
    """Writes one run directory. Opened before the work starts; every line is on disk before the next step begins.

    With `resume_at`, goes on in a directory that a run has left: lines of rollout steps from that one on are cut off (a backup
    keeps them), and what comes is appended. `timed`: the run has rollout steps, which `timing` records. Raises `RecordError`
    for records that are not there or cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        resume_at: int | None = None,
        open_sinks: OpenSinks = no_sinks,
        *,
        timed: bool = False,
    ) -> None:
        self.directory = directory
        self.manifest = {"schema": SCHEMA, **manifest}
        directory.mkdir(parents=True, exist_ok=True)
        write_manifest(directory, {**self.manifest, "status": "running"})
        names = (METRICS, LAYOUTS, TIMINGS) if timed else (METRICS, LAYOUTS)
        if resume_at is not None:
            if resume_at and not (directory / METRICS).exists():
                raise RecordError(f"{directory / METRICS}: is missing, so what was done before step {resume_at} cannot be kept")
            for name in names:
                cut_off(directory / name, resume_at)
        self._sinks = open_sinks(directory, self.manifest)
        mode = "x" if resume_at is None else "a"
        self._files: dict[str, TextIO] = {name: (directory / name).open(mode, encoding="utf-8") for name in names}

    def step(self, metrics: Mapping[str, Any], layouts: Sequence[Mapping[str, Any]]) -> None:
        """Append one optimizer step."""
        for layout in layouts:
            _append(self._files[LAYOUTS], layout)
        _append(self._files[METRICS], metrics)
        for sink in self._sinks:
            sink.step(metrics)

    def timing(self, rollout_step: int, seconds: float, runs: int, tokens: int) -> None:
        """Append what one rollout step of the run's stack took: seconds, and the runs and response tokens they went into."""
        line = {"rollout_step": rollout_step, "seconds": seconds, "runs": runs, "tokens": tokens}
        _append(self._files[TIMINGS], line)

    def samples(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the per-sample columns of one optimizer step."""
        import pyarrow
        import pyarrow.parquet

        folder = self.directory / SAMPLES
        folder.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(dict(columns)), folder / f"step-{step:06d}.parquet")

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with ExitStack() as closing:  # a full disk must not keep the manifest from saying how the run ended
            for sink in self._sinks:
                closing.callback(sink.close)
            closing.callback(write_manifest, self.directory, {**self.manifest, "status": ended(error)})
            for file in self._files.values():
                closing.callback(file.close)


def cut_off(path: Path, step: int) -> None:
    """Keep only the whole lines of rollout steps before `step`; what is cut stays beside it, in a backup of the file."""
    if not path.exists():
        return
    whole = path.read_bytes()
    lines = [line for line in whole.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for at, line in enumerate(lines) if _rollout_step(path, at, line) < step)
    if kept == whole:
        return
    shutil.copy2(path, first_free(path.parent, path.name + ".before-resume"))
    draft = path.with_name(path.name + ".tmp")
    draft.write_bytes(kept)
    draft.replace(path)


def _rollout_step(path: Path, at: int, line: bytes) -> int:
    try:
        return int(orjson.loads(line)["rollout_step"])
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path}: line {at + 1} is not the record of a step; remove it to go on") from None


def ended(error: BaseException | None) -> str:
    """`done`, `interrupted` or `failed`: how a manifest says a run ended."""
    return "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest atomically: a reader sees the old one or the new one."""
    draft = directory / (MANIFEST + ".tmp")
    draft.write_text(to_json(manifest, indent=2) + "\n", encoding="utf-8")
    draft.replace(directory / MANIFEST)


def update_manifest(directory: Path, **facts: Any) -> None:
    """Add facts to the manifest of a results directory."""
    write_manifest(directory, {**read_manifest(directory), **facts})


def _append(file: TextIO, line: Mapping[str, Any]) -> None:
    try:
        text = orjson.dumps(line).decode()  # strict, and NaN becomes null
    except (TypeError, ValueError):  # a text that is not Unicode, or an integer beyond 64 bits
        text = to_json(line)
    try:
        file.write(text + "\n")
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None


# -- reading --------------------------------------------------------------------------------------------------------


_SHAPES = {
    **dict.fromkeys(("settings", "environment", "evaluation"), dict),
    **dict.fromkeys(("kind", "command", "mode", "status", "diverged"), str),
    **dict.fromkeys(("arguments", "runs"), list),
    "seed": int,
}
"""Type of each field of a manifest that is read back, where it is there."""


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a results directory. Raises `RecordError` when there is none, one of another schema, or one whose fields
    are not of the types that are read here.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{directory}: is not a results directory (no readable {MANIFEST})") from error
    if not isinstance(manifest, dict):
        raise RecordError(f"{directory}: is not a results directory ({MANIFEST} holds no JSON object)")
    if manifest.get("schema") != SCHEMA:
        raise RecordError(f"{directory}: has schema {manifest.get('schema')}, this version reads {SCHEMA}")
    _check_shapes(directory, manifest)
    return manifest


def _check_shapes(directory: Path, manifest: Mapping[str, Any]) -> None:
    for name, kind in _SHAPES.items():
        if name in manifest and not isinstance(manifest[name], kind):
            raise RecordError(f"{directory}: {name} in its {MANIFEST} is not of type {kind.__name__}")
    if not isinstance(manifest.get("settings", {}).get("seed", 0), int):
        raise RecordError(f"{directory}: seed in the settings of its {MANIFEST} is not of type int")
    named = manifest.get("runs", ["run"])
    if not named or not all(isinstance(name, str) for name in named):
        raise RecordError(f"{directory}: runs in its {MANIFEST} is not a list of folders")
    outside = [name for name in named if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts]
    if outside:
        raise RecordError(f"{directory}: runs in its {MANIFEST} must be folders inside it, and not {some(outside, 3)}")


def run_directories(directory: Path) -> list[Path]:
    """The run directories in a results directory: itself, or one per mode of a comparison, in the comparison's order."""
    manifest = read_manifest(directory)
    return [directory / name for name in manifest["runs"]] if "runs" in manifest else [directory]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record file; a half-written last line (a killed writer) is left out."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from error
