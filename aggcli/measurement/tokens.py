"""Per-token numbers of a view, and their derivatives by the log-probabilities. No weight and no mean enters here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.objective.policy_loss import kl_terms, policy_terms


@dataclass(frozen=True)
class TokenNumbers:
    """`values`: per-token numbers by metric name [T], 0 where the mask is 0; `slopes`: d pg_loss_t / d log_prob_t and
    d kl_loss_t / d log_prob_t [T]; `ratio_T`: importance ratios."""

    values: dict[str, Tensor]
    slopes: dict[str, Tensor]
    ratio_T: Tensor


def token_numbers(
    tokens: Mapping[str, Tensor], objective: ObjectiveConfig, *, has_ratio: bool, with_slopes: bool
) -> TokenNumbers:
    """Everything the tokens give: what they lack is absent, and the slopes where they are not asked for.

    `tokens` may hold `clip_low` and `clip_high` [T], the clip range of each token's run; otherwise the objective's holds.
    """
    mask_T = tokens["loss_mask"]
    new_T = tokens["log_probs"].detach().clone().requires_grad_(with_slopes)
    advantages_T = tokens.get("advantages")
    terms = policy_terms(
        new_T,
        tokens["old_log_probs"],
        torch.zeros_like(new_T) if advantages_T is None else advantages_T,
        mask_T,
        objective,
        clip_range=(tokens["clip_low"], tokens["clip_high"]) if "clip_low" in tokens else None,
        sequence_log_ratio_T=tokens.get("sequence_log_ratio"),
    )
    found: dict[str, Tensor] = {}
    slopes: dict[str, Tensor] = {}
    if advantages_T is not None:
        found["pg_loss"] = terms.pg_loss_T
        if with_slopes:
            slopes["pg_loss"] = _slope(terms.pg_loss_T, new_T)
    if has_ratio:
        apart_T = torch.expm1(-terms.ppo_kl_T).abs()  # of a ratio near 1, ratio - 1 has few digits that are not rounding
        found |= {"ppo_kl": terms.ppo_kl_T, "ratio_deviation": torch.where(terms.ratio_T.isinf(), terms.ratio_T, apart_T)}
    if has_ratio and advantages_T is not None:
        if terms.clipped_T is not None:
            found["pg_clipfrac"] = terms.clipped_T
        if terms.dual_clipped_T is not None:
            found["pg_clipfrac_dual"] = terms.dual_clipped_T
    if "ref_log_probs" in tokens:
        ratio_T = terms.ratio_T if objective.kl_unbiased else None
        found["kl_loss"] = kl_terms(new_T, tokens["ref_log_probs"], mask_T, objective.kl_estimator, ratio_T)
        if with_slopes:
            slopes["kl_loss"] = _slope(found["kl_loss"], new_T)
    if "entropy" in tokens:
        found["entropy_loss"] = torch.where(mask_T, tokens["entropy"], 0.0)
    if "trainer_log_probs" in tokens:
        gap_T = (tokens["trainer_log_probs"] - tokens["rollout_log_probs"]).abs()
        found["sampler_mismatch"] = torch.where(mask_T, gap_T, 0.0)
    return TokenNumbers({name: value_T.detach() for name, value_T in found.items()}, slopes, terms.ratio_T.detach())


def overflowing(tokens: Mapping[str, Tensor], objective: ObjectiveConfig, name: str, *, has_ratio: bool) -> int | None:
    """The first trained token whose own number of this name, or of which it is made, is not finite; None where all are."""
    numbers = token_numbers(tokens, objective, has_ratio=has_ratio, with_slopes=False)
    ratios = [numbers.ratio_T]
    made_of = {"ratio_max": ratios, "importance_ess/tokens": ratios, "loss": list(numbers.values.values())}
    streams = made_of.get(name, [numbers.values[name]] if name in numbers.values else [])
    for value_T in streams:
        if (bad_T := tokens["loss_mask"] & ~torch.isfinite(value_T)).any():
            return int(bad_T.nonzero()[0])
    return None


def _slope(value_T: Tensor, by_T: Tensor) -> Tensor:
    """d value_t / d log_prob_t for every token; each token's value depends on its own log-probability only."""
    (slope_T,) = torch.autograd.grad(value_T.sum(), by_T, retain_graph=True)
    return slope_T
