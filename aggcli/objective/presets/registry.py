"""Every rule by name: this project's modes, the frameworks' presets, and the aliases that people use for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from aggcli.config import MODES
from aggcli.errors import SettingError, nearest
from aggcli.objective.presets.facts import SCOPES, Preset, Scope, in_scope
from aggcli.objective.presets.openrlhf_nemo_skyrl import OPENRLHF_NEMO_SKYRL
from aggcli.objective.presets.others import OTHERS
from aggcli.objective.presets.own import own_preset
from aggcli.objective.presets.slime_verl import SLIME_VERL
from aggcli.objective.presets.trl import TRL_SWIFT

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (*SLIME_VERL, *TRL_SWIFT, *OPENRLHF_NEMO_SKYRL, *OTHERS)}
"""Frameworks' and papers' rules by name."""

_DAPO = (
    "three things bear the name: DAPO as printed (eq. 8) is prompt_mean, which is meant here; what most code calls DAPO is"
    " token_mean (TRL loss_type=dapo, verl token-mean); the original runs averaged micro-batch token means"
    " (verl-legacy:token-mean)"
)
ALIASES: dict[str, tuple[str, str]] = {
    "grpo": ("sample_mean", "GRPO's 1/|o_i| inside a mean over rollouts"),
    "seq-mean-token-mean": ("sample_mean", "verl's name; verl counts rows, sample_mean counts rollouts"),
    "sequence_mean": ("sample_mean", "SkyRL's name; SkyRL counts rows, sample_mean counts rollouts"),
    "sample_average": ("sample_mean", "ScaleRL's name"),
    "gspo": ("sample_mean", "GSPO's 1/G; the sequence-level ratio is not part of the aggregation"),
    "dapo": ("prompt_mean", _DAPO),
    "prompt_average": ("prompt_mean", "ScaleRL's name"),
    "group_token_mean": ("prompt_mean", "the name in prime-rl forks; strict with --prompt-mean-scale prompts"),
    "cispo": ("prompt_mean", "MiniMax-M1 as printed; most code runs CISPO with a token mean"),
    "token-mean": ("token_mean", "verl's name, exact in verl's new engine; older verl averaged micro-batch token means"),
    "token_average": ("token_mean", "ScaleRL's name"),
    "per_token": ("token_mean", "slime's --calculate-per-token-loss"),
    "bnpo": ("trl:bnpo", "TRL's loss_type=bnpo: a token mean of each micro-batch"),
    "dr_grpo": ("constant", "Dr.GRPO's masked sum over a constant; needs --loss-aggregation-divisor"),
    "drgrpo": ("constant", "oat's name; needs --loss-aggregation-divisor"),
    "seq-mean-token-sum-norm": ("constant", "verl's name; there the constant defaults to the padded width"),
    "seq_mean_token_sum_norm": ("constant", "SkyRL's name; there the constant is max_seq_len"),
    "seq-mean-token-sum": ("verl:seq-mean-token-sum", "verl's name; constant with L = 1"),
    "token-sum": ("verl:token-sum", "no mean at all"),
    "sum": ("tinker", "no mean at all"),
    "luspo": ("trl:luspo", "TRL's loss_type=luspo"),
    "vl-norm": ("delta-l", "the paper's other name"),
    "balanced_aggregation": ("balanced", "the paper's own name"),
}
"""Alias -> (what it stands for, a note)."""


@dataclass(frozen=True)
class Rule:
    """A rule as it was asked for: its preset, and what to say about the name (blank: nothing)."""

    asked: str
    preset: Preset
    note: str = ""


def find_rule(name: str, *, prompt_mean_scale: str = "rollouts") -> Rule:
    """The rule called `name`: a mode, `framework:mode`, or an alias; `open-instruct:1000` and `delta-l:0.5` carry a number.

    `token_mean@micro-batch` is a mode whose denominators are counted in that scope (see `in_scope`).
    Raises `SettingError` for a name that nobody uses.
    """
    bare, _, asked = name.rpartition("@")
    scopes: dict[str, Scope] = {scope: scope for scope in SCOPES}
    if bare and asked in scopes:
        return _scoped(find_rule(bare, prompt_mean_scale=prompt_mean_scale), scopes[asked])
    if name in MODES:
        return Rule(name, own_preset(name, prompt_mean_scale))
    if name in PRESETS:
        return Rule(name, PRESETS[name], _unverified(PRESETS[name]))
    if name in ALIASES:
        target, note = ALIASES[name]
        found = find_rule(target, prompt_mean_scale=prompt_mean_scale)
        return Rule(name, found.preset, f"{name} is taken as {target}: {note}")
    return _with_number(name)


def _scoped(rule: Rule, scope: Scope) -> Rule:
    if rule.preset.evidence != "own":
        raise SettingError(
            f"'{rule.asked}@{scope}': only this project's modes have a scope to choose; {rule.asked} counts as its framework"
            " does"
        )
    return dataclasses.replace(rule, preset=in_scope(rule.preset, scope))


def _with_number(name: str) -> Rule:
    framework, _, text = name.partition(":")
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is not None and framework == "open-instruct" and number > 0:
        preset = dataclasses.replace(PRESETS["open-instruct:constant"], name=name, divisor=number)
    elif number is not None and framework == "delta-l" and 0 <= number <= 1:
        preset = dataclasses.replace(PRESETS["delta-l"], name=name, alpha=number)
    else:
        raise SettingError(f"unknown loss aggregation '{name}'{_suggestion(name)}")
    return Rule(name, preset, _unverified(preset))


def _suggestion(name: str) -> str:
    """The nearest name, or the names of the framework that was meant, or where to find them all."""
    framework = name.partition(":")[0]
    siblings = [known for known in PRESETS if known.partition(":")[0] == framework]
    if siblings:
        return f"; {framework} has {', '.join(siblings)}"
    close = nearest(name, [*MODES, *PRESETS, *ALIASES])
    return (
        close if close.startswith("; did") else f"; known: {', '.join(MODES)}, or a framework's own (`aggcli modes` lists them)"
    )


def _unverified(preset: Preset) -> str:
    return f"{preset.name}: unverified: {preset.unverified}" if preset.unverified else ""
