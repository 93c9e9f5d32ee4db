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


class Piece(Protocol):
    """Rows of equal padded length: `rows` a run of `length` tokens, each after prompt `prompt_N` (flat through the runs)."""

    @property
    def rows(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def prompt_N(self) -> Tensor: ...


class TokenLayout(Protocol):
    """A flat list of tokens: `prompts` of `prompt_length`, then the rows of each piece."""

    @property
    def prompts(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def bins(self) -> tuple[Piece, ...]: ...


class PackedAttention(Function):
    """Causal attention over a flat list: each prompt over itself, each response over its prompt and itself.

    `qkv_RTX` [R, T, 3 * D] -> [R, T, D]. Matrix products are batched over rows and heads; at these sizes they cost a
    twentieth of the fused attention kernels, which pay per row and head.
    """

    @staticmethod
    def forward(ctx: Any, qkv_RTX: Tensor, layout: TokenLayout, heads: int) -> Tensor:
        R, T, X = qkv_RTX.shape
        out_RTD = qkv_RTX.new_empty(R, T, X // 3)
        ctx.layout, ctx.heads, ctx.shape = layout, heads, qkv_RTX.shape
        saved: list[Tensor] = []
        prompt_kv = None
        for rows, length, first, prompt_N in _pieces(layout):
            part = qkv_RTX[:, first : first + rows * length].view(R, rows, length, 3, heads, -1).permute(3, 0, 1, 4, 2, 5)
            query, keys = _query_and_keys(part, prompt_kv, prompt_N)
            if prompt_kv is None:
                prompt_kv = keys[:, :, :, :length]
            key, value = keys.flatten(1, 2)
            mask = _mask(length, keys.shape[3], 0 if prompt_N is None else layout.prompt_length, qkv_RTX)
            weight = torch.baddbmm(mask, query, key.mT, alpha=query.shape[-1] ** -0.5).softmax(-1)
            _tokens(out_RTD, first, rows, length, heads).copy_(torch.bmm(weight, value).view(R, rows, heads, length, -1))
            saved += [query, keys, weight]
        ctx.save_for_backward(*saved)
        return out_RTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RTD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout, heads, (R, T, X) = ctx.layout, ctx.heads, ctx.shape
        grad_qkv = grad_RTD.new_empty(R, T, X)
        P = layout.prompt_length
        grad_prompt = None
        pieces = list(_pieces(layout))
        for i in reversed(range(len(pieces))):  # the prompts come last, when all their rows are known
            rows, length, first, prompt_N = pieces[i]
            query, keys, weight = ctx.saved_tensors[3 * i : 3 * i + 3]
            grad_out = _tokens(grad_RTD, first, rows, length, heads).contiguous().view(-1, length, query.shape[-1])
            key, value = keys.flatten(1, 2)
            grad_keys = torch.empty_like(keys)
            torch.bmm(weight.mT, grad_out, out=grad_keys[1].flatten(0, 1))
            grad_score = torch.ops.aten._softmax_backward_data(torch.bmm(grad_out, value.mT), weight, -1, weight.dtype)
            grad_score.mul_(query.shape[-1] ** -0.5)
            torch.bmm(grad_score.mT, query, out=grad_keys[0].flatten(0, 1))
            own = 0 if prompt_N is None else P
            if prompt_N is None and grad_prompt is not None:
                grad_keys[:, :, :, :P] += grad_prompt
            elif prompt_N is not None:
                if grad_prompt is None:
                    grad_prompt = keys.new_zeros(2, R * layout.prompts, heads, P, keys.shape[-1])
                grad_prompt.index_add_(1, prompt_N, grad_keys[:, :, :, :P])
            part = grad_qkv[:, first : first + rows * length].view(R, rows, length, 3, heads, -1).permute(3, 0, 1, 4, 2, 5)
            part[0].copy_(torch.bmm(grad_score, key).view(part.shape[1:]))
            part[1:].copy_(grad_keys[:, :, :, own : own + length].view(2, *part.shape[1:]))
        return grad_qkv, None, None


def _pieces(layout: TokenLayout) -> list[tuple[int, int, int, Tensor | None]]:
    """(rows, length, first token, prompt of each row) of the prompts themselves and of each bin."""
    found: list[tuple[int, int, int, Tensor | None]] = [(layout.prompts, layout.prompt_length, 0, None)]
    first = layout.prompts * layout.prompt_length
    for piece in layout.bins:
        found.append((piece.rows, piece.length, first, piece.prompt_N))
        first += piece.rows * piece.length
    return found


def _tokens(values_RTD: Tensor, first: int, rows: int, length: int, heads: int) -> Tensor:
    """A piece of a flat list as a view [R, rows, H, length, d]."""
    part = values_RTD[:, first : first + rows * length]
    return part.view(len(values_RTD), rows, length, heads, -1).transpose(2, 3)


def _query_and_keys(part: Tensor, prompt_kv: Tensor | None, prompt_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries [n, L, d], and keys and values [2, R * rows, H, K, d] with those of the prompt in front.

    `part` is a view [3, R, rows, H, L, d]; `prompt_kv` is [2, R * G, H, P, d].
    """
    _, R, rows, H, L, d = part.shape
    P = 0 if prompt_kv is None else prompt_kv.shape[3]
    K = max(P + L, FEWEST_KEYS)
    keys = part.new_empty(2, R, rows, H, K, d)
    keys[:, :, :, :, P : P + L] = part[1:]
    if K > P + L:
        keys[:, :, :, :, P + L :] = 0
    keys = keys.view(2, R * rows, H, K, d)
    if prompt_kv is not None and prompt_N is not None:
        keys[:, :, :, :P] = prompt_kv.index_select(1, prompt_N)
    return part[0].reshape(R * rows * H, L, d), keys


def _mask(length: int, keys: int, before: int, like: Tensor) -> Tensor:
    """What to add to scores [L, K]: 0 where key <= before + query, minus infinity elsewhere."""
    return like.new_full((length, keys), float("-inf")).triu(before + 1)
