"""Runs of a stack on a CPU: a few at a time, and each operation on one thread.

The tensors of one group of runs then fit a core's cache. The threads inside torch's operations meet at the end of every
operation and spin until the next one, which costs more than these small operations themselves, and a multiple of that where
another process wants the same cores: several cores are for several processes (`aggcli.launch`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SMALL_WIDTH = 256
"""Policies narrower than this run every operation on one thread."""


def groups_of(runs: int, most: int, device: torch.device) -> list[slice]:
    """Runs cut into even groups of at most `most`; one group where not on a CPU."""
    if device.type != "cpu":
        return [slice(0, runs)]
    groups = max(-(-runs // most), 1)
    bounds = [runs * group // groups for group in range(groups + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch inside: the order of sums, and so the last bits, then do not depend on the number of cores."""
    import torch

    threads = torch.get_num_threads()
    if threads == 1:  # to set them takes longer than many an operation
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_for(width: int) -> contextlib.AbstractContextManager[None]:
    """The threads of torch's operations on policies of this width: one for small ones, else those there are."""
    return one_thread() if width < SMALL_WIDTH else contextlib.nullcontext()
