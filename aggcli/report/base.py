"""What the figures share: panels in a grid, and the reason for a figure that cannot be made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aggcli.analysis.frames import Frames, Run, numbers, rows
from aggcli.errors import RecordError
from aggcli.measurement.words import plural
from aggcli.report import style


class NothingToDraw(RecordError):
    """The records do not hold what a figure shows; the text says what is missing."""


def grid(
    panels: int, width: float, height: float, *, columns: int, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of panels of this size, in inches, filled row by row; the cells that are left over are empty."""
    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    figure = style.new_figure(width * columns, height * rows + 0.5)
    cells = list(figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey).flat)
    for cell in cells[panels:]:
        cell.set_axis_off()
    for above in cells[max(0, panels - columns) : len(cells) - columns]:  # the lowest panel of its column
        above.tick_params(labelbottom=True)
    return figure, cells[:panels]


def measured_runs(frames: Frames, names: Sequence[str]) -> list[Run]:
    """The runs that recorded a number under one of these metrics, in their order."""
    return [
        run
        for run in frames.runs
        if any(np.isfinite(numbers(rows(frames.metrics, run=run.label), name)).any() for name in names)
    ]


def without_data(count: int, what: str) -> str:
    """The note on runs that a figure leaves out; empty where it leaves out none."""
    return f"{plural(count, 'run')} without {what} left out" if count else ""


def first_reason(reasons: Sequence[str]) -> str:
    """The first of these, and how many others there are."""
    return reasons[0] + (f"; {len(reasons) - 1} more not shown" if len(reasons) > 1 else "")


def lone(values: np.ndarray) -> np.ndarray:
    """Positions of points without a measured neighbour, which a line alone would not show."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


def modes_in_words(modes: Sequence[str], labels: Sequence[str]) -> str:
    """`8 modes (settings in brackets)`: how many are drawn; a mode under two settings counts twice, told apart by its label."""
    return plural(len(labels), "mode") + ("" if set(labels) <= set(modes) else " (settings in brackets)")
