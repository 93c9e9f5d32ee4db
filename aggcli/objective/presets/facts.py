"""What a rule divides by, as facts: the vocabulary in which every framework's aggregation is written down.

A rule is a product of denominators. Each says what it counts, in which scope (the optimizer step, the rank or the
micro-batch), how fully masked rows count, and how it is kept from 0. What is left is how the pieces are put together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Scope = Literal["step", "rank", "micro-batch"]
SCOPES: tuple[Scope, ...] = ("step", "rank", "micro-batch")
Counted = Literal[
    "tokens of the sample",
    "tokens of the rollout",
    "tokens of the prompt",
    "tokens",
    "samples",
    "rollouts",
    "prompts",
    "divisor",
    "padded width",
    "length power",
    "sum of inverse length powers",
    "mean of inverse length powers",
    "tokens of the prompt and sign",
    "prompt's samples per sample of the sign",
]
"""What a denominator counts. Tokens are masked-in tokens; the padded width is the longest response, masked tokens included;
the length power is n_i ** alpha; the sign is that of the sample's advantage."""

Evidence = Literal["executed", "code", "derived", "paper", "second-hand", "own"]
EVIDENCE: dict[Evidence, str] = {
    "executed": "values of the framework's own code, run",
    "code": "read in the framework's code",
    "derived": "algebra from the framework's code, not run",
    "paper": "the paper's text",
    "second-hand": "a summary only; unverified",
    "own": "this project",
}


@dataclass(frozen=True)
class Denominator:
    """One count that a rule divides by.

    `masked`: whether fully masked rows (rollouts, prompts) are counted; for tokens, whether each adds a phantom token.
    The count used is `max(count, floor) + epsilon`; where that is 0, `empty` says whether the piece is dropped or is 0/0.
    """

    counted: Counted
    scope: Scope = "step"
    masked: Literal["counted", "left out", "one token each"] = "counted"
    epsilon: float = 0.0
    floor: float = 0.0
    empty: Literal["zero", "nan"] = "zero"

    @property
    def is_local(self) -> bool:
        """Counted in less than the optimizer step, so that it depends on how the step is cut."""
        return self.scope != "step" and self.counted not in ("tokens of the sample", "divisor", "length power")

    @property
    def words(self) -> str:
        """`the samples that are not fully masked`."""
        names = {"tokens": "the trained tokens", "divisor": "a constant", "padded width": "the padded response width"}
        text = names.get(self.counted, f"the {self.counted}")
        if self.masked == "left out":
            text += " that are not fully masked"
        if self.masked == "one token each":
            text += " and a phantom token for each fully masked sample"
        return text


@dataclass(frozen=True)
class Preset:
    """One rule as shipped: a weight per token, given the batch and its layout.

    `divides_by`: the product of counts under every token. `micro_batches`: how a rank puts its micro-batches together
    (`share of samples`: each weighted by its share of the rank's samples; `mean of the step`: over all ranks' micro-batches);
    `ranks`: `sum` where the framework cancels the average that data parallelism takes, `mean` where it stays.
    `layouts`: those it can run under at all. `context_parallel`: what is known about it there.
    """

    name: str
    option: str
    version: str
    evidence: Evidence
    formula: str
    divides_by: tuple[Denominator, ...]
    micro_batches: Literal["sum", "mean", "share of samples", "mean of the step"] = "sum"
    ranks: Literal["sum", "mean"] = "sum"
    divides_by_accumulation_again: bool = False
    numerator: Literal["masked", "unmasked"] = "masked"
    drops_smaller_micro_batches: bool = False
    drops_zero_advantages: bool = False
    layouts: Literal["any", "equal ranks", "equal micro-batches"] = "any"
    divisor_is: str = ""
    divisor: float | None = None
    alpha: float | None = None
    context_parallel: Literal["exact", "unverified", "not applicable"] = "exact"
    mode: str = ""
    """The mode of this project that it equals under a layout where it is exact, or comes closest to; blank: none."""
    is_default: bool = False
    traps: tuple[str, ...] = ()
    unverified: str = ""
    """What about this preset nobody has checked; said wherever its numbers are shown."""

    @property
    def framework(self) -> str:
        return self.name.partition(":")[0]

    @property
    def needs_divisor(self) -> bool:
        return self.divisor is None and any(d.counted == "divisor" for d in self.divides_by)

    @property
    def needs_groups(self) -> bool:
        return any("prompt" in d.counted for d in self.divides_by)

    @property
    def needs_advantages(self) -> bool:
        return any("sign" in d.counted for d in self.divides_by)

    @property
    def local_counts(self) -> tuple[Denominator, ...]:
        """The denominators that are counted in less than the optimizer step."""
        return tuple(d for d in self.divides_by if d.is_local)

    @property
    def depends_on_layout(self) -> bool:
        """Whether some layout can change a weight; false for rules whose every count is the optimizer step's."""
        exact = self.micro_batches == "sum" and self.layouts == "any" and not self.divides_by_accumulation_again
        return not exact or bool(self.local_counts)

    @property
    def arithmetic(self) -> tuple[object, ...]:
        """Everything about the preset that enters a number; presets with equal arithmetic are one rule under many names."""
        names = (
            "divides_by",
            "micro_batches",
            "ranks",
            "divides_by_accumulation_again",
            "numerator",
            "drops_smaller_micro_batches",
            "drops_zero_advantages",
            "divisor",
            "alpha",
        )
        return tuple(getattr(self, name) for name in names)


def in_scope(preset: Preset, scope: Scope) -> Preset:
    """The same rule with every denominator counted in `scope`, averaged over micro-batches and ranks from there up."""
    if scope == "step":
        return preset
    return dataclasses.replace(
        preset,
        name=f"{preset.name}@{scope}",
        divides_by=tuple(dataclasses.replace(d, scope=scope) for d in preset.divides_by),
        micro_batches="mean" if scope == "micro-batch" else "sum",
        ranks="mean",
    )


def why_it_varies(preset: Preset) -> str:
    """In words: which denominator is counted where, so that the loss depends on the layout; blank for an exact rule."""
    reasons = []
    for scope in ("micro-batch", "rank"):
        counts = [d for d in preset.local_counts if d.scope == scope]
        if counts:
            verb = "is" if len(counts) == 1 and "width" in counts[0].counted else "are"
            reasons.append(
                f"{' and '.join(d.words for d in counts)} {verb} counted in each {scope}{_put_together(preset, scope)}"
            )
    if not preset.local_counts and preset.micro_batches in ("mean", "share of samples"):
        reasons.append(
            "nothing is counted in a micro-batch, yet micro-batches are averaged: the weight of a token is proportional to"
            " the micro-batch's share of the rank's samples"
        )
    if preset.divides_by_accumulation_again:
        reasons.append("a loss that is already normalised over the step is divided by the number of accumulation steps again")
    if preset.drops_smaller_micro_batches:
        reasons.append("samples past the last full micro-batch get no weight")
    return "; ".join(reasons)


def _put_together(preset: Preset, scope: str) -> str:
    how = {
        "mean": ", and micro-batches are averaged",
        "share of samples": ", and micro-batches are averaged by their share of the rank's samples",
        "mean of the step": ", and all micro-batches of the step are averaged",
    }
    text = how.get(preset.micro_batches, "") if scope == "micro-batch" else ""
    return text + (", then ranks are averaged" if preset.ranks == "mean" else "")
