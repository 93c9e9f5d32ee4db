"""The correct-sample statistics of one step: what each rank of each layout has, and the reduced value they come to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, round_robin, runs_left_out
from aggcli.report.style import Look

STATISTICS = ("correct/count", "correct/response_length", "correct/entropy")
_MOST_ROWS = 8


def correct_by_rank(frames: Frames, step: int | None = None) -> Figure:
    """correct/* of one step: a dot a rank, sized by its correct samples, and the reduced value as a line per layout.

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
    names = list(dict.fromkeys(name for *_, layouts, _ in groups for name in layouts["layout"]))
    with style.context():
        figure, cells = grid(len(groups) * len(shown), 3.6, 1.3 + 0.38 * len(names), columns=len(shown), sharey=True)
        for at, (look, text, layouts, ranks) in enumerate(groups):
            for column, name in enumerate(shown):
                axes = cells[at * len(shown) + column]
                _draw(axes, look, layouts, ranks, name, names)
                axes.set_xlabel(style.metric_label(name, frames.length_unit))
                over = style.folded(style.metric_over(name), 38)
                heading = style.folded(text, 38)
                axes.set_title(f"{heading}\n{over}" if column == 0 else over, fontsize=9.5)
                axes.title.set_color(look.ink if len(groups) > 1 else "0.15")
        style.title(figure, "Correct samples by rank: what each rank has, and what it comes to")
        reading = (
            "dot: a rank, larger for more correct samples; line: all ranks together, their sum for counts, else their mean"
            f" over samples{left_out}"
        )
        style.note(figure, reading)
    return figure


_Group = tuple[Look, str, pd.DataFrame, pd.DataFrame]


def _groups(frames: Frames, step: int | None) -> tuple[list[_Group], str]:
    """(look, heading, layouts, ranks) of a row of panels; and the note on the runs without one."""
    found: list[tuple[Look, int, pd.DataFrame, pd.DataFrame]] = []
    for look in style.looks(frames.runs):
        layouts = rows(frames.layouts, run=look.label)
        at = step if step is not None else max(layouts["step"].tolist(), default=0)
        layouts = rows(layouts, step=at)
        if np.isfinite(numbers(layouts, "correct/count")).any():
            found.append((look, at, layouts, rows(frames.ranks, run=look.label, step=at)))
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


def _draw(axes: Axes, look: Look, layouts: pd.DataFrame, ranks: pd.DataFrame, name: str, names: Sequence[str]) -> None:
    for layout, reduced in zip(layouts["layout"], numbers(layouts, name), strict=True):
        y = names.index(layout)
        own = rows(ranks, layout=layout)
        values, counts = numbers(own, name), numbers(own, "correct/count")
        known = np.isfinite(values)
        if np.isfinite(reduced):
            axes.vlines(reduced, y - 0.34, y + 0.34, color=look.colour, linewidth=2.2, zorder=4)
        size = np.where(np.isfinite(counts), counts, 0)[known] / max(1.0, float(np.nanmax(counts, initial=1.0)))
        axes.scatter(
            values[known], np.full(known.sum(), y), s=18 + 50 * size, color=look.colour, alpha=0.45, edgecolors="0.2", zorder=3
        )
        blank = int((~known).sum())
        if blank:
            axes.annotate(
                f"{plural(blank, 'rank')} blank",
                (0.99, y),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="center",
                fontsize=8,
                color="0.35",
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    counted = name == "correct/count"
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=counted, min_n_ticks=1))
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    if counted:
        high = max(1.0, axes.get_xlim()[1])
        axes.set_xlim(-0.03 * high, high)
    elif not np.isfinite([*numbers(layouts, name), *numbers(ranks, name)]).any():
        axes.set_xticks([])
