"""verl's generation dumps (`trainer.rollout_data_dir`): JSON lines of `input`, `output`, `gts`, `score`, `step` and extras.

Texts and rewards only: lengths are counted from texts, and rows are grouped by `uid` where a fork writes one, else by
identical `input`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError
from aggcli.rollouts.formats import Step
from aggcli.rollouts.jsonl import json_rows
from aggcli.rollouts.texts import PromptGroups, RewardColumns, text_lengths, text_of

Count = Callable[[str], int]
TEXTS = ("input", "output", "gts", "step", "request_id", "uid")
LACKS = "verl dumps hold no token ids, masks, log-probabilities or advantages"


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one generation dump."""
    builder = BatchBuilder(name, reward_key=config.reward_key)
    builder.notes.append(LACKS)
    count, groups = text_lengths(config, builder), PromptGroups(builder, config.group_size)
    rewards: RewardColumns | None = None
    for line, row in json_rows(step.path, name, builder.notes):
        rewards = rewards or RewardColumns(_scores(row), ["score"], config, builder)
        try:
            sample = _sample(row, rewards, groups, count)
        except FieldError as error:
            raise RolloutError(f"{name}, sample {len(builder)} (line {line}): {error}") from None
        builder.add(sample, line)
    groups.close()
    return builder.build()


def _sample(row: Mapping[str, object], rewards: RewardColumns, groups: PromptGroups, count: Count) -> dict[str, object]:
    prompt, response = text_of(row.get("input"), "input"), text_of(row.get("output"), "output")
    length, uid = count(response), row.get("uid")
    return {
        "response_length": length,
        "total_length": length + count(prompt),
        "reward": rewards.of(row),
        "group_index": groups.of(prompt) if uid is None else uid,
    }


def _scores(row: Mapping[str, object]) -> list[str]:
    return [key for key, value in row.items() if key not in TEXTS and (key == "score" or isinstance(value, (bool, int, float)))]
