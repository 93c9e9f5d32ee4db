"""Learning curves: what changes over the steps of training, a line a mode, and for few modes each seed and a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from scipy.special import stdtrit

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.histories import History, with_labels
from aggcli.analysis.log_names import WORDS
from aggcli.analysis.outcomes import OUTCOMES
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

    `runs`: those to draw (`compared_runs`), labelled by arm; the others of `frames` are counted in the note. Where another
    trainer made some, a mean is over the steps that all runs of its arm have, and panels are of what was logged. Raises
    `NothingToDraw`.
    """
    foreign = any(run.source for run in runs)
    arms = with_labels(runs)
    label_of = {run.directory: run.label for run in runs}
    drawn = {run.label: label_of[run.directory] for run in frames.runs if run.directory in label_of}
    metrics = rows(frames.metrics, frames.metrics["run"].isin(list(drawn)).to_numpy(dtype=bool))
    metrics = metrics.assign(arm=[drawn[label] for label in metrics["run"]])
    moving = [name for name in (WORDS if foreign else CURVES) if _moves(numbers(metrics, name))]
    shown = moving if foreign else [name for name in CURVES if name in moving or is_blank(metrics, name)]
    if not moving:
        raise NothingToDraw(f"no learning curve: no metric of the {'logs' if foreign else 'records'} changes over the steps")
    looks = style.looks([own[0] for own in arms.values()])
    tables = {
        (label, name): table
        for label in arms
        for name, table in _tables(rows(metrics, arm=label), shown, foreign=foreign).items()
    }
    same = coinciding({label: _drawn(tables, label, shown) for label in arms})
    shown_as = {look.label: look.shown for look in looks}
    seeds = [len(own) for own in arms.values()]
    steps = sorted(set(metrics["step"].tolist()))
    with style.context():
        figure, panels = grid(len(shown), 4.9, 2.9, columns=2)
        for axes, name in zip(panels, shown, strict=True):
            for at, look in enumerate(looks):
                text = look.shown + (f" = {shown_as[same[look.label]]}" if look.label in same else "")
                _draw(axes, tables[look.label, name], replace(look, shown=text), at, len(looks))
            heading, unit = _named(name, foreign=foreign)
            style.heading(axes, heading)
            axes.set_ylabel(in_length_unit(unit, frames.length_unit) or "2-norm")
            style.step_axis(axes, steps, "step, as logged" if foreign else "optimizer step")
            if name in moving:
                _fit_to_seeds(axes, numbers(metrics, name), log=name in NORMS)
            else:
                say_blank(axes)
        hidden = len(frames.runs) - len(drawn)
        style.legend_below(figure, panels[0], note=_reading(seeds, hidden, same=bool(same), foreign=foreign))
        each = f", {plural(seeds[0], 'run' if foreign else 'seed')} each" if len(set(seeds)) == 1 else ""
        said = modes_in_words([look.mode for look in looks], [look.label for look in looks])
        said = plural(len(looks), "arm") if foreign else said
        style.title(figure, f"Learning curves: {said}{each}")
    return figure


def _named(name: str, *, foreign: bool) -> tuple[str, str]:
    """The heading and the unit of a panel: by the catalogue of metrics, which other trainers' logs know nothing of."""
    if foreign:
        return f"{WORDS[name]}\nas the trainers logged it", OUTCOMES[name].unit
    return f"{style.metric_about(name)}\n{style.metric_over(name)}", describe(name).unit


def _reading(seeds: Sequence[int], hidden: int, *, same: bool, foreign: bool) -> str:
    each, arm = ("run", "arm") if foreign else ("seed", "mode")
    line = f"line: mean over {each}s, " + ("at the steps that all runs of the arm have" if foreign else _UP_TO)
    if max(seeds) == 1:
        said = f"one {each}{' an arm' if foreign else ''}: a line is one run, so there is no band"
    elif len(seeds) > _MOST_SEEDS_SHOWN:
        said = f"{line}; with more than {_MOST_SEEDS_SHOWN} {arm}s, single {each}s and bands are left out"
    else:
        said = f"{line}; faint: each {each}; {_band_in_words(seeds, each, arm)}"
    if same:
        said += "; a = b: the lines of a are those of b in every panel"
    if hidden:
        said += f"; {plural(hidden, 'run is', 'runs are')} not drawn: on recorded rollouts, or recorded twice"
    return said


_UP_TO = "up to the last step of the shortest"


def _band_in_words(seeds: Sequence[int], each: str, arm: str) -> str:
    if len(seeds) > _MOST_BANDS:
        return f"no bands with more than {_MOST_BANDS} {arm}s"
    if max(seeds) < _FEWEST_SEEDS:
        return f"no bands below {_FEWEST_SEEDS} {each}s"
    few = f", none below {_FEWEST_SEEDS} {each}s" if min(seeds) < _FEWEST_SEEDS else ""
    return f"band: 95 % Student-t interval, cut where it leaves what was measured{few}"


@dataclass(frozen=True)
class _Table:
    """A metric of an arm: `runs` by step; `mean` over the runs at the steps where there is one to draw, of `count` runs."""

    runs: pd.DataFrame
    mean: pd.Series
    count: pd.Series


def _tables(metrics: pd.DataFrame, names: Sequence[str], *, foreign: bool) -> dict[str, _Table]:
    """These metrics of an arm, by name. A mean ends at the last step that every run of the arm got to: beyond it would be of
    the runs that happened to go on.

    Other trainers log at steps of their own choice: there it is at the steps that all runs have that log the metric at all.
    """
    by_run = metrics.pivot_table(index="step", columns="run", values=list(names), dropna=False)
    end = min(int(numbers(part, "step").max()) for _, part in metrics.groupby("run"))
    return {name: _table(pd.DataFrame(by_run[name]), end, foreign=foreign) for name in names}


def _table(table: pd.DataFrame, end: int, *, foreign: bool) -> _Table:
    mean = table.mean(axis=1).where(table.index <= end)
    if foreign:
        table = table.dropna(axis=1, how="all")
        mean = table.dropna(axis=0, how="any").mean(axis=1)
    return _Table(table, mean, table.loc[mean.index].notna().sum(axis=1))


def _drawn(tables: Mapping[tuple[str, str], _Table], label: str, names: Sequence[str]) -> list[np.ndarray]:
    """The steps of an arm, and its means over seeds, of every panel."""
    own = [tables[label, name].mean for name in names]
    return [part for mean in own for part in (mean.index.to_numpy(), mean.to_numpy(dtype="float64"))]


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


def _draw(axes: Axes, own: _Table, look: Look, at: int, of: int) -> None:
    """The line of arm `at` of `of`, as wide as the others: where they coincide, earlier ones show between later dashes."""
    mean, count, table = own.mean, own.count, own.runs.loc[own.mean.index]
    between = max(len(table) // 6, min(len(table), 6), 1)
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
    for run in own.runs:
        line = own.runs[run].dropna() if len(mean) < len(own.runs) else own.runs[run]
        axes.plot(line.index, line, color=look.colour, alpha=0.25, linewidth=0.8, zorder=1.5)
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
