"""The forward pass that a rank runs: whole rows, or its zig-zag share of each row with context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.policy.log_probs import log_probs_of, response_log_probs
from aggcli.policy.transformer import Parameters, PolicyConfig, hidden
from aggcli.world import World

Forward = Callable[[Parameters, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""(parameters, tokens [R, B, L], prompt length [R, B], response length [R, B]) -> log-probabilities and entropies [R, B, C]
in nats, and which of them this context-parallel rank has computed (None: all)."""


def make_forward(policy: PolicyConfig, prompt_length: int | None, config: RunConfig, cp: int, world: World) -> Forward:
    """The forward pass of this rank. `prompt_length`: that of every row, where they share one (rows are then packed).

    Collective with `cp` > 1: every rank of the world must call it.
    """
    temperature = config.training.temperature
    autocast = config.dtype == "bfloat16"
    if cp == 1:

        def rows(
            parameters: Parameters, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            prompt = prompt_RB if prompt_length is None else prompt_length
            with torch.autocast(tokens_RBL.device.type, torch.bfloat16, enabled=autocast):
                log_probs, entropy = response_log_probs(
                    parameters, policy, tokens_RBL, prompt, length_RB, temperature=temperature, entropy=True
                )
            assert entropy is not None
            return log_probs.to(parameters["head"].dtype), entropy.to(parameters["head"].dtype), None

        return rows
    shard = ContextShard(policy, temperature, cp, world.split(cp), autocast)
    return shard.forward


class ContextShard:
    """Rank c of `cp` holds chunks c and 2*cp-1-c of each sequence of prompt and response; keys and values are gathered."""

    def __init__(self, policy: PolicyConfig, temperature: float, cp: int, world: World, autocast: bool) -> None:
        self.policy, self.temperature = policy, temperature
        self.cp, self.world, self.autocast = cp, world, autocast

    def forward(
        self, parameters: Parameters, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies [R, B, C] of the response tokens this rank computes, and which those are."""
        total_RB = length_RB + prompt_RB
        place_RBL, real_RBL = self._places(total_RB)
        last = tokens_RBL.shape[-1] - 1
        own_RBL = tokens_RBL.gather(2, place_RBL.clamp(max=last))
        positions_RBL = torch.where(real_RBL, place_RBL, self.policy.max_length)
        target_RBL = tokens_RBL.gather(2, (place_RBL + 1).clamp(max=last))
        with torch.autocast(tokens_RBL.device.type, torch.bfloat16, enabled=self.autocast):
            hidden_RBLD = hidden(parameters, self.policy, own_RBL, positions_RBL, self._gather)
            log_prob, entropy = log_probs_of(parameters, hidden_RBLD, target_RBL, temperature=self.temperature, entropy=True)
        assert entropy is not None
        log_prob, entropy = log_prob.to(parameters["head"].dtype), entropy.to(parameters["head"].dtype)
        column_RBL = place_RBL + 1 - prompt_RB[:, :, None]
        counts_RBL = real_RBL & (column_RBL >= 0) & (column_RBL < length_RB[:, :, None])
        columns = max(int(length_RB.max()), 1)
        owned = torch.zeros(*length_RB.shape, columns, dtype=torch.bool, device=tokens_RBL.device)
        run, row, at = counts_RBL.nonzero(as_tuple=True)
        to = (run, row, column_RBL[counts_RBL])
        owned[to] = True
        zeros = torch.zeros(owned.shape, dtype=log_prob.dtype, device=tokens_RBL.device)
        source = (run, row, at)
        return zeros.index_put(to, log_prob[source]), zeros.index_put(to, entropy[source]), owned

    def _places(self, total_RB: Tensor) -> tuple[Tensor, Tensor]:
        """Positions that this rank holds [R, B, 2 * W], and which of them exist; W fits the longest row of the micro-batch."""
        chunk_RB1 = (-(-total_RB // (2 * self.cp)))[:, :, None]
        offset_W = torch.arange(int(chunk_RB1.max()), device=total_RB.device)
        first, second = self.world.rank, 2 * self.cp - 1 - self.world.rank
        place = torch.cat([first * chunk_RB1 + offset_W, second * chunk_RB1 + offset_W], -1)
        inside = (offset_W < chunk_RB1).repeat(1, 1, 2)
        return place, inside & (place < total_RB[:, :, None])

    def _gather(self, key: Tensor, value: Tensor, positions_RBL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the whole sequence. They cross in float32 at least, since their gradients are added up over ranks."""
        if key.dtype == torch.bfloat16:
            key, value = key.float(), value.float()
        return (
            _GatherAlong.apply(key, 3, self.world),  # pyright: ignore[reportReturnType]
            _GatherAlong.apply(value, 3, self.world),
            torch.cat(self.world.tensors(positions_RBL), 2),
        )


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
