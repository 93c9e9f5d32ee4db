"""The table of what each step of a source of rollouts holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from aggcli.errors import printable
from aggcli.measurement.words import plural


def inventory_table(steps: Sequence[Mapping[str, Any]], width: int) -> Table:
    """What each step of a source holds, one row a fact, in `width` characters: as many steps (four at most, one at least) as
    find room without a word being broken.
    """
    names = [name for name in steps[0] if name not in ("source", "computable", "skipped", "notes", "prompt_groups")]
    columns = [["", *(_named(name, steps) for name in names)]]
    columns += [[printable(str(step["source"])), *(_fact(step[name]) for name in names)] for step in steps[:4]]
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


LENGTHS = ("response_length", "response_length_min", "response_length_max", "response_tokens", "tokens")
"""Facts that are counted in the unit of lengths."""


def unit_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """What the lengths of these steps count, for a label: `tokens`, `characters` or `words`."""
    unit: str = steps[0]["length_unit"]
    return {"chars": "characters"}.get(unit, unit)


def _named(name: str, steps: Sequence[Mapping[str, Any]]) -> str:
    unit = unit_of(steps)
    words = name.replace("_", " ")
    if unit == "tokens" or name not in LENGTHS:
        return words
    return {"tokens": f"trained {unit}", "response_tokens": f"response {unit}"}.get(name, f"{words} ({unit})")


def group_table(step: Mapping[str, Any], most: int = 40) -> Table:
    """The prompt groups of a step, one row each: starved (all wrong) and saturated (all right) ones named."""
    groups = step["prompt_groups"]
    flat = sum(group["advantage_spread"] == 0 for group in groups)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), caption_justify="left")
    headings = ("group", "correct", "reward (range)", "length (range)", "advantage spread", "duplicates", "")
    for heading in headings:
        table.add_column(Text(heading), justify="left" if heading in ("group", "") else "right", overflow="fold")
    for group in groups[:most]:
        right, scored = group["correct_rollouts"], group["scored_rollouts"]
        cells = (
            _fact(group["group"]),
            "" if right is None else f"{right} of {scored}",
            _ranged(group, "raw_reward", "reward_min", "reward_max"),
            _ranged(group, "response_length", "response_length_min", "response_length_max"),
            _short(group["advantage_spread"]),
            _fact(group["duplicates"]),
            _fact(group["state"]),
        )
        table.add_row(*map(Text, cells))
    shown = f"; {most} shown, --json shows all" if len(groups) > most else ""
    table.caption = f"{plural(len(groups), 'group')}, lengths in {unit_of([step])}, {flat} with an advantage spread of 0{shown}"
    return table


def _ranged(group: Mapping[str, Any], mean: str, least: str, most: str) -> str:
    """`0.5 (0..1)`: a mean and what it ranges over."""
    if group[mean] is None:
        return ""
    return f"{_short(group[mean])} ({_short(group[least])}..{_short(group[most])})"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


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
        return ", ".join(f"{printable(str(name))} {count}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return printable(str(value))
