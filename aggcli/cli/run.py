"""`aggcli run`: one mode."""

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
from aggcli.cli.replaying import Request, need_divisor, print_dry_run, replay_command
from aggcli.errors import SettingError


@with_settings(without=["modes"])
def run(
    given: dict[str, Any],
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    samples: SamplesOption = True,
    dry_run: DryRunOption = False,
) -> int:
    """Replay recorded rollouts under one aggregation mode, and record every step under each layout.

    Each file of --rollouts is one step. The default mode is sample_mean; the mode in force is printed and recorded.
    """
    settings = resolve(given, config)
    mode = settings.objective.loss_aggregation
    request = Request("run", settings, (mode,), False, output, overwrite, json, samples)
    need_rollouts(settings.source.rollouts)
    if mode == "constant" and settings.objective.loss_aggregation_divisor is None:
        need_divisor(settings, request)
    return print_dry_run(request) if dry_run else replay_command(request)


def need_rollouts(rollouts: tuple[str, ...]) -> None:
    """Refuse a command without rollouts."""
    if not rollouts:
        raise SettingError("--rollouts PATH is missing: give a file, a folder, a glob, or `synthetic`")
