"""The data-parallel layout that a slime train dump says was really used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise

from aggcli.rollouts.batch import RecordedLayout, RecordedStep
from aggcli.rollouts.fields import plain

Pieces = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]  # one rank in one optimizer step: (partition, micro-batches)


def recorded_layout(shards: object, positions: Sequence[int]) -> RecordedLayout | None:
    """The layout of `dp_shards`, with samples named by their place in `positions`, the batch's rollout positions.

    `num_microbatches[i]` consecutive micro-batches of each rank belong to optimizer step i. None when there are no
    shards or they do not hold every sample of the batch in exactly one micro-batch.
    """
    place = {position: i for i, position in enumerate(positions)}
    if not isinstance(shards, (list, tuple)) or not all(isinstance(shard, Mapping) for shard in shards):
        return None
    try:
        ranked = sorted(shards, key=lambda shard: _integers([shard["data_parallel_rank"]]))
        by_rank = [_steps_of_rank(shard, place) for shard in ranked]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None  # not the shape that slime writes
    held = [sample for steps in by_rank for partition, _ in steps for sample in partition]
    same_steps = len({len(steps) for steps in by_rank}) == 1
    if not same_steps or sorted(held) != list(range(len(positions))):
        return None
    return RecordedLayout(
        tuple(
            RecordedStep(tuple(partition for partition, _ in ranks), tuple(micro_batches for _, micro_batches in ranks))
            for ranks in zip(*by_rank, strict=True)
        )
    )


def _steps_of_rank(shard: Mapping[str, object], place: Mapping[int, int]) -> list[Pieces]:
    """For each optimizer step the rank's samples, in its own order, and its micro-batches as positions in those.

    Raises ValueError or KeyError when the micro-batches are not a partition of the rank's samples.
    """
    partition = [place[position] for position in _integers(shard["partition"])]
    micro_batches = [_integers(indices) for indices in _list(shard["micro_batch_indices"])]
    numbers = _integers(shard["num_microbatches"])
    if sum(numbers) != len(micro_batches) or min(numbers, default=0) < 0:
        raise ValueError("num_microbatches does not add up to the micro-batches")
    if sorted(chain.from_iterable(micro_batches)) != list(range(len(partition))):
        raise ValueError("the micro-batches do not hold each of the rank's samples once")
    steps = []
    for start, end in pairwise(accumulate(numbers, initial=0)):
        of_step = [indices for indices in micro_batches[start:end] if indices]
        local = sorted(chain.from_iterable(of_step))
        place_in_step = {index: i for i, index in enumerate(local)}
        steps.append(
            (
                tuple(partition[index] for index in local),
                tuple(tuple(place_in_step[index] for index in indices) for indices in of_step),
            )
        )
    return steps


def _list(value: object) -> list:
    value = plain(value)
    if not isinstance(value, (list, tuple)):
        raise TypeError("not a list")
    return list(value)


def _integers(value: object) -> list[int]:
    items = [plain(item) for item in _list(value)]
    if not all(type(item) is int for item in items):
        raise TypeError("not whole numbers")
    return items  # pyright: ignore[reportReturnType]  # checked above
