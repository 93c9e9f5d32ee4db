"""`aggcli compare`: modes side by side."""

from __future__ import annotations

from typing import Any

from aggcli.cli.options import (
    ConfigOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    ResumeOption,
    SamplesOption,
    resolve,
    with_settings,
)
from aggcli.cli.replaying import Request, print_dry_run, replay_command
from aggcli.cli.training import TrainingRequest, training_command
from aggcli.config import MODES

DEFAULT_SEEDS = 3


@with_settings(without=["loss_aggregation", "calculate_per_token_loss"])
def compare(
    given: dict[str, Any],
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    samples: SamplesOption = True,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
) -> int:
    """Train modes x seeds as one stack, or with --rollouts replay the same rollouts under several modes, side by side.

    Everything but the mode is the same; runs of one seed share prompts and noise. Without a divisor, constant divides by the
    response limit, in a replay by the longest response (said and recorded).
    prompt_mean is left out, with the reason, where rollouts have no group_index, unless --modes asks for it.
    """
    settings = resolve(given, config)
    modes = settings.modes or MODES
    if settings.training.train or not settings.source.rollouts:
        if dry_run:
            return print_dry_run(settings)
        seeds = tuple(
            range(settings.seed, settings.seed + (settings.training.seeds or (1 if settings.training.train else DEFAULT_SEEDS)))
        )
        return training_command(TrainingRequest("compare", settings, modes, seeds, output, overwrite, resume, json))
    request = Request("compare", settings, modes, settings.modes is None, output, overwrite, json, samples)
    return print_dry_run(settings) if dry_run else replay_command(request)
