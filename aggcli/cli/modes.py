"""`aggcli modes`: formula, papers and other names of each aggregation mode."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from aggcli.cli.console import out
from aggcli.cli.options import JsonOption
from aggcli.config import MODES
from aggcli.errors import SettingError, nearest
from aggcli.objective.literature import NOTATION, REFERENCE


def modes(mode: Annotated[str | None, typer.Argument(help="One mode; default: all.")] = None, json: JsonOption = False) -> None:
    """What each aggregation mode is: formula, weight of a token, papers, and its names in other frameworks."""
    if mode is not None and mode not in MODES:
        raise SettingError(f"unknown loss aggregation '{mode}'{nearest(mode, MODES)}")
    chosen = {name: REFERENCE[name] for name in MODES if mode in (None, name)}
    if json:
        from aggcli.records import to_json

        print(to_json({"schema": 1, "notation": NOTATION, "modes": {n: dataclasses.asdict(r) for n, r in chosen.items()}}))
        return
    console = out()
    console.print(NOTATION + "\n")
    for name, entry in chosen.items():
        facts = {
            "step loss": entry.formula,
            "weight of a token": entry.weight,
            "meaning": entry.meaning,
            "source": entry.papers,
            "elsewhere": ", ".join(entry.elsewhere),
            "needs": entry.needs,
        }
        console.print(name)
        for label, text in facts.items():
            if text:
                console.print(f"  {label + ':':<19}{text}", soft_wrap=False)
        console.print()
