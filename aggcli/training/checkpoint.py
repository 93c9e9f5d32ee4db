"""Checkpoints: everything a stack needs to go on bit for bit; written beside and renamed, so there is always a whole one.

The runs of a results directory are cut into shares, each a stack with a checkpoint of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from aggcli.errors import RecordError, some
from aggcli.files import whole_file

CHECKPOINT = "checkpoint.safetensors"


def checkpoint_of(directory: Path, share: int, shares: int) -> Path:
    """The checkpoint file of a share, 0 to `shares` - 1, in a results directory."""
    return directory / (CHECKPOINT if shares == 1 else f"checkpoint-{share}.safetensors")


FACTS = ("step", "optimizer_step", "runs", "gone")


@dataclass(frozen=True)
class Checkpoint:
    """`step`: rollout steps done; `optimizer_step`: optimizer steps done; `runs`: names of the runs still training;
    `gone`: name of each run that diverged -> (rollout step, why)."""

    step: int
    optimizer_step: int
    runs: list[str]
    gone: dict[str, tuple[int, str]]
    tensors: dict[str, Tensor]


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of a stack; the previous one stays whole until the new one is. Raises `RecordError`."""
    from safetensors.torch import save as as_bytes

    facts = {name: getattr(checkpoint, name) for name in FACTS}
    tensors = {name: value.contiguous().cpu() for name, value in checkpoint.tensors.items()}
    try:
        with whole_file(path) as draft:
            draft.write_bytes(as_bytes(tensors, metadata={"aggcli": json.dumps(facts)}))
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
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: cannot be read ({error}); remove it to start from the first step") from error
    if (wrong := _wrong_fact(facts)) is not None:
        raise RecordError(f"{path}: is damaged: {wrong}; remove it to start from the first step")
    gone = {name: (step, what) for name, (step, what) in facts["gone"].items()}
    return Checkpoint(facts["step"], facts["optimizer_step"], facts["runs"], gone, tensors)


def _wrong_fact(facts: Any) -> str | None:
    """What is wrong with the facts in the head of a checkpoint file, if anything is."""
    if not isinstance(facts, dict) or not set(FACTS) <= facts.keys():
        return f"its facts are not {', '.join(FACTS)}"
    for name in ("step", "optimizer_step"):
        if type(facts[name]) is not int or facts[name] < 0:
            return f"{name} is no count"
    if not isinstance(facts["runs"], list) or not all(isinstance(name, str) for name in facts["runs"]):
        return "runs is no list of names"
    if not isinstance(facts["gone"], dict) or not all(_is_gone(when) for when in facts["gone"].values()):
        return "gone does not hold the step and the reason of each run that diverged"
    return None


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
