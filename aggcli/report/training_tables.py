"""The table of a trained comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from aggcli.analysis.final import FINAL, LAST_STEP
from aggcli.report.blocks import BlockTable
from aggcli.report.comparison_rows import NO_DIFFERENCE, with_half_width

if TYPE_CHECKING:
    from aggcli.analysis.comparison import Comparison, Pair

_HEADS = {
    "accuracy": "accuracy ↑",
    "response_length": "length",
    "correct/response_length": "length, correct",
    "incorrect/response_length": "length, wrong",
}


_MARKED = "no difference shown (5 % or more by the paired t-test, corrected by Holm over all {tests} tests of the comparison)"


def training_table(summary: Mapping[str, Any], comparison: Comparison | None = None) -> Table:
    """Final metrics of each mode as mean and 95 % interval over seeds, and the paired difference to the baseline, marked where
    the `comparison` of these runs shows none. The best accuracy is bold where a difference from the baseline makes it the best.
    """
    heads = [_HEADS[name] for name in FINAL.values()]
    table = BlockTable(["after training", *heads], numbers=heads, caption=_caption(summary, comparison))
    best = _best(summary, comparison)
    for mode, metrics in summary["modes"].items():
        cells = [_interval(metrics[name]) for name in FINAL.values()]
        table.add_row(mode, Text(cells[0], style="bold" if mode == best else ""), *cells[1:])
        if mode != summary["baseline"]:
            cells = [_marked(_difference(metrics[name]), name, mode, comparison) for name in FINAL.values()]
            table.add_row(f"  minus {summary['baseline']}", *cells)
    return table


def _best(summary: Mapping[str, Any], comparison: Comparison | None) -> str | None:
    """The mode of the highest accuracy where that is no matter of chance: it is shown to be above the baseline, or as the
    baseline above every other one."""
    means = {mode: metrics["accuracy"]["mean"] for mode, metrics in summary["modes"].items() if metrics["accuracy"]}
    if len(means) < 2:
        return None
    best, baseline = max(means, key=lambda mode: means[mode]), summary["baseline"]
    others = [mode for mode in means if mode != baseline] if best == baseline else [best]
    pairs = [_pair("accuracy", mode, comparison) for mode in others]
    return best if all(pair is not None and pair.shown for pair in pairs) else None


def last_step_table(summary: Mapping[str, Any]) -> Table:
    """The numbers of the last optimizer step on recorded rollouts, modes side by side."""
    modes = summary["modes"]
    table = BlockTable(["last optimizer step", *modes], numbers=modes)
    for name in LAST_STEP:
        if any(metrics[name] for metrics in modes.values()):
            table.add_row(name, *(_interval(metrics[name]) for metrics in modes.values()))
    return table


def _pair(name: str, mode: str, comparison: Comparison | None) -> Pair | None:
    of_arm = {} if comparison is None else comparison.outcomes.get(f"{name}_on_fresh_prompts", {})
    return of_arm[mode].pair if mode in of_arm else None


def _marked(cell: str, name: str, mode: str, comparison: Comparison | None) -> str:
    """The cell of a difference, `~` before it where it was tested and not shown."""
    pair = _pair(name, mode, comparison)
    hidden = cell and pair is not None and pair.test.p is not None and not pair.shown
    return f"{NO_DIFFERENCE} {cell}" if hidden else cell


def _caption(summary: Mapping[str, Any], comparison: Comparison | None) -> str:
    counts = {metrics["accuracy"]["n"] for metrics in summary["modes"].values() if metrics["accuracy"]}
    several = "mean and 95 % interval over seeds (of a length up to the response limit), differences paired by seed"
    seeds = "one seed: no interval" if counts == {1} else several
    missing = f"; without {', '.join(summary['missing'])}" if summary["missing"] else ""
    marks = "" if comparison is None or not comparison.tests else f"; {NO_DIFFERENCE}: {_MARKED.format(tests=comparison.tests)}"
    return f"on fresh prompts, lengths in tokens; {seeds}{missing}{marks}"


def _interval(metric: Mapping[str, Any] | None) -> str:
    return "" if metric is None else with_half_width(metric["mean"], metric["low"], metric["high"])


def _difference(metric: Mapping[str, Any] | None) -> str:
    difference = metric and metric.get("difference")
    return with_half_width(difference["mean"], difference["low"], difference["high"], signed=True) if difference else ""
