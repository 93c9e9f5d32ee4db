"""The blocks of a transformer, with their backward pass by hand: at a width of 64 most of the time of an operation is spent
around it, and autograd's is spent beside each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

SMALLEST_NORM = 1e-12
"""A norm never divides by less, so that a row of zeros stays one."""
FEWEST_PLACES = 16
"""Attention is over at least so many tokens, padded where there are fewer: a softmax over fewer than one vector register is ten
times slower."""


# -- blocks -------------------------------------------------------------------------------------------------------------


class Attention(Protocol):
    """How tokens see each other: from the queries, keys and values of a layer [R, T, 3 * D] to [R, K, D] of the tokens that are
    `wanted`, None for all, and back."""

    def forward(self, qkv_RTX: Tensor, wanted: Tensor | None, *, keeps: bool) -> tuple[Tensor, Sequence[Tensor]]:
        """What comes out, and where it `keeps` that, what `backward` needs."""
        ...

    def backward(self, grad_RKD: Tensor, wanted: Tensor | None, kept: Sequence[Tensor]) -> Tensor:
        """The gradient by what went in, from that by what came out."""
        ...


def through_blocks(
    x_RTD: Tensor, weights: Sequence[Sequence[Tensor]], attention: Attention, wanted: Tensor | None = None
) -> Tensor:
    """All blocks and the final norm: embeddings [R, T, D] -> hidden states [R, T, D], differentiable once.

    `weights`, of each block: queries, keys and values [R, D, 3 * D], what attention adds [R, D, D], and the two of the MLP,
    [R, D, M] and [R, M, D]. `wanted`: which tokens' hidden states are asked for, None for all; of the others the last block
    computes what these see of them. Norms have no gain (RMS: Zhang, Sennrich 2019), and an MLP's activation is ReLU. Under
    autocast everything is in the autocast type, so that the backward pass finds it so too.
    """
    device = x_RTD.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return _through(x_RTD, weights, attention, wanted)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        typed = [[weight.to(dtype) for weight in of_block] for of_block in weights]
        return _through(x_RTD.to(dtype), typed, attention, wanted)


def _through(x: Tensor, weights: Sequence[Sequence[Tensor]], attention: Attention, wanted: Tensor | None) -> Tensor:
    for at, of_block in enumerate(weights):
        keeps = torch.is_grad_enabled() and any(value.requires_grad for value in (x, *of_block))
        x = _Block.apply(x, _How(attention, wanted if at + 1 == len(weights) else None, keeps), *of_block)  # type: ignore[assignment]
    return _Norm.apply(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _How:
    """See `through_blocks`. `keeps`: whether a backward pass may follow."""

    attention: Attention
    wanted: Tensor | None
    keeps: bool


class _Block(Function):
    """One block; each of its two residual sums is part of a matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _How, qkv: Tensor, attention_out: Tensor, mlp_in: Tensor, mlp_out: Tensor) -> Tensor:
        ctx.how = how
        seen, seen_scale = normed(x)
        mixed, of_attention = how.attention.forward(torch.bmm(seen, qkv), how.wanted, keeps=how.keeps)
        if how.wanted is not None:
            x = x.index_select(1, how.wanted)
        x = torch.baddbmm(x, mixed, attention_out)
        read, read_scale = normed(x)
        active = torch.bmm(read, mlp_in).relu_()
        if how.keeps:
            weights = (qkv, attention_out, mlp_in, mlp_out)
            ctx.save_for_backward(*weights, seen, seen_scale, mixed, read, read_scale, active, *of_attention)
        return torch.baddbmm(x, active, mlp_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        how: _How = ctx.how
        qkv, attention_out, mlp_in, mlp_out, *kept = ctx.saved_tensors
        seen, seen_scale, mixed, read, read_scale, active, *of_attention = kept
        grad_active = torch.bmm(grad, mlp_out.mT)
        torch.ops.aten.threshold_backward.grad_input(grad_active, active, 0, grad_input=grad_active)
        of_mlp = torch.bmm(read.mT, grad_active), torch.bmm(active.mT, grad)
        grad = through_norm(torch.bmm(grad_active, mlp_in.mT), read, read_scale, grad)
        of_out = torch.bmm(mixed.mT, grad)
        grad_qkv = how.attention.backward(torch.bmm(grad, attention_out.mT), how.wanted, of_attention)
        of_qkv = torch.bmm(seen.mT, grad_qkv)
        grad_seen = torch.bmm(grad_qkv, qkv.mT)
        if how.wanted is None:
            grad = through_norm(grad_seen, seen, seen_scale, grad)
        else:
            grad = through_norm(grad_seen, seen, seen_scale).index_add_(1, how.wanted, grad)
        return grad, None, of_qkv, of_out, *of_mlp


class _Norm(Function):
    """The norm behind the last block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x, scale = normed(x)
        ctx.save_for_backward(x, scale)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return through_norm(grad, *ctx.saved_tensors)


def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2))` over the last axis, and what x was multiplied by, [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SMALLEST_NORM)
    inverse_rms = norm.reciprocal_().mul_(x.shape[-1] ** 0.5)
    return x * inverse_rms, inverse_rms


def through_norm(grad: Tensor, x: Tensor, inverse_rms: Tensor, beside: Tensor | None = None) -> Tensor:
    """The gradient before a norm, from that behind it and what `normed` gave; added to that `beside` the norm."""
    along = torch.linalg.vecdot(grad, x).unsqueeze(-1).mul_(inverse_rms)
    scaled = grad * inverse_rms if beside is None else torch.addcmul(beside, grad, inverse_rms)
    return scaled.addcmul_(x, along, value=-1 / x.shape[-1])


# -- attention ----------------------------------------------------------------------------------------------------------


def attended(part: Tensor, mask: Tensor, *, scale: float, only_seen: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [N, Q, D] over N pieces of L tokens of Q of them, all but the first `only_seen`, and what it was made of:
    queries, keys and values in one block [3, N, H, L, d], and weights [N * H, Q, L]. `part`: a view [3, N, H, L, d]; `mask`:
    what to add to scores [N, H, Q, L]."""
    _, N, H, L, d = part.shape
    own = part.contiguous()
    query, key, value = own.flatten(1, 2)
    score = torch.bmm(query[:, only_seen:], key.mT).view(N, H, -1, L)
    weight = torch.add(mask.to(part.dtype), score, alpha=scale).softmax(-1).view(N * H, -1, L)
    mixed = torch.bmm(weight, value).view(N, H, -1, d).transpose(1, 2)
    return mixed.reshape(N, -1, H * d), own, weight
