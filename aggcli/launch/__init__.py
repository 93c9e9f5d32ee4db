"""Where the shares of a job run: in this process one after another, in processes of this machine, or on a Ray cluster.

A share is a value that says all that is to be done; `work(share, link)` does it, and knows nothing of other shares nor of where
it runs. A launcher is only a place: what a share returns, and the order in which results are given, do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aggcli.config import LaunchConfig
from aggcli.errors import AggcliError, ExitCode

Hear = Callable[[int, Any], None]
"""Told what a share tells of itself while it runs, and the error of one that fails while others go on: (number of the share,
what it tells)."""


class ShareFailed(AggcliError):
    """A share ended without finishing. `exit_code` is its own where it said no in an orderly way."""

    def __init__(self, message: str, exit_code: int = ExitCode.CHECK_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Link(Protocol):
    """What a share has of whoever launched it."""

    @property
    def is_stopping(self) -> bool:
        """Whether the share is to come to an end where it can be gone on with."""
        ...

    def tell(self, message: Any) -> None:
        """Tell something of how the share goes: plain values, without tensors."""
        ...


Work = Callable[[Any, Link], Any]
"""A function of a module, which a process elsewhere imports; what it takes and returns is pickled where it goes elsewhere."""


@dataclass(frozen=True)
class Outcome:
    """How a share ended. `error`: None where it has finished, `KeyboardInterrupt` where it was told to stop first."""

    number: int
    result: Any = None
    error: BaseException | None = None

    @property
    def is_interrupted(self) -> bool:
        return isinstance(self.error, KeyboardInterrupt)


class Launcher(Protocol):
    """A place for shares."""

    @property
    def slots(self) -> int:
        """How many shares have room at a time."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether shares run on machines that may have other devices and see other files."""
        ...

    def run(self, work: Work, shares: Sequence[Any], hear: Hear) -> Iterator[Outcome]:
        """Every share's outcome, in the order of the shares. Few results wait for one before them, so memory stays bounded.

        A share that fails ends no other. Closing the iterator ends those that run. Raises `SettingError` where nothing can
        run at this place.
        """
        ...

    def stop(self) -> None:
        """Have the shares that run come to an end, and start no other. May be called by a signal handler."""
        ...

    def close(self) -> None:
        """Leave the place, where nothing runs afterwards. Until then shares may be run there again and again."""
        ...


def launcher_of(launch: LaunchConfig, name: str, workers: int, modules: tuple[str, ...]) -> Launcher:
    """The launcher of this name. `workers`: processes at a time; `modules`: what shares import. Raises `SettingError`."""
    if name == "here":
        from aggcli.launch.here import Here

        return Here()
    if name == "ray":
        from aggcli.launch.ray_cluster import joined

        return joined(launch)
    from aggcli.launch.processes import Processes

    return Processes(workers, modules)
