"""Live progress of training on a terminal: one row a mode."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from aggcli.training.loop import TrainedStep


@contextmanager
def progress_of(steps: int, done: int, shown: bool) -> Iterator[Callable[[TrainedStep], None]]:
    """A function to show each finished step; silent when stderr is not a terminal, and where it is not to be shown."""
    if not shown or not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.live import Live

    began = time.perf_counter()
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        yield lambda step: live.update(_table(step, steps, done, time.perf_counter() - began))


def _table(step: TrainedStep, steps: int, first: int, seconds: float) -> Table:
    from rich.table import Table

    left = seconds / max(step.step + 1 - first, 1) * (steps - step.step - 1)
    table = Table(box=None, padding=(0, 1))
    for head in (f"step {step.step + 1}/{steps}", "reward", "accuracy", "pg_loss"):
        table.add_column(head, justify="right")
    modes: dict[str, list[dict[str, float | None]]] = {}
    for report in step.optimizer_steps[-1][1] if step.optimizer_steps else []:
        modes.setdefault(report.run.mode, []).append(report.values)
    for mode, values in modes.items():
        accuracy = [(v["correct/count"] or 0) / samples for v in values if (samples := v.get("samples"))]
        cells = (_mean([v.get("raw_reward") for v in values]), _mean(accuracy), _mean([v.get("pg_loss") for v in values]))
        table.add_row(mode, *cells)
    table.caption = f"{step.tokens / step.seconds:,.0f} tokens/s, {left:.0f} s left"
    return table


def _mean(values: list[float | None] | list[float]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{math.fsum(numbers) / len(numbers):.4f}" if numbers else ""
