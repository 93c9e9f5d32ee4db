"""Live progress of training on a terminal: one row a mode."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aggcli.cli.console import is_terminal

if TYPE_CHECKING:
    from rich.table import Table

    from aggcli.training.loop import TrainedStep


Shown = list[tuple[str, float | None, float | None, float | None]]
"""(mode, reward, accuracy, pg_loss) of runs in their last optimizer step."""


def shown_of(done: TrainedStep) -> Shown:
    """What the table shows of the runs of one process; nothing where nobody sees it."""
    if not is_terminal() or not done.optimizer_steps:
        return []
    found: Shown = []
    for report in done.optimizer_steps[-1][1]:
        values = report.values
        samples, right = values.get("samples"), values.get("correct/count")
        found.append(
            (report.run.mode, values.get("raw_reward"), (right or 0) / samples if samples else None, values.get("pg_loss"))
        )
    return found


@contextmanager
def progress_of(steps: int, done: int, shown: bool) -> Iterator[Callable[[int, Shown, float], None]]:
    """A function that shows a finished step: (steps done, all runs, response tokens a second); silent when stderr is not a
    terminal, and where it is not to be shown."""
    if not shown or not is_terminal():
        yield lambda step, runs, rate: None
        return
    from rich.console import Console
    from rich.live import Live

    began = time.perf_counter()
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:

        def show(step: int, runs: Shown, rate: float) -> None:
            left = (time.perf_counter() - began) / max(step - done, 1) * (steps - step)
            live.update(_table(f"step {step}/{steps}", runs, f"{rate:,.0f} tokens/s, {left:.0f} s left"))

        yield show


def _table(head: str, runs: Shown, caption: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), caption=caption)
    for title in (head, "reward", "accuracy", "pg_loss"):
        table.add_column(title, justify="right")
    for mode in dict.fromkeys(run[0] for run in runs):
        own = [numbers for of, *numbers in runs if of == mode]
        table.add_row(mode, *(_mean(list(column)) for column in zip(*own, strict=True)))
    return table


def _mean(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{math.fsum(numbers) / len(numbers):.4f}" if numbers else ""
