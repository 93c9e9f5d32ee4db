"""`aggcli compare`: modes side by side."""

from __future__ import annotations

from typing import Any

from aggcli.cli.options import (
    ConfigOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    SamplesOption,
    resolve,
    with_settings,
)
from aggcli.cli.replaying import Request, print_dry_run, replay_command
from aggcli.cli.run import need_rollouts
from aggcli.config import MODES


@with_settings(without=["loss_aggregation", "calculate_per_token_loss"])
def compare(
    given: dict[str, Any],
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    samples: SamplesOption = True,
    dry_run: DryRunOption = False,
) -> int:
    """Replay the same rollouts under several aggregation modes, side by side and under each layout.

    Everything but the mode is the same. Without a divisor, constant divides by the longest response (said and recorded).
    prompt_mean is left out, with the reason, where rollouts have no group_index, unless --modes asks for it.
    """
    settings = resolve(given, config)
    need_rollouts(settings.source.rollouts)
    modes = settings.modes or MODES
    request = Request("compare", settings, modes, settings.modes is None, output, overwrite, json, samples)
    return print_dry_run(request) if dry_run else replay_command(request)
