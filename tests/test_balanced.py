"""The balanced partition rule: Karmarkar and Karp's method, beside a plain writing of it and by hand."""

from __future__ import annotations

import random
import time

import pytest

from aggcli.layout.schedule import parse_layout, schedule_step


def partitions(lengths: list[int], ranks: int) -> list[list[int]]:
    schedule = schedule_step(parse_layout(f"dp{ranks}:balanced"), lengths)
    return [list(partition) for partition in schedule.partitions]


def plainly(lengths: list[int], ranks: int) -> list[list[int]]:
    """The method as it is told: all parts written out, the two widest found by looking at each, no clever structure."""
    solutions = [[(length, [at]), *[(0, [])] * (ranks - 1)] for at, length in enumerate(lengths)]
    while len(solutions) > 1:
        first = max(solutions, key=lambda parts: parts[0][0] - parts[-1][0])  # of equals the oldest, which stands first
        solutions.remove(first)
        second = max(solutions, key=lambda parts: parts[0][0] - parts[-1][0])
        solutions.remove(second)
        pairs = zip(first, reversed(second), strict=True)
        solutions.append(sorted(((a + b, left + right) for (a, left), (b, right) in pairs), key=lambda part: -part[0]))
    return [sorted(members) for _, members in solutions[0]]


def test_five_lengths_on_two_ranks_by_hand() -> None:
    """8 | 7 differ by 1 and 6 | 5 by 1; 4 joins the 7: 7 + 4 | 8 differ by 3; the 5 joins the heavier: 7 + 5 + 4 | 8 + 6.

    Karmarkar and Karp's own example: 16 | 14, where 15 | 15 would have been there.
    """
    assert partitions([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]


def test_samples_without_a_token_are_held_once_too_and_ranks_beyond_the_samples_are_idle() -> None:
    assert sorted(at for part in partitions([0, 0, 5, 0, 0, 0], 4) for at in part) == list(range(6))
    assert partitions([4, 4, 9], 5) == [[2], [0], [1], [], []]


def test_a_hundred_thousand_samples_on_64_ranks_take_seconds() -> None:
    """Three seconds, which a merge that goes through all 64 parts exceeds; loads are within one token of each other."""
    draw = random.Random(0)
    lengths = [draw.randint(2, 215) for _ in range(100_000)]
    began = time.process_time()
    parts = partitions(lengths, 64)
    assert time.process_time() - began < 3
    loads = [sum(lengths[at] for at in part) for part in parts]
    assert max(loads) - min(loads) <= 1
    assert sorted(at for part in parts for at in part) == list(range(100_000))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_the_partitions_are_those_of_the_method_as_it_is_told(ranks: int) -> None:
    """100 random lists of 1 to 150 lengths: of few values (ties everywhere), of many, and of a heavy tail."""
    draw = random.Random(ranks)
    for _ in range(100):
        most, samples = draw.choice((1, 3, 50, 10**9)), draw.randint(1, 150)
        lengths = [min(int(draw.paretovariate(0.8)), 10**9) if most == 50 else draw.randint(1, most) for _ in range(samples)]
        assert partitions(lengths, ranks) == plainly(lengths, ranks), lengths
