"""The formats that are read, each by its own module, and how a file's format is told from what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, some

if TYPE_CHECKING:  # the batch type needs torch, which telling formats does not
    from aggcli.rollouts.batch import RolloutBatch


@dataclass(frozen=True)
class Step:
    """The files of one step: one; or those of all ranks; or a train dump and the rollout dump of the same rollout."""

    path: Path
    format: str
    rollout_dump: Path | None = None
    ranks: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The step's own files, without the rollout dump."""
        return (self.path, *self.ranks)

    @property
    def label(self) -> str:
        """How the step's name calls its file, or its folder where files of every step have the same name."""
        if self.format == "prime-rl":
            return self.path.parent.name
        return "/".join(self.path.parts[-2:]) if self.format == "tinker" else self.path.name


Reader = Callable[[Step, str, SourceConfig], "RolloutBatch"]


def _reader(module: str, function: str = "read") -> Reader:
    """`function` of the module `aggcli.rollouts.<module>`, which is imported when a file is read."""

    def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
        return getattr(import_module(f"aggcli.rollouts.{module}"), function)(step, name, config)

    return read


READERS: dict[str, Reader] = {
    "aggcli": _reader("jsonl"),
    "aggcli-parquet": _reader("parquet"),
    "slime-rollout": _reader("slime", "read_rollout"),
    "slime-train": _reader("slime", "read_train"),
    "miles-train": _reader("miles"),
    "verl": _reader("verl"),
    "trl": _reader("trl"),
    "nemo-rl": _reader("nemo_rl"),
    "prime-rl": _reader("prime_rl"),
    "tinker": _reader("tinker"),
    "skyrl": _reader("skyrl"),
    "openrlhf": _reader("openrlhf"),
}
"""Format name -> reader of one step."""

ROW_KEYS: dict[str, tuple[str, ...]] = {
    "prime-rl": ("micro_step", "token_ids", "inference_logprobs"),
    "nemo-rl": ("token_ids", "token_loss_mask", "sample_loss_mask"),
    "tinker": ("group_idx", "traj_idx", "steps"),
    "verl": ("input", "output", "score"),
    "openrlhf": ("sequences", "action_mask"),
}
"""Keys of the first line by which JSON lines of another framework are told from our own."""
TORCH_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9"
"""How a file of torch.save in its older format begins: a pickle of torch's magic number."""


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
    if head.startswith(b"PAR1"):
        return _parquet_format(path)
    if head.startswith(b"\x80") and path.suffix != ".pt" and not head.startswith(TORCH_LEGACY):
        return "skyrl"
    if head.startswith((b"PK\x03\x04", b"\x80")) or path.suffix == ".pt":
        from aggcli.rollouts.slime import peek

        return peek(path)[0]
    if text.startswith(b"{") or path.suffix == ".jsonl":
        return _row_format(path)
    raise RolloutError(
        f"{path}: is in no format known by its content (neither a torch file, nor Parquet, nor JSON lines); name its format"
        f" with --rollout-format ({', '.join(READERS)})"
    )


def _row_format(path: Path) -> str:
    """The format of JSON lines, by the keys of the first; ours has the message where the first line is broken."""
    from aggcli.rollouts.jsonl import first_row

    keys = first_row(path)
    return next((name for name, needed in ROW_KEYS.items() if keys.issuperset(needed)), "aggcli")


def _parquet_format(path: Path) -> str:
    from aggcli.rollouts.parquet import column_names

    names = column_names(path)
    if {"prompt", "completion"} <= names:
        return "trl"
    if names & {"response_length", "loss_mask", "log_probs"}:
        return "aggcli-parquet"
    raise RolloutError(
        f"{path}: is Parquet with the columns {some(sorted(names), most=8)}; known are TRL's completions (prompt, completion,"
        " rewards) and our own (response_length, reward, log_probs, ...)"
    )
