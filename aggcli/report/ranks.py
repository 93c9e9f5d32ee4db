"""The figure of one step's loss under every layout: what each rank adds, and that the sum does not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aggcli.analysis.frames import Frames
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, plural
from aggcli.report.style import Look

_ROW, _GAP = 1.0, 0.5
"""Height of a rank's row, and between layouts; in data units."""


@dataclass(frozen=True)
class _Rows:
    """Where layouts and ranks stand on the y axis, top to bottom: (layout, rank) -> y; rank None is the reduced value."""

    at: dict[tuple[str, int | None], float]
    bottom: float


def pg_loss_by_rank(frames: Frames, step: int | None = None) -> Figure:
    """pg_loss of one step, a panel per run: per layout the ranks' shares, end to end, and the reduced value.

    A bar is a rank's share of the step loss (it may be negative, or larger than the sum) and starts where the last one
    ended; the dots are the recorded reduced values, which must stand on the line through the first. A panel's title has the largest
    difference between two layouts, relative to max(|pg_loss|, total_weight), as the check of a run takes it.
    `step`: default: each run's last. Raises `NothingToDraw`.
    """
    looks = {look.label: look for look in style.looks(frames.runs)}
    panels = [(look, *_of_step(frames, label, step)) for label, look in looks.items()]
    panels = [(look, at, layouts, ranks) for look, at, layouts, ranks in panels if _measured(layouts)]
    if not panels:
        raise NothingToDraw("no layout has a pg_loss" + ("" if step is None else f" at step {step}"))
    rows = _rows([ranks for *_, ranks in panels], [layouts for _, _, layouts, _ in panels])
    shown = sorted({at for _, at, _, _ in panels})
    with style.context():
        figure, cells = grid(len(panels), 4.9, min(12.0, 1.1 + 0.19 * rows.bottom), columns=2, sharey=True)
        for axes, (look, at, layouts, ranks) in zip(cells, panels, strict=True):
            _draw_layouts(axes, look, layouts, ranks, rows)
            where = "" if len(shown) == 1 else f", step {at}"
            axes.set_title(f"{look.label}{where}: {_difference_in_words(layouts)}", color=look.colour)
        _name_rows(cells[0], rows)
        for axes in cells[-2:]:
            axes.set_xlabel(style.metric_label("pg_loss"))
        when = f"step {shown[0]}" if len(shown) == 1 else "each run's last step"
        style.title(
            figure, f"pg_loss under {plural(layouts_in(rows), 'layout')}, {when}: the shares of the ranks and their sum"
        )
        style.note(
            figure,
            "bar: a rank's share, from where the previous one ended; marker: the reduced value; line: the first layout's",
        )
    return figure


def largest_difference(layouts: pd.DataFrame) -> float:
    """The largest |a - b| / max(|a|, |b|, total_weight) of pg_loss between two layouts of one step.

    0 where nothing differs, infinity where only some layouts have a pg_loss. On-policy the loss cancels to about 0, so the
    total weight keeps rounding from looking like a difference.
    """
    values = layouts["pg_loss"].to_numpy(dtype=float)
    if np.isnan(values).any():
        return 0.0 if np.isnan(values).all() else float("inf")
    weight = layouts["total_weight"].max() if "total_weight" in layouts else 0.0
    size = max(np.abs(values).max(), 0.0 if np.isnan(weight) else weight)
    return float((values.max() - values.min()) / size) if size else 0.0


# -- data of a panel ------------------------------------------------------------------------------------------------


def _of_step(frames: Frames, label: str, step: int | None) -> tuple[int | None, pd.DataFrame, pd.DataFrame]:
    """(step, its layouts, its ranks) of a run."""
    layouts = frames.layouts[frames.layouts["run"] == label]
    at = step if step is not None else layouts["step"].max() if len(layouts) else None
    ranks = frames.ranks[(frames.ranks["run"] == label) & (frames.ranks["step"] == at)]
    return at, layouts[layouts["step"] == at], ranks


def _measured(layouts: pd.DataFrame) -> bool:
    return bool(len(layouts)) and "pg_loss" in layouts and bool(layouts["pg_loss"].notna().any())


def _rows(ranks: Sequence[pd.DataFrame], layouts: Sequence[pd.DataFrame]) -> _Rows:
    names = dict.fromkeys(name for frame in layouts for name in frame["layout"])
    at: dict[tuple[str, int | None], float] = {}
    y = 0.0
    for name in names:
        own = sorted({rank for frame in ranks for rank in frame.loc[frame["layout"] == name, "rank"]})
        for rank in (None, *own):
            at[name, rank] = y
            y += _ROW
        y += _GAP
    return _Rows(at, y)


def layouts_in(rows: _Rows) -> int:
    """Number of layouts."""
    return sum(rank is None for _, rank in rows.at)


def _difference_in_words(layouts: pd.DataFrame) -> str:
    if len(layouts) < 2:
        return "one layout,\nnothing to compare it with"
    most = largest_difference(layouts)
    if most == 0:
        return "layouts agree\nto the last bit"
    return f"layouts differ by\nat most {most:.1e} (relative)"


# -- drawing --------------------------------------------------------------------------------------------------------


def _draw_layouts(axes: Axes, look: Look, layouts: pd.DataFrame, ranks: pd.DataFrame, rows: _Rows) -> None:
    axes.axvline(0, color="0.55", linewidth=1, zorder=1)
    first = layouts["pg_loss"].dropna().iloc[0]
    axes.axvline(first, linestyle=style.SCOPE_LINES["step"], color=look.colour, linewidth=1.2, zorder=2)
    for name in layouts["layout"]:
        own = ranks[ranks["layout"] == name].sort_values("rank")
        _draw_ranks(axes, look, own, [rows.at[name, rank] for rank in own["rank"]])
    measured = layouts[layouts["pg_loss"].notna()]
    axes.scatter(
        measured["pg_loss"],
        [rows.at[name, None] for name in measured["layout"]],
        s=58,
        marker=look.marker,
        facecolors=look.face,
        edgecolors="black",
        linewidths=0.8,
        zorder=5,
        label="reduced",
    )
    axes.set_ylim(rows.bottom - _GAP, -0.8)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useOffset=False)


def _draw_ranks(axes: Axes, look: Look, ranks: pd.DataFrame, y: Sequence[float]) -> None:
    """The shares of a layout's ranks as bars that start where the one above ended."""
    if "pg_loss" not in ranks or not len(ranks):
        return
    shares = ranks["pg_loss"].to_numpy(dtype=float)
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


def _name_rows(axes: Axes, rows: _Rows) -> None:
    labels = [name if rank is None else f"rank {rank}" for name, rank in rows.at]
    axes.set_yticks(list(rows.at.values()), labels)
    for tick, (_, rank) in zip(axes.get_yticklabels(), rows.at, strict=True):
        tick.set_fontweight("bold" if rank is None else "normal")
        tick.set_color("0.1" if rank is None else "0.4")
        tick.set_fontsize(9.5 if rank is None else 8.5)
    axes.tick_params(axis="y", length=0)
