"""`aggcli compare`: modes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from aggcli.cli.console import invocation
from aggcli.cli.jobs import print_dry_run, refuse_resume, replay_command, training_command
from aggcli.cli.options import (
    ConfigOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    ResumeOption,
    SamplesOption,
    resolve,
    say_ignored,
    with_paths,
    with_recorded,
    with_settings,
)
from aggcli.cli.results import check_format, print_comparison
from aggcli.config import flag
from aggcli.errors import ExitCode, SettingError

_WITH_DIRECTORIES = ("baseline", "format", "precision", "sort_by", "only_changed", "reach", "window", "fit", "axis")
"""Options of the comparison of results directories."""


@with_settings(without=["loss_aggregation", "calculate_per_token_loss"])
def compare(
    given: dict[str, Any],
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR... | ROLLOUTS...]", help="Results directories to compare, or rollouts to replay."),
    ] = None,
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    samples: SamplesOption = True,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    baseline: Annotated[str | None, typer.Option(help="With DIR: mode the others are paired with; default: the first.")] = None,
    format: Annotated[str, typer.Option(metavar="table|json|csv|md|latex", help="With DIR: how to print.")] = "table",
    precision: Annotated[int, typer.Option(help="With DIR: significant digits of tables.")] = 4,
    sort_by: Annotated[str | None, typer.Option(help="With DIR: outcome that modes are sorted by, best first.")] = None,
    only_changed: Annotated[bool, typer.Option("--only-changed", help="With DIR: only outcomes that differ.")] = False,
    reach: Annotated[float | None, typer.Option(help="With DIR: accuracy of the row `tokens to accuracy`.")] = None,
    window: Annotated[float, typer.Option(help="With DIR: share of the common range, at its end, that is averaged.")] = 0.1,
    fit: Annotated[bool | None, typer.Option(help="With DIR: fit compute-performance curves.")] = None,
    axis: Annotated[str, typer.Option(metavar="tokens|steps|seconds", help="With DIR: what curves are fitted by.")] = "tokens",
) -> int:
    """Train modes x seeds as one stack; given rollouts, replay the same rollouts under several modes; given results
    directories, compare what they hold.

    Everything but the mode is the same; runs of one seed share prompts and noise. Without a divisor, constant divides by the
    response limit, in a replay by the longest response (said and recorded).
    prompt_mean is left out, with the reason, where rollouts have no group_index, unless --modes asks for it.
    """
    directories, rollouts = _told_apart(paths or ())
    given = with_paths(given, rollouts)
    if directories:
        names = [*map(flag, given), *_asked_for(context, "config", "output", "overwrite", "samples", "dry_run", "resume")]
        if names:
            it = "it" if len(names) == 1 else "them"
            raise SettingError(f"{', '.join(names)}: nothing is run when results directories are compared; leave {it} out")
        from aggcli.jobs.compare import ComparisonOptions
        from aggcli.jobs.compare import compare as compared

        check_format(format)
        options = ComparisonOptions(baseline, precision, sort_by, only_changed, reach, window, fit, axis)
        print_comparison(compared(directories, options), "json" if json else format)
        return ExitCode.DONE
    if names := _asked_for(context, *_WITH_DIRECTORIES):
        holds = "only holds" if len(names) == 1 else "only hold"
        raise SettingError(f"{', '.join(names)}: {holds} with results directories to compare; name them, or leave it out")
    settings = resolve(with_recorded(given, output) if resume else given, config)
    trains = settings.training.train or not settings.source.rollouts
    say_ignored(given, trains=trains, rollouts=settings.source.rollouts)
    if not trains:
        refuse_resume(resume)
    if dry_run:
        return print_dry_run(settings)
    from aggcli.jobs.replay import ReplayRequest
    from aggcli.jobs.training import TrainingRequest, seeds_of

    asked = tuple(invocation())
    if trains:
        request = TrainingRequest("compare", settings, settings.compared, seeds_of(settings), output, overwrite, resume, asked)
        return training_command(request, json=json)
    return replay_command(
        ReplayRequest("compare", settings, settings.modes is None, output, overwrite, samples, arguments=asked), json=json
    )


def _told_apart(paths: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The results directories among the paths, and the rollouts. Raises `SettingError` where there are both."""
    from aggcli.analysis.directories import holds_results

    directories = [Path(path) for path in paths if holds_results(Path(path))]
    rollouts = [path for path in paths if not holds_results(Path(path))]
    if directories and rollouts:
        raise SettingError(
            f"{directories[0]} is a results directory and {rollouts[0]} is not: results are compared with results, rollouts are"
            " replayed; name the one or the other"
        )
    return directories, rollouts


def _asked_for(context: typer.Context, *names: str) -> list[str]:
    """The flags of those of these options that the user gave, whatever the value."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [flag(name) for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
