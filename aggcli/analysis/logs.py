"""Logs that trainers leave: TensorBoard event files, CSV exports of W&B and MLflow, `trainer_state.json` of Hugging Face and
TRL, and JSON lines as verl writes them. Each run becomes columns of numbers over its steps; no name is interpreted here.

    event files          a folder of them is one run, read in the order of their names; a later value of a step counts
    trainer_state.json   `log_history`; of several checkpoints of a run the last one holds all
    CSV of W&B           a run's history (a column a metric), or a panel's export (columns `<run> - <metric>`, several runs)
    CSV of MLflow        a metric history: the columns key, value and step, and run_id where there are several runs
    JSON lines           flat objects, or `{"step": ..., "data": {...}}` as verl's file logger writes them
    .log, .txt, .out     a saved terminal, of which verl's and slime's lines are read (`aggcli.analysis.console_logs`)
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from natsort import natsorted
from numpy.typing import NDArray

from aggcli.analysis.console_logs import printed_numbers
from aggcli.errors import RecordError, nearest, some

STEP_NAMES = ("train/global_step", "global_step", "training/global_step", "trainer/global_step", "step", "rollout/step")
"""Columns that count a trainer's steps, in the order in which they are taken; `Step` and `_step` are W&B's own count."""
_COUNTS_OF_WANDB = ("Step", "_step")
_LONG = ({"key", "value", "step"}, {"metric", "value", "step"})
"""Columns of a metric history: a row a number."""
_RUN_NAMES = ("run_id", "run_uuid", "run", "Run")
_NO_FINITE = ("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf")
"""How numbers that are not finite are written where the format has none."""
STATE = "trainer_state.json"
MOST = 1e150
"""A number at or beyond it, the square of which no float64 holds, counts as not measured, as infinity and NaN do."""


@dataclass(frozen=True)
class Log:
    """A run's log. `name`: its file or folder, and which run of the file where that holds several; `axis`: what its steps are
    called there; `columns`: name -> (steps [E], sorted, each once; numbers [E], finite); `lost`: name -> the steps, sorted, at
    which it was logged as NaN, infinite or at or beyond `MOST`, so that these numbers are not among the others; `again`: name
    -> the steps, sorted, of which it holds several numbers that differ, the last of which counts; `printed`: whether the
    numbers are those of a terminal, with the digits that were printed.
    """

    path: Path
    name: str
    axis: str
    columns: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
    lost: Mapping[str, Sequence[int]] = field(default_factory=dict)
    again: Mapping[str, Sequence[int]] = field(default_factory=dict)
    printed: bool = False


def read_logs(path: Path, axis: str | None = None) -> list[Log]:
    """The runs in a file, or the one in a folder. `axis`: the column that counts steps, where it is not one of `STEP_NAMES`.

    Raises `RecordError` for what is no log, is truncated, or has no steps.
    """
    if path.is_dir():
        return _read_folder(path, axis)
    if "tfevents" in path.name:
        return [_log(path, str(path), "step", _events([path]))]
    readers: dict[str, Callable[[Path, str | None], list[Log]]] = {".csv": _csv, ".jsonl": _lines, ".json": _state}
    readers |= dict.fromkeys((".log", ".txt", ".out"), _terminal)
    reader = readers.get(path.suffix)
    if reader is None:
        raise RecordError(
            f"{path}: is no log that is read here: event files, .csv, .jsonl, {STATE}, verl's and slime's lines in a .log,"
            " .txt or .out, and results directories are"
        )
    return reader(path, axis)


def _read_folder(path: Path, axis: str | None) -> list[Log]:
    """The one run that a folder holds, by the first kind of log that is there."""
    states = [path / STATE, *reversed(natsorted(path.glob(f"checkpoint-*/{STATE}")))]
    if state := next((one for one in states if one.is_file()), None):
        return _state(state, axis)
    events = natsorted(one for one in path.rglob("*tfevents*") if one.is_file())
    folders = list(dict.fromkeys(one.parent for one in events))
    if len(folders) > 1:
        raise RecordError(
            f"{path}: holds event files in {len(folders)} folders ({some(folders, 3)}); name those of one run each"
        )
    if events:
        return [_log(path, str(path), "step", _events(events))]
    files = natsorted(one for ending in ("*.csv", "*.jsonl") for one in path.glob(ending))
    if len(files) > 1:
        raise RecordError(f"{path}: holds {len(files)} logs ({some([one.name for one in files], 3)}); name the file")
    if not files:
        raise RecordError(f"{path}: holds no event file, no {STATE}, no .csv, no .jsonl and no results")
    return read_logs(files[0], axis)


# -- TensorBoard ----------------------------------------------------------------------------------------------------


def _events(paths: Sequence[Path]) -> Iterator[tuple[str, int, float]]:
    """Every scalar of these event files as (tag, step, number). Raises `RecordError` for one that is truncated or damaged."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]: made at import
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise RecordError(
            f'{paths[0]}: event files need TensorBoard\'s own reader: pip install "aggcli[tensorboard]"'
        ) from error
    from google.protobuf.message import DecodeError

    for path in paths:
        reader, step = PyRecordReader_New(str(path)), None
        while True:
            try:
                reader.GetNext()
                event: Any = Event.FromString(reader.record())
            except errors.OutOfRangeError:
                break
            except (errors.DataLossError, DecodeError) as error:
                last = "before any step" if step is None else f"behind step {step}"
                raise RecordError(f"{path}: is truncated or damaged {last}; copy it again, or leave it out") from error
            for value in event.summary.value:
                step = int(event.step)
                if value.HasField("simple_value"):
                    yield value.tag, step, float(value.simple_value)
                elif value.HasField("tensor"):
                    array = make_ndarray(value.tensor)
                    if array.size == 1 and array.dtype.kind in "fiu":
                        yield value.tag, step, float(array.reshape(()))


# -- JSON -----------------------------------------------------------------------------------------------------------


def _state(path: Path, axis: str | None) -> list[Log]:
    try:
        history = json.loads(path.read_bytes())["log_history"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{path}: is no {STATE} (no JSON object with a log_history)") from error
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise RecordError(f"{path}: its log_history is no list of objects")
    return [_of_rows(path, history, axis)]


def _lines(path: Path, axis: str | None) -> list[Log]:
    """JSON lines; a half-written last line (a killed writer) is left out."""
    rows = []
    for number, line in enumerate(_text(path).splitlines(keepends=True), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith("\n"):
                break
            raise RecordError(f"{path}: line {number} is no JSON") from error
        if not isinstance(row, dict):
            raise RecordError(f"{path}: line {number} is no JSON object")
        inner = row.get("data")
        rows.append({**row, **inner} if isinstance(inner, dict) else row)
    return [_of_rows(path, rows, axis)]


def _of_rows(path: Path, rows: Sequence[Mapping[str, Any]], axis: str | None) -> Log:
    """A log of objects with a number a name."""
    chosen = _axis(path, dict.fromkeys(name for row in rows for name in row), axis)
    return _log(path, str(path), chosen, _triples(path, chosen, rows))


def _triples(path: Path, axis: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int, float]]:
    for row in rows:
        at = row.get(axis)
        if at is None or at == "" or (isinstance(at, float) and math.isnan(at)):
            continue
        step = _step(path, axis, at)
        for name, value in row.items():
            if name != axis and (number := _number(value)) is not None:
                yield name, step, number


def _terminal(path: Path, axis: str | None) -> list[Log]:
    """A saved terminal. Raises `RecordError` where no line is one of verl's or slime's."""
    if axis is not None:
        raise RecordError(f"{path}: printed lines are counted by their own step; leave out --metric step={axis}")
    numbers = list(printed_numbers(_text(path)))
    if not numbers:
        raise RecordError(
            f"{path}: holds no line of a step as verl (step:1 - critic/score/mean:0.5) or slime (rollout 1: {{...}}) print it"
        )
    return [replace(_log(path, str(path), "step", numbers), printed=True)]


# -- CSV ------------------------------------------------------------------------------------------------------------


def _csv(path: Path, axis: str | None) -> list[Log]:
    names, cells = _cells(path)
    if any(kind <= set(names) for kind in _LONG):
        return _metric_history(path, names, cells)
    chosen = _axis(path, names, axis)
    rows = [{name: _of_text(cell) for name, cell in row.items()} for row in cells]
    runs = dict.fromkeys(name.rpartition(" - ")[0] for name in names if name != chosen and " - " in name)
    if not runs:
        return [_log(path, str(path), chosen, _triples(path, chosen, rows))]
    logs = []
    for run in runs:
        own = {name: metric for name in names for of, _, metric in [name.rpartition(" - ")] if of == run}
        parts = [{chosen: row[chosen], **{short: row[name] for name, short in own.items()}} for row in rows]
        logs.append(_log(path, f"{path} ({run})", chosen, _triples(path, chosen, parts)))
    return logs


def _cells(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns' names, and of each row the texts of its cells. Raises `RecordError` for a row with a cell beyond the last
    column (commas at its end are none), and for two columns of one name, of which nobody knows which is meant."""
    try:
        lines = [
            [cell.strip() for cell in line] for line in csv.reader(io.StringIO(_text(path)), skipinitialspace=True) if line
        ]
    except csv.Error as error:
        raise RecordError(f"{path}: is no CSV table ({error})") from error
    if not lines:
        raise RecordError(f"{path}: is no CSV table (empty)")
    names, *body = lines
    if twice := [name for name, count in Counter(filter(None, names)).items() if count > 1]:
        raise RecordError(
            f"{path}: has several columns named {some(twice, 3)}; rename them, so that it is known which is meant"
        )
    for number, line in enumerate(body, 2):
        if any(line[len(names) :]):
            raise RecordError(f"{path}: row {number} has {len(line)} cells, and the header names {len(names)} columns")
    return [name for name in names if name], [
        {name: cell for name, cell in zip(names, line, strict=False) if name} for line in body
    ]


def _of_text(cell: str) -> float | None:
    """A cell's number; None for one that is blank, or text."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _metric_history(path: Path, names: Sequence[str], cells: Sequence[Mapping[str, str]]) -> list[Log]:
    """A row a number, as MLflow's metric histories have them."""
    key = "key" if "key" in names else "metric"
    of_run = next((name for name in _RUN_NAMES if name in names), None)
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in cells:
        one = {"step": _of_text(row.get("step", "")), row.get(key, ""): _of_text(row.get("value", ""))}
        parts.setdefault(row.get(of_run, "") if of_run else "", []).append(one)
    if not parts:
        raise RecordError(f"{path}: holds no number over steps")
    return [
        _log(path, f"{path} ({run})" if len(parts) > 1 else str(path), "step", _triples(path, "step", rows))
        for run, rows in parts.items()
    ]


# -- parts ----------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecordError(f"{path}: cannot be read ({reason})") from error


def _axis(path: Path, names: Iterable[str], axis: str | None) -> str:
    """The column that counts steps. Raises `RecordError` where there is none."""
    known = list(names)
    if axis is not None:
        if axis not in known:
            raise RecordError(f"{path}: has no column {axis} to count steps by{nearest(axis, known)}")
        return axis
    found = next((name for name in (*STEP_NAMES, *_COUNTS_OF_WANDB) if name in known), None)
    if found is None:
        raise RecordError(
            f"{path}: has no column of steps; it has {some(known, 8) or 'none'}; name one with --metric step=COLUMN"
        )
    return found


def _step(path: Path, axis: str, value: Any) -> int:
    number = _number(value)
    if number is None or not (number.is_integer() and 0 <= number < 2**53):
        held = f"the text {value!r}" if isinstance(value, str) else value
        raise RecordError(f"{path}: {axis} holds {held}, and steps are whole numbers from 0 on")
    return int(number)


def _number(value: Any) -> float | None:
    """A number, infinite where it is beyond float64; None for what is none."""
    if isinstance(value, str) and value in _NO_FINITE:
        return math.nan
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return math.inf


def _log(path: Path, name: str, axis: str, numbers: Iterable[tuple[str, int, float]]) -> Log:
    found: dict[str, dict[int, float]] = {}
    again: dict[str, set[int]] = {}
    for column, step, value in numbers:
        own = found.setdefault(column, {})
        if not (own.get(step, value) == value or math.isnan(value)):
            again.setdefault(column, set()).add(step)
        own[step] = value
    columns, lost = {}, {}
    for column, values in found.items():
        steps = sorted(step for step, value in values.items() if abs(value) < MOST)
        columns[column] = (np.array(steps, dtype=np.int64), np.array([values[step] for step in steps], dtype=np.float64))
        if len(steps) < len(values):
            lost[column] = sorted(values.keys() - set(steps))
    if not any(steps.size for steps, _ in columns.values()):
        raise RecordError(f"{name}: holds no number over steps")
    return Log(path, name, axis, columns, lost, {column: sorted(steps) for column, steps in again.items()})
