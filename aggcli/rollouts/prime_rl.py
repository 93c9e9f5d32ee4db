"""prime-rl's token exports (`enable_token_export`): `step_k/rank_r.jsonl`, a row per sequence of a packed micro-batch.

A step is one folder with the files of all its ranks; an empty file STABLE beside them says that every rank has written.
"""

from __future__ import annotations

import re
from pathlib import Path

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, some
from aggcli.rollouts.batch import RecordedLayout, RecordedStep, RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError, listed, shown, whole
from aggcli.rollouts.jsonl import json_rows
from aggcli.rollouts.sequences import Sequences, response_part
from aggcli.rollouts.steps import Step

NAMES = {
    "trainer_logprobs": "log_probs",
    "inference_logprobs": "rollout_log_probs",
    "entropy": "entropy",
    "advantages": "advantage",
}
VERSION = 1
LACKS = "prime-rl's token exports hold no reference log-probabilities, no group ids, and no sequence without a trained token"


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of all ranks of one step, with the layout really used: a row's rank and micro_step."""
    builder = BatchBuilder(name, reward_key=config.reward_key)
    builder.notes.append(LACKS)
    sequences = Sequences(builder, config.group_size)
    held: dict[int, dict[int, list[int]]] = {}
    versions: dict[str, None] = {}
    for path in step.files:
        for line, row in json_rows(path, f"{name}, {path.name}", builder.notes):
            where = f"{path.name}, line {line}"
            try:
                rank, micro_step = whole(row.get("rank"), "rank"), whole(row.get("micro_step"), "micro_step")
                response = response_part(row, NAMES, mask="loss_mask", ids="token_ids")
                reward = _reward(row.get("rewards"), row.get("loss_mask"))
            except FieldError as error:
                raise RolloutError(f"{name}, sample {len(builder)} ({where}): {error}") from None
            versions[shown(row.get("schema_version"))] = None
            held.setdefault(rank, {}).setdefault(micro_step, []).append(len(builder))
            sequences.add(response, where, reward=reward)
    sequences.close()
    builder.notes += _notes(step, versions)
    return builder.build(recorded=_layout(held))


def _reward(rewards: object, mask: object) -> object:
    """The sequence's reward, which newer exports repeat on each of its tokens; None where they do not."""
    values, bits = listed(rewards, "rewards"), listed(mask, "loss_mask") or []
    return next((value for value, bit in zip(values or [], bits, strict=False) if bit and value is not None), None)


def _layout(held: dict[int, dict[int, list[int]]]) -> RecordedLayout | None:
    """Each rank's samples, micro-batch after micro-batch; rows are in that order already."""
    if not held:
        return None
    partitions, micro_batches = [], []
    for _, by_micro_step in sorted(held.items()):
        samples = [sample for _, samples in sorted(by_micro_step.items()) for sample in samples]
        place = {sample: i for i, sample in enumerate(samples)}
        partitions.append(tuple(samples))
        micro_batches.append(tuple(tuple(place[s] for s in samples) for _, samples in sorted(by_micro_step.items())))
    return RecordedLayout((RecordedStep(tuple(partitions), tuple(micro_batches)),))


def _notes(step: Step, versions: dict[str, None]) -> list[str]:
    folder, notes = step.path.parent, []
    if not (folder / "STABLE").exists():
        notes.append(f"{folder.name} has no STABLE marker: it may lack ranks or sequences, as the writer puts the marker last")
    left = [path.name for path in _ranks_in(folder) if path not in step.files]
    if left:
        notes.append(f"{some(left)} of {folder.name} were not given: the step is not whole")
    unknown = [version for version in versions if version != str(VERSION)]
    if unknown:
        notes.append(f"schema_version {some(unknown)} is not known (only {VERSION} is): fields were read by their names")
    return notes


def _ranks_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if re.fullmatch(r"rank_\d+\.jsonl", path.name)]
