"""Global and local views of one optimizer step.

A field belongs to exactly one view. `GlobalView` is the same on every rank. `LocalView` is what one rank holds, taken with
its partition, in the order of its other per-sample lists; nothing local is ever indexed by a global position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.layout.context_parallel import owner_of_tokens
from aggcli.layout.schedule import Schedule
from aggcli.rollouts.batch import RolloutBatch, ragged_positions


@dataclass(frozen=True, eq=False)
class GlobalView:
    """Fields that need whole groups: the raw rewards of the whole rollout batch (pass@k), one entry a training sample.

    `has_advantage_S`: whether a trained token of the sample has an advantage that is not 0; None without advantages.
    """

    raw_reward_S: Tensor | None
    rollout_S: Tensor
    group_S: Tensor
    has_advantage_S: Tensor | None = None

    @classmethod
    def of(cls, batch: RolloutBatch) -> GlobalView:
        """The view of a rollout batch, whose advantages are already set."""
        has_S = None
        if batch.advantages_T is not None:
            counted_T = batch.loss_mask_T & (batch.advantages_T != 0)
            has_S = torch.zeros_like(batch.rollout_S).index_add_(0, batch.sample_of_token(), counted_T.long()) > 0
        return cls(batch.reward_S, batch.rollout_S, batch.group_S, has_S)


@dataclass(frozen=True, eq=False)
class LocalView:
    """What rank (dp_rank, cp_rank) holds of one optimizer step.

    Per sample, in partition order [S]: `sample_S`, its position in the step; `local_raw_reward_S` (None without rewards),
    `truncated_S` (1, 0, or NaN where the source does not say; None where it says nothing),
    `response_length_S`, `total_length_S`, `mask_sum_S` (trained tokens of the whole sample, over all context-parallel ranks),
    `rollout_share_S` (1 over the number of training samples of its rollout), `micro_batch_S`. Per token, only the tokens this
    rank computes, micro-batch after micro-batch and sample after sample [T]: `tokens`, by field name; `weights`, by aggregation
    rule; `step_position_T`, positions in the step's flat arrays. `order_S` lists the samples in the order of the tokens, and
    `token_count_S` how many tokens each of those has here.

    `counts_samples` is true on one context-parallel rank of each data-parallel rank, so that per-sample numbers are
    counted once however many ranks share a sequence.
    """

    dp_rank: int
    cp_rank: int
    sample_S: Tensor
    local_raw_reward_S: Tensor | None
    truncated_S: Tensor | None
    response_length_S: Tensor
    total_length_S: Tensor
    mask_sum_S: Tensor
    rollout_share_S: Tensor
    tokens: dict[str, Tensor]
    weights: dict[str, Tensor]
    order_S: Tensor
    token_count_S: Tensor
    step_position_T: Tensor
    micro_batch_S: Tensor
    num_micro_batches: int
    counts_samples: bool


def cut(
    step: RolloutBatch,
    schedule: Schedule,
    cp: int,
    *,
    tokens: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    only: int | None = None,
) -> list[LocalView]:
    """Cut one optimizer step into the local views of all ranks, data-parallel rank by rank, context-parallel within.

    `tokens`, `weights`: the flat [T] arrays to hand out, by name. Idle ranks get empty views. `only`: the view of this rank
    alone.
    """
    owner_T = torch.from_numpy(owner_of_tokens(step.total_length_S.numpy(), step.response_length_S.numpy(), cp))
    truncated_S = step.truncated_S
    mask_sum_S, share_S = step.mask_sum_S(), rollout_share(step.rollout_S)
    views = []
    for dp_rank, (partition, micro_batches) in enumerate(zip(schedule.partitions, schedule.micro_batches, strict=True)):
        if only is not None and only // cp != dp_rank:
            continue
        held_S = torch.tensor(partition, dtype=torch.int64)
        order_S = torch.tensor([at for micro_batch in micro_batches for at in micro_batch], dtype=torch.int64)
        position_T = ragged_positions(step.response_length_S, held_S[order_S])
        sample_T = torch.repeat_interleave(torch.arange(order_S.numel()), step.response_length_S[held_S[order_S]])
        for cp_rank in range(cp) if only is None else (only % cp,):
            mine_T = owner_T[position_T] == cp_rank
            at_T = position_T[mine_T]
            views.append(
                LocalView(
                    dp_rank=dp_rank,
                    cp_rank=cp_rank,
                    sample_S=held_S,
                    local_raw_reward_S=None if step.reward_S is None else step.reward_S[held_S],
                    truncated_S=None if truncated_S is None else truncated_S[held_S],
                    response_length_S=step.response_length_S[held_S],
                    total_length_S=step.total_length_S[held_S],
                    mask_sum_S=mask_sum_S[held_S],
                    rollout_share_S=share_S[held_S],
                    tokens={name: value_T[at_T] for name, value_T in tokens.items()},
                    weights={rule: weight_T[at_T] for rule, weight_T in weights.items()},
                    order_S=order_S,
                    token_count_S=torch.bincount(sample_T[mine_T], minlength=order_S.numel()),
                    step_position_T=at_T,
                    micro_batch_S=_micro_batch_of(order_S, micro_batches),
                    num_micro_batches=len(micro_batches),
                    counts_samples=cp_rank == 0,
                )
            )
    return views


def _micro_batch_of(order_S: Tensor, micro_batches: Sequence[Sequence[int]]) -> Tensor:
    """The micro-batch of each sample, in partition order."""
    sizes_M = torch.tensor([len(micro_batch) for micro_batch in micro_batches], dtype=torch.int64)
    found_S = torch.empty_like(order_S)
    found_S[order_S] = torch.repeat_interleave(torch.arange(len(micro_batches)), sizes_M)
    return found_S


def rollout_share(rollout_S: Tensor) -> Tensor:
    """1 over the number of training samples of the sample's rollout, float64; sums to 1 over a rollout."""
    return 1.0 / torch.bincount(rollout_S).double()[rollout_S] if rollout_S.numel() else rollout_S.double()
