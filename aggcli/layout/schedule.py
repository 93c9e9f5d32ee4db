"""The parallel schedule of one optimizer step, as integers only.

A schedule says which samples each data-parallel rank holds, in which order (`partition`), and how it cuts them into
micro-batches. Invariants, tested: the partitions hold every sample exactly once; every position of a partition is in exactly
one micro-batch; no micro-batch is empty; a micro-batch exceeds its capacity only if it holds a single sample. Ranks may be
idle.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aggcli.errors import SettingError, nearest
from aggcli.layout.balanced import karmarkar_karp

Packs = list[list[int]]


@dataclass(frozen=True)
class Layout:
    """How one optimizer step is spread: `dp<N>[cp<M>][:rule][@tokens|:mb<K>]`, or `recorded`."""

    text: str
    """As the user wrote it; records key a layout by it."""
    dp: int = 1
    cp: int = 1
    rule: str = "first-fit"
    max_tokens: int | None = None
    """Token budget of a micro-batch per context-parallel rank; None: no budget."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch, instead of a budget."""

    @property
    def is_recorded(self) -> bool:
        return self.rule == RECORDED

    @property
    def capacity(self) -> int | None:
        """Tokens that a micro-batch may hold over all its context-parallel ranks."""
        return None if self.max_tokens is None else self.max_tokens * self.cp


@dataclass(frozen=True)
class Schedule:
    """`partitions[r]`: sample positions of data-parallel rank r, in its order; `micro_batches[r]`: lists of positions *in that
    partition*."""

    partitions: tuple[tuple[int, ...], ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return sum(len(of_rank) for of_rank in self.micro_batches)

    @property
    def idle_ranks(self) -> list[int]:
        return [rank for rank, partition in enumerate(self.partitions) if not partition]


RECORDED = "recorded"
MOST_RANKS = 16384
"""A layout of more ranks than this is a slip of the finger."""
_LAYOUT = re.compile(
    r"dp(?P<dp>[0-9]+)(?:cp(?P<cp>[0-9]+))?(?::(?P<rule>(?!mb[0-9])[a-z-]+))?(?:@(?P<tokens>[0-9]+)|:mb(?P<samples>[0-9]+))?"
)


def parse_layout(text: str, *, max_tokens: int | None = None, micro_batch_size: int | None = None) -> Layout:
    """Read `dp<N>[cp<M>][:rule][@tokens|:mb<K>]` or `recorded`; K samples a micro-batch.

    `max_tokens` and `micro_batch_size` hold for layouts that name no budget of their own.
    Raises `SettingError` for any other text, for zero ranks and for an unknown rule.
    """
    if text == RECORDED:
        return Layout(text, rule=RECORDED)
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise SettingError(
            f"layout '{text}': must be dp<N>[cp<M>][:rule][@tokens|:mb<K>], such as dp2cp2:first-fit@160, dp2:balanced:mb4 or"
            " recorded"
        )
    dp, cp, rule = int(match["dp"]), int(match["cp"] or 1), match["rule"] or "first-fit"
    if rule not in PARTITIONERS:
        raise SettingError(f"layout '{text}': unknown partition rule '{rule}'{nearest(rule, PARTITIONERS)}")
    tokens, samples = (None if match[part] is None else int(match[part]) for part in ("tokens", "samples"))
    if min(dp, cp, 1 if tokens is None else tokens, 1 if samples is None else samples) < 1:
        raise SettingError(f"layout '{text}': ranks, token budget and samples of a micro-batch must be at least 1")
    if dp * cp > MOST_RANKS:
        raise SettingError(f"layout '{text}': {dp * cp} ranks; at most {MOST_RANKS} are evaluated")
    if tokens is not None or samples is not None:
        return Layout(text, dp, cp, rule, tokens, samples)
    return Layout(text, dp, cp, rule, max_tokens, micro_batch_size)


def schedule_step(layout: Layout, total_lengths: Sequence[int]) -> Schedule:
    """Schedule the samples of one optimizer step.

    `total_lengths`: prompt and response tokens of each sample, in the order of the file. Raises no errors: more ranks than
    samples leave ranks idle.
    """
    packs_of_rank = PARTITIONERS[layout.rule](layout, total_lengths)
    partitions = tuple(tuple(sample for pack in packs for sample in pack) for packs in packs_of_rank)
    return Schedule(partitions, tuple(_positions(packs) for packs in packs_of_rank))


def split_rollouts(rollouts: Sequence[int], rollouts_per_step: int) -> list[list[int]]:
    """Cut a rollout batch into optimizer steps of `rollouts_per_step` rollouts, in order of first appearance.

    `rollouts`: the rollout of each sample. Returns sample positions per step, in file order; siblings stay together and the
    last step holds what is left, so no rollout is dropped.
    """
    step_of: dict[int, int] = {}
    steps: list[list[int]] = []
    for sample, rollout in enumerate(rollouts):
        at = step_of.setdefault(rollout, len(step_of) // rollouts_per_step)
        if at == len(steps):
            steps.append([])
        steps[at].append(sample)
    return steps


def _positions(packs: Packs) -> tuple[tuple[int, ...], ...]:
    """The packs of a rank as positions in its partition, which is their concatenation."""
    found, start = [], 0
    for pack in packs:
        found.append(tuple(range(start, start + len(pack))))
        start += len(pack)
    return tuple(found)


# -- partition rules ------------------------------------------------------------------------------------------------


def _first_fit(layout: Layout, lengths: Sequence[int]) -> list[Packs]:
    """Pack first, then deal the packs strided: slime's dynamic batching (commit 624b824a)."""
    packs = _pack(layout, range(len(lengths)), lengths)
    _split_until_even(packs, layout.dp, lengths)
    return [packs[rank :: layout.dp] for rank in range(layout.dp)]


def _interleaved(layout: Layout, lengths: Sequence[int]) -> list[Packs]:
    samples = range(len(lengths))
    return [_pack(layout, samples[rank :: layout.dp], lengths) for rank in range(layout.dp)]


def _contiguous(layout: Layout, lengths: Sequence[int]) -> list[Packs]:
    """Equal runs of samples; the first ranks take one more where the count does not divide."""
    share, extra = divmod(len(lengths), layout.dp)
    starts = [rank * share + min(rank, extra) for rank in range(layout.dp + 1)]
    return [_pack(layout, range(starts[r], starts[r + 1]), lengths) for r in range(layout.dp)]


def _balanced(layout: Layout, lengths: Sequence[int]) -> list[Packs]:
    """Even token loads by the largest differencing method."""
    return [_pack(layout, part, lengths) for part in karmarkar_karp(lengths, layout.dp)]


PARTITIONERS: dict[str, Callable[[Layout, Sequence[int]], list[Packs]]] = {
    "first-fit": _first_fit,
    "interleaved": _interleaved,
    "contiguous": _contiguous,
    "balanced": _balanced,
}


# -- micro-batches --------------------------------------------------------------------------------------------------


def _pack(layout: Layout, samples: Sequence[int], lengths: Sequence[int]) -> Packs:
    """Cut `samples` into micro-batches: by count, by token budget, or all in one."""
    if layout.micro_batch_size is not None:
        size = layout.micro_batch_size
        return [list(samples[start : start + size]) for start in range(0, len(samples), size)]
    if layout.capacity is None:
        return [list(samples)] if len(samples) else []
    return first_fit(samples, lengths, layout.capacity)


def first_fit(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> Packs:
    """Each sample, in order, into the first micro-batch with room, else into a new one; a longer one than `capacity` alone.

    A segment tree over the room left finds the first micro-batch with room in logarithmic time.
    """
    packs: Packs = []
    rooms = _FirstRoom(len(samples))
    for sample in samples:
        length = lengths[sample]
        at = rooms.first_with(length)
        if at is None:
            at = len(packs)
            packs.append([])
            rooms.set(at, capacity)
        packs[at].append(sample)
        rooms.set(at, rooms.room(at) - length)
    return packs


class _FirstRoom:
    """A segment tree of maxima: the first slot whose room is at least what is asked."""

    def __init__(self, slots: int) -> None:
        self.width = 1 << max(slots - 1, 0).bit_length()
        self.most = [-1] * (2 * self.width)

    def room(self, slot: int) -> int:
        return self.most[self.width + slot]

    def set(self, slot: int, room: int) -> None:
        node = self.width + slot
        self.most[node] = room
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])

    def first_with(self, length: int) -> int | None:
        if self.most[1] < length:
            return None
        node = 1
        while node < self.width:
            node = 2 * node if self.most[2 * node] >= length else 2 * node + 1
        return node - self.width


def _split_until_even(packs: Packs, dp: int, lengths: Sequence[int]) -> None:
    """Grow the number of micro-batches to a multiple of `dp` by splitting the one with the most tokens (a tie: the later).

    Stops short when only single samples are left; those ranks stay idle.
    """
    heap = [(-_tokens(pack, lengths), -at) for at, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(heap)
    while len(packs) % dp and heap:
        at = -heapq.heappop(heap)[1]
        packs[at], second = _halves(packs[at], lengths)
        packs.append(second)
        for changed in (at, len(packs) - 1):
            if len(packs[changed]) > 1:
                heapq.heappush(heap, (-_tokens(packs[changed], lengths), -changed))


def _halves(pack: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split by falling length, each sample to the half with fewer tokens so far (a tie: the first)."""
    halves: tuple[list[int], list[int]] = ([], [])
    tokens = [0, 0]
    for sample in sorted(pack, key=lambda sample: -lengths[sample]):
        to = 0 if tokens[0] <= tokens[1] else 1
        halves[to].append(sample)
        tokens[to] += lengths[sample]
    return halves


def _tokens(pack: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[sample] for sample in pack)
