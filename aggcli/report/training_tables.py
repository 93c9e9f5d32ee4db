"""The table of a trained comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from aggcli.analysis.final import FINAL, LAST_STEP
from aggcli.report.blocks import BlockTable

_HEADS = {
    "accuracy": "accuracy ↑",
    "response_length": "length",
    "correct/response_length": "length, correct",
    "incorrect/response_length": "length, wrong",
}


def training_table(summary: Mapping[str, Any]) -> Table:
    """Final metrics of each mode as mean and 95 % interval over seeds, and the paired difference to the baseline."""
    heads = [_HEADS[name] for name in FINAL.values()]
    table = BlockTable(["after training", *heads], numbers=heads, caption=_caption(summary))
    for mode, metrics in summary["modes"].items():
        table.add_row(mode, *(_interval(metrics[name]) for name in FINAL.values()))
        if mode != summary["baseline"]:
            cells = [_difference(metrics[name]) for name in FINAL.values()]
            table.add_row(f"  minus {summary['baseline']}", *cells)
    return table


def last_step_table(summary: Mapping[str, Any]) -> Table:
    """The numbers of the last optimizer step on recorded rollouts, modes side by side."""
    modes = summary["modes"]
    table = BlockTable(["last optimizer step", *modes], numbers=modes)
    for name in LAST_STEP:
        if any(metrics[name] for metrics in modes.values()):
            table.add_row(name, *(_interval(metrics[name]) for metrics in modes.values()))
    return table


def _caption(summary: Mapping[str, Any]) -> str:
    counts = {metrics["accuracy"]["n"] for metrics in summary["modes"].values() if metrics["accuracy"]}
    several = "mean [95 % interval over seeds], differences paired by seed"
    seeds = "one seed: no interval" if counts == {1} else several
    missing = f"; without {', '.join(summary['missing'])}" if summary["missing"] else ""
    return f"on fresh prompts, lengths in tokens; {seeds}{missing}"


def _interval(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return ""
    if metric["low"] is None:
        return f"{metric['mean']:.4g}"
    return f"{metric['mean']:.4g}\n[{metric['low']:.4g}, {metric['high']:.4g}]"


def _difference(metric: Mapping[str, Any] | None) -> str:
    difference = metric and metric.get("difference")
    if not difference:
        return ""
    if difference["low"] is None:
        return f"{difference['mean']:+.3g}"
    return f"{difference['mean']:+.3g}\n[{difference['low']:+.3g}, {difference['high']:+.3g}]"
