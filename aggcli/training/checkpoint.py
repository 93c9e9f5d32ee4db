"""Checkpoints: everything a stack needs to go on bit for bit; written beside and renamed, so there is always a whole one.

The runs of a results directory are cut into shares, each a stack with a checkpoint of its own. Where ranks hold parts of the
parameters each writes its own, by torch's distributed checkpoints in safetensors files, beside the file that names them: any
number of ranks reads them again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from aggcli.errors import RecordError, some
from aggcli.files import whole_file
from aggcli.records import CHECKPOINT_PARTS
from aggcli.world import ALONE, World, exchange

CHECKPOINT = "checkpoint.safetensors"


def checkpoint_of(directory: Path, share: int, shares: int) -> Path:
    """The checkpoint file of a share, 0 to `shares` - 1, in a results directory."""
    return directory / (CHECKPOINT if shares == 1 else f"checkpoint-{share}.safetensors")


FACTS = ("step", "optimizer_steps", "runs", "gone")


@dataclass(frozen=True)
class Checkpoint:
    """`step`: rollout steps done; `runs`: names of the runs still training; `optimizer_steps`: those that each has done;
    `gone`: name of each run that diverged -> (rollout step, why). `parts`: the folder that the tensors are still in, which
    then are without numbers, see `filled`."""

    step: int
    optimizer_steps: list[int]
    runs: list[str]
    gone: dict[str, tuple[int, str]]
    tensors: dict[str, Tensor]
    parts: Path | None = None


BESIDE_UP_TO = 2**28
"""Bytes up to which a checkpoint is written while its stack goes on: until it is, memory holds it twice."""


class Saver:
    """Writes the checkpoints of a stack, each beside the steps that follow it; the one before stays whole until it is. Every
    rank of the world must have one, and call the same methods. Around the steps: it is left with the last one on disk.
    """

    def __init__(self, path: Path, world: World = ALONE) -> None:
        self._path, self._world = path, world
        self._pool, self._writing = ThreadPoolExecutor(1), Future[None]()
        self._writing.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._pool.shutdown()
        if error is None:
            self.wait()

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep this one. Raises `RecordError` where it, or the one before, cannot be written; or the next call does."""
        self.wait()
        if self._world.size > 1 and any(_is_part(value) for value in checkpoint.tensors.values()):
            _save_parts(self._path, checkpoint, self._world)
        elif self._world.is_root:
            tensors = {name: value.contiguous().cpu() for name, value in checkpoint.tensors.items()}
            content = _as_bytes({name: getattr(checkpoint, name) for name in FACTS}, tensors)
            self._writing = self._pool.submit(_replace, self._path, content)
            if len(content) > BESIDE_UP_TO:
                self.wait()

    def wait(self) -> None:
        """Until what was saved is on disk. Raises `RecordError` where it cannot be written."""
        self._writing.result()


def _replace(path: Path, content: bytes) -> None:
    """A checkpoint that holds its tensors itself, in the place of any other."""
    _write(path, content)
    for name in CHECKPOINT_PARTS:  # of a run that more ranks have begun
        shutil.rmtree(path.with_name(name), ignore_errors=True)


def _save_parts(path: Path, checkpoint: Checkpoint, world: World) -> None:
    """Every rank's part into a folder that is not in use; then the file that names it; then the other folder goes."""
    distributed: Any = import_module("torch.distributed.checkpoint")

    before, after = CHECKPOINT_PARTS
    if world.is_root and _folder_of(path) == after:
        before, after = after, before
    after = world.broadcast(after)
    folder = path.with_name(after)
    if world.is_root:
        shutil.rmtree(folder, ignore_errors=True)
    world.everyone(None)  # nobody writes before it is gone
    with _told_parts(folder, "written"), exchange(computes=True):
        writer = distributed.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        distributed.save(checkpoint.tensors, storage_writer=writer, process_group=world.group)
    if world.is_root:
        facts = {name: getattr(checkpoint, name) for name in FACTS}
        _write(path, _as_bytes({**facts, "parts": after}, {}))
        shutil.rmtree(path.with_name(before), ignore_errors=True)


def _is_part(value: Tensor) -> bool:
    """Whether this rank holds a part of a tensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _folder_of(path: Path) -> str | None:
    """The folder of parts that a checkpoint file names."""
    found = load(path, only_facts=True)
    return None if found is None or found.parts is None else found.parts.name


def filled(checkpoint: Checkpoint, like: Mapping[str, Tensor], world: World = ALONE) -> Checkpoint:
    """The checkpoint with its numbers, each rank's as `like` has them. Every rank of the world must call it. Raises
    `RecordError`."""
    distributed: Any = import_module("torch.distributed.checkpoint")

    if checkpoint.parts is None:
        return checkpoint
    into = {name: _room(value, like[name]) for name, value in checkpoint.tensors.items()}
    with _told_parts(checkpoint.parts, "read"), exchange(computes=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # where one process reads what several have written
        distributed.load(
            into,
            storage_reader=distributed.HuggingFaceStorageReader(str(checkpoint.parts)),
            process_group=world.group,
            no_dist=world.group is None,
        )
    return dataclasses.replace(checkpoint, tensors=into, parts=None)


def _room(value: Tensor, like: Tensor) -> Tensor:
    """Zeros of a tensor's shape, this rank holding what it holds of `like`."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    own = like.to_local()
    local = own.new_zeros(len(value), *own.shape[1:])
    stride = torch.empty(value.shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=value.shape, stride=stride)


@contextmanager
def _told_parts(folder: Path, what: str) -> Iterator[None]:
    """What torch says of parts that cannot be written or read, in one line."""
    from torch.distributed.checkpoint.api import CheckpointException

    loggers = [logging.getLogger(name) for name in ("torch.distributed.checkpoint", "torch.distributed.checkpoint.filesystem")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    except CheckpointException as error:
        reasons = {" ".join(str(reason).split()) for reason, _ in error.failures.values()}
        raise RecordError(f"{folder}: cannot be {what} ({some(sorted(reasons), 1)[:300]})") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _parts_of(path: Path, facts: Any) -> Path | None:
    """The folder that the head of a checkpoint file names, None where it holds its tensors itself."""
    name = facts.get("parts") if isinstance(facts, dict) else None
    return path.with_name(name) if name in CHECKPOINT_PARTS else None


def _described(folder: Path) -> dict[str, Tensor]:
    """The tensors whose parts are in a folder, without their numbers. Raises `OSError` where it is not there."""
    distributed: Any = import_module("torch.distributed.checkpoint")

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.name} is not beside it")
    held = distributed.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(one.size, dtype=one.properties.dtype, device="meta") for name, one in held.items()}


def _as_bytes(facts: Mapping[str, Any], tensors: dict[str, Tensor]) -> bytes:
    from safetensors.torch import save as as_bytes

    return as_bytes(tensors, metadata={"aggcli": json.dumps(facts)})


def _write(path: Path, content: bytes) -> None:
    try:
        with whole_file(path) as draft:
            draft.write_bytes(content)
    except OSError as error:
        reason = error.strerror or error
        raise RecordError(f"{path}: cannot be written ({reason}); the one before it is kept") from None


def steps_done(path: Path) -> int:
    """The rollout steps that a share has done by its checkpoint, 0 where none was written yet. Raises `RecordError`."""
    return 0 if (found := load(path, only_facts=True)) is None else found.step


def load(path: Path, *, only_facts: bool = False) -> Checkpoint | None:
    """A checkpoint, or None where none was written yet. Raises `RecordError` for a damaged one."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["aggcli"])
            tensors = {name: file.get_tensor(name) for name in (() if only_facts else file.keys())}
        parts = _parts_of(path, facts)
        if parts is not None and not only_facts:
            tensors = _described(parts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: cannot be read ({error}); remove it to start from the first step") from error
    if (wrong := _wrong_fact(facts)) is not None:
        raise RecordError(f"{path}: {wrong}; remove it to start from the first step")
    gone = {name: (step, what) for name, (step, what) in facts["gone"].items()}
    return Checkpoint(facts["step"], facts["optimizer_steps"], facts["runs"], gone, tensors, parts)


def _wrong_fact(facts: Any) -> str | None:
    """What is wrong with a checkpoint file by the facts in its head, if anything is."""
    if not isinstance(facts, dict):
        return f"is damaged: its facts are not {', '.join(FACTS)}"
    if lacking := [name for name in FACTS if name not in facts]:
        return f"is of another version of aggcli, or damaged: it does not say {some(lacking)}"
    wrong = _wrong_value(facts)
    return None if wrong is None else f"is damaged: {wrong}"


def _wrong_value(facts: Mapping[str, Any]) -> str | None:
    if not _is_count(facts["step"]):
        return "step is no count"
    if not isinstance(facts["runs"], list) or not all(isinstance(name, str) for name in facts["runs"]):
        return "runs is no list of names"
    steps = facts["optimizer_steps"]
    if not isinstance(steps, list) or len(steps) != len(facts["runs"]) or not all(map(_is_count, steps)):
        return "optimizer_steps is no count of each run"
    if not isinstance(facts["gone"], dict) or not all(_is_gone(when) for when in facts["gone"].values()):
        return "gone does not hold the step and the reason of each run that diverged"
    return None


def _is_count(fact: Any) -> bool:
    return type(fact) is int and fact >= 0


def _is_gone(when: Any) -> bool:
    return isinstance(when, list) and [type(item) for item in when] == [int, str]


def need_fit(path: Path, checkpoint: Checkpoint, runs: Sequence[str], like: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that is not one of this stack: of other runs, or of tensors that are not like those of the stack
    before its first step (names, type, and shape but for the runs that diverged). Raises `RecordError`.
    """
    advice = "remove it to start from the first step"
    names = [*checkpoint.runs, *checkpoint.gone]
    if sorted(names) != sorted(runs):
        raise RecordError(f"{path}: holds the runs {some(names, 3)}, and this is a stack of {some(runs, 3)}; {advice}")
    if checkpoint.tensors.keys() != like.keys():
        raise RecordError(f"{path}: holds {some(checkpoint.tensors, 6)}, and not {some(like, 6)}; {advice}")
    for name, value in checkpoint.tensors.items():
        shape = (len(checkpoint.runs), *like[name].shape[1:]) if len(like[name]) else tuple(like[name].shape)
        if (tuple(value.shape), value.dtype) != (shape, like[name].dtype):
            found, wanted = (
                f"{tuple(size)} of {kind}" for size, kind in ((value.shape, value.dtype), (shape, like[name].dtype))
            )
            raise RecordError(f"{path}: {name} is {found}, and this policy's is {wanted}; {advice}")
