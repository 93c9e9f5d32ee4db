"""The table of what each step of a source of rollouts holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text


def inventory_table(steps: Sequence[Mapping[str, Any]], width: int) -> Table:
    """What each step of a source holds, one row a fact, in `width` characters: as many steps (four at most, one at least) as
    find room without a word being broken.
    """
    names = [name for name in steps[0] if name not in ("source", "computable", "skipped", "notes")]
    columns = [["", *(name.replace("_", " ") for name in names)]]
    columns += [[str(step["source"]), *(_fact(step[name]) for name in names)] for step in steps[:4]]
    while len(columns) > 2 and sum(map(_longest_word, columns)) > _room(width, columns):
        columns.pop()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), caption_justify="left")
    for at, (cells, wide) in enumerate(zip(columns, _widths(width, columns), strict=True)):
        table.add_column(Text(cells[0]), width=wide, justify="right" if at else "left", overflow="fold")
    for row in zip(*(cells[1:] for cells in columns), strict=True):
        table.add_row(*map(Text, row))
    if len(columns) - 1 < len(steps):
        table.caption = f"{len(columns) - 1} of {len(steps)} steps shown; --json shows all"
    return table


def _room(width: int, columns: Sequence[Sequence[str]]) -> int:
    """Characters for the cells of these columns: three stand between two of them, and one at either edge."""
    return width - 3 * (len(columns) - 1) - 2


def _longest_word(cells: Sequence[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split()), default=1)


def _widths(width: int, columns: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column: its longest word, and what is left, from the first column on, up to its longest cell."""
    widths = [_longest_word(cells) for cells in columns]
    left = _room(width, columns) - sum(widths)
    if left < 0:  # a word that is too long even for a single step
        return [widths[0], max(1, widths[1] + left)]
    for at, cells in enumerate(columns):
        share = left if at == 0 else left // (len(columns) - at)
        more = min(share, max(map(len, cells)) - widths[at])
        widths[at] += more
        left -= more
    return widths


def _fact(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
