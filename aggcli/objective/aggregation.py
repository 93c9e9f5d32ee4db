"""An aggregation mode is a weight per token: `loss = sum_t w_t * l_t` over all response tokens of one optimizer step.

Weights are computed once per optimizer step, before the step is cut into ranks, micro-batches and context-parallel slices.
Each piece then only sums, and only sums cross ranks, so a layout cannot change the loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig, check_divisor
from aggcli.errors import RolloutError, SettingError
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, group_of_rollout, is_first


def step_denominators(batch: RolloutBatch, *, prompt_sums: bool) -> dict[str, Tensor]:
    """Every count that a weight may divide by, over the whole optimizer step and per run; float64 [S], one entry a sample.

    `rollout_mask_sums`: masked-in tokens of the sample's rollout, all its training samples together (n_r);
    `num_rollouts`: rollouts of the sample's run, fully masked ones included (N); `num_tokens`: masked-in tokens of the run (T).
    Only with `prompt_sums`: `prompt_mask_sums`, masked-in tokens of the sample's prompt group (T_p), and `num_prompts` (P).

    Raises `RolloutError` naming the sample when `prompt_sums` is asked for and a sample has no group_index.
    """
    tokens_S = batch.mask_sum_S()
    found = {
        "rollout_mask_sums": _summed(tokens_S, batch.rollout_S),
        "num_rollouts": _summed(is_first(batch.rollout_S).long(), batch.run_S),
        "num_tokens": _summed(tokens_S, batch.run_S),
    }
    if prompt_sums:
        need_groups(batch)
        group_S = group_of_rollout(batch.group_S, batch.rollout_S)
        found["prompt_mask_sums"] = _summed(tokens_S, group_S)
        found["num_prompts"] = _summed(is_first(group_S).long(), batch.run_S)
    return {name: count_S.double() for name, count_S in found.items()}


def need_groups(batch: RolloutBatch) -> None:
    """Raise `RolloutError` naming the first sample without a group_index; prompt_mean never invents a group."""
    for sample in (batch.group_S == NO_GROUP).nonzero().flatten().tolist()[:1]:
        raise RolloutError(
            f"{batch.sample_name(sample)}: group_index is missing and prompt_mean needs one for every sample;"
            " add it, give --group-size to group consecutive rollouts, or choose another --loss-aggregation"
        )


def _summed(value_S: Tensor, key_S: Tensor) -> Tensor:
    """The sum of `value_S` over the samples that share a key, at each of those samples."""
    keys = int(key_S.max()) + 1 if key_S.numel() else 0
    return torch.zeros(keys, dtype=torch.int64, device=value_S.device).index_add_(0, key_S, value_S)[key_S]


def sample_weights(
    mode: str, denominators: Mapping[str, Tensor], *, divisor: float | None = None, prompt_mean_scale: str = "rollouts"
) -> Tensor:
    """The weight of a masked-in token of each sample, float64 [S].

    | mode | weight | source |
    |---|---|---|
    | sample_mean | 1/(N*n_r) | GRPO (DeepSeekMath), rollout-level "sample average" |
    | prompt_mean | 1/(N*T_p), or 1/(P*T_p) with scale `prompts` | DAPO eq. 8 as printed; ScaleRL's "prompt average" |
    | token_mean | 1/T | global token mean |
    | constant | 1/(N*L) | Dr.GRPO |

    A denominator of 0 (nothing masked in) gives weight 0, never NaN. Raises `SettingError` for an unknown mode or a
    `constant` without a positive finite divisor, and KeyError when `denominators` lack a count that the mode divides by.
    """
    rollouts = denominators["num_rollouts"]
    if mode == "sample_mean":
        return _inverse(rollouts * denominators["rollout_mask_sums"])
    if mode == "prompt_mean":
        outer = denominators["num_prompts"] if prompt_mean_scale == "prompts" else rollouts
        return _inverse(outer * denominators["prompt_mask_sums"])
    if mode == "token_mean":
        return _inverse(denominators["num_tokens"])
    if mode == "constant":
        if divisor is None:
            raise SettingError("--loss-aggregation constant needs --loss-aggregation-divisor L, such as the response limit")
        check_divisor(divisor)
        return _inverse(rollouts * divisor)
    raise SettingError(f"unknown loss aggregation '{mode}'")


def _inverse(count: Tensor) -> Tensor:
    return torch.where(count > 0, 1.0 / count, 0.0)


def token_weights(
    mode: str,
    batch: RolloutBatch,
    denominators: Mapping[str, Tensor],
    objective: ObjectiveConfig,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The weight of every response token, `dtype` [T]; exactly 0 where the loss mask is 0."""
    weight_S = sample_weights(
        mode,
        denominators,
        divisor=objective.loss_aggregation_divisor,
        prompt_mean_scale=objective.prompt_mean_scale,
    )
    return spread(weight_S.to(dtype), batch)


def spread(value_S: Tensor, batch: RolloutBatch) -> Tensor:
    """A per-sample value at each masked-in token of the sample, 0 at the others; [T]."""
    length_S = torch.nn.functional.pad(batch.response_length_S.int(), (1, 0))  # slot 0, of no tokens, is for the masked-out
    slot_T = torch.repeat_interleave(length_S, output_size=batch.loss_mask_T.numel()).mul_(batch.loss_mask_T)
    return torch.nn.functional.pad(value_S, (1, 0)).index_select(0, slot_T)


def aggregate(loss_T: Tensor, weights_T: Tensor) -> Tensor:
    """`sum_t w_t * l_t`; both [T], of one dtype. What is masked out must have been selected away from `loss_T` before."""
    return torch.dot(loss_T, weights_T)
