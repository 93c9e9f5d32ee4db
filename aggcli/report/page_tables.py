"""The tables of a report page, from the records and the analysis; behind every cell is its number in full."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.units import in_length_unit
from aggcli.measurement.catalogue import METRICS, describe
from aggcli.measurement.words import number, plural
from aggcli.report.base import coinciding
from aggcli.report.comparison_rows import Row, curve_rows, rows_of
from aggcli.report.comparison_tables import ARROWS, caption, p_value
from aggcli.report.findings import Findings
from aggcli.report.layout_deviation import layout_deviations
from aggcli.report.markup import Cell, Number, Table

_PRECISION = 4
_MOST_COLUMNS = 8
"""Runs are columns up to this many; more would not fit a page."""
_LAST = ("raw_reward", "response_length", "entropy_loss", "pg_clipfrac", "ppo_kl", "grad_norm", "grad_norm_log_probs")


def run_table(frames: Frames, manifests: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row a run. `manifests`: label -> the run's own."""
    body: list[list[Cell]] = []
    for run in frames.runs:
        own, manifest = rows(frames.metrics, run=run.label), manifests[run.label]
        tokens = numbers(own, "response_tokens")
        seed = manifest.get("seed")
        body.append(
            [
                run.label,
                Number(seed, str(seed)) if isinstance(seed, int) else "",
                str(manifest.get("status", "")),
                Number(len(set(own["step"])), str(len(set(own["step"])))),
                _whole(float(np.nansum(tokens)) if np.isfinite(tokens).any() else None),
                str(run.directory),
            ]
        )
    return Table("The runs", ["run", "seed", "status", "optimizer steps", f"response {frames.length_unit}", "directory"], body)


def log_table(findings: Findings) -> Table:
    """A row a run that another trainer made, or of ours beside them."""
    paired = findings.comparison is not None and findings.comparison.paired
    body: list[list[Cell]] = []
    for run in findings.compared:
        tokens = run.tokens[np.isfinite(run.tokens)]
        body.append(
            [
                run.source or str(run.directory),
                run.label,
                *([Number(run.seed, str(run.seed))] if paired else []),
                Number(len(run.steps), str(len(run.steps))),
                Number(int(run.steps[0]), str(run.steps[0])),
                Number(int(run.steps[-1]), str(run.steps[-1])),
                _whole(float(tokens[-1]) if tokens.size else None),
            ]
        )
    heads = ["run", "arm", *(["seed"] if paired else []), "steps with numbers", "first", "last", "tokens before the last known"]
    return Table("The runs, and the logs or results that they were read from", heads, body)


def comparison_table(findings: Findings) -> Table | None:
    """Every outcome of every arm, with intervals, differences and what speaks for them; and the fitted curves."""
    if (comparison := findings.comparison) is None:
        return None
    found = rows_of(comparison, _PRECISION)
    found += curve_rows(findings.curves, comparison.each)
    robust = any(row.interquartile_mean is not None for row in found)
    heads = ["outcome", comparison.arm, f"{comparison.each}s", "mean", *(["IQM"] if robust else []), "difference", "p (Holm)"]
    heads += ["sign-flip p"] if comparison.paired else []
    means = {(row.outcome, row.mode): row.mean for row in found}
    body = [_compared(row, means.get((row.outcome, row.baseline or "")), robust=robust)[: len(heads)] for row in found]
    about = {"tests": comparison.tests, "paired": comparison.paired, "arm": comparison.arm}
    said = caption(found, _PRECISION, **about, marked=False, iqm=robust)
    return Table(f"The comparison. {said}", heads, body, [row.outcome for row in found])


def _compared(row: Row, baseline: float | None, *, robust: bool) -> list[Cell]:
    """`baseline`: the mean of its baseline's own row."""
    floor = "" if row.sign_flip_floor is None else f"floor {row.sign_flip_floor:.2g}"
    return [
        ", ".join(part for part in (f"{row.head}{ARROWS[row.better]}", row.unit, row.where) if part),
        row.mode,
        Number(row.n, str(row.n)),
        _value(row.mean, row.low, row.high),
        *([_value(row.interquartile_mean)] if robust else []),
        _difference(row.difference, row.difference_low, row.difference_high, _own_means(row, baseline)),
        Number(row.p_holm, p_value(row.p_holm)),
        Number(row.sign_flip_p, p_value(row.sign_flip_p), floor),
    ]


def _own_means(row: Row, baseline: float | None) -> str:
    """`0.912 - 0.929`: the means that the pair's difference is of, where they are, as printed, not those of the two rows."""
    if row.pair_mean is None or row.baseline_pair_mean is None or baseline is None:
        return ""
    own = [number(mean, _PRECISION) for mean in (row.pair_mean, row.baseline_pair_mean)]
    return "" if own == [number(mean, _PRECISION) for mean in (row.mean, baseline)] else " - ".join(own)


def final_table(directory: str, final: Mapping[str, Any]) -> Table:
    """The metrics that a trained comparison ended with, as its manifest has them. `directory`: to name it among several."""
    body: list[list[Cell]] = []
    baseline = final.get("baseline")
    for mode, metrics in final["modes"].items():
        for name, metric in metrics.items():
            if metric is not None:
                less = metric.get("difference") or {}
                unit = "share" if name == "accuracy" else METRICS[name].unit if name in METRICS else ""
                body.append(
                    [
                        f"{name}, {unit}" if unit else name,
                        mode,
                        Number(metric["n"], str(metric["n"])),
                        _value(metric["mean"], metric["low"], metric["high"]),
                        _difference(less.get("mean"), less.get("low"), less.get("high")),
                    ]
                )
    what = "on fresh prompts" if any("accuracy" in metrics for metrics in final["modes"].values()) else "at the last step"
    of = f" of {directory}" if directory else ""
    text = f"After training{of}, {what}: mean [95 % interval over seeds] and difference to {baseline}"
    return Table(text, ["metric", "mode", "seeds", "mean", "difference"], body, [str(row[0]) for row in body])


def metric_tables(frames: Frames) -> list[Table]:
    """Every recorded metric as the mean over the steps that have it, a column a run, and those that are the same in all runs in
    a table of one column; none above `_MOST_COLUMNS` runs.
    """
    if len(frames.runs) > _MOST_COLUMNS:
        return []
    own = {run.label: rows(frames.metrics, run=run.label) for run in frames.runs}
    apart: list[list[Cell]] = []
    same: list[list[Cell]] = []
    for name in _recorded(frames):
        values = {label: numbers(frame, name) for label, frame in own.items()}
        known = [value[np.isfinite(value)] for value in values.values()]
        if not any(map(len, known)):
            continue
        metric = describe(name)
        cells = [
            _mean(part, len(whole)) if len(part) else Number(None, "")
            for part, whole in zip(known, values.values(), strict=True)
        ]
        unit = ", ".join(filter(None, (in_length_unit(metric.unit, frames.length_unit), f"over {metric.over}")))
        equal = len(own) > 1 and len(coinciding({label: [value] for label, value in values.items()})) == len(own) - 1
        (same if equal else apart).append([name, unit, *(cells[:1] if equal else cells)])
    text = f"mean over the recorded steps ({_steps(frames)})"
    heads = ["metric", "unit, over what"]
    every = f"Every metric that differs between the runs, {text}" if same else f"Every metric, {text}"
    tables = [Table(every, [*heads, *own], apart)] if apart else []
    if same:
        tables.append(
            Table(f"Metrics that are the same in all {len(own)} runs, {text}", [*heads, f"all {len(own)} runs"], same)
        )
    return tables


def last_step_table(frames: Frames) -> Table | None:
    """The last recorded step of every run, where there are too many runs for `metric_tables`."""
    if len(frames.runs) <= _MOST_COLUMNS:
        return None
    shown = [name for name in _LAST if np.isfinite(numbers(frames.metrics, name)).any()]
    body: list[list[Cell]] = []
    for run in frames.runs:
        last = rows(frames.metrics, run=run.label).sort_values("step", kind="stable").tail(1)
        step = int(last["step"].iloc[0])
        body.append([run.label, Number(step, str(step)), *(_value(_known(numbers(last, name)[0])) for name in shown)])
    named = {name: in_length_unit(describe(name).unit, frames.length_unit) for name in shown}
    units = [f"{name}, {unit}" if unit else name for name, unit in named.items()]
    return Table("The last recorded step of every run (a single step is noisy)", ["run", "step", *units], body)


def layout_tables(frames: Frames) -> list[Table]:
    """How far each layout moves pg_loss; and for a few runs the numbers themselves, at each run's last step."""
    deviations = layout_deviations(frames)
    body: list[list[Cell]] = []
    for name in dict.fromkeys(deviations["layout"]):
        own = numbers(rows(deviations, layout=name), "deviation")
        equal, known = int((own == 0).sum()), own[np.isfinite(own)]
        worst = float(known.max()) if known.size else None
        told = [] if worst is None else [f"{worst:.1e}" if worst else "0"]
        told += [f"{own.size - known.size} with a blank"] if known.size < own.size else []
        shown = Number(worst, ", ".join(told))
        body.append([str(name), Number(len(own), str(len(own))), Number(equal, str(equal)), shown])
    if not body:
        return []
    reference = " or ".join(map(str, dict.fromkeys(deviations["reference"])))
    text = f"pg_loss of each layout against {reference}, relative to the sum of its absolute terms"
    tables = [Table(text, ["layout", "comparisons", "equal to the last bit", "largest difference"], body)]
    if len(frames.runs) <= _MOST_COLUMNS:
        tables.append(_last_layouts(frames))
    return tables


def _last_layouts(frames: Frames) -> Table:
    last = {}
    for run in frames.runs:
        own = rows(frames.layouts, run=run.label)
        own = rows(own, step=max(own["step"].tolist(), default=0))
        last[run.label] = dict(zip(own["layout"], numbers(own, "pg_loss"), strict=True))
    names = dict.fromkeys(name for values in last.values() for name in values)
    body: list[list[Cell]] = [
        [str(name), *(_value(_known(values.get(name, math.nan)), digits=9) for values in last.values())] for name in names
    ]
    text = "pg_loss by layout, at each run's last step: the same number down a column, unless the rule varies with the layout"
    return Table(text, ["layout", *last], body)


# -- notes --------------------------------------------------------------------------------------------------------------


def skipped(frames: Frames) -> list[str]:
    """`kl_loss: needs ref_log_probs`: what could not be measured, and why."""
    reasons: dict[str, dict[str, None]] = {}
    for one in _cells(frames, "skipped", dict):
        for metric, reason in one.items():
            reasons.setdefault(str(reason), {})[str(metric)] = None
    return [f"{', '.join(metrics)}: {reason}" for reason, metrics in reasons.items()]


def step_notes(frames: Frames) -> list[str]:
    """What the steps themselves noted, each once, with the number of recorded steps that did."""
    counts = Counter(str(note) for one in _cells(frames, "notes", list) for note in one)
    return [f"{note} ({plural(count, 'recorded step')})" for note, count in counts.items()]


def _cells(frames: Frames, name: str, kind: type) -> Iterator[Any]:
    if name in frames.metrics:
        yield from (cell for cell in frames.metrics[name] if isinstance(cell, kind))


# -- cells --------------------------------------------------------------------------------------------------------------


def _recorded(frames: Frames) -> list[str]:
    """Catalogue metrics among the columns: in the catalogue's order, then pass@k."""
    columns = [str(name) for name in frames.metrics.columns]
    return [*(name for name in METRICS if name in columns), *(name for name in columns if name.startswith("pass@"))]


def _steps(frames: Frames) -> str:
    steps = frames.steps
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _mean(values: np.ndarray, steps: int) -> Number:
    mean = math.fsum(values.tolist()) / len(values)
    return Number(mean, _shown(mean), "" if len(values) == steps else f"{len(values)} of {steps} steps")


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _whole(value: float | None) -> Cell:
    return Number(None, "") if value is None else Number(value, f"{value:,.0f}")


def _shown(value: float, digits: int = _PRECISION) -> str:
    return "0" if abs(value) < 1e-12 else number(value, digits)


def _value(value: float | None, low: float | None = None, high: float | None = None, *, digits: int = _PRECISION) -> Number:
    if value is None:
        return Number(None, "")
    bounds = "" if low is None or high is None else f"[{_shown(low, digits)}, {_shown(high, digits)}]"
    return Number(value, _shown(value, digits), bounds)


def _difference(value: float | None, low: float | None, high: float | None, means: str = "") -> Number:
    """Signed, and one digit shorter than the means, three: it is not known to more digits than they are. `means`:
    the two that it is of.
    """
    if value is None:
        return Number(None, "")
    mean, *bounds = (("+" if one >= 0 else "") + _shown(one, _PRECISION - 1) for one in (value, low, high) if one is not None)
    small = [f"[{', '.join(bounds)}]"] if len(bounds) == 2 else []
    return Number(value, mean, "\n".join([*small, *([means] if means else [])]))


def settings_table(findings: Findings) -> Table | None:
    """The settings, versions and devices that differ between the runs, and nothing else; None where none does."""
    if not findings.differing:
        return None
    body: list[Sequence[Cell]] = [
        [one.name, one.kind, value, ", ".join(labels)] for one in findings.differing for value, labels in one.values.items()
    ]
    return Table("Only what differs", ["setting", "kind", "value", "runs"], body)
