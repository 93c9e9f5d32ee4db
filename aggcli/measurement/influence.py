"""What an aggregation does to a batch: where its weight and its gradient go, and how many tokens really count."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aggcli.measurement.catalogue import LENGTH_BINS, checked
from aggcli.measurement.groups import correct_per_group
from aggcli.measurement.local import MeasureConfig, is_correct, length_bins
from aggcli.measurement.report import Values
from aggcli.measurement.tokens import token_numbers
from aggcli.objective.advantages import distinct_rollouts, group_statistics
from aggcli.objective.step import StepInputs
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, Spread, group_of_rollout

_OF_THE_POLICY_LOSS = ("loss_mask", "log_probs", "old_log_probs", "advantages", "sequence_log_ratio")


def influence(step: RolloutBatch, weight: Tensor | Spread, config: MeasureConfig) -> Values:
    """Shares of the total weight by length, correctness, advantage sign and group outcome, and the effective tokens. `weight`:
    of each token, [T].

    All None where the total weight is 0; a share that the batch cannot give (no rewards, no advantages) is left out.
    """
    weight_S, squares = torch.zeros(step.num_samples, dtype=torch.float64), 0.0
    of_sign = {f"{sign}_advantage": 0.0 for sign in ("positive", "negative", "zero") if step.advantages_T is not None}
    for chunk, sample_C in step.token_chunks():
        weight_C = _of_chunk(weight, chunk, sample_C)
        weight_S.index_add_(0, sample_C, weight_C)
        squares += float(weight_C @ weight_C)
        if step.advantages_T is not None:
            mask_C, advantage_C = step.loss_mask_T[chunk], step.advantages_T[chunk]
            of_sign["positive_advantage"] += _sum_where(weight_C, (advantage_C > 0) & mask_C)
            of_sign["negative_advantage"] += _sum_where(weight_C, (advantage_C < 0) & mask_C)
            of_sign["zero_advantage"] += _sum_where(weight_C, (advantage_C == 0) | ~mask_C)
    total = float(weight_S.sum())
    shares = _shares("weight_share", _by_sample(step, config, weight_S) | of_sign, total)
    return checked({"effective_tokens": total * total / squares if squares else None, **shares})


def _of_chunk(weight: Tensor | Spread, chunk: slice, sample_C: Tensor) -> Tensor:
    """The weights of some tokens, of these samples, float64 [C]."""
    if isinstance(weight, Spread):
        return weight.at(torch.arange(chunk.start, chunk.stop), sample_C).double()
    return weight[chunk].double()


def gradient_shares(inputs: StepInputs, config: MeasureConfig) -> dict[str, Values]:
    """By compared rule: shares of the sum over trained tokens of |w_t * c_t|, c_t = d pg_loss_t / d log-probability, by length,
    correctness, advantage sign, group outcome and, where ratios were measured and the loss clips, on tokens whose clip binds.

    All None where that sum is 0 or not finite; a share that the batch cannot give is left out, and all without advantages.
    """
    step = inputs.step
    if step.advantages_T is None:
        return {rule: {} for rule in inputs.names}
    size_S = {rule: torch.zeros(step.num_samples, dtype=torch.float64) for rule in inputs.names}
    parts: dict[str, dict[str, float]] = {rule: {} for rule in inputs.names}
    for chunk, sample_C in step.token_chunks():
        tokens = {name: inputs.tokens[name][chunk] for name in _OF_THE_POLICY_LOSS if name in inputs.tokens}
        numbers = token_numbers(tokens, config.objective, has_ratio=inputs.has_ratio, with_slopes=True)
        mask_C, advantage_C = tokens["loss_mask"], tokens["advantages"]
        chosen = {"positive_advantage": (advantage_C > 0) & mask_C, "negative_advantage": (advantage_C < 0) & mask_C}
        if "pg_clipfrac" in numbers.values:
            chosen["clipped"] = numbers.values["pg_clipfrac"] > 0
        slope_C = numbers.slopes["pg_loss"].double().abs_()
        for rule in inputs.names:
            size_C = _of_chunk(inputs.weights[rule], chunk, sample_C).abs() * slope_C
            size_S[rule].index_add_(0, sample_C, size_C)
            for part, is_C in chosen.items():
                parts[rule][part] = parts[rule].get(part, 0.0) + _sum_where(size_C, is_C)
    return {
        rule: checked(_shares("gradient_share", {**_by_sample(step, config, of_S), **parts[rule]}, float(of_S.sum())))
        for rule, of_S in size_S.items()
    }


def where_true(value: Tensor, chosen: Tensor) -> Tensor:
    """`value[chosen]`, without the positions of the chosen, which torch would make and which take as much again."""
    return torch.from_numpy(value.numpy()[chosen.numpy()])


def _sum_where(value: Tensor, chosen: Tensor) -> float:
    return float(where_true(value, chosen).sum())


def _shares(kind: str, parts: Mapping[str, float], total: float) -> Values:
    return {f"{kind}/{part}": size / total if total and math.isfinite(total) else None for part, size in parts.items()}


def _by_sample(step: RolloutBatch, config: MeasureConfig, of_S: Tensor) -> dict[str, float]:
    """How much the samples of each length, correctness and group outcome have of a number of each sample."""
    bins_S = length_bins(step.response_length_S, config.max_response_length)
    found = {f"length_{label}": _sum_where(of_S, bins_S == at) for at, label in enumerate(LENGTH_BINS)}
    if step.reward_S is None:
        return found
    correct_S = is_correct(step.reward_S, config.correct_threshold)
    found["correct"] = _sum_where(of_S, correct_S)
    found["incorrect"] = _sum_where(of_S, ~correct_S & ~step.reward_S.isnan())
    if (step.group_S == NO_GROUP).all():
        return found
    rollouts = distinct_rollouts(step.reward_S, step.rollout_S, step.group_S)
    count_P = group_statistics(rollouts).count_P
    right_P = correct_per_group(rollouts, config.correct_threshold)
    group_S = group_of_rollout(step.group_S, step.rollout_S)
    grouped_S, at_S = group_S != NO_GROUP, group_S.clamp(min=0)
    scored_S = grouped_S & (count_P[at_S] > 0)
    found["all_right_groups"] = _sum_where(of_S, scored_S & (right_P[at_S] == count_P[at_S]))
    found["all_wrong_groups"] = _sum_where(of_S, scored_S & (right_P[at_S] == 0))
    return found
