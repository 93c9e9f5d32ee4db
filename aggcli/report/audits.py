"""What `aggcli audit` prints, from the same dictionaries that its `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from aggcli.report.blocks import BlockTable

Step = Mapping[str, Any]


def audit_tables(head: Mapping[str, Any], steps: Sequence[Step]) -> list[Table | Text]:
    """The settings in force, one row a rule, and in words why each rule that varies does."""
    rules = list(dict.fromkeys(rule for step in steps for rule in step["rules"]))
    parts: list[Table | Text] = [Text(_headline(head, steps))]
    shown = [rule for rule in rules if any(rule in s["rules"] and s["rules"][rule]["verdict"] != "not computed" for s in steps)]
    if shown:
        parts += [_table(steps, shown, head)]
    parts += [
        Text(text + "\n")
        for text in (
            *_answer(head, steps, shown),
            *_reasons(steps, shown),
            *_not_evaluated(steps, shown),
            *_findings(head),
            *_notes(steps),
        )
    ]
    left_out = _not_computed(steps, rules)
    return [*parts, *([Text(left_out)] if left_out else [])]


def _headline(head: Mapping[str, Any], steps: Sequence[Step]) -> str:
    count = f", {len(steps)} optimizer steps" if len(steps) > 1 else ""
    return (
        f"{head['rollouts']}{count}\n"
        f"layouts: {', '.join(head['layouts'])}; the first is the reference\n"
        f"constants and padded widths: {_number(head['divisor'])} {head['length_unit']} ({head['divisor_origin']})\n"
    )


def _table(steps: Sequence[Step], rules: Sequence[str], head: Mapping[str, Any]) -> Table:
    numbers = ("step loss", "eff. lr", "cosine", "change")
    caption = (
        f"eff. lr: norm of the gradient over {head['baseline']}'s, and cosine: with it, under the reference layout; change: the"
        " largest change of a token's weight, relative to it, under any other that the rule was evaluated under"
    )
    table = BlockTable(["rule", *numbers, "verdict"], numbers, padding=(0, 1, 0, 0), caption=caption, fold_names=True)
    for rule in rules:
        found = _of(steps, rule)
        table.add_row(
            Text(rule),
            *(_number(_mean(report[key] for report in found)) for key in ("pg_loss", "effective_lr", "gradient_cosine")),
            _change(found),
            _verdict(found),
        )
    return table


def _change(found: Sequence[Mapping[str, Any]]) -> str:
    """The largest change over steps; a weight that became NaN is worse than any number."""
    if _verdict(found) == "not compared":
        return ""
    changes = [report["deviation"] for report in found]
    if any(change is None or math.isinf(change) for change in changes):
        return "NaN"
    worst = max(changes)
    return "0" if worst < 1e-12 else f"{worst:.3g}"


def _verdict(found: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [report["verdict"] for report in found]
    return next((v for v in ("not finite", "varies", "not compared", "invariant") if v in verdicts), "not computed")


def _answer(head: Mapping[str, Any], steps: Sequence[Step], rules: Sequence[str]) -> list[str]:
    """For a recorded layout: would the loss have been another number, and by how much?"""
    if head["layouts"][0] != "recorded":
        return []
    varies = [rule for rule in rules if _verdict(_of(steps, rule)) == "varies"]
    ratios = {rule: _mean(report["effective_lr"] for report in _of(steps, rule)) for rule in rules}
    known = {rule: ratio for rule, ratio in ratios.items() if ratio is not None}
    lines = ["Would a different layout or rule have changed this loss?"]
    compared = [rule for rule in rules if _verdict(_of(steps, rule)) != "not compared"]
    if compared:
        own = "not compared" if head["baseline"] not in compared else "yes" if head["baseline"] in varies else "no"
        lines.append(
            f"  another of these layouts: {own} under {head['baseline']}; yes under {len(varies)} of the {len(compared)}"
            f" rule{'' if len(compared) == 1 else 's'} compared"
        )
    else:
        lines.append("  another layout: no rule was evaluated under two layouts")
    if known:
        low, high = min(known, key=lambda rule: known[rule]), max(known, key=lambda rule: known[rule])
        same = all(abs(known[rule] - 1) < 1e-9 for rule in (low, high))
        lines.append(
            f"  another rule: {'not by its size' if same else 'yes'}; the effective learning rate would have been"
            f" {known[low]:.4g} ({low}) to {known[high]:.4g} ({high}) times that of {head['baseline']}"
        )
    return ["\n".join(lines)]


def _reasons(steps: Sequence[Step], rules: Sequence[str]) -> Iterable[str]:
    """Why each rule varies, rules of one reason together, each with its worst layout and smallest case."""
    groups: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for rule in rules:
        worst = max(_of(steps, rule), key=lambda r: math.inf if r["deviation"] is None else r["deviation"])
        if worst["verdict"] in ("varies", "not finite"):
            groups.setdefault(worst["reason"], []).append((rule, worst))
    for reason, members in groups.items():
        lines = [f"{', '.join(rule for rule, _ in members)}: {reason or 'the weights depend on the layout'}"]
        report = members[0][1]
        outcome = report["layouts"].get(report["worst_layout"])
        if outcome is not None:
            whose = f"{members[0][0]} " if len(members) > 1 else ""
            lines.append(
                f"  {whose}most under {report['worst_layout']}: step loss {_number(outcome['pg_loss'])} instead of"
                f" {_number(report['pg_loss'])}, gradient norm x {_number(outcome['gradient_ratio'])}, cosine"
                f" {_number(outcome['gradient_cosine'])}"
            )
        if report["counterexample"]:
            lines.append(f"  smallest: {report['counterexample']['text']}")
        yield "\n".join(lines)


def _not_evaluated(steps: Sequence[Step], rules: Sequence[str]) -> Iterable[str]:
    """Which layouts a rule was left out of, so that nothing is said of it there."""
    groups: dict[str, list[str]] = {}
    for rule in rules:
        skipped = dict.fromkeys(layout for report in _of(steps, rule) for layout in report["skipped"])
        if skipped:
            groups.setdefault(", ".join(skipped), []).append(rule)
    for layouts, named in groups.items():
        yield f"not evaluated under {layouts}, which the framework cannot represent: {', '.join(named)}"


def _findings(head: Mapping[str, Any]) -> Iterable[str]:
    for name, findings in head.get("reducers", {}).items():
        lines = [f"{name}: {'no fault found' if not any(f['fault'] for f in findings) else 'faults'}"]
        lines += [f"  {'fault' if f['fault'] else 'note'}: {f['kind']}: {f['text']}" for f in findings]
        yield "\n".join(lines)


def _notes(steps: Sequence[Step]) -> list[str]:
    """What is unverified about the rules shown, and what else is to be known about them."""
    notes = dict.fromkeys(note for step in steps for report in step["rules"].values() for note in report["notes"])
    return ["\n".join(notes)] if notes else []


def _not_computed(steps: Sequence[Step], rules: Sequence[str]) -> str:
    reasons: dict[str, list[str]] = {}
    for step in steps:
        for rule in rules:
            report = step["rules"].get(rule)
            if report and report["verdict"] == "not computed" and rule not in reasons.setdefault(report["reason"], []):
                reasons[report["reason"]].append(rule)
    return "\n".join(f"not computed: {', '.join(named)}: {reason}" for reason, named in reasons.items())


def _of(steps: Sequence[Step], rule: str) -> list[Mapping[str, Any]]:
    return [s["rules"][rule] for s in steps if rule in s["rules"] and s["rules"][rule]["verdict"] != "not computed"]


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "" if value is None else "NaN"
    return f"{0.0 if abs(value) < 1e-12 else value:.4g}"
