"""What a training job needs torch for before its first share: where its shares are forked from a server, so is this, and the
process that was asked never imports torch; everywhere else it is done in this process, by the same functions."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.errors import AggcliError, RecordError, RolloutError, some
from aggcli.jobs.listening import Listener, heard_by, say
from aggcli.jobs.training_words import accuracy_before, foretell
from aggcli.launch import processes
from aggcli.policy.groups import SMALL_WIDTH

if TYPE_CHECKING:
    from aggcli.grid import Setup
    from aggcli.jobs.training import TrainingRequest
    from aggcli.launch import Link
    from aggcli.rules import Rule
    from aggcli.training.stack import RunSpec
    from aggcli.world import World

IMPORTED = ("torch", "aggcli.grid", "aggcli.jobs.training", "safetensors.torch", "aggcli.sinks")
"""What the share of a training job imports, and its preparation."""


@dataclass(frozen=True)
class Prepared:
    """A job whose settings are settled. `request`: with the settings and modes that its rollouts allow; `runs`: before learning
    rates are matched; `is_small`: see `Start.is_small`; `device`: where this machine trains; `cores`: the threads that torch
    takes here, `threads`: those for one operation on this policy; `setup`: packed (`grid.movable`) where it was made apart.
    """

    request: TrainingRequest
    runs: Sequence[RunSpec]
    response_limit: int
    is_small: bool
    device: str
    cores: int
    threads: int
    setup: Setup | bytes


@dataclass(frozen=True)
class Begun:
    """The runs with the learning rates that they train with, and the accuracy before training, None on recorded rollouts."""

    runs: Sequence[RunSpec]
    accuracy: float | None


# -- where --------------------------------------------------------------------------------------------------------------


def warm_up(request: TrainingRequest) -> None:
    """Start what the shares will be forked from, where they may be."""
    if _forks(request):
        processes.warm_up(IMPORTED, keeps_freed=True)


def _forks(request: TrainingRequest) -> bool:
    """Whether the shares of a job are forked from a server, as far as its settings tell: `--device auto` may become CUDA."""
    launch, layout, runs = request.config.launch, request.config.layout, len(request.modes) * len(request.seeds)
    if layout.dp * layout.cp > 1 or "WORLD_SIZE" in os.environ or runs == 1 or not processes.can_fork_from_server():
        return False
    if launch.launcher is not None:
        return launch.launcher == "processes"
    workers = min(launch.workers or processes.cores(), launch.shares or 2)
    return workers > 1 and _is_for_the_cpu(request) and request.config.training.width < SMALL_WIDTH


def _is_for_the_cpu(request: TrainingRequest) -> bool:
    training = request.config.training
    return training.model is None and training.device in ("auto", "cpu")


def is_prepared_apart(request: TrainingRequest) -> bool:
    """Whether a job is prepared in a process of its own: where its shares are forked, unless this process has torch already."""
    return _forks(request) and _is_for_the_cpu(request) and "torch" not in sys.modules


def prepared(request: TrainingRequest, world: World) -> Prepared:
    """Settle what a job trains; every rank must call it. Notes are said. Raises `SettingError`, `RolloutError`, and
    `ShareFailed` where a process of its own was ended."""
    if is_prepared_apart(request):
        return _apart(_prepare_and_pack, request, world)
    return _prepare(request, world)


def begun(job: Prepared, directory: Path, shares: int, world: World) -> Begun:
    """What is known of a job once its results directory is there, and said before its first step; every rank must call it.
    Raises `RecordError` for checkpoints that cannot be gone on from, and `ShareFailed`."""
    if isinstance(job.setup, bytes):
        return _apart(_begin, job, directory, shares, world)
    return _begin(job, directory, shares, world)


def packed(setup: Setup | bytes) -> bytes | None:
    """A setup for another process, as `grid.movable` packs it; what is packed already stays so, and is not opened."""
    if isinstance(setup, bytes):
        return setup
    from aggcli import grid

    return grid.movable(setup)


def _apart(work: Callable[..., Any], *given: Any) -> Any:
    """What `work` returns or raises, from a process that is forked from the server of the shares."""
    launcher = processes.Processes(1, IMPORTED, named="the preparation")
    (outcome,) = launcher.run(_answered, [(work, given)], lambda number, text: say(text))
    if outcome.error is not None:
        raise outcome.error
    if isinstance(outcome.result, AggcliError):
        raise outcome.result
    return outcome.result


# -- in the process that has torch --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Told(Listener):
    """Notes go to whoever launched this process."""

    link: Link

    def note(self, text: str) -> None:
        self.link.tell(text)


def _answered(asked: tuple[Callable[..., Any], tuple[Any, ...]], link: Link) -> Any:
    """What a piece of work returns, or the refusal that it raises."""
    work, given = asked
    with heard_by(_Told(link)):
        try:
            return work(*given)
        except AggcliError as error:
            return error


def _prepare(request: TrainingRequest, world: World) -> Prepared:
    import torch

    from aggcli import grid

    setup = grid.set_up(request.config, here=request.config.launch.launcher != "ray")
    for note in setup.recorded.notes if setup.recorded is not None else ():
        say(note)
    request = dataclasses.replace(request, config=setup.config, modes=_with_groups(request, setup, world))
    runs = grid.runs_of(request.config, request.modes, request.seeds, setup.response_limit)
    if request.command == "run":
        runs = [dataclasses.replace(run, name=".") for run in runs]
    with setup.start.threads():
        threads = torch.get_num_threads()
    small, device = setup.start.is_small, str(setup.device)
    return Prepared(request, runs, setup.response_limit, small, device, torch.get_num_threads(), threads, setup)


def _prepare_and_pack(request: TrainingRequest, world: World) -> Prepared:
    job = _prepare(request, world)
    setup = packed(job.setup)
    assert setup is not None, "a language model is never prepared apart"
    return dataclasses.replace(job, setup=setup)


def _with_groups(request: TrainingRequest, setup: Setup, world: World) -> tuple[Rule, ...]:
    """The modes that recorded rollouts can be trained under: some need their groups. Raises `RolloutError` where one was asked
    for by name."""
    from aggcli import grid

    grouped = [mode for mode in request.modes if mode.needs_groups]
    if setup.recorded is None or not grouped:
        return request.modes
    try:
        grid.need_whole_groups_in(setup.recorded, request.config.layout.global_batch_size, grouped[0])
    except RolloutError as error:
        if request.command != "compare" or request.config.modes is not None:
            raise
        if world.is_root:
            say(f"{some(mode.name for mode in grouped)} is left out: {error}")
        return tuple(mode for mode in request.modes if mode not in grouped)
    return request.modes


def _begin(job: Prepared, directory: Path, shares: int, world: World) -> Begun:
    from aggcli import grid

    request, runs = job.request, job.runs
    setup = grid.arrived(job.setup) if isinstance(job.setup, bytes) else job.setup
    resumed = _resumed(request, directory, shares) if request.resume else ""
    with setup.start.threads():
        if request.config.training.match == "grad-norm":
            runs = grid.matched_rates(setup, runs, world)
        if world.is_root:
            foretell(request, runs, directory, resumed)
        accuracy = None if setup.task is None else accuracy_before(request, setup, world)
    return Begun(runs, accuracy)


def _resumed(request: TrainingRequest, directory: Path, shares: int) -> str:
    """The steps that the shares of a job go on from, in words. Raises `RecordError` where one has done more than is asked for,
    and for a damaged checkpoint."""
    from aggcli.training.checkpoint import checkpoint_of, steps_done

    done = [steps_done(checkpoint_of(directory, share, shares)) for share in range(shares)]
    if max(done) > request.config.training.steps:
        raise RecordError(f"--steps {request.config.training.steps}: the run in {directory} has done {max(done)} already")
    return f"step {min(done)}" if len(set(done)) == 1 else f"steps {min(done)} to {max(done)}"
