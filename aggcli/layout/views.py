"""Global and local views of one optimizer step.

A field belongs to exactly one view. `GlobalView` is the same on every rank. `LocalView` is what one rank holds, taken with
its partition, in the order of its other per-sample lists; nothing local is ever indexed by a global position. Ranks that are
evaluated in one process may share a view, for speed: nothing in it is added up across them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggcli.layout.context_parallel import owner_of_tokens
from aggcli.layout.schedule import Schedule
from aggcli.rollouts.batch import RolloutBatch, Spread, ragged_positions

TOKENS_OF_PIECE = 2**16
"""Response tokens measured at a time: some hundred bytes each are in memory for as long."""

Array = TypeVar("Array", Tensor, Tensor | Spread)


@dataclass(frozen=True, eq=False)
class GlobalView:
    """Fields that need whole groups: the raw rewards of the whole rollout batch (pass@k), one entry a training sample. The runs
    of a stack have no group in common.

    `has_advantage_S`: whether a trained token of the sample has an advantage that is not 0; None without advantages.
    """

    raw_reward_S: Tensor | None
    rollout_S: Tensor
    group_S: Tensor
    run_S: Tensor
    has_advantage_S: Tensor | None = None

    @classmethod
    def of(cls, batch: RolloutBatch) -> GlobalView:
        """The view of a rollout batch, whose advantages are already set."""
        has_S = None
        if batch.advantages_T is not None:
            has_S = batch.count_S(batch.loss_mask_T & (batch.advantages_T != 0)) > 0
        return cls(batch.reward_S, batch.rollout_S, batch.group_S, batch.run_S, has_S)


class Rank(NamedTuple):
    """A rank of a layout: its share of one run's step. `run`: the run's place in a stack."""

    run: int
    dp_rank: int
    cp_rank: int


@dataclass(frozen=True, eq=False)
class LocalView:
    """What ranks hold of one optimizer step: one rank, or several that share nothing, each number with the rank it is of.

    `ranks`: which, with how many micro-batches each. Per sample, rank after rank and in partition order [S]: `rank_S`, whose
    it is, and `micro_batch_S`, both from 0 over these ranks; `sample_S`, its position in the rollouts that the step is of;
    `local_raw_reward_S` (None without rewards), `truncated_S` (1, 0, or NaN where the source does not say; None where it says
    nothing), `response_length_S`, `mask_sum_S` (trained tokens of the whole sample, over all context-parallel ranks),
    `rollout_share_S` (1 over the number of training samples of its rollout), `token_count_S` (how many of its tokens are
    here). Per token, only the tokens that the rank computes, sample after sample [T]: `tokens`, by field name; `weights`, by
    aggregation rule, or in a stack by what they weigh. `sequences`: numbers of whole samples [S], by name.

    `counted_S` is 1 on one context-parallel rank of each data-parallel rank and 0 on the others, so that per-sample numbers
    are counted once however many ranks share a sequence.
    """

    ranks: dict[Rank, int]
    rank_S: Tensor
    micro_batch_S: Tensor
    sample_S: Tensor
    local_raw_reward_S: Tensor | None
    truncated_S: Tensor | None
    response_length_S: Tensor
    mask_sum_S: Tensor
    rollout_share_S: Tensor
    counted_S: Tensor
    token_count_S: Tensor
    tokens: dict[str, Tensor]
    weights: dict[str, Tensor]
    sequences: dict[str, Tensor]


class WholeStep:
    """An optimizer step that views are cut from. `tokens`, `weights`: the flat [T] arrays to hand out, by name; `sequences`:
    those of a number a sample, [S]. The runs of a stack stand one after the other."""

    def __init__(
        self,
        step: RolloutBatch,
        tokens: Mapping[str, Tensor],
        weights: Mapping[str, Tensor | Spread],
        sequences: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.step, self.tokens, self.weights, self.sequences = step, tokens, weights, sequences
        self.truncated_S = step.truncated_S
        self.mask_sum_S, self.share_S = step.mask_sum_S, rollout_share(step.rollout_S)

    def under(self, weights: Mapping[str, Tensor | Spread]) -> WholeStep:
        """The same step with other weights."""
        made = copy.copy(self)
        made.weights = weights
        return made

    def view(self, shares: Sequence[_Share], cp: int, cp_ranks: Sequence[int]) -> LocalView:
        """What these context-parallel ranks hold of these shares; it has the arrays of the step itself, as they stand, where
        that is all of it in its order."""
        step = self.step
        held = np.concatenate([share.sample_S + share.start for share in shares])
        is_everything = cp == 1 and np.array_equal(held, np.arange(step.num_samples))
        held_S, at_T, count_S = torch.from_numpy(held), None, step.response_length_S
        if not is_everything:
            at_T, count_S = ragged_positions(step.response_length_S, held_S), step.response_length_S[held_S]
            if cp > 1:
                owner_T = torch.from_numpy(owner_of_tokens(step.total_length_S[held_S].numpy(), count_S.numpy(), cp))
                sample_T = torch.repeat_interleave(torch.arange(held_S.numel()), count_S)
                mine = [(owner_T == cp_rank).nonzero().flatten() for cp_rank in cp_ranks]
                at_T = at_T[torch.cat(mine)]
                count_S = torch.cat([torch.bincount(sample_T[mine_T], minlength=held_S.numel()) for mine_T in mine])
                held_S = held_S.repeat(len(cp_ranks))

        def of_samples(value_S: Tensor) -> Tensor:
            return value_S if is_everything else value_S[held_S]

        def of_tokens(value: Tensor | Spread) -> Tensor:
            if at_T is None:
                return value if isinstance(value, Tensor) else value.whole()
            if isinstance(value, Tensor):
                return value[at_T]
            return value.at(at_T, torch.repeat_interleave(held_S, count_S, output_size=at_T.numel()))

        owners = [(cp_rank, share) for cp_rank in cp_ranks for share in shares]
        first = np.cumsum([0, *(share.num_micro_batches for _, share in owners)]).tolist()
        return LocalView(
            ranks={Rank(share.run, share.dp_rank, cp_rank): share.num_micro_batches for cp_rank, share in owners},
            rank_S=torch.from_numpy(np.repeat(np.arange(len(owners)), [len(share.sample_S) for _, share in owners])),
            micro_batch_S=torch.from_numpy(
                np.concatenate([share.micro_batch_S + start for (_, share), start in zip(owners, first, strict=False)])
            ),
            sample_S=of_samples(step.position_S),
            local_raw_reward_S=None if step.reward_S is None else of_samples(step.reward_S),
            truncated_S=None if self.truncated_S is None else of_samples(self.truncated_S),
            response_length_S=of_samples(step.response_length_S),
            mask_sum_S=of_samples(self.mask_sum_S),
            rollout_share_S=of_samples(self.share_S),
            counted_S=torch.from_numpy(np.repeat([float(cp_rank == 0) for cp_rank in cp_ranks], held.size)),
            token_count_S=count_S,
            tokens=_each_once(self.tokens, of_tokens),
            weights=_each_once(self.weights, of_tokens),
            sequences={name: of_samples(value_S) for name, value_S in self.sequences.items()},
        )


def cut(whole: WholeStep, schedules: Sequence[Schedule], cp: int) -> list[LocalView]:
    """Cut one optimizer step into the local views of all ranks, each by itself: data-parallel rank by rank, context-parallel
    within. `schedules`: of each run of the step. Idle ranks get empty views."""
    return [whole.view([share], cp, [cp_rank]) for share in _shares(whole.step, schedules) for cp_rank in range(cp)]


def cut_out(whole: WholeStep, schedules: Sequence[Schedule], cp: int, rank: int) -> LocalView:
    """The view of one rank alone, of all runs."""
    own = [share for share in _shares(whole.step, schedules) if share.dp_rank == rank // cp]
    return whole.view(own, cp, [rank % cp])


def cut_in_pieces(
    whole: WholeStep, schedules: Sequence[Schedule], cp: int, *, tokens_of_piece: int = TOKENS_OF_PIECE
) -> Iterator[Iterator[LocalView]]:
    """What `cut` gives, joined, without a second copy of the step: some ranks at a time, and some of their samples at a time.

    Ranks that hold at most `tokens_of_piece` response tokens together come as one piece; a rank that holds more comes by
    itself, in pieces of consecutive samples of its partition, of about as many tokens. Pieces are made when they are asked
    for, and each is of all context-parallel ranks. Ranks that are idle are there, and empty.
    """
    lengths = whole.step.response_length_S.numpy()
    together: list[_Share] = []
    tokens = 0
    for share in _shares(whole.step, schedules):
        own = int(lengths[share.sample_S + share.start].sum())
        if together and tokens + own > tokens_of_piece:
            yield _pieces(whole, together, cp, tokens_of_piece)
            together, tokens = [], 0
        together.append(share)
        tokens += own
    yield _pieces(whole, together, cp, tokens_of_piece)


def _pieces(whole: WholeStep, shares: Sequence[_Share], cp: int, tokens: int) -> Iterator[LocalView]:
    if len(shares) > 1:
        yield whole.view(shares, cp, range(cp))
        return
    (share,) = shares
    ends_S = whole.step.response_length_S.numpy()[share.sample_S + share.start].cumsum()
    bounds = [0, *(np.diff((ends_S - 1).clip(0) // tokens).nonzero()[0] + 1), len(ends_S)]
    for start, stop in pairwise(bounds):
        sample_S, micro_batch_S = share.sample_S[start:stop], share.micro_batch_S[start:stop]
        yield whole.view([replace(share, sample_S=sample_S, micro_batch_S=micro_batch_S)], cp, range(cp))


@dataclass(frozen=True, eq=False)
class _Share:
    """The samples of a data-parallel rank of a run, or some of them: their positions in the run's step, which is `start`
    samples into the stack's, and the micro-batch of each."""

    run: int
    start: int
    dp_rank: int
    sample_S: NDArray[np.int64]
    micro_batch_S: NDArray[np.int64]
    num_micro_batches: int


def _shares(step: RolloutBatch, schedules: Sequence[Schedule]) -> Iterator[_Share]:
    starts = np.searchsorted(step.run_S.numpy(), np.arange(len(schedules))).tolist()
    for run, (start, schedule) in enumerate(zip(starts, schedules, strict=True)):
        for dp_rank, (partition, micro_batches) in enumerate(zip(schedule.partitions, schedule.micro_batches, strict=True)):
            micro_batch_S = np.full(len(partition), -1)
            for at, micro_batch in enumerate(micro_batches):
                micro_batch_S[list(micro_batch)] = at
            sample_S = np.array(partition, dtype=np.int64)
            yield _Share(run, start, dp_rank, sample_S, micro_batch_S, len(micro_batches))


def _each_once(arrays: Mapping[str, Array], taken: Callable[[Array], Tensor]) -> dict[str, Tensor]:
    """What is taken of each array; once of one that has several names."""
    found = {id(array): array for array in arrays.values()}
    made = {at: taken(array) for at, array in found.items()}
    return {name: made[id(array)] for name, array in arrays.items()}


def rollout_share(rollout_S: Tensor) -> Tensor:
    """1 over the number of training samples of the sample's rollout, float64; sums to 1 over a rollout."""
    return 1.0 / torch.bincount(rollout_S).double()[rollout_S] if rollout_S.numel() else rollout_S.double()
