"""Every aggregation rule as a value: this project's modes, each framework's own, each paper's variant. Nothing imports torch.

A `Rule` says what a token's loss is divided by; `aggcli.objective.weights.rule_weights` turns a rule, a batch and a layout into
the weight of every token. Nothing outside this package decides anything by a rule's name.
"""

from __future__ import annotations

from aggcli.rules.modes import CONSTANT, CUSTOM, DEFAULT, MODES, NOTATION, PROMPT_MEAN, SAMPLE_MEAN, TOKEN_MEAN
from aggcli.rules.registry import ALIASES, ELSEWHERE, RULES, find_rule, names_of, recorded_rule, remark_on, settled
from aggcli.rules.rule import EVIDENCE, RULE_SETTINGS, SCOPES, Denominator, Rule, Scope, check_divisor

__all__ = [
    "ALIASES",
    "CONSTANT",
    "CUSTOM",
    "DEFAULT",
    "ELSEWHERE",
    "EVIDENCE",
    "MODES",
    "NOTATION",
    "PROMPT_MEAN",
    "RULES",
    "RULE_SETTINGS",
    "SAMPLE_MEAN",
    "SCOPES",
    "TOKEN_MEAN",
    "Denominator",
    "Rule",
    "Scope",
    "check_divisor",
    "find_rule",
    "names_of",
    "recorded_rule",
    "remark_on",
    "settled",
]
