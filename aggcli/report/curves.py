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
from aggcli.analysis.units import in_length_unit
from aggcli.measurement.catalogue import describe
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, coinciding, grid, is_blank, lone, modes_in_words, say_blank
from aggcli.report.style import Look

NORMS = ("grad_norm", "grad_norm_log_probs")
CURVES = ("raw_reward", "correct/response_length", "incorrect/response_length", "pg_clipfrac", "ppo_kl", *NORMS)
_MOST_SEEDS_SHOWN = 8
"""Beyond this many modes, single seeds would hide the lines."""
_MOST_BANDS = 4
"""Beyond this many modes, bands would turn the panels grey."""
_FEWEST_SEEDS = 3
"""Below, a band says nothing: the t of one degree of freedom is 12.7, which covers the panel."""
_MOST_PLAIN = 4
"""Beyond this many modes, lines have markers too."""
_FAR_APART = 100
"""Gradient norms whose largest is this many times the smallest stand on a log axis."""


def learning_curves(frames: Frames, runs: Sequence[History]) -> Figure:
    """One panel a metric, one line for each label of `runs`: the mean over its seeds.

    Each seed is faint, and from 3 seeds on there is a 95 % Student-t band; many modes have neither, and the note says so.

    `runs`: those to draw (`compared_runs`), labelled by arm; the others of `frames` are counted in the note. Raises
    `NothingToDraw`.
    """
    arms = with_labels(runs)
    label_of = {run.directory: run.label for run in runs}
    drawn = {run.label: label_of[run.directory] for run in frames.runs if run.directory in label_of}
    metrics = rows(frames.metrics, frames.metrics["run"].isin(list(drawn)).to_numpy(dtype=bool))
    metrics = metrics.assign(arm=[drawn[label] for label in metrics["run"]])
    moving = [name for name in CURVES if _moves(numbers(metrics, name))]
    shown = [name for name in CURVES if name in moving or is_blank(metrics, name)]
    if not moving:
        raise NothingToDraw("no learning curve: no metric of the records changes over the steps")
    looks = style.looks([own[0] for own in arms.values()])
    same = coinciding({label: _drawn(rows(metrics, arm=label), shown) for label in arms})
    shown_as = {look.label: look.shown for look in looks}
    seeds = [len(own) for own in arms.values()]
    steps = sorted(set(metrics["step"].tolist()))
    with style.context():
        figure, panels = grid(len(shown), 4.9, 2.9, columns=2)
        for axes, name in zip(panels, shown, strict=True):
            for at, look in enumerate(looks):
                own = rows(metrics, arm=look.label)
                text = look.shown + (f" = {shown_as[same[look.label]]}" if look.label in same else "")
                _draw(axes, own, name, replace(look, shown=text), at, len(looks))
            style.heading(axes, f"{style.metric_about(name)}\n{style.metric_over(name)}")
            axes.set_ylabel(in_length_unit(describe(name).unit, frames.length_unit) or "2-norm")
            style.step_axis(axes, steps)
            if name in moving:
                _fit_to_seeds(axes, numbers(metrics, name), log=name in NORMS)
            else:
                say_blank(axes)
        style.legend_below(figure, panels[0], note=_reading(seeds, len(frames.runs) - len(drawn), same=bool(same)))
        each = f", {plural(seeds[0], 'seed')} each" if len(set(seeds)) == 1 else ""
        said = modes_in_words([look.mode for look in looks], [look.label for look in looks])
        style.title(figure, f"Learning curves: {said}{each}")
    return figure


def _reading(seeds: Sequence[int], hidden: int, *, same: bool) -> str:
    if max(seeds) == 1:
        said = "one seed: a line is one run, so there is no band"
    elif len(seeds) > _MOST_SEEDS_SHOWN:
        said = f"{_LINE}; with more than {_MOST_SEEDS_SHOWN} modes, single seeds and bands are left out"
    else:
        said = f"{_LINE}; faint: each seed; {_band_in_words(seeds)}"
    if same:
        said += "; a = b: the lines of a are those of b in every panel"
    if hidden:
        said += f"; {plural(hidden, 'run is', 'runs are')} not drawn: on recorded rollouts, or recorded twice"
    return said


_LINE = "line: mean over seeds, up to the last step of the shortest"


def _band_in_words(seeds: Sequence[int]) -> str:
    if len(seeds) > _MOST_BANDS:
        return f"no bands with more than {_MOST_BANDS} modes"
    if max(seeds) < _FEWEST_SEEDS:
        return f"no bands below {_FEWEST_SEEDS} seeds"
    few = f", none below {_FEWEST_SEEDS} seeds" if min(seeds) < _FEWEST_SEEDS else ""
    return f"band: 95 % Student-t interval, cut where it leaves what was measured{few}"


def _drawn(metrics: pd.DataFrame, names: Sequence[str]) -> list[np.ndarray]:
    """The steps of an arm, and its means over seeds in every panel."""
    mean = pd.DataFrame(metrics[metrics["step"] <= _shared_end(metrics)].groupby("step")[list(names)].mean())
    return [mean.index.to_numpy(), mean.to_numpy(dtype="float64")]


def _shared_end(metrics: pd.DataFrame) -> int:
    """The last step that every run of an arm got to: beyond it a mean would be of the runs that happened to go on."""
    return min(int(numbers(part, "step").max()) for _, part in metrics.groupby("run"))


def _moves(values: np.ndarray) -> bool:
    """Whether there is anything to see: two different finite numbers."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and float(finite.max()) > float(finite.min())


def _fit_to_seeds(axes: Axes, values: np.ndarray, *, log: bool) -> None:
    """The axis spans what was measured; the band of three seeds reaches far beyond it and is cut."""
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
    """The line of arm `at` of `of`, as wide as the others: where they coincide, earlier ones show between later dashes."""
    table = metrics.pivot_table(index="step", columns="run", values=name, dropna=False)
    count = table.notna().sum(axis=1)
    mean = table.mean(axis=1).where(table.index <= _shared_end(metrics))
    between = max(len(table) // 6, min(len(table), 6))
    axes.plot(
        table.index,
        mean,
        linestyle=look.dash,
        color=look.colour,
        linewidth=style.LINE,
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
    if of > _MOST_SEEDS_SHOWN:
        return
    for run in table:
        axes.plot(table.index, table[run], color=look.colour, alpha=0.25, linewidth=0.8, zorder=1.5)
    banded = ((count >= _FEWEST_SEEDS) & mean.notna()).to_numpy()
    if of > _MOST_BANDS or not banded.any():
        return
    reach = stdtrit(np.maximum(count - 1, 1), (1 + CONFIDENCE) / 2) * table.std(axis=1) / np.sqrt(np.maximum(count, 1))
    axes.fill_between(
        table.index,
        mean - reach,
        mean + reach,
        where=banded,
        color=look.colour,
        alpha=0.15,
        linewidth=0,
        zorder=1,
    )
