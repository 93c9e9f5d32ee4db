"""Writing one run directory, line by line; see `aggcli.records` for its files."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import orjson

from aggcli.errors import RecordError
from aggcli.files import whole_file
from aggcli.records import (
    LAYOUTS,
    MANIFEST,
    METRICS,
    SAMPLES,
    SCHEMA,
    TENSORBOARD,
    TIMINGS,
    first_free,
    refuse_links,
    to_json,
    write_manifest,
)


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
    """Writes one run: the directory `name` in a results directory that is there ("." for that directory itself). Opened
    before the work starts; every line is on disk before the next step begins.

    With `resume_at`, goes on in a directory that a run has left: lines of rollout steps from that one on are cut off (a backup
    keeps them), and what comes is appended. `timed`: the run has rollout steps, which `timing` records. Raises `RecordError`
    for records that are not there or cannot be read, and for links, which would have it write outside; later, when the files
    are not where they were.
    """

    def __init__(
        self,
        results: Path,
        name: str,
        manifest: Mapping[str, Any],
        resume_at: int | None = None,
        open_sinks: OpenSinks = no_sinks,
        *,
        timed: bool = False,
    ) -> None:
        self.directory = directory = results / name
        self.manifest = {"schema": SCHEMA, **manifest}
        self._sinks: Sequence[Sink] = ()
        self._files: dict[str, TextIO] = {}
        names = (METRICS, LAYOUTS, TIMINGS) if timed else (METRICS, LAYOUTS)
        refuse_links(directory / name for name in (*names, SAMPLES, TENSORBOARD))
        _make_inside(results, name)
        try:
            write_manifest(directory, {**self.manifest, "status": "running"})
            self._open(names, resume_at, open_sinks)
        except BaseException as error:
            self._end(error)
            if isinstance(error, FileNotFoundError) and not directory.exists():
                raise _gone(results) from None
            raise

    def _open(self, names: Sequence[str], resume_at: int | None, open_sinks: OpenSinks) -> None:
        directory = self.directory
        if resume_at is not None:
            if resume_at and not (directory / METRICS).exists():
                raise RecordError(f"{directory / METRICS}: is missing, so what was done before step {resume_at} cannot be kept")
            for name in names:
                cut_off(directory / name, resume_at)
        self._sinks = open_sinks(directory, self.manifest)
        mode = "x" if resume_at is None else "a"
        for name in names:
            self._files[name] = (directory / name).open(mode, encoding="utf-8")

    def step(self, metrics: Mapping[str, Any], layouts: Sequence[Mapping[str, Any]]) -> None:
        """Append one optimizer step."""
        for layout in layouts:
            _append(self._files[LAYOUTS], layout)
        _append(self._files[METRICS], metrics)
        for sink in self._sinks:
            sink.step(metrics)

    def timing(self, rollout_step: int, seconds: float, runs: int, tokens: int, peak_bytes: int) -> None:
        """Append what one rollout step of the run's stack took: seconds, the runs and response tokens they went into, and the
        most bytes of memory."""
        line = {"rollout_step": rollout_step, "seconds": seconds, "runs": runs, "tokens": tokens, "peak_bytes": peak_bytes}
        _append(self._files[TIMINGS], line)

    def samples(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the per-sample columns of one optimizer step."""
        import pyarrow
        import pyarrow.parquet

        folder = self.directory / SAMPLES
        folder.mkdir(exist_ok=True)
        with whole_file(folder / f"step-{step:06d}.parquet") as draft:
            pyarrow.parquet.write_table(pyarrow.table(dict(columns)), draft)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Close everything and say in the manifest how the run ended; a full disk must not keep it from that."""

        files = [functools.partial(_named, file.name, file.close) for file in self._files.values()]
        status = functools.partial(say_status, self.directory, self.manifest, error)
        end_all([*files, status, *(sink.close for sink in self._sinks)], error)


def end_all(endings: Iterable[Callable[[], object]], error: BaseException | None) -> None:
    """Call every ending, whatever the others do. The first trouble among them is raised, unless an `error` ends the work
    already: that is the one to tell of.
    """
    troubles: list[Exception] = []
    for ending in endings:
        try:
            ending()
        except Exception as trouble:
            troubles.append(trouble)
    if troubles and error is None:
        raise troubles[0]


def cut_off(path: Path, step: int) -> None:
    """Keep only the whole lines of rollout steps before `step`; what is cut stays beside it, in a backup of the file."""
    if not path.exists():
        return
    whole = path.read_bytes()
    lines = [line for line in whole.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for at, line in enumerate(lines) if _rollout_step(path, at, line) < step)
    if kept == whole:
        return
    with whole_file(first_free(path.parent, path.name + ".before-resume")) as backup:
        shutil.copy2(path, backup)
    with whole_file(path) as draft:
        draft.write_bytes(kept)


def _rollout_step(path: Path, at: int, line: bytes) -> int:
    try:
        return int(orjson.loads(line)["rollout_step"])
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path}: line {at + 1} is not the record of a step; remove it to go on") from None


def say_status(directory: Path, manifest: Mapping[str, Any], error: BaseException | None) -> None:
    """Write the manifest of work that has ended, with how it did; on a full disk over the old one, which has the room."""
    if not directory.exists():  # somebody has removed it
        return
    told = {**manifest, "status": _ended(error)}
    try:
        write_manifest(directory, told)
    except OSError as trouble:
        if trouble.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        path = directory / MANIFEST
        text = to_json(told, indent=2).encode()
        with path.open("r+b") as file:
            file.write(text.ljust(path.stat().st_size - 1) + b"\n")


def _ended(error: BaseException | None) -> str:
    """`done`, `interrupted` or `failed`: how a manifest says a run ended."""
    return "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _append(file: TextIO, line: Mapping[str, Any]) -> None:
    try:
        text = orjson.dumps(line).decode()  # strict, and NaN becomes null
    except (TypeError, ValueError):  # a text that is not Unicode, or an integer beyond 64 bits
        text = to_json(line)
    _named(file.name, lambda: (file.write(text + "\n"), file.flush()))
    _need_in_place(file)


def _named(name: str, work: Callable[[], object]) -> None:
    try:
        work()
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def _make_inside(results: Path, name: str) -> None:
    """A folder in a results directory; one that was removed is not made again, for the part of a run that would be in it."""
    if not results.is_dir():
        raise _gone(results)
    try:
        for at in range(len(Path(name).parts)):
            results.joinpath(*Path(name).parts[: at + 1]).mkdir(exist_ok=True)
    except FileNotFoundError:
        raise _gone(results) from None


def _gone(path: Path) -> RecordError:
    return RecordError(f"{path}: was removed or moved while it was being written; the run ends here")


def _need_in_place(file: TextIO) -> None:
    """A file that was removed or moved still takes lines, which nobody would ever find."""
    try:
        in_place = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        in_place = False
    if not in_place:
        raise _gone(Path(file.name))
