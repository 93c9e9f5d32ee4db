"""What is recorded of each training sample, by name: the road from a step that stands out to its samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aggcli.measurement.local import is_correct
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch


def sample_columns(step: RolloutBatch, threshold: float) -> dict[str, list[Any]]:
    """One entry a training sample of the step; None where the source has nothing."""
    groups, rollouts = step.labels.groups, step.labels.rollouts
    reward_S = torch.full((step.num_samples,), torch.nan, dtype=torch.float64) if step.reward_S is None else step.reward_S
    rewards = [None if reward != reward else reward for reward in reward_S.tolist()]
    correct = [
        None if reward is None else right
        for reward, right in zip(rewards, is_correct(reward_S, threshold).tolist(), strict=True)
    ]
    return {
        "sample": step.position_S.tolist(),
        "rollout": [_text(rollouts[r]) if rollouts else str(r) for r in step.rollout_S.tolist()],
        "group": [None if g == NO_GROUP else _text(groups[g]) if groups else str(g) for g in step.group_S.tolist()],
        "response_length": step.response_length_S.tolist(),
        "trained_tokens": step.mask_sum_S().tolist(),
        "reward": rewards,
        "correct": correct,
    }


def weight_of_samples(step: RolloutBatch, weight_T: Tensor) -> list[float]:
    """The total weight of each training sample, in the step's order."""
    zero_S = torch.zeros(step.num_samples, dtype=torch.float64)
    return zero_S.index_add_(0, step.sample_of_token(), weight_T.double()).tolist()


def _text(label: object) -> str:
    """A source's own id as text that can be written, whatever characters it has."""
    return str(label).encode("utf-8", "replace").decode()
