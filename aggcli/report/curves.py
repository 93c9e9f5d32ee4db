"""Learning curves: what changes over the steps of training, a colour a mode, a faint line a seed, a band over seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.special import stdtrit

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.statistics import CONFIDENCE
from aggcli.measurement.catalogue import describe
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, lone
from aggcli.report.style import MODE_COLOURS, OTHER_COLOUR

CURVES = ("raw_reward", "correct/response_length", "incorrect/response_length", "pg_clipfrac", "ppo_kl", "grad_norm")


def learning_curves(frames: Frames) -> Figure:
    """One panel a metric: the mean over seeds with its 95 % Student-t band, and each seed faintly."""
    shown = [name for name in CURVES if _moves(numbers(frames.metrics, name))]
    if not shown:
        raise NothingToDraw("no learning curve: no metric of the records changes over the steps")
    modes = list(dict.fromkeys(frames.metrics["mode"]))
    seeds = [sum(run.mode == mode for run in frames.runs) for mode in modes]
    with style.context():
        figure, panels = grid(len(shown), 4.9, 2.9, columns=2)
        for axes, name in zip(panels, shown, strict=True):
            for at, mode in enumerate(modes):
                _draw(axes, rows(frames.metrics, mode=mode), name, str(mode), width=1.6 + 0.9 * (len(modes) - 1 - at))
            axes.set_title(f"{name}\n{style.metric_over(name)}", fontsize=9.5)
            axes.set_xlabel("optimizer step")
            axes.set_ylabel(describe(name).unit or "2-norm")
            _fit_to_seeds(axes, numbers(frames.metrics, name))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.legend_below(figure, panels[0], note=_reading(max(seeds)))
        each = f", {plural(seeds[0], 'seed')} each" if len(set(seeds)) == 1 else ""
        style.title(figure, f"Learning curves: {plural(len(modes), 'mode')}{each}")
    return figure


def _reading(seeds: int) -> str:
    if seeds == 1:
        return "one seed: a line is one run, so there is no band"
    return "line: mean over seeds; faint: each seed; band: 95 % Student-t interval, cut where it leaves what was measured"


def _moves(values: np.ndarray) -> bool:
    """Whether there is anything to see: two different finite numbers."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and float(finite.max()) > float(finite.min())


def _fit_to_seeds(axes: Axes, values: np.ndarray) -> None:
    """The axis spans what was measured; the band of two or three seeds reaches far beyond it and is cut."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _draw(axes: Axes, metrics: pd.DataFrame, name: str, mode: str, width: float) -> None:
    colour = MODE_COLOURS.get(mode, OTHER_COLOUR)
    table = metrics.pivot_table(index="step", columns="run", values=name, dropna=False)
    for run in table:
        axes.plot(table.index, table[run], color=colour, alpha=0.25, linewidth=0.8)
    count = table.notna().sum(axis=1)
    mean = table.mean(axis=1)
    axes.plot(table.index, mean, color=colour, linewidth=width, label=mode)
    alone = lone(mean.to_numpy(dtype="float64"))
    axes.plot(table.index[alone], mean.iloc[alone], ".", color=colour, markersize=6)
    enough = count > 1
    reach = stdtrit(np.maximum(count - 1, 1), (1 + CONFIDENCE) / 2) * table.std(axis=1) / np.sqrt(np.maximum(count, 1))
    axes.fill_between(table.index, mean - reach, mean + reach, where=enough.to_numpy(), color=colour, alpha=0.15, linewidth=0)
