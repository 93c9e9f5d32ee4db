"""The rules as a reference: what each framework calls a mode, how close it comes, and the way back to a mode here."""

from __future__ import annotations

from aggcli.errors import SettingError, nearest
from aggcli.rules.registry import ALIASES, ELSEWHERE, RULES
from aggcli.rules.rule import Rule

PAPERS = ("delta-l", "balanced", "proposal")
"""What is no framework but a paper's variant, or a proposal."""
FRAMEWORKS = tuple(dict.fromkeys(rule.framework for rule in ELSEWHERE if rule.framework not in PAPERS))


def rules_of(framework: str) -> list[Rule]:
    """All rules of a framework. Raises `SettingError` for one that none is known of, with the nearest name."""
    found = [rule for rule in ELSEWHERE if rule.framework == framework]
    if not found:
        raise SettingError(f"--framework {framework}: no rule of it is known here{nearest(framework, FRAMEWORKS)}")
    return found


def elsewhere(mode: Rule) -> dict[str, list[Rule]]:
    """Each framework's rules that are the mode or come closest to it; an empty list where it has none."""
    near = [rule for rule in ELSEWHERE if rule.mode == mode.name]
    return {framework: [rule for rule in near if rule.framework == framework] for framework in FRAMEWORKS}


def aliases_of(rule: Rule) -> list[str]:
    """The other names under which the rule is accepted."""
    return [alias for alias, (target, _) in ALIASES.items() if target == rule.name]


def differences(rule: Rule) -> list[str]:
    """In words, where a rule's numbers differ from the mode of this project that it comes closest to; none: equal.

    What only keeps a count from 0 (an epsilon, a floor) is left out where it does not change a finite number by more than 1e-8.
    """
    if not rule.mode:
        return ["no mode here equals it"]
    near = RULES[rule.mode]
    ours = {d.counted for d in near.divides_by}
    theirs = {d.counted for d in rule.divides_by}
    found = []
    if "samples" in theirs and "rollouts" in ours:
        found.append("counts samples, not rollouts: a rollout of several training samples counts several times")
    if "rollouts" in ours and not theirs & {"samples", "rollouts"} and "divisor" in ours:
        found.append("no mean over rollouts")
    if "divisor" in ours and "divisor" not in theirs:
        found.append("divides by the padded width by default" if "padded width" in theirs else "L is 1")
    if "prompts" in theirs and "prompts" not in ours:
        found.append("strict mean over prompts: --prompt-mean-scale prompts")
    for count in rule.divides_by:
        if count.masked == "left out":
            found.append("fully masked rows are not counted")
        if count.masked == "one token each":
            found.append("each fully masked sample adds a phantom token")
        if count.empty == "nan" and (count.is_local or count.counted == "tokens of the sample"):
            found.append("a fully masked piece is 0/0")
    if any("power" in name for name in theirs):
        found.append("weights a sample by a power of its length")
    if any("sign" in name for name in theirs):
        found.append("positive and negative samples are averaged apart")
    if rule.numerator == "unmasked":
        found.append("the mask is not applied to the numerator")
    if rule.drops_zero_advantages:
        found.append("tokens of zero advantage are not counted")
    if varies(rule):
        found.append(f"varies with the layout: {rule.why_it_varies()}")
    elif rule.layouts != "any":
        found.append(f"exact for {rule.layouts} only, the only ones its framework makes")
    return list(dict.fromkeys(found))


def varies(rule: Rule) -> bool:
    """Whether some layout that the framework can deal changes a weight."""
    return bool(rule.why_it_varies()) and not _exact_when_equal(rule)


def _exact_when_equal(rule: Rule) -> bool:
    """Counts only samples locally, all of them, and deals equal micro-batches: then a mean of means is the mean."""
    plain = all(d.counted == "samples" and d.masked == "counted" for d in rule.local_counts)
    counted = bool(rule.local_counts)
    return rule.layouts == "equal micro-batches" and plain and counted and not rule.divides_by_accumulation_again


def how_to_get(rule: Rule) -> list[str]:
    """The flags of this project that give a rule's numbers: the mode where it is equal or closest, and the rule itself."""
    flags = [f"--loss-aggregation {rule.name}"]
    if rule.mode:
        near = RULES[rule.mode]
        strict = " --prompt-mean-scale prompts" if "prompt_mean_scale" in near.settings else ""
        flags.insert(0, near.option + strict + (f" {near.divisor_is}" if near.takes_divisor else ""))
    return flags
