"""For what figures are drawn, and how large that is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """How large figures are drawn. `width`: of the whole figure in inches, None: as its panels need; `points`: of plain words;
    `beside`: panels side by side at the most; `titled`: whether the figure's title is drawn in it.
    """

    width: float | None
    points: float
    beside: int
    titled: bool = True

    @property
    def scale(self) -> float:
        """Of all lengths that hold words, against those at 10 points."""
        return self.points / 10


SIZES = {"column": Size(3.4, 8, 1), "page": Size(7.0, 8.5, 3), "screen": Size(None, 10, 3)}
"""One column of a paper, both, and a screen; the words are of a size to be read at that width."""
