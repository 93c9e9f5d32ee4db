"""The y axis that layouts and their ranks stand on: a row for what a layout's ranks come to, and a row a rank under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from aggcli.analysis.frames import Frames, rows

_ROW, _GAP = 1.0, 0.5
"""Height of a rank's row, and between layouts; in data units."""
_INCHES = 0.19
"""Height of a row on a screen."""
_HIGHEST = 12.0
"""Inches that a panel has at the most."""


@dataclass(frozen=True)
class Places:
    """Where layouts and ranks stand, top to bottom: (layout, rank) -> y; rank None is what the ranks come to."""

    at: dict[tuple[str, int | None], float]
    bottom: float

    @property
    def layouts(self) -> list[str]:
        """The layouts, top to bottom."""
        return [name for name, rank in self.at if rank is None]

    @property
    def longest(self) -> int:
        """Characters of the longest name, of which bold ones are wider."""
        return int(1.2 * max(map(len, self.layouts), default=0)) + 1

    @property
    def height(self) -> float:
        """Inches on a screen that the rows take."""
        return min(_HIGHEST, _INCHES * self.bottom)


def places_of(layouts: Sequence[pd.DataFrame], ranks: Sequence[pd.DataFrame]) -> Places:
    """The places of every layout, and of every rank that any of these frames has of it."""
    at: dict[tuple[str, int | None], float] = {}
    y = 0.0
    for name in dict.fromkeys(name for frame in layouts for name in frame["layout"]):
        own = sorted({int(rank) for frame in ranks for rank in rows(frame, layout=name)["rank"]})
        for rank in (None, *own):
            at[name, rank] = y
            y += _ROW
        y += _GAP
    return Places(at, y)


def of_step(frames: Frames, label: str, step: int | None) -> tuple[int, pd.DataFrame, pd.DataFrame]:
    """(step, its layouts, its ranks) of a run; `step` None: its last."""
    layouts = rows(frames.layouts, run=label)
    at = step if step is not None else max(layouts["step"].tolist(), default=0)
    return at, rows(layouts, step=at), rows(frames.ranks, run=label, step=at)


def name_rows(axes: Axes, places: Places) -> None:
    """The layouts' names in bold, `rank 0` and so on under each."""
    labels = [name if rank is None else f"rank {rank}" for name, rank in places.at]
    axes.set_yticks(list(places.at.values()), labels)
    for tick, (_, rank) in zip(axes.get_yticklabels(), places.at, strict=True):
        tick.set_fontweight("bold" if rank is None else "normal")
        tick.set_color("0.1" if rank is None else "0.35")
        tick.set_fontsize("medium" if rank is None else "small")


def frame_rows(axes: Axes, places: Places) -> None:
    """The limits of the y axis, without ticks or lines across."""
    axes.set_ylim(places.bottom - _GAP, -0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
