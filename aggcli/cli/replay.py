"""`aggcli replay`: recorded rollouts under several modes and layouts."""

from __future__ import annotations

from typing import Any

from aggcli.cli.jobs import modes_command
from aggcli.cli.options import (
    ConfigOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    OverwriteOption,
    PathsArgument,
    SamplesOption,
    with_paths,
    with_settings,
)
from aggcli.config import TRAINING_SETTINGS


@with_settings(without=["loss_aggregation", "calculate_per_token_loss", *TRAINING_SETTINGS])
def replay(
    given: dict[str, Any],
    paths: PathsArgument = None,
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    samples: SamplesOption = True,
    dry_run: DryRunOption = False,
) -> int:
    """What would each mode, or another parallel layout, make of these rollouts? Each file is one optimizer step.

    Without a divisor, constant divides by the longest response (said and recorded). prompt_mean is left out, with the reason,
    where rollouts have no group_index, unless --modes asks for it. `aggcli run ROLLOUTS` replays them under one mode, and on
    real ranks with --dp and --cp.
    """
    ran = {"output": output, "overwrite": overwrite, "config": config, "json": json, "samples": samples}
    return modes_command(with_paths(given, paths), "replay", dry_run=dry_run, **ran)
