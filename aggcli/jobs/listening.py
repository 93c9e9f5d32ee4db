"""Who is told what a job has to say while it runs: the terminal, a list of notes, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Progress:
    """How far a share of a training job is: rollout steps done, response tokens a second in the last of them, and (mode,
    numbers) of its runs in their last optimizer step, where somebody looks at them."""

    step: int
    rate: float
    runs: Sequence[tuple[str, Mapping[str, float | None]]] = ()


Show = Callable[[int, Progress], None]
"""Told of a finished step of a share: (number of the share, how far it is)."""


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

    def training(self, steps: int, shares: int) -> AbstractContextManager[Show]:
        """A function to be told each finished step of a training job of so many shares, each of `steps` steps."""
        return nullcontext(lambda share, progress: None)


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
