"""The tables of `aggcli runs`: the list of results directories, what one of them holds, and how two differ."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from aggcli.analysis.directories import Results
from aggcli.analysis.units import in_length_unit
from aggcli.measurement.catalogue import METRICS, describe
from aggcli.measurement.words import in_bytes, plural
from aggcli.report.blocks import BlockTable

MOST_MODES = 4
"""Modes of a results directory that are listed; the others are counted."""
_DIFFERING = {
    "settings": "settings that the numbers depend on",
    "environment": "environment",
    "records": "runs and records",
}
"""What differs -> the head of its table."""


def list_table(found: Sequence[Mapping[str, Any]], *, full: bool) -> Table:
    """The results directories (see `Results.facts`), up to `MOST_MODES` modes of each: a row a mode, so that an accuracy stands
    beside its own. `full`: a row a directory, its modes on one line, and times in full.
    """
    heads = ("name", "command", "modes", "seeds", "steps", "status", "when", "accuracy")
    rows = []
    for one in found:
        shown = one["modes"][:MOST_MODES]
        accuracies = [_accuracy(one, mode) if one["accuracy"] else "" for mode in shown]
        others = [f"and {plural(left, 'other')}"] if (left := len(one["modes"]) - len(shown)) else []
        if full:
            cells = [(_joined(shown, others), _joined(accuracies, others) if one["accuracy"] else "")]
        else:
            cells = [*zip(shown, accuracies, strict=True), *((text, "") for text in others)]
        facts = (str(len(one["seeds"])), _steps(one), _status(one), _when(one["when"], full=full))
        (modes, accuracy), *rest = cells
        rows.append((one["name"], one["command"] or "", modes, *facts, accuracy))
        rows += [("", "", modes, *[""] * len(facts), accuracy) for modes, accuracy in rest]
    return _table(heads, rows, right=("seeds", "steps", "accuracy"), whole=True)


def show_tables(
    results: Results, facts: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int]
) -> list[Table]:
    """What a results directory holds. `settings`: those that are not the defaults; `sizes`: file -> bytes."""
    accuracy = ", ".join(f"{mode} {_accuracy(facts, mode)}" for mode in facts["accuracy"])
    summary = {
        "directory": results.directory,
        "command": shlex.join(["aggcli", *map(str, results.manifest.get("arguments", []))]),
        "modes": facts["modes"],
        "seeds": facts["seeds"],
        "steps": _steps(facts),
        "status": _status(facts),
        "last written": _when(facts["when"], full=True),
        **({"accuracy": accuracy} if accuracy else {}),
    }
    changed = [(name, _plain(of["value"]), _plain(of["default"])) for name, of in settings.items()]
    return [
        _table(("results", ""), _rows(summary)),
        _table(("setting", "value", "default"), changed or [("every one is the default", "", "")]),
        _table(("environment", ""), _rows(results.environment)),
        _table(("file", "files", "size"), _by_entry(sizes), right=("files", "size")),
        _last_step(results),
    ]


def difference_tables(
    pair: tuple[Results, Results],
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    what: str,
    final: Sequence[Mapping[str, Any]],
) -> Iterator[Table]:
    """How two results directories differ: what `differences` and `final_metrics` found."""
    yield _table(("results", ""), _rows(dict(zip("AB", (results.directory for results in pair), strict=True))))
    for key, title in _DIFFERING.items():
        rows = [(one["name"], _several(one["a"]), _several(one["b"])) for one in groups[key]]
        yield _table((title, "A", "B"), rows or [("nothing differs", "", "")])
    rows = [(_with_unit(one["metric"], pair), one["mode"] or "", _mean_and_n(one["a"]), _mean_and_n(one["b"])) for one in final]
    if rows and all(one["a"] == one["b"] for one in final):
        rows = [("nothing differs", "", "", "")]
    yield _table((what, "mode", "A", "B"), rows, right=("A", "B"))


def _joined(shown: Sequence[str], others: Sequence[str]) -> str:
    return " ".join([", ".join(shown), *others])


# -- cells ----------------------------------------------------------------------------------------------------------


def _steps(facts: Mapping[str, Any]) -> str:
    planned = facts["steps_planned"]
    return str(facts["steps_done"]) if planned is None else f"{facts['steps_done']}/{planned}"


def _status(facts: Mapping[str, Any]) -> str:
    diverged = f", {facts['diverged']} diverged" if facts["diverged"] else ""
    return f"{facts['status'] or 'unknown'}{diverged}"


def _when(text: str, *, full: bool) -> str:
    """In full, or short as `ls` has it: the time of day within this year, else the year."""
    moment = datetime.fromisoformat(text)
    if full:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment:%m-%d %H:%M}" if moment.year == datetime.now().year else f"{moment:%Y-%m-%d}"


def _accuracy(facts: Mapping[str, Any], mode: str) -> str:
    """Four digits, with the number of runs where not all of the seeds were evaluated."""
    found = facts["accuracy"].get(mode)
    if found is None:
        return "-"
    return f"{found['mean']:.4g}" + (f" (n={found['n']})" if found["n"] < len(facts["seeds"]) else "")


def _by_entry(sizes: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """A row for each file or folder that stands in the directory itself: name, number of files, size."""
    found: dict[str, list[int]] = {}
    for path, size in sizes.items():
        first, *rest = Path(path).parts
        found.setdefault(f"{first}/" if rest else first, []).append(size)
    return [(name, str(len(own)), in_bytes(sum(own))) for name, own in found.items()]


def _last_step(results: Results) -> Table:
    """The catalogued numbers of the last recorded step, a column a mode: means over its runs that recorded that step."""
    recorded = [(run, run.last) for run in results.runs if run.last is not None]
    last = max((line["step"] for _, line in recorded), default=None)
    of_mode: dict[str, list[Mapping[str, Any]]] = {}
    for run, line in recorded:
        if line["step"] == last:
            of_mode.setdefault(run.mode, []).append(line)
    heads = [f"{mode}\nmean, n={len(lines)}" if len(lines) > 1 else mode for mode, lines in of_mode.items()]
    rows = []
    for name in dict.fromkeys(name for lines in of_mode.values() for line in lines for name in line):
        try:
            unit = in_length_unit(describe(name).unit, results.length_unit)
        except KeyError:
            continue  # a head field or a text
        label = f"{name} ({unit})" if unit in ("nats", results.length_unit) else name
        rows.append((label, *(_mean([line.get(name) for line in lines]) for lines in of_mode.values())))
    return _table((f"step {last}" if recorded else "no step is recorded", *heads), rows, right=heads)


def _mean(values: Iterable[Any]) -> str:
    """The mean of the numbers that there are; blank where there is none, and says how many where some are missing."""
    listed = list(values)
    numbers = [value for value in listed if isinstance(value, (int, float))]
    if not numbers:
        return ""
    return f"{sum(numbers) / len(numbers):.6g}" + (f" (n={len(numbers)})" if len(numbers) < len(listed) else "")


def _with_unit(metric: str, pair: tuple[Results, Results]) -> str:
    """`response_length (tokens)`; where the two count lengths in different units, both."""
    if metric not in METRICS or METRICS[metric].unit != "tokens":
        return metric
    units = [results.length_unit for results in pair]
    return f"{metric} ({units[0] if units[0] == units[1] else f'A: {units[0]}, B: {units[1]}'})"


def _mean_and_n(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else f"{found['mean']:.6g}" + (f" (n={found['n']})" if found["n"] > 1 else "")


def _several(values: Sequence[Any]) -> str:
    return " | ".join(map(_plain, values)) if values else "not recorded"


def _plain(value: Any) -> str:
    """A setting as text, numbers in full."""
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _plain(value)) for name, value in facts.items()]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = (), *, whole: bool = False) -> Table:
    table = BlockTable(heads, right, padding=(0, 0, 0, 0), whole=whole)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
