"""The terminal as what listens to jobs: notes on stderr, and live progress where it is a terminal, one row a mode."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from aggcli.cli.console import is_terminal, progress, say
from aggcli.jobs.listening import Item, Listener, heard_by

if TYPE_CHECKING:
    from rich.table import Table

    from aggcli.jobs.listening import Progress, Show

Runs = Sequence[tuple[str, Mapping[str, float | None]]]
"""(mode, numbers) of runs in their last optimizer step."""


class Terminal(Listener):
    """Says the notes, and shows progress on a terminal."""

    @property
    def wants_numbers(self) -> bool:
        return is_terminal()

    def note(self, text: str) -> None:
        say(text)

    def follow(self, items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
        return progress(items, total, what)

    def training(self, steps: int, shares: int) -> AbstractContextManager[Show]:
        return training_table(steps, shares)


class _Keeping(Terminal):
    """The terminal, whose notes wait."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@contextmanager
def notes_after() -> Iterator[None]:
    """The notes of the jobs inside are said at the end, below what is printed there; also where that fails."""
    keeping = _Keeping()
    try:
        with heard_by(keeping):
            yield
    finally:
        for text in keeping.notes:
            say(text)


@contextmanager
def training_table(steps: int, shares: int) -> Iterator[Show]:
    """A function that shows a finished step, a row a mode and a line a share; silent when stderr is not a terminal."""
    if not is_terminal():
        yield lambda share, progress: None
        return
    from rich.console import Console
    from rich.live import Live

    latest, begun = dict[int, Progress](), dict[int, tuple[float, int]]()
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:

        def show(share: int, progress: Progress) -> None:
            latest[share] = progress
            begun.setdefault(share, (time.perf_counter(), progress.step))
            named = [(f"share {at + 1}: " if shares > 1 else "", at) for at in sorted(latest)]
            lines = [f"{name}{_line(latest[at], steps, *begun[at])}" for name, at in named]
            live.update(_table("mode", [run for one in latest.values() for run in one.runs], "\n".join(lines)))

        yield show


def _line(progress: Progress, steps: int, since: float, first: int) -> str:
    """How far a share is, and how long it still takes by the steps done since its `first` was."""
    told = f"step {progress.step}/{steps}, {progress.rate:,.0f} tokens/s"
    if progress.step == first:
        return told
    left = (time.perf_counter() - since) / (progress.step - first) * (steps - progress.step)
    return f"{told}, {left:.0f} s left"


def _table(head: str, runs: Runs, caption: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), caption=caption)
    for title in (head, "reward", "accuracy", "pg_loss"):
        table.add_column(title, justify="right")
    for mode in dict.fromkeys(of for of, _ in runs):
        own = [_shown_of(values) for of, values in runs if of == mode]
        table.add_row(mode, *(_mean(list(column)) for column in zip(*own, strict=True)))
    return table


def _shown_of(values: Mapping[str, float | None]) -> tuple[float | None, float | None, float | None]:
    """Reward, accuracy and pg_loss of a run's step."""
    samples, right = values.get("samples"), values.get("correct/count")
    return values.get("raw_reward"), (right or 0) / samples if samples else None, values.get("pg_loss")


def _mean(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{math.fsum(numbers) / len(numbers):.4f}" if numbers else ""
