"""Which weights each kind of number takes under a rule: the policy loss, its KL and entropy terms, and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from aggcli.config import ObjectiveConfig
from aggcli.rules import CUSTOM, SAMPLE_MEAN, TOKEN_MEAN, Rule


@dataclass(frozen=True)
class Weighing:
    """Which weights each kind of per-token number takes under one rule: the policy loss, the KL and the entropy (both as terms
    of the loss and as metrics), and the other metrics."""

    loss: Rule
    metrics: Rule
    kl: Rule
    entropy: Rule

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(dict.fromkeys((self.loss, self.metrics, self.kl, self.entropy)))

    @property
    def names(self) -> WeightNames:
        return WeightNames(self.loss.name, self.metrics.name, self.kl.name, self.entropy.name)


class WeightNames(NamedTuple):
    """The names of the weights that each kind of number takes under one rule."""

    loss: str
    metrics: str
    kl: str
    entropy: str

    def as_json(self) -> dict[str, str]:
        """What a manifest says of it: whose weights the metrics, kl_loss and entropy_loss of a rule take."""
        return {"metrics": self.metrics, "kl_loss": self.kl, "entropy_loss": self.entropy}

    def of(self, metric: str) -> str:
        """Whose weights a per-token metric takes."""
        return {"pg_loss": self.loss, "kl_loss": self.kl, "entropy_loss": self.entropy}.get(metric, self.metrics)


def weighing_of(rule: Rule, objective: ObjectiveConfig) -> Weighing:
    """pg_clipfrac and the like keep the sample mean so that they compare across modes; token_mean is per token everywhere;
    `matched` makes them follow the loss. The KL and entropy of this project's modes follow the metrics, those of a framework's
    rule what that framework does.
    """
    follows = objective.metric_aggregation == "matched" or rule.metrics == "its own weights"
    per_token = rule == CUSTOM and objective.calculate_per_token_loss
    metrics = rule if follows else TOKEN_MEAN if per_token else SAMPLE_MEAN
    kl, entropy = (
        rule if term == "its own weights" else metrics if term == "the metrics' weights" else term
        for term in (rule.kl_term, rule.entropy_term)
    )
    return Weighing(rule, metrics, kl, entropy)
