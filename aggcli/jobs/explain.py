"""From a rule that varies with the layout to a text for its framework's issue tracker: the smallest example, with numbers."""

from __future__ import annotations

from typing import Any

from aggcli.rules import RULES, Rule, find_rule
from aggcli.rules.reference import varies

DIVISOR = 8.0
"""The constant, in tokens, of rules that have no weights without one."""


def named(name: str, framework: str | None) -> Rule:
    """The rule `name`, or `framework:name`. Raises `SettingError` for one that nobody uses."""
    return find_rule(f"{framework}:{name}" if framework and ":" not in name else name)


def explained(rule: Rule) -> dict[str, Any]:
    """`rule`, `varies`, `counterexample` (None where the search finds none) and `text`: Markdown, or the sentence that there is
    nothing to report."""
    from aggcli.auditing import NamedRule, smallest_counterexample
    from aggcli.report.explained import issue_text, nothing_to_report

    found = smallest_counterexample(NamedRule(rule.with_divisor(DIVISOR) if rule.needs_divisor else rule))
    if found is None:
        return {"rule": rule.name, "varies": False, "counterexample": None, "text": nothing_to_report(rule)}
    example = found.as_json()
    siblings = [other for other in RULES.values() if other.framework == rule.framework and other.mode == rule.mode]
    invariant = [other for other in siblings if rule.mode and other != rule and not varies(other) and not other.own_loss]
    return {"rule": rule.name, "varies": True, "counterexample": example, "text": issue_text(rule, example, invariant)}
