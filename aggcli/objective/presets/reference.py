"""The presets as a reference: what each framework calls a mode, how close it comes, and the way back to a mode here."""

from __future__ import annotations

from aggcli.config import MODES
from aggcli.objective.presets.facts import Preset, why_it_varies
from aggcli.objective.presets.own import own_preset
from aggcli.objective.presets.registry import ALIASES, PRESETS

PAPERS = ("delta-l", "balanced")
"""What is no framework but a paper's variant."""
FRAMEWORKS = tuple(dict.fromkeys(p.framework for p in PRESETS.values() if p.framework not in PAPERS))


def presets_of(mode: str) -> dict[str, list[Preset]]:
    """Each framework's presets that are the mode or come closest to it; an empty list where it has none."""
    return {framework: [p for p in PRESETS.values() if p.framework == framework and p.mode == mode] for framework in FRAMEWORKS}


def aliases_of(mode: str) -> list[str]:
    """The other names under which the mode is accepted."""
    return [alias for alias, (target, _) in ALIASES.items() if target == mode]


def differences(preset: Preset) -> list[str]:
    """In words, where a preset's numbers differ from the mode of this project that it comes closest to; none: equal.

    What only keeps a count from 0 (an epsilon, a floor) is left out where it does not change a finite number by more than 1e-8.
    """
    if preset.mode not in MODES:
        return ["no mode here equals it"]
    ours = {d.counted for d in own_preset(preset.mode).divides_by}
    theirs = {d.counted for d in preset.divides_by}
    found = []
    if "samples" in theirs and "rollouts" in ours:
        found.append("counts samples, not rollouts: a rollout of several training samples counts several times")
    if "rollouts" in ours and not theirs & {"samples", "rollouts"} and preset.mode == "constant":
        found.append("no mean over rollouts")
    if "divisor" in ours and "divisor" not in theirs:
        found.append("divides by the padded width, unless told otherwise" if "padded width" in theirs else "L is 1")
    if "prompts" in theirs and "prompts" not in ours:
        found.append("strict mean over prompts: --prompt-mean-scale prompts")
    for count in preset.divides_by:
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
    if preset.numerator == "unmasked":
        found.append("the mask is not applied to the numerator")
    if preset.drops_zero_advantages:
        found.append("tokens of zero advantage are not counted")
    if varies(preset):
        found.append(f"varies with the layout: {why_it_varies(preset)}")
    elif preset.layouts != "any":
        found.append(f"exact for {preset.layouts} only, which is all it deals")
    return list(dict.fromkeys(found))


def varies(preset: Preset) -> bool:
    """Whether some layout that the framework can deal changes a weight."""
    return bool(why_it_varies(preset)) and not _exact_when_equal(preset)


def _exact_when_equal(preset: Preset) -> bool:
    """Counts only samples locally, all of them, and deals equal micro-batches: then a mean of means is the mean."""
    plain = all(d.counted == "samples" and d.masked == "counted" for d in preset.local_counts)
    counted = bool(preset.local_counts)
    return preset.layouts == "equal micro-batches" and plain and counted and not preset.divides_by_accumulation_again


def how_to_get(preset: Preset) -> list[str]:
    """The flags of this project that give a preset's numbers: the mode where it is equal or closest, and the preset itself."""
    flags = [f"--loss-aggregation {preset.name}"]
    if preset.mode in MODES:
        scale = " --prompt-mean-scale prompts" if preset.mode == "prompt_mean" else ""
        divisor = " --loss-aggregation-divisor L" if preset.mode == "constant" else ""
        flags.insert(0, f"--loss-aggregation {preset.mode}{scale}{divisor}")
    return flags
