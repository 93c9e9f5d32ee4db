"""Attention over packed rows, with its backward pass by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.policy.kernels import attended
from aggcli.policy.packing import Packing


@dataclass(frozen=True)
class PackedAttention:
    """See `Attention`: over flat lists of tokens, each over what it goes on from.

    Matrix products are batched over pieces and heads; at these sizes they cost a twentieth of the fused attention kernels,
    which pay per row and head.
    """

    packing: Packing
    heads: int

    def forward(self, qkv_RTX: Tensor, wanted: Tensor | None, *, keeps: bool) -> tuple[Tensor, Sequence[Tensor]]:
        R, T, X = qkv_RTX.shape
        flat_MX = qkv_RTX.reshape(R * T, X)
        kept: list[Tensor] = []
        mixed: list[Tensor] = []
        for pieces in self.packing.bins:
            N, L = pieces.token_NL.shape
            part = flat_MX.index_select(0, pieces.token_NL.flatten()).view(N, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scale = part.shape[-1] ** -0.5
            mixed_NQD, own, weight = attended(part, pieces.mask_N1QL, scale=scale, only_seen=pieces.only_seen)
            mixed.append(mixed_NQD.view(-1, X // 3))
            kept += [own, weight] if keeps else []
        together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return together.index_select(0, self._taken(wanted)).view(R, -1, X // 3), kept

    def backward(self, grad_RKD: Tensor, wanted: Tensor | None, kept: Sequence[Tensor]) -> Tensor:
        packing, heads, D = self.packing, self.heads, grad_RKD.shape[2]
        R, T = packing.taken_RT.shape
        sizes = [pieces.token_NL[:, pieces.only_seen :].numel() for pieces in packing.bins]
        grad_mixed = grad_RKD.new_zeros(sum(sizes), D).index_add_(0, self._taken(wanted), grad_RKD.reshape(-1, D))
        grad_qkv = grad_RKD.new_zeros(R * T, 3 * D)
        of_bins = zip(packing.bins, kept[::2], kept[1::2], grad_mixed.split(sizes), strict=True)
        for pieces, own, weight, grad_out in of_bins:
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
        return grad_qkv.view(R, T, -1)

    def _taken(self, wanted: Tensor | None) -> Tensor:
        """Where the attention of these tokens is, of every run."""
        taken_RT = self.packing.taken_RT
        return (taken_RT if wanted is None else taken_RT.index_select(1, wanted)).flatten()
