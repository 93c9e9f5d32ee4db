"""What a result shows of itself in a notebook: the terminal's tables, as HTML."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

_FRAME = '<pre style="line-height:1.25;overflow-x:auto">{code}</pre>'
WIDTH = 100
"""Columns of a table in a notebook."""


def as_html(parts: Iterable[RenderableType]) -> str:
    """Rich tables and texts as one block of HTML, everything in them escaped."""
    from rich.console import Console

    from aggcli.report.blocks import spaced

    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, markup=False, highlight=False, emoji=False, color_system=None
    )
    for part in spaced(parts):
        console.print(part)
    return console.export_html(inline_styles=True, code_format=_FRAME)


class Shown:
    """A result that shows itself in a notebook: what the terminal shows of it."""

    def tables(self) -> list[Any]:
        """Rich tables and texts."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return as_html(self.tables())
