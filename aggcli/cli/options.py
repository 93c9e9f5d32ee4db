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
import typer.core

from aggcli import config
from aggcli.cli.console import say
from aggcli.config import FIELDS, RunConfig, flag, read_toml, sections, settings_from
from aggcli.errors import SettingError
from aggcli.rules import RULES, Rule, remark_on

_PANELS = {
    "SourceConfig": "Rollouts",
    "ObjectiveConfig": "Loss",
    "LayoutConfig": "Layout",
    "TrainingConfig": "Training",
    "RunConfig": "Settings",
    "SyntheticConfig": "Synthetic rollouts (--rollouts synthetic)",
}
_LISTS = ("layouts", "modes", "log_to")
"""Lists written with commas; `--rollouts` is repeated instead, since a path may hold a comma."""

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings; flags win over it, it wins over the recipe.")
]
_PATHS = "Rollouts to replay, as with --rollouts: files, folders, globs, `example` or `synthetic`."
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Results directory; default: a new one under results/.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the results directory of an earlier run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings as TOML and stop.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the training run in --output.")]
CheckDeterminismOption = Annotated[
    bool,
    typer.Option(
        "--check-determinism",
        help="Run twice and compare the records byte for byte (exit code 1 where they differ). On one machine, with the same"
        " versions, OMP_NUM_THREADS, --processes, --dp and --cp, nothing may differ but timings; across those, the last bits"
        " may (README, What may differ).",
    ),
]
SamplesOption = Annotated[
    bool, typer.Option("--samples/--no-samples", help="In a replay, record the weight of every training sample (Parquet).")
]


class GroupedCommand(typer.core.TyperCommand):
    """A command whose plain help lists options by panel (the framed help imports rich, which costs a tenth of a second)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title in ("Options", *_PANELS.values()):
            if title in panels:
                with formatter.section(title):
                    formatter.write_dl(panels[title])


def with_settings(
    *, without: Iterable[str] = (), about: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for every setting but `without`; its first argument receives those that were given.

    `about`: help of settings that mean something narrower in this command.
    """
    names = [name for name in FIELDS if name not in set(without)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        @functools.wraps(function)
        def command(**values: Any) -> Any:
            given = {name: _as_given(name, values.pop(name)) for name in names}
            return function({name: value for name, value in given.items() if value is not None}, **values)

        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, (about or {}).get(name))
            )
            for name in names
        ]
        parameters = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *options]
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


PathsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ROLLOUTS...]", help=_PATHS)]


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
    metavar, values = None, ()
    if typing.get_origin(hint) is Literal:
        values = typing.get_args(hint)
        metavar, hint = "|".join(values), str
    elif hint is Rule:
        metavar, hint, values = "MODE", str, tuple(RULES)
    elif typing.get_origin(hint) is tuple:
        metavar, hint = ("A,B,..." if name in _LISTS else "PATH"), list[str]
    option = typer.Option(
        *_declarations(name, hint),
        help=about or details.about + (f" (default: {details.default})" if details.default else ""),
        metavar=metavar,
        show_default=False,
        rich_help_panel=details.panel,
        autocompletion=_offered(values) if values else None,
    )
    return Annotated[hint | None, option]


def _offered(values: Sequence[str]) -> Callable[[str], list[str]]:
    """What the shell offers for a value that has been begun."""

    def begun_with(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return begun_with


def _declarations(name: str, hint: Any) -> list[str]:
    """The option's spellings; slime's long flags are kept as they are."""
    return [f"{flag(name)}/--no-{flag(name)[2:]}"] if hint is bool else [flag(name)]


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
                shown = None if default in (None, ()) or isinstance(default, bool) else str(default)
                found[name] = _Details(about, _PANELS[node.name], shown)
    return found
