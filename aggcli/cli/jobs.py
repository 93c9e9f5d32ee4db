"""What `run`, `replay`, `train` and `compare` share: hand a job to its ranks, and print what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aggcli.cli.console import invocation, say, show
from aggcli.cli.live import notes_after
from aggcli.cli.options import resolve, say_ignored, with_recorded
from aggcli.cli.ranks import on_ranks
from aggcli.config import RunConfig, to_toml
from aggcli.errors import CheckFailed, ExitCode, SettingError

if TYPE_CHECKING:
    from aggcli.jobs.gradients import GradientsResult
    from aggcli.jobs.replay import ReplayRequest, ReplayResult
    from aggcli.jobs.training import TrainingRequest, TrainingResult
    from aggcli.world import World


def modes_command(
    given: Mapping[str, Any],
    only: Literal["replay", "train"] | None = None,
    *,
    output: Path | None,
    overwrite: bool,
    config: Path | None,
    json: bool,
    dry_run: bool,
    resume: bool = False,
    samples: bool = True,
) -> int:
    """Modes side by side, replayed where rollouts are given and else trained; `only`: refuse the other of the two.

    Returns the exit code; raises `SettingError` and `CheckFailed`.
    """
    settings = resolve(with_recorded(given, output) if resume else given, config)
    trains = settings.training.train or not settings.source.rollouts
    if only == "replay" and trains:
        what = "--config trains" if settings.training.train else "no rollouts are given"
        raise SettingError(f"replay: {what}; name a file, a folder, a glob, `example` or `synthetic`, or use aggcli train")
    if only == "train" and not trains:
        raise SettingError("train: --config names rollouts and not train = true; add it, or use aggcli replay")
    say_ignored(given, trains=trains, rollouts=settings.source.rollouts)
    if not trains:
        refuse_resume(resume)
    if dry_run:
        return print_dry_run(settings)
    asked = tuple(invocation())
    if trains:
        from aggcli.jobs.training import TrainingRequest, seeds_of

        request = TrainingRequest("compare", settings, settings.compared, seeds_of(settings), output, overwrite, resume, asked)
        return training_command(request, json=json)
    from aggcli.jobs.replay import ReplayRequest

    return replay_command(
        ReplayRequest("compare", settings, settings.modes is None, output, overwrite, samples, arguments=asked), json=json
    )


def replay_command(request: ReplayRequest, *, json: bool) -> int:
    """Replay on the ranks that the layout asks for, and print. Returns the exit code; raises `CheckFailed`."""
    from aggcli import sinks

    sinks.need(request.config.log_to)
    with notes_after():
        result = on_ranks(request.config, lambda config, world: _replayed(dataclasses.replace(request, config=config), world))
        if result is None:
            return ExitCode.DONE
        _print(result, json)
    say(f"recorded in {result.directory}")
    if result.failure:
        raise CheckFailed(f"{result.failure}; layouts.jsonl holds them")
    return ExitCode.DONE


def _replayed(request: ReplayRequest, world: World) -> ReplayResult | None:
    from aggcli.jobs.replay import replay
    from aggcli.measurement.ranks import dismiss, serve

    if not world.is_root:
        serve(world)
        return None
    try:
        return replay(request, world=world)
    finally:
        if world.size > 1:
            dismiss(world)


def gradients_command(given: Mapping[str, Any], *, config: Path | None, json: bool, dry_run: bool) -> int:
    """Compare modes by the gradients of a policy's parameters, and print. Returns the exit code."""
    settings = resolve({**given, **({"train": True} if given.get("rollouts") else {})}, config)
    if dry_run:
        return print_dry_run(settings)
    from aggcli.jobs.gradients import gradients

    with notes_after():
        _print(gradients(settings), json)
    return ExitCode.DONE


def training_command(request: TrainingRequest, *, json: bool) -> int:
    """Train on the ranks that the layout asks for, and print. Returns the exit code; raises `CheckFailed`."""
    from aggcli.jobs.preparation import warm_up
    from aggcli.jobs.training import refuse, train
    from aggcli.jobs.training_words import closing_notes, draw_curves, import_what_follows

    warm_up(request)
    refuse(request)
    meanwhile = import_what_follows if request.command == "compare" else None
    result = on_ranks(
        request.config, lambda config, world: train(dataclasses.replace(request, config=config), world, meanwhile)
    )
    if result is None:
        return ExitCode.DONE
    _print(result, json)
    for note in [
        *([draw_curves(result.directory, result.study)] if request.command == "compare" else []),
        *closing_notes(result),
    ]:
        say(note)
    if result.failure:
        raise CheckFailed(result.failure)
    return ExitCode.DONE


def _print(result: ReplayResult | TrainingResult | GradientsResult, json: bool) -> None:
    if json:
        from aggcli.records import to_json

        print(to_json(result.as_json()))
        return
    show(result.tables())


def refuse_resume(resume: bool) -> None:
    """A replay has nothing to go on with: it is over in seconds and is simply run again."""
    if resume:
        raise SettingError("--resume continues training; run a replay again instead (--overwrite replaces its records)")


def print_dry_run(config: RunConfig) -> int:
    """Print the resolved settings as TOML that `--config` reads back."""
    print(to_toml(config), end="")
    return ExitCode.DONE
