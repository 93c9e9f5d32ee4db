"""The smallest layout and batch under which a rule is not what it is in one piece: a search, then shrinking."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.auditing.frozen import batch_of, schedule_of
from aggcli.auditing.rules import AuditRule, NamedRule
from aggcli.errors import AggcliError
from aggcli.layout.schedule import Layout, schedule_step
from aggcli.rollouts.batch import RolloutBatch

TOLERANCE = 1e-6
"""Relative deviation of a weight beyond which a layout has changed a rule."""

Samples = tuple[tuple[int, int, int], ...]
"""(Trained tokens, masked tokens after them, prompt group) of each sample."""
Split = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Toy:
    """A tiny batch and a layout. `split`: rank -> micro-batches -> sample positions; `cp`: context-parallel ranks."""

    samples: Samples
    split: Split
    cp: int = 1

    @property
    def size(self) -> tuple[int, ...]:
        """Smaller is simpler: samples first, then ranks, micro-batches, context parallelism, tokens, groups, disorder."""
        order = [at for rank in self.split for micro_batch in rank for at in micro_batch]
        return (
            len(self.samples),
            len(self.split) + sum(len(rank) for rank in self.split) + self.cp,
            sum(trained + 2 * masked for trained, masked, _ in self.samples),
            sum(group for *_, group in self.samples),
            sum(a > b for a, b in itertools.pairwise(order)),
        )


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found: `weights` and `reference` per sample (of its first response token; where a piece is 0/0, NaN at
    its samples alone), `deviation` relative."""

    toy: Toy
    reference: tuple[float, ...]
    weights: tuple[float, ...]
    deviation: float

    @property
    def where(self) -> str:
        """The layout in words: `as micro-batches (0) (1)`."""
        ranks = [" ".join(f"({','.join(map(str, mb))})" for mb in rank) for rank in self.toy.split]
        where = f"on {len(ranks)} ranks as {' | '.join(ranks)}" if len(ranks) > 1 else f"as micro-batches {ranks[0]}"
        return where + (f" with context parallel {self.toy.cp}" if self.toy.cp > 1 else "")

    def __str__(self) -> str:
        sizes = [f"{trained}" + (f"+{masked} masked" if masked else "") for trained, masked, _ in self.toy.samples]
        spread = any(trained and math.isnan(w) for (trained, *_), w in zip(self.toy.samples, self.weights, strict=True))
        empty = [trained == 0 and not spread for trained, _, _ in self.toy.samples]
        broken = any(none and math.isnan(w) for none, w in zip(empty, self.weights, strict=True))
        return (
            f"samples of {', '.join(sizes)} tokens; in one micro-batch a token weighs"
            f" {', '.join(map(_short, self.reference, empty))}; {self.where} it weighs"
            f" {', '.join(map(_short, self.weights, empty))}{', so the loss is NaN' if broken else ''}"
        )

    def as_json(self) -> dict[str, object]:
        names = ("trained_tokens", "masked_tokens", "group_index")
        return {
            "samples": [dict(zip(names, sample, strict=True)) for sample in self.toy.samples],
            "split": self.toy.split,
            "context_parallel": self.toy.cp,
            "reference_weights": self.reference,
            "weights": self.weights,
            "deviation": self.deviation,
            "where": self.where,
            "text": str(self),
        }


def _short(value: float, empty: bool) -> str:
    """`empty`: of a sample without a trained token, where NaN is at such samples alone, and so is 0/0."""
    return ("0/0" if empty else "NaN") if math.isnan(value) else f"{value:.6g}"


def deviation(reference_T: Tensor, weight_T: Tensor) -> float:
    """The largest change of any token's weight, relative to its own, or to the mean weight where that was 0; infinite where
    only one of the two is a number."""
    if torch.isnan(reference_T).any():
        return 0.0 if torch.isnan(weight_T).any() else math.inf
    if torch.isnan(weight_T).any():
        return math.inf
    change_T = (weight_T - reference_T).abs()
    size_T = reference_T.abs()
    mean = size_T.sum() / (size_T > 0).sum().clamp(min=1)
    relative_T = torch.where(change_T > 0, change_T / torch.where(size_T > 0, size_T, mean), 0.0)
    return float(relative_T.max()) if relative_T.numel() else 0.0


def smallest_counterexample(rule: AuditRule, tolerance: float = TOLERANCE) -> Counterexample | None:
    """Search over ranks, accumulation, context parallelism, partition rule and order, then shrink; None if nothing varies."""
    references: dict[Samples, Tensor] = {}
    for toy in _candidates():
        if _varies(rule, toy, tolerance, references) is not None:
            return _shrunk(rule, toy, tolerance, references)
    return None


def _varies(rule: AuditRule, toy: Toy, tolerance: float, references: dict[Samples, Tensor]) -> Counterexample | None:
    """The counterexample that `toy` is, or None."""
    samples = len(toy.samples)
    schedule = schedule_of(toy.split, samples)
    if not rule.can_represent(schedule):
        return None
    step = _batch(toy.samples)
    try:
        if toy.samples not in references:
            references[toy.samples] = rule.weights(step, schedule_of([[range(samples)]], samples), 1)
        reference_T = references[toy.samples]
        weight_T = rule.weights(step, schedule, toy.cp)
    except AggcliError:
        return None
    found = deviation(reference_T, weight_T)
    if not found > tolerance:
        return None
    first = (step.response_length_S.cumsum(0) - step.response_length_S).clamp(max=max(reference_T.numel() - 1, 0))
    weight_S = weight_T[first]
    if isinstance(rule, NamedRule) and bool(torch.isnan(weight_S).any()):
        weight_S = rule.weights_by_piece(step, schedule)
    return Counterexample(toy, tuple(reference_T[first].tolist()), tuple(weight_S.tolist()), found)


@functools.lru_cache(maxsize=256)
def _batch(samples: Samples) -> RolloutBatch:
    return batch_of(
        {
            "response_length": trained + masked,
            "total_length": trained + masked + 1,
            "loss_mask": [1] * trained + [0] * masked,
            "group_index": group,
            "advantage": 1.0 if at % 2 == 0 else -1.0,
        }
        for at, (trained, masked, group) in enumerate(samples)
    )


# -- searching ------------------------------------------------------------------------------------------------------

_LENGTHS = (1, 3, 2, 5, 4, 7)
_DEALS = (("contiguous", 1), ("contiguous", -1), ("interleaved", 1), ("balanced", 1))
"""Partition rule and order of the samples."""


def _candidates() -> Iterator[Toy]:
    """Batches of 2, 3 and 6 samples, with and without a fully masked one, under every kind of layout."""
    for count, masked in itertools.product((2, 3, 6), (False, True)):
        samples = [(length, at % 2, at * 2 // count) for at, length in enumerate(_LENGTHS[:count])]
        if masked:
            samples[1] = (0, samples[1][0], samples[1][2])
        cuts = ((None, 1), (1, 1), (2, 1), (None, 2))  # samples of a micro-batch, context parallelism
        for dp, (size, cp), (rule, order) in itertools.product((1, 2, 3), cuts, _DEALS):
            if dp <= count and (dp > 1 or rule == "contiguous"):
                layout = Layout("", dp, cp, rule, micro_batch_size=size)
                yield Toy(tuple(samples), _dealt(layout, samples, order), cp)


def _dealt(layout: Layout, samples: Sequence[tuple[int, int, int]], order: int) -> Split:
    at = list(range(len(samples)))[::order]
    schedule = schedule_step(layout, [samples[a][0] + samples[a][1] + 1 for a in at])
    return tuple(
        tuple(tuple(at[partition[p]] for p in micro_batch) for micro_batch in rank)
        for partition, rank in zip(schedule.partitions, schedule.micro_batches, strict=True)
    )


# -- shrinking ------------------------------------------------------------------------------------------------------


def _shrunk(rule: AuditRule, toy: Toy, tolerance: float, references: dict[Samples, Tensor]) -> Counterexample:
    """Take the first simpler case that still varies, until there is none."""
    found = _varies(rule, toy, tolerance, references)
    assert found is not None
    while True:
        smaller = sorted({t for t in _moves(found.toy) if t.size < found.toy.size}, key=lambda t: t.size)
        better = next((c for c in (_varies(rule, t, tolerance, references) for t in smaller) if c is not None), None)
        if better is None:
            return found
        found = better


def _moves(toy: Toy) -> Iterator[Toy]:
    count = len(toy.samples)
    for gone in (1, 2):
        for chosen in itertools.combinations(range(count), gone):
            if count - gone >= 1:
                yield _without(toy, chosen)
    for rank, micro_batches in enumerate(toy.split):
        for at in range(len(micro_batches) - 1):
            merged = (*micro_batches[:at], micro_batches[at] + micro_batches[at + 1], *micro_batches[at + 2 :])
            yield dataclasses.replace(toy, split=(*toy.split[:rank], merged, *toy.split[rank + 1 :]))
        if rank + 1 < len(toy.split):
            joined = micro_batches + toy.split[rank + 1]
            yield dataclasses.replace(toy, split=(*toy.split[:rank], joined, *toy.split[rank + 2 :]))
    if toy.cp > 1:
        yield dataclasses.replace(toy, cp=1)
    yield dataclasses.replace(toy, split=_in_order(toy.split))
    for at, (trained, masked, group) in enumerate(toy.samples):
        for changed in ((trained - 1, masked, group), (1, masked, group), (trained, 0, group), (trained, 1, group)):
            if changed[0] >= 0 and changed[0] + changed[1] >= 1:
                yield dataclasses.replace(toy, samples=(*toy.samples[:at], changed, *toy.samples[at + 1 :]))
        yield dataclasses.replace(toy, samples=(*toy.samples[:at], (trained, masked, 0), *toy.samples[at + 1 :]))


def _without(toy: Toy, gone: tuple[int, ...]) -> Toy:
    kept = [at for at in range(len(toy.samples)) if at not in gone]
    renamed = {at: new for new, at in enumerate(kept)}
    ranks = []
    for rank in toy.split:
        cut = tuple(tuple(renamed[at] for at in mb if at in renamed) for mb in rank)
        ranks.append(tuple(mb for mb in cut if mb))
    return Toy(tuple(toy.samples[at] for at in kept), tuple(rank for rank in ranks if rank), toy.cp)


def _in_order(split: Split) -> Split:
    """The same shape, dealt in file order."""
    following = itertools.count()
    return tuple(tuple(tuple(next(following) for _ in mb) for mb in rank) for rank in split)
