"""What the figures share: panels in a grid, and the reason for a figure that cannot be made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aggcli.analysis.frames import Frames, Run, numbers, rows
from aggcli.errors import RecordError, some
from aggcli.measurement.words import plural
from aggcli.report import style


class NothingToDraw(RecordError):
    """The records do not hold what a figure shows; the text says what is missing."""


def grid(
    panels: int, width: float, height: float, *, columns: int, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of panels of this size, in inches on a screen, filled row by row, as many side by side as the figure has room
    for and no more than fill its rows; the cells that are left over are empty.
    """
    rows = math.ceil(panels / style.beside(columns))
    columns = math.ceil(panels / rows)
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


def is_blank(frame: pd.DataFrame, name: str) -> bool:
    """Whether a number is recorded and null everywhere: it keeps a panel, which says so."""
    return name in frame and len(frame) > 0 and not np.isfinite(numbers(frame, name)).any()


def say_blank(axes: Axes) -> None:
    """In place of a curve that has no number."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, "null in every record", transform=axes.transAxes, ha="center", va="center", color="0.35")


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


def coinciding(drawn: Mapping[str, Sequence[np.ndarray]]) -> dict[str, str]:
    """Label -> the first label that is drawn with the same numbers, to 1e-9; labels like no earlier one are left out."""
    first: dict[str, Sequence[np.ndarray]] = {}
    same: dict[str, str] = {}
    for label, own in drawn.items():
        other = next((other for other, known in first.items() if _equal(own, known)), None)
        if other is None:
            first[label] = own
        else:
            same[label] = other
    return same


def alike(drawn: Mapping[str, Sequence[np.ndarray]]) -> list[list[str]]:
    """The labels, those together that are drawn with the same numbers, to 1e-9; in the order of the first of each."""
    first = coinciding(drawn)
    groups: dict[str, list[str]] = {}
    for label in drawn:
        groups.setdefault(first.get(label, label), []).append(label)
    return list(groups.values())


def _equal(own: Sequence[np.ndarray], known: Sequence[np.ndarray]) -> bool:
    return len(own) == len(known) and all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-9, atol=0, equal_nan=True) for a, b in zip(own, known, strict=True)
    )


def round_robin(groups: Sequence[str], most: int) -> list[int]:
    """Positions of up to `most` members, sorted: the first of every group, then the second of every group, and so on."""
    seen: dict[str, int] = {}
    turns = []
    for group in groups:
        seen[group] = seen.get(group, -1) + 1
        turns.append(seen[group])
    return sorted(sorted(range(len(groups)), key=lambda at: (turns[at], at))[:most])


def runs_left_out(shown: Sequence[str], arms: Sequence[str]) -> str:
    """The note on the runs that `round_robin` left out, given the arms of those shown and of all; empty if all are shown."""
    if len(shown) == len(arms):
        return ""
    missing = [arm for arm in dict.fromkeys(arms) if arm not in shown]
    none = f", and none of {some(missing, 4)}" if missing else ""
    return f"; {len(shown)} of {len(arms)} runs are shown, the first of each mode before the second of any{none}"


def modes_in_words(modes: Sequence[str], labels: Sequence[str]) -> str:
    """`8 modes (settings in brackets)`: how many are drawn; a mode under two settings counts twice, told apart by its label."""
    return plural(len(labels), "mode") + ("" if set(labels) <= set(modes) else " (settings in brackets)")
