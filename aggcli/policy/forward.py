"""The forward pass that a rank runs: whole rows, or its zig-zag share of each row with context parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.policy.context import ContextRanks
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
    ranks = ContextRanks(world.split(cp))

    def shares(
        parameters: Parameters, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        own = ranks.own(tokens_RBL, prompt_RB, length_RB)

        def gather(key: Tensor, value: Tensor, position_RBW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return ranks.joined(key, 3), ranks.joined(value, 3), torch.cat(ranks.world.tensors(position_RBW), 2)

        with torch.autocast(tokens_RBL.device.type, torch.bfloat16, enabled=autocast):
            hidden_RBWD = hidden(parameters, policy, own.tokens_RBW, own.position_RBW, gather)
            log_prob, entropy = log_probs_of(parameters, hidden_RBWD, own.target_RBW, temperature=temperature, entropy=True)
        assert entropy is not None
        log_prob, entropy = (value.to(parameters["head"].dtype)[own.at] for value in (log_prob, entropy))
        return own.spread(log_prob), own.spread(entropy), own.owned_RBC

    return shares
