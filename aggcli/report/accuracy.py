"""Accuracy or reward against the tokens that it cost: the steps of every run, and each arm's fitted curve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from aggcli.analysis.curves import Curve
from aggcli.analysis.efficiency import FittedRun, ModeCurve, mode_curves
from aggcli.analysis.histories import LOGGED_TOKENS, Floats, History, with_labels
from aggcli.analysis.log_names import WORDS
from aggcli.analysis.outcomes import OUTCOMES
from aggcli.analysis.sigmoid import sigmoid
from aggcli.analysis.statistics import Interval
from aggcli.measurement.words import plural
from aggcli.report import style
from aggcli.report.base import NothingToDraw, coinciding, first_reason, lone, modes_in_words
from aggcli.report.style import Look

_ONE_COLUMN = 8
"""Beyond this many modes, the legend has several columns and lines have markers."""
_MOST_REASONS = 3
_FAINT = 1500
"""Beyond this many points, dots would be a carpet and are drawn smaller."""


def accuracy_by_tokens(runs: Sequence[History], fitted: Sequence[FittedRun] = (), measure: str = "accuracy") -> Figure:
    """Accuracy (share of scored rollouts that are correct) of each rollout step against response tokens trained on before it.

    A dot: one step of one run; a line: the arm's sigmoid, at the means of its seeds' A, B, C_mid and R_0 (`fitted`, by tokens),
    or the mean over its seeds where no curve was fitted; a note says why. `measure`: another one of a `History`. Where another
    trainer made runs, tokens and measure are as logged. Raises `NothingToDraw`.
    """
    word, foreign = WORDS[measure], any(run.source for run in runs)
    drawn = [run for run in runs if (np.isfinite(run.tokens) & np.isfinite(run.measures[measure])).any()]
    if not drawn:
        raise NothingToDraw(f"{word} and tokens are not {'logged' if foreign else 'recorded'} together")
    arms = with_labels(drawn)
    looks = style.looks([own[0] for own in arms.values()])
    curves = mode_curves(fitted, measure) if fitted else {}
    same = coinciding({label: [*_points(own, measure)] for label, own in arms.items()})
    shown_as = {look.label: look.shown for look in looks}
    with style.context():
        figure = style.new_figure(8.5, 4.6)
        axes = figure.subplots()
        points = sum(len(run.steps) for run in drawn)
        for look, own in zip(looks, arms.values(), strict=True):
            for run in own:
                axes.scatter(
                    run.tokens,
                    run.measures[measure],
                    s=12 if points < _FAINT else 4,
                    marker=look.marker,
                    color=look.colour,
                    alpha=0.28,
                    linewidths=0,
                    zorder=2,
                    clip_on=False,
                    rasterized=points > 5000,
                )
            bent = [one for one in fitted if one.run.label == look.label]
            name = look.shown + (f" = {shown_as[same[look.label]]}" if look.label in same else "")
            _draw_arm(
                axes,
                replace(look, shown=name),
                own,
                bent,
                curves.get(look.label),
                measure,
                ", no curve fitted" if fitted or not foreign else "",
                told=bool(curves) or len(looks) <= _ONE_COLUMN,
            )
        _mark_lines(axes, looks)
        _frame(axes, max(float(np.nanmax(run.tokens)) for run in drawn))
        if foreign:
            style.label_x(axes, "tokens before the step, as logged [tokens, which may include those of prompts]")
            axes.set_ylabel(f"{word} [{OUTCOMES[measure].unit}, as logged]")
        columns = 1 if len(looks) <= _ONE_COLUMN or curves else 3
        note = _reading(fitted, curves, same=bool(same), foreign=foreign)
        style.legend_below(figure, axes, columns=columns, note=note)
        modes = modes_in_words([look.mode for look in looks], [look.label for look in looks])
        about = f"{plural(len(looks), 'arm') if foreign else modes}, {plural(len(drawn), 'run')}"
        tokens = LOGGED_TOKENS if foreign else "tokens trained on"
        style.title(figure, f"{word[0].upper()}{word[1:]} against the {tokens}: {about}")
    return figure


def _points(own: Sequence[History], measure: str) -> Iterator[Floats]:
    for run in own:
        yield from (run.tokens, run.measures[measure])


def _mark_lines(axes: Axes, looks: Sequence[Look]) -> None:
    """Markers on the lines where there are too many to tell by colour and dash, each mode's at other places."""
    if len(looks) <= _ONE_COLUMN:
        return
    for at, (line, look) in enumerate(zip(axes.get_lines(), looks, strict=True)):
        points = len(np.asarray(line.get_xdata()))
        between = max(points // 6, min(points, 6))
        line.set(marker=look.marker, markerfacecolor=look.face, markersize=5, markevery=(at % between, between))


def _frame(axes: Axes, tokens: float) -> None:
    style.label_x(axes, "response tokens of the steps before [tokens, untrained ones included]")
    axes.set_ylabel("accuracy [share of scored rollouts]")
    if tokens > 0:
        axes.set_xlim(left=-0.01 * tokens)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
    else:  # nothing was trained on before the only step
        axes.set_xlim(-1, 1)
        axes.set_xticks([0])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_arm(
    axes: Axes,
    look: Look,
    own: Sequence[History],
    fitted: Sequence[FittedRun],
    curve: ModeCurve | None,
    measure: str,
    unfitted: str,
    *,
    told: bool,
) -> None:
    bent = [one.curve for one in fitted if isinstance(one.curve, Curve)]
    if bent and curve and curve.asymptote and curve.exponent and curve.midpoint:
        C = np.linspace(0, max(float(np.nanmax(run.tokens)) for run in own), 300)
        start = float(np.mean([one.start for one in bent]))
        R = sigmoid(C, start, curve.asymptote.mean, curve.exponent.mean, curve.midpoint.mean)
        text = f"{look.shown}: A {_words(curve.asymptote)}, B {_words(curve.exponent)}, C_mid {_words(curve.midpoint)} tokens"
        axes.plot(C, R, linestyle=look.dash, color=look.colour, linewidth=style.LINE, label=text, zorder=3)
        return
    C, R = _mean_curve(own, measure)
    axes.plot(
        C,
        R,
        linestyle=look.dash,
        color=look.colour,
        linewidth=style.LINE,
        marker=".",
        markevery=lone(R).tolist(),
        label=f"{look.shown}: mean of {plural(len(own), 'run')}{unfitted}" if told else look.shown,
        zorder=3,
    )


def _mean_curve(own: Sequence[History], measure: str) -> tuple[Floats, Floats]:
    """The mean over runs at the first run's tokens, interpolated, up to the tokens that all of them saw; NaN is a gap."""
    if len(own) == 1:
        return own[0].tokens, own[0].measures[measure]
    known = [np.isfinite(run.tokens) & np.isfinite(run.measures[measure]) for run in own]
    end = min(float(run.tokens[one][-1]) for run, one in zip(own, known, strict=True) if one.any())
    C = own[0].tokens[known[0]]
    C = C[end >= C]
    pairs = [(run.tokens[one], run.measures[measure][one]) for run, one in zip(own, known, strict=True) if one.any()]
    return C, np.mean([np.interp(C, x, y) for x, y in pairs], axis=0)


def _words(found: Interval) -> str:
    mean = f"{found.mean:,.0f}" if found.mean >= 1000 else f"{found.mean:.3g}"
    if found.low is None or found.high is None:
        return mean
    bounds = [f"{bound:,.0f}" if found.mean >= 1000 else f"{bound:.3g}" for bound in (found.low, found.high)]
    return f"{mean} [{bounds[0]}, {bounds[1]}]"


def _reading(fitted: Sequence[FittedRun], curves: dict[str, ModeCurve], *, same: bool, foreign: bool) -> str:
    bent, each = (
        max((curve.asymptote.n for curve in curves.values() if curve.asymptote), default=0),
        "run" if foreign else "seed",
    )
    interval = f", [95 % interval over {each}s]" if bent > 1 else f", one {each}: no interval"
    curve = f"R_0 + (A - R_0) / (1 + (C_mid/C)^B) at the means over {each}s{interval}"
    line = curve if bent else "mean over runs" + (", no curve is fitted" if fitted or not foreign else "")
    texts = [f"a dot: one step of one run; line: {line}"]
    if same:
        texts.append("a = b: the dots and the line of a are those of b")
    refused = {label: one.refused for label, one in curves.items() if one.refused}
    for label in list(refused)[:_MOST_REASONS]:
        texts.append(f"{label}: no curve for {plural(len(refused[label]), 'run')} ({first_reason(refused[label])})")
    if len(refused) > _MOST_REASONS:
        texts.append(
            f"and so for {plural(len(refused) - _MOST_REASONS, 'other arm' if foreign else 'other mode')}, whose reasons are"
            " not shown here"
        )
    return "; ".join(texts)
