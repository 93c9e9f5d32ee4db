"""Results on disk: one directory per run, or per comparison with one run directory per mode inside.

    manifest.json   schema number, command, arguments, resolved settings, versions, git commit, device, threads, seed, status
    metrics.jsonl   one line per optimizer step: the numbers under the layout in force
    layouts.jsonl   one line per optimizer step and layout: reduced numbers, and each rank's
    timings.jsonl   in training, one line per rollout step: seconds and memory it took, runs that shared them, their tokens
    samples/        one Parquet file per optimizer step: the weight, length and reward of each training sample
    rollouts/       with --save-rollouts: one plain JSONL per rollout step, what was sampled
    curves.json     alone in its directory: runs of other trainers, as they were compared (see `aggcli.analysis.kept_curves`)
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
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aggcli.errors import RecordError, some
from aggcli.files import whole_file
from aggcli.version import __version__

SCHEMA = 1
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
LAYOUTS = "layouts.jsonl"
TIMINGS = "timings.jsonl"
SAMPLES = "samples"
TENSORBOARD = "tensorboard"
TRACKIO = "trackio"
ROLLOUTS = "rollouts"
CURVES = "curves.json"
CHECKPOINT_PARTS = ("checkpoint-parts-0", "checkpoint-parts-1")
"""Where ranks put their parts of a checkpoint, in turn: the last whole one stays while the next is written."""


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
        "aggcli": __version__,
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
    here = Path(__file__).resolve().parent
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


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest atomically: a reader sees the old one or the new one."""
    with whole_file(directory / MANIFEST) as draft:
        draft.write_text(to_json(manifest, indent=2) + "\n", encoding="utf-8")


def update_manifest(directory: Path, **facts: Any) -> None:
    """Add facts to the manifest of a results directory."""
    write_manifest(directory, {**read_manifest(directory), **facts})


def refuse_links(paths: Iterable[Path]) -> None:
    """Refuse to write into any of these files and folders of a results directory that is a link: it would lead out of it.

    Raises `RecordError`.
    """
    for path in paths:
        if path.is_symlink():
            raise RecordError(
                f"{path}: is a link, and records are never written through one; replace it by the file that it points to"
            )


# -- reading --------------------------------------------------------------------------------------------------------


_SHAPES = {
    **dict.fromkeys(("settings", "environment", "evaluation"), dict),
    **dict.fromkeys(("kind", "command", "mode", "status", "diverged"), str),
    **dict.fromkeys(("arguments", "runs"), list),
    **dict.fromkeys(("seed", "ranks", "shares"), int),
}
"""Type of each field of a manifest that is read back, where it is there."""


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a results directory. Raises `RecordError` when there is none, one of another schema, or one whose fields
    are not of the types that are read here.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    if manifest.get("shares", 1) < 1:
        raise RecordError(f"{directory}: shares in its {MANIFEST} is {manifest['shares']}, and must be at least 1")
    named = manifest.get("runs", ["run"])
    if not named or not all(isinstance(name, str) for name in named):
        raise RecordError(f"{directory}: runs in its {MANIFEST} is not a list of folders")
    outside = [name for name in named if not is_inside(directory, name)]
    if outside:
        raise RecordError(f"{directory}: runs in its {MANIFEST} must be folders inside it, and not {some(outside, 3)}")


def run_directories(directory: Path) -> list[Path]:
    """The run directories in a results directory: itself, or one per mode of a comparison, in the comparison's order."""
    manifest = read_manifest(directory)
    return [directory / name for name in manifest["runs"]] if "runs" in manifest else [directory]


def is_inside(directory: Path, name: str) -> bool:
    """Whether a run's name leads to a folder inside the directory: by its parts, and by no link on the way."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        return False
    return not any((directory / Path(*parts[: at + 1])).is_symlink() for at in range(len(parts)))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record file; a half-written last line (a killed writer) is left out."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from error
