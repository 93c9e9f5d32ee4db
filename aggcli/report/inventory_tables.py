"""The table of what each step of a source of rollouts holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from aggcli.errors import printable
from aggcli.measurement.words import plural
from aggcli.report.blocks import BlockTable


def inventory_table(steps: Sequence[Mapping[str, Any]], most: int = 4) -> Table:
    """What each step of a source holds, one row a fact, a column a step, `most` of them."""
    names = [name for name in steps[0] if name not in ("source", "computable", "skipped", "notes", "prompt_groups")]
    shown = steps[:most]
    caption = f"{most} of {len(steps)} steps shown; --json shows all" if len(steps) > most else ""
    sources = [printable(str(step["source"])) for step in shown]
    table = BlockTable(["", *sources], numbers=sources, caption=caption, prose=True)
    for name in names:
        table.add_row(*map(Text, (_named(name, steps), *(_fact(step[name]) for step in shown))))
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
    shown = f"; {most} shown, --json shows all" if len(groups) > most else ""
    caption = f"{plural(len(groups), 'group')}, lengths in {unit_of([step])}, {flat} with an advantage spread of 0{shown}"
    numbers = ("correct", "reward (range)", "length (range)", "advantage spread", "duplicates")
    table = BlockTable(["group", *numbers, ""], numbers, caption=caption)
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
    return table


def _ranged(group: Mapping[str, Any], mean: str, least: str, most: str) -> str:
    """`0.5 (0..1)`: a mean and what it ranges over."""
    if group[mean] is None:
        return ""
    return f"{_short(group[mean])} ({_short(group[least])}..{_short(group[most])})"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


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
