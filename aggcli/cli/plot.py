"""`aggcli plot`: figures, and one page to send, from results directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aggcli.cli.options import comma_list
from aggcli.ownership import FIGURES


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
    from aggcli.jobs.plot import plot as draw

    drawn = draw(directories, output, comma_list(formats or ["png"]), step, html=html)
    if json_:
        from aggcli.records import to_json

        typer.echo(to_json(drawn.as_json()))
        return
    for path in (*(path for _, path in drawn.figures), *([drawn.report] if drawn.report else ())):
        typer.echo(str(path))


plot.__doc__ = f"{plot.__doc__}\n\nFigures, each where the records hold what it shows: {', '.join(FIGURES)}."
