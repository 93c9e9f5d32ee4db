"""Shares in this process, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aggcli.launch import Hear, Outcome, Work


@dataclass
class _Near:
    """The link of a share that runs in this process."""

    number: int
    hear: Hear
    launcher: Here

    @property
    def is_stopping(self) -> bool:
        return self.launcher.is_stopping

    def tell(self, message: Any) -> None:
        self.hear(self.number, message)


@dataclass
class Here:
    """This process."""

    is_stopping: bool = field(default=False, init=False)
    slots: int = field(default=1, init=False)
    is_elsewhere: bool = field(default=False, init=False)

    def run(self, work: Work, shares: Sequence[Any], hear: Hear) -> Iterator[Outcome]:
        for number, share in enumerate(shares):
            if self.is_stopping:
                yield Outcome(number, error=KeyboardInterrupt())
                continue
            try:
                result = work(share, _Near(number, hear, self))
            except (Exception, KeyboardInterrupt) as error:
                self.is_stopping |= isinstance(error, KeyboardInterrupt)
                if isinstance(error, Exception) and number + 1 < len(shares):
                    hear(number, error)
                yield Outcome(number, error=error)
            else:
                yield Outcome(number, result)

    def stop(self) -> None:
        self.is_stopping = True

    def close(self) -> None:
        """There is nothing to leave."""
