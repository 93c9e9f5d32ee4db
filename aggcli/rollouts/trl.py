"""TRL's completions (`log_completions`): Parquet of `step`, `prompt`, `completion`, a column per reward, `advantage`.

Texts, rewards and advantages only: lengths are counted from texts, rows are grouped by identical prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, some
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError
from aggcli.rollouts.formats import Step
from aggcli.rollouts.parquet import parquet_rows, schema_of
from aggcli.rollouts.texts import PromptGroups, RewardColumns, text_lengths, text_of

if TYPE_CHECKING:
    import pyarrow as pa

OWN = ("step", "prompt", "completion", "advantage")
LACKS = "TRL's completions hold no token ids, masks or log-probabilities"


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one completions file. Recorded advantages are kept; columns without a number stay out of the reward."""
    builder = BatchBuilder(name, reward_key=config.reward_key)
    builder.notes.append(LACKS)
    count, groups = text_lengths(config, builder), PromptGroups(builder, config.group_size)
    columns = _numbers(schema_of(step.path))
    rewards = RewardColumns(columns, columns, config, builder)
    steps: dict[object, None] = {}
    for i, row in enumerate(parquet_rows(step.path)):
        steps[row.get("step")] = None
        try:
            sample = _sample(row, rewards, groups, count)
        except FieldError as error:
            raise RolloutError(f"{name}, sample {i}: {error}") from None
        builder.add(sample)
    if len(steps) > 1:
        builder.notes.append(f"rows of steps {some(steps)} are in one file, and read as one step")
    groups.close()
    return builder.build()


def _sample(
    row: Mapping[str, object], rewards: RewardColumns, groups: PromptGroups, count: Callable[[str], int]
) -> dict[str, object]:
    prompt, completion = text_of(row.get("prompt"), "prompt"), text_of(row.get("completion"), "completion")
    length = count(completion)
    return {
        "response_length": length,
        "total_length": length + count(prompt),
        "reward": rewards.of(row),
        "advantage": row.get("advantage"),
        "group_index": groups.of(prompt),
    }


def _numbers(schema: pa.Schema) -> list[str]:
    """The reward columns: those of numbers or booleans that are not TRL's own."""
    import pyarrow as pa

    tests = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)
    return [field.name for field in schema if field.name not in OWN and any(test(field.type) for test in tests)]
