"""How the modes' gradients on the same rollouts relate: their size (a learning rate in disguise) and their direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, measured_runs, without_data
from aggcli.report.style import Look

GRADIENTS = {
    "gradient_ratio": ("gradient norm", "times the gradient norm of {}"),
    "gradient_cosine": ("direction", "cosine to the gradient of {}"),
}
"""Metric -> its panel's heading, and what its axis says of the baseline."""
_STEPS_APART = 12
"""Up to this many steps are drawn as dots, side by side per mode; more as lines over the steps."""


def mode_gradients(frames: Frames) -> Figure:
    """gradient_ratio and gradient_cosine of every run and step, a panel each; the line at 1 is the baseline itself.

    Raises `NothingToDraw`.
    """
    shown = [name for name in GRADIENTS if np.isfinite(numbers(frames.metrics, name)).any()]
    if not shown:
        raise NothingToDraw("no gradient_ratio or gradient_cosine is recorded (a comparison of recorded rollouts has them)")
    runs = measured_runs(frames, shown)
    metrics = rows(frames.metrics, frames.metrics["run"].isin([run.label for run in runs]).to_numpy(dtype=bool))
    measured = np.logical_or.reduce([np.isfinite(numbers(metrics, name)) for name in shown])
    steps = sorted(set(rows(metrics, measured)["step"].tolist()))
    looks = style.looks(runs)
    baseline = runs[0].mode
    reading = _reading(baseline, len(steps), len(frames.runs) - len(runs))
    with style.context():
        height = 1.5 + 0.36 * len(looks) if len(steps) <= _STEPS_APART else 3.1
        figure, cells = grid(len(shown), 4.9, height, columns=2)
        for axes, name in zip(cells, shown, strict=True):
            head, label = GRADIENTS[name]
            if len(steps) <= _STEPS_APART:
                named = axes is cells[0] or style.beside(2) == 1
                _draw_rows(axes, metrics, looks, name, label.format(baseline), named=named)
            else:
                _draw_lines(axes, metrics, looks, name, label.format(baseline), steps)
            unrecorded = int((~np.isfinite(numbers(metrics, name))).sum())
            style.heading(axes, f"{head} ({unrecorded} not measured)" if unrecorded else head)
        if len(steps) > _STEPS_APART:
            style.legend_below(figure, cells[0], note=reading)
        else:
            style.note(figure, reading)
        over = f"{plural(len(steps), 'step')} of the same rollouts"
        style.title(figure, f"Each mode's gradient by the log-probabilities, against that of {baseline} ({over})")
    return figure


def _reading(baseline: str, steps: int, hidden: int) -> str:
    dots = "a small dot: one step; large: their mean; " if 1 < steps <= _STEPS_APART else ""
    said = f"{dots}the line at 1: the baseline mode, {baseline}, against itself"
    return "; ".join(filter(None, (said, without_data(hidden, "a measured gradient"))))


def _draw_rows(axes: Axes, metrics: pd.DataFrame, looks: Sequence[Look], name: str, label: str, *, named: bool) -> None:
    """A row a run: its steps as small dots, their mean as a large one, with its number."""
    axes.axvline(1, color="0.55", linewidth=1, zorder=1)
    for y, look in enumerate(looks):
        values = numbers(rows(metrics, run=look.label), name)
        values = values[np.isfinite(values)]
        if not len(values):
            axes.annotate(
                "not measured", (1, y), (5, 0), textcoords="offset points", va="center", fontsize="small", color="0.3"
            )
            continue
        mean = float(values.mean())
        if len(values) > 1:
            axes.scatter(values, np.full(len(values), y), s=20, color=look.colour, alpha=0.5, zorder=3)
        axes.scatter([mean], [y], s=64, marker=look.marker, facecolors=look.face, edgecolors=look.colour, zorder=4)
        axes.annotate(
            f"{mean:.3g}", (mean, y), (0, 8), textcoords="offset points", ha="center", fontsize="small", color="0.15", zorder=5
        )
    axes.set_yticks(range(len(looks)), [style.folded(look.shown, 30) for look in looks] if named else [""] * len(looks))
    axes.set_ylim(len(looks) - 0.4, -0.75)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.1)
    axes.grid(axis="y", visible=False)
    _scale(axes, numbers(metrics, name), name, "x")
    style.label_x(axes, label)


def _draw_lines(axes: Axes, metrics: pd.DataFrame, looks: Sequence[Look], name: str, label: str, steps: Sequence[int]) -> None:
    axes.axhline(1, color="0.55", linewidth=1, zorder=1)
    for look in looks:
        own = rows(metrics, run=look.label).sort_values("step")
        axes.plot(
            own["step"],
            numbers(own, name),
            linestyle=look.dash,
            color=look.colour,
            linewidth=style.LINE,
            marker=look.marker,
            markersize=3,
            label=look.shown,
        )
    style.step_axis(axes, steps)
    _scale(axes, numbers(metrics, name), name, "y")
    axes.set_ylabel(label)


def _scale(axes: Axes, values: np.ndarray, name: str, axis: str) -> None:
    """Ratios start at 0, so that lengths compare; a cosine goes no further than 1."""
    low, high = min(float(np.nanmin(values)), 1.0), max(float(np.nanmax(values)), 1.0)
    margin = 0.08 * max(high - low, 0.02)
    limits = (0.0, high * 1.12) if name == "gradient_ratio" else (low - 1.6 * margin, high + margin)
    (axes.set_xlim if axis == "x" else axes.set_ylim)(*limits)
