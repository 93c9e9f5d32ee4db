"""The figure of how much one token counts, against the length of its response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from aggcli.analysis.frames import Frames, numbers, rows, token_weights
from aggcli.measurement.words import listed, plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, alike, grid
from aggcli.report.style import Look

EQUAL = 1e-6
"""Weights count as equal up to this relative difference."""
_MOST_GROUPS = 60
"""Beyond this many prompt groups in a panel, lines that join them would hide the points."""


def weight_by_length(frames: Frames) -> Figure:
    """Weight of a token relative to its step's average token, against its response's length; a panel per mode, one for modes
    that are the same.

    One point per training sample and step, log axes (x: only where lengths differ tenfold). Samples without a trained
    token, and those whose tokens do not weigh above 0, cannot be shown; a note counts them. Raises `NothingToDraw`.
    """
    if not len(frames.samples):
        raise NothingToDraw("no samples are recorded")
    samples = token_weights(frames.samples)
    shown = rows(samples, numbers(samples, "relative_weight") > 0)
    if not len(shown):
        raise NothingToDraw("no sample has a token of positive weight")
    looks = [look for look in style.looks(frames.runs) if look.label in set(shown["run"])]
    panels = _panels(shown, looks)
    with style.context():
        figure, cells = grid(len(panels), 3.8 if len(panels) != 4 else 2.9, 3.1, columns=4, sharex=True, sharey=True)
        for axes, modes in zip(cells, panels, strict=True):
            _draw_mode(axes, rows(shown, mode=modes[0]), modes, [look for look in looks if look.mode == modes[0]])
        _scale(cells[0], numbers(shown, "response_length"), numbers(shown, "relative_weight"))
        label = "weight of a token, the average token of its step being 1"
        figure.supylabel(style.in_lines(label, figure.get_figheight() - 0.6), fontsize="medium")
        for axes in cells:
            style.label_x(axes, f"response length [{frames.length_unit}]")
            axes.label_outer()
        steps = plural(len(set(samples["step"])), "step")
        style.title(figure, f"How much one token counts, by the length of its response ({steps})")
        style.note(figure, "; ".join(filter(None, (f"lengths include untrained {frames.length_unit}", _left_out(samples)))))
    return figure


def _panels(shown: pd.DataFrame, looks: Sequence[Look]) -> list[list[str]]:
    """The modes, those of a single run together that give every sample the same weight."""
    modes = [look.mode for look in looks]
    drawn = {
        mode: [own[name].to_numpy() for name in ("step", "response_length", "relative_weight")]
        if modes.count(mode) == 1
        else [np.array([float(at)])]  # several runs have a legend, and a panel, of their own
        for at, mode in enumerate(dict.fromkeys(modes))
        for own in [rows(shown, mode=mode)]
    }
    return alike(drawn)


def _draw_mode(axes: Axes, shown: pd.DataFrame, modes: Sequence[str], looks: Sequence[Look]) -> None:
    axes.axhline(1, color="0.55", linewidth=1, zorder=1)
    for look in looks:
        own = rows(shown, run=look.label)
        axes.scatter(
            own["response_length"],
            own["relative_weight"],
            s=26 if len(own) < 200 else 18,
            marker=look.marker,
            facecolors=look.face,
            edgecolors="white" if look.filled else look.colour,
            linewidths=0.5 if look.filled else 1,
            alpha=0.8,
            zorder=3,
            label=look.shown,
            rasterized=len(own) > 5000,
        )
    finding, spans = _finding(shown)
    if 0 < len(spans) <= _MOST_GROUPS:
        axes.hlines(*zip(*spans, strict=True), color=looks[0].colour, linewidth=1, alpha=0.5, zorder=2)
    style.heading(axes, f"{listed(modes)}: {finding}", looks[0].ink if len(modes) == 1 else "0.15")
    if len(looks) > 1:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _finding(shown: pd.DataFrame) -> tuple[str, list[tuple[float, float, float]]]:
    """What the panel shows, in words, from its numbers; and (weight, shortest, longest) of each group of equal weights."""
    steps = list(_parts(shown, "run", "step"))
    spread = max(_spread(step) for step in steps)
    if spread <= 1 + EQUAL:
        return "all tokens of a step weigh the same" if len(steps) > 1 else "all tokens weigh the same", []
    groups = list(_parts(rows(shown, shown["group"].notna().to_numpy(dtype=bool)), "run", "step", "group"))
    whole = sum(map(len, groups)) == len(shown) and any(len(group) > 1 for group in groups)
    within = "" if len(steps) == 1 else " within a step"
    if whole and all(_spread(group) <= 1 + EQUAL for group in groups):
        return f"equal within a prompt group, between groups up to {spread:.2g} times apart{within}", [
            _span(group) for group in groups
        ]
    falling = np.mean([_rank_correlation(step) for step in steps]) < -0.8
    what = "tokens of long responses are light" if falling else "tokens weigh differently"
    return f"{what}, up to {spread:.2g} times apart{within}", []


def _parts(frame: pd.DataFrame, *names: str) -> Iterator[pd.DataFrame]:
    for _, part in frame.groupby(list(names), sort=False):
        yield part


def _spread(part: pd.DataFrame) -> float:
    weights = numbers(part, "relative_weight")
    return float(weights.max() / weights.min())


def _span(group: pd.DataFrame) -> tuple[float, float, float]:
    lengths = numbers(group, "response_length")
    return float(numbers(group, "relative_weight")[0]), float(lengths.min()), float(lengths.max())


def _rank_correlation(step: pd.DataFrame) -> float:
    """Of weight with length, within a step; 0 where either is constant."""
    ranks = step[["response_length", "relative_weight"]].rank().to_numpy()
    return float(np.corrcoef(ranks.T)[0, 1]) if (np.ptp(ranks, axis=0) > 0).all() else 0.0


def _scale(axes: Axes, lengths: np.ndarray, weights: np.ndarray) -> None:
    """Log axes, shared by all panels, with plain numbers; y spans at least a factor of 4 around 1."""
    axes.set_yscale("log")
    axes.set_ylim(min(weights.min() / 1.35, 0.5), max(weights.max() * 1.35, 2))
    _plain_log(axes.yaxis)
    if lengths.max() > 10 * lengths.min():
        axes.set_xscale("log")
        _plain_log(axes.xaxis)
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _plain_log(axis: Axis) -> None:
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 10**2.5 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _left_out(samples: pd.DataFrame) -> str:
    """How many samples of a run have no point, and why."""
    runs = list(_parts(samples, "run"))
    masked = [int((numbers(run, "trained_tokens") == 0).sum()) for run in runs]
    hidden = [int((~(numbers(run, "relative_weight") > 0)).sum()) - count for run, count in zip(runs, masked, strict=True)]
    texts = []
    for counts, what in ((masked, "without a trained token"), (hidden, "whose tokens do not weigh above 0")):
        if max(counts):
            number = str(min(counts)) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
            texts.append(f"left out of each run: {number} {'sample' if number == '1' else 'samples'} {what}")
    return "; ".join(texts)
