"""Counted words, for notes, tables and figures."""

from __future__ import annotations


def plural(number: int, one: str, several: str | None = None) -> str:
    """`1 run`, `2 runs`; with a verb that follows the number, `plural(n, "rank holds", "ranks hold")`: `1 rank holds`."""
    return f"{number} {one}" if number == 1 else f"{number} {several if several is not None else one + 's'}"
