"""verl's generation dumps (`trainer.rollout_data_dir`): JSON lines of `input`, `output`, `gts`, `score`, `step` and extras.

Texts and rewards only: lengths are counted from texts, and rows are grouped by `uid` where a fork writes one, else by
identical `input`. A file that holds several steps is read as several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, some
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError
from aggcli.rollouts.files import opened
from aggcli.rollouts.jsonl import json_rows
from aggcli.rollouts.steps import Part, Step
from aggcli.rollouts.texts import PromptGroups, RewardColumns, batches, parts_of, text_lengths, text_of

TEXTS = ("input", "output", "gts", "step", "request_id", "uid")
LACKS = "verl dumps hold no token ids, masks, log-probabilities or advantages"
STEP = re.compile(rb'"step"\s*:\s*([^,}\s]+)')


def read(step: Step, names: Sequence[str], config: SourceConfig) -> Iterator[RolloutBatch]:
    """The batches of one generation dump, one a step."""
    columns: dict[str, None] = {"score": None}
    if config.reward_weights is not None:  # a column may be missing in the first rows, so all are looked at
        for _, row in json_rows(step.path, names[0], []):
            columns.update(dict.fromkeys(_numbers(row)))
    dropped: list[str] = []
    rows = json_rows(step.path, names[0], dropped)
    yield from batches(step, names, rows, lambda name: _Generations(step.path, name, list(columns), dropped, config))


def parts(path: Path) -> tuple[Part, ...]:
    """The steps of a file, where it holds several."""
    with opened(path) as file:  # a look at the bytes first: nearly every file holds one step, and parsing takes long
        if len({match for line in file for match in STEP.findall(line)}) < 2:
            return ()
    return parts_of(path, (row.get("step") for _, row in json_rows(path, str(path), [])))


class _Generations:
    """The rows of one step. `dropped` are notes on lines of the file that were dropped."""

    def __init__(self, path: Path, name: str, columns: Sequence[str], dropped: list[str], config: SourceConfig) -> None:
        self._builder = BatchBuilder(name, reward_key=config.reward_key)
        self._builder.notes.append(LACKS)
        self._dropped = dropped
        self._count = text_lengths(config, self._builder, path)
        self._groups = PromptGroups(self._builder, config.group_size)
        self._rewards = RewardColumns(columns, ["score"], config, self._builder)
        self._judged: list[tuple[float, bool] | None] = []

    def add(self, row: Mapping[str, Any], where: str | int | None) -> None:
        try:
            prompt, response = text_of(row.get("input"), "input"), text_of(row.get("output"), "output")
            length = self._count(response)
            sample = {
                "response_length": length,
                "total_length": length + self._count(prompt),
                "reward": self._rewards.of(row),
                "group_index": self._groups.of(prompt, row.get("uid")),
            }
        except FieldError as error:
            line = f" (line {where})" if where is not None else ""
            raise RolloutError(f"{self._builder.name}, sample {len(self._builder)}{line}: {error}") from None
        self._judged.append(_judged(row))
        self._builder.add(sample, where)

    def close(self) -> RolloutBatch:
        self._builder.notes += self._dropped
        self._rewards.close()
        self._groups.close()
        if rows := contradicting(self._judged):
            self._builder.notes.append(
                f"acc contradicts score on {len(rows)} of {len(self._judged)} rows ({some(rows, 8)}), as where a column was"
                " shuffled: neither can be trusted"
            )
        return self._builder.build()


def _judged(row: Mapping[str, Any]) -> tuple[float, bool] | None:
    """(score, whether acc says right) of a row, where it has both."""
    score, acc = row.get("score"), row.get("acc")
    if not isinstance(score, (bool, int, float)) or not isinstance(acc, (bool, int, float)) or acc not in (0, 1):
        return None
    return float(score), bool(acc)


def contradicting(judged: Sequence[tuple[float, bool] | None]) -> list[int]:
    """The rows whose acc contradicts their score: right at a score of 0 or less, or wrong at 1 or more.

    A score between 0 and 1 contradicts nothing; and where there are such, scores are shaped, so that a right answer
    may have 0 or less.
    """
    found = [(row, *pair) for row, pair in enumerate(judged) if pair is not None]
    is_shaped = any(score not in (-1, 0, 1) for _, score, _ in found)
    return [row for row, score, right in found if (score >= 1 and not right) or (score <= 0 and right and not is_shaped)]


def _numbers(row: Mapping[str, object]) -> list[str]:
    return [key for key, value in row.items() if key not in TEXTS and isinstance(value, (bool, int, float))]
