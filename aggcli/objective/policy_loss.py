"""Per-token quantities: the policy losses and the KL estimates. No mean is taken here.

A token's part of the gradient is its weight w_t times c_t = d loss_t / d log pi_t, the token's own. With A its advantage and
r = exp(new - old) its ratio:

    ppo     max(-r A, -clip(r, 1 - eps, 1 + eps_high) A)      c = -r A, 0 where the clip binds    Schulman et al., 2017
    gspo    the same with s_t = sg[s] pi / sg[pi], s the       c = -s A, 0 where the clip binds    Zheng et al., 2025,
            geometric mean of r over the response's            (with weights of sample_mean and    arXiv:2507.18071,
            trained tokens                                      one advantage: GSPO's gradient)     GSPO-token
    gmpo    -g_t A with g_t = sg[g] pi / sg[pi], constant      c = -g A, 0 where the clip binds    Zhao et al., 2025,
            where the clip binds, g the geometric mean of      (with weights of sample_mean and    arXiv:2507.20673
            min(r, 1 + eps_high) (A < 0: max(r, 1 - eps))       one advantage: GMPO's gradient)
    cispo   -sg[min(r, 1 + eps_high)] A log pi                 c = -min(r, 1 + eps_high) A         MiniMax-M1, 2025,
                                                                                                   arXiv:2506.13585, eq. 4
    sapo    -4 / tau sigmoid(tau (r - 1)) A, tau 1 for         c = -4 g (1 - g) r A, g the         Gao et al., 2025,
            A > 0, else 1.05                                   sigmoid                             arXiv:2511.20347
    dppo    -sg[r] A log pi, 0 where pi - pi_old > eps_high    c = -r A, 0 where it is masked      Qi et al., 2026,
            (A > 0) or < -eps (A < 0): the Binary-TV mask                                          arXiv:2602.04879, by
                                                                                                   the authors' code

sg holds a value constant. At ratio 1 every c is -A. DPPO's eps are of probabilities, not of ratios; with `eps_clip_c` its r is
at most that, which the authors' code sets to 10 and verl's to 20 where nothing is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.errors import SettingError

SAPO_TEMPERATURES = (1.0, 1.05)
"""Of tokens with an advantage above 0, and of the others: the paper's, and the defaults of TRL."""
OF_SEQUENCES = ("gspo", "gmpo")
"""Losses whose ratio is of the whole response."""


@dataclass(frozen=True)
class PolicyTerms:
    """What the policy loss knows of each response token; all [T], and 0 (ratio 1) where the mask is 0.

    `pg_loss_T`; `clipped_T` 1 where the clip binds (None of a loss without one); `dual_clipped_T` 1 where the dual clip binds
    (None without one); `ppo_kl_T` = old - new log-probability in nats; `ratio_T` = exp(new - old).
    """

    pg_loss_T: Tensor
    clipped_T: Tensor | None
    dual_clipped_T: Tensor | None
    ppo_kl_T: Tensor
    ratio_T: Tensor


def policy_terms(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    objective: ObjectiveConfig,
    clip_range: tuple[Tensor, Tensor] | None = None,
    sequence_log_ratio_T: Tensor | None = None,
) -> PolicyTerms:
    """The objective's policy loss for every token: `max(-r*A, -clip(r, 1 - eps_clip, 1 + eps_clip_high)*A)` with r = exp(new -
    old), or another of the module's.

    With a dual clip c, tokens of negative advantage lose at most `-c*A` (Ye et al., 2020). `clipped_T` is sign-aware: 1 where
    `-clip(r)*A > -r*A`. Values under the mask may be anything, NaN included: they are selected away first.
    A ratio that the dtype cannot hold is infinity in `ratio_T`; the loss of a token whose clip binds does not need it.
    `clip_range` gives lower and upper bound of the ratio per token (for stacks of runs) instead of the objective's;
    `sequence_log_ratio_T`, which losses of `OF_SEQUENCES` need, the mean of `averaged_log_ratio` over the trained tokens of
    each token's response.
    Sources: PPO (Schulman et al., 2017); asymmetric range: DAPO's clip-higher.
    """
    new_T = torch.where(loss_mask_T, log_probs_T, 0.0)
    old_T = torch.where(loss_mask_T, old_log_probs_T, 0.0)
    advantage_T = torch.where(loss_mask_T, advantages_T, 0.0)
    log_ratio_T = new_T - old_T
    most = math.log(torch.finfo(log_ratio_T.dtype).max) - 1
    held_T = torch.exp(log_ratio_T.clamp(max=most))  # infinity would make 0 times infinity of a clipped token's gradient
    ratio_T = torch.where(log_ratio_T > most, torch.inf, held_T)
    low, high = objective.clip_range if clip_range is None else clip_range
    dual_T = clipped_T = None
    if objective.policy_loss == "cispo":
        loss_T = -torch.clamp(held_T, max=high).detach() * advantage_T * new_T  # pyright: ignore[reportCallIssue, reportArgumentType]
        clipped_T = (held_T > high).to(loss_T.dtype)
    elif objective.policy_loss == "dppo":
        moved_T = torch.exp(new_T.detach()) - torch.exp(old_T)
        binds_T = ((advantage_T > 0) & (moved_T > high - 1)) | ((advantage_T < 0) & (moved_T < low - 1))
        most_T = held_T if objective.eps_clip_c is None else held_T.clamp(max=objective.eps_clip_c)
        loss_T = -torch.where(binds_T, 0.0, most_T.detach()) * advantage_T * new_T
        clipped_T = binds_T.to(loss_T.dtype)
    elif objective.policy_loss == "sapo":
        tau_T = torch.where(advantage_T > 0, *map(held_T.new_tensor, SAPO_TEMPERATURES))
        loss_T = -torch.sigmoid(tau_T * (held_T - 1)) * 4 / tau_T * advantage_T
    elif objective.policy_loss == "gmpo":
        binds_T = ((advantage_T > 0) & (held_T > high)) | ((advantage_T < 0) & (held_T < low))
        mean_T = _of_sequence(sequence_log_ratio_T, loss_mask_T, most)
        loss_T = -torch.where(binds_T, mean_T, mean_T * torch.exp(new_T - new_T.detach())) * advantage_T
        clipped_T = binds_T.to(loss_T.dtype)
    else:
        if objective.policy_loss == "gspo":
            held_T = _of_sequence(sequence_log_ratio_T, loss_mask_T, most) * torch.exp(new_T - new_T.detach())
        free_T = -held_T * advantage_T
        bound_T = -torch.clamp(held_T, low, high) * advantage_T  # pyright: ignore[reportCallIssue, reportArgumentType]
        loss_T, clipped_T = torch.maximum(free_T, bound_T), (bound_T > free_T).to(held_T.dtype)
        if objective.eps_clip_c is not None:
            most_T = -objective.eps_clip_c * advantage_T
            caps_T = (advantage_T < 0) & (most_T < loss_T)
            loss_T, dual_T = torch.where(caps_T, most_T, loss_T), caps_T.to(loss_T.dtype)
    return PolicyTerms(loss_T, clipped_T, dual_T, old_T - new_T, ratio_T)


def averaged_log_ratio(
    new_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor | None,
    loss_mask_T: Tensor,
    objective: ObjectiveConfig,
    clip_range: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What losses of `OF_SEQUENCES` take the mean of over the trained tokens of a response: new - old in nats, float64 [T], 0
    where the mask is 0. Of gmpo at most log(1 + eps_clip_high) where the advantage is above 0, at least log(1 - eps_clip) where
    it is below; `clip_range`: as of `policy_terms`.
    """
    ratio_T = torch.where(loss_mask_T, new_T.double() - old_T.double(), 0.0)
    if objective.policy_loss != "gmpo" or advantages_T is None:
        return ratio_T
    low, high = (torch.as_tensor(bound, dtype=torch.float64).log() for bound in clip_range or objective.clip_range)
    down_T = torch.where(loss_mask_T & (advantages_T > 0), torch.minimum(ratio_T, high), ratio_T)
    return torch.where(loss_mask_T & (advantages_T < 0), torch.maximum(down_T, low), down_T)


def _of_sequence(log_ratio_T: Tensor | None, loss_mask_T: Tensor, most: float) -> Tensor:
    """The ratio of each token's response [T], 1 where the mask is 0."""
    assert log_ratio_T is not None
    return torch.where(loss_mask_T, log_ratio_T, 0.0).clamp(max=most).exp()


def kl_terms(
    log_probs_T: Tensor,
    ref_log_probs_T: Tensor,
    loss_mask_T: Tensor,
    estimator: str,
    ratio_T: Tensor | None = None,
) -> Tensor:
    """Estimate of KL(policy || reference) at each token, in nats [T]; 0 where the mask is 0.

    With d = new - ref: k1 = d, k2 = d*d/2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence", 2020).
    `ratio_T` (importance ratio) multiplies the estimate, which makes it unbiased off-policy.
    Raises `SettingError` for an unknown estimator.
    """
    d_T = torch.where(loss_mask_T, log_probs_T, 0.0) - torch.where(loss_mask_T, ref_log_probs_T, 0.0)
    if estimator == "k1":
        kl_T = d_T
    elif estimator == "k2":
        kl_T = d_T * d_T / 2
    elif estimator == "k3":
        kl_T = torch.expm1(-d_T) + d_T
    else:
        raise SettingError(f"unknown KL estimator '{estimator}'; known: k1, k2, k3")
    return kl_T if ratio_T is None else ratio_T * kl_T
