"""tinker-cookbook's rollout summaries (`iteration_*/train_rollout_summaries.jsonl`): a row per trajectory.

Lengths, rewards and groups only. A response is all tokens that the policy produced, over all steps of the trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError, shown, whole
from aggcli.rollouts.jsonl import json_rows
from aggcli.rollouts.steps import Step

LACKS = "tinker-cookbook's summaries hold no token ids, masks, log-probabilities or advantages"
STATUSES = {"length": "truncated", "stop": "completed"}


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one iteration: response_length is the sum of ac_len, the reward is total_reward."""
    builder = BatchBuilder(name, reward_key=config.reward_key, group_size=config.group_size)
    builder.notes += [LACKS, "lengths count the tokens the policy produced (ac_len), not what it observed between them"]
    for line, row in json_rows(step.path, name, builder.notes):
        try:
            sample = _sample(row)
        except FieldError as error:
            raise RolloutError(f"{name}, sample {len(builder)} (line {line}): {error}") from None
        builder.add(sample, line)
    return builder.build()


def _sample(row: Mapping[str, object]) -> dict[str, object]:
    steps = row.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise FieldError(f"steps is {shown(steps)}: must be a list of objects")
    lengths = [whole(step.get("ac_len"), f"steps[{i}].ac_len") for i, step in enumerate(steps)]
    last = steps[-1] if steps else {}
    context = whole(last.get("ob_len") or 0, "ob_len") + (lengths[-1] if lengths else 0)
    return {
        "response_length": sum(lengths),
        "total_length": max(sum(lengths), context),
        "reward": row.get("total_reward"),
        "group_index": row.get("group_idx"),
        "status": STATUSES.get(str(last.get("stop_reason"))),
    }
