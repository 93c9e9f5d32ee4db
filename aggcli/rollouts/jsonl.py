"""Plain rollout JSONL (format `aggcli`): one sample a line, in the canonical fields."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import shown
from aggcli.rollouts.files import opened
from aggcli.rollouts.known import Unread
from aggcli.rollouts.steps import Step

ROWS = 64
"""Rows taken at a time: enough to share the work of looking at them, few enough to stay in the processor's cache."""
BOM = b"\xef\xbb\xbf"


def read_jsonl(path: Path, name: str, *, reward_key: str | None = None, group_size: int | None = None) -> RolloutBatch:
    """The batch called `name` from the samples in `path`, read line by line.

    NaN and Infinity may be written bare. Blank lines are skipped. A last line that ends without a newline and is the
    beginning of an object (a killed writer) is dropped with a note. Raises `RolloutError` naming the line for any other line
    that is not a JSON object, and the sample for whatever the builder and `known` refuse.
    """
    builder = BatchBuilder(name, reward_key=reward_key, group_size=group_size)
    rows, unread = json_rows(path, name, builder.notes), Unread(name)
    while some_rows := list(islice(rows, ROWS)):
        unread.look(some_rows, len(builder))
        builder.add_rows(some_rows)
    builder.notes += unread.notes()
    return builder.build()


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one file; see `read_jsonl`."""
    return read_jsonl(step.path, name, reward_key=config.reward_key, group_size=config.group_size)


def first_keys(path: Path) -> frozenset[str]:
    """The keys of the first lines together, up to one that is no JSON object: a field may be missing on some samples."""
    keys: set[str] = set()
    try:
        for _, row in islice(json_rows(path, str(path), []), ROWS):
            keys.update(row)
    except RolloutError:
        pass
    return frozenset(keys)


def json_rows(path: Path, name: str, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of `path`; a last line that is not whole is dropped with a note in `notes`.

    Raises `RolloutError` naming `name` and the line for any other line that is not a JSON object.
    """
    with opened(path) as file:
        yield from _rows(file, name, notes)


def _rows(file: BinaryIO, name: str, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        try:
            row = loads(line.removeprefix(BOM)) if number == 1 else loads(line)
        except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors
            if line.endswith(b"\n") or not begins_object(line):
                raise RolloutError(f"{name}, line {number}: {_why(error)}; correct or delete the line") from None
            notes.append(f"1 half-written line dropped: the last, line {number}")
            return
        if type(row) is not dict:
            raise RolloutError(f"{name}, line {number}: holds {shown(row)}; each line must be a JSON object, one sample")
        yield number, row


_ENDS = ("", "0", '"', '":0', ":0", '"":0', "null", '0"', '00"', '000"', '0000"', 'n"', '\\u0000"')
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*("|$|\\$)', re.DOTALL)


def begins_object(line: bytes) -> bool:
    """Whether a line is the beginning of a JSON object: whether some end makes it a whole one."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(line)  # the bytes of a character that was cut off are left out
    except UnicodeDecodeError:
        return False
    if not text.lstrip().startswith("{"):
        return False
    open_: list[str] = []
    for bracket in re.findall(r"[][{}]", _STRING.sub("", text)):
        if bracket in "{[":
            open_.append("}" if bracket == "{" else "]")
        elif not open_ or open_.pop() != bracket:
            return False
    if not open_:
        return False
    closed = "".join(reversed(open_))
    ends = [*_ENDS, *(word[n:] for word in _WORDS for n in range(1, len(word)) if text.endswith(word[:n]))]
    return any(_is_json(text + end + more + closed) for end in ends for more in ("", ":0"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def loads(line: bytes) -> Any:
    """The value of one line; the standard library reads what the fast parser refuses, such as bare NaN."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(str(line, "utf-8"))


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not valid UTF-8 ({error.reason} at byte {error.start + 1})"
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON ({error.msg} at column {error.colno})"
    return "is not valid JSON (nested too deeply)" if isinstance(error, RecursionError) else f"is not valid JSON ({error})"
