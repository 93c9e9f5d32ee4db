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
from aggcli.analysis.tolerance import tolerance_of
from aggcli.measurement.words import at_most, listed, plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, round_robin, runs_left_out
from aggcli.report.rank_rows import Places, frame_rows, name_rows, of_step, places_of
from aggcli.report.style import Look

_MOST_PANELS = 12
_MOST_NAMES = 4
_ROUNDING = 1e-12
"""Losses below this share of the total weight are 0 but for rounding."""


@dataclass(frozen=True)
class _Panel:
    """One run at one step. `limit`: the relative difference that rounding explains in its dtype."""

    look: Look
    arm: str
    step: int
    layouts: pd.DataFrame
    ranks: pd.DataFrame
    limit: float

    @property
    def apart(self) -> float:
        """The largest difference between two layouts, over the sum of the absolute terms."""
        return largest_difference(self.layouts)


def pg_loss_by_rank(frames: Frames, step: int | None = None) -> Figure:
    """pg_loss of one step, a panel per run: per layout the ranks' shares, end to end, and the reduced value.

    A bar is a rank's share of the step loss (it may be negative, or larger than the sum) and starts where the last one
    ended; the dots are the recorded reduced values, which stand on the line through the first unless the rule varies with
    the layout. A panel's title says whether two layouts differ by more than rounding, over the sum of the absolute terms, as
    the check of a run takes it.
    Of many runs, the first of every mode (and of each of its settings) has a panel before the second of any.
    `step`: default: each run's last. Raises `NothingToDraw`.
    """
    looks = {look.label: look for look in style.looks(frames.runs)}
    found = [
        _Panel(looks[run.label], run.arm, *of_step(frames, run.label, step), tolerance_of(run.settings)[1])
        for run in frames.runs
    ]
    found = [panel for panel in found if np.isfinite(numbers(panel.layouts, "pg_loss")).any()]
    if not found:
        raise NothingToDraw("no layout has a pg_loss" + ("" if step is None else f" at step {step}"))
    arms = [panel.arm for panel in found]
    chosen = round_robin(arms, _MOST_PANELS)
    panels = [found[at] for at in chosen]
    places = places_of([panel.layouts for panel in panels], [panel.ranks for panel in panels])
    shown = sorted({panel.step for panel in panels})
    with style.context():
        figure, cells = grid(len(panels), 4.9, 1.3 + places.height, columns=2, sharey=True)
        for axes, panel in zip(cells, panels, strict=True):
            _draw_layouts(axes, panel, places)
            name = panel.look.shown + ("" if len(shown) == 1 else f", step {panel.step}")
            style.heading(axes, f"{name}\n{_difference_in_words(panel)}", panel.look.ink, places.longest)
        columns = cells[0].get_subplotspec().get_gridspec().ncols  # pyright: ignore[reportOptionalMemberAccess]
        for axes in cells[::columns]:
            name_rows(axes, places)
        for axes in cells[-columns:]:
            style.label_x(axes, "policy-gradient loss, summed over trained tokens by the mode's weights", places.longest)
        style.title(figure, _title(found, f"step {shown[0]}" if len(shown) == 1 else "each run's last step"))
        style.note(
            figure,
            "bar: a rank's share, from where the previous one ended; marker: all ranks together; line: the first layout's"
            + runs_left_out([arms[at] for at in chosen], arms),
        )
    return figure


def _title(found: Sequence[_Panel], when: str) -> str:
    """What these runs show, drawn or not: whether their layouts come to one loss."""
    several = [panel for panel in found if len(panel.layouts) > 1]
    if not several or not all(np.isfinite(panel.apart) for panel in several):
        return f"What each rank adds to the loss ({when})"
    varying = list(dict.fromkeys(panel.look.mode for panel in several if panel.apart > panel.limit))
    if varying:
        more = [f"{len(varying) - _MOST_NAMES} others"] if len(varying) > _MOST_NAMES else []
        return f"The layout changes the loss under {listed([*varying[:_MOST_NAMES], *more])} ({when})"
    return f"In every layout the ranks' shares add up to the same loss ({when})"


def largest_difference(layouts: pd.DataFrame) -> float:
    """The largest difference of pg_loss between two layouts of one step, over the sum of its absolute terms.

    0 where nothing differs, infinity where only some layouts have a pg_loss.
    """
    values = numbers(layouts, "pg_loss")
    if np.isnan(values).any():
        return 0.0 if np.isnan(values).all() else float("inf")
    size = sizes(layouts, "pg_loss").max()
    return float((values.max() - values.min()) / size) if size else 0.0


def _difference_in_words(panel: _Panel) -> str:
    if len(panel.layouts) < 2:
        return "one layout, nothing to compare it with"
    count, most = plural(len(panel.layouts), "layout"), panel.apart
    if most == 0:
        return f"the same in {count}, to the last bit"
    if np.isinf(most):
        return f"{count}, not all of them with a loss"
    if most <= panel.limit:
        return f"the same in {count}, but for rounding ({most:.1e} of the absolute terms)"
    return f"{count}, apart by up to {100 * at_most(most, 2):g} % of the absolute terms"


# -- drawing --------------------------------------------------------------------------------------------------------


def _draw_layouts(axes: Axes, panel: _Panel, places: Places) -> None:
    look, layouts, ranks = panel.look, panel.layouts, panel.ranks
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
        label="all ranks together",
    )
    axes.use_sticky_edges = False
    axes.margins(x=0.06)
    size = float(sizes(measured, "pg_loss").max())
    drawn = [*numbers(measured, "pg_loss"), *numbers(ranks, "pg_loss")]
    if np.nanmax(np.abs(drawn)) <= _ROUNDING * size:
        axes.set_xlim(-size, size)  # drawn at full height, the rounding of a sum of 0 would look like shares
    frame_rows(axes, places)
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
                text, (x, at), (5, 0), textcoords="offset points", va="center", fontsize="small", color="0.3", style="italic"
            )
