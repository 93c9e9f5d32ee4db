"""The batch type: ragged, flat, frozen, and checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from aggcli.errors import RolloutError, some
from aggcli.rollouts.fields import TRUNCATED

NO_GROUP = -1
"""`group_S` of a sample whose `group_index` is missing; never a group of its own."""

TOKEN_FIELDS = (
    "log_probs_T",
    "old_log_probs_T",
    "ref_log_probs_T",
    "rollout_log_probs_T",
    "entropy_T",
    "advantages_T",
)
"""Optional per-token numbers; each is None where the source has none."""
SAMPLE_FIELDS = ("response_length_S", "total_length_S", "rollout_S", "group_S", "run_S", "position_S", "reward_S")
"""Numbers of each sample; rewards are None where the source has none."""
TOKENS_OF_CHUNK = 2**16
"""Response tokens looked at together where each is looked at for itself, which bounds what the look takes in memory."""


@dataclass(frozen=True)
class RecordedLayout:
    """The data-parallel layout that a dump says was really used (slime train dumps).

    `steps[i].partitions[r]` are the sample positions (in the batch) of rank r in optimizer step i, in the rank's own order;
    `steps[i].micro_batches[r]` are lists of positions *in that partition*.
    """

    steps: tuple[RecordedStep, ...]


@dataclass(frozen=True)
class RecordedStep:
    """One optimizer step of a recorded layout; see `RecordedLayout`."""

    partitions: tuple[tuple[int, ...], ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Labels:
    """The source's own names for dense ids: `rollout_id`s by dense rollout, `group_index`es by dense group."""

    rollouts: tuple[object, ...] = ()
    groups: tuple[object, ...] = ()


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """The samples of one recorded or sampled rollout step.

    Per sample (`_S`, int64 unless said): `response_length_S` and `total_length_S` in tokens; `rollout_S` dense rollout ids
    (siblings of a fan-out share one); `group_S` dense prompt-group ids or `NO_GROUP`; `run_S` the run of a stack;
    `reward_S` float64, NaN where a sample is unscored, None where the source has no rewards at all; `position_S` the
    sample's position in the source, for messages.

    Per response token (`_T`, flat): `loss_mask_T` bool, and the optional floats of `TOKEN_FIELDS` (log-probabilities in
    nats of the current policy, of the policy that sampled, of the reference and of the inference engine; entropy in nats;
    recorded advantages). `token_ids_U` are prompt and response ids, flat over total lengths. `length_unit` is what lengths
    count: tokens, or chars or words of a dump that holds text only. `grouping` says how groups were found where the source does
    not name them, None where it does.

    Raises `RolloutError` (a ValueError) naming step, sample and field when the parts contradict each other, when a
    trained token has a number that is not finite, or when siblings of a rollout differ in reward, group or run.
    """

    response_length_S: Tensor
    total_length_S: Tensor
    loss_mask_T: Tensor
    rollout_S: Tensor
    group_S: Tensor
    run_S: Tensor
    position_S: Tensor
    reward_S: Tensor | None = None
    log_probs_T: Tensor | None = None
    old_log_probs_T: Tensor | None = None
    ref_log_probs_T: Tensor | None = None
    rollout_log_probs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    advantages_T: Tensor | None = None
    token_ids_U: Tensor | None = None
    status_S: tuple[str | None, ...] | None = None
    labels: Labels = Labels()
    recorded: RecordedLayout | None = None
    length_unit: str = "tokens"
    grouping: str | None = None
    name: str = "batch"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_lengths()
        self._check_finite()
        self._check_siblings()

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        return self.response_length_S.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def token_fields(self) -> dict[str, Tensor]:
        """The optional per-token fields that this batch has."""
        present = {field: getattr(self, field) for field in TOKEN_FIELDS}
        return {field: value for field, value in present.items() if value is not None}

    @property
    def truncated_S(self) -> Tensor | None:
        """1 where the source says that the response was cut at the response limit, 0 where that it was not, NaN where it
        does not say; float64 [S]. None where it says nothing of any."""
        if self.status_S is None:
            return None
        said = [math.nan if status is None else float(status == TRUNCATED) for status in self.status_S]
        return torch.tensor(said, dtype=torch.float64, device=self.loss_mask_T.device)

    # -- ragged arithmetic ------------------------------------------------------------------------------------------

    def sample_of_token(self) -> Tensor:
        """`sample_T`: the sample each response token belongs to."""
        return torch.repeat_interleave(
            torch.arange(self.num_samples, device=self.loss_mask_T.device),
            self.response_length_S,
            output_size=self.loss_mask_T.numel(),
        )

    def token_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The response tokens, some at a time: where they are in the flat arrays, and the sample that each belongs to."""
        ends_S = self.response_length_S.cumsum(0)
        for chunk in chunks(self.loss_mask_T.numel()):
            first, last = torch.searchsorted(ends_S, ends_S.new_tensor([chunk.start, chunk.stop - 1]), right=True).tolist()
            held_S = ends_S[first : last + 1].clamp(max=chunk.stop).diff(prepend=ends_S.new_tensor([chunk.start]))
            samples_S = torch.arange(first, last + 1, device=held_S.device)
            yield chunk, torch.repeat_interleave(samples_S, held_S, output_size=chunk.stop - chunk.start)

    @cached_property
    def mask_sum_S(self) -> Tensor:
        """Trained tokens of each sample, int64."""
        return self.count_S(self.loss_mask_T)

    def count_S(self, is_counted_T: Tensor) -> Tensor:
        """Response tokens of each sample where `is_counted_T` is true, int64."""
        ends_S = self.response_length_S.cumsum(0)
        counted_S = torch.zeros_like(ends_S)
        for chunk in chunks(is_counted_T.numel()):
            counted_C = torch.nn.functional.pad(is_counted_T[chunk].cumsum(0, dtype=torch.int32), (1, 0))
            counted_S += counted_C[(ends_S - chunk.start).clamp(0, chunk.stop - chunk.start)]  # up to the sample's end
        return counted_S.diff(prepend=counted_S.new_zeros(1))

    def select(self, positions: Tensor, name: str | None = None) -> RolloutBatch:
        """The samples at `positions` (int64, any order), with their tokens; rollout and group ids stay as they are.

        All samples in their order share this batch's memory.
        """
        if torch.equal(positions, torch.arange(self.num_samples, device=positions.device)):
            return self.derived(recorded=None, name=name or self.name)
        at_T = ragged_positions(self.response_length_S, positions)
        chosen: dict[str, object] = {field: value[at_T] for field, value in self.token_fields.items()}
        if self.reward_S is not None:
            chosen["reward_S"] = self.reward_S[positions]
        if self.token_ids_U is not None:
            chosen["token_ids_U"] = self.token_ids_U[ragged_positions(self.total_length_S, positions)]
        if self.status_S is not None:
            chosen["status_S"] = tuple(self.status_S[i] for i in positions.tolist())
        return self.derived(
            response_length_S=self.response_length_S[positions],
            total_length_S=self.total_length_S[positions],
            loss_mask_T=self.loss_mask_T[at_T],
            rollout_S=self.rollout_S[positions],
            group_S=self.group_S[positions],
            run_S=self.run_S[positions],
            position_S=self.position_S[positions],
            recorded=None,
            name=name or self.name,
            **chosen,
        )

    def split(self, samples: Sequence[int]) -> list[RolloutBatch]:
        """So many samples at a time, which share this batch's memory; rollout and group ids stay as they are."""
        tokens, total = (
            [int(of_S.sum()) for of_S in length_S.split(samples)] for length_S in (self.response_length_S, self.total_length_S)
        )
        sizes = (
            dict.fromkeys(SAMPLE_FIELDS, samples)
            | dict.fromkeys(("loss_mask_T", *TOKEN_FIELDS), tokens)
            | {"token_ids_U": total}
        )
        values = {field: getattr(self, field) for field in sizes}
        parts: dict[str, Sequence[object]] = {
            field: torch.split_with_sizes(value, sizes[field]) for field, value in values.items() if value is not None
        }
        if self.status_S is not None:
            parts["status_S"] = [
                self.status_S[end - count : end] for end, count in zip(accumulate(samples), samples, strict=True)
            ]
        return [
            self.derived(recorded=None, **{field: of_parts[at] for field, of_parts in parts.items()})
            for at in range(len(samples))
        ]

    def derived(self, **changes: object) -> RolloutBatch:
        """A batch made of parts of this one, which have been checked: nothing is checked again. Numbers that are new belong
        into `dataclasses.replace`."""
        made = object.__new__(RolloutBatch)
        made.__dict__.update(self.__dict__ | changes)
        if not changes.keys().isdisjoint(("loss_mask_T", "response_length_S")):
            made.__dict__.pop("mask_sum_S", None)
        return made

    # -- names for messages -----------------------------------------------------------------------------------------

    def sample_name(self, sample: int) -> str:
        """`step 0 (0.pt), sample 3`: how messages call the sample at this position of the batch."""
        return f"{self.name}, sample {int(self.position_S[sample])}"

    def token_name(self, token: int) -> str:
        """`step 0 (0.pt), sample 3, token 5`: the same for a flat position of a response token."""
        ends_S = self.response_length_S.cumsum(0)
        sample = int(torch.searchsorted(ends_S, token, right=True))
        start = int(ends_S[sample] - self.response_length_S[sample])
        return f"{self.sample_name(sample)}, token {token - start}"

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_shapes(self) -> None:
        samples, tokens = self.num_samples, int(self.response_length_S.sum())
        for field in SAMPLE_FIELDS:
            value = getattr(self, field)
            if value is not None and value.shape != (samples,):
                raise RolloutError(f"{self.name}: {field} has shape {tuple(value.shape)}, expected ({samples},)")
        for field in ("loss_mask_T", *TOKEN_FIELDS):
            value = getattr(self, field)
            if value is not None and value.shape != (tokens,):
                raise RolloutError(f"{self.name}: {field} has shape {tuple(value.shape)}, expected ({tokens},) tokens")
        if self.loss_mask_T.dtype != torch.bool:
            raise RolloutError(f"{self.name}: loss_mask_T has dtype {self.loss_mask_T.dtype}, expected bool")
        if self.token_ids_U is not None and self.token_ids_U.numel() != int(self.total_length_S.sum()):
            raise RolloutError(f"{self.name}: token_ids_U does not hold total_length ids for each sample")

    def _check_lengths(self) -> None:
        short_S = (self.total_length_S < self.response_length_S) | (self.response_length_S < 0)
        for sample in short_S.nonzero().flatten().tolist()[:1]:
            raise RolloutError(
                f"{self.sample_name(sample)}: response_length {int(self.response_length_S[sample])} and total_length"
                f" {int(self.total_length_S[sample])}: 0 <= response_length <= total_length must hold"
            )

    def _check_finite(self) -> None:
        for field, value_T in self.token_fields.items():
            token = first_where(value_T.numel(), lambda part, of=value_T: self.loss_mask_T[part] & ~torch.isfinite(of[part]))
            if token is not None:
                raise RolloutError(
                    f"{self.token_name(token)}: {field.removesuffix('_T')} is"
                    f" {float(value_T[token])} where loss_mask is 1; mask the token out or drop the sample"
                )

    def _check_siblings(self) -> None:
        if _are_of_one_sample(self.rollout_S):
            return
        first_S = first_of_rollout(self.rollout_S)
        checks: list[tuple[str, Tensor]] = [("run", self.run_S == self.run_S[first_S])]
        if self.reward_S is not None:
            mine, theirs = self.reward_S, self.reward_S[first_S]
            checks.append(("reward", (mine == theirs) | (mine.isnan() & theirs.isnan())))
        group_S = group_of_rollout(self.group_S, self.rollout_S)
        checks.append(("group_index", (self.group_S == NO_GROUP) | (self.group_S == group_S)))
        for field, same_S in checks:
            for sample in (~same_S).nonzero().flatten().tolist()[:1]:
                rollout = int(self.rollout_S[sample])
                siblings = self.position_S[self.rollout_S == rollout].tolist()
                label = self.labels.rollouts[rollout] if self.labels.rollouts else rollout
                raise RolloutError(
                    f"{self.name}: samples {some(siblings)} share rollout_id {label} but differ in {field};"
                    " siblings must agree, and rollout_id must be unique in the step"
                )


@dataclass(frozen=True, eq=False)
class Spread:
    """A number a sample, `value_S`, at the sample's response tokens where `mask_T` is 1 (without a mask, at each), and 0 at the
    others: a flat [T] array that is made where it is asked for, whole or in part, and not kept."""

    value_S: Tensor
    response_length_S: Tensor
    mask_T: Tensor | None

    def whole(self) -> Tensor:
        """The array, [T]."""
        if self.mask_T is None:  # positions of 4 bytes each are half of what torch makes of its own accord
            return self.value_S.index_select(0, torch.repeat_interleave(self.response_length_S.int()))
        length_S = torch.nn.functional.pad(self.response_length_S.int(), (1, 0))  # slot 0, of no tokens, is for the masked-out
        slot_T = torch.repeat_interleave(length_S, output_size=self.mask_T.numel()).mul_(self.mask_T)
        return torch.nn.functional.pad(self.value_S, (1, 0)).index_select(0, slot_T)

    def at(self, token_N: Tensor, sample_N: Tensor) -> Tensor:
        """The array at these flat positions of tokens, of these samples, [N]."""
        value_N = self.value_S[sample_N]
        return value_N if self.mask_T is None else torch.where(self.mask_T[token_N], value_N, 0.0)


def chunks(tokens: int) -> Iterator[slice]:
    """So many flat positions, some at a time."""
    return (slice(start, min(start + TOKENS_OF_CHUNK, tokens)) for start in range(0, tokens, TOKENS_OF_CHUNK))


def first_where(tokens: int, found: Callable[[slice], Tensor]) -> int | None:
    """The first flat position at which `found`, asked for some positions at a time, is true; None where it is nowhere."""
    for chunk in chunks(tokens):
        if (found_C := found(chunk)).any():
            return chunk.start + int(found_C.nonzero()[0])
    return None


def ragged_positions(length_S: Tensor, chosen: Tensor) -> Tensor:
    """Flat positions of the elements of the `chosen` rows of a ragged array with row lengths `length_S`."""
    start_S = length_S.cumsum(0) - length_S
    length_C = length_S[chosen]
    total = int(length_C.sum())
    offset_C = start_S[chosen] - (length_C.cumsum(0) - length_C)
    return torch.arange(total, device=length_S.device) + torch.repeat_interleave(offset_C, length_C, output_size=total)


def first_of_rollout(rollout_S: Tensor) -> Tensor:
    """For each sample the position of the first sample of its rollout."""
    samples_S = torch.arange(rollout_S.numel(), device=rollout_S.device)
    return _reduced_over_rollout(samples_S, rollout_S, "amin")


def is_first(key_S: Tensor) -> Tensor:
    """True at the first sample of each key, such as each rollout."""
    return first_of_rollout(key_S) == torch.arange(key_S.numel(), device=key_S.device)


def distinct(key_S: Tensor) -> int:
    """How many keys there are, such as rollouts: dense ids, not below 0."""
    return int(torch.bincount(key_S).count_nonzero())


def group_of_rollout(group_S: Tensor, rollout_S: Tensor) -> Tensor:
    """For each sample the prompt group of its rollout: `NO_GROUP` only where no sibling names one."""
    return _reduced_over_rollout(group_S, rollout_S, "amax")


def _reduced_over_rollout(value_S: Tensor, rollout_S: Tensor, reduce: str) -> Tensor:
    if _are_of_one_sample(rollout_S):
        return value_S
    value_G = torch.zeros(int(rollout_S.max()) + 1, dtype=torch.int64, device=rollout_S.device)
    return value_G.scatter_reduce(0, rollout_S, value_S, reduce=reduce, include_self=False)[rollout_S]


def _are_of_one_sample(rollout_S: Tensor) -> bool:
    """Whether each rollout has one sample, and they are numbered as those stand."""
    return torch.equal(rollout_S, torch.arange(rollout_S.numel(), device=rollout_S.device))
