"""Where things are printed: data to stdout, notes and progress to stderr, nothing live off a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from aggcli.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Item = TypeVar("Item")

_INVOCATION: ContextVar[tuple[str, ...]] = ContextVar("arguments of this invocation", default=())


def invocation() -> list[str]:
    """The arguments of this invocation of the program, as they were given."""
    return list(_INVOCATION.get())


def set_invocation(arguments: Iterable[str]) -> None:
    _INVOCATION.set(tuple(arguments))


def out() -> Console:
    """The console for data. Markup is off: `[nats]` in a text is text. A reader that has gone raises `BrokenPipeError`."""
    from rich.console import Console

    class Data(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Data(markup=False, highlight=False, emoji=False)


def show(parts: Iterable[RenderableType]) -> None:
    """The parts of a result on stdout, an empty line between them."""
    from aggcli.report.blocks import spaced

    console = out()
    for part in spaced(parts):
        console.print(part)


def say(text: str) -> None:
    """A note on stderr; where nobody reads it, nothing."""
    _to_stderr(f"note: {one_line(text)}")


def say_error(text: str) -> None:
    """An error on stderr, in one line."""
    _to_stderr(f"aggcli: {one_line(text)}")


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:  # closed by the caller
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Whether progress can be shown live, on stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def one_line(text: str) -> str:
    """The text in one line, with what would act on a terminal spelled out: names and paths in it are other people's."""
    return printable(" ".join(text.split()))


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """`items`, with a bar on stderr when it is a terminal and there is more than one."""
    if total < 2 or not is_terminal():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, total=total, console=Console(stderr=True), transient=True)
