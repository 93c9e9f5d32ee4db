"""TRL's completions (`log_completions`): Parquet of `step`, `prompt`, `completion`, a column per reward, `advantage`.

Texts, rewards and advantages only: lengths are counted from texts, rows are grouped by identical prompt. A file that holds
several steps is read as several, each when its rows have been read: row groups of one step each are read in the steps' order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError
from aggcli.rollouts.parquet import parquet_rows, rows_of_groups, schema_of
from aggcli.rollouts.steps import Part, Step
from aggcli.rollouts.texts import PromptGroups, RewardColumns, batches, parts_of, step_of, text_lengths, text_of

if TYPE_CHECKING:
    import pyarrow as pa

OWN = ("step", "prompt", "completion", "advantage")
LACKS = "TRL's completions hold no token ids, masks or log-probabilities"


def read(step: Step, names: Sequence[str], config: SourceConfig) -> Iterator[RolloutBatch]:
    """The batches of one file, one a step. Recorded advantages are kept; columns without a number stay out of the reward."""
    columns = _numbers(schema_of(step.path))
    rows = ((None, row) for row in parquet_rows(step.path, (*OWN, *columns), _row_groups(step)))
    yield from batches(step, names, rows, lambda name: _Completions(step.path, name, columns, config))


def parts(path: Path) -> tuple[Part, ...]:
    """The steps of a file, where it holds several."""
    return parts_of(path, (row.get("step") for row in parquet_rows(path, ("step",))))


def _row_groups(step: Step) -> list[int] | None:
    """The row groups of a file of several steps, those of the first step first, so that one step is in memory at a time; None,
    the file's own order, where a row group holds more than one step."""
    if not step.parts:
        return None
    values = (row.get("step") for row in parquet_rows(step.path, ("step",)))
    place: dict[int | str | None, int] = {part.key: at for at, part in enumerate(step.parts)}
    found: list[int] = []
    for rows in rows_of_groups(step.path):
        held = {place.get(step_of(value), len(place)) for value in islice(values, rows)}
        if len(held) > 1:
            return None
        found.append(min(held, default=0))
    return sorted(range(len(found)), key=found.__getitem__)


class _Completions:
    """The rows of one step."""

    def __init__(self, path: Path, name: str, columns: Sequence[str], config: SourceConfig) -> None:
        self._builder = BatchBuilder(name, reward_key=config.reward_key)
        self._builder.notes.append(LACKS)
        self._count = text_lengths(config, self._builder, path)
        self._groups = PromptGroups(self._builder, config.group_size)
        self._rewards = RewardColumns(columns, columns, config, self._builder)

    def add(self, row: Mapping[str, Any], where: str | int | None) -> None:
        try:
            prompt, completion = text_of(row.get("prompt"), "prompt"), text_of(row.get("completion"), "completion")
            length = self._count(completion)
            sample = {
                "response_length": length,
                "total_length": length + self._count(prompt),
                "reward": self._rewards.of(row),
                "advantage": row.get("advantage"),
                "group_index": self._groups.of(prompt),
            }
        except FieldError as error:
            raise RolloutError(f"{self._builder.name}, sample {len(self._builder)}: {error}") from None
        self._builder.add(sample, where)

    def close(self) -> RolloutBatch:
        self._rewards.close()
        self._groups.close()
        return self._builder.build()


def _numbers(schema: pa.Schema) -> list[str]:
    """The reward columns: those of numbers or booleans that are not TRL's own."""
    import pyarrow as pa

    tests = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)
    return [field.name for field in schema if field.name not in OWN and any(test(field.type) for test in tests)]
