"""Every number that is ever reported: one name, one unit, one "over what", and how it crosses ranks.

A name outside the catalogue is refused when it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["weighted", "mean", "effective", "count", "max", "norm", "global"]
"""How a number crosses ranks, and what a single rank's value is:

weighted: sum over tokens of weight times value; a rank's value is its share, and shares sum to the reduced value.
mean: (sum, count), divided once at the end; a rank's value is its own mean, blank where it counted nothing.
effective: (sum)^2 / (sum of squares), divided once at the end; a rank's value is that of its own terms.
count: a sum; a rank's value is its own count.
max: a maximum.
norm: square root of a sum of squares; a rank's value is its own norm.
global: computed from the global view, the same on every rank; no rank has a value of its own.
"""


@dataclass(frozen=True)
class Metric:
    """A reported number. `better`: which direction is good news, where there is one."""

    name: str
    unit: str
    over: str
    reduction: Reduction
    about: str
    better: Literal["higher", "lower"] | None = None


_OF_GRADIENT = "the mode's sum of |w_t * c_t|, c_t = d pg_loss_t / d log-probability"
_LENGTH_BINS = {"p25": "0 to 25 %", "p50": "25 to 50 %", "p75": "50 to 75 %", "p100": "75 to 100 %"}

METRICS = {
    metric.name: metric
    for metric in (
        Metric("loss", "", "the step", "weighted", "pg_loss + kl_coef * kl_loss - entropy_coef * entropy_loss"),
        Metric(
            "pg_loss",
            "",
            "trained tokens, by the mode's weights",
            "weighted",
            "policy-gradient loss, clipped (ppo) or as --policy-loss says",
        ),
        Metric(
            "pg_clipfrac",
            "share",
            "trained tokens, by the metric weights",
            "weighted",
            "tokens whose clip binds: -clip(r)*A > -r*A; of cispo those whose ratio is cut, of dppo those that are masked",
        ),
        Metric(
            "pg_clipfrac_dual",
            "share",
            "trained tokens, by the metric weights",
            "weighted",
            "tokens whose dual clip binds",
        ),
        Metric(
            "ppo_kl",
            "nats",
            "trained tokens, by the metric weights",
            "weighted",
            "old - new log-probability (the k1 estimate of KL(old || new)); may be negative",
        ),
        Metric(
            "kl_loss",
            "nats",
            "trained tokens, by the metric weights",
            "weighted",
            "KL to the reference, by the estimator in force (k1 may be negative)",
        ),
        Metric("entropy_loss", "nats", "trained tokens, by the metric weights", "weighted", "entropy of the policy"),
        Metric(
            "ratio_deviation",
            "",
            "trained tokens, by the metric weights",
            "weighted",
            "|exp(new - old) - 1|; 0 when exactly on-policy",
        ),
        Metric(
            "sampler_mismatch",
            "nats",
            "trained tokens, by the metric weights",
            "weighted",
            "|trainer's - inference engine's log-probability|",
        ),
        Metric(
            "sampler_mismatch/sequence_sum",
            "nats",
            "training samples with a trained token",
            "mean",
            "|sum over a sample's trained tokens of trainer's - inference engine's log-probability|",
        ),
        Metric(
            "sampler_mismatch/sequence_mean",
            "nats",
            "training samples with a trained token",
            "mean",
            "|mean over a sample's trained tokens of trainer's - inference engine's log-probability|",
        ),
        Metric(
            "sequence_ratio/log_sum",
            "nats",
            "training samples with a trained token",
            "mean",
            "sum over a sample's trained tokens of new - old log-probability: the log of the whole response's ratio",
        ),
        Metric(
            "sequence_ratio/log_mean",
            "nats",
            "training samples with a trained token",
            "mean",
            "mean over a sample's trained tokens of new - old log-probability: the log of GSPO's ratio",
        ),
        Metric(
            "sequence_ratio/clipfrac",
            "share",
            "training samples with a trained token",
            "mean",
            "samples at which the clip binds on GSPO's ratio s: -clip(s)*A > -s*A; of one whose tokens differ in advantage, the"
            " share of its trained tokens",
        ),
        Metric(
            "importance_ess/tokens",
            "tokens",
            "trained tokens",
            "effective",
            "effective sample size of the ratios: (sum r_t)^2 / sum r_t^2; all trained tokens when exactly on-policy",
        ),
        Metric(
            "importance_ess/samples",
            "training samples",
            "training samples with a trained token",
            "effective",
            "effective sample size of whole responses: (sum R)^2 / sum R^2, R the product of a sample's ratios",
        ),
        Metric("ratio_max", "", "trained tokens", "max", "largest importance ratio exp(new - old)"),
        Metric(
            "grad_norm",
            "",
            "the policy's parameters",
            "global",
            "training: 2-norm of the loss's gradient by the parameters, before clipping",
        ),
        Metric(
            "grad_norm_log_probs",
            "",
            "trained tokens",
            "norm",
            "replay: 2-norm of the loss's gradient by the tokens' log-probabilities",
        ),
        Metric("total_weight", "", "trained tokens", "weighted", "sum of the mode's weights"),
        Metric("samples", "training samples", "the step", "count", "training samples, siblings of a fan-out apart"),
        Metric("rollouts", "rollouts", "the step", "global", "N: distinct rollouts, fully masked ones included"),
        Metric("prompts", "prompt groups", "the step", "global", "prompt groups with a group_index"),
        Metric("tokens", "tokens", "the step", "count", "response tokens that are trained: where loss_mask is 1"),
        Metric("response_tokens", "tokens", "the step", "count", "response tokens, masked ones included"),
        Metric("fully_masked_samples", "training samples", "the step", "count", "samples without a trained token"),
        Metric("micro_batches", "micro-batches", "the step", "count", "micro-batches of the layout"),
        Metric("unscored_samples", "training samples", "the step", "count", "samples whose reward is null or NaN"),
        Metric("raw_reward", "reward", "scored rollouts", "mean", "raw reward, each rollout once", "higher"),
        Metric("response_length", "tokens", "training samples", "mean", "response length, masked tokens included"),
        Metric(
            "truncated",
            "share",
            "training samples whose source says how they ended",
            "mean",
            "responses that were cut at the response limit, without an end token",
        ),
        Metric(
            "correct/count",
            "training samples",
            "the step",
            "count",
            "samples whose raw reward reaches --correct-threshold",
            "higher",
        ),
        Metric("correct/response_length", "tokens", "correct samples", "mean", "response length of correct samples"),
        Metric(
            "correct/entropy",
            "nats",
            "correct samples with a trained token",
            "mean",
            "mean entropy of a sample's trained tokens",
        ),
        Metric(
            "incorrect/count",
            "training samples",
            "the step",
            "count",
            "scored samples below --correct-threshold",
            "lower",
        ),
        Metric("incorrect/response_length", "tokens", "incorrect samples", "mean", "response length of incorrect samples"),
        *(
            Metric(
                f"correct_length/{bin_}",
                "share",
                "correct samples",
                "mean",
                f"correct samples whose response length lies in {share} of the maximum response length",
            )
            for bin_, share in _LENGTH_BINS.items()
        ),
        Metric(
            "raw_reward_batch_std",
            "reward",
            "scored rollouts of the rollout batch",
            "global",
            "standard deviation (n-1) over the whole batch, not within groups",
        ),
        Metric("groups", "prompt groups", "the rollout batch", "global", "prompt groups with a scored rollout"),
        Metric(
            "zero_variance_groups",
            "prompt groups",
            "the rollout batch",
            "global",
            "groups in which every trained token's advantage is exactly 0 (without advantages: of equal rewards, or of one)",
        ),
        Metric(
            "all_right_groups",
            "prompt groups",
            "the rollout batch",
            "global",
            "groups in which every scored rollout is correct",
        ),
        Metric(
            "all_wrong_groups",
            "prompt groups",
            "the rollout batch",
            "global",
            "groups in which no scored rollout is correct",
        ),
        Metric(
            "all_wrong_groups_with_advantage",
            "prompt groups",
            "the rollout batch",
            "global",
            "groups in which no scored rollout is correct and advantages are not all 0: wrong answers differ in advantage",
        ),
        Metric("groups_generated", "prompt groups", "the rollout step", "global", "prompt groups sampled, refills included"),
        Metric("groups_kept", "prompt groups", "the rollout step", "global", "prompt groups trained on"),
        Metric(
            "checker_errors",
            "rollouts",
            "the rollout step",
            "global",
            "sampled responses on which the task's checker raised an exception: each has a reward of 0",
        ),
        Metric(
            "effective_tokens",
            "tokens",
            "trained tokens",
            "global",
            "(sum w)^2 / sum w^2: how many equally weighted tokens would count as much",
        ),
        Metric(
            "gradient_ratio",
            "",
            "trained tokens",
            "global",
            "grad_norm_log_probs over the baseline mode's: the ratio of effective learning rates",
        ),
        Metric(
            "gradient_cosine",
            "",
            "trained tokens",
            "global",
            "cosine of the angle between this mode's gradient by the log-probabilities and the baseline's",
        ),
        *(
            Metric(
                f"weight_share/length_{bin_}",
                "share",
                "the mode's total weight",
                "global",
                f"weight on responses of {share} of the maximum response length",
            )
            for bin_, share in _LENGTH_BINS.items()
        ),
        Metric("weight_share/correct", "share", "the mode's total weight", "global", "weight on correct rollouts"),
        Metric("weight_share/incorrect", "share", "the mode's total weight", "global", "weight on incorrect rollouts"),
        Metric(
            "weight_share/positive_advantage",
            "share",
            "the mode's total weight",
            "global",
            "weight on tokens of positive advantage",
        ),
        Metric(
            "weight_share/negative_advantage",
            "share",
            "the mode's total weight",
            "global",
            "weight on tokens of negative advantage",
        ),
        Metric(
            "weight_share/zero_advantage",
            "share",
            "the mode's total weight",
            "global",
            "weight on tokens of advantage 0, which carry no signal",
        ),
        Metric(
            "weight_share/all_right_groups",
            "share",
            "the mode's total weight",
            "global",
            "weight on groups without a wrong rollout",
        ),
        Metric(
            "weight_share/all_wrong_groups",
            "share",
            "the mode's total weight",
            "global",
            "weight on groups without a right rollout",
        ),
        *(
            Metric(f"gradient_share/{part}", "share", _OF_GRADIENT, "global", f"of that sum, what is on {of}")
            for part, of in {
                **{f"length_{bin_}": f"responses of {of} of the maximum response length" for bin_, of in _LENGTH_BINS.items()},
                "correct": "correct rollouts",
                "incorrect": "incorrect rollouts",
                "positive_advantage": "tokens of positive advantage",
                "negative_advantage": "tokens of negative advantage",
                "all_right_groups": "groups without a wrong rollout",
                "all_wrong_groups": "groups without a right rollout",
                "clipped": "tokens whose clip binds (pg_clipfrac): 0 of ppo, gspo, gmpo and dppo, whose slope is 0 there",
            }.items()
        ),
    )
}

BESIDE = ("pg_clipfrac", "pg_clipfrac_dual", "ppo_kl", "kl_loss", "entropy_loss", "ratio_deviation", "sampler_mismatch")
"""Metrics of which the value over the trained rollouts alone stands beside the one that counts all."""
OVER_TRAINED = "/trained_rollouts"
METRICS |= {
    name + OVER_TRAINED: Metric(
        name + OVER_TRAINED,
        METRICS[name].unit,
        "trained rollouts",
        "global",
        f"{name}, as if the step held only the rollouts with a trained token; where a step has others and their number counts",
    )
    for name in BESIDE
}

LENGTH_BINS = tuple(_LENGTH_BINS)
"""Quarters of the maximum response length: a length d is in the first one with d <= quarter * maximum."""

_PASS = re.compile(r"pass@(\d+)(/groups_left_out)?")


def describe(name: str) -> Metric:
    """The catalogue entry of a metric; raises KeyError for a name that is not in it."""
    if name in METRICS:
        return METRICS[name]
    match = _PASS.fullmatch(name)
    if match is None:
        raise KeyError(f"'{name}' is not in the metric catalogue")
    k = match[1]
    if match[2]:
        return Metric(name, "prompt groups", "the rollout batch", "global", f"groups with fewer than {k} scored rollouts")
    about = f"unbiased chance that at least one of {k} rollouts is right (Chen et al., 2021)"
    return Metric(name, "share", f"prompt groups with at least {k} scored rollouts", "global", about, "higher")


def checked(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """`values` as they are to be written; raises KeyError for a name outside the catalogue. -0.0 becomes 0.0."""
    for name in values:
        describe(name)
    return {name: value + 0 if value is not None else None for name, value in values.items()}


def names(reductions: Iterable[Reduction]) -> list[str]:
    """Names of the catalogue with one of these reductions, in its order."""
    wanted = set(reductions)
    return [name for name, metric in METRICS.items() if metric.reduction in wanted]
