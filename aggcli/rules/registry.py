"""Every rule by name: this project's modes, the frameworks' rules, and the aliases that people use for them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from aggcli.errors import SettingError, nearest
from aggcli.rules.modes import MODES
from aggcli.rules.more import MORE
from aggcli.rules.openrlhf_nemo_skyrl import OPENRLHF_NEMO_SKYRL
from aggcli.rules.others import OTHERS
from aggcli.rules.rule import SCOPES, Counted, Rule, Scope
from aggcli.rules.slime_verl import SLIME_VERL
from aggcli.rules.trl_swift import TRL_SWIFT

ELSEWHERE: tuple[Rule, ...] = (*SLIME_VERL, *TRL_SWIFT, *OPENRLHF_NEMO_SKYRL, *OTHERS, *MORE)
"""Frameworks' and papers' rules."""
RULES: dict[str, Rule] = {rule.name: rule for rule in (*MODES, *ELSEWHERE)}
"""Every rule by its name, this project's modes first."""

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


def find_rule(name: str) -> Rule:
    """The rule called `name`: a mode, `framework:mode`, or an alias; `open-instruct:1000` and `delta-l:0.5` carry a number.

    `token_mean@micro-batch` is a mode whose denominators are counted in that scope (see `Rule.in_scope`).
    Raises `SettingError` for a name that nobody uses.
    """
    bare, _, asked = name.rpartition("@")
    scopes: dict[str, Scope] = {scope: scope for scope in SCOPES}
    if bare and asked in scopes:
        return find_rule(bare).in_scope(scopes[asked])
    if name in RULES:
        return RULES[name]
    if name in ALIASES:
        return find_rule(ALIASES[name][0])
    return _with_number(name)


def recorded_rule(name: str) -> Rule | None:
    """The rule that a record names; None for a custom reducer, or a name that nobody uses here."""
    try:
        return find_rule(name)
    except SettingError:
        return None


def remark_on(name: str) -> str:
    """What to say to somebody who asks for a rule by this name: what an alias stands for, what is unverified; or nothing."""
    bare = name.rpartition("@")[0] or name
    rule = find_rule(name)
    found = []
    if bare in ALIASES:
        target, note = ALIASES[bare]
        found.append(f"{bare} is taken as {target}: {note}")
    if rule.unverified:
        found.append(f"{rule.name}: unverified: {rule.unverified}")
    if rule.numerator == "unmasked":
        found.append(f"{rule.name}: masked tokens have weight: right only if their loss is 0")
    return "; ".join(found)


def settled(
    rule: Rule, *, prompt_mean_scale: str = "rollouts", normalizer: Scope = "step", divisor: float | None = None
) -> Rule:
    """The rule as the settings have it: strict over prompts, counted in less than the step, with its constant.

    What a rule has of its own (a scope in its name, a framework's own constant) stays. Raises `SettingError`.
    """
    if prompt_mean_scale not in ("rollouts", "prompts"):
        raise SettingError(f"prompt_mean_scale {prompt_mean_scale!r}: must be 'rollouts' or 'prompts'")
    if prompt_mean_scale == "prompts" and "prompt_mean_scale" in rule.settings:
        outer: dict[Counted, Counted] = {"rollouts": "prompts"}
        counts = tuple(dataclasses.replace(d, counted=outer.get(d.counted, d.counted)) for d in rule.divides_by)
        rule = dataclasses.replace(rule, divides_by=counts)
    if rule.is_mode and normalizer != "step" and "@" not in rule.name:
        rule = rule.in_scope(normalizer)
    return rule.with_divisor(divisor)


def names_of(rules: Sequence[Rule]) -> tuple[str, ...]:
    """What the rules are called, in order."""
    return tuple(rule.name for rule in rules)


def _with_number(name: str) -> Rule:
    framework, _, text = name.partition(":")
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is not None and framework == "open-instruct" and number > 0:
        return dataclasses.replace(RULES["open-instruct:constant"], name=name, divisor=number)
    if number is not None and framework == "delta-l" and 0 <= number <= 1:
        return dataclasses.replace(RULES["delta-l"], name=name, alpha=number)
    raise SettingError(f"unknown loss aggregation '{name}'{_suggestion(name)}")


def _suggestion(name: str) -> str:
    """The framework's own names where it is known, the nearest name of the same kind, or where to find them all."""
    framework, colon, own = name.partition(":")
    siblings = [rule.name for rule in ELSEWHERE if rule.framework == framework]
    if siblings:
        return f"; {framework} has {', '.join(siblings)}"
    known = f"; known: {', '.join(names_of(MODES))}, or a framework's own (`aggcli modes` lists them)"
    if colon:  # a near name of another framework would be another rule
        frameworks = list(dict.fromkeys(rule.framework for rule in ELSEWHERE if ":" in rule.name))
        close = [f"{near}:{own}" for near in difflib.get_close_matches(framework, frameworks, n=1, cutoff=0.8)]
        if close and close[0] in RULES:
            return f"; did you mean '{close[0]}'?"
        return f"; no rule of {framework} is known here; known frameworks: {', '.join(frameworks)}"
    close = nearest(name, [*RULES, *ALIASES])
    return close if close.startswith("; did") else known
