"""What an aggregation does to a batch: where its weight goes, and how many tokens really count."""

from __future__ import annotations

import torch
from torch import Tensor

from aggcli.measurement.catalogue import LENGTH_BINS, checked
from aggcli.measurement.groups import correct_per_group
from aggcli.measurement.local import MeasureConfig, is_correct, length_bins
from aggcli.measurement.report import Values
from aggcli.objective.advantages import distinct_rollouts, group_statistics
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, group_of_rollout


def influence(step: RolloutBatch, weight_T: Tensor, config: MeasureConfig) -> Values:
    """Shares of the total weight by length, correctness, advantage sign and group outcome, and the effective tokens.

    All None where the total weight is 0; a share that the batch cannot give (no rewards, no advantages) is left out.
    """
    weight_T = weight_T.double()
    weight_S = torch.zeros(step.num_samples, dtype=torch.float64)
    for chunk, sample_C in step.token_chunks():
        weight_S.index_add_(0, sample_C, weight_T[chunk])
    total, squares = float(weight_S.sum()), float(weight_T @ weight_T)
    values: Values = {"effective_tokens": total * total / squares if squares else None}

    def share(name: str, chosen: Tensor, of: Tensor) -> None:
        values[f"weight_share/{name}"] = float(where_true(of, chosen).sum()) / total if total else None

    bins_S = length_bins(step.response_length_S, config.max_response_length)
    for at, label in enumerate(LENGTH_BINS):
        share(f"length_{label}", bins_S == at, weight_S)
    if step.reward_S is not None:
        correct_S = is_correct(step.reward_S, config.correct_threshold)
        share("correct", correct_S, weight_S)
        share("incorrect", ~correct_S & ~step.reward_S.isnan(), weight_S)
        _group_shares(step, config, weight_S, share)
    if step.advantages_T is not None:
        mask_T, advantages_T = step.loss_mask_T, step.advantages_T
        share("positive_advantage", (advantages_T > 0).logical_and_(mask_T), weight_T)
        share("negative_advantage", (advantages_T < 0).logical_and_(mask_T), weight_T)
        share("zero_advantage", (advantages_T != 0).logical_and_(mask_T).logical_not_(), weight_T)
    return checked(values)


def where_true(value: Tensor, chosen: Tensor) -> Tensor:
    """`value[chosen]`, without the positions of the chosen, which torch would make and which take as much again."""
    return torch.from_numpy(value.numpy()[chosen.numpy()])


def _group_shares(step: RolloutBatch, config: MeasureConfig, weight_S: Tensor, share) -> None:
    if step.reward_S is None or (step.group_S == NO_GROUP).all():
        return
    rollouts = distinct_rollouts(step.reward_S, step.rollout_S, step.group_S)
    count_P = group_statistics(rollouts).count_P
    right_P = correct_per_group(rollouts, config.correct_threshold)
    group_S = group_of_rollout(step.group_S, step.rollout_S)
    grouped_S, at_S = group_S != NO_GROUP, group_S.clamp(min=0)
    scored_S = grouped_S & (count_P[at_S] > 0)
    share("all_right_groups", scored_S & (right_P[at_S] == count_P[at_S]), weight_S)
    share("all_wrong_groups", scored_S & (right_P[at_S] == 0), weight_S)
