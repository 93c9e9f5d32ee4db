"""The correct-sample statistics of one step: what each rank of each layout has, and what they come to together."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.units import in_length_unit
from aggcli.measurement.catalogue import describe
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, round_robin, runs_left_out
from aggcli.report.rank_rows import Places, frame_rows, name_rows, of_step, places_of
from aggcli.report.style import Look

STATISTICS = {
    "correct/count": "correct samples",
    "correct/response_length": "length of correct samples",
    "correct/entropy": "entropy on correct samples",
}
"""Metric -> what a panel calls it."""
_MOST_ROWS = 8


def correct_by_rank(frames: Frames, step: int | None = None) -> Figure:
    """correct/* of one step: a row and a dot for each rank of each layout, and above them what the ranks come to.

    Runs that have the same numbers (modes on the same rollouts) share a row of panels; else the first run of each mode (and
    of each of its settings) has one, up to `_MOST_ROWS`, and a note counts the other runs and names the modes without one.
    `step`: default: each run's last. Raises `NothingToDraw`.
    """
    shown = [name for name in STATISTICS if np.isfinite(numbers(frames.ranks, name)).any()]
    if not shown:
        raise NothingToDraw("no rank has a correct-sample statistic")
    groups, left_out = _groups(frames, step)
    if not groups:
        raise NothingToDraw("no correct-sample statistic is recorded" + ("" if step is None else f" at step {step}"))
    places = places_of([layouts for *_, layouts, _ in groups], [ranks for *_, ranks in groups])
    with style.context():
        figure, cells = grid(len(groups) * len(shown), 3.6, 1.1 + places.height, columns=len(shown), sharey=True)
        columns = cells[0].get_subplotspec().get_gridspec().ncols  # pyright: ignore[reportOptionalMemberAccess]
        for at, (look, text, layouts, ranks) in enumerate(groups):
            for column, name in enumerate(shown):
                axes = cells[at * len(shown) + column]
                _draw(axes, look, layouts, ranks, name, places)
                unit = in_length_unit(describe(name).unit, frames.length_unit)
                style.label_x(
                    axes, f"{STATISTICS[name]} [{unit}]" if name != "correct/count" else STATISTICS[name], places.longest
                )
                if column == 0 or columns < len(shown):
                    style.heading(axes, text, look.ink if len(groups) > 1 else "0.15", places.longest)
        for axes in cells[::columns]:
            name_rows(axes, places)
        style.title(figure, "What each rank has of the correct samples, and what all ranks have together")
        reading = (
            "dot: a rank; line, with its number: all ranks of the layout together, their sum for counts, else the mean over"
            f" their correct samples{left_out}"
        )
        style.note(figure, reading)
    return figure


_Group = tuple[Look, str, pd.DataFrame, pd.DataFrame]


def _groups(frames: Frames, step: int | None) -> tuple[list[_Group], str]:
    """(look, heading, layouts, ranks) of a row of panels; and the note on the runs without one."""
    found: list[tuple[Look, int, pd.DataFrame, pd.DataFrame]] = []
    for look in style.looks(frames.runs):
        at, layouts, ranks = of_step(frames, look.label, step)
        if np.isfinite(numbers(layouts, "correct/count")).any():
            found.append((look, at, layouts, ranks))
    if not found:
        return [], ""
    if len(found) > 1 and all(_same(layouts, found[0][2]) and _same(ranks, found[0][3]) for *_, layouts, ranks in found):
        look, at, layouts, ranks = found[0]
        return [(look, f"step {at}: the same in all {len(found)} runs", layouts, ranks)], ""
    arm_of = {run.label: run.arm for run in frames.runs}
    arms = [arm_of[look.label] for look, *_ in found]
    chosen = round_robin(arms, min(len(set(arms)), _MOST_ROWS))
    drawn = [(look, f"{look.shown}, step {at}", layouts, ranks) for look, at, layouts, ranks in (found[one] for one in chosen)]
    return drawn, runs_left_out([arms[one] for one in chosen], arms)


def _same(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    if len(one) != len(other) or list(one["layout"]) != list(other["layout"]):
        return False
    return all(np.array_equal(numbers(one, name), numbers(other, name), equal_nan=True) for name in STATISTICS)


def _draw(axes: Axes, look: Look, layouts: pd.DataFrame, ranks: pd.DataFrame, name: str, places: Places) -> None:
    counted = name == "correct/count"
    for layout, together in zip(layouts["layout"], numbers(layouts, name), strict=True):
        own = rows(ranks, layout=layout)
        y = np.array([places.at[layout, int(rank)] for rank in own["rank"]])
        values = numbers(own, name)
        known = np.isfinite(values)
        axes.scatter(values[known], y[known], s=26, marker=look.marker, color=look.colour, edgecolors="0.2", zorder=3)
        for at, idle in zip(y[~known], own["idle"].to_numpy(dtype=bool)[~known], strict=True):
            text = "idle: no samples" if idle else "blank"
            _say(axes, text, (0.99, at), "right", xycoords=("axes fraction", "data"), style="italic")
        if np.isfinite(together):
            top = places.at[layout, None]
            axes.vlines(together, top - 0.4, max([top, *y]) + 0.4, color=look.colour, linewidth=2, alpha=0.7, zorder=2)
            _say(axes, f"{together:.4g}", (together, top), "right", offset=(-4, 0), color="0.1")
    axes.margins(x=0.14)
    frame_rows(axes, places)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=counted, min_n_ticks=1))
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    if counted:
        high = max(1.0, axes.get_xlim()[1])
        axes.set_xlim(-0.03 * high, high)
    elif not np.isfinite([*numbers(layouts, name), *numbers(ranks, name)]).any():
        axes.set_xticks([])


def _say(axes: Axes, text: str, at: tuple[float, float], side: str, **given: object) -> None:
    """A few words at a point, small."""
    own = {"xytext": given.pop("offset", (0, 0)), "color": "0.35", **given}
    axes.annotate(text, at, textcoords="offset points", ha=side, va="center", fontsize="small", **own)  # pyright: ignore[reportArgumentType]
