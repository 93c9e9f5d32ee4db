"""The operations of a block whose generic forms are slow at a width of 64, with their backward passes by hand."""

from __future__ import annotations

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


def call(function: type[Function], *arguments: Any) -> Tensor:
    """`function.apply`; under autocast with everything in the autocast type, so that the backward pass finds it so too."""
    device = arguments[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return function.apply(*arguments)  # type: ignore[no-any-return]
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return function.apply(*(value.to(dtype) if isinstance(value, Tensor) else value for value in arguments))  # type: ignore[no-any-return]


def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2))` over the last axis, and what x was multiplied by, [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SMALLEST_NORM)
    inverse_rms = norm.reciprocal_().mul_(x.shape[-1] ** 0.5)
    return x * inverse_rms, inverse_rms


def through_norm(grad: Tensor, x: Tensor, inverse_rms: Tensor) -> Tensor:
    """The gradient before a norm, from that behind it and what `normed` gave."""
    along = torch.linalg.vecdot(grad, x).unsqueeze(-1)
    return torch.addcmul(grad, x, along, value=-1 / x.shape[-1]).mul_(inverse_rms)


class RMSNorm(Function):
    """`x / sqrt(mean(x^2))` over the last axis, without a gain (Zhang, Sennrich 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x, inverse_rms = normed(x)
        ctx.save_for_backward(x, inverse_rms)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return through_norm(grad, *ctx.saved_tensors)


class NormedLinear(Function):
    """`norm(x) @ w` for [R, T, D] and weights [R, D, X]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x, inverse_rms = normed(x)
        ctx.save_for_backward(x, inverse_rms, w)
        return torch.bmm(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, inverse_rms, w = ctx.saved_tensors
        return through_norm(torch.bmm(grad, w.mT), x, inverse_rms), torch.bmm(x.mT, grad)


class MLP(Function):
    """`x + relu(norm(x) @ w_in) @ w_out` for [R, T, D] and weights [R, D, M], [R, M, D]; one [R, T, M] kept, none copied."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        x, inverse_rms = normed(residual)
        active = torch.bmm(x, w_in).relu_()
        ctx.save_for_backward(x, inverse_rms, active, w_in, w_out)
        return torch.baddbmm(residual, active, w_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, inverse_rms, active, w_in, w_out = ctx.saved_tensors
        grad_active = torch.bmm(grad, w_out.mT)
        torch.ops.aten.threshold_backward.grad_input(grad_active, active, 0, grad_input=grad_active)
        grad_x = through_norm(torch.bmm(grad_active, w_in.mT), x, inverse_rms).add_(grad)
        return grad_x, torch.bmm(x.mT, grad_active), torch.bmm(active.mT, grad)


class Pieces(Protocol):
    """See `aggcli.policy.packing.Bin`."""

    @property
    def token_NL(self) -> Tensor: ...
    @property
    def mask_N1QL(self) -> Tensor: ...
    @property
    def only_seen(self) -> int: ...


class TokenLayout(Protocol):
    """See `aggcli.policy.packing.Packing`."""

    @property
    def bins(self) -> tuple[Pieces, ...]: ...
    @property
    def taken_RT(self) -> Tensor: ...


class PackedAttention(Function):
    """Attention over flat lists of tokens, each over what it goes on from.

    `qkv_RTX` [R, T, 3 * D] -> [R, T, D]. Matrix products are batched over pieces and heads; at these sizes they cost a
    twentieth of the fused attention kernels, which pay per row and head.
    """

    @staticmethod
    def forward(ctx: Any, qkv_RTX: Tensor, layout: TokenLayout, heads: int) -> Tensor:
        R, T, X = qkv_RTX.shape
        flat_MX = qkv_RTX.reshape(R * T, X)
        ctx.layout, ctx.heads = layout, heads
        saved: list[Tensor] = []
        mixed: list[Tensor] = []
        for pieces in layout.bins:
            N, L = pieces.token_NL.shape
            part = flat_MX.index_select(0, pieces.token_NL.flatten()).view(N, L, 3, heads, -1).permute(2, 0, 3, 1, 4)
            scale = part.shape[-1] ** -0.5
            mixed_NQD, own, weight = attended(part, pieces.mask_N1QL, scale=scale, only_seen=pieces.only_seen)
            mixed.append(mixed_NQD.view(-1, X // 3))
            saved += [own, weight]
        ctx.save_for_backward(*saved)
        together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return together.index_select(0, layout.taken_RT.flatten()).view(R, T, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RTD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout, heads, (R, T, D) = ctx.layout, ctx.heads, grad_RTD.shape
        sizes = [pieces.token_NL[:, pieces.only_seen :].numel() for pieces in layout.bins]
        grad_mixed = grad_RTD.new_zeros(sum(sizes), D).index_add_(0, layout.taken_RT.flatten(), grad_RTD.reshape(R * T, D))
        grad_qkv = grad_RTD.new_zeros(R * T, 3 * D)
        for at, (pieces, grad_out) in enumerate(zip(layout.bins, grad_mixed.split(sizes), strict=True)):
            own, weight = ctx.saved_tensors[2 * at : 2 * at + 2]
            query, key, value = own.flatten(1, 2)
            (N, L), only_seen = pieces.token_NL.shape, pieces.only_seen
            grad_out = grad_out.view(N, -1, heads, D // heads).transpose(1, 2).reshape(N * heads, -1, D // heads)
            grad_score = torch.ops.aten._softmax_backward_data(torch.bmm(grad_out, value.mT), weight, -1, weight.dtype)
            grad_score.mul_(query.shape[-1] ** -0.5)
            grad_own = torch.empty_like(own)
            grad_query, grad_key, grad_value = grad_own.flatten(1, 2)
            grad_query[:, :only_seen] = 0.0
            torch.bmm(grad_score, key, out=grad_query[:, only_seen:])
            torch.bmm(grad_score.mT, query[:, only_seen:], out=grad_key)
            torch.bmm(weight.mT, grad_out, out=grad_value)
            grad_qkv.index_add_(0, pieces.token_NL.flatten(), grad_own.permute(1, 3, 0, 2, 4).reshape(N * L, 3 * D))
        return grad_qkv.view(R, T, -1), None, None


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
