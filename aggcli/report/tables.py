"""Tables for the terminal, from the same dictionaries that `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from aggcli.analysis.units import LENGTH_UNITS, in_length_unit
from aggcli.measurement.catalogue import BESIDE, OVER_TRAINED, describe, names
from aggcli.measurement.words import plural
from aggcli.report.blocks import BlockTable
from aggcli.rules import recorded_rule

Step = Mapping[str, Any]
_NEGLIGIBLE = 1e-12
"""A loss below this is 0 but for rounding, and is shown as 0."""

_LOSS = ("pg_loss", "loss", "total_weight", "effective_tokens", "grad_norm_log_probs", "gradient_ratio", "gradient_cosine")
_METRICS = tuple(name for metric in BESIDE for name in (metric, metric + OVER_TRAINED))
_ONLY_WHEN_ANY = {
    "fully_masked_samples",
    "unscored_samples",
    "zero_variance_groups",
    "all_right_groups",
    "all_wrong_groups",
    "all_wrong_groups_with_advantage",
    "weight_share/zero_advantage",
    "weight_share/all_right_groups",
    "weight_share/all_wrong_groups",
}
"""Rows that are only worth a line when they are not 0."""
_LABELS = {
    "total_weight": "total weight (sum w)",
    "effective_tokens": "effective {unit}",
    "grad_norm_log_probs": "grad norm, log-probs",
    "gradient_ratio": "  over {baseline}'s",
    "gradient_cosine": "  cosine to {baseline}'s",
    **{metric + OVER_TRAINED: "  over trained only" for metric in BESIDE},
    "weight_share/length_p25": "weight on length 0-25 %",
    "weight_share/length_p50": "  25-50 %",
    "weight_share/length_p75": "  50-75 %",
    "weight_share/length_p100": "  75-100 %",
    "weight_share/correct": "  correct rollouts",
    "weight_share/incorrect": "  incorrect rollouts",
    "weight_share/positive_advantage": "  advantage > 0",
    "weight_share/negative_advantage": "  advantage < 0",
    "weight_share/zero_advantage": "  advantage = 0",
    "weight_share/all_right_groups": "  all-right groups",
    "weight_share/all_wrong_groups": "  all-wrong groups",
}


def replay_tables(head: Mapping[str, Any], steps: Sequence[Step], between_layouts: Sequence[str]) -> list[Table | Text]:
    """What `run` and `compare` print: the settings in force, modes side by side, the batch, and the layouts, with what is said
    of their differences."""
    rules = [rule for rule in head["modes"] if any(rule in step["modes"] for step in steps)]
    tables: list[Table | Text] = [_headline(head, steps), _mode_table(head, steps, rules), _batch_table(head, steps, rules[0])]
    tables += [_layout_table(steps, rules), Text("\n".join(between_layouts) + "\n")]
    if any("correct/count" in step["modes"][rules[0]] for step in steps if rules[0] in step["modes"]):
        tables.append(_correct_table(steps, rules[0]))
    reasons = _skipped(steps)
    return [*tables, *([reasons] if reasons else [])]


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Two columns: a name and its value."""
    table = _table("", "")
    for name, value in facts.items():
        table.add_row(name, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return table


# -- parts ----------------------------------------------------------------------------------------------------------


def _headline(head: Mapping[str, Any], steps: Sequence[Step]) -> Text:
    settings = head["settings"]
    high = settings["eps_clip_high"] if settings["eps_clip_high"] is not None else settings["eps_clip"]
    parts = [
        f"{head['rollouts']} ({head['format']}), {plural(len(steps), 'optimizer step')}",
        f"mode: {', '.join(head['modes'])}",
        f"advantages: {_one_of(step['advantages'] for step in steps)}",
        f"clip: {settings['eps_clip']:g} below, {high:g} above",
    ]
    rules = [rule for rule in map(recorded_rule, head["modes"]) if rule is not None]
    parts += [
        f"{rule.name} divides by: {head['divisor']:g} {_length_unit(head)}"
        for rule in rules
        if rule.takes_divisor and head["divisor"]
    ]
    parts += [f"{rule.name} scale: {settings['prompt_mean_scale']}" for rule in rules if rule.reads("prompt_mean_scale")]
    if settings["kl_coef"]:
        parts.append(f"kl_coef: {settings['kl_coef']:g} ({settings['kl_estimator']})")
    if settings["metric_aggregation"] == "matched":
        parts.append("metrics: by each mode's own weights")
    return Text("\n".join(parts) + "\n")


def _length_unit(head: Mapping[str, Any]) -> str:
    return LENGTH_UNITS[head["length_unit"]]


def _one_of(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _mode_table(head: Mapping[str, Any], steps: Sequence[Step], rules: Sequence[str]) -> Table:
    table = _table(_over(steps), *rules)
    shares = [name for name in names(["global"]) if name.startswith("weight_share/")]
    for section in (_LOSS, shares, _METRICS):
        rows = [name for name in section if _is_shown(steps, rules, name)]
        for name in rows:
            if name == "loss" and not (head["settings"]["kl_coef"] or head["settings"]["entropy_coef"]):
                continue
            label = _LABELS.get(name, _with_unit(name, head)).format(baseline=rules[0], unit=_length_unit(head))
            table.add_row(label, *(_mean(steps, rule, name) for rule in rules))
        if section is _METRICS and rows:
            whose = [head["metric_rules"][rule] for rule in rules]
            table.add_row("  weighted by", *(names["metrics"] for names in whose))
            terms = [dict.fromkeys((names["kl_loss"], names["entropy_loss"])) for names in whose]
            table.add_row("  KL and entropy by", *(" / ".join(names) for names in terms))
        if rows:
            table.add_section()
    return table


def _is_shown(steps: Sequence[Step], rules: Sequence[str], name: str) -> bool:
    numbers = [number for rule in rules for number in _numbers(steps, rule, name)]
    return bool(numbers) and (name not in _ONLY_WHEN_ANY or any(numbers))


def _with_unit(name: str, head: Mapping[str, Any]) -> str:
    unit = in_length_unit(describe(name).unit, _length_unit(head))
    if name == "kl_loss":
        unit = f"{unit}, {head['settings']['kl_estimator']}"
    return f"{name} ({unit})" if unit not in ("", "share") else name


def _batch_table(head: Mapping[str, Any], steps: Sequence[Step], rule: str) -> Table:
    """Numbers that no mode changes."""
    table = _table("the batch", _over(steps))
    skip = {"gradient_ratio", "gradient_cosine", "effective_tokens", "micro_batches"}
    found = dict.fromkeys(name for step in steps if rule in step["modes"] for name in step["modes"][rule] if name != "layouts")
    for name in found:
        metric = describe(name)
        wanted = metric.reduction in ("mean", "count", "max") or (
            metric.reduction == "global" and not name.startswith("weight_share/") and not name.endswith(OVER_TRAINED)
        )
        silent = name in _ONLY_WHEN_ANY and not any(_numbers(steps, rule, name))
        if wanted and not silent and name not in skip:
            unit = f" ({in_length_unit(metric.unit, _length_unit(head))})" if metric.unit in ("tokens", "nats") else ""
            label = {"tokens": "trained {}", "response_tokens": "response {}"}.get(name, "").format(_length_unit(head))
            table.add_row(label or name + unit, _mean(steps, rule, name))
    return table


def _layout_table(steps: Sequence[Step], rules: Sequence[str]) -> Table:
    """pg_loss under each layout."""
    table = _table("pg_loss by layout", *rules)
    for layout in _layouts(steps, rules[0]):
        cells = [
            _text(
                _mean_of([step["modes"][rule]["layouts"][layout].get("pg_loss") for step in steps if rule in step["modes"]]),
                digits=9,
            )
            for rule in rules
        ]
        table.add_row(layout, *cells)
    return table


def _correct_table(steps: Sequence[Step], rule: str) -> Table:
    """Correct samples under each layout: reduced by sum and count, and each rank's own count; means over several steps.

    A column that is blank in every layout is left out: lengths are those of a single step, and only a few.
    """
    rows = []
    for layout in _layouts(steps, rule):
        found = [step["modes"][rule]["layouts"][layout] for step in steps if rule in step["modes"]]
        lengths = found[0].get("correct/lengths") if len(found) == 1 else None
        rows.append(
            (
                layout,
                _text(_mean_of([values.get("correct/count") for values in found])),
                _text(_mean_of([values.get("correct/response_length") for values in found])),
                " ".join(map(str, lengths)) if lengths and len(lengths) <= 6 else "",
                _by_rank([values["ranks"] for values in found]),
            )
        )
    heads = ("correct samples", "count", "mean length", "lengths", "count by rank")
    kept = [at for at in range(len(heads)) if at == 0 or any(row[at] for row in rows)]
    table = _table(*(heads[at] for at in kept))
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    return table


def _by_rank(steps: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """`17.33 + 18`: what each rank counted, which comes to the count; blank where not every step has as many ranks."""
    if len({len(ranks) for ranks in steps}) != 1:
        return ""
    return " + ".join(
        _text(_mean_of([rank.get("correct/count") for rank in of_steps]), 4) for of_steps in zip(*steps, strict=True)
    )


def _skipped(steps: Sequence[Step]) -> Text | None:
    reasons: dict[str, list[str]] = {}
    for step in steps:
        for metric, reason in step["skipped"].items():
            metrics = reasons.setdefault(reason, [])
            if metric not in metrics:
                metrics.append(metric)
    lines = [f"skipped: {', '.join(metrics)}: {reason}" for reason, metrics in reasons.items()]
    return Text("\n".join(lines)) if lines else None


# -- cells ----------------------------------------------------------------------------------------------------------


def _table(first: str, *others: str) -> BlockTable:
    return BlockTable([first, *others], numbers=others)


def _over(steps: Sequence[Step]) -> str:
    return f"step {steps[0]['step']}" if len(steps) == 1 else f"mean of {len(steps)} steps"


def _layouts(steps: Sequence[Step], rule: str) -> list[str]:
    found = dict.fromkeys(layout for step in steps if rule in step["modes"] for layout in step["modes"][rule]["layouts"])
    return [
        layout for layout in found if all(layout in step["modes"][rule]["layouts"] for step in steps if rule in step["modes"])
    ]


def _numbers(steps: Sequence[Step], rule: str, name: str) -> list[float]:
    values = [step["modes"][rule].get(name) for step in steps if rule in step["modes"]]
    return [value for value in values if value is not None]


def _mean(steps: Sequence[Step], rule: str, name: str) -> str:
    """The mean over the steps that have the number, blank where none has; says how many where some have not."""
    numbers = _numbers(steps, rule, name)
    text = _text(_mean_of(numbers))
    return f"{text} (n={len(numbers)})" if 0 < len(numbers) < len(steps) else text


def _mean_of(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _text(value: float | None, digits: int = 6) -> str:
    if value is None:
        return ""
    return f"{0.0 if abs(value) < _NEGLIGIBLE else value:.{digits}g}"
