"""Every framework's aggregation as facts, and one function that turns facts, a batch and a layout into token weights."""

from aggcli.objective.presets.facts import EVIDENCE, SCOPES, Denominator, Preset, Scope, in_scope, why_it_varies
from aggcli.objective.presets.own import own_preset
from aggcli.objective.presets.registry import ALIASES, PRESETS, Rule, find_rule
from aggcli.objective.presets.weights import can_run, preset_weights, scoped_weights

__all__ = [
    "ALIASES",
    "EVIDENCE",
    "PRESETS",
    "SCOPES",
    "Denominator",
    "Preset",
    "Rule",
    "Scope",
    "can_run",
    "find_rule",
    "in_scope",
    "own_preset",
    "preset_weights",
    "scoped_weights",
    "why_it_varies",
]
