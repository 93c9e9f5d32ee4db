"""Runs of a stack over the cores of a CPU: a few runs at a time, each group in a thread of its own.

The tensors of one group of runs then fit a core's cache, and threads meet once a pass. The threads inside torch's operations
meet at the end of every operation instead, which costs more than these small operations themselves, and a multiple of that
where another process wants the same cores.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Result = TypeVar("Result")

SMALL_WIDTH = 256
"""Policies narrower than this run every operation on one thread, also when there is one run only."""


def groups_of(runs: int, most: int, device: torch.device) -> list[slice]:
    """Runs cut into groups of at most `most`, evenly over the threads that torch may use; one group where not on a CPU."""
    if device.type != "cpu" or torch.is_autocast_enabled("cpu"):  # autocast does not follow into other threads
        return [slice(0, runs)]
    threads = torch.get_num_threads()
    groups = min(runs, -(-runs // most // threads) * threads if runs > 1 else 1)
    bounds = [runs * group // groups for group in range(groups + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


def each_group(work: Callable[[slice], Result], groups: list[slice], width: int) -> list[Result]:
    """`work` of every group, in order, for policies of this width; several groups run side by side, each on one thread."""
    threads = min(torch.get_num_threads(), len(groups))
    if threads > 1:
        return list(_pool(os.getpid(), threads).map(work, groups))
    with one_thread() if width < SMALL_WIDTH else contextlib.nullcontext():
        return [work(group) for group in groups]


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of this process (a forked one needs its own); each is a single thread for torch too."""
    return ThreadPoolExecutor(threads, f"aggcli-{process}", initializer=lambda: torch.set_num_threads(1))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch inside: the order of sums, and so the last bits, then do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class ByGroup(Function):
    """`work(group, parameters of the group)`, a tuple of tensors [R of the group, ...], for every group of runs, joined.

    Called with (work, groups, width of the policies, *parameters). Forward and backward run group by group; runs are
    independent, so the gradient of each group's parameters is its own.
    """

    @staticmethod
    def forward(ctx: Any, work: Callable[..., tuple[Tensor, ...]], groups: list[slice], width: int, *parameters: Tensor) -> Any:
        wanted = any(ctx.needs_input_grad)

        def one(group: slice) -> tuple[list[Tensor], tuple[Tensor, ...]]:
            with torch.set_grad_enabled(wanted):
                own = [value[group].detach().requires_grad_(wanted) for value in parameters]
                return own, work(group, *own)

        ctx.groups, ctx.width, ctx.pieces = groups, width, each_group(one, groups, width)
        outputs = zip(*(made for _, made in ctx.pieces), strict=True)
        return tuple(torch.cat([piece.detach() for piece in output]) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pieces = dict(zip((group.start for group in ctx.groups), ctx.pieces, strict=True))

        def one(group: slice) -> tuple[Tensor, ...]:
            own, made = pieces[group.start]
            return torch.autograd.grad(made, own, [grad[group] for grad in grads])

        parts = zip(*each_group(one, ctx.groups, ctx.width), strict=True)
        return None, None, None, *(torch.cat(part) for part in parts)
