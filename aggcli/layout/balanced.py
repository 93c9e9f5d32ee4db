"""Karmarkar and Karp's differencing method, for even token loads, fast enough for millions of samples.

A partial solution is written as its parts that hold samples, heaviest first; parts that hold none are not written. Most merges
add a single sample, which moves one part. A part goes by one of its samples, and joining two is one entry in an array, so
members are looked up once, at the end.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

Parts = tuple[list[int], list[int]]
"""Of each part of a partial solution, heaviest first: its total, negated, and the sample that it goes by."""


def karmarkar_karp(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split positions into `parts` lists of nearly even total length (Karmarkar and Karp's differencing method).

    Repeatedly merges the two partial solutions with the largest spread (a tie: the older), putting the heaviest part of one
    with the lightest of the other. Each list is in rising order; the lists come heaviest first. Parts may be empty.
    """
    if parts == 1:
        return [list(range(len(lengths)))]
    length_S = np.asarray(lengths, dtype=np.int64)
    falling_S = np.argsort(-length_S, kind="stable")
    joined_to = array("q", range(len(length_S)))
    names = _differenced((-length_S[falling_S]).tolist(), falling_S.tolist(), parts, joined_to)
    part_S = np.full(len(length_S), parts)
    part_S[names] = np.arange(len(names))
    part_S = part_S[_ends(np.array(joined_to))]
    starts = np.bincount(part_S, minlength=parts).cumsum()[:-1]
    return [members.tolist() for members in np.split(np.argsort(part_S, kind="stable"), starts)]


def _differenced(lengths: list[int], samples: list[int], parts: int, joined_to: array[int]) -> list[int]:
    """What the parts go by, heaviest first, after all merges. `lengths` (negated) rise; `joined_to` takes, at a sample that a
    part went by, what the part that it was joined to goes by."""
    heap: list[tuple[int, int, Parts]] = []  # minus the spread, age, and the parts; of what was merged and not yet again
    totals, names = lengths[:1], samples[:1]  # of the one with the largest spread, which takes in the next
    single, made = 1, 0  # a sample alone has its length for a spread, and is older than whatever was merged
    while single < len(samples) or heap:
        if single < len(samples) and (not heap or lengths[single] <= heap[0][0]):
            total, name = lengths[single], samples[single]
            single += 1
            if len(totals) == parts:
                total, joined_to[name] = total + totals.pop(), names[-1]
                name = names.pop()
            at = bisect_right(totals, total)
            totals.insert(at, total)
            names.insert(at, name)
        else:
            totals, names = _merged((totals, names), heapq.heappop(heap)[2], parts, joined_to)
        spread = totals[0] - totals[-1] if len(totals) == parts else totals[0]
        made += 1
        if single < len(samples) and lengths[single] <= (min(spread, heap[0][0]) if heap else spread):
            heapq.heappush(heap, (spread, made, (totals, names)))
            totals, names = [lengths[single]], [samples[single]]
            single += 1
        elif heap:
            totals, names = heapq.heappushpop(heap, (spread, made, (totals, names)))[2]
    return names


def _merged(first: Parts, second: Parts, parts: int, joined_to: array[int]) -> Parts:
    """The heaviest part of `second` with the lightest of `first`, and so on. Equal totals keep the order that they had in
    `first`, then in `second` from its lightest."""
    (totals, names), (more, others) = first, second
    more.reverse()
    others.reverse()
    alone = min(parts - len(more), len(totals))
    for at in range(len(totals) - alone):
        more[at] += totals[alone + at]
        joined_to[names[alone + at]] = others[at]
    in_order = sorted(zip(totals[:alone] + more, names[:alone] + others, strict=True), key=itemgetter(0))
    return [total for total, _ in in_order], [name for _, name in in_order]


def _ends(joined_to: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the joins that begin at each sample end: at what its part goes by."""
    while not np.array_equal(further := joined_to[joined_to], joined_to):
        joined_to = further
    return joined_to
