"""`aggcli modes`: formula, papers, traps, and every framework's name for each aggregation mode; and the way back."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aggcli.cli.console import out
from aggcli.cli.options import JsonOption
from aggcli.config import MODES
from aggcli.errors import SettingError, nearest
from aggcli.objective.literature import NOTATION, REFERENCE

if TYPE_CHECKING:
    from aggcli.objective.presets.facts import Preset

MapOption = Annotated[
    str | None, typer.Option("--map", metavar="NAME", help="A framework's name, such as verl:token-mean: what is it here?")
]
FormatOption = Annotated[str, typer.Option("--format", metavar="text|md", help="Text for the terminal, or Markdown.")]


def modes(
    mode: Annotated[str | None, typer.Argument(help="One mode; default: all.")] = None,
    map_: MapOption = None,
    format_: FormatOption = "text",
    json: JsonOption = False,
) -> None:
    """What each aggregation mode is: formula, weight of a token, papers, traps, and how to get it in each framework.

    With --map, the reverse: what a framework's name or an alias means, and which mode here equals it.
    """
    if format_ not in ("text", "md"):
        raise SettingError(f"--format {format_}: must be text or md")
    if mode is not None and map_ is not None:
        raise SettingError(f"{mode} and --map {map_} ask for two things; give one")
    if mode is not None and mode not in MODES:
        known = "" if ":" not in mode else f"; for a framework's own name use --map {mode}"
        raise SettingError(f"unknown loss aggregation '{mode}'{known or nearest(mode, MODES)}")
    found = _mapped(map_) if map_ is not None else {name: _described(name) for name in MODES if mode in (None, name)}
    if json:
        from aggcli.records import to_json

        key = "rules" if map_ is not None else "modes"
        print(to_json({"schema": 1, "notation": NOTATION, key: found}))
        return
    if format_ == "md":
        print("\n".join(_markdown(found)))
        return
    console = out()
    for line in _text(found, full=mode is not None or map_ is not None):
        hang = " " * _COLUMN if line.startswith("  ") else ""
        console.print(textwrap.fill(line, console.width, subsequent_indent=hang, break_long_words=False), soft_wrap=True)


# -- what is known --------------------------------------------------------------------------------------------------


def _described(mode: str) -> dict[str, Any]:
    from aggcli.objective.presets.reference import aliases_of, presets_of

    frameworks = {name: [_facts(preset) for preset in presets] for name, presets in presets_of(mode).items()}
    return {**dataclasses.asdict(REFERENCE[mode]), "aliases": aliases_of(mode), "frameworks": frameworks}


def _mapped(name: str) -> dict[str, Any]:
    """A framework's rule or an alias, and the flags here that give it."""
    from aggcli.objective.presets.reference import how_to_get
    from aggcli.objective.presets.registry import find_rule

    rule = find_rule(name)
    own = rule.preset.evidence == "own"
    here = REFERENCE[rule.preset.name].flags if own else "; or exactly as there: ".join(how_to_get(rule.preset))
    return {name: {**_facts(rule.preset), "note": rule.note, "here": here}}


def _facts(preset: Preset) -> dict[str, Any]:
    from aggcli.objective.presets.facts import EVIDENCE
    from aggcli.objective.presets.reference import differences

    own = preset.evidence == "own"
    return {
        "name": preset.name,
        "option": preset.option,
        "version": preset.version,
        "default": preset.is_default,
        "formula": preset.formula,
        "mode": preset.mode,
        "differences": [] if own else differences(preset),
        "divisor": preset.divisor_is,
        "evidence": EVIDENCE[preset.evidence],
        "traps": list(preset.traps),
        "unverified": preset.unverified,
    }


# -- on paper -------------------------------------------------------------------------------------------------------

_COLUMN = 21
"""Where the text of a line begins, and where it goes on."""
_MODE_LINES = {
    "formula": "step loss",
    "weight": "weight of a token",
    "meaning": "meaning",
    "papers": "source",
    "flags": "here",
    "aliases": "also accepted",
    "needs": "needs",
}
_RULE_LINES = {
    "formula": "step loss",
    "option": "set there",
    "version": "version",
    "mode": "mode here",
    "differences": "differs",
    "divisor": "the constant",
    "here": "here",
    "note": "note",
    "traps": "traps",
    "evidence": "known from",
    "unverified": "unverified",
}


def _text(found: dict[str, Any], *, full: bool) -> Iterator[str]:
    """Lines for the terminal; with `full` the frameworks' details too."""
    yield NOTATION
    yield ""
    for name, entry in found.items():
        yield name
        lines = _MODE_LINES if "frameworks" in entry else _RULE_LINES
        for key, label in lines.items():
            if entry[key]:
                yield f"  {label + ':':<19}{_joined(entry[key])}"
        if "frameworks" in entry:
            if full:
                yield from (f"  {'trap:':<19}{trap}" for trap in entry["traps"])
            yield from _framework_lines(entry["frameworks"], full=full)
        yield ""


def _framework_lines(frameworks: dict[str, Any], *, full: bool) -> Iterator[str]:
    if not full:
        named = [rule["name"] for rules in frameworks.values() for rule in rules]
        yield f"  {'elsewhere:':<19}{', '.join(named)}"
        return
    for framework, rules in frameworks.items():
        if not rules:
            yield f"  {framework + ':':<19}not available"
        for rule in rules:
            default = ", its default" if rule["default"] else ""
            yield f"  {framework + ':':<19}{rule['option']}{default} [{rule['version']}]"
            yield from (f"{'':<{_COLUMN}}differs: {text}" for text in rule["differences"] or ["in nothing"])
            yield from (f"{'':<{_COLUMN}}trap: {text}" for text in rule["traps"])


def _joined(value: Any) -> str:
    return "; ".join(value) if isinstance(value, (list, tuple)) else str(value)


def _markdown(found: dict[str, Any]) -> Iterator[str]:
    """The same as headings, lists and one table of frameworks a mode; always with the frameworks."""
    yield NOTATION + "\n"
    for name, entry in found.items():
        yield f"## `{name}`\n"
        lines = _MODE_LINES if "frameworks" in entry else _RULE_LINES
        for key, label in lines.items():
            if entry[key]:
                code = key in ("formula", "weight", "flags", "option", "here")
                text = _joined(entry[key])
                yield f"- {label}: {f'`{text}`' if code else _escaped(text)}"
        if "frameworks" in entry:
            yield from (f"- trap: {_escaped(trap)}" for trap in entry["traps"])
            yield from _markdown_table(entry["frameworks"])
        yield ""


def _markdown_table(frameworks: dict[str, Any]) -> Iterator[str]:
    yield "\n| framework | flag there | version read | default | differs | traps |\n|---|---|---|---|---|---|"
    for framework, rules in frameworks.items():
        if not rules:
            yield f"| {framework} | not available | | | | |"
        for rule in rules:
            cells: Sequence[str] = (
                framework,
                f"`{rule['option']}`",
                rule["version"],
                "yes" if rule["default"] else "",
                "; ".join(rule["differences"]) or "in nothing",
                "; ".join(rule["traps"]),
            )
            yield f"| {' | '.join(cell if cell.startswith('`') else _escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    """Text that Markdown would read as markup, or as a table's cell border."""
    for sign in ("\\", "*", "_", "|", "<", "["):
        text = text.replace(sign, "\\" + sign)
    return text
