"""What can be audited: a rule gives the weight of every token for a step and a layout, and says why it varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aggcli.auditing.reducers import ReducerRule, extract
from aggcli.errors import SettingError
from aggcli.layout.schedule import Schedule
from aggcli.objective.weights import can_represent, rule_weights, weight_by_sample
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rules import Rule, find_rule, remark_on


class AuditRule(Protocol):
    """One rule under audit."""

    @property
    def name(self) -> str: ...
    def weights(self, step: RolloutBatch, schedule: Schedule, cp: int) -> Tensor:
        """The weight of every response token, float64 [T]."""
        ...

    def can_represent(self, schedule: Schedule) -> bool:
        """Whether the framework could deal this schedule at all."""
        ...

    def why(self) -> str:
        """Why the rule varies, in words; blank for one that should not."""
        ...


@dataclass(frozen=True)
class NamedRule:
    """One of this project's modes or a framework's rule; `note`: what to know about the name that it was asked by."""

    rule: Rule
    note: str = ""

    @property
    def name(self) -> str:
        return self.rule.name

    def weights(self, step: RolloutBatch, schedule: Schedule, cp: int) -> Tensor:
        return rule_weights(self.rule, step, [schedule])

    def weights_by_piece(self, step: RolloutBatch, schedule: Schedule) -> Tensor:
        """The weight of a token of each sample, float64 [S], where the loss is NaN: NaN only in the pieces that are 0/0."""
        weight_S = weight_by_sample(self.rule, step, [schedule], nan_in="piece").value_S
        return torch.where(torch.isnan(weight_S) | (step.mask_sum_S > 0), weight_S, 0.0)

    def can_represent(self, schedule: Schedule) -> bool:
        return can_represent(self.rule, schedule)

    def why(self) -> str:
        return self.rule.why_it_depends() if self.rule.depends_on_layout else ""


@dataclass(frozen=True, eq=False)
class CustomRule:
    """A user's reducer; `reason` comes from its diagnosis. `equal_only`: it divides by the number of micro-batches, so only
    equal ones are asked of it. `fails`: what it raises on the simplest batch, so that nothing is asked of it; empty if nothing.
    """

    reducer: ReducerRule
    reason: str = ""
    equal_only: bool = False
    fails: str = ""

    @property
    def name(self) -> str:
        return self.reducer.name

    def weights(self, step: RolloutBatch, schedule: Schedule, cp: int) -> Tensor:
        if self.fails:
            raise SettingError(f"it raises {self.fails}")
        return extract(self.reducer, step, schedule, cp).weight_T

    def can_represent(self, schedule: Schedule) -> bool:
        sizes = {len(micro_batch) for rank in schedule.micro_batches for micro_batch in rank}
        counts = {len(rank) for rank in schedule.micro_batches}
        return not self.equal_only or (len(sizes) == 1 and len(counts) == 1)

    def why(self) -> str:
        return self.reason


def rule_named(name: str, *, divisor: float | None = None) -> NamedRule:
    """The rule of that name, with a constant in tokens; `token_mean@micro-batch` counts a mode's denominators in that scope.

    Raises `SettingError` for an unknown name or a constant that is no positive number.
    """
    return NamedRule(find_rule(name).with_divisor(divisor), remark_on(name))
