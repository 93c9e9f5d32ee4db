"""How far the layouts of a step are apart in pg_loss, on a log axis, where rounding is seen as rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from aggcli.analysis.frames import Frames, numbers, rows, sizes
from aggcli.analysis.tolerance import tolerance_of
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw
from aggcli.report.style import Look


def layout_deviations(frames: Frames) -> pd.DataFrame:
    """Each layout of each step against the first one recorded: columns run, mode, step, layout, reference and deviation.

    deviation = |a - b| of pg_loss over the sum of its absolute terms, the larger of the two layouts' (no unit); infinity where
    only one of the two has a pg_loss, and no row where neither has. Steps recorded under a single layout have no row.
    """
    layouts = frames.layouts.assign(value=numbers(frames.layouts, "pg_loss"), size=sizes(frames.layouts, "pg_loss"))
    step = layouts.groupby(["run", "step"], sort=False)
    first = pd.DataFrame({name: step[name].transform(lambda part: part.iloc[0]) for name in ("layout", "value", "size")})
    a, b = numbers(layouts, "value"), numbers(first, "value")
    size = np.fmax(numbers(layouts, "size"), numbers(first, "size"))
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = np.where(a == b, 0.0, np.abs(a - b) / size)
    deviation = np.where(np.isnan(a) != np.isnan(b), np.inf, deviation)
    found = layouts[["run", "mode", "step", "layout"]].assign(reference=first["layout"], deviation=deviation)
    other = (found["layout"] != found["reference"]).to_numpy(dtype=bool) & ~(np.isnan(a) & np.isnan(b))
    return rows(found, other)


def layout_deviation(frames: Frames) -> Figure:
    """A dot per run, step and layout that differs from the first layout at all; the others are counted beside the row.

    Raises `NothingToDraw` where no layout differs by more than rounding, or none can.
    """
    found = layout_deviations(frames)
    if not len(found):
        raise NothingToDraw("no step is recorded under two layouts")
    drawn = rows(found, np.isfinite(numbers(found, "deviation")) & (numbers(found, "deviation") > 0))
    if not len(drawn):
        raise NothingToDraw(f"pg_loss is the same to the last bit in all {plural(len(found), 'comparison')} of layouts")
    limits = dict(tolerance_of(run.settings) for run in frames.runs if run.label in set(found["run"]))
    largest = float(numbers(found, "deviation").max())
    if largest <= min(limits.values()):
        rounding = f"differences up to {min(limits.values()):g} are taken for rounding"
        raise NothingToDraw(f"the layouts differ by at most {largest:.1e} of the absolute terms of pg_loss; {rounding}")
    names = list(dict.fromkeys(found["layout"]))
    first = {run.mode: replace(run, label=run.mode) for run in frames.runs if run.mode in set(found["mode"])}
    looks = style.looks(list(first.values()))
    with style.context():
        figure = style.new_figure(8.5, 1.9 + 0.55 * len(names))
        axes = figure.subplots()
        for at, look in enumerate(looks):
            offset = 0.6 * (at + 0.5 - len(looks) / 2) / len(looks)
            _draw_mode(axes, rows(drawn, mode=look.mode), look, names, offset)
        _frame(axes, names, numbers(drawn, "deviation"), limits)
        _count(axes, found, names)
        style.legend_below(figure, axes, note=_left_out(found))
        reference = " or ".join(dict.fromkeys(found["reference"]))
        style.title(figure, f"How far layouts move pg_loss: each against {reference}")
    return figure


def _draw_mode(axes: Axes, own: pd.DataFrame, look: Look, names: list[str], offset: float) -> None:
    axes.scatter(
        own["deviation"],
        [names.index(name) + offset for name in own["layout"]],
        s=30,
        marker=look.marker,
        color=look.colour,
        edgecolors="white",
        linewidths=0.4,
        alpha=0.75,
        zorder=3,
        label=look.shown,
    )


def _frame(axes: Axes, names: list[str], drawn: np.ndarray, limits: Mapping[str, float]) -> None:
    """A log axis, a row a layout, and a line at the limit of each dtype: what lies left of it is taken for rounding."""
    axes.set_xscale("log")
    axes.set_xlim(min(drawn.min() / 3, 1e-17), max(drawn.max() * 3, 30 * max(limits.values())))
    axes.xaxis.set_major_locator(LogLocator(numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for at in sorted(set(limits.values())):
        dtypes = " and ".join(dtype for dtype, limit in limits.items() if limit == at)
        text = f"{dtypes}: rounding up to {at:.0e}"
        axes.axvline(at, color="0.45", linewidth=1, linestyle=":", zorder=1)
        axes.annotate(
            text, (at, 1), (3, 3), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8.5, color="0.35"
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"|a - b| over the sum of the absolute terms of pg_loss, {style.metric_over('pg_loss')}")


def _count(axes: Axes, found: pd.DataFrame, names: list[str]) -> None:
    """Beside each row: how many of its comparisons are equal to the last bit, and so cannot stand on a log axis."""
    for y, name in enumerate(names):
        own = numbers(rows(found, layout=name), "deviation")
        axes.annotate(
            f"{int((own == 0).sum())} of {len(own)}\nequal",
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color="0.3",
            annotation_clip=False,
        )


def _left_out(found: pd.DataFrame) -> str:
    deviation = numbers(found, "deviation")
    zero, missing = int((deviation == 0).sum()), int(np.isinf(deviation).sum())
    texts = [f"a dot: one step of one run; {zero} of {len(deviation)} differences are exactly 0 and have none"]
    if missing:
        texts.append(f"{missing} have no pg_loss under one of the two layouts")
    return "; ".join(texts)
