"""What the figures share: panels in a grid, and the reason for a figure that cannot be made."""

from __future__ import annotations

import math
import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aggcli.errors import RecordError
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


def lone(values: np.ndarray) -> np.ndarray:
    """Positions of points without a measured neighbour, which a line alone would not show."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


def folded(text: str, width: int) -> str:
    """`text` in lines of at most `width` characters."""
    return textwrap.fill(text, width, break_on_hyphens=False)
