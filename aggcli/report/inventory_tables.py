"""The table of what each step of a source of rollouts holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from aggcli.errors import printable
from aggcli.measurement.words import listed, plural, short
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


_NAMES = {
    "samples": "training samples",
    "rollouts": "rollouts (N)",
    "prompts": "prompt groups (P)",
    "groups_found": "groups are",
    "samples_without_group": "samples without a group",
    "length_unit": "lengths are in",
    "response_length": "response length ({unit})",
    "response_length_min": "  shortest",
    "response_length_max": "  longest",
    "response_tokens": "response {unit}",
    "tokens": "trained {unit}",
    "raw_reward": "reward",
    "streams": "recorded per token",
}
"""Facts whose names in `--json` are not how one would say it."""


def unit_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """What the lengths of these steps count, for a label: `tokens`, `characters` or `words`."""
    unit: str = steps[0]["length_unit"]
    return {"chars": "characters"}.get(unit, unit)


def inventory_answer(source: str, kind: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """What the source holds, which modes can be computed of it, and what is missing, in a paragraph."""
    unit = unit_of(steps)
    counted = "" if unit == "tokens" else f", lengths in {unit}, not tokens"
    samples, trained = (sum(step[name] for step in steps) for name in ("samples", "tokens"))
    held = f"{plural(samples, 'training sample')}, {trained} trained {unit}"
    missing = list(dict.fromkeys(name for step in steps for name in step["skipped"]))
    refused = {name for name in missing if name.startswith("mode ")}
    usable = [name for name in dict.fromkeys(name for step in steps for name in step["computable"]) if name.startswith("mode ")]
    modes = [name.removeprefix("mode ") for name in usable if name not in refused]
    every = f"every mode can be computed ({listed(modes)})" if not refused else ""
    can = every or (f"of the modes {listed(modes)} can be computed" if modes else "no mode can be computed")
    where = "" if len(steps) == 1 else " in every step"
    times = {name: sum(name in step["skipped"] for step in steps) for name in missing}
    told = [name if times[name] == len(steps) else f"{name} ({times[name]} of {len(steps)} steps)" for name in missing]
    lacks = f"; missing: {', '.join(told)}" if missing else ""
    return f"{printable(source)}: format {kind}, {plural(len(steps), 'step')}{counted}: {held}; {can}{where}{printable(lacks)}."


def _named(name: str, steps: Sequence[Mapping[str, Any]]) -> str:
    return _NAMES.get(name, name.replace("_", " ")).format(unit=unit_of(steps))


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
    return "" if value is None else short(value)


def _fact(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return short(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(str(name))} {count}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return printable(str(value))
