"""Reducers for the audit to judge: nine that hide one fault each, and correct ones in different styles.

Counts that a real framework all-reduces arrive as arguments; `COUNTER` stands for the ones a module keeps by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Slime = Callable[[list[int], list[int], list[Tensor], bool], Callable[[Tensor], Tensor]]

# -- nine faults ----------------------------------------------------------------------------------------------------


def local_token_count(loss_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The masked mean of a micro-batch, handed to a framework that adds micro-batches up."""
    return (loss_BT * mask_BT).sum() / mask_BT.sum()


def over_dp_twice(loss_BT: Tensor, mask_BT: Tensor, *, batch_num_tokens: int, dp_size: int) -> Tensor:
    return (loss_BT * mask_BT).sum() / batch_num_tokens / dp_size


def cp_inflated_count(loss_BT: Tensor, mask_BT: Tensor, batch_num_tokens: int, dp_size: int, cp_size: int) -> Tensor:
    return (loss_BT * mask_BT).sum() / (batch_num_tokens * cp_size) * dp_size


def padded_width(loss_BT: Tensor, mask_BT: Tensor, global_batch_size: int, dp_size: int) -> Tensor:
    return (loss_BT * mask_BT).sum() / (global_batch_size * mask_BT.shape[-1]) * dp_size


def numerator_unmasked(loss_BT: Tensor, mask_BT: Tensor, batch_num_tokens: int, dp_size: int) -> Tensor:  # ROLL, PR 444
    return loss_BT.sum() / batch_num_tokens * dp_size


def phantom_token(loss_BT: Tensor, mask_BT: Tensor, *, batch_num_tokens: int, dp_size: int) -> Tensor:
    """A clamp on each row's count instead of the total's, as in slime's per-token loss."""
    phantom = (mask_BT.sum(-1) == 0).sum()
    return (loss_BT * mask_BT).sum() / (batch_num_tokens + phantom) * dp_size


def mean_of_rank_means(loss_BT: Tensor, mask_BT: Tensor, *, rank_num_tokens: int) -> Tensor:
    return (loss_BT * mask_BT).sum() / rank_num_tokens


def order_dependent(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """Discounts each sample by its place in the micro-batch."""

    def reduce(loss_T: Tensor) -> Tensor:
        pieces = zip(loss_T.split(response_lengths), loss_masks, strict=True)
        return torch.stack([(x * m).sum() * 0.9**at for at, (x, m) in enumerate(pieces)]).sum()

    return reduce


def in_place(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """Right numbers, but the caller's tensor is overwritten."""

    def reduce(loss_T: Tensor) -> Tensor:
        loss_T *= torch.cat(loss_masks)
        return loss_T.sum() / 100

    return reduce


FAULTY: dict[str, tuple[Callable[..., Any], str]] = {
    "local token count": (local_token_count, "counts in the micro-batch"),
    "over dp twice": (over_dp_twice, "divided by the ranks twice"),
    "cp-inflated count": (cp_inflated_count, "context-parallel inflation"),
    "padded width": (padded_width, "depends on the padding width"),
    "numerator unmasked": (numerator_unmasked, "masked tokens have weight"),
    "phantom token": (phantom_token, "phantom token for masked rows"),
    "mean of rank means": (mean_of_rank_means, "mean of rank means"),
    "order dependent": (order_dependent, "depends on the order"),
    "in place": (in_place, "mutates its inputs"),
}
"""Name -> (reducer, the finding that names its fault)."""

# -- correct ones ---------------------------------------------------------------------------------------------------


def verl_style(loss_mat: Tensor, loss_mask: Tensor, **counts: Any) -> Tensor:
    """The global token mean with verl's counts."""
    return torch.where(loss_mask.bool(), loss_mat, 0.0).sum() / counts["batch_num_tokens"] * counts["dp_size"]


def trl_style(per_token_loss: Tensor, mask: Tensor, max_completion_length: float, gradient_accumulation_steps: int) -> Tensor:
    """Dr.GRPO as TRL has it: a mean over the rows of each of several equal micro-batches."""
    return (per_token_loss * mask).sum() / (per_token_loss.size(0) * max_completion_length) / gradient_accumulation_steps


def slime_style(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """The sum of sample means; slime divides by the rollouts."""

    def reduce(loss_T: Tensor) -> Tensor:
        pieces = zip(loss_T.split(response_lengths), loss_masks, strict=True)
        return sum(((x * m).sum() / m.sum().clamp(min=1) for x, m in pieces), start=loss_T.new_zeros(()))

    return reduce


class Constant:
    """A callable object in the flat form, in float32 as real losses are."""

    def __init__(self, length: float) -> None:
        self.length = length

    def __call__(self, loss: Tensor) -> Tensor:
        return (loss.float() / self.length).sum()


CORRECT: dict[str, Callable[..., Any]] = {
    "verl style": verl_style,
    "trl style": trl_style,
    "slime style": slime_style,
    "flat callable object": Constant(1000.0),
}
flat_constant = CORRECT["flat callable object"]


def that_raises(loss: Tensor, mask: Tensor) -> Tensor:
    raise ValueError("boom")
