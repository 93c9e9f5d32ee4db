"""The type of every aggregation rule: what a token is divided by, as facts, and what people should know about it.

A rule is a product of denominators. Each says what it counts, in which scope (the optimizer step, the rank or the
micro-batch), how fully masked rows count, and how it is kept from 0. What is left is how the pieces are put together.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from aggcli.errors import SettingError

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
    "samples of the rollout",
    "mean tokens of a sample",
    "mean of inverse samples of the rollout",
]
"""What a denominator counts. Tokens are trained tokens; the padded width is the longest response, masked tokens included; the
length power is n_i ** alpha; the sign is that of the sample's advantage; means are over samples."""

RULE_SETTINGS = ("loss_aggregation_divisor", "prompt_mean_scale")
"""Settings that only some rules read."""
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
class Rule:
    """One way to aggregate the per-token policy loss: a weight per token, given the batch and its layout.

    `divides_by`: the product of counts under every token. `micro_batches`: how a rank puts its micro-batches together
    (`share of samples`: each weighted by its share of the rank's samples; `share of tokens`: by its share of the step's trained
    tokens; `mean of the step`: over all ranks' micro-batches);
    `ranks`: `sum` where the framework cancels the average that data parallelism takes, `mean` where it stays.
    `layouts`: those it can run under at all. `context_parallel`: what is known about it there.
    """

    name: str
    """What it is called here, in settings, records and tables; a scope narrower than the step is part of it."""
    option: str
    version: str
    evidence: Evidence
    formula: str
    divides_by: tuple[Denominator, ...]
    micro_batches: Literal["sum", "mean", "share of samples", "share of tokens", "mean of the step"] = "sum"
    ranks: Literal["sum", "mean"] = "sum"
    put_together_is: Literal["known", "assumed"] = "known"
    """Whether anybody has checked the two lines above in the framework; `unverified` says what was not."""
    divides_by_accumulation_again: bool = False
    numerator: Literal["masked", "unmasked"] = "masked"
    drops_smaller_micro_batches: bool = False
    drops_zero_advantages: bool = False
    layouts: Literal["any", "equal ranks", "equal micro-batches"] = "any"
    own_loss: bool = False
    """Whether its per-token loss is another than the clipped surrogate, so that it is known here by its weights only."""
    divisor_is: str = ""
    """What the constant is called where it can be set; blank where there is none to set."""
    divisor: float | None = None
    """The constant in force, in tokens."""
    alpha: float | None = None
    context_parallel: Literal["exact", "unverified", "not applicable"] = "exact"
    metrics: Literal["the sample mean", "its own weights"] = "the sample mean"
    """What pg_clipfrac, ppo_kl and the KL and entropy of this project's modes are weighted by, unless they are to match."""
    kl_term: Rule | Literal["its own weights", "the metrics' weights"] = "its own weights"
    """What the KL term of the loss, and kl_loss, are weighted by."""
    entropy_term: Rule | Literal["its own weights", "the metrics' weights"] = "its own weights"
    """What the entropy term of the loss, and entropy_loss, are weighted by."""
    terms_evidence: Evidence | Literal["unverified"] = "unverified"
    """How the two lines above are known."""
    mode: str = ""
    """The mode of this project that it equals under a layout where it is exact, or comes closest to; blank: none."""
    is_default: bool = False
    traps: tuple[str, ...] = ()
    unverified: str = ""
    """What about this rule nobody has checked; said wherever its numbers are shown."""
    weight: str = ""
    """The weight of a trained token in the notation of `NOTATION`."""
    meaning: str = ""
    papers: str = ""
    flags: str = ""
    """How to ask for it on this command line, where that is more than its name."""
    needs: str = ""
    settings: tuple[str, ...] = ()
    """Those of `RULE_SETTINGS`, besides the divisor, that change its weights."""

    @property
    def framework(self) -> str:
        return self.name.partition(":")[0]

    @property
    def is_mode(self) -> bool:
        """Whether it is one of this project's own modes, in whatever scope, and not somebody else's rule."""
        return self.evidence == "own"

    @property
    def needs_divisor(self) -> bool:
        """Whether it has no weights before it is given a constant."""
        return self.divisor is None and any(d.counted == "divisor" for d in self.divides_by)

    @property
    def takes_divisor(self) -> bool:
        """Whether a constant can be given to it: it needs one, or would divide by the padded width without."""
        return bool(self.divisor_is) or self.needs_divisor

    @property
    def needs_groups(self) -> bool:
        """Whether every sample must have a prompt group, and every group lie within one optimizer step."""
        return any("prompt" in d.counted for d in self.divides_by)

    def reads(self, setting: str) -> bool:
        """Whether a setting that only some rules read changes a weight of this one."""
        if setting == "loss_aggregation_divisor":
            return self.takes_divisor
        return setting in self.settings or setting not in RULE_SETTINGS

    @property
    def local_counts(self) -> tuple[Denominator, ...]:
        """The denominators that are counted in less than the optimizer step."""
        return tuple(d for d in self.divides_by if d.is_local)

    @property
    def depends_on_layout(self) -> bool:
        """Whether some layout can change a weight; false for rules whose every count is the optimizer step's."""
        exact = self.micro_batches == "sum" and self.layouts == "any" and not self.divides_by_accumulation_again
        return not exact or bool(self.local_counts)

    def in_scope(self, scope: Scope) -> Rule:
        """The mode with every denominator counted in `scope`, averaged over micro-batches and ranks from there up. Its metrics
        are sample means, so that they do not move with the layout as its loss does.

        Raises `SettingError` for a framework's rule, which counts as its framework does.
        """
        if not self.is_mode:
            raise SettingError(
                f"'{self.name}@{scope}': only this project's modes have a scope to choose; {self.name} counts as its framework"
                " does"
            )
        if scope == "step":
            return self
        return dataclasses.replace(
            self,
            name=f"{self.name}@{scope}",
            divides_by=tuple(dataclasses.replace(d, scope=scope) for d in self.divides_by),
            micro_batches="mean" if scope == "micro-batch" else "sum",
            ranks="mean",
            metrics="the sample mean",
        )

    def with_divisor(self, divisor: float | None) -> Rule:
        """The rule with this constant, in tokens, where it takes one and has none; None leaves it as it is.

        Raises `SettingError` for a constant that is no positive finite number.
        """
        check_divisor(divisor)
        if divisor is None or self.divisor is not None or not self.takes_divisor:
            return self
        return dataclasses.replace(self, divisor=divisor)

    def why_it_varies(self) -> str:
        """In words: which denominator is counted where, so that the loss depends on the layout; blank for an exact rule."""
        reasons = []
        for scope in ("micro-batch", "rank"):
            counts = [d for d in self.local_counts if d.scope == scope]
            if counts:
                verb = "is" if len(counts) == 1 and "width" in counts[0].counted else "are"
                reasons.append(
                    f"{' and '.join(d.words for d in counts)} {verb} counted in each {scope}{self._put_together(scope)}"
                )
        if not self.local_counts and self.micro_batches in ("mean", "share of samples"):
            reasons.append(
                "nothing is counted in a micro-batch, yet micro-batches are averaged: the weight of a token is proportional to"
                " the micro-batch's share of the rank's samples"
            )
        if self.divides_by_accumulation_again:
            reasons.append(
                "a loss that is already normalised over the step is divided by the number of accumulation steps again"
            )
        if self.drops_smaller_micro_batches:
            reasons.append("samples past the last full micro-batch get no weight")
        return "; ".join(reasons)

    def why_it_depends(self) -> str:
        """In words: why some layout, dealt by its framework or not, can change a weight of a rule that depends on it."""
        return self.why_it_varies() or "it is exact for equal micro-batches and ranks only"

    def _put_together(self, scope: str) -> str:
        if self.put_together_is == "assumed" and self.micro_batches == "mean" and scope == "micro-batch":
            return ", and micro-batches" + (", then ranks," if self.ranks == "mean" else "") + " are taken here to be averaged"
        how = {
            "mean": ", and micro-batches are averaged",
            "share of samples": ", and micro-batches are averaged by their share of the rank's samples",
            "share of tokens": ", and micro-batches are averaged by their share of the step's trained tokens",
            "mean of the step": ", and all micro-batches of the step are averaged",
        }
        text = how.get(self.micro_batches, "") if scope == "micro-batch" else ""
        return text + (", then ranks are averaged" if self.ranks == "mean" else "")


def check_divisor(divisor: float | None, named: str = "--loss-aggregation-divisor") -> None:
    """Refuse a divisor that is zero, negative, NaN or infinite; None is judged by whoever needs one. Raises `SettingError`."""
    if divisor is not None and not (math.isfinite(divisor) and divisor > 1e-300):
        raise SettingError(f"{named} {divisor:g}: must be a positive finite number of tokens, such as the response limit")
