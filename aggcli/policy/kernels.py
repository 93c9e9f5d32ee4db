"""The three operations of a block whose generic forms are slow at a width of 64, with their backward passes by hand."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

SMALLEST_NORM = 1e-12
"""A norm never divides by less, so that a row of zeros stays one."""
FEWEST_KEYS = 16
"""Scores are padded to this many keys: a softmax over fewer than one vector register is ten times slower."""


def call(function: type[Function], *arguments: Any) -> Tensor:
    """`function.apply`; under autocast with everything in the autocast type, so that the backward pass finds it so too."""
    device = arguments[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return function.apply(*arguments)  # type: ignore[no-any-return]
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return function.apply(*(value.to(dtype) if isinstance(value, Tensor) else value for value in arguments))  # type: ignore[no-any-return]


class RMSNorm(Function):
    """`x / sqrt(mean(x^2))` over the last axis, without a gain (Zhang, Sennrich 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SMALLEST_NORM)
        inverse_rms = norm.reciprocal_().mul_(x.shape[-1] ** 0.5)
        normed = x * inverse_rms
        ctx.save_for_backward(normed, inverse_rms)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        normed, inverse_rms = ctx.saved_tensors
        along = torch.linalg.vecdot(grad, normed).unsqueeze(-1)
        return torch.addcmul(grad, normed, along, value=-1 / normed.shape[-1]).mul_(inverse_rms)


class MLP(Function):
    """`residual + relu(x @ w_in) @ w_out` for [R, T, D] and weights [R, D, M], [R, M, D]; one [R, T, M] kept, none copied."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        active = torch.bmm(x, w_in).relu_()
        ctx.save_for_backward(x, active, w_in, w_out)
        return torch.baddbmm(residual, active, w_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, active, w_in, w_out = ctx.saved_tensors
        grad_out = torch.bmm(active.mT, grad)
        grad_active = torch.bmm(grad, w_out.mT)
        torch.ops.aten.threshold_backward.grad_input(grad_active, active, 0, grad_input=grad_active)
        return grad, torch.bmm(grad_active, w_in.mT), torch.bmm(x.mT, grad_active), grad_out


class Rows(Protocol):
    """Rows of equal padded length: where each token is in the flat lists, and the prompt before each row (None: these are the
    prompts)."""

    @property
    def token_NL(self) -> Tensor: ...
    @property
    def prompt_N(self) -> Tensor | None: ...


class TokenLayout(Protocol):
    """See `aggcli.policy.packing.Packing`."""

    @property
    def bins(self) -> tuple[Rows, ...]: ...
    @property
    def taken_RT(self) -> Tensor: ...


class PackedAttention(Function):
    """Causal attention over flat lists of tokens: each prompt over itself, each row over its prompt and itself.

    `qkv_RTX` [R, T, 3 * D] -> [R, T, D]. Matrix products are batched over rows and heads; at these sizes they cost a
    twentieth of the fused attention kernels, which pay per row and head.
    """

    @staticmethod
    def forward(ctx: Any, qkv_RTX: Tensor, layout: TokenLayout, heads: int) -> Tensor:
        R, T, X = qkv_RTX.shape
        flat_MX = qkv_RTX.reshape(R * T, X)
        ctx.layout, ctx.heads = layout, heads
        saved: list[Tensor] = []
        mixed: list[Tensor] = []
        prompt_keys = None
        for rows in layout.bins:
            N, L = rows.token_NL.shape
            part = flat_MX.index_select(0, rows.token_NL.flatten()).view(N, L, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed_NLD, (query, keys, weight) = attended(part, prompt_keys, rows.prompt_N, scale=part.shape[-1] ** -0.5)
            if prompt_keys is None:
                prompt_keys = keys[:, :, :, :L]
            mixed.append(mixed_NLD.flatten(0, 1))
            saved += [query, keys, weight]
        ctx.save_for_backward(*saved)
        mixed.append(qkv_RTX.new_zeros(1, X // 3))  # which the tokens take that pad
        return torch.cat(mixed).index_select(0, layout.taken_RT.flatten()).view(R, T, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RTD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout, heads, (R, T, D) = ctx.layout, ctx.heads, grad_RTD.shape
        sizes = [rows.token_NL.numel() for rows in layout.bins]
        grad_mixed = grad_RTD.new_zeros(sum(sizes) + 1, D).index_add_(0, layout.taken_RT.flatten(), grad_RTD.reshape(-1, D))
        grad_outs = grad_mixed[:-1].split(sizes)
        grad_qkv = grad_RTD.new_zeros(R * T, 3 * D)
        prompts = ctx.saved_tensors[1]
        P = layout.bins[0].token_NL.shape[1]
        grad_prompt = torch.zeros_like(prompts[:, :, :, :P])
        for at in reversed(range(len(layout.bins))):  # the prompts come last, when all their rows are known
            rows, (query, keys, weight) = layout.bins[at], ctx.saved_tensors[3 * at : 3 * at + 3]
            N, L = rows.token_NL.shape
            grad_out = grad_outs[at].view(N, L, heads, -1).transpose(1, 2).reshape(N * heads, L, -1)
            key, value = keys.flatten(1, 2)
            grad_keys = torch.empty_like(keys)
            torch.bmm(weight.mT, grad_out, out=grad_keys[1].flatten(0, 1))
            grad_score = torch.ops.aten._softmax_backward_data(torch.bmm(grad_out, value.mT), weight, -1, weight.dtype)
            grad_score.mul_(query.shape[-1] ** -0.5)
            torch.bmm(grad_score.mT, query, out=grad_keys[0].flatten(0, 1))
            own = 0
            if rows.prompt_N is None:
                grad_keys[:, :, :, :P].add_(grad_prompt)
            else:
                own = P
                grad_prompt.index_add_(1, rows.prompt_N, grad_keys[:, :, :, :P])
            part = grad_qkv.new_empty(N, L, 3, heads, D // heads)
            by_kind = part.permute(2, 0, 3, 1, 4)
            by_kind[0].copy_(torch.bmm(grad_score, key).view(N, heads, L, -1))
            by_kind[1:].copy_(grad_keys[:, :, :, own : own + L])
            grad_qkv.index_add_(0, rows.token_NL.flatten(), part.view(N * L, -1))
        return grad_qkv.view(R, T, -1), None, None


def attended(
    part: Tensor, prompt_keys: Tensor | None = None, prompt_N: Tensor | None = None, *, scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Causal attention [N, L, D] of rows over the prompt of each, if any, and themselves; and what it was made of: queries and
    keys (see `_query_and_keys`), and weights [N * H, L, K]."""
    _, N, H, L, d = part.shape
    query, keys = _query_and_keys(part, prompt_keys, prompt_N)
    key, value = keys.flatten(1, 2)
    mask = _mask(L, keys.shape[3], 0 if prompt_keys is None else prompt_keys.shape[3], part)
    weight = torch.baddbmm(mask, query, key.mT, alpha=scale).softmax(-1)
    mixed = torch.bmm(weight, value).view(N, H, L, d).transpose(1, 2)
    return mixed.reshape(N, L, H * d), (query, keys, weight)


def _query_and_keys(part: Tensor, prompt_keys: Tensor | None, prompt_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries [N * H, L, d], and keys and values [2, N, H, K, d] with those of the prompt in front.

    `part` is a view [3, N, H, L, d]; `prompt_keys` is [2, R * G, H, P, d].
    """
    _, N, H, L, d = part.shape
    P = 0 if prompt_keys is None else prompt_keys.shape[3]
    K = max(P + L, FEWEST_KEYS)
    keys = part.new_empty(2, N, H, K, d)
    keys[:, :, :, P : P + L] = part[1:]
    if K > P + L:
        keys[:, :, :, P + L :].zero_()
    if prompt_keys is not None and prompt_N is not None:
        keys[:, :, :, :P] = prompt_keys.index_select(1, prompt_N)
    return part[0].reshape(N * H, L, d), keys


def _mask(length: int, keys: int, before: int, like: Tensor) -> Tensor:
    """What to add to scores [L, K]: 0 where key <= before + query, minus infinity elsewhere."""
    return like.new_full((length, keys), float("-inf")).triu(before + 1)
