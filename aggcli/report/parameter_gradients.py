"""Tables of modes' gradients by the parameters of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rich.table import Table

from aggcli.measurement.words import short
from aggcli.report.blocks import BlockTable


class _Step(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def by_parameters(self) -> dict[str, dict[str, Any]]: ...
    @property
    def by_log_probs(self) -> dict[str, Any]: ...


BY_LOG_PROBS = "by log-probabilities"
"""The row of the gradient that needs no model: by the log-probabilities of the response tokens."""


def gradient_tables(modes: Sequence[str], step: _Step) -> list[Table]:
    """Of one step: each mode's norm over the baseline's, the cosine to the baseline's gradient by group of parameters, and the
    cosines between all modes."""
    baseline, others = modes[0], modes[1:]
    rows = rows_of(step)
    norms = BlockTable([f"gradient norm over {baseline}'s", *others], numbers=others, caption=step.name)
    cosines = BlockTable([f"cosine to {baseline}'s gradient", *others], numbers=others, caption=step.name)
    for group, found in rows.items():
        base = found["norm"][0]
        norms.add_row(group, *(short(value / base) if base else "" for value in found["norm"][1:]))
        cosines.add_row(group, *(_number(row[0]) for row in found["cosine"][1:]))
    whole = next(iter(step.by_parameters.values()))
    between = BlockTable(["cosine, all parameters", *modes], numbers=modes, caption=step.name)
    for mode, row in zip(modes, whole["cosine"], strict=True):
        between.add_row(mode, *map(_number, row))
    return [norms, cosines, between]


def rows_of(step: _Step) -> dict[str, dict[str, Any]]:
    """What was found by group of parameters, the whole first, and by log-probabilities last."""
    return {**step.by_parameters, BY_LOG_PROBS: step.by_log_probs}


def _number(value: float | None) -> str:
    return "" if value is None else short(value)
