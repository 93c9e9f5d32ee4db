"""`aggcli plot`: figures, and one page to send, from results directories."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from aggcli.cli.console import say
from aggcli.cli.options import comma_list
from aggcli.errors import RecordError, SettingError, nearest
from aggcli.files import whole_file
from aggcli.ownership import FIGURE_FORMATS, FIGURES, REPORT, figure_file
from aggcli.records import SCHEMA, refuse_links, to_json


def plot(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Results directories of runs or comparisons; their runs are overlaid."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figures; default: figures/ in the first DIR.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="png|svg|pdf", help="Repeat it or list several with commas; default: png."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the figures that show a single one; default: each run's last.")
    ] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Also write report.html: one page to send, with the verdict, tables and figures.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the written paths.")] = False,
) -> None:
    """Draw where the weight of each mode goes, and what every rank and layout made of the loss."""
    endings = _checked_formats(formats or ["png"])
    folder = output if output is not None else directories[0] / "figures"
    if output is None:
        refuse_links([folder])
    _need_folder(folder, "--output " if output is not None else "")
    os.environ["MPLBACKEND"] = "agg"  # a backend that matplotlib does not know stops its import, needed or not
    from aggcli.analysis.frames import read_frames
    from aggcli.report import style
    from aggcli.report.figures import all_figures
    from aggcli.report.findings import find
    from aggcli.report.page import page

    frames = read_frames(directories)
    findings = find(frames) if html else None
    figures, notes = all_figures(frames, step, findings)
    for note in notes:
        say(note)
    if not figures and not html:
        raise RecordError("nothing to draw: the records hold none of what the figures show")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"--output {folder}: cannot be made ({error.strerror})") from error
    written = [{"name": name, "path": str(folder / figure_file(name, ending))} for name in figures for ending in endings]
    for one in written:
        style.save(figures[one["name"]], Path(one["path"]))
        if not json_:
            typer.echo(one["path"])
    report = folder / REPORT
    if findings is not None:
        _write(report, page(directories, frames, findings, figures, notes))
        if not json_:
            typer.echo(str(report))
    if json_:
        typer.echo(to_json({"schema": SCHEMA, "figures": written, **({"report": str(report)} if html else {})}))


def _write(path: Path, text: str) -> None:
    try:
        with whole_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordError(f"--output {path.parent}: {path.name} cannot be written ({error.strerror})") from error


def _checked_formats(given: Sequence[str]) -> tuple[str, ...]:
    """The formats, without repetitions. Raises `SettingError` for one that cannot be written."""
    endings = tuple(dict.fromkeys(item.lower().removeprefix(".") for item in comma_list(given)))
    for ending in endings:
        if ending not in FIGURE_FORMATS:
            raise SettingError(f"--format {ending}: cannot be written{nearest(ending, FIGURE_FORMATS)}")
    if not endings:
        raise SettingError("--format: names no format; known: pdf, png, svg")
    return endings


def _need_folder(folder: Path, flag: str) -> None:
    """Raises `RecordError` when the folder, or one that it would be made in, is a file."""
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise RecordError(f"{flag}{path}: is a file; the figures need a folder")
            return


plot.__doc__ = f"{plot.__doc__}\n\nFigures, each where the records hold what it shows: {', '.join(FIGURES)}."
