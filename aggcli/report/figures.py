"""Every figure of a report, from frames. Functions return figures and never write them; `style.save` does.

A figure whose data were not recorded raises `NothingToDraw` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.measurement.catalogue import LENGTH_BINS, describe
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.accuracy import accuracy_by_tokens
from aggcli.report.base import NothingToDraw, grid, is_blank, lone, measured_runs, say_blank, without_data
from aggcli.report.correct_ranks import correct_by_rank
from aggcli.report.curves import learning_curves
from aggcli.report.findings import Findings, find
from aggcli.report.gradients import mode_gradients
from aggcli.report.layout_deviation import layout_deviation, layout_deviations
from aggcli.report.ranks import pg_loss_by_rank
from aggcli.report.style import Look
from aggcli.report.weights import weight_by_length

STEP_METRICS = ("pg_loss", "pg_clipfrac", "ppo_kl", "raw_reward", "correct/response_length")

_FAMILIES = {
    "response length, in quarters of the maximum response length": (
        [f"length_{bin_}" for bin_ in LENGTH_BINS],
        ["0 to 25 %", "25 to 50 %", "50 to 75 %", "75 to 100 %"],
        style.LENGTH_SHADES,
    ),
    "correctness of the rollout": (["correct", "incorrect"], ["correct", "incorrect"], (style.GOOD, style.BAD)),
    "sign of the advantage": (
        ["positive_advantage", "zero_advantage", "negative_advantage"],
        ["positive", "zero (no signal)", "negative"],
        (style.GOOD, style.NEUTRAL, style.BAD),
    ),
}
"""Title -> names of weight_share/*, their labels and colours, in the order of the bar."""


def all_figures(
    frames: Frames, step: int | None = None, findings: Findings | None = None
) -> tuple[dict[str, Figure], list[str]]:
    """Every figure that the records allow, by name, and why the others are missing.

    `step`: the step of the figures that show a single one; default: each run's last. `findings`: default: found in the records.
    Raises `RecordError` for a step that no run recorded.
    """
    if step is not None:
        frames.need_step(step)
    figures, notes = {}, list(frames.notes)
    for name, make in _makers(frames, step, findings).items():
        try:
            figures[name] = make()
        except NothingToDraw as reason:
            notes.append(f"no figure {name}: {reason}")
    return figures, notes


def _makers(frames: Frames, step: int | None, findings: Findings | None) -> dict[str, Callable[[], Figure]]:
    """The figures of this kind of records, in the order of a report."""
    makers: dict[str, Callable[[], Figure]] = {
        "weight_by_length": lambda: weight_by_length(frames),
        "pg_loss_by_rank": lambda: pg_loss_by_rank(frames, step),
        "weight_shares": lambda: weight_shares(frames),
    }
    if "rollout_step" in frames.metrics:
        found = findings or find(frames)
        if found.trained:
            makers["accuracy_by_tokens"] = lambda: accuracy_by_tokens(found.trained, found.curves.fitted)
        makers["learning_curves"] = lambda: learning_curves(frames, found.compared)
    else:
        makers["modes_over_steps"] = lambda: modes_over_steps(frames)
    if "gradient_cosine" in frames.metrics:
        makers["mode_gradients"] = lambda: mode_gradients(frames)
    if "correct/count" in frames.ranks:
        makers["correct_by_rank"] = lambda: correct_by_rank(frames, step)
    if len(layout_deviations(frames)):
        makers["layout_deviation"] = lambda: layout_deviation(frames)
    return makers


# -- where the weight goes ------------------------------------------------------------------------------------------


def weight_shares(frames: Frames) -> Figure:
    """Per run, the shares of its total weight by length quarter, correctness and sign of the advantage.

    A share is the mean over the steps that recorded it; the figure says how many. Raises `NothingToDraw`.
    """
    families = {
        title: family
        for title, family in _FAMILIES.items()
        if any(np.isfinite(numbers(frames.metrics, f"weight_share/{part}")).any() for part in family[0])
    }
    if not families:
        raise NothingToDraw("no weight_share/* metric is recorded")
    parts = [f"weight_share/{part}" for family in families.values() for part in family[0]]
    runs = measured_runs(frames, parts)
    looks = style.looks(runs)
    with style.context():
        figure = style.new_figure(8.5, len(families) * (0.85 + 0.34 * len(looks)) + 0.9)
        cells = figure.subplots(len(families), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (title, family) in zip(cells, families.items(), strict=True):
            _draw_shares(axes, frames.metrics, looks, *family)
            axes.set_title(f"by {title}")
        cells[-1].set_xlabel("share of the mode's total weight [%], mean over the n steps that recorded it")
        style.note(figure, without_data(len(frames.runs) - len(runs), "weight_share/*"))
        style.title(figure, "Where each mode puts its weight")
    return figure


def _draw_shares(
    axes: Axes, metrics: pd.DataFrame, looks: Sequence[Look], parts: list[str], labels: list[str], colours: Sequence[str]
) -> None:
    own = [rows(metrics, run=look.label) for look in looks]
    steps = [max(np.isfinite(numbers(run, f"weight_share/{part}")).sum() for part in parts) for run in own]
    ends = np.zeros(len(looks))
    for part, label, colour in zip(parts, labels, colours, strict=True):
        shares = np.array([_mean(numbers(run, f"weight_share/{part}")) for run in own]) * 100
        axes.barh(range(len(looks)), shares, left=ends, height=0.72, color=colour, edgecolor="white", label=label)
        for y, (start, share) in enumerate(zip(ends, shares, strict=True)):
            if share >= 5:
                axes.text(start + share / 2, y, f"{share:.0f}", ha="center", va="center", color=_ink_on(colour), fontsize=9)
        ends = ends + np.nan_to_num(shares)
    axes.set_yticks(
        range(len(looks)), [f"{style.folded(look.shown, 30)}  (n = {n})" for look, n in zip(looks, steps, strict=True)]
    )
    for tick, look in zip(axes.get_yticklabels(), looks, strict=True):
        tick.set_color(look.ink)
    axes.invert_yaxis()
    axes.set_xlim(0, max(100.0, float(ends.max())))
    axes.grid(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


def _mean(values: np.ndarray) -> float:
    """The mean of what was measured; NaN where nothing was."""
    known = values[np.isfinite(values)]
    return float(known.sum() / len(known)) if len(known) else float("nan")


def _ink_on(colour: str) -> str:
    """White on dark colours, near-black on light ones."""
    return "white" if float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114))) < 0.52 else "0.1"


# -- step by step ---------------------------------------------------------------------------------------------------


def modes_over_steps(frames: Frames) -> Figure:
    """`STEP_METRICS` against the optimizer step, a line per run; what was not measured is a gap.

    Lines that coincide stay visible, since earlier runs are drawn wider. Raises `NothingToDraw` below two steps.
    """
    steps = frames.steps
    names = [name for name in STEP_METRICS if name in frames.metrics]
    blank = [name for name in names if is_blank(frames.metrics, name)]
    if len(steps) < 2:
        raise NothingToDraw(f"only step {steps[0]} is recorded, and a curve needs two")
    if len(blank) == len(names):
        raise NothingToDraw(f"none of {', '.join(STEP_METRICS)} is recorded")
    looks = style.looks(frames.runs)
    with style.context():
        figure, cells = grid(len(names), 4.8, 2.9, columns=2)
        for axes, name in zip(cells, names, strict=True):
            same = _draw_metric(axes, frames.metrics, looks, name, steps)
            about = style.folded(describe(name).about.split(";")[0], 64)
            over = style.metric_over(name) + (f"; the same in all {len(looks)} runs" if same and name not in blank else "")
            axes.set_title(f"{about}\n{over}", fontsize=9.5)
            axes.set_ylabel(style.metric_label(name, frames.length_unit))
            style.step_axis(axes, steps)
            if name in blank:
                say_blank(axes)
        style.legend_below(figure, cells[0])
        style.title(figure, f"Step by step: {plural(len(looks), 'run')}, steps {steps[0]} to {steps[-1]}")
    return figure


def _draw_metric(axes: Axes, metrics: pd.DataFrame, looks: Sequence[Look], name: str, steps: Sequence[int]) -> bool:
    """Draw the runs' lines; returns whether they all coincide."""
    curves = [_on_steps(rows(metrics, run=look.label), name, steps) for look in looks]
    for nth, (look, curve) in enumerate(zip(looks, curves, strict=True)):
        extra = (len(looks) - 1 - nth) / max(1, len(looks) - 1)
        marked = np.arange(len(steps)) if len(steps) <= 40 else lone(curve)
        axes.plot(
            steps,
            curve,
            linestyle=look.dash,
            color=look.colour,
            linewidth=1.4 + 2.6 * extra,
            marker=look.marker,
            markersize=4.5 + 3.5 * extra,
            markerfacecolor=look.face,
            markevery=marked.tolist(),
            label=look.shown,
        )
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)
    return len(looks) > 1 and all(np.allclose(curve, curves[0], rtol=1e-9, atol=0, equal_nan=True) for curve in curves)


def _on_steps(run: pd.DataFrame, name: str, steps: Sequence[int]) -> np.ndarray:
    """A metric at each of these steps, NaN at those that the run has not recorded."""
    known = dict(zip(run["step"].tolist(), numbers(run, name), strict=True))
    return np.array([known.get(step, np.nan) for step in steps])
