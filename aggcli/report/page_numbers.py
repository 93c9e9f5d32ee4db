"""The one table that everybody reads: a row a mode, six figures at the most, and in words what is the same under all."""

from __future__ import annotations

import numpy as np

from aggcli.analysis.comparison import Comparison, Estimate
from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.reading import read_manifest
from aggcli.analysis.replay_answer import length_bin
from aggcli.analysis.units import in_length_unit
from aggcli.measurement.catalogue import LENGTH_BINS
from aggcli.measurement.words import number, percent, plural, short, signed
from aggcli.report.base import coinciding
from aggcli.report.comparison_tables import ARROWS
from aggcli.report.effects import ROUNDING, first_outcomes
from aggcli.report.findings import Findings
from aggcli.report.markup import Cell, Number, Table
from aggcli.report.tables import OF_LOG_PROBS

_GRADIENTS = {"gradient_ratio", "gradient_cosine"}
_MOST = 6
_PRECISION = 4
_LONGEST = "weight_share/length_p100"
_OF_A_REPLAY = {
    "gradient_ratio": "gradient norm, over the baseline's",
    "gradient_cosine": "cosine to the baseline's gradient",
    _LONGEST: "weight on lengths above 3/4 of the maximum",
    "weight_share/correct": "weight on correct rollouts",
    "effective_tokens": "effective sample size",
    "pg_loss": "loss",
    "total_weight": "total weight",
    "ppo_kl": "KL(old || new)",
    "raw_reward": "mean reward",
    "response_length": "response length",
    "correct/count": "correct samples per step",
}
"""Metric -> its name in the table, the ones that are looked at first first."""
_UNITS = {"effective_tokens": "tokens", "ppo_kl": "nats", "response_length": "tokens"}


def small_table(frames: Frames, findings: Findings) -> tuple[Table | None, list[str]]:
    """The table, None where there is nothing for it, and lines on what is the same under every mode."""
    if findings.comparison is not None:
        return _of_comparison(findings.comparison)
    return _of_replay(frames)


# -- trained runs -------------------------------------------------------------------------------------------------------


def _of_comparison(comparison: Comparison) -> tuple[Table | None, list[str]]:
    names = first_outcomes(comparison)
    if not names:
        return None, []
    heads = [comparison.arm]
    for name in names:
        defined = comparison.defined[name]
        unit = in_length_unit(defined.unit, comparison.length_unit)
        named = comparison.named(name)
        heads.append(f"{named}{ARROWS[defined.better]}" + (f", {unit}" if unit != "share" and unit not in named else ""))
    body = [[label, *(_estimate(comparison.outcomes[name].get(label)) for name in names)] for label in comparison.labels]
    seeds = sorted({len(one.values) for name in names for one in comparison.outcomes[name].values()})
    of = plural(seeds[0], comparison.each) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} {comparison.each}s"
    of += " an arm" if comparison.of_others else ""
    said = f"Mean over {of}"
    if any(one.low is not None for name in names for one in comparison.outcomes[name].values()):
        said += " [95 % interval]"
    if len(comparison.labels) > 1:
        how = "paired by seed" if comparison.paired else "of the means of runs that are not paired"
        said += f"; under it the difference to {comparison.baseline}, {how}"
        if any(_tested(one) for name in names for one in comparison.outcomes[name].values()):
            said += ": * where one is shown, ~ where none is"
    return Table(f"{said}.", heads, body), []


def _tested(one: Estimate) -> bool:
    return one.pair is not None and one.pair.p_holm is not None


def _estimate(one: Estimate | None) -> Number:
    if one is None:
        return Number(None, "")
    lines = [] if one.low is None or one.high is None else [f"[{number(one.low, _PRECISION)}, {number(one.high, _PRECISION)}]"]
    if one.pair is not None:
        less = one.pair.test.difference.mean
        mark = "" if not _tested(one) else " *" if one.pair.shown else " ~"
        lines.append(f"{signed(less if abs(less) > ROUNDING else 0.0, _PRECISION - 1)}{mark}")
    return Number(one.mean, number(one.mean, _PRECISION), "\n".join(lines))


# -- replays ------------------------------------------------------------------------------------------------------------


def _of_replay(frames: Frames) -> tuple[Table | None, list[str]]:
    own = {run.label: rows(frames.metrics, run=run.label) for run in frames.runs}
    shown, same = [], []
    for name in _OF_A_REPLAY:
        values = {label: numbers(frame, name) for label, frame in own.items()}
        if not all(np.isfinite(value).any() for value in values.values()):
            continue
        equal = len(own) > 1 and len(coinciding({label: [value] for label, value in values.items()})) == len(own) - 1
        (same if equal else shown).append(name)
    shown = shown[:_MOST]
    named = _OF_A_REPLAY | {_LONGEST: _longest(frames)}
    unit = {name: in_length_unit(unit, frames.length_unit) for name, unit in _UNITS.items()}
    said = [f"{named[name]} {_cell(next(iter(own.values())), name).shown} {unit.get(name, '')}".rstrip() for name in same]
    lines = [f"The same under every mode: {', '.join(said)}."] if said else []
    if not shown:
        return None, lines
    heads = ["mode", *(", ".join(filter(None, (named[name], unit.get(name)))) for name in shown)]
    body: list[list[Cell]] = [[label, *(_cell(frame, name) for name in shown)] for label, frame in own.items()]
    steps = plural(len(frames.steps), "step")
    said = f"mean of {steps}" if len(frames.steps) > 1 else "one step"
    said += f"; {OF_LOG_PROBS}" if _GRADIENTS.intersection(shown) else ""
    return Table(f"{said[0].upper()}{said[1:]}.", heads, body), lines


def _longest(frames: Frames) -> str:
    """`weight on more than 12 tokens`, where all runs record the same maximum length."""
    heads = [read_manifest(run.directory) for run in frames.runs]
    most = {head.get("max_response_length") for head in heads}
    if len(most) > 1 or not all(most):
        return _OF_A_REPLAY[_LONGEST]
    return f"weight on {length_bin(LENGTH_BINS[-1], heads[0])}"


def _cell(run: object, name: str) -> Number:
    """The mean over the steps that have it; how many those are, where it is not all."""
    values = numbers(run, name)  # pyright: ignore[reportArgumentType]
    known = values[np.isfinite(values)]
    mean = float(known.mean())
    shown = percent(mean) if name.startswith("weight_share/") else short(mean)
    return Number(mean, shown, "" if len(known) == len(values) else f"{len(known)} of {len(values)} steps")
