"""Group statistics of the rewards, and the advantages made from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.errors import RolloutError
from aggcli.rollouts.batch import NO_GROUP, group_of_rollout, is_first

STD_EPSILON = 1e-6
"""Added to a group's standard deviation (GRPO, as in TRL, verl and slime)."""
_EQUAL = 1e-6
"""Rewards of a group within this share of their size are equal up to rounding (float32 rounds at 6e-8)."""


@dataclass(frozen=True)
class DistinctRollouts:
    """One entry per distinct rollout (not per training sample): its reward (NaN = unscored) and its prompt group."""

    reward_G: Tensor
    group_G: Tensor


@dataclass(frozen=True)
class Groups:
    """Reward statistics per prompt group [P], over the scored rollouts of the group, each rollout once.

    `mean_P` is NaN for a group without a scored rollout; `std_P` divides by n-1 and is 0 for fewer than two;
    `flat_P`: at most one scored rollout, or equal rewards up to rounding, so every advantage is exactly 0.
    """

    count_P: Tensor
    mean_P: Tensor
    std_P: Tensor
    flat_P: Tensor


def distinct_rollouts(reward_S: Tensor, rollout_S: Tensor, group_S: Tensor) -> DistinctRollouts:
    """Collapse the training samples of a fan-out into their rollout; groups come from group_index, never from position."""
    first_S = is_first(rollout_S)
    return DistinctRollouts(reward_S[first_S], group_of_rollout(group_S, rollout_S)[first_S])


def group_statistics(rollouts: DistinctRollouts) -> Groups:
    """Count, mean and spread of the rewards of each group; groups may be uneven."""
    counted_G = (rollouts.group_G != NO_GROUP) & ~rollouts.reward_G.isnan()
    reward_G, group_G = rollouts.reward_G[counted_G], rollouts.group_G[counted_G]
    groups = int(rollouts.group_G.max()) + 1 if rollouts.group_G.numel() else 0
    zero_P = torch.zeros(groups, dtype=torch.float64, device=reward_G.device)
    count_P = zero_P.index_add(0, group_G, torch.ones_like(reward_G))
    mean_P = zero_P.index_add(0, group_G, reward_G) / count_P
    squares_P = zero_P.index_add(0, group_G, (reward_G - mean_P[group_G]) ** 2)
    std_P = torch.where(count_P > 1, (squares_P / (count_P - 1).clamp(min=1)).sqrt(), 0.0)
    low_P = zero_P.scatter_reduce(0, group_G, reward_G, "amin", include_self=False)
    high_P = zero_P.scatter_reduce(0, group_G, reward_G, "amax", include_self=False)
    flat_P = are_equal(low_P, high_P)
    return Groups(count_P.long(), mean_P, std_P, flat_P)


def are_equal(low: Tensor, high: Tensor) -> Tensor:
    """Whether the lowest and the highest reward of a group are one reward up to rounding."""
    return high - low <= _EQUAL * torch.maximum(low.abs(), high.abs())


def group_advantages(reward_S: Tensor, rollout_S: Tensor, group_S: Tensor, *, divide_by_std: bool) -> Tensor:
    """Reward minus the group's mean reward, float64 [S]; with `divide_by_std` over the group's (n-1 std + 1e-6), as GRPO.

    A rollout counts once however many training samples it has (all get its advantage). Unscored rollouts stay out of the
    statistics and get 0, as do rollouts without a group, groups of one and groups of equal rewards.
    Sources: DeepSeekMath (GRPO); Dr.GRPO for the form without std. Raises `RolloutError` when a group's spread overflows.
    """
    groups = group_statistics(distinct_rollouts(reward_S, rollout_S, group_S))
    if not torch.isfinite(groups.std_P).all():
        raise RolloutError("rewards are too large for float64: the spread of a group overflows; scale them down")
    known_S = group_of_rollout(group_S, rollout_S)
    scored_S = (known_S != NO_GROUP) & ~reward_S.isnan()
    at_S = torch.where(scored_S, known_S, 0)
    if not groups.count_P.numel():
        return torch.zeros_like(reward_S)
    centred_S = reward_S - groups.mean_P[at_S]
    if divide_by_std:
        centred_S = centred_S / (groups.std_P[at_S] + STD_EPSILON)
    return torch.where(scored_S & ~groups.flat_P[at_S], centred_S, 0.0)
