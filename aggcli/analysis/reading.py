"""The one place where the content of a record file becomes typed data: every reader of results directories reads through it.

What stands in a file is held against its description in `aggcli.analysis.schema`, by pydantic. Fields that are not described
pass: they may come from another version. A step that is recorded again (a run that was resumed writes it again) counts once, by
its last line, for every reader.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from aggcli import records
from aggcli.errors import RecordError, some
from aggcli.records import LAYOUTS, MANIFEST, METRICS, TIMINGS

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_KEYS = {METRICS: ("step",), LAYOUTS: ("step", "layout"), TIMINGS: ("rollout_step",)}
"""Fields that tell the lines of a file apart: without them a line is not the record of a step."""
_NEEDED = {**_KEYS, TIMINGS: ("rollout_step", "seconds", "runs")}


@dataclass(frozen=True)
class Lines:
    """The lines of a record file, each step once and in order. `repeated`: lines that a later one of the same step replaces."""

    rows: tuple[dict[str, Any], ...]
    repeated: int = 0


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a results directory, its fields of the described types. Raises `RecordError`."""
    path = directory / MANIFEST
    try:
        manifest = records.read_manifest(directory)
    except RecursionError as error:
        raise RecordError(f"{directory}: is not a results directory ({MANIFEST} is nested too deeply)") from error
    try:
        _manifest().validate_python(manifest)
    except ValueError as error:
        raise RecordError(f"{path}: {_reason(error)}") from error
    if ("diverged" in manifest) != ("diverged_step" in manifest):
        raise RecordError(f"{path}: only one of diverged and diverged_step is there")
    return manifest


def run_directories(directories: Sequence[Path]) -> list[Path]:
    """The run directories in these results directories (a run, or one per mode of a comparison), each once, in their order."""
    found: dict[Path, Path] = {}
    for given in directories:
        for name in read_manifest(given).get("runs", ["."]):
            place = given if name == "." else given / name
            found.setdefault(place.resolve(), place)
    return list(found.values())


def run_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a run that a comparison names; empty where it has not begun, so that it has no folder yet."""
    return read_manifest(directory) if directory.exists() else {}


def read_lines(path: Path, fields: Sequence[str] | None = None) -> Lines:
    """The lines of metrics.jsonl, layouts.jsonl or timings.jsonl; none where there is no such file. A half-written last line (a
    killed writer) is left out.

    `fields`: read these alone, and the keys. Raises `RecordError`, naming the line, for one that is not the record of a step.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lines(())
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    rows = [_line(path, number, line, fields) for number, line in enumerate(data.split(b"\n")[:-1], 1)]
    keys = _KEYS[path.name]
    last = {tuple(row[name] for name in keys): at for at, row in enumerate(rows)}
    kept = sorted(last.values(), key=lambda at: rows[at][keys[0]])
    return Lines(tuple(rows[at] for at in kept), len(rows) - len(kept))


def last_line(path: Path, line: bytes) -> dict[str, Any]:
    """One line of a record file that was read from its end. Raises `RecordError`."""
    return _line(path, None, line, None)


def repeated_in_words(repeated: Mapping[Path, int]) -> list[str]:
    """A note on the runs with lines that a later one replaces; none where there are none."""
    runs = {directory: count for directory, count in repeated.items() if count}
    if not runs:
        return []
    lines = sum(runs.values())
    kind = "recorded step is a repetition" if lines == 1 else "recorded steps are repetitions"
    return [f"{lines} {kind} (a run that was resumed writes them again); the last one counts: {some(runs)}"]


# -- checks ---------------------------------------------------------------------------------------------------------


def _line(path: Path, number: int | None, line: bytes, fields: Sequence[str] | None) -> dict[str, Any]:
    where = f"{path}: line {number}" if number else f"{path}: its last line"
    try:
        return _adapter(path.name, None if fields is None else tuple(fields)).validate_python(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        raise RecordError(f"{where} is not the record of a step: it is no JSON ({error.msg})") from error
    except ValueError as error:
        raise RecordError(f"{where} is not the record of a step: {_reason(error)}") from error


def _reason(error: ValueError) -> str:
    """`seconds: Input should be a valid number`: the first of pydantic's reasons."""
    first = typing.cast("ValidationError", error).errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


@functools.cache
def _adapter(file: str, fields: tuple[str, ...] | None) -> TypeAdapter[dict[str, Any]]:
    from pydantic import TypeAdapter

    from aggcli.analysis.schema import FILES
    from aggcli.analysis.types import typed_dict

    wanted = [field for field in FILES[file][1] if fields is None or field.name in (*fields, *_NEEDED[file])]
    return TypeAdapter(typed_dict(file, wanted, _NEEDED[file], "allow" if fields is None else "ignore", of_steps=True))


@functools.cache
def _manifest() -> TypeAdapter[dict[str, Any]]:
    from pydantic import TypeAdapter

    from aggcli.analysis.schema import FILES
    from aggcli.analysis.types import typed_dict

    return TypeAdapter(typed_dict(MANIFEST, FILES[MANIFEST][1], ("schema",)))
