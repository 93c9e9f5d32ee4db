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
"""Lines of the runs of one mode, four to each: with the mode's four shades, 32 runs of a mode differ in (colour, dash)."""
_SHADES = 4
_LONGEST = 46
_BOLD_PER_INCH, _SMALL_PER_INCH = 8.6, 13
"""Characters of a title and of a note in an inch, on the safe side."""
GOOD, BAD, NEUTRAL = "#56B4E9", "#E69F00", "#BBBBBB"
LENGTH_SHADES = ("#DCE3EA", "#A9B8C6", "#6F8599", "#33475B")
"""Short to long."""
FORMATS = ("png", "svg", "pdf")

_RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "0.35",
    "axes.grid": True,
    "axes.labelcolor": "0.15",
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.hspace": 0.06,
    "figure.constrained_layout.wspace": 0.05,
    "figure.dpi": 150,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "font.size": 10,
    "grid.color": "0.9",
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
    "svg.hashsalt": "aggcli",
    "text.parse_math": False,  # a directory may be called a$b$
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
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
    """How a run is drawn: the mode's colour and marker; later runs of a mode are paler, every second one is hollow, and from
    the fifth on they are dashed. `ink`: the mode's colour, dark enough for words.
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


def looks(runs: Sequence[Labelled], *, dashed: bool = False) -> list[Look]:
    """One look per run (or arm), in their order. `dashed`: the second of a mode is dashed already: lines without markers."""
    others = list(dict.fromkeys(run.mode for run in runs if run.mode not in MODE_COLOURS))
    made, seen = [], {}
    for run, shown in zip(runs, _shortened([run.label for run in runs]), strict=True):
        nth = seen[run.mode] = seen.get(run.mode, -1) + 1
        other = others.index(run.mode) if run.mode in others else 0
        base = MODE_COLOURS.get(run.mode) or OTHER_COLOURS[other % len(OTHER_COLOURS)]
        marker = MODE_MARKERS.get(run.mode) or OTHER_MARKERS[other % len(OTHER_MARKERS)]
        turn = other // len(OTHER_COLOURS)
        shade, dash = (nth + nth // len(DASHES), nth) if dashed else (nth, nth // _SHADES)
        colour = _paler(base, (shade % _SHADES) * 0.15)
        line = DASHES[(dash + turn) % len(DASHES)]
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
    red, green, blue = (part * 0.78 for part in to_rgb(colour))
    return red, green, blue


@contextmanager
def context() -> Iterator[None]:
    """matplotlib's defaults and this style inside, the user's settings again afterwards."""
    with matplotlib.style.context("default"), matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, with an Agg canvas."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def title(figure: Figure, text: str) -> None:
    """The figure's title, at the left edge and no wider than the figure, which grows by its further lines."""
    told = folded(text, int(_BOLD_PER_INCH * figure.get_figwidth()))
    figure.set_figheight(figure.get_figheight() + 0.22 * told.count("\n"))
    figure.suptitle(told, x=0.01, ha="left")


def folded(text: str, width: int) -> str:
    """`text` in lines of at most `width` characters."""
    return textwrap.fill(text, width, break_on_hyphens=False)


def step_axis(axes: Axes, steps: Sequence[int]) -> None:
    """The x axis of optimizer steps, with whole numbers only; a single step stands in the middle."""
    axes.set_xlabel("optimizer step")
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def legend_below(figure: Figure, axes: Axes, columns: int = 4, note: str = "") -> None:
    """One legend for all panels, under them and never over them, with a note above it; the figure grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    note = folded(note, int(_SMALL_PER_INCH * figure.get_figwidth()))
    columns = max(1, min(columns, len(labels), int(figure.get_figwidth() * 14.5 / (max(map(len, labels), default=0) + 10))))
    lines = math.ceil(len(labels) / columns) + len(note.splitlines())
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)
    place = "outside lower left" if note else "outside lower center"
    legend = figure.legend(handles, labels, loc=place, ncols=columns, fontsize=9, handlelength=3, alignment="left")
    if note:
        legend.set_title(note, prop=FontProperties(size=9))
        legend.get_title().set_color("0.3")


def note(figure: Figure, text: str) -> None:
    """A note under the axes, at the left edge and no wider than the figure, which grows by its further lines."""
    if text:
        told = folded(text, int(_SMALL_PER_INCH * figure.get_figwidth()))
        figure.set_figheight(figure.get_figheight() + 0.17 * told.count("\n"))
        figure.supxlabel(told, x=0.01, ha="left", fontsize=9, color="0.3")


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


def svg_text(figure: Figure) -> str:
    """A figure as SVG with its words as text, so that they can be searched and copied; the same for the same figure."""
    buffer = io.StringIO()
    with context(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=_UNDATED["svg"])
    return buffer.getvalue()
