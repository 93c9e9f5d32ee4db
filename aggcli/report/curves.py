"""Learning curves: what changes over the steps of training, a colour a mode, a faint line a seed, a band over seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from aggcli.analysis.frames import Frames, rows
from aggcli.analysis.statistics import CONFIDENCE
from aggcli.measurement.catalogue import describe
from aggcli.report.base import NothingToDraw, grid, plural
from aggcli.report.style import MODE_COLOURS, OTHER_COLOUR

CURVES = ("raw_reward", "correct/response_length", "incorrect/response_length", "pg_clipfrac", "ppo_kl", "grad_norm")


def learning_curves(frames: Frames) -> Figure:
    """One panel a metric: the mean over seeds with its 95 % Student-t band, and each seed faintly."""
    shown = [name for name in CURVES if name in frames.metrics and _moves(frames.metrics[name])]
    if not shown:
        raise NothingToDraw("no learning curve: no metric of the records changes over the steps")
    figure, panels = grid(len(shown), 5.2, 3.0, columns=2)
    modes = list(dict.fromkeys(frames.metrics["mode"]))
    for axes, name in zip(panels, shown, strict=True):
        for at, mode in enumerate(modes):
            _draw(axes, rows(frames.metrics, mode=mode), name, str(mode), width=1.6 + 0.9 * (len(modes) - 1 - at))
        metric = describe(name)
        axes.set_title(f"{name}, over {metric.over}", fontsize=9.5)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(metric.unit or "2-norm")
        _fit_to_seeds(axes, frames.metrics[name])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    seeds = frames.metrics.groupby("mode")["run"].nunique().max()
    panels[0].legend()
    figure.suptitle(f"Learning curves: {plural(len(modes), 'mode')}, {plural(int(seeds), 'seed')} each")
    return figure


def _moves(values: pd.Series) -> bool:
    """Whether there is anything to see: two different finite numbers."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and float(finite.max()) > float(finite.min())


def _fit_to_seeds(axes: Axes, values: pd.Series) -> None:
    """The axis spans what was measured; the band of two or three seeds reaches far beyond it and is cut."""
    low, high = float(values.min()), float(values.max())
    axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _draw(axes: Axes, metrics: pd.DataFrame, name: str, mode: str, width: float) -> None:
    colour = MODE_COLOURS.get(mode, OTHER_COLOUR)
    table = metrics.pivot_table(index="step", columns="run", values=name, dropna=False)
    for run in table:
        axes.plot(table.index, table[run], color=colour, alpha=0.25, linewidth=0.8)
    count = table.notna().sum(axis=1)
    mean = table.mean(axis=1)
    axes.plot(table.index, mean, color=colour, linewidth=width, label=mode)
    enough = count > 1
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, np.maximum(count - 1, 1)) * table.std(axis=1) / np.sqrt(np.maximum(count, 1))
    axes.fill_between(table.index, mean - reach, mean + reach, where=enough.to_numpy(), color=colour, alpha=0.15, linewidth=0)
