"""`aggcli runs`: what results directories hold, how two of them differ, their removal, and the schema of their files.

A results directory is read as its manifest and the last line of each of its runs' metrics.jsonl, so that a thousand of them are
listed in seconds. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aggcli.cli.console import out, say
from aggcli.cli.options import GroupedCommand, JsonOption
from aggcli.errors import RecordError, SettingError, nearest, some
from aggcli.measurement.words import plural
from aggcli.records import MANIFEST, METRICS, SCHEMA, contents, read_manifest, to_json

if TYPE_CHECKING:
    from rich.table import Table

    from aggcli.analysis.histories import History

runs = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="List, show, compare and remove results directories, and print the schema of their files.",
)
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Results directory of a run or a comparison.")]
_SHAPES = {
    **dict.fromkeys(("settings", "environment", "evaluation"), dict),
    **dict.fromkeys(("command", "mode", "status", "diverged"), str),
    **dict.fromkeys(("arguments", "runs"), list),
    "seed": int,
}
"""Type of each field of a manifest that is read here."""


@dataclass(frozen=True)
class Run:
    """One run. `name`: its folder in the results directory; `last`: its last recorded line, None where no step is recorded."""

    name: str
    manifest: Mapping[str, Any]
    last: Mapping[str, Any] | None

    @property
    def mode(self) -> str:
        return self.manifest.get("mode", "custom")

    @property
    def seed(self) -> int:
        return self.manifest.get("seed", 0)

    @property
    def steps(self) -> int:
        """Rollout steps that are recorded; in a replay, optimizer steps."""
        return 0 if self.last is None else self.last.get("rollout_step", self.last["step"]) + 1


@dataclass(frozen=True)
class Results:
    """A results directory. `when`: when it was last written to, seconds since 1970."""

    directory: Path
    manifest: Mapping[str, Any]
    runs: tuple[Run, ...]
    when: float

    @property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(run.mode for run in self.runs))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.manifest.get("settings", {})

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, commit, device, threads and ranks, as flat names."""
        found = {**self.manifest.get("environment", {}), "ranks": self.manifest.get("ranks")}
        packages = found.pop("packages", None)
        return {**found, **(packages if isinstance(packages, dict) else {})}

    def facts(self, name: str) -> dict[str, Any]:
        """What `list` says of it. Steps: the fewest that a run which did not diverge has recorded; planned: None in a replay.

        Accuracy: on fresh prompts after training, mean over the mode's runs that were evaluated.
        """
        trains = bool(self.settings.get("train")) or not self.settings.get("rollouts")
        accuracies: dict[str, list[float]] = {}
        for run in self.runs:
            value = run.manifest.get("evaluation", {}).get("accuracy")
            if isinstance(value, (int, float)):
                accuracies.setdefault(run.mode, []).append(value)
        going = [run for run in self.runs if "diverged" not in run.manifest]
        return {
            "name": name,
            "directory": str(self.directory),
            "command": self.manifest.get("command"),
            "modes": self.modes,
            "seeds": self.seeds,
            "steps_done": min(run.steps for run in going or self.runs),
            "steps_planned": self.settings.get("steps") if trains else None,
            "status": self.manifest.get("status"),
            "diverged": len(self.runs) - len(going),
            "when": datetime.fromtimestamp(self.when).astimezone().isoformat(timespec="seconds"),
            "accuracy": {mode: {"mean": sum(found) / len(found), "n": len(found)} for mode, found in accuracies.items()},
        }


# -- list -----------------------------------------------------------------------------------------------------------


@runs.command("list", cls=GroupedCommand)
def list_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to look in, at any depth.")] = Path("results"),
    json: JsonOption = False,
) -> None:
    """List the results directories under a folder, a line each: modes, seeds, steps done and planned, status, accuracy."""
    if not directory.is_dir():
        raise RecordError(f"{directory}: is not a folder; give one that holds results directories")
    found = [results.facts(_name(results.directory, directory)) for results in _results_under(directory)]
    if json:
        print(to_json({"schema": SCHEMA, "runs": found}))
        return
    if not found:
        say(f"no results directory under {directory}")
        return
    full = not out().is_terminal
    between = ", " if full else "\n"
    heads = ("name", "command", "modes", "seeds", "steps", "status", "when", "accuracy")
    rows = [
        (
            one["name"],
            one["command"] or "",
            between.join(one["modes"]),
            str(len(one["seeds"])),
            _steps(one),
            _status(one),
            _when(one["when"], full=full),
            between.join(_accuracy(one, mode) for mode in one["modes"]) if one["accuracy"] else "",
        )
        for one in found
    ]
    _show(_table(heads, rows, right=("seeds", "steps", "accuracy")))


def _results_under(directory: Path) -> Iterator[Results]:
    """Every results directory at or under a folder, sorted by path; links are not followed, and what cannot be read is said."""
    for folder, folders, files in os.walk(directory, onerror=lambda error: say(f"{error.filename}: {error.strerror}; skipped")):
        folders.sort()
        if MANIFEST in files:
            try:
                found = _read(Path(folder))
            except RecordError as error:
                say(f"{error}; skipped")
                continue
            folders.clear()
            yield found


def _name(directory: Path, under: Path) -> str:
    return str(directory.relative_to(under)) if directory != under else directory.resolve().name


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


# -- show -----------------------------------------------------------------------------------------------------------


@runs.command("show", cls=GroupedCommand)
def show(directory: DirectoryArgument, json: JsonOption = False) -> None:
    """Show a results directory: settings that are not the defaults, environment, status, files, and the last step's numbers."""
    results = _read(directory)
    facts = results.facts(directory.resolve().name)
    own, foreign = _contents(directory)
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in own}
    settings = dict(_not_default(results.settings))
    if foreign:
        say(f"{directory}: also holds {some(foreign, 3)}, which aggcli did not write")
    if json:
        shown = {"arguments": results.manifest.get("arguments"), "settings": settings, "environment": results.environment}
        last = {run.name: run.last for run in results.runs}
        print(to_json({"schema": SCHEMA, **facts, **shown, "files": sizes, "last": last}))
        return
    accuracy = ", ".join(f"{mode} {_accuracy(facts, mode)}" for mode in facts["accuracy"])
    summary = {
        "directory": directory,
        "command": shlex.join(["aggcli", *map(str, results.manifest.get("arguments", []))]),
        "modes": facts["modes"],
        "seeds": facts["seeds"],
        "steps": _steps(facts),
        "status": _status(facts),
        "last written": _when(facts["when"], full=True),
        **({"accuracy": accuracy} if accuracy else {}),
    }
    changed = [(name, _plain(of["value"]), _plain(of["default"])) for name, of in settings.items()]
    _show(_table(("results", ""), _rows(summary)))
    _show(_table(("setting", "value", "default"), changed or [("every one is the default", "", "")]))
    _show(_table(("environment", ""), _rows(results.environment)))
    _show(_table(("file", "files", "size"), _by_entry(sizes), right=("files", "size")))
    _show(_last_step(results))


def _not_default(settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each recorded setting that is not the default, with both; one that this version does not know has no default."""
    from aggcli.config import RunConfig, to_flat

    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in to_flat(RunConfig()).items()}
    for name, value in settings.items():
        if name not in defaults or value != defaults[name]:
            yield name, {"value": value, "default": defaults.get(name)}


def _by_entry(sizes: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """A row for each file or folder that stands in the directory itself: name, number of files, size."""
    found: dict[str, list[int]] = {}
    for path, size in sizes.items():
        first, *rest = Path(path).parts
        found.setdefault(f"{first}/" if rest else first, []).append(size)
    return [(name, str(len(own)), _size(sum(own))) for name, own in found.items()]


def _size(count: int) -> str:
    """Bytes as text, in powers of 1000: `999 B`, `1.2 MB`."""
    if count < 1000:
        return f"{count} B"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"


def _last_step(results: Results) -> Table:
    """The catalogued numbers of the last recorded step, a column a mode: means over its runs that recorded that step."""
    from aggcli.measurement.catalogue import describe

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
            unit = describe(name).unit
        except KeyError:
            continue  # a head field or a text
        label = f"{name} ({unit})" if unit in ("tokens", "nats") else name
        rows.append((label, *(_mean([line.get(name) for line in lines]) for lines in of_mode.values())))
    return _table((f"step {last}" if recorded else "no step is recorded", *heads), rows, right=heads)


def _mean(values: Iterable[Any]) -> str:
    """The mean of the numbers that there are; blank where there is none, and says how many where some are missing."""
    listed = list(values)
    numbers = [value for value in listed if isinstance(value, (int, float))]
    if not numbers:
        return ""
    return f"{sum(numbers) / len(numbers):.6g}" + (f" (n={len(numbers)})" if len(numbers) < len(listed) else "")


# -- diff -----------------------------------------------------------------------------------------------------------


@runs.command("diff", cls=GroupedCommand)
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Results directory of a run or a comparison.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    json: JsonOption = False,
) -> None:
    """Say which settings and what of the environment differ between two results directories, with their final figures."""
    pair = (_read(first), _read(second))
    groups = _differences(pair)
    what, figures = _figures(pair)
    if json:
        facts = [results.facts(results.directory.resolve().name) for results in pair]
        final = {"what": what, "figures": figures}
        print(to_json({"schema": SCHEMA, "a": facts[0], "b": facts[1], **groups, "final": final}))
        return
    titles = {
        "settings": "settings that the numbers depend on",
        "environment": "environment",
        "records": "which runs they are, and what is recorded",
    }
    _show(_table(("results", ""), _rows({"A": first, "B": second})))
    for key, title in titles.items():
        rows = [(one["name"], _several(one["a"]), _several(one["b"])) for one in groups[key]]
        _show(_table((title, "A", "B"), rows or [("nothing differs", "", "")]))
    rows = [(one["figure"], one["mode"] or "", _figure(one["a"]), _figure(one["b"])) for one in figures]
    _show(_table((what, "mode", "A", "B"), rows, right=("A", "B")))


def _differences(pair: tuple[Results, Results]) -> dict[str, list[dict[str, Any]]]:
    """What differs, by what it is: name -> the distinct values of each side's runs, none where it is not recorded.

    `settings`: those that the runs' numbers depend on (see `effective_settings`), with what the runs made of them;
    `records`: the others.
    """
    from aggcli.analysis.settings import effective_settings

    effective = [[effective_settings(_history(results, run)) for run in results.runs] for results in pair]
    known = set().union(*(own for side in effective for own in side))
    told = {"loss_aggregation", "calculate_per_token_loss", "modes", "seed", "seeds"}  # by the modes and seeds of the runs
    others = [{name: v for name, v in results.settings.items() if name not in known | told} for results in pair]
    heads = [{"command": r.manifest.get("command"), "modes": r.modes, "seeds": r.seeds} for r in pair]
    return {
        "settings": [one for one in _differing(*effective) if _is_read(one, pair)],
        "environment": list(_differing(*([results.environment] for results in pair))),
        "records": list(_differing(*([head | other] for head, other in zip(heads, others, strict=True)))),
    }


def _is_read(one: Mapping[str, Any], pair: tuple[Results, Results]) -> bool:
    """Whether both sides have runs of a mode that reads the setting; where one has none, the modes differ, not the setting."""
    return all(one[side] or one["name"] not in results.settings for side, results in zip("ab", pair, strict=True))


def _differing(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys(name for side in (a, b) for own in side for name in own):
        values: list[list[Any]] = [[], []]
        for at, side in enumerate((a, b)):
            for own in side:
                if name in own and own[name] not in values[at]:
                    values[at].append(own[name])
        if values[0] != values[1]:
            yield {"name": name, "a": values[0], "b": values[1]}


def _history(results: Results, run: Run) -> History:
    """The run without its steps, and with the divisor and the response limit that it made of its settings."""
    import numpy as np

    from aggcli.analysis.histories import History

    manifest, none = run.manifest, np.empty(0)
    limit = manifest.get("response_limit", manifest.get("max_response_length"))
    made = {"loss_aggregation_divisor": manifest.get("divisor"), "max_response_length": limit}
    settings = manifest.get("settings", {}) | {name: value for name, value in made.items() if value is not None}
    return History(
        directory=results.directory / run.name,
        mode=run.mode,
        seed=run.seed,
        status=manifest.get("status", ""),
        settings=settings,
        provenance={},
        steps=none.astype(np.int64),
        tokens=none,
        seconds=none,
        measures={},
    )


def _figures(pair: tuple[Results, Results]) -> tuple[str, list[dict[str, Any]]]:
    """What the final figures are, and each of them side by side: mean over seeds, and n.

    Figures on fresh prompts where both were evaluated, else the numbers of each run's last recorded step. Two results of one
    mode each stand on one line whatever the modes are.
    """
    from aggcli.analysis.comparison import FIGURES, final_summary, last_step_summary

    evaluated = all(any(run.manifest.get("evaluation") for run in results.runs) for results in pair)
    found = []
    for results in pair:
        names = [(run.name, run.mode, run.seed) for run in results.runs]
        of_run = {run.name: _numbers(run.manifest["evaluation"]) for run in results.runs if run.manifest.get("evaluation")}
        filled = {name: {figure: own.get(figure) for figure in FIGURES} for name, own in of_run.items()}
        lines = {run.name: _numbers(run.last) for run in results.runs if run.last is not None}
        found.append((final_summary(names, filled) if evaluated else last_step_summary(names, lines))["modes"])
    if len(found[0]) == len(found[1]) == 1:
        found = [{None: figures} for side in found for figures in side.values()]
    rows = []
    for mode in dict.fromkeys([*found[0], *found[1]]):
        sides = [side.get(mode, {}) for side in found]
        for figure in dict.fromkeys([*sides[0], *sides[1]]):
            a, b = ({key: own[key] for key in ("mean", "n")} if (own := side.get(figure)) else None for side in sides)
            if a or b:
                rows.append({"mode": mode, "figure": figure, "a": a, "b": b})
    return "after training, on fresh prompts" if evaluated else "last recorded step", rows


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _figure(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else f"{found['mean']:.6g}" + (f" (n={found['n']})" if found["n"] > 1 else "")


def _several(values: Sequence[Any]) -> str:
    return " | ".join(map(_plain, values)) if values else "not recorded"


# -- rm -------------------------------------------------------------------------------------------------------------


@runs.command("rm", cls=GroupedCommand)
def rm(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR", help="Results directories to remove.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove results directories, after asking. One that holds anything aggcli did not write is refused, and so is a link."""
    found = {path: _removable(path, given) for given in directories for path in [Path(os.path.abspath(given))]}
    for path, files in found.items():
        size = sum(file.stat().st_size for file in files)
        running = "; by its manifest it is still running" if read_manifest(path).get("status") == "running" else ""
        say(f"{path}: {plural(len(files), 'file')}, {_size(size)}{running}")
    if not yes:
        if not sys.stdin.isatty():
            raise SettingError("runs rm: there is no terminal to ask on; give --yes to remove without a question")
        what = f"{len(found)} results directories" if len(found) > 1 else f"{some(found)}"
        if not typer.confirm(f"Remove {what}?", err=True):
            say("nothing was removed")
            return
    for path, files in found.items():
        _remove(path, files)
        say(f"removed {path}")


def _removable(path: Path, given: Path) -> list[Path]:
    """The files of a results directory that may be removed as a whole. Raises `RecordError`."""
    if path.is_symlink():
        raise RecordError(f"{given}: is a link, which is not followed; give the results directory itself")
    whole = _comparison_around(path.parent.resolve() / path.name)
    if whole is not None:
        raise RecordError(f"{given}: belongs to the comparison {whole} and cannot be removed on its own; remove the whole")
    _manifest(path)
    own, foreign = _contents(path)
    if foreign:
        raise RecordError(f"{given}: also holds {some(foreign, 3)}, which aggcli did not write; move it away first")
    return own


def _comparison_around(directory: Path) -> Path | None:
    """The comparison that a folder is a run of, or holds runs of."""
    for parent in directory.parents:
        if (parent / MANIFEST).is_file():
            try:
                parts = [parent / name for name in _manifest(parent).get("runs", [])]
            except RecordError:
                continue
            if any(directory == part or directory in part.parents for part in parts):
                return parent
    return None


def _remove(directory: Path, files: Sequence[Path]) -> None:
    """Remove exactly these files, and the folders that are empty then; the manifest last, so that what is left can be named."""
    last = directory / MANIFEST
    for file in files:
        if file != last:
            file.unlink()
    for folder, _, _ in os.walk(directory, topdown=False):
        if Path(folder) == directory:
            last.unlink()
        os.rmdir(folder)


# -- schema ---------------------------------------------------------------------------------------------------------


@runs.command("schema", cls=GroupedCommand)
def schema(
    format: Annotated[str, typer.Option("--format", metavar="md|json", help="Markdown, or JSON Schema.")] = "md",
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print every field of the files in a results directory: type, unit, what it is over, and meaning."""
    if format not in ("md", "json"):
        raise SettingError(f"--format {format}: must be md or json{nearest(format, ('md', 'json'))}")
    from aggcli.report.schema import json_schema, markdown

    print(
        to_json(json_schema(), indent=2) if json or format == "json" else markdown(),
        end="\n" if json or format == "json" else "",
    )


# -- reading --------------------------------------------------------------------------------------------------------


def _read(directory: Path) -> Results:
    """A results directory and its runs. Raises `RecordError` for one that cannot be read."""
    manifest = _manifest(directory)
    names = manifest.get("runs", ["."])
    places = [directory / name for name in names]
    found = [
        Run(name, manifest if name == "." else _manifest(place), _last_line(place / METRICS))
        for name, place in zip(names, places, strict=True)
    ]
    written = [
        path.stat().st_mtime for place in (directory, *places) for path in (place / MANIFEST, place / METRICS) if path.exists()
    ]
    return Results(directory, manifest, tuple(found), max(written))


def _manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a results directory, with fields of the types that are read here. Raises `RecordError`."""
    manifest = read_manifest(directory)
    for name, kind in _SHAPES.items():
        if name in manifest and not isinstance(manifest[name], kind):
            raise RecordError(f"{directory}: {name} in its {MANIFEST} is not of type {kind.__name__}")
    named = manifest.get("runs", ["."])
    if not named or not all(isinstance(name, str) for name in named):
        raise RecordError(f"{directory}: runs in its {MANIFEST} is not a list of folders")
    return manifest


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a record file, read from its end; None when there is none. Raises `RecordError`."""
    try:
        with path.open("rb") as file:
            size, reach, line = file.seek(0, os.SEEK_END), 1 << 14, b""
            while size:
                start = max(0, size - reach)
                file.seek(start)
                tail = file.read(size - start)
                whole = tail[: tail.rfind(b"\n") + 1]  # a killed writer leaves half a line
                at = whole.rfind(b"\n", 0, -1)
                if at >= 0 or start == 0:
                    line = whole[at + 1 :]
                    break
                reach *= 4
        found = json.loads(line) if line.strip() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read ({error})") from error
    if found is not None and not (
        isinstance(found, dict) and all(isinstance(found.get(k, d), int) for k, d in (("step", None), ("rollout_step", 0)))
    ):
        raise RecordError(f"{path}: its last line is not the record of a step")
    return found


def _contents(directory: Path) -> tuple[list[Path], list[Path]]:
    try:
        return contents(directory)
    except OSError as error:
        raise RecordError(f"{directory}: cannot be read ({error.strerror or error})") from error


# -- printing -------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> str:
    """A setting as text, numbers in full."""
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _plain(value)) for name, value in facts.items()]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for head in heads:
        table.add_column(Text(head), justify="right" if head in set(right) else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _show(table: Table) -> None:
    """Folded to the terminal; in a pipe a row is a line, however long."""
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table, options=console.options.update(width=1_000_000)).maximum)
    console.print(table)
