"""Which files make up a step, and which steps a file holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aggcli.errors import printable


@dataclass(frozen=True)
class Part:
    """One step of a file that holds several: what its rows call it, and how many they are."""

    key: int | str
    rows: int


@dataclass(frozen=True)
class Step:
    """The files of one step: one; or those of all ranks; or a train dump and the rollout dump of the same rollout.

    Or a file that holds several steps, its `parts`, in the order in which they are read.
    """

    path: Path
    format: str
    rollout_dump: Path | None = None
    ranks: tuple[Path, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The step's own files, without the rollout dump."""
        return (self.path, *self.ranks)

    @property
    def labels(self) -> list[str]:
        """How the name of each of its steps calls the file, or the folder where files of every step have the same name."""
        label = self.path.name
        if self.format in ("prime-rl", "tinker"):
            label = self.path.parent.name if self.format == "prime-rl" else "/".join(self.path.parts[-2:])
        label = printable(label)
        return [f"{label}, step {printable(str(part.key))}" for part in self.parts] or [label]
