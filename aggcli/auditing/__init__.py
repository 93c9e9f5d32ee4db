"""The audit: one frozen batch under many layouts and rules, any reducer included.

`audit` compares rules and layouts; `diagnose` says what is wrong with a reducer; `smallest_counterexample` finds the smallest
case; `rule_loss` is the step loss of any framework's rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aggcli.auditing.compare import Audit, RuleReport, UnderLayout, audit
from aggcli.auditing.diagnose import Finding, diagnose
from aggcli.auditing.frozen import (
    DEFAULT_LAYOUTS,
    AuditLayout,
    FrozenBatch,
    Split,
    batch_of,
    built_in_batch,
    freeze,
    schedule_of,
    scheduled_layouts,
)
from aggcli.auditing.reducers import ReducerRule, extract, reducer_rule, signature_of
from aggcli.auditing.rules import AuditRule, CustomRule, NamedRule, rule_named
from aggcli.auditing.search import TOLERANCE, Counterexample, deviation, smallest_counterexample
from aggcli.config import settings_from
from aggcli.errors import RolloutError


def rule_loss(
    rule: str,
    samples: Sequence[Mapping[str, object]],
    split: Split,
    divisor: float | None = None,
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.28,
) -> float:
    """The step loss that the optimizer sees under a framework's rule: the mean over ranks of the sum over micro-batches.

    `rule`: `trl:bnpo`, `verl:token-mean`, a mode, an alias, or `token_mean@micro-batch`. `samples`: dicts in the canonical
    fields, log-probabilities in nats; without `advantage`, GRPO's is made from rewards. `split`: rank -> micro-batches ->
    sample positions. `divisor`: the constant or the padded width, in tokens. NaN where the framework divides 0 by 0.

    Raises `SettingError` for an unknown rule or a missing divisor, `RolloutError` for samples or a split that do not fit.
    """
    named = rule_named(rule, divisor=divisor)
    frozen = freeze(batch_of(samples), settings_from({"eps_clip": eps_clip, "eps_clip_high": eps_clip_high}).objective)
    if frozen.loss_T is None:
        raise RolloutError("the samples have neither advantage nor reward with group_index, so there is no loss")
    weight_T = named.weights(frozen.step, schedule_of(split, frozen.step.num_samples), 1)
    return float(weight_T @ frozen.loss_T)


__all__ = [
    "DEFAULT_LAYOUTS",
    "TOLERANCE",
    "Audit",
    "AuditLayout",
    "AuditRule",
    "Counterexample",
    "CustomRule",
    "Finding",
    "FrozenBatch",
    "NamedRule",
    "ReducerRule",
    "RuleReport",
    "Split",
    "UnderLayout",
    "audit",
    "batch_of",
    "built_in_batch",
    "deviation",
    "diagnose",
    "extract",
    "freeze",
    "reducer_rule",
    "rule_loss",
    "rule_named",
    "schedule_of",
    "scheduled_layouts",
    "signature_of",
    "smallest_counterexample",
]
