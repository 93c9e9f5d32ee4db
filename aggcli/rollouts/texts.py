"""Dumps that hold text only: lengths counted from texts, groups of identical prompts, rewards of several columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path

from aggcli.config import SourceConfig, reward_weights
from aggcli.errors import RolloutError, SettingError, some
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError, reward, shown

# -- lengths --------------------------------------------------------------------------------------------------------


def text_lengths(config: SourceConfig, builder: BatchBuilder) -> Callable[[str], int]:
    """What counts a text's length, as the settings say; the unit is written on the batch, with a note."""
    if config.tokenizer is not None:
        count = _tokenizer(config.tokenizer)
        builder.notes.append(
            f"lengths are counted with the tokenizer {config.tokenizer}; tokens that a text does not show (end of sequence)"
            " are not counted"
        )
        return count
    builder.length_unit = config.length_unit or "chars"
    return len if builder.length_unit == "chars" else lambda text: len(text.split())


def _tokenizer(path: str) -> Callable[[str], int]:
    try:
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError:
        raise SettingError(
            "--tokenizer needs the tokenizers library: install aggcli[hf], or give --length-unit chars or words"
        ) from None
    place = Path(path).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.is_file():
        raise SettingError(f"--tokenizer {path}: no tokenizer.json there; give that file, or the folder that holds it")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise SettingError(f"--tokenizer {path}: is not a tokenizer.json ({error})") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(value: object, field: str) -> str:
    """A text, or the text of a conversation: its messages' contents one after another."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(message, Mapping) for message in value):
        return "".join(content if isinstance(content := m.get("content"), str) else json.dumps(content) for m in value)
    raise FieldError(f"{field} is {shown(value)}: must be a text, or a list of messages")


# -- groups ---------------------------------------------------------------------------------------------------------


class PromptGroups:
    """Groups of rows with the same prompt; with `size`, every `size` rows of a prompt are a group, in file order."""

    def __init__(self, builder: BatchBuilder, size: int | None) -> None:
        self._builder, self._size = builder, size
        self._rows: dict[Hashable, int] = {}
        self._groups: dict[Hashable, int] = {}
        self._first: dict[Hashable, int] = {}

    def of(self, prompt: Hashable) -> int:
        """The group of the next row, whose prompt this is."""
        row = self._rows.get(prompt, 0)
        self._rows[prompt] = row + 1
        self._first.setdefault(prompt, len(self._builder))
        return self._groups.setdefault((prompt, row // self._size if self._size else 0), len(self._groups))

    def close(self) -> None:
        """Note how rows were grouped; raises `RolloutError` where a prompt's rows do not fill its groups."""
        if not self._rows:
            return
        size = self._size
        for prompt, rows in self._rows.items():
            if size is not None and rows % size:
                raise RolloutError(
                    f"{self._builder.name}: the prompt of sample {self._first[prompt]} has {rows} rows, which cannot be cut"
                    f" into groups of {size}; give a --group-size that divides {rows}, or none"
                )
        runs = f"every {size} rows with the same prompt are" if size else "rows with the same prompt are"
        self._builder.notes.append(f"no group ids in the file: {runs} a group")


# -- rewards --------------------------------------------------------------------------------------------------------


class RewardColumns:
    """One reward from several columns of a row.

    `columns` are those the rows have; `default` those that count, at weight 1, where no weights are given. A weight's name
    may be the end of one column's name, as TRL's columns end in the name of their function.
    """

    def __init__(self, columns: Iterable[str], default: Iterable[str], config: SourceConfig, builder: BatchBuilder) -> None:
        known = list(columns)
        given = reward_weights(config.reward_weights)
        chosen = {_column(name, known, builder.name): weight for name, weight in given.items()}
        self._weights = chosen or dict.fromkeys(default, 1.0)
        self._key = config.reward_key
        if self._weights and (given or len(self._weights) > 1):
            formula = " + ".join(f"{weight:g} * {name}" for name, weight in self._weights.items())
            left = [name for name in known if name not in self._weights]
            out = f"; left out: {some(left)}" if left else ""
            how = "" if given else " (--reward-weights sets others)"
            builder.notes.append(f"reward = {formula}{how}{out}")

    def of(self, row: Mapping[str, object]) -> object:
        """The row's reward; None where no column has one. A column without a value counts as 0, as TRL sums them."""
        if list(self._weights.values()) == [1.0]:
            return row.get(*self._weights)
        total, scored = 0.0, False
        for name, weight in self._weights.items():
            try:
                value, _ = reward(row.get(name), self._key)
            except FieldError as error:
                raise FieldError(f"column {name}: {error}") from None
            if not math.isnan(value):
                total, scored = total + weight * value, True
        return total if scored else None


def _column(name: str, known: list[str], where: str) -> str:
    found = [name] if name in known else [column for column in known if column.endswith(name)]
    if len(found) != 1:
        why = f"is the end of {some(found)}" if found else "is no reward column"
        raise RolloutError(f"{where}: --reward-weights '{name}' {why}; the columns are {some(known, most=8)}")
    return found[0]
