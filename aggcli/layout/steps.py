"""Optimizer steps of a rollout batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from aggcli.errors import RolloutError
from aggcli.layout.schedule import Schedule, split_rollouts
from aggcli.rollouts.batch import RecordedStep, RolloutBatch, distinct, group_of_rollout
from aggcli.rules import Rule


@dataclass(frozen=True)
class Part:
    """One optimizer step of a rollout batch: sample positions in file order, and its recorded schedule where there is one."""

    name: str
    positions: list[int]
    recorded: Schedule | None = None
    notes: tuple[str, ...] = ()


def optimizer_steps(batch: RolloutBatch, global_batch_size: int | None) -> list[Part]:
    """Cut a rollout batch into optimizer steps: by `global_batch_size` rollouts, else as recorded, else into one."""
    if global_batch_size is None:
        steps = batch.recorded.steps if batch.recorded is not None else ()
        if not steps:
            return [Part(batch.name, list(range(batch.num_samples)))]
        return [_recorded_part(_part_name(batch.name, at, len(steps)), step) for at, step in enumerate(steps)]
    cut_up = split_rollouts(batch.rollout_S.tolist(), global_batch_size)
    notes = []
    rollouts = distinct(batch.rollout_S)
    if rollouts % global_batch_size and len(cut_up) > 1:
        notes.append(
            f"{rollouts} rollouts are no multiple of --global-batch-size {global_batch_size}:"
            f" the last optimizer step has {rollouts % global_batch_size}"
        )
    if batch.recorded is not None:
        notes.append("--global-batch-size cuts its own steps, so the recorded layout is left out")
    return [
        Part(_part_name(batch.name, at, len(cut_up)), positions, None, tuple(notes if at == 0 else ()))
        for at, positions in enumerate(cut_up)
    ]


def _part_name(name: str, at: int, parts: int) -> str:
    return name if parts == 1 else f"{name}, optimizer step {at}"


def _recorded_part(name: str, step: RecordedStep) -> Part:
    positions = sorted(sample for partition in step.partitions for sample in partition)
    within = {sample: at for at, sample in enumerate(positions)}
    partitions = tuple(tuple(within[sample] for sample in partition) for partition in step.partitions)
    return Part(name, positions, Schedule(partitions, step.micro_batches))


def need_whole_groups(batch: RolloutBatch, parts: Sequence[Part], rule: Rule) -> None:
    """Raise `RolloutError` when a prompt group straddles two optimizer steps, which a rule that counts prompts cannot weigh.

    The message says what is at fault: the order of the samples where groups would fit if they stood together, else the
    step's size.
    """
    seen: dict[int, int] = {}
    group_S = group_of_rollout(batch.group_S, batch.rollout_S).tolist()
    for at, part in enumerate(parts):
        for sample in part.positions:
            first = seen.setdefault(group_S[sample], at)
            if first != at:
                label = batch.labels.groups[group_S[sample]] if batch.labels.groups else group_S[sample]
                raise RolloutError(
                    f"{batch.name}: prompt group {label} straddles optimizer steps {first} and {at}, and {rule.name} needs"
                    f" whole groups; {_remedy(batch, group_S, parts)}"
                )


def _remedy(batch: RolloutBatch, group_S: list[int], parts: Sequence[Part]) -> str:
    """What to change, where some group straddles two optimizer steps."""
    rollout_S = batch.rollout_S.tolist()
    rollouts = dict(zip(rollout_S, group_S, strict=True))
    sizes = set(Counter(rollouts.values()).values())
    steps = [len({rollout_S[sample] for sample in part.positions}) for part in parts]
    changes = sum(a != b for a, b in pairwise(group_S))
    together = changes < len(set(group_S))  # each group is one run of samples
    if len(sizes) == 1 and not together and all(step % next(iter(sizes)) == 0 for step in steps):
        return "the steps' size fits the groups, but the samples of a group do not stand together: sort the file by group_index"
    return "change --global-batch-size to a multiple of the group size"
