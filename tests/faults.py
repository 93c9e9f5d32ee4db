"""Faults put into the engine, so that a test sees the check that is there for them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import pytest

from aggcli.measurement import reduce
from aggcli.measurement.local import Partials


def ranks_add_up_to(monkeypatch: pytest.MonkeyPatch, changed: Callable[[Partials, int], Partials]) -> None:
    """Wherever the partial sums of ranks are added up, the total becomes `changed(total, number of parts)`."""
    right = reduce.combine

    def wrong(parts: Sequence[Partials]) -> Partials:
        return changed(right(parts), len(parts))

    for name, module in list(sys.modules.items()):
        if name.startswith("aggcli.") and getattr(module, "combine", None) is right:
            monkeypatch.setattr(module, "combine", wrong)


def averaged(total: Partials, parts: int) -> Partials:
    """The commonest fault: an average over ranks where a sum belongs."""
    return dataclasses.replace(total, sums={key: value / parts for key, value in total.sums.items()})


def off_by_half(name: str) -> Callable[[Partials, int], Partials]:
    """One metric of the catalogue half as large again wherever there are several ranks, and nothing else wrong."""

    def changed(total: Partials, parts: int) -> Partials:
        if parts == 1:
            return total
        sums = {key: value * 1.5 if key[0] == name and key[-1] != "count" else value for key, value in total.sums.items()}
        maxima = {key: value * 1.5 if key[0] == name else value for key, value in total.maxima.items()}
        assert (sums, maxima) != (total.sums, total.maxima), f"{name} is 0 or not measured, so the test shows nothing"
        return dataclasses.replace(total, sums=sums, maxima=maxima)

    return changed
