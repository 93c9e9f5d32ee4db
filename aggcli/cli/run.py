"""`aggcli run`: one mode."""

from __future__ import annotations

from typing import Any

from aggcli.cli.console import invocation
from aggcli.cli.jobs import print_dry_run, refuse_resume, replay_command, training_command
from aggcli.cli.options import (
    CheckDeterminismOption,
    ConfigOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    PathsArgument,
    ResumeOption,
    SamplesOption,
    resolve,
    say_ignored,
    with_paths,
    with_recorded,
    with_settings,
)


@with_settings(without=["modes", "seeds"])
def run(
    given: dict[str, Any],
    paths: PathsArgument = None,
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    samples: SamplesOption = True,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    check_determinism: CheckDeterminismOption = False,
) -> int:
    """Train a small policy under one aggregation mode, or with ROLLOUTS replay recorded rollouts, and record every step under
    each layout.

    The default mode is sample_mean; the mode in force is printed and recorded. In a replay each file is one step.
    """
    given = with_paths(given, paths)
    if check_determinism and not dry_run:
        from aggcli.cli.determinism import run_twice

        return run_twice(invocation(), output, resume, given.get("rollouts", ()))
    settings = resolve(with_recorded(given, output) if resume else given, config)
    from aggcli.jobs.replay import ReplayRequest, need_divisor
    from aggcli.jobs.training import TrainingRequest

    mode, asked = settings.objective.loss_aggregation, tuple(invocation())
    if mode.needs_divisor:
        need_divisor("run", settings)
    trains = settings.training.train or not settings.source.rollouts
    say_ignored(given, trains=trains, rollouts=settings.source.rollouts)
    if not trains:
        refuse_resume(resume)
    if dry_run:
        return print_dry_run(settings)
    if trains:
        seeds = (settings.seed,)
        return training_command(TrainingRequest("run", settings, (mode,), seeds, output, overwrite, resume, asked), json=json)
    request = ReplayRequest("run", settings, False, output, overwrite, samples, arguments=asked)
    return replay_command(request, json=json)
