"""Context parallelism: which tokens of a row a rank holds (the zig-zag split), and what crosses between the ranks of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aggcli.world import World

NOWHERE = 2**30
"""The position of a place that stands in no row: every token is before it, and it is before none."""


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """The W places of each row that a rank holds: `tokens_RBW` there, `position_RBW` in the row (`NOWHERE` outside of it),
    `target_RBW` the token that is predicted there. `at` (run, row, place) are those that predict a response token, `to` (run,
    row, column) is which one."""

    tokens_RBW: Tensor
    position_RBW: Tensor
    target_RBW: Tensor
    at: tuple[Tensor, Tensor, Tensor]
    to: tuple[Tensor, Tensor, Tensor]
    columns: int

    @property
    def owned_RBC(self) -> Tensor:
        """Which response tokens this rank computes."""
        owned_RBC = torch.zeros(*self.tokens_RBW.shape[:2], self.columns, dtype=torch.bool, device=self.tokens_RBW.device)
        owned_RBC[self.to] = True
        return owned_RBC

    def spread(self, value_T: Tensor) -> Tensor:
        """Values at the places `at` -> [R, B, C], 0 at the tokens of other ranks."""
        zeros = torch.zeros(*self.tokens_RBW.shape[:2], self.columns, dtype=value_T.dtype, device=value_T.device)
        return zeros.index_put(self.to, value_T)


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share rows: rank c of `world` holds chunks c and 2 * size - 1 - c of each row of prompt and response."""

    world: World

    def own(self, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor) -> OwnTokens:
        """What this rank holds of right-padded rows of prompt and response."""
        total_RB = length_RB + prompt_RB
        place_RBW, real_RBW = self._places(total_RB)
        last = tokens_RBL.shape[-1] - 1
        column_RBW = place_RBW + 1 - prompt_RB[:, :, None]
        counts_RBW = real_RBW & (column_RBW >= 0) & (column_RBW < length_RB[:, :, None])
        run, row, at = counts_RBW.nonzero(as_tuple=True)
        return OwnTokens(
            tokens_RBL.gather(2, place_RBW.clamp(max=last)),
            torch.where(real_RBW, place_RBW, NOWHERE),
            tokens_RBL.gather(2, (place_RBW + 1).clamp(max=last)),
            (run, row, at),
            (run, row, column_RBW[counts_RBW]),
            max(int(length_RB.max()), 1),
        )

    def _places(self, total_RB: Tensor) -> tuple[Tensor, Tensor]:
        """Positions that this rank holds [R, B, 2 * W], and which of them exist; W fits the longest row of the micro-batch."""
        size, rank = self.world.size, self.world.rank
        chunk_RB1 = (-(-total_RB // (2 * size)))[:, :, None]
        offset_W = torch.arange(max(int(chunk_RB1.max()), 1), device=total_RB.device)
        place = torch.cat([rank * chunk_RB1 + offset_W, (2 * size - 1 - rank) * chunk_RB1 + offset_W], -1)
        inside = (offset_W < chunk_RB1).repeat(1, 1, 2)
        return place, inside & (place < total_RB[:, :, None])

    def joined(self, own: Tensor, dim: int) -> Tensor:
        """Every rank's tensor along one axis, differentiable. bfloat16 crosses in float32, since gradients are added up."""
        whole: Any = _GatherAlong.apply(own.float() if own.dtype == torch.bfloat16 else own, dim, self.world)
        return whole


class _GatherAlong(torch.autograd.Function):
    """Concatenate every rank's tensor along one axis; backward, each rank gets the sum of all ranks' gradients of its part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, world: World) -> Tensor:
        ctx.dim, ctx.world, ctx.size = dim, world, own.shape[dim]
        return torch.cat(world.tensors(own), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole = ctx.world.add_up(gradients[0].contiguous().clone())
        return whole.narrow(ctx.dim, ctx.world.rank * ctx.size, ctx.size), None, None
