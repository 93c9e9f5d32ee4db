"""What aggregation modes do to the parameters: the gradient of each on the same rollouts, without an optimizer step.

One forward pass of each micro-batch, and one backward pass of it for each mode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.layout.schedule import Layout
from aggcli.policy.protocol import Policy
from aggcli.rollouts.batch import RolloutBatch
from aggcli.training.rows import rows_of_rank
from aggcli.training.stack import RunSpec
from aggcli.training.step import loss_of_rows, read, step_tokens
from aggcli.world import ALONE

WHOLE = "all parameters"
OTHER = "the rest"
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class ModeGradients:
    """Inner products between the gradients of M modes, float64 [M, M]: `by_parameters` of each group of parameters, `WHOLE`
    first; `by_log_probs_MM` of the gradients by the response tokens' log-probabilities."""

    by_parameters: dict[str, Tensor]
    by_log_probs_MM: Tensor


def mode_gradients(
    policy: Policy,
    runs: Sequence[RunSpec],
    step: RolloutBatch,
    tokens_SL: Tensor,
    layout: Layout,
    objective: ObjectiveConfig,
    old_T: Tensor | None = None,
    reference_T: Tensor | None = None,
) -> ModeGradients:
    """The gradients of one run for each mode, on one optimizer step of one policy (R = 1).

    `old_T`, `reference_T`: log-probabilities [T] of the policy that sampled (default: the policy itself) and of the reference.
    `objective`: the settings that are the same for all modes.
    """
    given = [step_tokens(step, [run], layout, policy.dtype) for run in runs]
    numbers = sum(policy.sizes().values())
    gradient_MQ = torch.zeros(len(runs), numbers, dtype=policy.dtype, device=policy.device)
    by_token_MT = torch.zeros(len(runs), step.loss_mask_T.numel(), dtype=torch.float64)
    (some,) = policy.passes()
    for row_RB in rows_of_rank(step, 1, layout, ALONE):
        flat, own_T, spread_T = read(some, step, tokens_SL, row_RB, policy.device)
        for mode, of_mode in enumerate(given):
            of_mode = of_mode.beside(old_T, reference_T)
            loss = loss_of_rows(own_T, spread_T, flat, step, of_mode, objective, policy.device)
            if not loss.requires_grad:
                continue
            (by_token,) = torch.autograd.grad(loss, own_T, retain_graph=True)
            by_token_MT[mode, flat] = by_token.double().cpu()
            some.add_gradient(loss, gradient_MQ[mode : mode + 1], is_last=mode + 1 == len(runs))
    return ModeGradients(_products(gradient_MQ, policy.sizes()), by_token_MT @ by_token_MT.mT)


def _products(gradient_MQ: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Inner products of each group of parameters, and of all of them."""
    found: dict[str, Tensor] = {WHOLE: torch.zeros(len(gradient_MQ), len(gradient_MQ), dtype=torch.float64)}
    start = 0
    for name, size in sizes.items():
        part_MQ = gradient_MQ[:, start : start + size].double()
        product_MM = (part_MQ @ part_MQ.mT).cpu()
        for group in (WHOLE, group_of(name)):
            found[group] = found.get(group, 0) + product_MM
        start += size
    return found


def group_of(parameter: str) -> str:
    """The group that a parameter belongs to by its name: a layer, the embeddings, or the rest."""
    if layer := _LAYER.search(parameter):
        return f"layer {layer.group(1)}"
    return "embeddings" if re.search(r"embed|wte|wpe|position", parameter) else OTHER


def norms_of(product_MM: Tensor) -> list[float]:
    """The 2-norm of each mode's gradient."""
    return product_MM.diagonal().sqrt().tolist()


def cosines_of(product_MM: Tensor) -> list[list[float | None]]:
    """The cosine between each two modes' gradients; None where one of them is 0."""
    norm_M = product_MM.diagonal().sqrt()
    size_MM = norm_M[:, None] * norm_M
    cosine_MM = (product_MM / size_MM).clamp(-1.0, 1.0)
    return [
        [value if size > 0 else None for value, size in zip(*row, strict=True)]
        for row in zip(cosine_MM.tolist(), size_MM.tolist(), strict=True)
    ]
