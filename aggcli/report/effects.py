"""The picture of a trained comparison: how far each mode is from the baseline in each outcome, with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aggcli.analysis.comparison import Comparison, Pair
from aggcli.analysis.effects import effects_of
from aggcli.analysis.statistics import ALPHA
from aggcli.analysis.units import in_length_unit
from aggcli.measurement.words import plural, signed
from aggcli.report import style
from aggcli.report.base import NothingToDraw, grid
from aggcli.report.comparison_tables import ARROWS
from aggcli.report.style import Look

_FIRST = (
    ("accuracy_on_fresh_prompts", "accuracy", "raw_reward"),
    ("accuracy_at_equal_tokens", "raw_reward_at_equal_tokens"),
    ("tokens_to_accuracy",),
    ("correct/response_length_on_fresh_prompts", "correct/response_length"),
    ("incorrect/response_length_on_fresh_prompts", "incorrect/response_length"),
    ("response_length_on_fresh_prompts", "response_length"),
)
"""What is looked at first: of each of these, the first that was measured."""
_PANELS = 6


ROUNDING = 1e-12
"""A mean of differences below this is 0 but for rounding."""


def first_outcomes(comparison: Comparison) -> list[str]:
    """The outcomes that are looked at first, six at the most: success, then those with a difference that is shown, then the
    other axes of success and the lengths."""
    found = (next((name for name in names if name in comparison.outcomes), None) for names in _FIRST)
    first = [name for name in found if name is not None]
    differ = [one.outcome for one in effects_of(comparison) if one.shown and one.outcome in comparison.outcomes]
    return list(dict.fromkeys([*first[:1], *(name for name in first if name in differ), *differ, *first]))[:_PANELS]


def effects(comparison: Comparison) -> Figure:
    """A panel an outcome (`first_outcomes`), in it a row a mode: the difference to the baseline, paired or not, and its
    interval, filled where a difference is shown. Raises `NothingToDraw` where no mode is compared with another.
    """
    shown = [name for name in first_outcomes(comparison) if _pairs(comparison, name)]
    if not shown:
        how = "paired" if comparison.paired else "compared"
        raise NothingToDraw(f"no {comparison.arm} is {how} with another, so there is no difference between {comparison.arm}s")
    modes = [label for label in comparison.labels if any(label in _pairs(comparison, name) for name in shown)]
    every = {look.label: look for look in style.looks([_Arm(label) for label in comparison.labels])}
    looks = [every[label] for label in modes]
    with style.context():
        names = [style.in_lines(look.shown, 1.8) for look in looks]
        longest = max(len(line) for name in names for line in name.splitlines())
        figure, cells = grid(len(shown), 3.75, 0.85 + 0.27 * len(modes), columns=3, sharey=True)
        for axes, name in zip(cells, shown, strict=True):
            _draw(axes, looks, _pairs(comparison, name), "not paired" if comparison.paired else "not compared")
            defined = comparison.defined[name]
            style.heading(axes, f"{comparison.named(name)}{ARROWS[defined.better]}", names=longest)
            unit = in_length_unit(defined.unit, comparison.length_unit)
            style.label_x(axes, f"difference [{unit}]", longest)
        columns = cells[0].get_subplotspec().get_gridspec().ncols  # pyright: ignore[reportOptionalMemberAccess]
        for axes in cells[::columns]:
            axes.set_yticks(range(len(looks)), names)
            for tick, look in zip(axes.get_yticklabels(), looks, strict=True):
                tick.set_color(look.ink)
        style.title(figure, f"How far each {comparison.arm} is from {comparison.baseline}")
        style.note(figure, _reading(comparison, shown))
    return figure


class _Arm:
    """What has a look: an arm, whose label begins with its mode where it was run under several settings."""

    def __init__(self, label: str) -> None:
        self.label, self.mode = label, label.split(" (")[0]


def _pairs(comparison: Comparison, name: str) -> dict[str, Pair]:
    return {label: one.pair for label, one in comparison.outcomes[name].items() if one.pair is not None}


def _draw(axes: Axes, looks: Sequence[Look], pairs: Mapping[str, Pair], without: str) -> None:
    """`without`: what stands where a mode has no difference."""
    axes.axvline(0, color="0.55", linewidth=1, zorder=1)
    for y, look in enumerate(looks):
        if look.label not in pairs:
            axes.annotate(without, (0, y), (5, 0), textcoords="offset points", va="center", fontsize="small", color="0.35")
            continue
        pair = pairs[look.label]
        found = pair.test.difference
        if found.low is not None and found.high is not None:
            axes.hlines(y, found.low, found.high, color=look.colour, linewidth=style.LINE, zorder=2)
        face = look.colour if pair.shown else "white"
        axes.scatter([found.mean], [y], s=46, marker=look.marker, facecolors=face, edgecolors=look.colour, zorder=3)
        text = signed(found.mean if abs(found.mean) > ROUNDING else 0.0, 3)
        axes.annotate(
            text,
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize="small",
            color="0.1",
            annotation_clip=False,
        )
    axes.set_ylim(len(looks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if max(map(abs, axes.get_xlim())) < 1e-12:
        axes.set_xlim(-1, 1)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)


def _reading(comparison: Comparison, shown: Sequence[str]) -> str:
    every = [pair for name in comparison.outcomes for pair in _pairs(comparison, name).values()]
    seeds = sorted({pair.test.difference.n for name in shown for pair in _pairs(comparison, name).values()})
    of = plural(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    drawn = [pair for name in shown for pair in _pairs(comparison, name).values()]
    what, line = f"mean difference to {comparison.baseline}, paired by seed, of {of}", "95 % interval"
    if not comparison.paired:
        what = f"difference of the means from {comparison.baseline}'s, not paired, of {_counts(drawn)}"
        line += ", by Welch's t-test"
    if all(pair.p_holm is None for pair in every):
        said = [f"{what.removeprefix('mean ')}: no interval and no test"]
    else:
        said = [
            f"{what}; line: {line}",
            f"filled: a difference is shown (p < {ALPHA:.2g} after Holm's correction); hollow: none is shown",
        ]
        if any(pair.p_holm is not None and pair.test.difference.low is None for pair in drawn):
            said.append("without a line: the same difference in all seeds")
        if any(pair.p_holm is None for pair in drawn):
            why = "one seed" if comparison.paired else "an arm of one run, or runs that do not differ"
            said.append(f"hollow and without a line: no test ({why})")
    others = [name for name in comparison.outcomes if name not in shown and _pairs(comparison, name)]
    if others:
        differ = sum(any(pair.shown for pair in _pairs(comparison, name).values()) for name in others)
        also = f"{differ or 'none'} of them with a difference that is shown"
        said.append(f"{plural(len(others), 'further outcome is', 'further outcomes are')} not drawn, {also}")
    return "; ".join(said)


def _counts(pairs: Sequence[Pair]) -> str:
    """`3 runs against 4`, or `2 to 3 runs against 3 to 4`."""
    own, base = (sorted({pair.test.runs[side] for pair in pairs if pair.test.runs}) for side in (0, 1))
    of, against = (f"{n[0]}" if n[0] == n[-1] else f"{n[0]} to {n[-1]}" for n in (own, base))
    return f"{of} {'run' if of == '1' else 'runs'} against {against}"
