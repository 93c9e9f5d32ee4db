"""The formats that are read, each by its own module, and how a file's format is told from what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, some
from aggcli.rollouts.files import opened
from aggcli.rollouts.steps import Step
from aggcli.rollouts.torch_files import LEGACY, ZIP, load

if TYPE_CHECKING:  # the batch type needs torch, which telling formats does not
    from aggcli.rollouts.batch import RolloutBatch


Reader = Callable[[Step, Sequence[str], SourceConfig], "Iterator[RolloutBatch]"]
"""Reads the batches of a `Step`, one for each of its `labels`; they are called by the names given."""


def _reader(module: str, function: str = "read") -> Reader:
    """`function` of the module `aggcli.rollouts.<module>`, which is imported when a file is read; it reads one step."""

    def read(step: Step, names: Sequence[str], config: SourceConfig) -> Iterator[RolloutBatch]:
        yield getattr(import_module(f"aggcli.rollouts.{module}"), function)(step, names[0], config)

    return read


def _parted(module: str) -> Reader:
    """The same for a format whose files may hold several steps: its `read` yields them."""

    def read(step: Step, names: Sequence[str], config: SourceConfig) -> Iterator[RolloutBatch]:
        return import_module(f"aggcli.rollouts.{module}").read(step, names, config)

    return read


READERS: dict[str, Reader] = {
    "aggcli": _reader("jsonl"),
    "aggcli-parquet": _reader("parquet"),
    "slime-rollout": _reader("slime", "read_rollout"),
    "slime-train": _reader("slime", "read_train"),
    "miles-train": _reader("miles"),
    "verl": _parted("verl"),
    "trl": _parted("trl"),
    "nemo-rl": _reader("nemo_rl"),
    "prime-rl": _reader("prime_rl"),
    "tinker": _reader("tinker"),
    "skyrl": _reader("skyrl"),
    "openrlhf": _reader("openrlhf"),
}
"""Format name -> reader."""
PARTED = ("verl", "trl")
"""Formats whose files may hold several steps."""
TEXT_ONLY = ("verl", "trl")
"""Formats that hold texts, in which lengths are counted as the settings say."""

ROW_KEYS: dict[str, tuple[str, ...]] = {
    "prime-rl": ("micro_step", "token_ids", "inference_logprobs"),
    "nemo-rl": ("token_ids", "token_loss_mask", "sample_loss_mask"),
    "tinker": ("group_idx", "traj_idx", "steps"),
    "verl": ("input", "output", "score"),
    "openrlhf": ("sequences", "action_mask"),
}
"""Keys of the first lines by which JSON lines of another framework are told from our own."""


def detect_format(path: Path) -> str:
    """The format of a file, by what it holds; raises `RolloutError` for one that no reader knows."""
    with opened(path) as file:
        head = file.read(4096)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise RolloutError(f"{path}: is empty; give a file with at least one sample")
    if head.startswith(b"PAR1"):
        return _parquet_format(path)
    if head.startswith(b"\x80") and path.suffix != ".pt" and not head.startswith(LEGACY):
        return "skyrl"
    if head.startswith((ZIP, b"\x80")) or path.suffix == ".pt":
        from aggcli.rollouts.slime import peek

        return peek(path)[0]
    if text.startswith(b"{") or path.suffix == ".jsonl":
        return _row_format(path)
    raise RolloutError(
        f"{path}: is in no format known by its content (neither a torch file, nor Parquet, nor JSON lines); name its format"
        f" with --rollout-format ({', '.join(READERS)})"
    )


SMALL = 2**16
"""Bytes of a file that may be looked into for whether it holds any sample."""


def is_empty(path: Path) -> bool:
    """Whether a file certainly holds no sample: blank, a Parquet file without rows, or a small dump whose samples are none."""
    with opened(path) as file:
        head = file.read(SMALL + 1)
    if len(head) > SMALL and not head.startswith(b"PAR1"):
        return False
    if not head.strip():
        return True
    try:
        if head.startswith(b"PAR1"):
            from aggcli.rollouts.parquet import rows_of

            return rows_of(path) == 0
        if head.startswith((ZIP, LEGACY)):
            payload = load(path)
            samples = payload.get("samples") if isinstance(payload, dict) else None
            return isinstance(samples, list) and not samples
    except RolloutError:
        return False  # whoever reads it has the message
    return False


def step_of(path: Path, kind: str) -> Step:
    """The file as a step, or, where it holds several, as the step with these parts."""
    parts = import_module(f"aggcli.rollouts.{kind}").parts(path) if kind in PARTED else ()
    return Step(path, kind, parts=parts)


def _row_format(path: Path) -> str:
    """The format of JSON lines, by the keys of the first few; ours has the message where a line is broken."""
    from aggcli.rollouts.jsonl import first_keys

    keys = first_keys(path)
    return next((name for name, needed in ROW_KEYS.items() if keys.issuperset(needed)), "aggcli")


def _parquet_format(path: Path) -> str:
    from aggcli.rollouts.parquet import columns_of

    names = columns_of(path).keys()
    if {"prompt", "completion"} <= names:
        return "trl"
    if names & {"response_length", "loss_mask", "log_probs"}:
        return "aggcli-parquet"
    raise RolloutError(
        f"{path}: is Parquet with the columns {some(sorted(names), most=8)}; known are TRL's completions (prompt, completion,"
        " rewards) and our own (response_length, reward, log_probs, ...)"
    )
