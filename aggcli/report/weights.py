"""The figure of how much one token counts, against the length of its response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from aggcli.analysis.frames import Frames, token_weights
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid, plural
from aggcli.report.style import Look

EQUAL = 1e-6
"""Weights count as equal up to this relative difference."""
_MOST_GROUPS = 60
"""Beyond this many prompt groups in a panel, lines that join them would hide the points."""


def weight_by_length(frames: Frames) -> Figure:
    """Weight of a token relative to its step's average token, against its response's length; a panel per mode.

    One point per training sample and step, log axes (x: only where lengths differ tenfold). Samples without a trained
    token, and those whose tokens do not weigh above 0, cannot be shown; a note counts them. Raises `NothingToDraw`.
    """
    samples = token_weights(frames.samples) if len(frames.samples) else frames.samples
    if not len(samples):
        raise NothingToDraw("no samples are recorded")
    shown = samples[samples["relative_weight"] > 0]
    if not len(shown):
        raise NothingToDraw("no sample has a token of positive weight")
    looks = [look for look in style.looks(frames.runs) if (samples["run"] == look.label).any()]
    modes = list(dict.fromkeys(look.mode for look in looks))
    with style.context():
        figure, cells = grid(len(modes), 4.3, 3.1, columns=2, sharex=True, sharey=True)
        for axes, mode in zip(cells, modes, strict=True):
            _draw_mode(axes, shown, [look for look in looks if look.mode == mode])
        _scale(cells[0], shown)
        figure.supylabel("weight of a token relative to the average token of its step", fontsize=10)
        for axes in cells[-2:]:
            axes.set_xlabel("response length [tokens, masked-out ones included]")
        steps = plural(samples["step"].nunique(), "step")
        style.title(figure, f"How much one token counts, by the length of its response ({steps})")
        style.note(figure, _left_out(samples, shown))
    return figure


def _draw_mode(axes: Axes, shown: pd.DataFrame, looks: Sequence[Look]) -> None:
    axes.axhline(1, color="0.55", linewidth=1, zorder=1)
    for look in looks:
        own = shown[shown["run"] == look.label]
        axes.scatter(
            own["response_length"],
            own["relative_weight"],
            s=26,
            marker=look.marker,
            facecolors=look.face,
            edgecolors=look.colour if not look.filled else "white",
            linewidths=0.5 if look.filled else 1,
            alpha=0.8,
            zorder=3,
            label=look.label,
            rasterized=len(own) > 5000,
        )
    own = shown[shown["run"].isin([look.label for look in looks])]
    finding, joined = _finding(own)
    if joined is not None:
        axes.hlines(joined["weight"], joined["low"], joined["high"], color=looks[0].colour, linewidth=1, alpha=0.5, zorder=2)
    axes.set_title(f"{looks[0].mode}: {finding}", color=looks[0].colour)
    if len(looks) > 1:
        axes.legend(fontsize=8.5, loc="best")


def _finding(own: pd.DataFrame) -> tuple[str, pd.DataFrame | None]:
    """What the panel shows, in words, from its numbers; and the spans of the groups whose tokens all weigh the same."""
    step = own.groupby(["run", "step"], sort=False)
    spread = step["relative_weight"].agg(lambda weight: weight.max() / weight.min()).max()
    if spread <= 1 + EQUAL:
        return "all tokens weigh the same", None
    groups = (
        own[own["group"].notna()]
        .groupby(["run", "step", "group"], sort=False)
        .agg(
            low=("response_length", "min"),
            high=("response_length", "max"),
            weight=("relative_weight", "min"),
            heaviest=("relative_weight", "max"),
            samples=("sample", "size"),
        )
    )
    grouped = len(groups) and own["group"].notna().all() and (groups["samples"] > 1).any()
    if grouped and (groups["heaviest"] <= groups["weight"] * (1 + EQUAL)).all():
        return f"equal within a prompt group,\nup to {spread:.3g} times between groups", groups if len(
            groups
        ) <= _MOST_GROUPS else None
    order = step.apply(_rank_correlation).mean()
    lightest = "tokens of long responses are light" if order < -0.8 else "tokens weigh differently"
    return f"{lightest},\nup to {spread:.3g} times between tokens", None


def _rank_correlation(step: pd.DataFrame) -> float:
    """Of weight with length, within a step; 0 where either is constant."""
    if step["response_length"].nunique() < 2 or step["relative_weight"].nunique() < 2:
        return 0.0
    return float(step["response_length"].rank().corr(step["relative_weight"].rank()))


def _scale(axes: Axes, shown: pd.DataFrame) -> None:
    """Log axes, shared by all panels, with plain numbers; y always spans a factor of 4 around 1."""
    low, high = shown["relative_weight"].min(), shown["relative_weight"].max()
    axes.set_yscale("log")
    axes.set_ylim(min(low / 1.35, 0.5), max(high * 1.35, 2))
    logs = [axes.yaxis]
    if shown["response_length"].max() > 10 * shown["response_length"].min():
        axes.set_xscale("log")
        logs.append(axes.xaxis)
    else:
        axes.set_xlim(left=0)
    for axis in logs:
        decades = np.diff(np.log10(axis.get_view_interval()))[0]
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _left_out(samples: pd.DataFrame, shown: pd.DataFrame) -> str:
    """How many samples have no point, and why; samples are counted once, not once per run."""
    once = ["step", "sample"]
    masked = samples[samples["trained_tokens"] == 0]
    others = samples.drop(index=shown.index).drop(index=masked.index)
    texts = []
    if len(masked):
        texts.append(f"{plural(len(masked.drop_duplicates(once)), 'fully masked sample')} left out: no trained token to weigh")
    if len(others):
        texts.append(f"{plural(len(others), 'point')} without a positive weight left out")
    return "; ".join(texts)
