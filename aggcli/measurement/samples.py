"""What is recorded of each training sample, by name: the road from a step that stands out to its samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from aggcli.measurement.local import is_correct
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, group_of_rollout, is_first


def sample_columns(step: RolloutBatch, threshold: float) -> dict[str, list[Any]]:
    """One entry a training sample of the step; None where the source has nothing."""
    groups, rollouts = step.labels.groups, step.labels.rollouts
    reward_S = torch.full((step.num_samples,), torch.nan, dtype=torch.float64) if step.reward_S is None else step.reward_S
    rewards = [None if reward != reward else reward for reward in reward_S.tolist()]
    correct = [
        None if reward is None else right
        for reward, right in zip(rewards, is_correct(reward_S, threshold).tolist(), strict=True)
    ]
    truncated_S = step.truncated_S
    cut = [None] * step.num_samples if truncated_S is None else [None if x != x else bool(x) for x in truncated_S.tolist()]
    return {
        "sample": step.position_S.tolist(),
        "rollout": [_text(rollouts[r]) if rollouts else str(r) for r in step.rollout_S.tolist()],
        "group": [None if g == NO_GROUP else _text(groups[g]) if groups else str(g) for g in step.group_S.tolist()],
        "response_length": step.response_length_S.tolist(),
        "trained_tokens": step.mask_sum_S.tolist(),
        "reward": rewards,
        "correct": correct,
        "truncated": cut,
        **_of_groups(step, reward_S),
        "advantage": _advantages(step),
    }


def _of_groups(step: RolloutBatch, reward_S: Tensor) -> dict[str, list[Any]]:
    """Of each sample's prompt group in the step: its rollouts, and the mean and spread of their raw rewards."""
    group_S, first_S = group_of_rollout(step.group_S, step.rollout_S), is_first(step.rollout_S)
    of_group: dict[int, list[float]] = {}
    for group, reward in zip(group_S[first_S].tolist(), reward_S[first_S].tolist(), strict=True):
        of_group.setdefault(group, []).append(reward)
    counts = {group: len(rewards) for group, rewards in of_group.items()}
    scored = {group: [reward for reward in rewards if reward == reward] for group, rewards in of_group.items()}
    means = {group: math.fsum(rewards) / len(rewards) for group, rewards in scored.items() if rewards}
    spreads = {group: max(rewards) - min(rewards) for group, rewards in scored.items() if rewards}
    for found in (counts, means, spreads):
        found.pop(NO_GROUP, None)
    groups = group_S.tolist()
    return {
        "group_rollouts": [counts.get(group) for group in groups],
        "group_reward": [means.get(group) for group in groups],
        "group_reward_spread": [spreads.get(group) for group in groups],
    }


def _advantages(step: RolloutBatch) -> list[float | None]:
    """The mean advantage of each sample's trained tokens, which is that of each where all have one; None without any."""
    if step.advantages_T is None:
        return [None] * step.num_samples
    sum_S = torch.zeros(step.num_samples, dtype=torch.float64)
    for chunk, sample_C in step.token_chunks():
        sum_S.index_add_(0, sample_C, torch.where(step.loss_mask_T[chunk], step.advantages_T[chunk].double(), 0.0))
    tokens = step.mask_sum_S.tolist()
    return [total / count if count else None for total, count in zip(sum_S.tolist(), tokens, strict=True)]


def weight_of_samples(step: RolloutBatch, weight_T: Tensor) -> list[float]:
    """The total weight of each training sample, in the step's order."""
    weight_S = torch.zeros(step.num_samples, dtype=torch.float64)
    for chunk, sample_C in step.token_chunks():
        weight_S.index_add_(0, sample_C, weight_T[chunk].double())
    return weight_S.tolist()


def _text(label: object) -> str:
    """A source's own id as text that can be written, whatever characters it has."""
    return str(label).encode("utf-8", "replace").decode()
