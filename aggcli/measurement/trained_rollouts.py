"""Metrics over the trained rollouts alone, where a step has rollouts without a trained token.

A mean over rollouts counts such a rollout as 0, as slime's log does; these stand beside it.
"""

from __future__ import annotations

import math

import torch

from aggcli.measurement.catalogue import BESIDE, OVER_TRAINED, checked
from aggcli.measurement.influence import where_true
from aggcli.measurement.local import MeasureConfig
from aggcli.measurement.report import Values
from aggcli.measurement.tokens import token_numbers
from aggcli.objective.step import StepInputs
from aggcli.objective.weights import masked_weights
from aggcli.rollouts.batch import TOKEN_FIELDS, Spread, chunks
from aggcli.rules import CUSTOM


def over_trained_rollouts(inputs: StepInputs, measuring: MeasureConfig) -> dict[str, Values]:
    """By compared rule: each metric of `BESIDE` by the weights that its rule would give if the step held only the rollouts with
    a trained token. Left out where those are the weights in force, and under a reducer or a rule that varies with the layout.
    """
    step, tokens_S = inputs.step, inputs.step.mask_sum_S
    if not (0 < int(tokens_S.count_nonzero()) < step.num_samples):
        return {}
    tokens_G = torch.zeros(int(step.rollout_S.max()) + 1, dtype=torch.int64).index_add_(0, step.rollout_S, tokens_S)
    trained_S = tokens_G[step.rollout_S] > 0
    if trained_S.all():
        return {}
    lean = step.derived(**dict.fromkeys((*(field for field in TOKEN_FIELDS if field != "advantages_T"), "token_ids_U")))
    kept = lean.select(trained_S.nonzero().flatten())  # what weights are made of
    kept_T = Spread(trained_S, step.response_length_S, None).whole()
    moved: dict[str, Spread | None] = {}
    found: dict[str, Values] = {name: {} for name in inputs.weighing}
    first = _numbers(inputs, next(chunks(kept_T.numel())), measuring)
    for metric in [metric for metric in BESIDE if metric in first]:
        value_K: torch.Tensor | None = None
        for name, weighing in inputs.weighing.items():
            rule = {rule.name: rule for rule in weighing.rules}[weighing.names.of(metric)]
            if rule == CUSTOM or rule.depends_on_layout:
                continue
            if rule.name not in moved:
                weight = masked_weights(rule, kept)
                is_same = torch.equal(weight.whole(), where_true(inputs.weight_T(rule.name), kept_T))
                moved[rule.name] = None if is_same else weight
            if (weight := moved[rule.name]) is None:
                continue
            value_K = _kept(metric, inputs, kept_T, measuring, first) if value_K is None else value_K
            value = float(weight.whole() @ value_K)
            found[name][metric + OVER_TRAINED] = value if math.isfinite(value) else None
    return {name: checked(values) for name, values in found.items()}


def _kept(
    metric: str, inputs: StepInputs, kept_T: torch.Tensor, measuring: MeasureConfig, first: dict[str, torch.Tensor]
) -> torch.Tensor:
    """A metric's per-token numbers at the kept tokens, float64. `first`: those of the first tokens, by metric."""
    found_K = torch.empty(int(kept_T.sum()), dtype=torch.float64)
    at = 0
    for chunk in chunks(kept_T.numel()):
        numbers = _numbers(inputs, chunk, measuring) if chunk.start else first
        kept_C = where_true(numbers[metric], kept_T[chunk])
        found_K[at : at + kept_C.numel()] = kept_C
        at += kept_C.numel()
    return found_K


def _numbers(inputs: StepInputs, chunk: slice, measuring: MeasureConfig) -> dict[str, torch.Tensor]:
    """The per-token numbers of some tokens, by metric."""
    tokens = {name: value_T[chunk] for name, value_T in inputs.tokens.items()}
    return token_numbers(tokens, measuring.objective, has_ratio=inputs.has_ratio, with_slopes=False).values
