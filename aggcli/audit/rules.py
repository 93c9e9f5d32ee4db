"""What can be audited: a rule gives the weight of every token for a step and a layout, and says why it varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aggcli.audit.reducers import ReducerRule, extract
from aggcli.errors import SettingError
from aggcli.layout.schedule import Schedule
from aggcli.objective.presets.facts import SCOPES, Preset, why_it_varies
from aggcli.objective.presets.registry import find_rule
from aggcli.objective.presets.weights import can_run, preset_weights
from aggcli.rollouts.batch import RolloutBatch


class AuditRule(Protocol):
    """One rule under audit."""

    @property
    def name(self) -> str: ...
    def weights(self, step: RolloutBatch, schedule: Schedule, cp: int) -> Tensor:
        """The weight of every response token, float64 [T]."""
        ...

    def can_run(self, schedule: Schedule) -> bool:
        """Whether the framework could deal this schedule at all."""
        ...

    def why(self) -> str:
        """Why the rule varies, in words; blank for one that should not."""
        ...


@dataclass(frozen=True)
class PresetRule:
    """A framework's rule, or one of this project's modes, with the divisor it is given."""

    preset: Preset
    divisor: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return self.preset.name

    def weights(self, step: RolloutBatch, schedule: Schedule, cp: int) -> Tensor:
        return preset_weights(self.preset, step, schedule, divisor=self.divisor)

    def can_run(self, schedule: Schedule) -> bool:
        return can_run(self.preset, schedule)

    def why(self) -> str:
        return why_it_varies(self.preset)


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

    def can_run(self, schedule: Schedule) -> bool:
        sizes = {len(micro_batch) for rank in schedule.micro_batches for micro_batch in rank}
        counts = {len(rank) for rank in schedule.micro_batches}
        return not self.equal_only or (len(sizes) == 1 and len(counts) == 1)

    def why(self) -> str:
        return self.reason


def rule_named(name: str, *, divisor: float | None = None, normalizer: str = "step", scale: str = "rollouts") -> PresetRule:
    """The rule of that name; `token_mean@micro-batch` (or `normalizer`) counts a mode's denominators in that scope.

    Raises `SettingError` for an unknown name.
    """
    if normalizer not in SCOPES:
        raise SettingError(f"--normalizer {normalizer}: must be one of {', '.join(SCOPES)}")
    found = find_rule(name, prompt_mean_scale=scale)
    if found.preset.evidence == "own" and normalizer != "step" and "@" not in name:
        found = find_rule(f"{name}@{normalizer}", prompt_mean_scale=scale)
    notes = [found.note]
    if found.preset.numerator == "unmasked":
        notes.append(f"{found.preset.name}: masked tokens have weight: right only if their loss is 0")
    return PresetRule(found.preset, divisor, "; ".join(filter(None, notes)))
