"""The figure of one step's loss under every layout: what each rank adds, and whether the sum moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aggcli.analysis.frames import Frames, numbers, rows, sizes
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, round_robin, runs_left_out
from aggcli.report.style import Look

_MOST_PANELS = 12
_ROUNDING = 1e-12
"""Losses below this share of the total weight are 0 but for rounding."""
_ROW, _GAP = 1.0, 0.5
"""Height of a rank's row, and between layouts; in data units."""


@dataclass(frozen=True)
class _Places:
    """Where layouts and ranks stand on the y axis, top to bottom: (layout, rank) -> y; rank None is the reduced value."""

    at: dict[tuple[str, int | None], float]
    bottom: float


def pg_loss_by_rank(frames: Frames, step: int | None = None) -> Figure:
    """pg_loss of one step, a panel per run: per layout the ranks' shares, end to end, and the reduced value.

    A bar is a rank's share of the step loss (it may be negative, or larger than the sum) and starts where the last one
    ended; the dots are the recorded reduced values, which stand on the line through the first unless the rule varies with
    the layout. A panel's title has the largest difference between two layouts, over the sum of its absolute terms, as the check
    of a run takes it.
    Of many runs, the first of every mode (and of each of its settings) has a panel before the second of any.
    `step`: default: each run's last. Raises `NothingToDraw`.
    """
    looks = {look.label: look for look in style.looks(frames.runs)}
    panels = [(look, *_of_step(frames, label, step)) for label, look in looks.items()]
    panels = [(look, at, layouts, ranks) for look, at, layouts, ranks in panels if _measured(layouts)]
    if not panels:
        raise NothingToDraw("no layout has a pg_loss" + ("" if step is None else f" at step {step}"))
    arm_of = {run.label: run.arm for run in frames.runs}
    arms = [arm_of[look.label] for look, *_ in panels]
    chosen = round_robin(arms, _MOST_PANELS)
    panels = [panels[at] for at in chosen]
    places = _places([ranks for *_, ranks in panels], [layouts for _, _, layouts, _ in panels])
    shown = sorted({at for _, at, _, _ in panels})
    named = [style.folded(look.shown + ("" if len(shown) == 1 else f", step {at}"), 46) for look, at, *_ in panels]
    with style.context():
        lines = 2 + max(text.count("\n") for text in named)
        figure, cells = grid(len(panels), 4.9, min(12.0, 0.8 + 0.15 * lines + 0.19 * places.bottom), columns=2, sharey=True)
        for axes, name, (look, _, layouts, ranks) in zip(cells, named, panels, strict=True):
            _draw_layouts(axes, look, layouts, ranks, places)
            axes.set_title(f"{name}\n{_difference_in_words(layouts)}", color=look.ink, fontsize=9.5)
        for axes in cells[::2]:
            _name_rows(axes, places)
        for axes in cells[-2:]:
            axes.set_xlabel(f"{style.metric_label('pg_loss')}\n{style.metric_over('pg_loss')}")
        when = f"step {shown[0]}" if len(shown) == 1 else "each run's last step"
        count = plural(len({name for name, _ in places.at}), "layout")
        style.title(figure, f"pg_loss under {count}, {when}: the shares of the ranks and their sum")
        style.note(
            figure,
            "bar: a rank's share, from where the previous one ended; marker: the reduced value; line: the first layout's"
            "; difference: over the sum of the absolute terms of pg_loss" + runs_left_out([arms[at] for at in chosen], arms),
        )
    return figure


def largest_difference(layouts: pd.DataFrame) -> float:
    """The largest difference of pg_loss between two layouts of one step, over the sum of its absolute terms.

    0 where nothing differs, infinity where only some layouts have a pg_loss.
    """
    values = numbers(layouts, "pg_loss")
    if np.isnan(values).any():
        return 0.0 if np.isnan(values).all() else float("inf")
    size = sizes(layouts, "pg_loss").max()
    return float((values.max() - values.min()) / size) if size else 0.0


# -- data of a panel ------------------------------------------------------------------------------------------------


def _of_step(frames: Frames, label: str, step: int | None) -> tuple[int, pd.DataFrame, pd.DataFrame]:
    """(step, its layouts, its ranks) of a run."""
    layouts = rows(frames.layouts, run=label)
    at = step if step is not None else max(layouts["step"].tolist(), default=0)
    return at, rows(layouts, step=at), rows(frames.ranks, run=label, step=at)


def _measured(layouts: pd.DataFrame) -> bool:
    return bool(np.isfinite(numbers(layouts, "pg_loss")).any())


def _places(ranks: Sequence[pd.DataFrame], layouts: Sequence[pd.DataFrame]) -> _Places:
    names = dict.fromkeys(name for frame in layouts for name in frame["layout"])
    at: dict[tuple[str, int | None], float] = {}
    y = 0.0
    for name in names:
        own = sorted({int(rank) for frame in ranks for rank in rows(frame, layout=name)["rank"]})
        for rank in (None, *own):
            at[name, rank] = y
            y += _ROW
        y += _GAP
    return _Places(at, y)


def _difference_in_words(layouts: pd.DataFrame) -> str:
    if len(layouts) < 2:
        return "one layout, nothing to compare it with"
    most = largest_difference(layouts)
    return "largest difference between layouts: " + (f"{most:.1e}" if most else "0, to the last bit")


# -- drawing --------------------------------------------------------------------------------------------------------


def _draw_layouts(axes: Axes, look: Look, layouts: pd.DataFrame, ranks: pd.DataFrame, places: _Places) -> None:
    axes.axvline(0, color="0.55", linewidth=1, zorder=1)
    measured = rows(layouts, np.isfinite(numbers(layouts, "pg_loss")))
    first = numbers(measured, "pg_loss")[0]
    axes.axvline(first, linestyle=style.SCOPE_LINES["step"], color=look.colour, linewidth=1.2, zorder=2)
    for name in layouts["layout"]:
        own = rows(ranks, layout=name)
        _draw_ranks(axes, look, own, [places.at[name, rank] for rank in own["rank"]])
    axes.scatter(
        measured["pg_loss"],
        [places.at[name, None] for name in measured["layout"]],
        s=58,
        marker=look.marker,
        facecolors=look.face,
        edgecolors="black",
        linewidths=0.8,
        zorder=5,
        label="reduced",
    )
    axes.use_sticky_edges = False
    axes.margins(x=0.06)
    size = float(sizes(measured, "pg_loss").max())
    drawn = [*numbers(measured, "pg_loss"), *numbers(ranks, "pg_loss")]
    if np.nanmax(np.abs(drawn)) <= _ROUNDING * size:
        axes.set_xlim(-size, size)  # drawn at full height, the rounding of a sum of 0 would look like shares
    axes.set_ylim(places.bottom - _GAP, -0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useOffset=False)


def _draw_ranks(axes: Axes, look: Look, ranks: pd.DataFrame, y: Sequence[float]) -> None:
    """The shares of a layout's ranks as bars that start where the one above ended."""
    shares = numbers(ranks, "pg_loss")
    ends = np.cumsum(np.nan_to_num(shares))
    starts = ends - np.nan_to_num(shares)
    axes.barh(y, shares, left=starts, height=0.66, color=look.colour, alpha=0.35, zorder=3, label="share of a rank")
    axes.vlines(ends[:-1], y[:-1], y[1:], color="0.35", linewidth=0.8, zorder=4)
    for idle, share, at, x in zip(ranks["idle"], shares, y, ends, strict=True):
        if idle or np.isnan(share):
            text = "idle: no samples" if idle else "not recorded"
            axes.annotate(
                text, (x, at), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color="0.3", style="italic"
            )


def _name_rows(axes: Axes, places: _Places) -> None:
    labels = [name if rank is None else f"rank {rank}" for name, rank in places.at]
    axes.set_yticks(list(places.at.values()), labels)
    for tick, (_, rank) in zip(axes.get_yticklabels(), places.at, strict=True):
        tick.set_fontweight("bold" if rank is None else "normal")
        tick.set_color("0.1" if rank is None else "0.4")
        tick.set_fontsize(9.5 if rank is None else 8.5)
