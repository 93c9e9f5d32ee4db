"""Settings: frozen, explained field by field, checked once where they are made; the same object from flags, TOML or a record.

Every setting has one flat name (`eps_clip` in TOML, `--eps-clip` on the command line). `settings_from` builds and checks the
whole from flat values; `to_flat` and `to_toml` give them back.
"""

from __future__ import annotations

from aggcli.config.checks import flag, reward_weights
from aggcli.config.flat import (
    FIELDS,
    LAUNCH_SETTINGS,
    RECIPES,
    SOURCE_SETTINGS,
    SYNTHETIC_SETTINGS,
    TRAINING_SETTINGS,
    settings_from,
    to_flat,
    unread_settings,
    with_divisor,
)
from aggcli.config.sections import (
    DEFAULT_LAYOUTS,
    SINKS,
    LaunchConfig,
    LayoutConfig,
    ObjectiveConfig,
    RunConfig,
    SourceConfig,
    SyntheticConfig,
    TrainingConfig,
)
from aggcli.config.toml import read_toml, to_toml

__all__ = [
    "DEFAULT_LAYOUTS",
    "FIELDS",
    "LAUNCH_SETTINGS",
    "RECIPES",
    "SINKS",
    "SOURCE_SETTINGS",
    "SYNTHETIC_SETTINGS",
    "TRAINING_SETTINGS",
    "LaunchConfig",
    "LayoutConfig",
    "ObjectiveConfig",
    "RunConfig",
    "SourceConfig",
    "SyntheticConfig",
    "TrainingConfig",
    "flag",
    "read_toml",
    "reward_weights",
    "settings_from",
    "to_flat",
    "to_toml",
    "unread_settings",
    "with_divisor",
]
