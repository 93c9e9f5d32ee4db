"""NeMo-RL's train data (`train_data_step<N>.jsonl`): a row per sample, lists padded to the longest sequence of the batch.

The writer cuts its batch into batches of one, so every value may be a list of one.
"""

from __future__ import annotations

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError, plain, shown, whole
from aggcli.rollouts.jsonl import json_rows
from aggcli.rollouts.sequences import Sequences, response_part
from aggcli.rollouts.steps import Step

STREAMS = {"prev_logprobs": "log_probs", "generation_logprobs": "rollout_log_probs"}
LISTS = ("token_ids", "token_loss_mask", *STREAMS)
LACKS = "NeMo-RL's train data holds no reference log-probabilities, entropy or layout"


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one file. A sample whose sample_loss_mask is 0 is fully masked; filtered_rewards win over rewards."""
    builder = BatchBuilder(name, reward_key=config.reward_key)
    builder.notes.append(LACKS)
    sequences, filtered = Sequences(builder, config.group_size), False
    for line, wrapped in json_rows(step.path, name, builder.notes):
        row = {key: _unwrapped(value, key in LISTS) for key, value in wrapped.items()}
        filtered |= "filtered_rewards" in row
        per_token = isinstance(row.get("advantages"), list)
        names = {**STREAMS, "advantages": "advantage"} if per_token else STREAMS
        try:
            length = whole(row["input_lengths"], "input_lengths") if row.get("input_lengths") is not None else None
            response = response_part(row, names, mask="token_loss_mask", ids="token_ids", length=length)
            dropped = _is_dropped(row.get("sample_loss_mask"))
        except FieldError as error:
            raise RolloutError(f"{name}, sample {len(builder)} (line {line}): {error}") from None
        more = {"reward": row.get("filtered_rewards", row.get("rewards")), "remove_sample": dropped}
        if not per_token:
            more["advantage"] = row.get("advantages")
        sequences.add(response, line, **more)
    if filtered:
        builder.notes.append("rewards are filtered_rewards, those of the samples trained on; rewards were before filtering")
    sequences.close()
    return builder.build()


def _unwrapped(value: object, is_list: bool) -> object:
    """A value out of its batch of one; of a per-token field the list of its tokens."""
    while isinstance(value, list) and len(value) == 1 and not (is_list and isinstance(value[0], (int, float))):
        value = value[0]
    return value


def _is_dropped(value: object) -> bool:
    value = plain(value)
    if value is not None and value not in (0, 1):
        raise FieldError(f"sample_loss_mask is {shown(value)}: must be 0 or 1")
    return value == 0
