"""A stack of runs that train as one batch: what differs from run to run."""

from __future__ import annotations

from dataclasses import dataclass

from aggcli.config import ObjectiveConfig
from aggcli.rules import Rule


@dataclass(frozen=True)
class RunSpec:
    """One run of a stack. Everything that is not here is the same for all runs of the stack."""

    name: str
    """Where its records go, relative to the results directory."""
    seed: int
    objective: ObjectiveConfig
    lr: float

    @property
    def rule(self) -> Rule:
        """How its policy loss is aggregated."""
        return self.objective.loss_aggregation

    @property
    def mode(self) -> str:
        """What that rule is called."""
        return self.rule.name
