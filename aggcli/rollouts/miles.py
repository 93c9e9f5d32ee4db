"""miles' train dumps (`--save-debug-train-data`): one file per rank, `{rollout_id, rank, rollout_data, ...}`.

The files of one rollout are one step. Tensor- and context-parallel ranks hold the same samples as their neighbours, so
ranks with the same partition are one data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, some
from aggcli.rollouts.batch import RecordedLayout, RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import plain, shown, truncation
from aggcli.rollouts.known import TOKEN_LISTS
from aggcli.rollouts.slime import TRAIN_FIELDS, join_rollout, samples_of
from aggcli.rollouts.slime_layout import recorded_layout
from aggcli.rollouts.steps import Step
from aggcli.rollouts.torch_files import load

STREAMS = (*TOKEN_LISTS, "advantage")
GLOBAL = ("raw_reward", "total_lengths")
"""Lists that may hold the whole rollout, not only the rank's samples."""
LACKS = "miles' train dumps hold no group_index: give the rollout dump of the same rollout beside them"


@dataclass(frozen=True)
class Shard:
    """What one data-parallel rank dumped: its samples' positions in the rollout, and its lists."""

    path: Path
    positions: tuple[int, ...]
    data: Mapping[str, object]
    is_sliced: bool


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of all ranks, in the order of the rollout, with the partition really used."""
    builder = BatchBuilder(name, reward_key=config.reward_key, group_size=config.group_size)
    shards = _shards(step, name)
    place = {position: (shard, i) for shard in shards for i, position in enumerate(shard.positions)}
    positions = sorted(place)
    drawn = None if step.rollout_dump is None else list(samples_of(load(step.rollout_dump), step.rollout_dump.name))
    builder.notes += [] if drawn else [LACKS]
    if any(shard.is_sliced for shard in shards):
        builder.notes.append("context parallel: per-token numbers are slices of the responses, and left out")
    for n, position in enumerate(positions):
        shard, i = place[position]
        sample = _sample(shard, i, f"{name}, sample {n}")
        if drawn is not None:
            join_rollout(sample, drawn, position, f"{name}, sample {n}")
        builder.add(sample, shard.path.name)
    return builder.build(recorded=_layout(shards, positions, builder.notes))


def _shards(step: Step, name: str) -> list[Shard]:
    """The data-parallel ranks, in the order of their first file."""
    found: dict[tuple[int, ...], Shard] = {}
    start = 0
    for path in step.files:
        payload = load(path)
        data = payload.get("rollout_data")
        lengths = data.get("response_lengths") if isinstance(data, Mapping) else None
        if not isinstance(data, Mapping) or not isinstance(plain(lengths), (list, tuple)):
            raise RolloutError(f"{path}: rollout_data holds no response_lengths; is it a train dump of miles?")
        size = len(plain(lengths))  # pyright: ignore[reportArgumentType]
        partition = plain(data.get("partition"))
        given = partition if isinstance(partition, (list, tuple)) else None
        positions = tuple(range(start, start + size)) if partition is None else tuple(given or ())
        if len(positions) != size or not all(type(position) is int and position >= 0 for position in positions):
            raise RolloutError(f"{path}: partition is {shown(partition)}; must be the positions of its {size} samples")
        start += size
        found.setdefault(positions, Shard(path, positions, data, plain(payload.get("cp_size")) not in (None, 1)))
    held = [position for positions in found for position in positions]
    if len(set(held)) < len(held):
        files = some(shard.path.name for shard in found.values())
        raise RolloutError(f"{name}: ranks share some samples but not all ({files}); give the ranks of one rollout only")
    return list(found.values())


def _sample(shard: Shard, i: int, where: str) -> dict[str, object]:
    """The canonical fields of a rank's sample i; without per-token numbers where context parallelism has cut them."""
    sample: dict[str, object] = {ours: _entry(shard, theirs, i, where) for theirs, ours in TRAIN_FIELDS.items()}
    if shard.is_sliced:
        sample.update(dict.fromkeys(STREAMS))
    sample["status"] = truncation(_entry(shard, "truncated", i, where))
    sample["reward"] = _entry(shard, "raw_reward", i, where)
    return sample


def _entry(shard: Shard, field: str, i: int, where: str) -> object:
    """A sample's entry of a list over the rank's samples, or over the whole rollout's."""
    values = shard.data.get(field)
    if not isinstance(values, (list, tuple)):
        values = plain(values)
    if not isinstance(values, (list, tuple)):
        return None
    at = shard.positions[i] if field in GLOBAL and len(values) > max(shard.positions) else i
    if at >= len(values):
        raise RolloutError(f"{where}: {field} of {shard.path.name} has {len(values)} entries and none at {at}")
    return values[at]


def _layout(shards: list[Shard], positions: list[int], notes: list[str]) -> RecordedLayout | None:
    """The partition of the data-parallel ranks, and their micro-batches where the dump has them."""
    described, whole = [], False
    for rank, shard in enumerate(shards):
        micro_batches, numbers = (plain(shard.data.get(key)) for key in ("micro_batch_indices", "num_microbatches"))
        if micro_batches is None or numbers is None:
            micro_batches, numbers, whole = [list(range(len(shard.positions)))], [1], True
        described.append(
            {
                "data_parallel_rank": rank,
                "partition": list(shard.positions),
                "micro_batch_indices": micro_batches,
                "num_microbatches": numbers if isinstance(numbers, list) else [numbers],
            }
        )
    layout = recorded_layout(described, positions)
    if layout is None:
        notes.append("the ranks' micro-batches do not cover every sample exactly once: the recorded layout is left out")
    elif whole:
        notes.append("the dump names no micro-batches: in the recorded layout each rank's samples are one")
    return layout
