"""Every figure of a report, from frames. Functions return figures and never write them; `style.save` does.

A figure whose data were not recorded raises `NothingToDraw` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.measurement.catalogue import LENGTH_BINS
from aggcli.measurement.words import listed, plural
from aggcli.report import style
from aggcli.report.accuracy import accuracy_by_tokens
from aggcli.report.base import NothingToDraw, alike, coinciding, grid, is_blank, lone, measured_runs, say_blank, without_data
from aggcli.report.correct_ranks import correct_by_rank
from aggcli.report.curves import learning_curves
from aggcli.report.effects import effects
from aggcli.report.findings import Findings, find
from aggcli.report.gradients import mode_gradients
from aggcli.report.layout_deviation import layout_deviation, layout_deviations
from aggcli.report.ranks import pg_loss_by_rank
from aggcli.report.style import Look
from aggcli.report.weights import weight_by_length

PICTURES = ("effects", "weight_by_length")
"""The picture of a page: the first of these that there is."""
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


def picture(frames: Frames, findings: Findings) -> dict[str, Figure]:
    """The figure that stands for all, by name: the effects where modes are compared, else the weights; empty without data."""
    makers = _makers(frames, None, findings)
    for name in PICTURES:
        if name in makers:
            try:
                return {name: makers[name]()}
            except NothingToDraw:
                continue
    return {}


def _makers(frames: Frames, step: int | None, findings: Findings | None) -> dict[str, Callable[[], Figure]]:
    """The figures of this kind of records, in the order of a report."""
    if findings is not None and findings.of_others:
        return _of_others(frames, findings)
    makers: dict[str, Callable[[], Figure]] = {
        "weight_by_length": lambda: weight_by_length(frames),
        "pg_loss_by_rank": lambda: pg_loss_by_rank(frames, step),
        "weight_shares": lambda: weight_shares(frames),
    }
    if "rollout_step" in frames.metrics:
        found = findings or find(frames)
        if (comparison := found.comparison) is not None:
            makers["effects"] = lambda: effects(comparison)
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


def _of_others(frames: Frames, found: Findings) -> dict[str, Callable[[], Figure]]:
    """The figures of runs that other trainers made, of which curves are known and nothing else. What is drawn by tokens is what
    curves are fitted to, accuracy where one was logged."""
    makers: dict[str, Callable[[], Figure]] = {"learning_curves": lambda: learning_curves(frames, found.compared)}
    if (comparison := found.comparison) is not None:
        makers["effects"] = lambda: effects(comparison)
    measure, fitted = found.curves.measure, found.curves.fitted if found.curves.axis == "tokens" else ()
    name = "accuracy_by_tokens" if measure == "accuracy" else "reward_by_tokens"
    makers[name] = lambda: accuracy_by_tokens(found.compared, fitted, measure)
    return makers


# -- where the weight goes ------------------------------------------------------------------------------------------


def weight_shares(frames: Frames) -> Figure:
    """Per run, the shares of its total weight by length quarter, correctness and sign of the advantage; runs that have the same
    shares everywhere are one row.

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
    shares = {look.label: _shares(rows(frames.metrics, run=look.label), parts) for look in looks}
    together = [[look for look in looks if look.label in group] for group in alike(shares)]
    with style.context():
        names = [_named(group, steps.max()) for group, (_, steps) in ((own, shares[own[0].label]) for own in together)]
        lines = max(name.count("\n") for name in names)
        figure = style.new_figure(8.5, len(families) * (0.95 + (0.34 + 0.17 * lines) * len(together)) + 0.9)
        cells = figure.subplots(len(families), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (title, family) in zip(cells, families.items(), strict=True):
            _draw_shares(axes, frames.metrics, together, *family)
            axes.set_yticks(range(len(together)), names)
            for tick, group in zip(axes.get_yticklabels(), together, strict=True):
                tick.set_color(group[0].ink if len(group) == 1 else "0.15")
            style.legend_above(axes, f"by {title}", max(len(line) for name in names for line in name.splitlines()))
        style.label_x(cells[-1], "share of the mode's total weight [%], mean over the n steps that recorded it")
        style.note(figure, without_data(len(frames.runs) - len(runs), "weight_share/*"))
        style.title(figure, "Where each mode puts its weight")
    return figure


def _shares(run: pd.DataFrame, parts: Sequence[str]) -> list[np.ndarray]:
    """The mean of each share in %, and over how many steps it is; what is no share, in damaged records, is left out."""
    values = [np.where((share := numbers(run, part)) <= 1 + 1e-9, share, np.nan) for part in parts]
    return [np.array([_mean(one) * 100 for one in values]), np.array([float(np.isfinite(one).sum()) for one in values])]


def _named(group: Sequence[Look], steps: float) -> str:
    """`token_mean and constant (n = 3)`, in lines."""
    return style.in_lines(f"{listed([look.shown for look in group])} (n\u00a0=\u00a0{steps:.0f})", style.width_of(8.5) * 0.3)


def _draw_shares(
    axes: Axes,
    metrics: pd.DataFrame,
    together: Sequence[Sequence[Look]],
    parts: list[str],
    labels: list[str],
    colours: Sequence[str],
) -> None:
    """A bar for each group of looks, whose shares are the same."""
    names = [f"weight_share/{part}" for part in parts]
    found = [_shares(rows(metrics, run=group[0].label), names) for group in together]
    ends = np.zeros(len(together))
    for at, (label, colour) in enumerate(zip(labels, colours, strict=True)):
        shares = np.array([own[at] for own, _ in found])
        axes.barh(range(len(together)), shares, left=ends, height=0.72, color=colour, edgecolor="white", label=label)
        for y, (start, share) in enumerate(zip(ends, shares, strict=True)):
            if share >= 5:
                place = (start + share / 2, y)
                axes.text(*place, f"{share:.0f}", ha="center", va="center", color=_ink_on(colour), fontsize="small")
        ends = ends + np.nan_to_num(shares)
    axes.invert_yaxis()
    axes.set_xlim(0, max(100.0, float(ends.max())))
    axes.grid(False)


def _mean(values: np.ndarray) -> float:
    """The mean of what was measured; NaN where nothing was."""
    known = values[np.isfinite(values)]
    return float(known.sum() / len(known)) if len(known) else float("nan")


def _ink_on(colour: str) -> str:
    """White on dark colours, near-black on light ones."""
    return "white" if float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114))) < 0.52 else "0.1"


# -- step by step ---------------------------------------------------------------------------------------------------


def modes_over_steps(frames: Frames) -> Figure:
    """`STEP_METRICS` against the optimizer step, a line per run, and one line where all runs have the same numbers; what was
    not measured is a gap. Raises `NothingToDraw` below two steps.
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
        apart = []
        for axes, name in zip(cells, names, strict=True):
            curves = {look.label: _on_steps(rows(frames.metrics, run=look.label), name, steps) for look in looks}
            same = (
                len(looks) > 1 and name not in blank and len(coinciding({k: [v] for k, v in curves.items()})) == len(looks) - 1
            )
            if same:
                _draw_line(axes, steps, curves[looks[0].label], label="", color="0.25", marker="o", markerfacecolor="0.25")
            else:
                apart.append(axes)
                for look in looks:
                    _draw_line(
                        axes,
                        steps,
                        curves[look.label],
                        label=look.shown,
                        color=look.colour,
                        marker=look.marker,
                        markerfacecolor=look.face,
                        linestyle=look.dash,
                    )
            over = style.metric_over(name) + (f"; the same in all {len(looks)} runs, drawn once" if same else "")
            style.heading(axes, f"{style.metric_about(name)}\n{over}")
            axes.set_ylabel(style.metric_label(name, frames.length_unit))
            style.step_axis(axes, steps)
            if name in blank:
                say_blank(axes)
        if apart:
            style.legend_below(figure, apart[0])
        style.title(figure, f"Step by step: {plural(len(looks), 'run')}, steps {steps[0]} to {steps[-1]}")
    return figure


def _draw_line(axes: Axes, steps: Sequence[int], curve: np.ndarray, **given: Any) -> None:
    marked = np.arange(len(steps)) if len(steps) <= 40 else lone(curve)
    axes.plot(steps, curve, linewidth=style.LINE, markersize=5, markevery=marked.tolist(), **given)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useOffset=False)


def _on_steps(run: pd.DataFrame, name: str, steps: Sequence[int]) -> np.ndarray:
    """A metric at each of these steps, NaN at those that the run has not recorded."""
    known = dict(zip(run["step"].tolist(), numbers(run, name), strict=True))
    return np.array([known.get(step, np.nan) for step in steps])
