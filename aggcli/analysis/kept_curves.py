"""Runs that other trainers made, kept as they were read: `curves.json`, from which they are compared and drawn again without
their logs.

    schema, kind     the schema number of records, and "curves"
    arguments        what was asked for: curves, metrics, and the options of the comparison
    paired, notes    what `aggcli.analysis.arms` said of the runs together
    runs             one object a run with the fields of `History`, null where nothing was measured
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aggcli.analysis.arms import Arms
from aggcli.analysis.histories import MEASURES, History
from aggcli.errors import RecordError
from aggcli.files import whole_file
from aggcli.records import CURVES, SCHEMA, to_json

_KIND = "curves"
_TUPLES = ("stack", "diverged", "modes")


@dataclass(frozen=True)
class Kept:
    """`arguments`: `curves`, `metrics`, and the options of the comparison by their names."""

    arms: Arms
    arguments: Mapping[str, Any]

    def command(self, directory: Path) -> str:
        """The command line that compares the logs again, into this directory."""
        words = [word for one in self.arguments["curves"] for word in ("--curves", str(one))]
        words += [word for one in self.arguments["metrics"] for word in ("--metric", str(one))]
        for name, value in self.arguments["options"].items():
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
            elif value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(["aggcli", "compare", *words, "--overwrite", "--output", str(directory)])


def holds_curves(directory: Path) -> bool:
    """Whether a comparison of other trainers' runs was kept in this folder."""
    return (directory / CURVES).is_file()


def keep_curves(directory: Path, kept: Kept) -> None:
    """Write `curves.json`. Raises `RecordError` where it cannot be written."""
    arms = kept.arms
    about = {"schema": SCHEMA, "kind": _KIND, "arguments": dict(kept.arguments)}
    whole = {**about, "paired": arms.paired, "notes": list(arms.notes), "runs": [_packed(run) for run in arms.runs]}
    try:
        with whole_file(directory / CURVES) as draft:
            draft.write_text(to_json(whole) + "\n", encoding="utf-8")
    except OSError as error:
        raise RecordError(f"--output {directory}: {CURVES} cannot be written ({error.strerror or error})") from error


def read_curves(directory: Path) -> Kept:
    """Raises `RecordError` for a file that is not as `keep_curves` writes it."""
    path = directory / CURVES
    try:
        whole = json.loads(path.read_bytes())
        if whole["schema"] != SCHEMA or whole["kind"] != _KIND:
            raise RecordError(f"{path}: is of schema {whole['schema']} and kind {whole['kind']}, and {SCHEMA} {_KIND} is read")
        runs = tuple(map(_unpacked, whole["runs"]))
        return Kept(Arms(runs, bool(whole["paired"]), tuple(map(str, whole["notes"]))), dict(whole["arguments"]))
    except RecordError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{path}: cannot be read as the runs of a comparison; compare their logs again") from error


def _packed(run: History) -> dict[str, Any]:
    found = {one.name: getattr(run, one.name) for one in dataclasses.fields(run)}
    arrays = {name: value.tolist() for name, value in found.items() if isinstance(value, np.ndarray)}
    measures = {name: values.tolist() for name, values in run.measures.items() if np.isfinite(values).any()}
    return {**found, **arrays, "measures": measures, "directory": str(run.directory)}


def _unpacked(row: Mapping[str, Any]) -> History:
    steps = np.array(row["steps"], dtype=np.int64)
    given: dict[str, Any] = {name: tuple(row[name]) if row[name] is not None else None for name in _TUPLES}
    columns = {name: row["measures"].get(name, [None] * len(steps)) for name in MEASURES}
    arrays = {name: np.array(row[name], dtype=np.float64) for name in ("tokens", "seconds")}
    measures = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    if any(values.shape != steps.shape for values in (*arrays.values(), *measures.values())):
        raise ValueError("columns of other lengths than the steps")
    return History(**{**row, **given, **arrays, "steps": steps, "measures": measures, "directory": Path(row["directory"])})
