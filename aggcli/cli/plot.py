"""`aggcli plot`: figures, and one page to send, from results directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aggcli.cli.options import comma_list, offered
from aggcli.ownership import FIGURE_FORMATS, FIGURES
from aggcli.report.sizes import SIZES


def plot(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="Results directories; their runs are overlaid. Or one of compare --curves."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder for the figures (default: DIR/figures).")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="png|svg|pdf",
            help="Format, or several with commas (default: png).",
            autocompletion=offered(FIGURE_FORMATS, listed=True),
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Step of the figures of one step (default: the last).")
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Also write report.html, one page to send.")] = False,
    size: Annotated[
        str,
        typer.Option(
            "--size",
            metavar="|".join(SIZES),
            help="Size: one column of a paper, both, or a screen.",
            autocompletion=offered(tuple(SIZES)),
        ),
    ] = "screen",
    no_title: Annotated[bool, typer.Option("--no-title", help="No title in the figures, for your own caption.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of paths.")] = False,
) -> None:
    """Draw where the weight of each mode goes, and what every rank and layout made of the loss."""
    from aggcli.jobs.plot import plot as draw

    drawn = draw(directories, output, comma_list(formats or ["png"]), step, html=html, size=size, titles=not no_title)
    if json_:
        from aggcli.records import to_json

        typer.echo(to_json(drawn.as_json()))
        return
    for path in (*(path for _, path in drawn.figures), *([drawn.report] if drawn.report else ())):
        typer.echo(str(path))


plot.__doc__ = f"{plot.__doc__}\n\nFigures, each where the records hold what it shows: {', '.join(FIGURES)}."
