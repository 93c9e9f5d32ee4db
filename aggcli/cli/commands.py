"""Commands as typer has them, but imported one at a time, when asked for, and with a help that fits a screen."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from aggcli.cli.screens import PANELS, SCREENS, Screen

_ALL = "aggcli.all"
"""Key of the context under which help is told to show every option."""
_COLUMN = 28
"""The widest first column of a help, in characters."""


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool,
    typer.Option("--help-all", is_eager=True, expose_value=False, callback=_show_all, help="Every option, explained in full."),
]


class Group(typer.core.TyperGroup):
    """A group of commands, each with its line of `SCREENS` in the help, under these headings."""

    def panels(self, ctx: Any) -> dict[str, dict[str, str]]:
        """Heading -> command -> its line."""
        above = ctx.command_path.split()[-1]
        return {"Commands": {name: SCREENS[f"{above} {name}"].about for name in self.commands}}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, lines in self.panels(ctx).items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", about) for name, about in lines.items()])


class Commands(Group):
    """The program's commands. Help and completion of their names read their one-line descriptions; what is run is imported."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in (name for names in PANELS.values() for name in names):
            self.add_command(typer.core.TyperCommand(name, short_help=SCREENS[name].about))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and command(args[0]), rest

    def panels(self, ctx: Any) -> dict[str, dict[str, str]]:
        return {title: {name: SCREENS[name].about for name in names} for title, names in PANELS.items()}


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help shows its most used options by use, in a line each; --help-all shows all, explained in full.

    (typer's own framed help imports rich, which costs a tenth of a second.)
    """

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        text = self.help or ""
        with formatter.indentation():
            formatter.write_paragraph()
            formatter.write_text(text if ctx.meta.get(_ALL) else text.partition("\n\n")[0])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        screen = _screen_of(ctx)
        parameters = {parameter.name: parameter for parameter in self.get_params(ctx)}
        if screen.front and not ctx.meta.get(_ALL):
            panels = {title: [parameters[name] for name in names] for title, names in screen.front.items()}
            panels["Output"] = [*panels.get("Output", []), parameters["help"], parameters["help_all"]]
            _write(formatter, {title: [_in_a_line(item) for item in items] for title, items in panels.items()})
            return
        panels = {}
        for item in parameters.values():
            panels.setdefault(getattr(item, "rich_help_panel", None) or "Options", []).append(_in_full(item))
        _write(formatter, panels)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = _screen_of(ctx).examples
        if examples:
            with formatter.section("Examples" if len(examples) > 1 else "Example"):
                for line in examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def command(name: str) -> Any:
    """The command of this name, from its module. A group of commands is one too."""
    made = getattr(importlib.import_module(f"aggcli.cli.{name}"), name)
    if isinstance(made, typer.Typer):
        return typer.main.get_command(made)
    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    app.command(name, cls=GroupedCommand)(made)
    return typer.main.get_command(app)


def first_sentence(text: str) -> tuple[str, str]:
    """A text as its first sentence, without the full stop, and what follows."""
    found = re.match(r"(.+?)\.(?:\s+|$)", text, re.DOTALL)
    return (found[1], text[found.end() :]) if found else (text, "")


def _screen_of(ctx: Any) -> Screen:
    path = ctx.command_path.split()
    return SCREENS.get(" ".join(path[-2:]), SCREENS.get(path[-1], Screen("")))


def _write(formatter: Any, panels: dict[str, list[tuple[str, str]]]) -> None:
    """The panels with one column for all of them."""
    width = min(_COLUMN, max(len(name) for rows in panels.values() for name, _ in rows))
    for title, rows in panels.items():
        with formatter.section(title):
            formatter.write_dl([(f"{name:<{width}}", text) for name, text in rows], col_max=width)


def _in_a_line(parameter: Any) -> tuple[str, str]:
    return _named(parameter, parameter.opts), first_sentence(parameter.help or "")[0]


def _in_full(parameter: Any) -> tuple[str, str]:
    name = _named(parameter, parameter.opts)
    return name.replace("--", "--[no-]", 1) if parameter.secondary_opts else name, parameter.help or ""


def _named(parameter: Any, spellings: Iterable[str]) -> str:
    """`--steps N`, `DIR...`."""
    if parameter.param_type_name == "argument":
        return f"{parameter.metavar or parameter.name.upper()}{'...' if parameter.nargs != 1 else ''}"
    names = ", ".join(sorted(spellings, key=len))
    return names if parameter.is_flag else f"{names} {parameter.metavar}"
