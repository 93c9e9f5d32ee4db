"""Who is told what a job has to say while it runs: the terminal, a list of notes, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

Show = Callable[[int, Sequence[tuple[str, Mapping[str, float | None]]], float], None]
"""Told of a finished step: (steps done, (mode, numbers) of each run, response tokens a second)."""


class Listener:
    """Hears nothing. What listens overrides what it wants to hear."""

    @property
    def wants_numbers(self) -> bool:
        """Whether `training` shows the numbers of runs; where not, they are not gathered."""
        return False

    def note(self, text: str) -> None:
        """Something to know about the job, in one line."""

    def follow(self, items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
        """`items`, whose progress may be shown."""
        yield from items

    def training(self, steps: int, done: int) -> AbstractContextManager[Show]:
        """A function to be told each finished step of a training job that has done `done` of `steps`."""
        return nullcontext(lambda step, runs, rate: None)


_LISTENER: ContextVar[Listener] = ContextVar("who listens to jobs", default=Listener())  # noqa: B039 (it holds nothing)


def listener() -> Listener:
    """Who listens now."""
    return _LISTENER.get()


@contextmanager
def heard_by(one: Listener) -> Iterator[None]:
    """Have this one listen to the jobs that run inside."""
    token = _LISTENER.set(one)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def say(text: str) -> None:
    """Tell whoever listens."""
    listener().note(text)
