"""Dumps that hold text only: lengths counted from texts, groups of identical prompts, rewards of several columns,
several steps in one file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aggcli.config import SourceConfig, reward_weights
from aggcli.errors import RolloutError, SettingError, some
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError, counted, identifier, reward, shown
from aggcli.rollouts.files import natural, size_of
from aggcli.rollouts.steps import Part, Step

# -- lengths --------------------------------------------------------------------------------------------------------


def text_lengths(config: SourceConfig, builder: BatchBuilder, path: Path) -> Callable[[str], int]:
    """What counts the length of a text of this file, as the settings say; the unit is written on the batch, with a note."""
    builder.text_bytes = size_of(path)
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
    """Groups of rows with the same prompt; with `size`, every `size` rows of a prompt are a group, in file order.

    Where the file names a row's group itself, that is its group; then every row must have a name. `id_field` is what the
    format calls it.
    """

    def __init__(self, builder: BatchBuilder, size: int | None, id_field: str = "uid") -> None:
        self._builder, self._size, self._id_field = builder, size, id_field
        self._rows: dict[Hashable, int] = {}
        self._groups: dict[Hashable, int] = {}
        self._first: dict[Hashable, int] = {}
        self._named: list[int] = []
        self._unnamed: list[int] = []

    def of(self, prompt: Hashable, named: object = None) -> object:
        """The group of the next row, whose prompt this is; `named` is the group that the file names."""
        if named is not None:
            self._named.append(len(self._builder))
            return named
        self._unnamed.append(len(self._builder))
        row = self._rows.get(prompt, 0)
        self._rows[prompt] = row + 1
        self._first.setdefault(prompt, len(self._builder))
        return self._groups.setdefault((prompt, row // self._size if self._size else 0), len(self._groups))

    def close(self) -> None:
        """Say on the batch how rows were grouped.

        Raises `RolloutError` where some rows name their group and others do not, and where a prompt's rows do not fill
        its groups.
        """
        name, size = self._builder.name, self._size
        if self._named and self._unnamed:
            raise RolloutError(
                f"{name}: {self._id_field} is missing on samples {some(self._unnamed)} but given on others; give it on every"
                " row, or on none, which groups all rows by equal prompt"
            )
        if self._named and size is not None:
            self._builder.notes.append(f"--group-size {size} is ignored: the file has {self._id_field}")
        if not self._rows:
            return
        for prompt, rows in self._rows.items():
            if size is not None and rows % size:
                raise RolloutError(
                    f"{name}: the prompt of sample {self._first[prompt]} has {rows} rows, which cannot be cut"
                    f" into groups of {size}; give a --group-size that divides {rows}, or none"
                )
        groups = counted(len(self._groups), "group", "groups")
        if size is None:
            how, unsure = (
                "rows of equal prompt",
                "independent groups of one prompt are merged (--group-size N takes them apart)",
            )
        elif all(rows == size for rows in self._rows.values()):
            how, unsure = "rows of equal prompt", f"each prompt has the {size} rows of one group"
        else:
            how, unsure = (
                f"every {size} consecutive rows of equal prompt",
                "nothing in the file confirms which rows belong together",
            )
        self._builder.grouping = f"assumed, {how}"
        self._builder.notes.append(f"no group ids in the file: groups are assumed, {how} ({groups}); {unsure}")


# -- rewards --------------------------------------------------------------------------------------------------------


class RewardColumns:
    """One reward from several columns of a row.

    `columns` are those that any row has; `default` those that count, at weight 1, where no weights are given. A weight's name
    may be the end of one column's name, as TRL's columns end in the name of their function.
    """

    def __init__(self, columns: Iterable[str], default: Iterable[str], config: SourceConfig, builder: BatchBuilder) -> None:
        known = list(columns)
        given = reward_weights(config.reward_weights)
        chosen = {_column(name, known, builder.name): weight for name, weight in given.items()}
        self._weights = chosen or dict.fromkeys(default, 1.0)
        self._key, self._builder = config.reward_key, builder
        self._null: dict[str, list[int]] = {}
        self._missing: dict[str, list[int]] = {}
        if self._weights and (given or len(self._weights) > 1):
            formula = " + ".join(f"{weight:g} * {name}" for name, weight in self._weights.items())
            left = [name for name in known if name not in self._weights]
            out = f"; left out: {some(left)}" if left else ""
            how = "" if given else " (--reward-weights sets others)"
            builder.notes.append(f"reward = {formula}{how}{out}")

    def of(self, row: Mapping[str, object]) -> object:
        """The row's reward; None where no column has one. A column without a value counts as 0, as TRL sums them."""
        for name in self._weights:
            if row.get(name) is None:
                (self._null if name in row else self._missing).setdefault(name, []).append(len(self._builder))
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

    def close(self) -> None:
        """Say on the batch which values were not there, and what was taken for them."""
        alone = len(self._weights) == 1
        then = "unscored" if alone else "0 in the sum, as TRL adds them; without any value the sample is unscored"
        for name, rows in self._missing.items():
            self._builder.notes.append(f"{name} is missing on {_samples(rows)}: {then}")
        for name, rows in () if alone else self._null.items():  # alone it is the reward, and counted as such
            self._builder.notes.append(f"{name} is null on {_samples(rows)}: {then}")


def _samples(rows: list[int]) -> str:
    return f"{counted(len(rows), 'sample', 'samples')} ({some(rows)})"


def _column(name: str, known: list[str], where: str) -> str:
    found = [name] if name in known else [column for column in known if column.endswith(name)]
    if len(found) != 1:
        why = f"is the end of {some(found)}" if found else "is no reward column"
        raise RolloutError(f"{where}: --reward-weights '{name}' {why}; the columns are {some(known, most=8)}")
    return found[0]


# -- rows into steps ----------------------------------------------------------------------------------------------------


class TextStep(Protocol):
    """One step under construction: rows in, a batch out."""

    def add(self, row: Mapping[str, Any], where: str | int | None) -> None: ...
    def close(self) -> RolloutBatch: ...


def step_of(value: object) -> int | str | None:
    """The step that a row belongs to; `10`, `10.0` and `"10"` are one. Raises `FieldError` for what can be no step."""
    found = None if value is None else identifier(value, "step")
    return int(found) if isinstance(found, str) and found.isascii() and found.isdecimal() and len(found) < 19 else found


def parts_of(path: Path, steps: Iterable[object]) -> tuple[Part, ...]:
    """The steps of a file from each row's `step`, in their own order; none where all rows are of one.

    Raises `RolloutError` where only some rows have a step.
    """
    rows: Counter[int | str | None] = Counter()
    for at, value in enumerate(steps):
        try:
            rows[step_of(value)] += 1
        except FieldError as error:
            raise RolloutError(f"{path}, row {at}: {error}") from None
    if len(rows) < 2:
        return ()
    keys = [key for key in rows if key is not None]
    if len(keys) < len(rows):
        raise RolloutError(f"{path}: step is null on {rows[None]} of {rows.total()} rows; give every row its step, or none")
    return tuple(Part(key, rows[key]) for key in sorted(keys, key=lambda key: natural(str(key))))


def batches(
    step: Step,
    names: Sequence[str],
    rows: Iterable[tuple[str | int | None, Mapping[str, Any]]],
    begin: Callable[[str], TextStep],
) -> Iterator[RolloutBatch]:
    """The batches of a file's steps, each as soon as its rows and those of the steps before it have been read."""
    if not step.parts:
        only = begin(names[0])
        for where, row in rows:
            only.add(row, where)
        yield only.close()
        return
    place = {part.key: at for at, part in enumerate(step.parts)}
    left = [part.rows for part in step.parts]
    begun: dict[int, TextStep] = {}
    whole: dict[int, RolloutBatch] = {}
    due = 0
    for where, row in rows:
        key = step_of(row.get("step"))
        at = -1 if key is None else place.get(key, -1)
        if at < 0 or not left[at]:
            break
        if at not in begun:
            begun[at] = begin(names[at])
        begun[at].add(row, where)
        left[at] -= 1
        if not left[at]:
            whole[at] = begun.pop(at).close()
        while due in whole:
            yield whole.pop(due)
            due += 1
    if due < len(step.parts):
        raise RolloutError(f"{step.path}: changed while it was read; read it when its writer has ended")
