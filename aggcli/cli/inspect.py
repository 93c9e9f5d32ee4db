"""`aggcli inspect`: what a rollout file holds, what can be computed from it, and what is missing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aggcli.cli.console import out, progress, say
from aggcli.cli.options import JsonOption, with_settings
from aggcli.config import FIELDS, SOURCE_SETTINGS, RunConfig, settings_from
from aggcli.errors import printable

TAKEN = (*SOURCE_SETTINGS, "correct_threshold")
"""The settings that are this command's options; --rollouts is its argument."""


@with_settings(without=[name for name in FIELDS if name not in TAKEN or name == "rollouts"])
def inspect(
    given: dict[str, Any],
    rollouts: Annotated[list[str], typer.Argument(metavar="ROLLOUTS", help="Files, folders or globs; each file is one step.")],
    groups: Annotated[bool, typer.Option("--groups", help="Show each step's prompt groups too.")] = False,
    json: JsonOption = False,
) -> None:
    """What does a rollout file hold, what can be computed from it, and what is missing and why?"""
    settings = settings_from({**given, "rollouts": rollouts})
    from aggcli.rollouts.sources import open_source

    source = open_source(settings.source, settings.seed)
    steps = [_facts(batch, settings, groups) for batch in progress(source, len(source), "reading")]
    for note in dict.fromkeys(note for step in steps for note in step["notes"]):
        say(note)
    if json:
        from aggcli.records import to_json

        print(to_json({"schema": 1, "rollouts": source.name, "format": source.format, "steps": steps}))
        return
    _print(source.name, source.format, steps)


def _facts(batch: Any, settings: RunConfig, groups: bool) -> dict[str, Any]:
    from aggcli.measurement.inventory import group_facts, inventory

    facts = inventory(batch, settings.objective, settings.correct_threshold)
    return {**facts, "prompt_groups": group_facts(batch, settings.objective, settings.correct_threshold)} if groups else facts


def _print(name: str, kind: str, steps: list[dict[str, Any]]) -> None:
    from aggcli.report.folding import folded
    from aggcli.report.inventory_tables import group_table, inventory_answer, inventory_table

    console = out()
    console.print(folded(inventory_answer(name, kind, steps), console.width), soft_wrap=True)
    console.print()
    console.print(inventory_table(steps))
    for step in steps:
        if step.get("prompt_groups"):
            console.print(printable(f"prompt groups of {step['source']}"))
            console.print(group_table(step))
    for title, key in (("can be computed", "computable"), ("missing", "skipped")):
        console.print(title)
        found: dict[str, list[int]] = {}
        for at, step in enumerate(steps):
            for item in step[key] if key == "computable" else [f"{m}: {r}" for m, r in step[key].items()]:
                found.setdefault(item, []).append(at)
        for item, at in found.items():
            where = "" if len(at) == len(steps) else f" ({len(at)} of {len(steps)} steps)"
            text = folded(printable(item + where), console.width, "  ", "      ")
            console.print(text, soft_wrap=True)
