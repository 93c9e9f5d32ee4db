"""Metrics over the trained rollouts alone, where a step has rollouts without a trained token.

A mean over rollouts counts such a rollout as 0, as slime's log does; these stand beside it.
"""

from __future__ import annotations

import math

import torch

from aggcli.measurement.catalogue import BESIDE, OVER_TRAINED, checked
from aggcli.measurement.local import MeasureConfig
from aggcli.measurement.report import Values
from aggcli.measurement.tokens import token_numbers
from aggcli.objective.step import StepInputs
from aggcli.objective.weights import masked_weights
from aggcli.rules import CUSTOM


def over_trained_rollouts(inputs: StepInputs, measuring: MeasureConfig) -> dict[str, Values]:
    """By compared rule: each metric of `BESIDE` by the weights that its rule would give if the step held only the rollouts with
    a trained token. Left out where those are the weights in force, and under a reducer or a rule that varies with the layout.
    """
    step = inputs.step
    if not (0 < int(step.mask_sum_S().count_nonzero()) < step.num_samples):
        return {}
    tokens_G = torch.zeros(int(step.rollout_S.max()) + 1, dtype=torch.int64).index_add_(0, step.rollout_S, step.mask_sum_S())
    trained_S = tokens_G[step.rollout_S] > 0
    if trained_S.all():
        return {}
    kept = step.select(trained_S.nonzero().flatten())
    kept_T = trained_S[step.sample_of_token()]
    numbers = token_numbers(inputs.tokens, measuring.objective, has_ratio=inputs.has_ratio, with_slopes=False).values
    moved: dict[str, torch.Tensor | None] = {}
    found: dict[str, Values] = {}
    for name, weighing in inputs.weighing.items():
        found[name] = {}
        rules = {rule.name: rule for rule in weighing.rules}
        for metric in BESIDE:
            rule = rules[weighing.names.of(metric)]
            if metric not in numbers or rule == CUSTOM or rule.depends_on_layout:
                continue
            if rule.name not in moved:
                weight_T = masked_weights(rule, kept)
                moved[rule.name] = None if torch.equal(weight_T, inputs.weights[rule.name][kept_T]) else weight_T
            if (weight_T := moved[rule.name]) is not None:
                value = float(weight_T @ numbers[metric][kept_T].double())
                found[name][metric + OVER_TRAINED] = value if math.isfinite(value) else None
    return {name: checked(values) for name, values in found.items()}
