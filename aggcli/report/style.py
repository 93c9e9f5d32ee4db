"""The one visual language: a colour and a marker per mode, a line per scope, and how a figure reaches the disk.

Colours are Okabe and Ito's, which stay apart for colour-blind readers. Nothing touches pyplot or needs a display: figures are
made and saved by matplotlib's own Agg, SVG and PDF writers, whatever backend the user has configured.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from aggcli.analysis.units import in_length_unit
from aggcli.errors import RecordError
from aggcli.files import whole_file
from aggcli.measurement.catalogue import describe
from aggcli.report.sizes import SIZES, Size
from aggcli.rules import MODES, names_of

MODE_COLOURS = dict(zip(names_of(MODES), ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=False))
MODE_MARKERS = dict(zip(names_of(MODES), ("o", "s", "^", "D"), strict=False))
OTHER_COLOURS = ("#000000", "#56B4E9", "#E69F00", "#332288", "#882255", "#999933", "#44AA99", "#777777")
OTHER_MARKERS = ("P", "X", "v", "<", ">", "p", "h", "d", "*")
"""Any other rule, such as a framework's or a custom reducer: 72 of them differ in (colour, marker)."""
SCOPE_LINES = {"step": "-", "rank": "--", "micro-batch": ":"}
"""The line of a number by the scope that it was counted in."""
DASHES: tuple[Any, ...] = (
    "-",
    *((0, on) for on in ((6, 2), (1, 1.5), (6, 2, 1, 2), (12, 3), (6, 2, 1, 2, 1, 2), (3, 1), (1, 5))),
)
"""The lines of a figure: each mode has its own, and its runs the ones after it; with the mode's four shades, 32 runs of a mode
differ in (colour, dash).
"""
LINE = 1.6
"""Width of every mode's line, in points: a wider one would look like a better one."""
WORDS = 4.5
"""Contrast that words have at least (WCAG 2.2, AA)."""
_SHADES = 4
_LONGEST = 46
_BOLD_PER_INCH, _PLAIN_PER_INCH, _SMALL_PER_INCH = 8.6, 11, 13
"""Characters of a title, of plain words and of a note in an inch, on the safe side, at 10 points."""
GOOD, BAD, NEUTRAL = "#56B4E9", "#E69F00", "#BBBBBB"
LENGTH_SHADES = ("#DCE3EA", "#A9B8C6", "#6F8599", "#33475B")
"""Short to long."""

_SIZE: ContextVar[Size] = ContextVar("size", default=SIZES["screen"])

_RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "0.35",
    "axes.grid": True,
    "axes.labelcolor": "0.15",
    "axes.labelsize": "medium",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.hspace": 0.06,
    "figure.constrained_layout.wspace": 0.05,
    "figure.dpi": 150,
    "figure.titlesize": "large",
    "figure.titleweight": "bold",
    "grid.color": "0.9",
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
    "svg.hashsalt": "aggcli",
    "text.parse_math": False,  # a directory may be called a$b$
    "xtick.labelsize": "medium",
    "ytick.labelsize": "medium",
}
_UNDATED = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


class Labelled(Protocol):
    """What is drawn as one: a run, or an arm of several."""

    @property
    def label(self) -> str: ...

    @property
    def mode(self) -> str: ...


@dataclass(frozen=True)
class Look:
    """How a run is drawn: the mode's colour, marker and dash; later runs of a mode are paler, every second one is hollow, and
    each has the next dash. `ink`: the mode's colour, dark enough for words.
    """

    label: str
    mode: str
    colour: str | tuple[float, float, float]
    marker: str
    filled: bool
    dash: Any
    shown: str
    """The label as it is written in a figure: a long one (a directory's path) with its middle left out."""
    ink: tuple[float, float, float]

    @property
    def face(self) -> str | tuple[float, float, float]:
        """Fill of the marker."""
        return self.colour if self.filled else "white"


def looks(runs: Sequence[Labelled]) -> list[Look]:
    """One look per run (or arm), in their order."""
    others = list(dict.fromkeys(run.mode for run in runs if run.mode not in MODE_COLOURS))
    made, seen = [], {}
    for run, shown in zip(runs, _shortened([run.label for run in runs]), strict=True):
        nth = seen[run.mode] = seen.get(run.mode, -1) + 1
        other = others.index(run.mode) if run.mode in others else 0
        base = MODE_COLOURS.get(run.mode) or OTHER_COLOURS[other % len(OTHER_COLOURS)]
        marker = MODE_MARKERS.get(run.mode) or OTHER_MARKERS[other % len(OTHER_MARKERS)]
        turn = other // len(OTHER_COLOURS)
        own = list(MODE_COLOURS).index(run.mode) if run.mode in MODE_COLOURS else len(MODE_COLOURS) + other + turn
        colour = _paler(base, ((nth + nth // len(DASHES)) % _SHADES) * 0.15)
        line = DASHES[(own + nth) % len(DASHES)]
        made.append(Look(run.label, run.mode, colour, marker, (nth + turn) % 2 == 0, line, shown, _darker(base)))
    return made


def _shortened(labels: Sequence[str]) -> list[str]:
    """Labels of at most `_LONGEST` characters, still all different where the labels are."""
    short = [one if len(one) <= _LONGEST else f"{one[:22]} … {one[-_LONGEST + 25 :]}" for one in labels]
    return [f"{one} #{nth}" if short.count(one) > 1 else one for nth, one in enumerate(short, 1)]


def _paler(colour: str, share: float) -> tuple[float, float, float]:
    red, green, blue = (part + (1 - part) * share for part in to_rgb(colour))
    return red, green, blue


def _darker(colour: str) -> tuple[float, float, float]:
    """The colour of words: darker, and so dark that they have the contrast of `WORDS` on white."""
    red, green, blue = (part * 0.78 for part in to_rgb(colour))
    while contrast((red, green, blue), (1, 1, 1)) < WORDS:
        red, green, blue = red * 0.95, green * 0.95, blue * 0.95
    return red, green, blue


def contrast(colour: Any, other: Any) -> float:
    """The contrast of two colours by WCAG 2.2, 1 to 21."""
    low, high = sorted(map(_luminance, (colour, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: Any) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@contextmanager
def drawn_at(size: Size) -> Iterator[None]:
    """Figures made inside are of this size."""
    before = _SIZE.set(size)
    try:
        yield
    finally:
        _SIZE.reset(before)


@contextmanager
def context() -> Iterator[None]:
    """matplotlib's defaults and this style inside, the user's settings again afterwards."""
    own = {**_RC, "font.size": _SIZE.get().points}
    with matplotlib.style.context("default"), matplotlib.rc_context(own):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with an Agg canvas. `width` and `height`: in inches on a screen, where words have 10 points."""
    figure = Figure(figsize=(width_of(width), height * _SIZE.get().scale))
    FigureCanvasAgg(figure)
    return figure


def width_of(inches: float) -> float:
    """The inches of a figure that is so wide on a screen."""
    size = _SIZE.get()
    return size.width or inches * size.scale


def beside(columns: int) -> int:
    """So many panels side by side, or fewer where the figure is narrow."""
    return min(columns, _SIZE.get().beside)


def heading(axes: Axes, text: str, colour: Any = "0.15", names: int = 0) -> None:
    """A panel's heading, in lines that fit over the panel; `names`: see `label_x`."""
    inches = _panel_inches(axes, names)
    axes.set_title("\n".join(in_lines(part, inches) for part in text.splitlines()), color=colour)


def label_x(axes: Axes, text: str, names: int = 0) -> None:
    """The label of a panel's x axis, in lines that fit under the panel. `names`: characters of the longest name at the left of
    the first panel of a row, where only that one has any; 0 where each panel has numbers there.
    """
    inches = _panel_inches(axes, names)
    axes.set_xlabel("\n".join(in_lines(part, inches) for part in text.splitlines()))


def _panel_inches(axes: Axes, names: int) -> float:
    """The width of a panel beside the words of its y axis."""
    figure, spec, scale = axes.get_figure(), axes.get_subplotspec(), _SIZE.get().scale
    assert isinstance(figure, Figure)
    assert spec is not None
    columns = spec.get_gridspec().ncols
    if not names:
        return figure.get_figwidth() / columns - 0.6 * scale
    return (figure.get_figwidth() - names / _PLAIN_PER_INCH * scale) / columns - 0.2 * scale


def title(figure: Figure, text: str) -> None:
    """The figure's title, which is its label too: at the left edge and no wider than the figure, which grows by its further
    lines; not drawn where figures have none.
    """
    figure.set_label(text)
    if _SIZE.get().titled:
        told = in_lines(text, figure.get_figwidth(), _BOLD_PER_INCH)
        _grow(figure, 0.22 * told.count("\n"))
        figure.suptitle(told, x=0.01, ha="left")


def in_lines(text: str, inches: float, per_inch: float = _PLAIN_PER_INCH) -> str:
    """`text` in lines that fit into so many inches, of a figure or of a panel, by the size of its words."""
    return folded(text, max(8, int(per_inch * inches / _SIZE.get().scale)))


def _grow(figure: Figure, inches: float) -> None:
    figure.set_figheight(figure.get_figheight() + inches * _SIZE.get().scale)


def folded(text: str, width: int) -> str:
    """`text` in lines of at most `width` characters."""
    return textwrap.fill(text, width, break_on_hyphens=False)


def step_axis(axes: Axes, steps: Sequence[int], label: str = "optimizer step") -> None:
    """The x axis of steps, with whole numbers only; a single step stands in the middle."""
    axes.set_xlabel(label)
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def legend_below(figure: Figure, axes: Axes, columns: int = 4, note: str = "") -> None:
    """One legend for all panels, under them and never over them, with a note above it; the figure grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    width = figure.get_figwidth()
    labels = [in_lines(label, width - 0.7 * _SIZE.get().scale, _SMALL_PER_INCH) for label in labels]
    note = in_lines(note, width, _SMALL_PER_INCH)
    longest = max((len(line) for label in labels for line in label.splitlines()), default=0)
    columns = max(1, min(columns, len(labels), int(width / _SIZE.get().scale * 14.5 / (longest + 10))))
    lines = math.ceil(sum(1 + label.count("\n") for label in labels) / columns) + len(note.splitlines())
    _grow(figure, 0.2 * lines)
    place = "outside lower left" if note else "outside lower center"
    legend = figure.legend(handles, labels, loc=place, ncols=columns, fontsize="small", handlelength=3, alignment="left")
    if note:
        legend.set_title(note, prop=FontProperties(size="small"))
        legend.get_title().set_color("0.3")


def legend_above(axes: Axes, text: str, names: int) -> None:
    """A panel's legend over it, under a heading; `names`: see `label_x`."""
    inches = _panel_inches(axes, names)
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), int(inches / _SIZE.get().scale * _SMALL_PER_INCH / (max(map(len, labels)) + 6))))
    legend = axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        fontsize="small",
        alignment="left",
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )
    legend.set_title(in_lines(text, inches), prop=FontProperties(size="medium"))


def note(figure: Figure, text: str) -> None:
    """A note under the axes, at the left edge and no wider than the figure, which grows by its further lines."""
    if text:
        told = in_lines(text, figure.get_figwidth(), _SMALL_PER_INCH)
        _grow(figure, 0.17 * told.count("\n"))
        figure.supxlabel(told, x=0.01, ha="left", fontsize="small", color="0.3")


def metric_about(name: str) -> str:
    """What a metric is, in the catalogue's words, without where it is measured and without its remarks."""
    return describe(name).about.split(";")[0].removeprefix("training: ").removeprefix("replay: ")


def metric_label(name: str, length_unit: str = "tokens") -> str:
    """`ppo_kl [nats]`: a metric and its unit, as the catalogue has them, lengths in the unit that they were counted in."""
    unit = in_length_unit(describe(name).unit, length_unit)
    return f"{name} [{unit}]" if unit else name


def metric_over(name: str) -> str:
    """`over scored rollouts`: what a metric is over, as the catalogue has it."""
    return f"over {describe(name).over}"


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's ending: the same bytes for the same figure, without a date.

    Raises `RecordError` when the path cannot be written.
    """
    kind = path.suffix.removeprefix(".")
    try:
        with context(), whole_file(path) as draft:
            figure.savefig(draft, format=kind, metadata=_UNDATED[kind])
    except OSError as error:
        raise RecordError(f"--output {path.parent}: {path.name} cannot be written ({error.strerror})") from error


def words_in(figure: Figure) -> str:
    """What a figure says in words: the headings of its panels, and its note."""
    headings = [axes.get_title(loc="left") for axes in figure.axes]
    notes = [text.get_text() for text in figure.texts if text.get_text() != figure.get_suptitle()]
    notes += [legend.get_title().get_text() for legend in figure.legends]
    told = [" ".join(part.split()) for part in (*headings, *notes)]
    return ". ".join(part for part in told if part and part != "None")


def svg_text(figure: Figure) -> str:
    """A figure as SVG with its words as text, so that they can be searched and copied; the same for the same figure."""
    buffer = io.StringIO()
    with context(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=_UNDATED["svg"])
    return buffer.getvalue()
