"""`aggcli train`: modes x seeds of a small policy, as one stack."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aggcli.cli.jobs import modes_command
from aggcli.cli.options import (
    ConfigOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    ResumeOption,
    with_paths,
    with_settings,
)
from aggcli.config import SYNTHETIC_SETTINGS

TrainedOnArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ROLLOUTS", help="Train on these, instead of a task. Files, folders, globs."),
]


@with_settings(without=["loss_aggregation", "calculate_per_token_loss", "train", *SYNTHETIC_SETTINGS])
def train(
    given: dict[str, Any],
    paths: TrainedOnArgument = None,
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
) -> int:
    """Train a small policy under each mode from several seeds, everything but the mode and the seed the same.

    Runs of one seed share prompts and noise. Without a divisor, constant divides by the response limit (said and recorded).
    With ROLLOUTS the policy is trained on them, each file one step, instead of on --task. `aggcli run` trains under one mode;
    `aggcli compare DIR` says which mode was better, and how sure that is.
    """
    given = with_paths(given, paths)
    if given.get("rollouts"):
        given["train"] = True
    ran = {"output": output, "overwrite": overwrite, "config": config, "json": json}
    return modes_command(given, "train", dry_run=dry_run, resume=resume, **ran)
