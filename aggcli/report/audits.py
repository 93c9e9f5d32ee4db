"""What `aggcli audit` prints, from the same dictionaries that its `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import ConsoleRenderable
from rich.table import Table

from aggcli.analysis.answer import Answer
from aggcli.measurement.words import AS_RECORDED, VARIES, at_most, listed, percent, short
from aggcli.report.blocks import BlockTable
from aggcli.report.tables import answer_text, lines, policy_loss_in_words
from aggcli.rules import recorded_rule
from aggcli.rules.reference import PAPERS

Step = Mapping[str, Any]
BUILT_IN = "the built-in batch"
"""The rollouts of an audit of none."""
_FEW = 12
"""Rules that all have a row of the table; of more, only those that vary have one."""


def audit_tables(head: Mapping[str, Any], steps: Sequence[Step]) -> list[ConsoleRenderable]:
    """The answer, a row a rule that varies (and each other one where they are few), in words why each varies, the invariant
    rules in one line, and the settings in force."""
    rules = _rules(steps)
    shown = [rule for rule in rules if _of(steps, rule)]
    kept = [rule for rule in shown if _verdict(_of(steps, rule)) == "invariant"]
    rows = shown if len(shown) <= _FEW else [rule for rule in shown if rule not in kept]
    found: list[ConsoleRenderable | None] = [answer_text(audit_answer(head, steps))]
    found += [_table(steps, rows, head)] if rows else []
    found += [lines(told, indented=True) for told in _reasons(steps, shown)]
    found += [lines([*_invariant(head, kept, steps), *_not_evaluated(steps, shown)])]
    found += [lines(told, indented=True) for told in _findings(head)]
    found += [lines(_notes(steps)), lines(_not_computed(steps, rules)), lines(_settings(head, steps))]
    return [part for part in found if part is not None]


def _settings(head: Mapping[str, Any], steps: Sequence[Step]) -> list[str]:
    count = f", {len(steps)} optimizer steps" if len(steps) > 1 else ""
    own = [f"; of {', '.join(rules)} it is {layout}" for layout, rules in _own_references(head, steps).items()]
    why = ", the first that the framework can represent" if own else ""
    return [
        f"{head['rollouts']}{count}",
        *policy_loss_in_words(head["settings"]),
        f"layouts: {', '.join(head['layouts'])}; the first is the reference{''.join(own)}{why}",
        f"constants and padded widths: {short(head['divisor'])} {head['length_unit']} ({head['divisor_origin']})",
    ]


def _own_references(head: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, list[str]]:
    """The rules whose reference layout is not the first of all, by what it is (in all steps)."""
    groups: dict[str, list[str]] = {}
    for rule in _rules(steps):
        found = dict.fromkeys(report["reference_layout"] for report in _of(steps, rule))
        if found and list(found) != head["layouts"][:1]:
            groups.setdefault(" or ".join(found), []).append(rule)
    return groups


# -- the answer -----------------------------------------------------------------------------------------------------


def audit_answer(head: Mapping[str, Any], steps: Sequence[Step]) -> Answer:
    """Which rules vary with the layout and by how much, those of which framework, and what else another rule would change."""
    verdicts = {rule: _verdict(_of(steps, rule)) for rule in _rules(steps)}
    if all(verdict == "not computed" for verdict in verdicts.values()):
        return Answer(("No rule could be computed on this batch.",))
    compared = [rule for rule, verdict in verdicts.items() if verdict in (*VARIES, "invariant")]
    varying = [rule for rule in compared if verdicts[rule] == "varies"]
    recorded = [rule for rule in compared if verdicts[rule] == AS_RECORDED]
    others = {rule: verdict for rule, verdict in verdicts.items() if verdict in ("not compared", "not finite")}
    said = [_on_layouts(head, steps, compared, varying, bool(recorded)) + _not_judged(others)]
    said += [_on_frameworks([*compared, *others], varying, {*recorded, *others})] if varying else []
    said += [_on_recorded(steps, recorded, "more" if varying else "") if recorded else ""]
    said += [_on_rules(head, steps, [rule for rule, verdict in verdicts.items() if verdict != "not computed"])]
    return Answer(tuple(filter(None, said)))


def _on_layouts(
    head: Mapping[str, Any], steps: Sequence[Step], compared: Sequence[str], varying: Sequence[str], recorded: bool
) -> str:
    """Without its full stop. `recorded`: whether the recorded layout alone moves a rule."""
    where = "On the built-in batch " if head["rollouts"] == BUILT_IN else ""
    if not compared:
        return "No rule was compared between two layouts"
    if not varying:
        which = compared[0] if len(compared) == 1 else f"any of the {len(compared)} rules compared"
        layout = "evaluated layout that its framework can represent" if recorded else "layout that was evaluated"
        return f"{where or 'N'}{'n' if where else ''}o {layout} changes the weight of a token under {which}"
    vary = "varies" if len(varying) == 1 else "vary"
    lead = f"{where}{len(varying)} of the {len(compared)} rules compared {vary} with the layout"
    lead = lead if len(compared) > 1 else f"{where}{varying[0]} varies with the layout"
    finite = [(rule, one) for rule in varying for one in _of(steps, rule) if one["worst_layout"] is not None]
    finite = [(rule, one) for rule, one in finite if math.isfinite(_worst(one)["deviation"])]
    told = []
    if finite:
        rule, report = max(finite, key=lambda found: _worst(found[1])["deviation"])
        other = _worst(report)
        as_much = {name for name, one in finite if math.isclose(_worst(one)["deviation"], other["deviation"])} - {rule}
        also = f" ({len(as_much)} more as much)" if as_much else ""
        named = "" if len(compared) == 1 else f"{rule}, " if len(varying) == 1 else f"most of all {rule}{also}, "
        change = f"{named}under {report['worst_layout']} a token's weight changes by {percent(other['deviation'])}"
        if other["pg_loss"] is not None and report["pg_loss"] is not None:
            loss = f"the step loss is {_number(other['pg_loss'])} instead of {_number(report['pg_loss'])}"
            change += f" and {loss} under {report['reference_layout']}"
        if len(steps) > 1:
            change += f" (step {_step_of(report, rule, steps)})"
        told.append(change)
    broken = [rule for rule in varying if _change(_of(steps, rule)) == "NaN"]
    if broken:
        told.append(f"{_few(broken)} {'gives' if len(broken) == 1 else 'give'} NaN under some layout")
    return f"{lead}: {'; '.join(told)}" if told else lead


def _on_recorded(steps: Sequence[Step], rules: Sequence[str], more: str) -> str:
    """`3 more vary (a, b and c) only between the recorded layout, which their framework cannot represent, and others.`"""
    few = listed(list(rules)) if len(rules) <= _FEW else _few(rules)
    changes = [one["deviation"] for rule in rules for one in _of(steps, rule)]
    worst = math.inf if any(change is None for change in changes) else max(changes)
    by = f", by up to {percent(at_most(worst, 3))}" if math.isfinite(worst) else ""
    vary = "varies" if len(rules) == 1 else "vary"
    which = f"{len(rules)} {more} {vary} ({few})" if more else f"{few} {vary}"
    whose = "its framework" if len(rules) == 1 else "their framework"
    return f"{which} only between the recorded layout, which {whose} cannot represent, and the others{by}."


def _worst(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the layout that moves the rule most makes of it."""
    return report["layouts"][report["worst_layout"]]


def _not_judged(others: Mapping[str, str]) -> str:
    """What was not compared, and so is neither called invariant nor not; the full stop of the sentence."""
    broken = [rule for rule, verdict in others.items() if verdict == "not finite"]
    single = [rule for rule, verdict in others.items() if verdict == "not compared"]
    said = [f"{_few(broken)} {'is' if len(broken) == 1 else 'are'} not finite on this batch"] if broken else []
    said += [f"{_few(single)} {'was' if len(single) == 1 else 'were'} evaluated under one layout only"] if single else []
    return "".join(f"; {text}" for text in said) + "."


def _on_frameworks(rules: Sequence[str], varying: Sequence[str], open_ones: set[str]) -> str:
    """`By framework, rules that vary: trl 1 of 5; of slime, verl none.`; blank where fewer than two frameworks are there. A
    framework with a rule that was not judged, or that varies as recorded (`open_ones`), is not said to have none."""
    of: dict[str, list[str]] = {}
    for rule in rules:
        found = recorded_rule(rule)
        if found is not None and not found.is_mode and found.framework not in PAPERS:
            of.setdefault(found.framework, []).append(rule)
    there = {name: [rule for rule in rules if rule in varying] for name, rules in of.items()}
    moved = [f"{name} {len(own)} of {len(of[name])}" for name, own in there.items() if own]
    still = [name for name, own in there.items() if not own and not open_ones.intersection(of[name])]
    if not moved or len(of) == 1:
        return f"Those that vary: {listed(list(varying))}." if 1 < len(varying) <= _FEW else ""
    return f"By framework, rules that vary: {', '.join(moved)}" + (f"; of {', '.join(still)} none." if still else ".")


def _on_rules(head: Mapping[str, Any], steps: Sequence[Step], rules: Sequence[str]) -> str:
    """What another rule would have changed on these rollouts; blank for the built-in batch, which nobody trained on."""
    ratios = {rule: _mean(report["effective_lr"] for report in _of(steps, rule)) for rule in rules}
    known = {rule: ratio for rule, ratio in ratios.items() if ratio is not None}
    if len(known) < 2 or head["rollouts"] == BUILT_IN:
        return ""
    low, high = min(known, key=lambda rule: known[rule]), max(known, key=lambda rule: known[rule])
    if all(abs(known[rule] - 1) < 1e-9 for rule in (low, high)):
        return f"Another rule would not have changed the gradient norm: it is {head['baseline']}'s under all of them."
    over = f" (mean of {len(steps)} steps)" if len(steps) > 1 else ""
    each = ", each under its reference layout" if _own_references(head, steps) else ""
    return (
        f"Another rule would have made the gradient norm {short(known[low])}x ({low}) to {short(known[high])}x ({high})"
        f" {head['baseline']}'s{over}{each}."
    )


def _few(rules: Sequence[str]) -> str:
    return listed(list(rules)) if len(rules) <= 3 else f"{', '.join(rules[:2])} and {len(rules) - 2} more"


# -- the table ------------------------------------------------------------------------------------------------------


def _table(steps: Sequence[Step], rules: Sequence[str], head: Mapping[str, Any]) -> Table:
    numbers = ("step loss", "gradient norm", "cosine", "change of a weight")
    over = f"means of {len(steps)} steps; " if len(steps) > 1 else ""
    under = "each under its reference layout" if _own_references(head, steps) else "under the reference layout"
    caption = (
        f"{over}gradient norm and cosine: against {head['baseline']}'s{',' if 'each' in under else ''} {under}; change: the"
        " largest of a token's weight, relative to it, under any other layout that the rule was evaluated under"
    )
    if any(_apart(report) for rule in rules for report in _of(steps, rule) if report["verdict"] == "varies"):
        caption += " (where it varies: that its framework can represent)"
    if any(_verdict(_of(steps, rule)) == AS_RECORDED for rule in rules):
        caption += "; as recorded: varies only between the recorded layout, which the framework cannot represent, and others"
    own = [rule for rule in rules if (found := recorded_rule(rule)) is not None and found.own_loss]
    if own and any(report["pg_loss"] is not None for rule in own for report in _of(steps, rule)):
        whose = f"step loss, gradient norm and cosine of {', '.join(own)}"
        loss = head["settings"]["policy_loss"]
        what = f"policy loss {loss} under their weights, whatever loss"
        what = "the clipped surrogate under their weights, not of the loss that" if loss == "ppo" else what
        caption += f"; {whose}: of {what} the framework logs"
    table = BlockTable(["rule", *numbers, ""], numbers, padding=(0, 1, 0, 0), caption=caption, fold_names=True)
    for rule in rules:
        found = _of(steps, rule)
        ratio = _mean(report["effective_lr"] for report in found)
        table.add_row(
            rule,
            _number(_mean(report["pg_loss"] for report in found)),
            "" if ratio is None else f"{short(ratio)}x",
            _number(_mean(report["gradient_cosine"] for report in found)),
            _change(found),
            _verdict(found).replace(AS_RECORDED, "as recorded"),
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
    return "0" if worst < 1e-12 else percent(worst)


def _apart(report: Mapping[str, Any]) -> list[str]:
    """The recorded layout, where the framework of this rule cannot represent it, and can two or more others."""
    return [layout for layout, one in report["layouts"].items() if one["apart"]]


def _verdict(found: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [report["verdict"] for report in found]
    return next((v for v in ("not finite", *VARIES, "not compared", "invariant") if v in verdicts), "not computed")


# -- in words -------------------------------------------------------------------------------------------------------


def _invariant(head: Mapping[str, Any], kept: Sequence[str], steps: Sequence[Step]) -> list[str]:
    """The rules that no layout changed, in one line, and where that was evaluated."""
    if not kept:
        return []
    parts = [report for rule in kept for report in _of(steps, rule)]
    where = (
        "each of the layouts" if not any(report["skipped"] for report in parts) else "the layouts that each was evaluated under"
    )
    return [f"invariant under {where} ({', '.join(head['layouts'])}): {', '.join(kept)}"]


def _rules(steps: Sequence[Step]) -> list[str]:
    return list(dict.fromkeys(rule for step in steps for rule in step["rules"]))


def _reasons(steps: Sequence[Step], rules: Sequence[str]) -> Iterable[list[str]]:
    """Why each rule varies, rules of one reason together, with the layout that moves the first of them most, and the smallest
    example."""
    groups: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for rule in rules:
        worst = max(_of(steps, rule), key=lambda r: math.inf if r["deviation"] is None else r["deviation"])
        if worst["verdict"] in (*VARIES, "not finite"):
            groups.setdefault(worst["reason"], []).append((rule, worst))
    for reason, members in groups.items():
        told = [f"{', '.join(rule for rule, _ in members)}: {reason or 'the weights depend on the layout'}"]
        report = members[0][1]
        outcome = report["layouts"].get(report["worst_layout"])
        if outcome is not None:
            whose = f"{members[0][0]} " if len(members) > 1 else ""
            at = f", step {_step_of(report, members[0][0], steps)}" if len(steps) > 1 else ""
            told.append(f"{whose}most under {report['worst_layout']}{at}: {_moved(report, outcome)}")
            told += [
                f"{whose}under {layout}, which its framework cannot represent{at}: {_moved(report, report['layouts'][layout])}"
                for layout in _apart(report)
                if layout != report["worst_layout"]
            ]
        if report["counterexample"]:
            told.append(f"smallest example: {report['counterexample']['text']}")
        yield told


def _step_of(report: Mapping[str, Any], rule: str, steps: Sequence[Step]) -> int:
    """The step that this report of a rule is of."""
    return next(step["step"] for step in steps if step["rules"].get(rule) is report)


def _moved(report: Mapping[str, Any], outcome: Mapping[str, Any]) -> str:
    """What a layout makes of the loss and the gradient, where there are any."""
    parts = [f"a weight changes by {percent(outcome['deviation'])}"] if math.isfinite(outcome["deviation"] or 0.0) else []
    if outcome["pg_loss"] is not None and report["pg_loss"] is not None:
        parts.append(f"step loss {_number(outcome['pg_loss'])} instead of {_number(report['pg_loss'])}")
    if outcome["gradient_ratio"] is not None:
        parts.append(f"gradient norm {short(outcome['gradient_ratio'])}x")
    if outcome["gradient_cosine"] is not None:
        parts.append(f"cosine {_number(outcome['gradient_cosine'])}")
    return ", ".join(parts)


def _not_evaluated(steps: Sequence[Step], rules: Sequence[str]) -> Iterable[str]:
    """Which layouts a rule was left out of, so that nothing is said of it there."""
    groups: dict[str, list[str]] = {}
    for rule in rules:
        skipped = dict.fromkeys(layout for report in _of(steps, rule) for layout in report["skipped"])
        if skipped:
            groups.setdefault(", ".join(skipped), []).append(rule)
    for layouts, named in groups.items():
        yield f"not evaluated under {layouts}, which the framework cannot represent: {', '.join(named)}"


def _findings(head: Mapping[str, Any]) -> Iterable[list[str]]:
    for name, findings in head.get("reducers", {}).items():
        told = [f"{name}: {'no fault found' if not any(f['fault'] for f in findings) else 'faults'}"]
        yield [*told, *(f"{'fault' if f['fault'] else 'note'}: {f['kind']}: {f['text']}" for f in findings)]


def _notes(steps: Sequence[Step]) -> list[str]:
    """What is unverified about the rules, and what else is to be known about them; rules of which the same is said together."""
    found: dict[str, list[str]] = {}
    for step in steps:
        for rule, report in step["rules"].items():
            for note in report["notes"]:
                of = found.setdefault(note.removeprefix(f"{rule}: "), [])
                of += [] if rule in of else [rule]
    return [f"{', '.join(rules)}: {note}" for note, rules in found.items()]


def _not_computed(steps: Sequence[Step], rules: Sequence[str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for step in steps:
        for rule in rules:
            report = step["rules"].get(rule)
            if report and report["verdict"] == "not computed" and rule not in reasons.setdefault(report["reason"], []):
                reasons[report["reason"]].append(rule)
    return [f"not computed: {', '.join(named)}: {reason}" for reason, named in reasons.items()]


def _of(steps: Sequence[Step], rule: str) -> list[Mapping[str, Any]]:
    return [s["rules"][rule] for s in steps if rule in s["rules"] and s["rules"][rule]["verdict"] != "not computed"]


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "" if value is None else "NaN"
    return short(0.0 if abs(value) < 1e-12 else value)
