"""`aggcli compare`: modes side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from aggcli.cli.jobs import gradients_command, modes_command
from aggcli.cli.options import (
    ConfigOption,
    DryRunOption,
    JsonOption,
    OverwriteOption,
    ResumeOption,
    SamplesOption,
    offered,
    with_paths,
    with_settings,
)
from aggcli.cli.results import FORMATS, check_format, print_comparison
from aggcli.config import flag
from aggcli.errors import ExitCode, SettingError

_WITH_DIRECTORIES = (
    "baseline",
    "format",
    "precision",
    "sort_by",
    "only_changed",
    "reach",
    "window",
    "fit",
    "axis",
    "plan",
    "plan_outcome",
)
"""Options of the comparison of results directories."""


_OTHERS = "With runs of other trainers"
_AXES = ("tokens", "steps", "seconds")


def _outcomes() -> Iterable[str]:
    from aggcli.analysis.outcomes import OUTCOMES

    return OUTCOMES


def _of_directories(
    name: str, metavar: str | None, about: str, values: Iterable[str] | Callable[[], Iterable[str]] = ()
) -> OptionInfo:
    """An option of the comparison of results directories."""
    return typer.Option(
        name,
        metavar=metavar,
        help=about,
        show_default=False,
        rich_help_panel="With results directories",
        autocompletion=offered(values) if values else None,
    )


def _of_logs(name: str, metavar: str, about: str) -> OptionInfo:
    """An option of the comparison of other trainers' logs; one that is not given is None."""
    return typer.Option(name, metavar=metavar, help=about, rich_help_panel=_OTHERS)


@with_settings(without=["loss_aggregation", "calculate_per_token_loss"])
def compare(
    given: dict[str, Any],
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="DIR|ROLLOUTS", help="Results directories, or rollouts as --rollouts. Not both."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Results directory (default: new, in results/). With --curves: a folder for curves.json, figures and page"
            " (default: none), which is no results directory.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    samples: SamplesOption = True,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    curves: Annotated[
        list[str] | None,
        _of_logs(
            "--curves",
            "NAME=PATTERN",
            "An arm of runs of other trainers. Event files, trainer_state.json, CSV, JSON lines or a terminal's; one each arm.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        _of_logs(
            "--metric",
            "KEY=COLUMN",
            "The column of a measure in their logs. Such as reward=critic/rewards/mean; known names need none.",
        ),
    ] = None,
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients",
            help="Compare modes by the gradient of a policy's parameters, and train nothing. On recorded rollouts, or on those"
            " that the policy samples first; with --model a language model's, else the small policy's.",
        ),
    ] = False,
    baseline: Annotated[
        str | None, _of_directories("--baseline", "MODE", "Mode that the others are paired with. Default: the first.")
    ] = None,
    format: Annotated[
        str, _of_directories("--format", "FORMAT", "table (default), json, csv, md or latex.", FORMATS)
    ] = "table",
    precision: Annotated[int, _of_directories("--precision", "N", "Significant digits of tables (default: 3).")] = 3,
    sort_by: Annotated[
        str | None, _of_directories("--sort-by", "OUTCOME", "Sort modes by this outcome, best first.", _outcomes)
    ] = None,
    only_changed: Annotated[bool, _of_directories("--only-changed", None, "Only outcomes that differ.")] = False,
    reach: Annotated[float | None, _of_directories("--reach", "X", "Accuracy whose cost in tokens is compared.")] = None,
    window: Annotated[
        float,
        _of_directories(
            "--window", "X", "Share of the runs that is averaged (default: 0.1). At the end of their common range."
        ),
    ] = 0.1,
    fit: Annotated[bool | None, _of_directories("--fit/--no-fit", None, "Fit compute-performance curves.")] = None,
    axis: Annotated[
        str, _of_directories("--axis", "AXIS", "What curves are fitted by: tokens (default), steps or seconds.", _AXES)
    ] = "tokens",
    plan: Annotated[
        float | None, _of_directories("--plan", "X", "How many seeds show a difference of this size (80 % power).")
    ] = None,
    plan_outcome: Annotated[
        str | None, _of_directories("--plan-outcome", "OUTCOME", "The outcome of --plan. Default: accuracy.", _outcomes)
    ] = None,
) -> int:
    """Modes side by side: what results directories hold; or the same rollouts replayed under each, as `aggcli replay`; or, of
    neither, modes x seeds trained here, as `aggcli train`.

    Everything but the mode is the same; runs of one seed share prompts and noise. Without a divisor, constant divides by the
    response limit, in a replay by the longest response (said and recorded).
    prompt_mean is left out, with the reason, where rollouts have no group_index, unless --modes asks for it.
    """
    directories, rollouts = _told_apart(paths) if paths else ([], [])
    kept = _kept(paths) if paths else []
    given = with_paths(given, rollouts)
    if metric and not curves:
        raise SettingError("--metric: names a column of the logs of other trainers; give their runs with --curves")
    if directories or curves or kept:
        if directories and curves:
            raise SettingError(
                f"{directories[0]}: results directories beside --curves are an arm too: --curves NAME={directories[0]}"
            )
        if kept and (curves or len(paths or ()) > 1):
            raise SettingError(
                f"{kept[0]}: holds runs of other trainers, which are compared alone; give all of their logs with --curves"
            )
        written = () if curves else ("output", "overwrite")
        names = [*map(flag, given), *_asked_for(context, "config", *written, "samples", "dry_run", "resume")]
        if names:
            what = "results directories" if directories else "logs"
            it = "it" if len(names) == 1 else "them"
            raise SettingError(f"{', '.join(names)}: nothing is run when {what} are compared; leave {it} out")
        from aggcli.jobs.compare import ComparisonOptions
        from aggcli.jobs.compare import compare as compared
        from aggcli.jobs.curves import compare_curves, compare_kept

        check_format(format)
        asked = _asked_for(context, *_WITH_DIRECTORIES)
        options = ComparisonOptions(baseline, precision, sort_by, only_changed, reach, window, fit, axis, plan, plan_outcome)
        if curves:
            found = compare_curves(curves, metric or (), options, output, overwrite=overwrite)
        else:
            found = compare_kept(Path(kept[0]), options if asked else None) if kept else compared(directories, options)
        print_comparison(found, "json" if json else format)
        return ExitCode.DONE
    if names := _asked_for(context, *_WITH_DIRECTORIES):
        holds = "only holds" if len(names) == 1 else "only hold"
        raise SettingError(f"{', '.join(names)}: {holds} with results directories to compare; name them, or leave it out")
    if gradients:
        if names := _asked_for(context, "output", "overwrite", "samples", "resume"):
            raise SettingError(f"{', '.join(names)}: --gradients records nothing; leave it out, or keep what --json prints")
        return gradients_command(given, config=config, json=json, dry_run=dry_run)
    ran = {"output": output, "overwrite": overwrite, "config": config, "json": json, "samples": samples}
    return modes_command(given, dry_run=dry_run, resume=resume, **ran)


def _told_apart(paths: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The results directories among the paths, and the rollouts. Raises `SettingError` where there are both."""
    from aggcli.analysis.directories import holds_results

    directories = [Path(path) for path in paths if holds_results(Path(path))]
    rollouts = [path for path in paths if not holds_results(Path(path)) and path not in _kept(paths)]
    if directories and rollouts:
        raise SettingError(
            f"{directories[0]} is a results directory and {rollouts[0]} is not: results are compared with results, rollouts are"
            " replayed; name the one or the other"
        )
    return directories, rollouts


def _kept(paths: Sequence[str]) -> list[str]:
    """The folders among the paths in which runs of other trainers were kept."""
    from aggcli.analysis.kept_curves import holds_curves

    return [path for path in paths if holds_curves(Path(path))]


def _asked_for(context: typer.Context, *names: str) -> list[str]:
    """The flags of those of these options that the user gave, whatever the value."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [flag(name) for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
