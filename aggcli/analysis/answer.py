"""The answer of a command: what stands above everything else, on the terminal, in JSON and on a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Whole sentences, each with its full stop. The first is short enough for a headline: what differs and by how much. Then at
    most four: what makes it, how sure that is, and what to do about it. Before them what went wrong. In JSON `answer`, the list
    of them.
    """

    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The sentences as one paragraph."""
        return " ".join(self.sentences)
