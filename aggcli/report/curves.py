"""Learning curves: what changes over the steps of training, a line a mode, and for few modes each seed and a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from scipy.special import stdtrit

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.histories import History, with_labels
from aggcli.analysis.statistics import CONFIDENCE
from aggcli.measurement.catalogue import describe
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, lone, modes_in_words
from aggcli.report.style import Look

CURVES = ("raw_reward", "correct/response_length", "incorrect/response_length", "pg_clipfrac", "ppo_kl", "grad_norm")
_MOST_BANDS = 8
"""Beyond this many modes, bands and single seeds would hide the lines."""
_MOST_DARK_BANDS = 4
_MOST_PLAIN = 4
"""Beyond this many modes, lines have markers too."""
_FAR_APART = 100
"""Gradient norms whose largest is this many times the smallest stand on a log axis."""


def learning_curves(frames: Frames, runs: Sequence[History]) -> Figure:
    """One panel a metric, one line for each label of `runs`: the mean over its seeds, with its 95 % Student-t band.

    `runs`: those to draw (`compared_runs`), labelled by arm; the others of `frames` are counted in the note. Raises
    `NothingToDraw`.
    """
    arms = with_labels(runs)
    label_of = {run.directory: run.label for run in runs}
    drawn = {run.label: label_of[run.directory] for run in frames.runs if run.directory in label_of}
    metrics = rows(frames.metrics, frames.metrics["run"].isin(list(drawn)).to_numpy(dtype=bool))
    metrics = metrics.assign(arm=[drawn[label] for label in metrics["run"]])
    shown = [name for name in CURVES if _moves(numbers(metrics, name))]
    if not shown:
        raise NothingToDraw("no learning curve: no metric of the records changes over the steps")
    looks = style.looks([own[0] for own in arms.values()], dashed=True)
    same = _coinciding(metrics, shown, list(arms))
    seeds = [len(own) for own in arms.values()]
    steps = sorted(set(metrics["step"].tolist()))
    with style.context():
        figure, panels = grid(len(shown), 4.9, 2.9, columns=2)
        for axes, name in zip(panels, shown, strict=True):
            for at, look in enumerate(looks):
                own = rows(metrics, arm=look.label)
                text = look.shown + (f" = {same[look.label]}" if look.label in same else "")
                _draw(axes, own, name, replace(look, shown=text), at, len(looks))
            axes.set_title(f"{name}\n{style.metric_over(name)}", fontsize=9.5)
            axes.set_ylabel(describe(name).unit or "2-norm")
            _fit_to_seeds(axes, numbers(metrics, name), log=name == "grad_norm")
            style.step_axis(axes, steps)
        style.legend_below(figure, panels[0], note=_reading(seeds, len(frames.runs) - len(drawn), same=bool(same)))
        each = f", {plural(seeds[0], 'seed')} each" if len(set(seeds)) == 1 else ""
        said = modes_in_words([look.mode for look in looks], [look.label for look in looks])
        style.title(figure, f"Learning curves: {said}{each}")
    return figure


def _reading(seeds: Sequence[int], hidden: int, *, same: bool) -> str:
    if max(seeds) == 1:
        said = "one seed: a line is one run, so there is no band"
    elif len(seeds) > _MOST_BANDS:
        said = f"line: mean over seeds; with more than {_MOST_BANDS} modes, single seeds and bands are left out"
    else:
        said = "line: mean over seeds; faint: each seed; band: 95 % Student-t interval, cut where it leaves what was measured"
    if same:
        said += "; a = b: the lines of a are those of b in every panel"
    if hidden:
        said += f"; {plural(hidden, 'run is', 'runs are')} not drawn: on recorded rollouts, or recorded twice"
    return said


def _coinciding(metrics: pd.DataFrame, names: Sequence[str], arms: Sequence[str]) -> dict[str, str]:
    """Arm -> the first arm whose means over seeds are the same in every panel; arms like no earlier one are left out."""
    means: dict[str, pd.DataFrame] = {}
    same: dict[str, str] = {}
    for arm in arms:
        mean = pd.DataFrame(rows(metrics, arm=arm).groupby("step")[list(names)].mean())
        for other, known in means.items():
            if mean.index.equals(known.index) and np.allclose(mean, known, rtol=1e-9, atol=0, equal_nan=True):
                same[arm] = other
                break
        else:
            means[arm] = mean
    return same


def _moves(values: np.ndarray) -> bool:
    """Whether there is anything to see: two different finite numbers."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and float(finite.max()) > float(finite.min())


def _fit_to_seeds(axes: Axes, values: np.ndarray, *, log: bool) -> None:
    """The axis spans what was measured; the band of two or three seeds reaches far beyond it and is cut."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    if log and low > 0 and high > _FAR_APART * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(low / 1.3, high * 1.3)
    else:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _draw(axes: Axes, metrics: pd.DataFrame, name: str, look: Look, at: int, of: int) -> None:
    """The line of arm `at` of `of`: earlier ones are wider, so that lines that coincide stay visible."""
    table = metrics.pivot_table(index="step", columns="run", values=name, dropna=False)
    count = table.notna().sum(axis=1)
    mean = table.mean(axis=1)
    between = max(len(table) // 6, min(len(table), 6))
    axes.plot(
        table.index,
        mean,
        linestyle=look.dash,
        color=look.colour,
        linewidth=1.2 + min(1.2 * (of - 1), 3.0) * (of - 1 - at) / max(1, of - 1),
        marker=look.marker if of > _MOST_PLAIN else None,
        markerfacecolor=look.face,
        markersize=5,
        markevery=(at % between, between),
        label=look.shown,
        zorder=3,
    )
    alone = lone(mean.to_numpy(dtype="float64"))
    marker, size = (look.marker, 5) if of > _MOST_PLAIN else (".", 6)
    if alone.size:
        axes.plot(table.index[alone], mean.iloc[alone], marker, color=look.colour, markersize=size, clip_on=False, zorder=3)
    if of > _MOST_BANDS:
        return
    for run in table:
        axes.plot(table.index, table[run], color=look.colour, alpha=0.25, linewidth=0.8, zorder=1.5)
    reach = stdtrit(np.maximum(count - 1, 1), (1 + CONFIDENCE) / 2) * table.std(axis=1) / np.sqrt(np.maximum(count, 1))
    axes.fill_between(
        table.index,
        mean - reach,
        mean + reach,
        where=(count > 1).to_numpy(),
        color=look.colour,
        alpha=0.15 if of <= _MOST_DARK_BANDS else 0.06,
        linewidth=0,
        zorder=1,
    )
