"""Numbers of whole responses that are no sums over tokens: made once for a step, before it is cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.rollouts.batch import RolloutBatch


def sequence_numbers(
    step: RolloutBatch, tokens: Mapping[str, Tensor], objective: ObjectiveConfig, *, has_ratio: bool
) -> dict[str, Tensor]:
    """Of each training sample, over its trained tokens, float64 [S], 0 without any; what the tokens lack is absent.

    `log_ratio`: sum of new - old, nats; `weight`: exp of that, over the largest of its run's step, so that it is at most 1 (an
    effective sample size knows no scale); `clipped`: the share of the tokens at which the clip binds on the ratio
    exp(mean of new - old) of GSPO (Zheng et al., 2025, arXiv:2507.18071); `mismatch`: sum of trainer's - inference engine's
    log-probability, nats.
    """
    found: dict[str, Tensor] = {}
    if has_ratio:
        found["log_ratio"] = _summed(step, tokens, "log_probs", "old_log_probs")
        log_ratio_S, trained_S = found["log_ratio"], step.mask_sum_S
        is_old = tokens["log_probs"] is tokens["old_log_probs"]  # every ratio is 1, and no clip binds there
        if is_old:
            found["weight"] = (trained_S > 0).double()
        else:
            largest_S = _largest(torch.where(trained_S > 0, log_ratio_S, -torch.inf), step.run_S)
            found["weight"] = torch.where(trained_S > 0, torch.exp(log_ratio_S - largest_S), 0.0)
        if "advantages" in tokens:
            tokens_S = trained_S.clamp(min=1)
            clipped_S = log_ratio_S if is_old else _clipped(step, tokens["advantages"], log_ratio_S / tokens_S, objective)
            found["clipped"] = clipped_S / tokens_S
    if "trainer_log_probs" in tokens:
        found["mismatch"] = _summed(step, tokens, "trainer_log_probs", "rollout_log_probs")
    return found


def _summed(step: RolloutBatch, tokens: Mapping[str, Tensor], one: str, other: str) -> Tensor:
    """The sum over each sample's trained tokens of one stream less another, float64 [S]."""
    sum_S = torch.zeros(step.num_samples, dtype=torch.float64)
    if tokens[one] is tokens[other]:
        return sum_S
    for chunk, sample_C in step.token_chunks():
        apart_C = tokens[one][chunk].double() - tokens[other][chunk].double()
        sum_S.index_add_(0, sample_C, torch.where(step.loss_mask_T[chunk], apart_C, 0.0))
    return sum_S


def _clipped(step: RolloutBatch, advantages_T: Tensor, log_ratio_S: Tensor, objective: ObjectiveConfig) -> Tensor:
    """The trained tokens of each sample at which the clip binds on the sample's ratio, float64 [S]."""
    low, high = objective.clip_range
    above_S, below_S = torch.exp(log_ratio_S) > high, torch.exp(log_ratio_S) < low
    binds_S = torch.zeros(step.num_samples, dtype=torch.float64)
    for chunk, sample_C in step.token_chunks():
        advantage_C = advantages_T[chunk]
        binds_C = ((advantage_C > 0) & above_S[sample_C]) | ((advantage_C < 0) & below_S[sample_C])
        binds_S.index_add_(0, sample_C, (binds_C & step.loss_mask_T[chunk]).double())
    return binds_S


def _largest(value_S: Tensor, run_S: Tensor) -> Tensor:
    """The largest of each sample's run, at the sample."""
    largest_R = value_S.new_full((int(run_S.max()) + 1 if run_S.numel() else 0,), -torch.inf)
    return largest_R.scatter_reduce(0, run_S, value_S, "amax")[run_S]
