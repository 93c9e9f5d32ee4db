"""Starting and joining ranks: a job that needs several runs this program again on each, or joins those of a torchrun."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from aggcli.cli.console import invocation, say
from aggcli.config import RunConfig
from aggcli.errors import AggcliError, ExitCode, SettingError

if TYPE_CHECKING:
    from aggcli.world import World

Result = TypeVar("Result")


def on_ranks(config: RunConfig, work: Callable[[RunConfig, World], Result | None]) -> Result | None:
    """`work(settings, world)` at each rank of the layout in force, this process being one of them; None where the ranks were
    started from here, which then have done it, or where it is not the root that returns.

    Raises what `work` raises; what a rank other than the root raises, the root says once.
    """
    from aggcli import world as worlds

    ranks = config.layout.dp * config.layout.cp
    if not worlds.was_started_by_torchrun():
        if ranks == 1:
            return work(config, worlds.ALONE)
        if ranks > 2 * (os.cpu_count() or 1):
            say(f"starting {ranks} ranks on {os.cpu_count()} cores, which takes a while")
        worlds.start_ranks(ranks, invocation())
        return None
    world = worlds.join()
    try:
        return work(fitted_to_launcher(config, world.size), world)
    except (AggcliError, KeyboardInterrupt) as error:
        if world.is_root or isinstance(error, worlds.PeerLost):
            raise
        raise worlds.RankFailed("", getattr(error, "exit_code", ExitCode.INTERRUPTED)) from None  # the root says it once
    finally:
        worlds.leave(world)


def fitted_to_launcher(config: RunConfig, size: int) -> RunConfig:
    """The settings with --dp taken from the launcher where it was left at 1; refused where the two contradict."""
    layout = config.layout
    if layout.dp == 1 and size % layout.cp == 0:
        layout = dataclasses.replace(layout, dp=size // layout.cp)
    if layout.dp * layout.cp != size:
        raise SettingError(
            f"--dp {layout.dp} --cp {layout.cp} needs {layout.dp * layout.cp} ranks, but the launcher started {size};"
            f" start {layout.dp * layout.cp} or change --dp and --cp"
        )
    return dataclasses.replace(config, layout=layout)
