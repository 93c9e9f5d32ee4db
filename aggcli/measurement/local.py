"""What one rank computes from its local view: partial sums and maxima, nothing divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.layout.views import LocalView
from aggcli.measurement.catalogue import LENGTH_BINS
from aggcli.objective.policy_loss import kl_terms, policy_terms

Key = tuple[str, ...]
TOLERANCE = 1e-6
"""A rollout is correct when its raw reward is at least the threshold minus this."""


@dataclass(frozen=True)
class MeasureConfig:
    """What is measured, the same on every rank.

    `rules`: the aggregation rules compared; `metric_rule`: whose weights a rule's metrics use; `has_ratio`: ratios were
    measured; `max_response_length`: tokens, what correct_length/p25 ... are quarters of.
    """

    rules: tuple[str, ...]
    metric_rule: dict[str, str]
    objective: ObjectiveConfig
    has_ratio: bool
    correct_threshold: float
    max_response_length: int
    log_correct_samples: bool = False


@dataclass(frozen=True)
class Partials:
    """One rank's contribution. Every rank has the same keys, so sums and maxima cross as two vectors.

    `sums` keys: (metric, rule) for weighted numbers, (metric, "sum" or "count") for means, (metric,) for counts,
    ("gradient", rule, rule) for inner products of gradients. `maxima` keys: (metric,).
    `correct_lengths`: sorted response lengths of the rank's correct samples, None unless asked for.
    """

    sums: dict[Key, float]
    maxima: dict[Key, float]
    correct_lengths: list[int] | None = None


def measure(view: LocalView, config: MeasureConfig) -> Partials:
    """Everything a rank contributes to a step's numbers, from its own tokens and samples alone."""
    quantities, maxima, slopes = _token_quantities(view, config)
    sums = _weighted_sums(view, config, quantities)
    sums |= _gradient_products(view, config, slopes)
    sums |= _sample_sums(view, config)
    return Partials(sums, maxima, _correct_lengths(view, config))


def gradients(view: LocalView, config: MeasureConfig) -> dict[str, Tensor]:
    """d loss / d log_probs of each rule at the view's tokens, [T] each; empty where nothing gives an advantage."""
    _, _, slopes = _token_quantities(view, config)
    return {rule: _gradient(view, config, rule, slopes) for rule in config.rules} if "pg_loss" in slopes else {}


# -- tokens ---------------------------------------------------------------------------------------------------------


def _token_quantities(view: LocalView, config: MeasureConfig) -> tuple[dict[str, Tensor], dict[Key, float], dict[str, Tensor]]:
    """Per-token numbers by metric name [T], maxima, and the derivative of pg_loss and kl_loss by the log-probabilities [T]."""
    tokens, objective = view.tokens, config.objective
    mask_T = tokens["loss_mask"]
    new_T = tokens["log_probs"].detach().clone().requires_grad_()
    advantages_T = tokens.get("advantages")
    terms = policy_terms(
        new_T,
        tokens["old_log_probs"],
        torch.zeros_like(new_T) if advantages_T is None else advantages_T,
        mask_T,
        objective,
    )
    found: dict[str, Tensor] = {}
    maxima: dict[Key, float] = {}
    slopes: dict[str, Tensor] = {}
    if advantages_T is not None:
        found["pg_loss"] = terms.pg_loss_T
        slopes["pg_loss"] = _slope(terms.pg_loss_T, new_T)
    if config.has_ratio:
        found |= {"ppo_kl": terms.ppo_kl_T, "ratio_deviation": (terms.ratio_T - 1).abs()}
        if advantages_T is not None:
            found["pg_clipfrac"] = terms.clipped_T
            if terms.dual_clipped_T is not None:
                found["pg_clipfrac_dual"] = terms.dual_clipped_T
        maxima[("ratio_max",)] = _maximum(terms.ratio_T[mask_T])
    if "ref_log_probs" in tokens:
        ratio_T = terms.ratio_T if objective.kl_unbiased else None
        found["kl_loss"] = kl_terms(new_T, tokens["ref_log_probs"], mask_T, objective.kl_estimator, ratio_T)
        slopes["kl_loss"] = _slope(found["kl_loss"], new_T)
    if "entropy" in tokens:
        found["entropy_loss"] = torch.where(mask_T, tokens["entropy"], 0.0)
    if "trainer_log_probs" in tokens:
        gap_T = (tokens["trainer_log_probs"] - tokens["rollout_log_probs"]).abs()
        found["sampler_mismatch"] = torch.where(mask_T, gap_T, 0.0)
    return {name: value_T.detach() for name, value_T in found.items()}, maxima, slopes


def _slope(value_T: Tensor, by_T: Tensor) -> Tensor:
    """d value_t / d log_prob_t for every token; each token's value depends on its own log-probability only."""
    (slope_T,) = torch.autograd.grad(value_T.sum(), by_T, retain_graph=True)
    return slope_T


def _maximum(value: Tensor) -> float:
    return float(value.detach().max()) if value.numel() else float("-inf")


def _weighted_sums(view: LocalView, config: MeasureConfig, quantities: Mapping[str, Tensor]) -> dict[Key, float]:
    """`sum_t w_t * x_t` of this rank for every rule, micro-batch by micro-batch."""
    table = _micro_batch_sums(view, quantities)
    sums: dict[Key, float] = {}
    for rule in config.rules:
        sums[("total_weight", rule)] = table[rule, "total_weight"]
        for name in quantities:
            sums[(name, rule)] = table[rule if name == "pg_loss" else config.metric_rule[rule], name]
        if "pg_loss" in quantities:
            sums[("loss", rule)] = (
                sums[("pg_loss", rule)]
                + config.objective.kl_coef * sums.get(("kl_loss", rule), 0.0)
                - config.objective.entropy_coef * sums.get(("entropy_loss", rule), 0.0)
            )
    return sums


def _micro_batch_sums(view: LocalView, quantities: Mapping[str, Tensor]) -> dict[tuple[str, str], float]:
    """Every weight vector against every quantity: one small matrix a micro-batch, added up in float64."""
    names = ("total_weight", *quantities)
    weights_WT = torch.stack(list(view.weights.values()))
    values_QT = torch.stack([torch.ones_like(weights_WT[0]), *(x_T.double() for x_T in quantities.values())])
    sums_WQ = torch.zeros(len(view.weights), len(names), dtype=torch.float64)
    sizes = list(view.micro_batch_tokens)
    for weights_WM, values_QM in zip(weights_WT.split(sizes, dim=1), values_QT.split(sizes, dim=1), strict=True):
        sums_WQ += weights_WM @ values_QM.T
    rows = sums_WQ.tolist()
    return {(rule, name): rows[w][q] for w, rule in enumerate(view.weights) for q, name in enumerate(names)}


def _gradient(view: LocalView, config: MeasureConfig, rule: str, slopes: Mapping[str, Tensor]) -> Tensor:
    gradient_T = view.weights[rule] * slopes["pg_loss"]
    if config.objective.kl_coef:
        gradient_T = gradient_T + config.objective.kl_coef * view.weights[config.metric_rule[rule]] * slopes["kl_loss"]
    return gradient_T


def _gradient_products(view: LocalView, config: MeasureConfig, slopes: Mapping[str, Tensor]) -> dict[Key, float]:
    """Inner products of the rules' gradients over this rank's tokens: norms and cosines are made of their sums."""
    if "pg_loss" not in slopes:
        return {}
    gradient_RT = torch.stack([_gradient(view, config, rule, slopes) for rule in config.rules])
    product_RR = (gradient_RT @ gradient_RT.T).tolist()
    return {("gradient", a, b): product_RR[i][j] for i, a in enumerate(config.rules) for j, b in enumerate(config.rules)}


# -- samples --------------------------------------------------------------------------------------------------------


def _sample_sums(view: LocalView, config: MeasureConfig) -> dict[Key, float]:
    """Counts and sums over the rank's samples, and over tokens where a sample is spread over context-parallel ranks."""
    mask_T = view.tokens["loss_mask"]
    counted = float(view.counts_samples)
    length_S = view.response_length_S.double()
    sums: dict[Key, float] = {
        ("samples",): counted * length_S.numel(),
        ("tokens",): float(mask_T.sum()),
        ("response_tokens",): float(mask_T.numel()),
        ("fully_masked_samples",): counted * float((view.mask_sum_S == 0).sum()),
        ("micro_batches",): counted * len(view.micro_batch_tokens),
        ("response_length", "sum"): counted * float(length_S.sum()),
        ("response_length", "count"): counted * length_S.numel(),
    }
    if view.local_raw_reward_S is None:
        return sums
    scored_S = ~view.local_raw_reward_S.isnan()
    share_S = view.rollout_share_S[scored_S]
    sums[("unscored_samples",)] = counted * float((~scored_S).sum())
    sums[("raw_reward", "sum")] = counted * float((share_S * view.local_raw_reward_S[scored_S]).sum())
    sums[("raw_reward", "count")] = counted * float(share_S.sum())
    correct_S = is_correct(view.local_raw_reward_S, config.correct_threshold)
    for name, chosen_S in (("correct", correct_S), ("incorrect", scored_S & ~correct_S)):
        count = counted * float(chosen_S.sum())
        sums[(f"{name}/count",)] = count
        sums[(f"{name}/response_length", "sum")] = counted * float(length_S[chosen_S].sum())
        sums[(f"{name}/response_length", "count")] = count
    bins_S = length_bins(view.response_length_S, config.max_response_length)
    for at, label in enumerate(LENGTH_BINS):
        sums[(f"correct_length/{label}", "sum")] = counted * float((correct_S & (bins_S == at)).sum())
        sums[(f"correct_length/{label}", "count")] = counted * float(correct_S.sum())
    if "entropy" in view.tokens:
        chosen_S = correct_S & (view.mask_sum_S > 0)
        part_T = torch.where(mask_T, view.tokens["entropy"], 0.0).double() / view.mask_sum_S.clamp(min=1)[view.sample_T]
        sums[("correct/entropy", "sum")] = float(part_T[chosen_S[view.sample_T]].sum())
        sums[("correct/entropy", "count")] = counted * float(chosen_S.sum())
    return sums


def is_correct(reward: Tensor, threshold: float) -> Tensor:
    """True where the raw reward reaches the threshold; an unscored (NaN) reward is not correct."""
    return reward >= threshold - TOLERANCE


def length_bins(length_S: Tensor, max_response_length: int) -> Tensor:
    """The quarter (0 to 3) of the maximum response length that each response length lies in; int64 [S].

    A length on a boundary belongs to the lower quarter; one beyond the maximum to the last.
    """
    return ((4 * length_S + max_response_length - 1) // max_response_length - 1).clamp(0, 3)


def _correct_lengths(view: LocalView, config: MeasureConfig) -> list[int] | None:
    if not config.log_correct_samples or view.local_raw_reward_S is None:
        return None
    if not view.counts_samples:
        return []
    correct_S = is_correct(view.local_raw_reward_S, config.correct_threshold)
    return sorted(view.response_length_S[correct_S].tolist())
