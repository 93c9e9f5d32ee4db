"""`aggcli modes`: formula, papers, traps, and every framework's name for each aggregation mode; and the way back."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from aggcli.cli.console import out
from aggcli.cli.options import JsonOption, offered
from aggcli.errors import SettingError, nearest
from aggcli.rules import ALIASES, EVIDENCE, MODES, NOTATION, RULES, Rule, find_rule, names_of, remark_on
from aggcli.rules.reference import aliases_of, differences, elsewhere, how_to_get
from aggcli.rules.releases import newest_release
from aggcli.rules.snippets import SNIPPETS, Snippet, native, snippet_for

MapOption = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="NAME",
        help="What a framework's name, such as verl:token-mean, is here.",
        autocompletion=offered([*RULES, *ALIASES]),
    ),
]
InOption = Annotated[
    str | None,
    typer.Option(
        "--in",
        metavar="FRAMEWORK",
        help="The lines that give a mode in trl, verl, openrlhf, slime, skyrl, nemo-rl or tinker.",
        autocompletion=offered(SNIPPETS),
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="text|md",
        help="Text (default) or Markdown.",
        show_default=False,
        autocompletion=offered(("text", "md")),
    ),
]
ModeArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODE", help="One mode (default: all).", autocompletion=offered([mode.name for mode in MODES])),
]


def modes(
    mode: ModeArgument = None,
    map_: MapOption = None,
    in_: InOption = None,
    format_: FormatOption = "text",
    json: JsonOption = False,
) -> None:
    """What each aggregation mode is: formula, weight of a token, papers, traps, and how to get it in each framework.

    With --map, the reverse: what a framework's name or an alias means, and which mode here equals it. With --in, how to get the
    mode inside a framework: its own option where it has one, and the lines that scale its advantages.
    """
    if format_ not in ("text", "md"):
        raise SettingError(f"--format {format_}: must be text or md")
    if mode is not None and map_ is not None:
        raise SettingError(f"{mode} and --map {map_} ask for two things; give one")
    if in_ is not None and (mode is None or map_ is not None):
        raise SettingError(f"--in {in_}: give the mode, as in `aggcli modes prompt_mean --in {in_}`")
    chosen = [rule for rule in MODES if mode in (None, rule.name)]
    if not chosen:
        known = (
            nearest(str(mode), names_of(MODES)) if ":" not in str(mode) else f"; for a framework's own name use --map {mode}"
        )
        raise SettingError(f"unknown loss aggregation '{mode}'{known}")
    if in_ is not None:
        _show_inside(chosen[0], snippet_for(in_), json=json)
        return
    found = _mapped(map_) if map_ is not None else {rule.name: _described(rule) for rule in chosen}
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


_WORDS = ("formula", "weight", "meaning", "papers", "flags", "traps", "needs")


def _described(mode: Rule) -> dict[str, Any]:
    frameworks = {name: [_facts(rule) for rule in rules] for name, rules in elsewhere(mode).items()}
    words = {name: getattr(mode, name) for name in _WORDS}
    return {**words, "aliases": aliases_of(mode), "frameworks": frameworks}


def _mapped(name: str) -> dict[str, Any]:
    """A framework's rule or an alias, and the flags here that give it."""
    rule = find_rule(name)
    here = rule.flags if rule.is_mode else "; or exactly as there: ".join(how_to_get(rule))
    return {name: {**_facts(rule), "note": remark_on(name), "here": here}}


def _facts(rule: Rule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "option": rule.option,
        "version": rule.version,
        "release": newest_release(rule),
        "default": rule.is_default,
        "formula": rule.formula,
        "mode": rule.mode,
        "differences": [] if rule.is_mode else differences(rule),
        "divisor": rule.divisor_is,
        "kl_and_entropy": _terms(rule),
        "evidence": EVIDENCE[rule.evidence],
        "traps": list(rule.traps),
        "unverified": rule.unverified,
    }


def _terms(rule: Rule) -> str:
    """How the KL and entropy terms of its loss are aggregated."""
    terms = {"KL": rule.kl_term, "entropy": rule.entropy_term}
    words = {"its own weights": "as the policy loss", "the metrics' weights": "as the metrics, --metric-aggregation"}
    texts = {name: term.formula if isinstance(term, Rule) else words[term] for name, term in terms.items()}
    known = "" if rule.terms_evidence != "unverified" else " (unverified)"
    if texts["KL"] == texts["entropy"]:
        return f"KL and entropy: {texts['KL']}{known}"
    return f"KL: {texts['KL']}; entropy: {texts['entropy']}{known}"


# -- inside a framework -----------------------------------------------------------------------------------------------


def _show_inside(mode: Rule, snippet: Snippet, *, json: bool) -> None:
    """How to get the mode inside a framework: JSON, or text whose code can be copied."""
    own = [_facts(rule) for rule in native(snippet.framework, mode)]
    found = {
        "framework": snippet.framework,
        "mode": mode.name,
        "own": own,
        "where": snippet.where,
        "needs": list(snippet.needs),
        "code": snippet.code(mode),
        "reducer": snippet.reducer_code(mode),
        "notes": snippet.notes(mode),
        "version": snippet.version,
    }
    if json:
        from aggcli.records import to_json

        print(to_json({"schema": 1, **found}))
        return
    console = out()

    def line(label: str, text: str) -> None:
        whole = f"  {label + ':':<{_COLUMN - 2}}{text}"
        console.print(textwrap.fill(whole, console.width, subsequent_indent=" " * _COLUMN), soft_wrap=True)

    console.print(f"{mode.name} in {snippet.framework}")
    for rule in own:
        line("its own option", f"{rule['option']} [{rule['version']}]")
        line("  differs", "; ".join(rule["differences"]) or "in nothing")
    if not own:
        line("its own option", "none")
    line("where", snippet.where)
    for need in snippet.needs:
        line("needs", need)
    for note in found["notes"]:
        line("note", note)
    line("read in", snippet.version)
    line("on your rollouts", f"`aggcli audit --framework {snippet.framework} ROLLOUTS`: the gradient norm of each of its rules")
    for code in filter(None, (found["code"], found["reducer"])):
        print(f"\n{code.rstrip()}")


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
    "release": "newest release",
    "mode": "mode here",
    "differences": "differs",
    "divisor": "the constant",
    "kl_and_entropy": "other terms",
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
            yield from (f"{'':<{_COLUMN}}newest release: {text}" for text in filter(None, [rule["release"]]))
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
    heads = ("framework", "flag there", "version read", "newest release", "default", "differs", "traps")
    yield f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for framework, rules in frameworks.items():
        if not rules:
            yield f"| {framework} | not available | | | | | |"
        for rule in rules:
            cells: Sequence[str] = (
                framework,
                f"`{rule['option']}`",
                rule["version"],
                rule["release"],
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
