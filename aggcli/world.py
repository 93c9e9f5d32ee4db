"""Ranks: start them or join them, and the only ways numbers cross between them. Nothing else knows a process group exists."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from aggcli import lifeline
from aggcli.errors import AggcliError, ExitCode, SettingError, signal_name

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def _dist() -> ModuleType:
    """Torch's process groups, imported where there is one: a world of one does without torch."""
    import torch.distributed

    return torch.distributed


class RankFailed(AggcliError):
    """A started rank ended without finishing. `exit_code` is the rank's own where it said no in an orderly way."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerLost(AggcliError):
    """Another rank went away in the middle of an exchange. Silent under our own launcher, which names the rank that died."""

    exit_code = ExitCode.CHECK_FAILED


_OF_A_PEER = re.compile("gloo|nccl|connection|socket|peer|timed out", re.IGNORECASE)


@contextmanager
def exchange(*, computes: bool = False) -> Iterator[None]:
    """Around every call that waits for other ranks. `computes`: it does other things too, whose errors are let through."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        if computes and not isinstance(error, _dist().DistError) and not _OF_A_PEER.search(reason):
            raise
        raise PeerLost("" if lifeline.started_here() else f"this rank lost the others: {reason}") from error


@dataclass(frozen=True)
class World:
    """A set of ranks, this process being one of them; a single process is a world of one, by the same calls."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The process group; None in a world of one."""

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sum over ranks, on every rank."""
        return self._reduced(values, "SUM")

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks, on every rank."""
        return self._reduced(values, "MAX")

    def _reduced(self, values: Sequence[float], operation: Literal["SUM", "MAX"]) -> list[float]:
        if self.group is None or not values:
            return list(values)
        import torch

        tensor = torch.tensor(values, dtype=torch.float64)
        with exchange():
            _dist().all_reduce(tensor, op=getattr(_dist().ReduceOp, operation), group=self.group)
        return tensor.tolist()

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, in rank order, at the root; an empty list elsewhere."""
        if self.group is None:
            return [item]
        items: list[Any] = [None] * self.size
        with exchange():
            _dist().gather_object(item, items if self.is_root else None, dst=0, group=self.group)
        return items if self.is_root else []

    def everyone(self, item: Any) -> list[Any]:
        """Every rank's item, in rank order, on every rank."""
        if self.group is None:
            return [item]
        items: list[Any] = [None] * self.size
        with exchange():
            _dist().all_gather_object(items, item, group=self.group)
        return items

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, in place, on every rank."""
        if self.group is not None:
            with exchange():
                _dist().all_reduce(tensor, op=_dist().ReduceOp.SUM, group=self.group)
        return tensor

    def tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, all of one shape, in rank order, on every rank."""
        if self.group is None:
            return [tensor]
        import torch

        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with exchange():
            _dist().all_gather(found, tensor.contiguous(), group=self.group)
        return found

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks as a mesh of one axis, over which torch cuts parameters. Not for a world of one."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, device.type)

    def split(self, size: int) -> World:
        """This rank's part of the world when it is cut into parts of `size` consecutive ranks. Every rank must call it."""
        if self.group is None:
            return self
        mine = World()
        for first in range(0, self.size, size):
            with exchange():
                group = _dist().new_group(list(range(first, first + size)))
            if first <= self.rank < first + size:
                mine = World(self.rank - first, size, group)
        return mine

    def scatter(self, items: Sequence[Any]) -> Any:
        """Rank r receives `items[r]`, and nothing of the others'; `items` are the root's, and ignored elsewhere."""
        if self.group is None:
            (item,) = items
            return item
        received: list[Any] = [None]
        with exchange():
            _dist().scatter_object_list(received, list(items) if self.is_root else None, src=0, group=self.group)
        return received[0]

    def broadcast(self, item: Any) -> Any:
        """The root's item, on every rank."""
        if self.group is None:
            return item
        box = [item]
        with exchange():
            _dist().broadcast_object_list(box, src=0, group=self.group)
        return box[0]


ALONE = World()
"""A world of one."""


def was_started_by_torchrun() -> bool:
    """True in a process that torch's elastic launcher (torchrun, or `start_ranks`) started."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def join() -> World:
    """Join the process group that the launcher describes, or be a world of one. Threads are shared out among ranks."""
    if not was_started_by_torchrun():
        return World()
    import torch
    import torch.distributed as dist

    with exchange():
        on_cuda = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    return World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def local_rank() -> int:
    """This rank's number on its own machine: which of its devices it takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def leave(world: World) -> None:
    """Leave the process group, if there is one."""
    if world.group is not None:
        _dist().destroy_process_group()


def start_ranks(ranks: int, arguments: Sequence[str]) -> None:
    """Run `python -m aggcli <arguments>` on `ranks` local processes with torch's elastic launcher, and wait for them.

    Raises `RankFailed` when a rank ends badly: it names the rank, and carries its exit code when the rank itself has said why.
    Ctrl-C goes on to the ranks, which finish the step in hand.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if ranks > 64 * (os.cpu_count() or 1):
        raise SettingError(f"{ranks} ranks on {os.cpu_count()} cores: use --layouts to evaluate large layouts in-process")
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # the agent's module has a level of its own
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else a folder in /tmp, left there when this process is killed
    )
    os.environ[lifeline.LAUNCHER] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-m", "aggcli", *arguments)
    except SignalException:
        raise RankFailed("", ExitCode.INTERRUPTED) from None
    except ChildFailedError as error:
        raise _cause(error.failures) from None
    finally:
        del os.environ[lifeline.LAUNCHER]


def _cause(failures: Mapping[int, Any]) -> RankFailed:
    """What ended the run. Ranks that outlive a failure lose their peer (exit code 1) or are ended by the launcher (SIGTERM):
    those are named last."""
    followed = (-signal.SIGTERM, PeerLost.exit_code)
    rank, failure = min(failures.items(), key=lambda item: (item[1].exitcode in followed, item[1].exitcode == -signal.SIGTERM))
    if failure.exitcode > 0:
        return RankFailed("", failure.exitcode)
    name = signal_name(-failure.exitcode)
    return RankFailed(f"rank {rank} (process {failure.pid}) was ended by {name}; what was recorded is kept", 1)
