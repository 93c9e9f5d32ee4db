"""Checkpoints: everything a stack needs to go on bit for bit; written beside and renamed, so there is always a whole one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from aggcli.errors import RecordError

CHECKPOINT = "checkpoint.safetensors"
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

    def of(self, runs: Sequence[str]) -> Checkpoint:
        """The part of it that holds these runs."""
        kept = [at for at, name in enumerate(self.runs) if name in runs]
        tensors = {name: value[kept] if len(value) else value for name, value in self.tensors.items()}
        gone = {name: when for name, when in self.gone.items() if name in runs}
        return replace(self, runs=[self.runs[at] for at in kept], gone=gone, tensors=tensors)


def joined(parts: Sequence[Checkpoint], runs: Sequence[str]) -> Checkpoint:
    """The checkpoint of a stack whose runs were trained in parts, in step; `runs`: the order of the whole stack."""
    names = [name for part in parts for name in part.runs]
    order = sorted(range(len(names)), key=lambda at: runs.index(names[at]))
    whole = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    return Checkpoint(
        max(part.step for part in parts),
        max(part.optimizer_step for part in parts),
        [names[at] for at in order],
        {name: when for part in parts for name, when in part.gone.items()},
        {name: value[order] if len(value) else value for name, value in whole.items()},
    )


def save(directory: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of a stack; the previous one stays whole until the new one is. Raises `RecordError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    facts = {name: getattr(checkpoint, name) for name in FACTS}
    draft = directory / (CHECKPOINT + ".tmp")
    tensors = {name: value.contiguous().cpu() for name, value in checkpoint.tensors.items()}
    try:
        save_file(tensors, draft, metadata={"aggcli": json.dumps(facts)})
    except SafetensorError as error:
        draft.unlink(missing_ok=True)
        raise RecordError(f"{directory / CHECKPOINT}: cannot be written ({error}); the one before it is kept") from None
    draft.replace(directory / CHECKPOINT)


def load(directory: Path) -> Checkpoint | None:
    """The checkpoint of a results directory, or None where none was written yet. Raises `RecordError` for a damaged one."""
    from safetensors import SafetensorError, safe_open

    path = directory / CHECKPOINT
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["aggcli"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read ({error}); remove it to start from the first step") from error
    gone = {name: (step, what) for name, (step, what) in facts["gone"].items()}
    return Checkpoint(facts["step"], facts["optimizer_step"], facts["runs"], gone, tensors)
