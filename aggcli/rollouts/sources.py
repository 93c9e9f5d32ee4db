"""Where batches come from: recorded files, grouped into steps, or synthetic rollouts; read lazily, nothing kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, doing, nearest, printable, some
from aggcli.rollouts.files import SYNTHETIC, find_files, forget_pipes, is_eval
from aggcli.rollouts.formats import READERS, TEXT_ONLY, detect_format, is_empty, step_of
from aggcli.rollouts.steps import Step

if TYPE_CHECKING:  # the batch type needs torch, which listing files does not
    from aggcli.rollouts.batch import RolloutBatch

TRAIN_DUMPS = ("slime-train", "miles-train")
"""Formats that lack what the rollout dump of the same rollout has."""


UNITS = {"chars": "characters"}
"""Units of lengths that are written otherwise in a sentence."""


def unit_word(unit: str) -> str:
    """What lengths count, in words: tokens, characters, words."""
    return UNITS.get(unit, unit)


class Source(Protocol):
    """Rollout steps: iterating yields one batch per step, named `step 0 (file name)`; iterating again reads again."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[RolloutBatch]: ...


# -- recorded files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedPart:
    """A part of a source, and no more than what reads it: the files of one step, or a file that holds several.

    `names`: of its batches, as the whole source counts them; `config`: how to read, without the paths; `notes`: what is said of
    the whole source, on its first batch.
    """

    step: Step
    names: tuple[str, ...]
    config: SourceConfig
    notes: tuple[str, ...] = ()

    def batches(self) -> Iterator[RolloutBatch]:
        """Its batches, one a name. Raises `RolloutError`; a fault that nobody foresaw is told with the step that was being
        read."""
        unused, notes = self._unused(), self.notes
        with doing(f"reading {some(self.names)}"):
            for batch in READERS[self.step.format](self.step, self.names, self.config):
                yield batch.derived(notes=(*notes, *unused, *batch.notes))
                del batch
                notes = ()

    def _unused(self) -> list[str]:
        """Settings of dumps that hold text only, given for one that has lengths of its own."""
        if self.step.format in TEXT_ONLY:
            return []
        given = {"--tokenizer": self.config.tokenizer, "--length-unit": self.config.length_unit}
        flags = [flag for flag, value in given.items() if value is not None]
        if self.config.reward_weights is not None:
            flags.append("--reward-weights")
        return [f"{flag} is not used: {self.step.format} files hold {_HELD[flag]} of their own" for flag in flags]


_HELD = {"--tokenizer": "lengths", "--length-unit": "lengths", "--reward-weights": "one reward"}


class RecordedSource:
    """Recorded files, each one step, except for what frameworks spread over several files, and for files that hold several.

    A train dump and the rollout dump of the same rollout are one step, and so are the files that each rank wrote. A file
    without a sample beside others that have some is left out, and said.
    """

    def __init__(self, config: SourceConfig) -> None:
        wanted = config.rollout_format
        if wanted is not None and wanted not in READERS:
            raise RolloutError(f"--rollout-format '{wanted}' is unknown{nearest(wanted, READERS)}")
        forget_pipes()
        self.name = ", ".join(config.rollouts)
        self._config = config
        self.files = [file for path in config.rollouts for file in find_files(path, config.include_eval)]

    @property
    def format(self) -> str:
        """The format of the steps; several, with commas, where they differ."""
        return ", ".join(dict.fromkeys(step.format for step in self._steps))

    def __len__(self) -> int:
        return sum(len(step.labels) for step in self._steps)

    def __iter__(self) -> Iterator[RolloutBatch]:
        """Raises `RolloutError` for whatever is wrong with a file, and where lengths of two steps count different things."""
        first = None
        for part in self.parts:
            for batch in part.batches():
                first = first or (batch.name, batch.length_unit)
                need_one_unit(first, (batch.name, batch.length_unit))
                yield batch
                del batch  # which would be in memory while the next is read

    @cached_property
    def parts(self) -> list[RecordedPart]:
        """What can be read apart from each other: what frameworks write into one file, or spread over several."""
        found: list[RecordedPart] = []
        config, at, notes = replace(self._config, rollouts=()), 0, self._notes
        for step in self._steps:
            names = tuple(f"step {number} ({label})" for number, label in enumerate(step.labels, start=at))
            found.append(RecordedPart(step, names, config, notes))
            at, notes = at + len(names), ()
        return found

    @property
    def _notes(self) -> tuple[str, ...]:
        """What is said of the whole source, on its first batch."""
        left = [printable(path.name) for path in self._empty]
        said = f"{some(left)} {'holds' if len(left) == 1 else 'hold'} no sample: left out, and not counted as a step"
        return (said,) if left else ()

    @cached_property
    def _empty(self) -> list[Path]:
        """Files without a sample, where others have some."""
        empty = [path for path in self.files if is_empty(path)] if len(self.files) > 1 else []
        return empty if len(empty) < len(self.files) else []

    @cached_property
    def _steps(self) -> list[Step]:
        wanted = self._config.rollout_format
        files = [path for path in self.files if path not in self._empty]
        steps = of_ranks([step_of(path, wanted or detect_format(path)) for path in files])
        return steps if wanted else joined(steps)


def need_one_unit(first: tuple[str, str], other: tuple[str, str]) -> None:
    """Raise `RolloutError` where two batches, each a name and a unit, count lengths in different units."""
    if first[1] != other[1]:
        raise RolloutError(
            f"{other[0]} counts lengths in {unit_word(other[1])}, {first[0]} in {unit_word(first[1])}: they cannot be compared;"
            " read them one by one, or count both with --tokenizer"
        )


def of_ranks(steps: list[Step]) -> list[Step]:
    """Join the files that the ranks of one step wrote, where the first of them stood."""
    made: dict[object, Step] = {}
    for i, step in enumerate(steps):
        key: object = i
        if step.format == "prime-rl":
            key = step.path.parent
        elif step.format == "miles-train":
            from aggcli.rollouts.slime import peek

            key = ("rollout", peek(step.path)[1])
        before = made.get(key)
        made[key] = step if before is None else replace(before, ranks=(*before.ranks, step.path))
    return list(made.values())


def joined(steps: list[Step]) -> list[Step]:
    """Join each train dump with the rollout dump of the same rollout_id, where the first of the two stood.

    Evaluation dumps carry a rollout_id too, of another rollout, and are never joined.
    """
    kinds = {step.format for step in steps}
    if "slime-rollout" not in kinds or not kinds & {*TRAIN_DUMPS}:
        return steps
    from aggcli.rollouts.slime import peek

    found: dict[object, dict[str, list[int]]] = {}
    for i, step in enumerate(steps):
        kind = "train" if step.format in TRAIN_DUMPS else "rollout" if step.format == "slime-rollout" else None
        if kind and not is_eval(step.path):
            found.setdefault(peek(step.path)[1], {}).setdefault(kind, []).append(i)
    made: dict[int, Step | None] = dict(enumerate(steps))
    for rollout_id, places in found.items():
        train, rollout = places.get("train", []), places.get("rollout", [])
        if rollout_id is None or not train or not rollout:
            continue
        if len(train) > 1 or len(rollout) > 1:
            files = some(steps[i].path for i in (*train, *rollout))
            raise RolloutError(
                f"rollout_id {rollout_id} has {len(train)} train and {len(rollout)} rollout dumps ({files}); give one of each"
            )
        first, second = sorted((train[0], rollout[0]))
        made[first] = replace(steps[train[0]], rollout_dump=steps[rollout[0]].path)
        made[second] = None
    return [step for step in made.values() if step is not None]


# -- opening --------------------------------------------------------------------------------------------------------


def open_source(config: SourceConfig, seed: int) -> Source:
    """The source that `config` describes; `seed` is only used by synthetic rollouts.

    Raises `RolloutError` for a path that is missing, empty or matches nothing, and for an unknown format. Files
    themselves are opened when the source is asked for its length, its format or its batches.
    """
    if not config.rollouts:
        raise RolloutError(f"no rollouts given: --rollouts takes a file, a folder, a glob or '{SYNTHETIC}'")
    if config.rollouts == (SYNTHETIC,):
        from aggcli.rollouts.synthetic import SyntheticSource

        return SyntheticSource(config.synthetic, seed)
    if SYNTHETIC in config.rollouts:
        raise RolloutError(f"--rollouts {SYNTHETIC} stands alone; drop it or the files")
    return RecordedSource(config)
