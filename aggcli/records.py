"""Results on disk: one directory per run, or per comparison with one run directory per mode inside.

    manifest.json   schema number, command, arguments, resolved settings, versions, git commit, device, threads, seed, status
    metrics.jsonl   one line per optimizer step: the numbers under the layout in force
    layouts.jsonl   one line per optimizer step and layout: reduced numbers, and each rank's
    samples/        one Parquet file per optimizer step: the weight, length and reward of each training sample

Append-only and flushed line by line, so a killed run keeps what it had; strict JSON, null and never NaN.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import orjson

import aggcli
from aggcli.errors import RecordError, some

SCHEMA = 1
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
LAYOUTS = "layouts.jsonl"
SAMPLES = "samples"


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


OWN_FILES = (MANIFEST, METRICS, LAYOUTS, "checkpoint.safetensors")
OWN_FOLDERS = (SAMPLES, "figures")
"""What a results directory holds besides the run directories that its manifest names."""


def check_output(wanted: Path | None, *, overwrite: bool) -> None:
    """Refuse, before any work, an output that exists and is not empty, unless `overwrite` may replace what a run left there.

    A folder that holds anything aggcli did not write is never replaced. Raises `RecordError`.
    """
    if wanted is None:
        return
    if not str(wanted).strip() or str(wanted) == ".":
        raise RecordError(f"--output '{wanted}': must name a folder of its own, such as results/first")
    try:
        if not wanted.exists() or (wanted.is_dir() and not any(wanted.iterdir())):
            return
        if not overwrite:
            raise RecordError(f"--output {wanted}: already holds something; choose another folder or give --overwrite")
        if wanted.is_symlink() or not (wanted / MANIFEST).is_file():
            raise RecordError(f"--output {wanted}: holds no {MANIFEST}, so it is not a results directory; choose another")
        foreign = [str(path) for folder in (wanted, *_run_folders(wanted)) for path in _foreign(folder, wanted)]
    except OSError as error:
        raise RecordError(f"--output {wanted}: cannot be read ({error.strerror or error})") from error
    if foreign:
        raise RecordError(
            f"--output {wanted}: also holds {some(foreign, 3)}, which aggcli did not write; choose another folder"
        )


def _run_folders(directory: Path) -> list[Path]:
    return [directory / name for name in read_manifest(directory).get("runs", []) if (directory / name).is_dir()]


def _foreign(folder: Path, root: Path) -> list[Path]:
    """What stands in a results folder and is not aggcli's own."""
    own_folders = {*OWN_FOLDERS, *(path.relative_to(folder).parts[0] for path in _run_folders(root) if folder in path.parents)}
    return [
        path
        for path in sorted(folder.iterdir())
        if (path.name not in own_folders if path.is_dir() else not path.name.startswith(OWN_FILES))
    ]


def fresh_directory(wanted: Path | None, default_name: str, *, overwrite: bool) -> Path:
    """A results directory that nothing else has written into, made now; see `check_output` for what is refused.

    Without `wanted`: `results/<default_name>`, or the first free `results/<default_name>-2`, `-3`, ... Raises `RecordError`.
    """
    path = wanted if wanted is not None else _first_free(Path("results"), default_name)
    check_output(wanted, overwrite=overwrite)
    try:
        if path.exists() and any(path.iterdir()):
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"--output {path}: cannot be written ({error.strerror or error})") from error
    return path


def _first_free(folder: Path, name: str) -> Path:
    number, path = 1, folder / name
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path


class RunWriter:
    """Writes one run directory. Opened before the work starts; every line is on disk before the next step begins.

    With `resume_at`, goes on in a directory that a run has left: lines of rollout steps from that one on are cut off (a backup
    keeps them), and what comes is appended.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any], resume_at: int | None = None) -> None:
        self.directory = directory
        self.manifest = {"schema": SCHEMA, **manifest}
        directory.mkdir(parents=True, exist_ok=True)
        write_manifest(directory, {**self.manifest, "status": "running"})
        if resume_at is not None:
            for name in (METRICS, LAYOUTS):
                cut_off(directory / name, resume_at)
        mode = "x" if resume_at is None else "a"
        self._metrics: TextIO = (directory / METRICS).open(mode, encoding="utf-8")
        self._layouts: TextIO = (directory / LAYOUTS).open(mode, encoding="utf-8")

    def step(self, metrics: Mapping[str, Any], layouts: Sequence[Mapping[str, Any]]) -> None:
        """Append one optimizer step."""
        for layout in layouts:
            _append(self._layouts, layout)
        _append(self._metrics, metrics)

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
        self._metrics.close()
        self._layouts.close()
        write_manifest(self.directory, {**self.manifest, "status": ended(error)})


def cut_off(path: Path, step: int) -> None:
    """Keep only the whole lines of rollout steps before `step`; what is cut stays beside it, in a backup of the file."""
    if not path.exists():
        return
    whole = path.read_bytes()
    lines = [line for line in whole.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for line in lines if json.loads(line)["rollout_step"] < step)
    if kept == whole:
        return
    shutil.copy2(path, _first_free(path.parent, path.name + ".before-resume"))
    draft = path.with_name(path.name + ".tmp")
    draft.write_bytes(kept)
    draft.replace(path)


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
        file.write(orjson.dumps(line).decode() + "\n")  # strict, and NaN becomes null
    except (TypeError, ValueError):  # a text that is not Unicode, or an integer beyond 64 bits
        file.write(to_json(line) + "\n")
    file.flush()


# -- reading --------------------------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a results directory. Raises `RecordError` when there is none, or one of another schema."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{directory}: is not a results directory (no readable {MANIFEST})") from error
    if manifest.get("schema") != SCHEMA:
        raise RecordError(f"{directory}: has schema {manifest.get('schema')}, this version reads {SCHEMA}")
    return manifest


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
