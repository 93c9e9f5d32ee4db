"""Measuring on real ranks: each receives its own view, and only sums, counts and maxima come back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from aggcli.layout.views import LocalView
from aggcli.measurement.local import MeasureConfig, Partials, measure
from aggcli.measurement.reduce import from_vectors, to_vectors
from aggcli.world import World

Measured = tuple[list[Partials], Partials]
"""Each rank's partial sums, and the reduced ones."""


def measure_on_ranks(world: World, views: Sequence[LocalView], config: MeasureConfig) -> Measured:
    """Each rank receives its own view and nothing else, measures it, and only sums, counts and maxima come back.

    Runs at the root while the other ranks run `serve`. Returns every rank's partial sums and the reduced ones.
    """
    world.broadcast(config)
    (found,) = reduced(world, list(measure([world.scatter(views)], config).values()))
    return found


def serve(world: World) -> None:
    """The other ranks' side of `measure_on_ranks`, until the root calls `dismiss`."""
    while (config := world.broadcast(None)) is not None:
        reduced(world, list(measure([world.scatter([])], config).values()))


def dismiss(world: World) -> None:
    """Let the other ranks go home."""
    world.broadcast(None)


def reduced(world: World, own: Sequence[Partials]) -> list[Measured]:
    """Several measurements at once, such as those of the runs of a stack: from this rank's own partial sums of each to every
    rank's (at the root; empty elsewhere) and the reduced ones. Every rank must call it."""
    vectors = [to_vectors(part) for part in own]
    sums = iter(world.sum([number for vector, _ in vectors for number in vector]))
    maxima = iter(world.max([number for _, vector in vectors for number in vector]))
    by_rank = world.gather(list(own))
    found = []
    for at, (part, (own_sums, own_maxima)) in enumerate(zip(own, vectors, strict=True)):
        parts = [of_rank[at] for of_rank in by_rank]
        lengths = sorted(length for other in parts for length in other.correct_lengths or [])
        total = from_vectors(part, list(islice(sums, len(own_sums))), list(islice(maxima, len(own_maxima))), lengths)
        found.append((parts, total))
    return found
