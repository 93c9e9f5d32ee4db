"""Plain rollout JSONL (format `aggcli`): one sample a line, in the canonical fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import shown

BOM = b"\xef\xbb\xbf"


def read_jsonl(path: Path, name: str, *, reward_key: str | None = None, group_size: int | None = None) -> RolloutBatch:
    """The batch called `name` from the samples in `path`, read line by line.

    NaN and Infinity may be written bare. Blank lines are skipped. A last line that is not whole (a killed writer) is
    dropped with a note. Raises `RolloutError` naming the line for any other line that is not a JSON object, and the
    sample for whatever the builder refuses.
    """
    builder = BatchBuilder(name, reward_key=reward_key, group_size=group_size)
    try:
        with path.open("rb") as file:
            _add_lines(file, builder)
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read ({error.strerror or error})") from error
    return builder.build()


def _add_lines(file: BinaryIO, builder: BatchBuilder) -> None:
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        try:
            sample = json.loads(str(line.removeprefix(BOM) if number == 1 else line, "utf-8"))
        except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors
            if any(not rest.isspace() for rest in file):
                raise RolloutError(f"{builder.name}, line {number}: {_why(error)}; correct or delete the line") from None
            builder.notes.append(f"1 half-written line dropped: the last, line {number}")
            return
        if type(sample) is not dict:
            raise RolloutError(
                f"{builder.name}, line {number}: holds {shown(sample)}; each line must be a JSON object, one sample"
            )
        builder.add(sample, f"line {number}")


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not valid UTF-8 ({error.reason} at byte {error.start + 1})"
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON ({error.msg} at column {error.colno})"
    return "is not valid JSON (nested too deeply)" if isinstance(error, RecursionError) else f"is not valid JSON ({error})"
