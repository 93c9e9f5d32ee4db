"""How far the layouts of a step are apart in pg_loss where they differ by more than rounding, on a log axis."""

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
from aggcli.measurement.words import at_most, listed, plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw
from aggcli.report.style import Look

_MOST_NAMES = 4


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
    """A dot per run, step and layout that differs from the first layout by more than rounding; how many others there are, and
    how far apart, is said below.

    Raises `NothingToDraw` where no layout differs by more than rounding, or none can.
    """
    found = layout_deviations(frames)
    if not len(found):
        raise NothingToDraw("no step is recorded under two layouts")
    deviation = numbers(found, "deviation")
    limit_of = {run.label: tolerance_of(run.settings) for run in frames.runs}
    limits = np.array([limit_of[label][1] for label in found["run"]])
    rounding = rows(found, deviation <= limits)
    drawn = rows(found, np.isfinite(deviation) & (deviation > limits))
    if not len(drawn):
        raise NothingToDraw(_nothing_drawn(found, rounding, limit_of))
    names = list(dict.fromkeys(drawn["layout"]))
    first = {run.mode: replace(run, label=run.mode) for run in frames.runs}
    looks = [look for look in style.looks(list(first.values())) if look.mode in set(drawn["mode"])]
    with style.context():
        figure = style.new_figure(8.5, 1.7 + 0.45 * len(names))
        axes = figure.subplots()
        for at, look in enumerate(looks):
            offset = 0.6 * (at + 0.5 - len(looks) / 2) / len(looks)
            _draw_mode(axes, rows(drawn, mode=look.mode), look, names, offset)
        reference = listed(list(dict.fromkeys(drawn["reference"])), "or")
        _frame(axes, names, numbers(drawn, "deviation"), reference)
        style.legend_below(figure, axes, note=_left_out(found, rounding, limit_of))
        largest = f"{100 * at_most(numbers(drawn, 'deviation').max(), 2):g} % of its absolute terms"
        modes = [look.mode for look in looks]
        told = [*modes[:_MOST_NAMES], *([f"{len(modes) - _MOST_NAMES} others"] if len(modes) > _MOST_NAMES else [])]
        style.title(figure, f"Against {reference}, other layouts change the loss under {listed(told)} by up to {largest}")
    return figure


def _draw_mode(axes: Axes, own: pd.DataFrame, look: Look, names: list[str], offset: float) -> None:
    axes.scatter(
        own["deviation"],
        [names.index(name) + offset for name in own["layout"]],
        s=34,
        marker=look.marker,
        color=look.colour,
        edgecolors="white",
        linewidths=0.4,
        alpha=0.75,
        zorder=3,
        label=look.shown,
    )


def _frame(axes: Axes, names: list[str], drawn: np.ndarray, reference: str) -> None:
    """A log axis, and a row a layout."""
    axes.set_xscale("log")
    axes.set_xlim(drawn.min() / 3, drawn.max() * 3)
    axes.xaxis.set_major_locator(LogLocator(numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    style.label_x(axes, f"difference from the loss under {reference}, over its absolute terms")


def _nothing_drawn(found: pd.DataFrame, rounding: pd.DataFrame, limit_of: Mapping[str, tuple[str, float]]) -> str:
    missing, compared = len(found) - len(rounding), f"{plural(len(found), 'comparison')} of layouts"
    without = f"{missing} of {compared} {'has' if missing == 1 else 'have'} no loss under one of the two"
    if not len(rounding):
        return without
    if numbers(rounding, "deviation").any():
        said = f"the {_rounding_in_words(rounding, limit_of)}"
        return f"{said}; {without}" if missing else said
    some = f"{len(rounding)} of {compared}; {without}" if missing else f"all {compared}"
    return f"pg_loss is the same to the last bit in {some}"


def _left_out(found: pd.DataFrame, rounding: pd.DataFrame, limit_of: Mapping[str, tuple[str, float]]) -> str:
    missing = int(np.isinf(numbers(found, "deviation")).sum())
    texts = ["a dot: one step of one run"]
    if len(rounding):
        texts.append(
            f"not drawn: {len(rounding)} of {plural(len(found), 'difference')}; these {_rounding_in_words(rounding, limit_of)}"
        )
    if missing:
        texts.append(f"{plural(missing, 'has', 'have')} no loss under one of the two layouts")
    return "; ".join(texts)


def _rounding_in_words(rounding: pd.DataFrame, limit_of: Mapping[str, tuple[str, float]]) -> str:
    """`layouts differ by at most 1.0e-16 of ...; differences up to 1e-09 are taken for rounding in float64`."""
    most = float(numbers(rounding, "deviation").max())
    if most == 0:
        return "layouts have the same loss, to the last bit"
    limits = dict(limit_of[label] for label in rounding["run"])
    taken = listed([f"up to {limit:g} in {dtype}" for dtype, limit in limits.items()])
    return (
        f"layouts differ by at most {at_most(most, 2):.1e} of the absolute terms of pg_loss, and {taken} is taken for rounding"
    )
