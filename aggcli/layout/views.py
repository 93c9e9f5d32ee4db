"""Global and local views of one optimizer step.

A field belongs to exactly one view. `GlobalView` is the same on every rank. `LocalView` is what one rank holds, taken with
its partition, in the order of its other per-sample lists; nothing local is ever indexed by a global position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from aggcli.layout.context_parallel import owner_of_tokens
from aggcli.layout.schedule import Schedule
from aggcli.rollouts.batch import RolloutBatch, Spread, ragged_positions

TOKENS_OF_PIECE = 2**17
"""Response tokens measured at a time: some hundred bytes each are in memory for as long."""


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
            has_S = batch.count_S(batch.loss_mask_T & (batch.advantages_T != 0)) > 0
        return cls(batch.reward_S, batch.rollout_S, batch.group_S, has_S)


@dataclass(frozen=True, eq=False)
class LocalView:
    """What rank (dp_rank, cp_rank) holds of one optimizer step.

    Per sample, in partition order [S]: `sample_S`, its position in the step; `local_raw_reward_S` (None without rewards),
    `truncated_S` (1, 0, or NaN where the source does not say; None where it says nothing),
    `response_length_S`, `total_length_S`, `mask_sum_S` (trained tokens of the whole sample, over all context-parallel ranks),
    `rollout_share_S` (1 over the number of training samples of its rollout), `micro_batch_S`. Per token, only the tokens this
    rank computes, micro-batch after micro-batch and sample after sample [T]: `tokens`, by field name; `weights`, by aggregation
    rule; `step_position_T`, positions in the step's flat arrays. `sequences`: numbers of whole samples, by name, in partition
    order. `order_S` lists the samples in the order of the tokens, and
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
    sequences: dict[str, Tensor]
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
    weights: Mapping[str, Tensor | Spread],
    sequences: Mapping[str, Tensor] = MappingProxyType({}),
    only: int | None = None,
) -> list[LocalView]:
    """Cut one optimizer step into the local views of all ranks, data-parallel rank by rank, context-parallel within.

    `tokens`, `weights`: the flat [T] arrays to hand out, by name; `sequences`: those of a number a sample, [S]. Idle ranks get
    empty views. `only`: the view of this rank alone.
    """
    whole = _Whole(step, tokens, weights, sequences)
    return [
        view
        for held in _held(schedule)
        if only is None or only // cp == held.dp_rank
        for view in whole.views(held, cp, range(cp) if only is None else (only % cp,))
    ]


def cut_in_pieces(
    step: RolloutBatch,
    schedule: Schedule,
    cp: int,
    *,
    tokens: Mapping[str, Tensor],
    weights: Mapping[str, Tensor | Spread],
    sequences: Mapping[str, Tensor] = MappingProxyType({}),
    tokens_of_piece: int = TOKENS_OF_PIECE,
) -> Iterator[Iterator[list[LocalView]]]:
    """What `cut` gives, without a second copy of the step: data-parallel rank by rank, some samples at a time.

    Each rank's pieces hold consecutive samples of its partition, of about `tokens_of_piece` response tokens together, and are
    made when they are asked for; a piece is one view for each context-parallel rank. An idle rank has one piece, empty.
    """
    whole = _Whole(step, tokens, weights, sequences)
    for held in _held(schedule):
        ends_S = step.response_length_S[held.sample_S].cumsum(0)
        piece_S = (ends_S - 1).clamp(min=0) // tokens_of_piece
        sizes = torch.unique_consecutive(piece_S, return_counts=True)[1].tolist() or [0]
        yield (whole.views(piece, cp, range(cp)) for piece in held.split(sizes))


@dataclass(frozen=True, eq=False)
class _Held:
    """The samples of a data-parallel rank, or some of them, as `LocalView` names them."""

    dp_rank: int
    sample_S: Tensor
    order_S: Tensor
    micro_batch_S: Tensor
    num_micro_batches: int

    def split(self, sizes: Sequence[int]) -> Iterator[_Held]:
        """So many samples at a time, in the order of the partition; the tokens of each piece are in that order too."""
        for sample_S, micro_batch_S in zip(self.sample_S.split(sizes), self.micro_batch_S.split(sizes), strict=True):
            yield _Held(self.dp_rank, sample_S, torch.arange(sample_S.numel()), micro_batch_S, self.num_micro_batches)


def _held(schedule: Schedule) -> Iterator[_Held]:
    for dp_rank, (partition, micro_batches) in enumerate(zip(schedule.partitions, schedule.micro_batches, strict=True)):
        order_S = torch.tensor([at for micro_batch in micro_batches for at in micro_batch], dtype=torch.int64)
        held_S = torch.tensor(partition, dtype=torch.int64)
        yield _Held(dp_rank, held_S, order_S, _micro_batch_of(order_S, micro_batches), len(micro_batches))


class _Whole:
    """The step that views are cut from."""

    def __init__(
        self,
        step: RolloutBatch,
        tokens: Mapping[str, Tensor],
        weights: Mapping[str, Tensor | Spread],
        sequences: Mapping[str, Tensor],
    ) -> None:
        self.step, self.tokens, self.weights, self.sequences = step, tokens, weights, sequences
        self.truncated_S = step.truncated_S
        self.mask_sum_S, self.share_S = step.mask_sum_S(), rollout_share(step.rollout_S)

    def views(self, held: _Held, cp: int, cp_ranks: Sequence[int]) -> list[LocalView]:
        step, held_S = self.step, held.sample_S
        in_order_S = held_S[held.order_S]
        position_T = ragged_positions(step.response_length_S, in_order_S)
        total_S, length_S = step.total_length_S[in_order_S], step.response_length_S[in_order_S]
        owner_T = torch.from_numpy(owner_of_tokens(total_S.numpy(), length_S.numpy(), cp))
        sample_T = torch.repeat_interleave(torch.arange(in_order_S.numel()), length_S)
        views = []
        for cp_rank in cp_ranks:
            mine_T = owner_T == cp_rank
            at_T = position_T[mine_T]
            views.append(
                LocalView(
                    dp_rank=held.dp_rank,
                    cp_rank=cp_rank,
                    sample_S=held_S,
                    local_raw_reward_S=None if step.reward_S is None else step.reward_S[held_S],
                    truncated_S=None if self.truncated_S is None else self.truncated_S[held_S],
                    response_length_S=step.response_length_S[held_S],
                    total_length_S=step.total_length_S[held_S],
                    mask_sum_S=self.mask_sum_S[held_S],
                    rollout_share_S=self.share_S[held_S],
                    tokens={name: value_T[at_T] for name, value_T in self.tokens.items()},
                    weights={rule: _taken(weight, at_T, in_order_S, sample_T[mine_T]) for rule, weight in self.weights.items()},
                    sequences={name: value_S[held_S] for name, value_S in self.sequences.items()},
                    order_S=held.order_S,
                    token_count_S=torch.bincount(sample_T[mine_T], minlength=in_order_S.numel()),
                    step_position_T=at_T,
                    micro_batch_S=held.micro_batch_S,
                    num_micro_batches=held.num_micro_batches,
                    counts_samples=cp_rank == 0,
                )
            )
        return views


def _taken(weight: Tensor | Spread, at_N: Tensor, sample_S: Tensor, which_N: Tensor) -> Tensor:
    """Weights at these flat positions; `sample_S[which_N]` are the samples that they belong to."""
    return weight.at(at_N, sample_S[which_N]) if isinstance(weight, Spread) else weight[at_N]


def _micro_batch_of(order_S: Tensor, micro_batches: Sequence[Sequence[int]]) -> Tensor:
    """The micro-batch of each sample, in partition order."""
    sizes_M = torch.tensor([len(micro_batch) for micro_batch in micro_batches], dtype=torch.int64)
    found_S = torch.empty_like(order_S)
    found_S[order_S] = torch.repeat_interleave(torch.arange(len(micro_batches)), sizes_M)
    return found_S


def rollout_share(rollout_S: Tensor) -> Tensor:
    """1 over the number of training samples of the sample's rollout, float64; sums to 1 over a rollout."""
    return 1.0 / torch.bincount(rollout_S).double()[rollout_S] if rollout_S.numel() else rollout_S.double()
