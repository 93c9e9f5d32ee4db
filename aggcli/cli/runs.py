"""`aggcli runs`: what results directories hold, how two of them differ, their removal, and the schema of their files.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggcli.analysis.directories import changed_settings, contents_of, read_results, results_under
from aggcli.cli.commands import Group, GroupedCommand
from aggcli.cli.console import out, say
from aggcli.cli.options import JsonOption, offered
from aggcli.errors import RecordError, SettingError, nearest, some
from aggcli.measurement.words import in_bytes, plural
from aggcli.ownership import is_blank, need_own
from aggcli.records import MANIFEST, SCHEMA, read_manifest, to_json

if TYPE_CHECKING:
    from rich.table import Table

runs = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="List, show, compare and remove results directories, and print the schema of their files.",
)
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Results directory of a run or a comparison.")]


@runs.command("list", cls=GroupedCommand)
def list_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to look in, at any depth (default: results).", show_default=False)
    ] = Path("results"),
    json: JsonOption = False,
) -> None:
    """List the results directories under a folder, a line each: modes, seeds, steps done and planned, status, accuracy."""
    if not directory.is_dir():
        raise RecordError(f"{directory}: is not a folder; give one that holds results directories")
    found = [results.facts(_name(results.directory, directory)) for results in results_under(directory, say)]
    if json:
        print(to_json({"schema": SCHEMA, "runs": found}))
        return
    if not found:
        say(f"no results directory under {directory}")
        return
    from aggcli.report.directory_tables import list_table

    _show([list_table(found, full=not out().is_terminal)])


def _name(directory: Path, under: Path) -> str:
    return str(directory.relative_to(under)) if directory != under else directory.resolve().name


@runs.command("show", cls=GroupedCommand)
def show(directory: DirectoryArgument, json: JsonOption = False) -> None:
    """Show a results directory: settings that are not the defaults, environment, status, files, and the last step's numbers."""
    results = read_results(directory)
    facts = results.facts(directory.resolve().name)
    own, foreign = contents_of(directory)
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in own}
    settings = dict(changed_settings(results.settings))
    if foreign:
        say(f"{directory}: also holds {some(foreign, 3)}, which aggcli did not write")
    if json:
        shown = {"arguments": results.manifest.get("arguments"), "settings": settings, "environment": results.environment}
        last = {run.name: run.last for run in results.runs}
        print(to_json({"schema": SCHEMA, **facts, **shown, "files": sizes, "last": last}))
        return
    from aggcli.report.directory_tables import show_tables

    _show(show_tables(results, facts, settings, sizes))


@runs.command("diff", cls=GroupedCommand)
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Results directory of a run or a comparison.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    json: JsonOption = False,
) -> None:
    """Say which settings and what of the environment differ between two results directories, with their final metrics."""
    from aggcli.analysis.directory_differences import differences, final_metrics

    pair = (read_results(first), read_results(second))
    groups = differences(pair)
    what, final = final_metrics(pair)
    if json:
        facts = [results.facts(results.directory.resolve().name) for results in pair]
        print(to_json({"schema": SCHEMA, "a": facts[0], "b": facts[1], **groups, "final": {"what": what, "metrics": final}}))
        return
    from aggcli.report.directory_tables import difference_tables

    _show(difference_tables(pair, groups, what, final))


def _show(tables: Iterable[Table]) -> None:
    """Folded to the terminal; in a pipe a row is a line, however long."""
    for at, table in enumerate(tables):
        console = out()
        if at:
            console.print()
        if not console.is_terminal:
            console.width = max(console.width, console.measure(table, options=console.options.update(width=1_000_000)).maximum)
        console.print(table)


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
        status = None if is_blank(path) else read_manifest(path).get("status")
        running = "; by its manifest it is still running" if status == "running" else ""
        say(f"{path}: {plural(len(files), 'file')}, {in_bytes(size)}{running}")
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
    need_own(path)
    own, foreign = contents_of(path)
    if foreign:
        raise RecordError(f"{given}: also holds {some(foreign, 3)}, which aggcli did not write; move it away first")
    return own


def _comparison_around(directory: Path) -> Path | None:
    """The comparison that a folder is a run of, or holds runs of."""
    for parent in directory.parents:
        if (parent / MANIFEST).is_file():
            try:
                parts = [parent / name for name in read_manifest(parent).get("runs", [])]
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
            last.unlink(missing_ok=True)  # a run that died before it had one
        os.rmdir(folder)


# -- schema ---------------------------------------------------------------------------------------------------------


@runs.command("schema", cls=GroupedCommand)
def schema(
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="md|json",
            help="Markdown (default), or JSON Schema.",
            show_default=False,
            autocompletion=offered(("md", "json")),
        ),
    ] = "md",
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print every field of the files in a results directory: type, unit, what it is over, and meaning."""
    if format not in ("md", "json"):
        raise SettingError(f"--format {format}: must be md or json{nearest(format, ('md', 'json'))}")
    from aggcli.analysis.schema_formats import json_schema, markdown

    print(
        to_json(json_schema(), indent=2) if json or format == "json" else markdown(),
        end="\n" if json or format == "json" else "",
    )
