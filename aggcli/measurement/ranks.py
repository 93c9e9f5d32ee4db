"""Measuring on real ranks: each receives its own view, and only sums, counts and maxima come back."""

from __future__ import annotations

from collections.abc import Sequence

from aggcli.layout.views import LocalView
from aggcli.measurement.local import MeasureConfig, Partials, measure
from aggcli.measurement.reduce import from_vectors, to_vectors
from aggcli.world import World


def measure_on_ranks(world: World, views: Sequence[LocalView], config: MeasureConfig) -> tuple[list[Partials], Partials]:
    """Each rank receives its own view and nothing else, measures it, and only sums, counts and maxima come back.

    Runs at the root while the other ranks run `serve`. Returns every rank's partial sums and the reduced ones.
    """
    world.broadcast(config)
    return _measure_own(world, views, config)


def serve(world: World) -> None:
    """The other ranks' side of `measure_on_ranks`, until the root calls `dismiss`."""
    while (config := world.broadcast(None)) is not None:
        _measure_own(world, [], config)


def dismiss(world: World) -> None:
    """Let the other ranks go home."""
    world.broadcast(None)


def _measure_own(world: World, views: Sequence[LocalView], config: MeasureConfig) -> tuple[list[Partials], Partials]:
    part = measure(world.scatter(views), config)
    sums, maxima = to_vectors(part)
    total_sums, total_maxima = world.sum(sums), world.max(maxima)
    parts = world.gather(part)
    lengths = [length for other in parts for length in other.correct_lengths or []]
    return parts, from_vectors(part, total_sums, total_maxima, sorted(lengths))
