"""Text in lines of the width that there is, with intervals whole."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

WIDTH = 80
"""Characters of a line of text at the most: longer ones are hard to read."""
_INTERVAL = re.compile(r"\[[^][\s]+, [^][\s]+\]")


def folded(text: str, width: int, first: str = "", then: str = "", *, hyphens: bool = False) -> str:
    """The text in lines of `width` characters, behind the indents of the first and of the lines after it. A word breaks where
    it is longer than a line, with `hyphens` behind a hyphen in it first, and an interval `[low, high]` is a word.
    """
    whole = _INTERVAL.sub(lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.fill(whole, width, initial_indent=first, subsequent_indent=then, break_on_hyphens=hyphens)
    return lines.replace("\0", " ")


@dataclass(frozen=True)
class Folding:
    """What is made to the width of the console that it is printed on, `WIDTH` at the most."""

    made: Callable[[int], str | Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.made(min(WIDTH, options.max_width))
        yield Text(text) if isinstance(text, str) else text
