"""Settings from flat values and back: every setting has one flat name, `eps_clip` in TOML and `--eps-clip` as a flag."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from aggcli.config.checks import check, flag
from aggcli.config.sections import LaunchConfig, RunConfig, SourceConfig, SyntheticConfig, TrainingConfig
from aggcli.errors import SettingError, nearest
from aggcli.rules import CONSTANT, DEFAULT, PROMPT_MEAN, SAMPLE_MEAN, TOKEN_MEAN, Rule, find_rule

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_aggregation": SAMPLE_MEAN, "advantages": "grpo", "eps_clip": 0.2},
    "dapo": {
        "loss_aggregation": PROMPT_MEAN,
        "advantages": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong_buffer": 8,
    },
    "dr_grpo": {"loss_aggregation": CONSTANT, "advantages": "mean_only", "eps_clip": 0.2},
}
"""What each recipe sets unless a flag or the config file says otherwise (DeepSeekMath; DAPO; Dr.GRPO)."""


MODEL_DEFAULTS: dict[str, Any] = {"lr": 1e-6, "max_tokens_per_gpu": 4096, "evaluation_prompts": 32}
"""What --model sets unless a flag, the config file or a recipe says otherwise."""


def _flat_fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        is_section = dataclasses.is_dataclass(hint) and hint is not Rule
        found.update(_flat_fields(typing.cast(type, hint)) if is_section else {item.name: hint})
    return found


FIELDS = _flat_fields(RunConfig)
"""Every setting by its flat name, with its type."""
_RULE_SETTINGS = {name: hint for name, hint in FIELDS.items() if hint in (Rule, tuple[Rule, ...] | None)}
TRAINING_SETTINGS, SYNTHETIC_SETTINGS = tuple(_flat_fields(TrainingConfig)), tuple(_flat_fields(SyntheticConfig))
LAUNCH_SETTINGS = tuple(_flat_fields(LaunchConfig))
SOURCE_SETTINGS = tuple(name for name in _flat_fields(SourceConfig) if name not in SYNTHETIC_SETTINGS)
"""The settings of recorded rollouts: for commands that read them and do nothing else."""


def unread_settings(*, trains: bool, rollouts: Sequence[str] = ()) -> dict[str, str]:
    """Settings that a run has no use for, each with the reason. `rollouts`: the recorded ones that it reads, if any."""
    useless: dict[str, str] = {}
    if not trains:
        useless |= dict.fromkeys(TRAINING_SETTINGS, "only training uses it")
        useless["shares"] = "only training is cut into shares; with --launcher, rollouts are read in parts: mostly a file each"
    if rollouts and tuple(rollouts) != ("synthetic",):
        useless |= dict.fromkeys(SYNTHETIC_SETTINGS, "only --rollouts synthetic uses it")
    if not rollouts:
        unread = [name for name in SOURCE_SETTINGS if name != "rollouts"]
        useless |= dict.fromkeys((*unread, *SYNTHETIC_SETTINGS), "only --rollouts uses it")
    return useless


def settings_from(given: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> RunConfig:
    """Build and check settings from flat values.

    Precedence: `given` (flags and config file), then the recipe, then `defaults`, then the fields' own defaults. Values of
    None count as not given. Raises `SettingError` naming the setting that is unknown, of the wrong type or out of range.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    for name in asked:
        if name not in FIELDS:
            raise SettingError(f"unknown setting '{name}'{nearest(name, FIELDS)}")
    recipe = asked.get("recipe")
    if recipe is not None and recipe not in RECIPES:
        raise SettingError(f"unknown recipe '{recipe}'{nearest(str(recipe), RECIPES)}")
    asked = {name: _rules(name, value) for name, value in asked.items()}
    of_model = MODEL_DEFAULTS if asked.get("model") is not None else {}
    if "micro_batch_size" in asked:  # the other way to cut micro-batches
        of_model = {name: value for name, value in of_model.items() if name != "max_tokens_per_gpu"}
    values = {**(defaults or {}), **of_model, **RECIPES.get(str(recipe), {}), **asked}
    if values.get("model") is not None and values.get("rollouts"):
        values["train"] = True  # a replay has no use for a model
    values.update(_one_thing(asked, values))
    config = _build(RunConfig, values)
    check(config)
    return with_divisor(config, config.objective.loss_aggregation_divisor)


def with_divisor(config: RunConfig, divisor: float | None) -> RunConfig:
    """The settings with every rule as it is in force: scaled and scoped as they say, and with this constant where it takes one.

    Raises `SettingError` for a constant that is no positive finite number.
    """
    objective = dataclasses.replace(config.objective, loss_aggregation_divisor=divisor)
    mode = objective.in_force(objective.loss_aggregation)
    objective = dataclasses.replace(objective, loss_aggregation=mode, calculate_per_token_loss=mode == TOKEN_MEAN)
    modes = None if config.modes is None else tuple(dict.fromkeys(map(objective.in_force, config.modes)))
    return dataclasses.replace(config, objective=objective, modes=modes)


def _rules(name: str, value: object) -> object:
    """The rules that the names of a setting of rules stand for; any other value as it is. Raises `SettingError`."""
    if name not in _RULE_SETTINGS:
        return value
    many = _RULE_SETTINGS[name] is not Rule
    listed = value if many and isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, (str, Rule)) for item in listed):
        raise SettingError(f"{flag(name)} {value!r}: must be {'a list of names' if many else 'the name'} of aggregation rules")
    found = tuple(dict.fromkeys(item if isinstance(item, Rule) else find_rule(str(item)) for item in listed))
    if many and not found:
        raise SettingError(f"{flag(name)} is empty: name at least one, or leave it out")
    return found if many else found[0]


def _one_thing(asked: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """token_mean and --calculate-per-token-loss set each other; contradictions are refused."""
    mode, per_token = asked.get("loss_aggregation"), values.get("calculate_per_token_loss")
    if per_token is False and "calculate_per_token_loss" in asked and mode == TOKEN_MEAN:
        raise SettingError("--loss-aggregation token_mean is --calculate-per-token-loss; drop one of the two")
    if per_token and isinstance(mode, Rule) and mode != TOKEN_MEAN:
        raise SettingError(
            f"--calculate-per-token-loss is token_mean and cannot go with --loss-aggregation {mode.name}; drop one of the two"
        )
    if per_token:
        return {"loss_aggregation": TOKEN_MEAN}
    return {"calculate_per_token_loss": values.get("loss_aggregation", DEFAULT) == TOKEN_MEAN}


def _build(cls: type, values: Mapping[str, object]) -> Any:
    hints = typing.get_type_hints(cls)
    made: dict[str, object] = {}
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint) and hint is not Rule:
            made[item.name] = _build(typing.cast(type, hint), values)
        elif item.name in values:
            made[item.name] = _coerced(item.name, values[item.name], hint)
    return cls(**made)


def _coerced(name: str, value: object, hint: Any) -> object:
    """`value` as the type `hint`, or a `SettingError` that says what was expected."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        return _coerced(name, value, next(option for option in options if option is not type(None)))
    if origin is Literal:
        if value in options:
            return value
        raise SettingError(f"{flag(name)} '{value}' is not one of its values{nearest(str(value), options)}")
    if origin is tuple and options[0] is Rule:
        return value  # made of names before
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise SettingError(f"{flag(name)} {value!r}: must be a list of texts")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if type(value) is not hint:
        raise SettingError(f"{flag(name)} {value!r}: must be of type {hint.__name__}")
    return value


def to_flat(config: Any) -> dict[str, object]:
    """The settings as flat names and plain values."""
    flat: dict[str, object] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        flat.update({item.name: _plain(value)} if not _is_section(value) else to_flat(value))
    return flat


def _is_section(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, Rule)


def _plain(value: object) -> object:
    """A setting's value as it is written down: a rule by its name."""
    if isinstance(value, Rule):
        return value.name
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
