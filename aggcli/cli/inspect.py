"""`aggcli inspect`: what a rollout file holds, what can be computed from it, and what is missing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aggcli.cli.console import out, progress, say
from aggcli.cli.options import JsonOption
from aggcli.config import ReplayConfig, settings_from


def inspect(
    rollouts: Annotated[list[str], typer.Argument(help="Files, folders or globs; each file is one step.")],
    rollout_format: Annotated[str | None, typer.Option(help="Reader to use instead of detecting the format.")] = None,
    include_eval: Annotated[bool, typer.Option(help="Read slime's eval_ files too.")] = False,
    reward_key: Annotated[str | None, typer.Option(help="Key of the reward when it is an object.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Group this many consecutive rollouts.")] = None,
    correct_threshold: Annotated[float | None, typer.Option(help="A rollout is correct from this raw reward on.")] = None,
    json: JsonOption = False,
) -> None:
    """Say what a rollout file holds, what can be computed from it, and what is missing and why."""
    settings = settings_from(
        {
            "rollouts": rollouts,
            "rollout_format": rollout_format,
            "include_eval": include_eval,
            "reward_key": reward_key,
            "group_size": group_size,
            "correct_threshold": correct_threshold,
        }
    )
    from aggcli.rollouts.sources import open_source

    source = open_source(settings.source, settings.seed)
    steps = [_facts(batch, settings) for batch in progress(source, len(source), "reading")]
    for note in dict.fromkeys(note for step in steps for note in step["notes"]):
        say(note)
    if json:
        from aggcli.records import to_json

        print(to_json({"schema": 1, "rollouts": source.name, "format": source.format, "steps": steps}))
        return
    _print(source.name, source.format, steps)


def _facts(batch: Any, settings: ReplayConfig) -> dict[str, Any]:
    from aggcli.measurement.inventory import inventory

    return inventory(batch, settings.objective, settings.correct_threshold)


def _print(name: str, kind: str, steps: list[dict[str, Any]]) -> None:
    from aggcli.report.tables import inventory_table

    console = out()
    console.print(f"{name}: format {kind}, {len(steps)} step{'s' if len(steps) != 1 else ''}")
    console.print(inventory_table(steps))
    for title, key in (("can be computed", "computable"), ("missing", "skipped")):
        console.print(title)
        found: dict[str, list[int]] = {}
        for at, step in enumerate(steps):
            for item in step[key] if key == "computable" else [f"{m}: {r}" for m, r in step[key].items()]:
                found.setdefault(item, []).append(at)
        for item, at in found.items():
            where = "" if len(at) == len(steps) else f" ({len(at)} of {len(steps)} steps)"
            console.print(f"  {item}{where}")
