"""How two results directories differ: in settings, environment and records, and in their final metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aggcli.analysis.directories import Results, Run
from aggcli.analysis.final import FINAL, final_summary, last_step_summary
from aggcli.analysis.histories import resolved_settings
from aggcli.analysis.settings import effective_settings

Pair = tuple[Results, Results]


def differences(pair: Pair) -> dict[str, list[dict[str, Any]]]:
    """What differs, by what it is: name -> the distinct values of each side's runs, none where it is not recorded.

    `settings`: those that the runs' numbers depend on (see `effective_settings`), with what the runs made of them;
    `records`: the others.
    """
    effective = [[_effective(run) for run in results.runs] for results in pair]
    known = set().union(*(own for side in effective for own in side))
    told = {"loss_aggregation", "calculate_per_token_loss", "modes", "seed", "seeds"}  # by the modes and seeds of the runs
    others = [{name: v for name, v in results.settings.items() if name not in known | told} for results in pair]
    heads = [{"command": r.manifest.get("command"), "modes": r.modes, "seeds": r.seeds} for r in pair]
    return {
        "settings": [one for one in _differing(*effective) if _is_read(one, pair)],
        "environment": list(_differing(*([results.environment] for results in pair))),
        "records": list(_differing(*([head | other] for head, other in zip(heads, others, strict=True)))),
    }


def _effective(run: Run) -> dict[str, Any]:
    """The settings that the run's numbers depend on, with the divisor and the response limit that it made of them."""
    limit = {"response_limit": run.manifest.get("max_response_length")}  # a replay's manifest calls it so
    return effective_settings(run.mode, resolved_settings({**limit, **run.manifest}))


def _is_read(one: Mapping[str, Any], pair: Pair) -> bool:
    """Whether both sides have runs of a mode that reads the setting; where one has none, the modes differ, not the setting."""
    return all(one[side] or one["name"] not in results.settings for side, results in zip("ab", pair, strict=True))


def _differing(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys(name for side in (a, b) for own in side for name in own):
        values: list[list[Any]] = [[], []]
        for at, side in enumerate((a, b)):
            for own in side:
                if name in own and own[name] not in values[at]:
                    values[at].append(own[name])
        if values[0] != values[1]:
            yield {"name": name, "a": values[0], "b": values[1]}


def final_metrics(pair: Pair) -> tuple[str, list[dict[str, Any]]]:
    """What the final metrics are, and each of them side by side: mean over seeds, and n.

    Metrics on fresh prompts where both were evaluated, else the numbers of each run's last recorded step. Two results of one
    mode each stand on one line whatever the modes are.
    """
    evaluated = all(any(run.manifest.get("evaluation") for run in results.runs) for results in pair)
    found = []
    for results in pair:
        names = [(run.name, run.mode, run.seed) for run in results.runs]
        of_run = {run.name: _numbers(run.manifest["evaluation"]) for run in results.runs if run.manifest.get("evaluation")}
        filled = {name: {metric: own.get(metric) for metric in FINAL} for name, own in of_run.items()}
        lines = {run.name: _numbers(run.last) for run in results.runs if run.last is not None}
        found.append((final_summary(names, filled) if evaluated else last_step_summary(names, lines))["modes"])
    if len(found[0]) == len(found[1]) == 1:
        found = [{None: metrics} for side in found for metrics in side.values()]
    rows = []
    for mode in dict.fromkeys([*found[0], *found[1]]):
        sides = [side.get(mode, {}) for side in found]
        for metric in dict.fromkeys([*sides[0], *sides[1]]):
            a, b = ({key: own[key] for key in ("mean", "n")} if (own := side.get(metric)) else None for side in sides)
            if a or b:
                rows.append({"mode": mode, "metric": metric, "a": a, "b": b})
    return "after training, on fresh prompts" if evaluated else "last recorded step", rows


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}
