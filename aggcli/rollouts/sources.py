"""Where batches come from: recorded files, each one step, or synthetic rollouts; read lazily, nothing kept."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, nearest, some

if TYPE_CHECKING:  # the batch type needs torch, which listing files does not
    from aggcli.rollouts.batch import RolloutBatch

SYNTHETIC = "synthetic"
EXTENSIONS = (".pt", ".jsonl")
"""Files that are taken from a folder."""
SLIME_FOLDERS = ("rollout_data", "train_data")
"""Where slime's `--dump-details` puts its dumps."""


class Source(Protocol):
    """Rollout steps: iterating yields one batch per step, named `step 0 (file name)`; iterating again reads again."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[RolloutBatch]: ...


@dataclass(frozen=True)
class Step:
    """The files of one step: one, or a train dump and the rollout dump of the same rollout."""

    path: Path
    format: str
    rollout_dump: Path | None = None


# -- readers --------------------------------------------------------------------------------------------------------


def _read_jsonl(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    from aggcli.rollouts.jsonl import read_jsonl

    return read_jsonl(step.path, name, reward_key=config.reward_key, group_size=config.group_size)


def _read_slime_rollout(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    from aggcli.rollouts.slime import read_slime

    options = {"reward_key": config.reward_key, "group_size": config.group_size}
    return read_slime(step.path, name, kind="slime-rollout", **options)


def _read_slime_train(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    from aggcli.rollouts.slime import read_slime

    options = {"reward_key": config.reward_key, "group_size": config.group_size}
    return read_slime(step.path, name, kind="slime-train", rollout_dump=step.rollout_dump, **options)


READERS: dict[str, Callable[[Step, str, SourceConfig], RolloutBatch]] = {
    "aggcli": _read_jsonl,
    "slime-rollout": _read_slime_rollout,
    "slime-train": _read_slime_train,
}
"""Format name -> reader of one step."""


def detect_format(path: Path) -> str:
    """The format of a file, by what it holds; raises `RolloutError` for one that no reader knows."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read ({error.strerror or error})") from error
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise RolloutError(f"{path}: is empty; give a file with at least one sample")
    if head.startswith((b"PK\x03\x04", b"\x80")) or path.suffix == ".pt":
        from aggcli.rollouts.slime import peek

        return peek(path)[0]
    if text.startswith(b"{") or path.suffix == ".jsonl":
        return "aggcli"
    raise RolloutError(
        f"{path}: is in no format known by its content (neither a torch file nor JSON lines); name its format with"
        f" --rollout-format ({', '.join(READERS)})"
    )


# -- recorded files -------------------------------------------------------------------------------------------------


class RecordedSource:
    """Recorded files, each one step, except that a train dump and the rollout dump of the same rollout are one."""

    def __init__(self, config: SourceConfig) -> None:
        wanted = config.rollout_format
        if wanted is not None and wanted not in READERS:
            raise RolloutError(f"--rollout-format '{wanted}' is unknown{nearest(wanted, READERS)}")
        self.name = ", ".join(config.rollouts)
        self._config = config
        self._files = [file for path in config.rollouts for file in find_files(path, config.include_eval)]

    @property
    def format(self) -> str:
        """The format of the steps; several, with commas, where they differ."""
        return ", ".join(dict.fromkeys(step.format for step in self._steps))

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[RolloutBatch]:
        for i, step in enumerate(self._steps):
            yield READERS[step.format](step, f"step {i} ({step.path.name})", self._config)

    @cached_property
    def _steps(self) -> list[Step]:
        wanted = self._config.rollout_format
        if wanted is not None:
            return [Step(path, wanted) for path in self._files]
        return joined([Step(path, detect_format(path)) for path in self._files])


def joined(steps: list[Step]) -> list[Step]:
    """Join each train dump with the rollout dump of the same rollout_id, where the first of the two stood.

    Evaluation dumps carry a rollout_id too, of another rollout, and are never joined.
    """
    kinds = {step.format for step in steps}
    if not {"slime-train", "slime-rollout"} <= kinds:
        return steps
    from aggcli.rollouts.slime import peek

    found: dict[object, dict[str, list[int]]] = {}
    for i, step in enumerate(steps):
        if step.format.startswith("slime-") and not _is_eval(step.path):
            found.setdefault(peek(step.path)[1], {}).setdefault(step.format, []).append(i)
    made: dict[int, Step | None] = dict(enumerate(steps))
    for rollout_id, places in found.items():
        train, rollout = places.get("slime-train", []), places.get("slime-rollout", [])
        if rollout_id is None or not train or not rollout:
            continue
        if len(train) > 1 or len(rollout) > 1:
            files = some(steps[i].path for i in (*train, *rollout))
            raise RolloutError(
                f"rollout_id {rollout_id} has {len(train)} train and {len(rollout)} rollout dumps ({files}); give one of each"
            )
        first, second = sorted((train[0], rollout[0]))
        made[first] = Step(steps[train[0]].path, "slime-train", steps[rollout[0]].path)
        made[second] = None
    return [step for step in made.values() if step is not None]


# -- finding files --------------------------------------------------------------------------------------------------


def find_files(path: str, include_eval: bool = False) -> list[Path]:
    """The rollout files that a file, a folder or a glob names, in natural order (2 before 10); never an empty list."""
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            return _files_of(place, include_eval)
        if place.exists():
            return [place]
        matches = [Path(match) for match in glob.glob(str(place), recursive=True)]
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not matches:
        what = "no file matches it" if glob.has_magic(path) else "no such file or folder"
        raise RolloutError(f"{path}: {what}; give a rollout file, a folder of them, a glob, or '{SYNTHETIC}'")
    if not include_eval and not _is_eval(place):  # a pattern such as eval_*.pt asks for them
        matches = [match for match in matches if not _is_eval(match)]
    files = [
        file
        for match in sorted(matches, key=_natural)
        for file in (_files_of(match, include_eval) if match.is_dir() else [match])
    ]
    if not files:
        raise RolloutError(f"{path}: matches only eval_ files; read them with --include-eval")
    return files


def _files_of(folder: Path, include_eval: bool) -> list[Path]:
    files = _listed(folder)
    if not files:
        files = [file for sub in SLIME_FOLDERS if (folder / sub).is_dir() for file in _listed(folder / sub)]
    if not files:
        raise RolloutError(f"{folder}: the folder holds no rollout files ({', '.join(EXTENSIONS)}); give one that does")
    kept = [file for file in files if include_eval or not _is_eval(file)]
    if not kept:
        raise RolloutError(f"{folder}: the folder holds only eval_ files; read them with --include-eval")
    return kept


def _listed(folder: Path) -> list[Path]:
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise RolloutError(f"{folder}: cannot be read ({error.strerror or error})") from error
    files = [file for file in entries if file.suffix in EXTENSIONS and file.name[0] != "." and file.is_file()]
    return sorted(files, key=_natural)


def _is_eval(path: Path) -> bool:
    return path.name.startswith("eval_")


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key under which 2.pt comes before 10.pt."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]


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
