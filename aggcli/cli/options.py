"""Settings as command-line options, made from the settings themselves: a flag, a config key and a field are one thing."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from aggcli import config
from aggcli.cli.commands import HelpAllOption, first_sentence
from aggcli.cli.console import say
from aggcli.config import FIELDS, RunConfig, flag, read_toml, sections, settings_from
from aggcli.errors import SettingError
from aggcli.rules import RULES, Rule, remark_on

_PANELS = {
    "SourceConfig": "Rollouts",
    "ObjectiveConfig": "Loss",
    "LayoutConfig": "Layout",
    "TrainingConfig": "Training",
    "LaunchConfig": "Where it runs",
    "RunConfig": "Settings",
    "SyntheticConfig": "Synthetic rollouts (--rollouts synthetic)",
}
_LISTS = ("layouts", "modes", "log_to")
"""Lists written with commas; `--rollouts` is repeated instead, since a path may hold a comma."""

_METAVARS = {
    "rollouts": "PATH",
    "rollout_format": "FORMAT",
    "reward_key": "KEY",
    "tokenizer": "PATH",
    "reward_weights": "NAME=X,...",
    "loss_aggregation_divisor": "L",
    "custom_pg_loss_reducer_function_path": "PKG.MOD:FN",
    "max_tokens_per_gpu": "TOKENS",
    "micro_batch_size": "SAMPLES",
    "global_batch_size": "ROLLOUTS",
    "rollout_batch_size": "PROMPTS",
    "overlong_buffer": "TOKENS",
    "warm_start": "FILE",
    "device": "DEVICE",
    "model": "MODEL",
    "evaluation_prompts": "PROMPTS",
    "lora_rank": "RANK",
    "max_response_length": "TOKENS",
    "launcher": "PLACE",
    "ray_address": "ADDRESS",
    "layouts": "LAYOUT,...",
    "modes": "MODE,...",
    "log_to": "NAME,...",
    "synthetic_group_size": "N|N-N",
    "synthetic_length": "TOKENS",
    "synthetic_max_length": "TOKENS",
}
"""What stands for the value of a setting in its help; others say N for a whole number, X for a number, NAME for a text."""
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file of settings; flags win over it. It wins over the recipe."),
]
_PATHS = "Files, folders, globs, example or synthetic. Rollouts to replay, as with --rollouts."
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Results directory (default: new, in results/).")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier run in --output. Only what aggcli wrote.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the settings as TOML and stop.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the training run in --output.")]
CheckDeterminismOption = Annotated[
    bool,
    typer.Option(
        "--check-determinism",
        help="Run twice and compare the records byte for byte. Exit code 1 where they differ. On one machine, with the same"
        " versions, OMP_NUM_THREADS, --shares, --dp and --cp, nothing may differ but timings; across those, the last bits"
        " may (README, What may differ).",
    ),
]
SamplesOption = Annotated[
    bool,
    typer.Option("--samples/--no-samples", help="In a replay, record the weight of every sample (default: yes). As Parquet."),
]


def with_settings(
    *, without: Iterable[str] = (), about: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for every setting but `without`; its first argument receives those that were given.

    `about`: help of settings that mean something narrower in this command.
    """
    order = list(_PANELS.values())
    names = sorted(
        (name for name in FIELDS if name not in set(without)), key=lambda name: order.index(_documented()[name].panel)
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        @functools.wraps(function)
        def command(**values: Any) -> Any:
            values.pop("help_all")  # has been answered
            given = {name: _as_given(name, values.pop(name)) for name in names}
            return function({name: value for name, value in given.items() if value is not None}, **values)

        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, (about or {}).get(name))
            )
            for name in names
        ]
        every = inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAllOption)
        parameters = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), every, *options]
        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def resolve(given: Mapping[str, object], config_file: Path | None) -> RunConfig:
    """The checked settings: flags, then the config file, then the recipe, then defaults."""
    from_file = read_toml(config_file) if config_file is not None else {}
    asked = {**from_file, **given}
    settings = settings_from(asked)
    for name in _rule_names(asked):
        if remark := remark_on(name):
            say(remark)
    return settings


def _rule_names(asked: Mapping[str, object]) -> list[str]:
    """The names under which aggregation rules were asked for."""
    names = [asked.get("loss_aggregation"), *typing.cast(Iterable[object], asked.get("modes") or ())]
    return [name for name in names if isinstance(name, str)]


PathsArgument = Annotated[list[str] | None, typer.Argument(metavar="ROLLOUTS", help=_PATHS)]


def with_paths(given: Mapping[str, Any], paths: Sequence[str] | None) -> dict[str, Any]:
    """What was given, with the rollout files that stand alone added to those of --rollouts: a shell writes a glob out, so that
    only the first of its files belongs to the flag."""
    rollouts = tuple(dict.fromkeys((*given.get("rollouts", ()), *(paths or ()))))
    return {**given, **({"rollouts": rollouts} if rollouts else {})}


def with_recorded(given: Mapping[str, Any], output: Path | None) -> dict[str, Any]:
    """What was given, over the settings of the run in `output` that is to be resumed; a run that left none yet adds none."""
    from aggcli.records import MANIFEST, read_manifest

    if output is None or not (output / MANIFEST).is_file():
        return dict(given)
    recorded = {name: value for name, value in read_manifest(output).get("settings", {}).items() if value is not None}
    if "loss_aggregation" in given:
        recorded.pop("calculate_per_token_loss", None)  # it follows from the mode
    return {**recorded, **given}


def say_ignored(given: Mapping[str, object], *, trains: bool, rollouts: Sequence[str]) -> None:
    """A note for every setting that was given and that this invocation has no use for."""
    useless = config.unread_settings(trains=trains, rollouts=rollouts)
    for name in given:
        if name in useless:
            say(f"{flag(name)} has no effect here: {useless[name]}")


def comma_list(values: Iterable[str]) -> tuple[str, ...]:
    """`["a,b", "c"]` -> ("a", "b", "c"), without repetitions."""
    return tuple(dict.fromkeys(item.strip() for value in values for item in value.split(",") if item.strip()))


def _as_given(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        listed = comma_list(value) if name in _LISTS else tuple(value)
        if value and not listed:
            raise SettingError(f"{flag(name)} is empty: name at least one, or leave it out")
        return listed or None
    return value


def _annotation(name: str, about: str | None = None) -> Any:
    """`int | None` and so on, with the option's help taken from the field's own documentation."""
    details = _documented()[name]
    hint = FIELDS[name]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    listed = typing.get_origin(hint) is tuple
    if typing.get_origin(hint) is Literal:
        values, shown, hint = typing.get_args(hint), "|".join(typing.get_args(hint)), str
    else:
        shown, hint = {int: "N", float: "X", str: "NAME", Rule: "MODE"}.get(hint), str if hint is Rule else hint
        values = _VALUES.get(name, ())
    option = typer.Option(
        *_declarations(name, hint),
        help=_help(about or details.about, details.default),
        metavar=_METAVARS.get(name, shown),
        show_default=False,
        rich_help_panel=details.panel,
        autocompletion=offered(values, listed=name in _LISTS) if values else None,
    )
    return Annotated[(list[str] if listed else hint) | None, option]


def _help(about: str, default: str | None) -> str:
    """A setting's explanation, the default behind its first sentence."""
    head, rest = first_sentence(about)
    return f"{head}{f' (default: {default})' if default else ''}. {rest}".strip()


def _layouts() -> Iterable[str]:
    rules = typing.get_args(FIELDS["partition"])
    return ("recorded", *(f"dp{ranks}:{rule}" for ranks in (1, 2, 4, 8) for rule in rules))


def _formats() -> Iterable[str]:
    from aggcli.rollouts.formats import READERS

    return READERS


_VALUES: dict[str, Iterable[str] | Callable[[], Iterable[str]]] = {
    "loss_aggregation": RULES,
    "modes": RULES,
    "layouts": _layouts,
    "rollout_format": _formats,
    "task": ("running-sum", "control", "rg:"),
    "model": ("smollm2-135m",),
    "log_to": config.SINKS,
    "device": ("auto", "cpu", "cuda"),
}
"""What the shell offers for the values of settings that are not choices by their type."""


def offered(values: Iterable[str] | Callable[[], Iterable[str]], *, listed: bool = False) -> Callable[[str], list[str]]:
    """What the shell offers for a value that has been begun; `listed`: for the last of several, with commas."""

    def begun_with(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if listed else ("", "", incomplete)
        known = values() if callable(values) else values
        return [before + comma + value for value in known if value.startswith(last)]

    return begun_with


def _declarations(name: str, hint: Any) -> list[str]:
    """The option's spellings; slime's long flags are kept as they are."""
    return [f"{flag(name)}/--no-{flag(name)[2:]}"] if hint is bool else [flag(name)]


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


@dataclasses.dataclass(frozen=True)
class _Details:
    about: str
    panel: str
    default: str | None


@functools.cache
def _documented() -> dict[str, _Details]:
    """For each setting the text that stands under its field in `aggcli.config.sections`, its panel and its default."""
    found: dict[str, _Details] = {}
    for node in ast.parse(inspect.getsource(sections)).body:
        if not isinstance(node, ast.ClassDef) or node.name not in _PANELS:
            continue
        defaults = {item.name: item.default for item in dataclasses.fields(getattr(sections, node.name))}
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                name = ast.unparse(field.target)
                about = " ".join(str(text.value.value).split())
                default = defaults[name]
                default = default.name if isinstance(default, Rule) else default
                shown = None if default in (None, ()) or isinstance(default, bool) else _shown(default)
                found[name] = _Details(about, _PANELS[node.name], shown)
    return found
