"""Numbers that need whole groups: they come from the global view and are the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from aggcli.layout.views import GlobalView
from aggcli.measurement.local import is_correct
from aggcli.measurement.report import Values
from aggcli.objective.advantages import DistinctRollouts, distinct_rollouts, group_statistics
from aggcli.rollouts.batch import NO_GROUP, group_of_rollout, is_first


def group_values(view: GlobalView, threshold: float, runs: int = 1) -> list[Values]:
    """Of each run: zero-variance, all-right and all-wrong groups, and pass@k; empty without rewards or without samples, and the
    spread of its rewards alone without groups."""
    if view.raw_reward_S is None:
        return [{} for _ in range(runs)]
    rollouts = distinct_rollouts(view.raw_reward_S, view.rollout_S, view.group_S)
    run_G, grouped_G = view.run_S[is_first(view.rollout_S)], rollouts.group_G != NO_GROUP
    groups = group_statistics(rollouts)
    run_P = torch.zeros_like(groups.count_P).scatter(0, rollouts.group_G[grouped_G], run_G[grouped_G])
    scored_P = groups.count_P > 0
    right_P = correct_per_group(rollouts, threshold)
    flat_P = groups.flat_P if view.has_advantage_S is None else ~_any_in_group(view, view.has_advantage_S, len(groups.flat_P))
    wrong_P = scored_P & (right_P == 0)
    counted = {
        "groups": scored_P,
        "zero_variance_groups": flat_P & scored_P,
        "all_right_groups": scored_P & (right_P == groups.count_P),
        "all_wrong_groups": wrong_P,
        "all_wrong_groups_with_advantage": wrong_P & ~flat_P,
    }
    of_runs = {name: torch.bincount(run_P[is_P], minlength=runs).tolist() for name, is_P in counted.items()}
    scored_G, samples_R = ~rollouts.reward_G.isnan(), torch.bincount(view.run_S, minlength=runs).tolist()
    has_groups_R = torch.bincount(run_G[grouped_G], minlength=runs).tolist()
    found: list[Values] = []
    for run in range(runs):
        values: Values = {"raw_reward_batch_std": _std(rollouts.reward_G[scored_G & (run_G == run)])} if samples_R[run] else {}
        if has_groups_R[run]:
            own_P = scored_P & (run_P == run)
            values |= {name: of_run[run] for name, of_run in of_runs.items()}
            values |= pass_at(groups.count_P[own_P].tolist(), right_P[own_P].tolist())
        found.append(values)
    return found


def _any_in_group(view: GlobalView, chosen_S: torch.Tensor, groups: int) -> torch.Tensor:
    """Whether a sample of each prompt group is among the chosen, bool [P]."""
    group_S = group_of_rollout(view.group_S, view.rollout_S)
    return torch.bincount(group_S[chosen_S & (group_S != NO_GROUP)], minlength=groups) > 0


def _std(reward_G: torch.Tensor) -> float | None:
    return float(reward_G.std()) if reward_G.numel() > 1 else None


def correct_per_group(rollouts: DistinctRollouts, threshold: float) -> torch.Tensor:
    """Correct rollouts of each prompt group, int64 [P]."""
    grouped_G = rollouts.group_G != NO_GROUP
    correct_G = is_correct(rollouts.reward_G, threshold)[grouped_G].long()
    groups = int(rollouts.group_G.max()) + 1 if rollouts.group_G.numel() else 0
    return torch.zeros(groups, dtype=torch.int64).index_add_(0, rollouts.group_G[grouped_G], correct_G)


def pass_at(counts: Sequence[int], rights: Sequence[int]) -> Values:
    """pass@1, pass@2, pass@4, and on by doubling to the first k that covers the largest group.

    `counts`, `rights`: scored and correct rollouts of each group. Mean over groups of `1 - C(n-c, k)/C(n, k)` (Chen et al.,
    2021, eq. 1). Groups with fewer than k rollouts are left out and counted; None where every group is.
    """
    values: Values = {}
    k = 1
    while counts:
        chances = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in zip(counts, rights, strict=True) if n >= k]
        values[f"pass@{k}"] = math.fsum(chances) / len(chances) if chances else None
        if len(chances) < len(counts):
            values[f"pass@{k}/groups_left_out"] = len(counts) - len(chances)
        if k >= max(4, *counts):
            return values
        k *= 2
    return values
