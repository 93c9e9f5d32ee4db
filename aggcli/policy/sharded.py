"""A causal language model cut over the ranks of a world by FSDP2: each holds its part of every parameter, of the gradient and
of the optimizer's moments. Whole are only the layers that compute, and the model while it is sampled from.

The weights of tokens are those of the whole step, so gradients are summed over ranks, never averaged. With context parallelism
(Liu et al., "Ring Attention", 2023, without the ring) a rank computes its tokens of each row, and keys and values are gathered.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from aggcli.config import RunConfig
from aggcli.errors import SettingError
from aggcli.policy.causal_lm import (
    CausalPolicy,
    CausalStart,
    body,
    need_known_logits,
    project,
    row_log_probs,
    told_memory,
    trained,
    vocabulary_of,
)
from aggcli.policy.chunked import chunked_log_probs
from aggcli.policy.context import NOWHERE, ContextRanks
from aggcli.policy.protocol import Pass, Shards
from aggcli.world import World, exchange

ACROSS = "aggcli_across_ranks"
"""The name under which transformers knows attention over the ranks of a row."""
SAME = 1e-4
"""How far log-probabilities in nats of a row on several ranks may be from those of one, in the check before training."""


class ShardedStart:
    """Where runs of a language model begin that is cut over ranks. `module`: the model in main memory, whole until the first
    stack. Raises `SettingError` for a model whose logits are not a projection of its last hidden states."""

    def __init__(self, module: Any, config: RunConfig, device: torch.device) -> None:
        need_known_logits(module)
        self.module, self.config, self.device = module, config, device
        self._model: ShardedModel | None = None

    @property
    def is_small(self) -> bool:
        return False

    def on(self, device: torch.device) -> ShardedStart:
        """See `Start.on`: each rank has its device from the beginning."""
        return self

    def threads(self) -> AbstractContextManager[None]:
        """See `Policy.threads`."""
        return nullcontext()

    def stack(self, lr: Sequence[float], world: World) -> ShardedPolicy:
        """See `Start.stack`. Every rank of the world must call it, and always of the same world. Raises `SettingError`."""
        if self._model is None:
            self._model = ShardedModel(self.module, self.config, self.device, world)
        assert self._model.world == world
        return ShardedPolicy(self._model, lr)


class ShardedModel:
    """The model cut over the ranks of a world. `start`: what this rank holds of it, as it begins."""

    def __init__(self, module: Any, config: RunConfig, device: torch.device, world: World) -> None:
        self.module, self.world, self.device = module, world, device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # FSDP computes on the current one
        self.hull = _hull(module, device)
        context = None if config.layout.cp == 1 else _across_ranks(module, ContextRanks(world.split(config.layout.cp)))
        self.rows: Any = _Rows(module, config, world, context)
        self.mesh = world.mesh(device)
        for part in [*_layers(module), self.rows]:
            whole = cast(FSDPModule, fully_shard(part, mesh=self.mesh, reshard_after_forward=True))
            whole.set_gradient_divide_factor(1.0)
            whole.set_force_sum_reduction_for_comms(True)  # gloo has no other
        with torch.no_grad():
            initial_Q = torch.cat([value.to_local().flatten() for value in self.trained.values()])
        self.start = CausalStart(module, initial_Q, config)

    @cached_property
    def trained(self) -> dict[str, DTensor]:
        """The trained parameters by name."""
        return cast(dict[str, DTensor], trained(self.module))

    @torch.no_grad()
    def hold(self, value_Q: Tensor) -> None:
        """Let these be the numbers of the trained parameters that this rank holds."""
        start = 0
        for value in self.trained.values():
            own = value.to_local()
            own.copy_(value_Q[start : start + own.numel()].view(own.shape))
            start += own.numel()

    @contextmanager
    def whole(self, value_Q: Tensor) -> Iterator[Any]:
        """The model with all numbers, those of the trained parameters from all ranks' `value_Q`."""
        self.hold(value_Q)
        inside = list(self.hull.parameters())
        try:
            with torch.no_grad(), exchange(computes=True), told_memory():
                for mine, cut in zip(inside, self.module.parameters(), strict=True):
                    mine.data = cut.full_tensor()
            yield self.hull
        finally:
            for mine in inside:
                mine.data = mine.data.new_empty(0)


class ShardedPolicy(CausalPolicy):
    """See `Policy`. `flat_RQ`: what this rank holds of the trained parameters of each run, parameter after parameter."""

    def __init__(self, model: ShardedModel, lr: Sequence[float]) -> None:
        self.model = model
        super().__init__(model.start, lr, Shards(model.world))

    @contextmanager
    def _whole(self, value_Q: Tensor) -> Iterator[Any]:
        with self.model.whole(value_Q) as module:
            yield module

    def passes(self, *, reference: bool = False) -> Iterator[Pass]:
        """See `Policy.passes`: one run at a time."""
        for run in range(len(self.flat_RQ)):
            self.model.hold(self.start.initial_Q if reference else self.flat_RQ[run])
            yield _OneRun(slice(run, run + 1), self.model, self._autocast())

    def summed(self, gradient_RQ: Tensor, world: World) -> Tensor:
        """See `Policy.summed`: each backward pass has summed it."""
        return gradient_RQ

    def _shapes(self) -> dict[str, torch.Size]:
        with torch.no_grad():
            return {name: value.to_local().shape for name, value in self.model.trained.items()}

    def _to_state(self, parameter: str, value_RX: Tensor) -> Tensor:
        shape = torch.Size((len(value_RX), *self.model.trained[parameter].shape))
        stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        return DTensor.from_local(value_RX.contiguous(), self.model.mesh, [Shard(1)], shape=shape, stride=stride)

    def _from_state(self, value_RX: Tensor) -> Tensor:
        if isinstance(value_RX, DTensor):
            return value_RX.to_local()
        parts = value_RX.chunk(self.model.world.size, 1)  # as FSDP cuts
        return parts[self.model.world.rank] if self.model.world.rank < len(parts) else value_RX[:, :0]


@dataclass(frozen=True, eq=False)
class _OneRun:
    """See `Pass`."""

    runs: slice
    model: ShardedModel
    autocast: AbstractContextManager[Any]

    def log_probs(self, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        with exchange(computes=True), told_memory(), self.autocast:
            log_prob_BC, entropy_BC, owned_BC = self.model.rows(_Asked(tokens_RBL[0], prompt_RB[0], length_RB[0]))
        return log_prob_BC[None], entropy_BC[None], None if owned_BC is None else owned_BC[None]

    def add_gradient(self, loss: Tensor, gradient_RQ: Tensor, *, is_first: bool = False, is_last: bool = True) -> None:
        assert is_last
        with exchange(computes=True), told_memory():
            loss.backward()
        mine_Q, start = gradient_RQ[self.runs.start], 0
        for value in self.model.trained.values():
            size = value.to_local().numel()
            if value.grad is not None:
                own_N, found_N = mine_Q[start : start + size], cast(DTensor, value.grad).to_local().flatten()
                own_N.copy_(found_N) if is_first else own_N.add_(found_N)
                value.grad = None
            start += size


@dataclass(frozen=True, eq=False)
class _Asked:
    """Rows to be computed, see `row_log_probs`. A type of its own, since FSDP moves tensors and tuples to the device."""

    tokens_BL: Tensor
    prompt_B: Tensor
    length_B: Tensor


class _Rows(torch.nn.Module):
    """The model and its projection in one call, around which FSDP gathers what they need."""

    def __init__(self, module: Any, config: RunConfig, world: World, context: ContextRanks | None) -> None:
        super().__init__()
        self.module, self.world, self.context = module, world, context
        self.arithmetic = next(iter(trained(module).values())).dtype
        self.how = {
            "temperature": config.training.temperature,
            "entropy_gradient": bool(config.objective.entropy_coef),
        }

    def forward(self, asked: _Asked) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and entropies [B, C], and which of them this rank has computed (None: all)."""
        rows = asked.tokens_BL, asked.prompt_B, asked.length_B
        if self.context is not None:
            return context_log_probs(self.module, self.context, *rows, self.arithmetic, **self.how)
        return *row_log_probs(self.module, *rows, self.arithmetic, **self.how, world=self.world), None


def context_log_probs(
    module: Any,
    context: ContextRanks,
    tokens_BL: Tensor,
    prompt_B: Tensor,
    length_B: Tensor,
    dtype: torch.dtype,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_log_probs` of the tokens that this rank computes, 0 at the others', and which those are [B, C]. The model must
    attend by `ACROSS`."""
    device = next(module.parameters()).device
    own = context.own(*(value[None].to(device) for value in (tokens_BL, prompt_B, length_B)))
    position_BW = own.position_RBW[0]
    of_keys_BK = torch.cat(context.world.tensors(position_BW), 1)
    hidden_BWD = body(module)(
        input_ids=own.tokens_RBW[0],
        position_ids=torch.where(position_BW == NOWHERE, 0, position_BW),
        attention_mask=of_keys_BK[:, None, None, :] <= position_BW[:, None, :, None],
        use_cache=False,
    ).last_hidden_state
    log_prob_T, entropy_T = chunked_log_probs(
        lambda hidden_TD: project(module, hidden_TD),
        hidden_BWD[own.at[1:]],
        own.target_RBW[own.at],
        vocabulary_of(module),
        dtype,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )
    return own.spread(log_prob_T)[0].clone(), own.spread(entropy_T)[0].clone(), own.owned_RBC[0]  # FSDP warns of views


def _across_ranks(module: Any, context: ContextRanks) -> ContextRanks:
    """Let a model attend to what the other ranks hold of its rows. Raises `SettingError`, on all of them, where it cannot."""
    library: Any = import_module("transformers")
    attend: Any = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward

    def across(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any) -> Any:
        whole = (context.joined(own, 2).to(own.dtype) for own in (key, value))
        return attend(layer, query, *whole, attention_mask, **how)

    told = f"--cp {context.world.size}: {type(module).__name__} "
    text = module.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [
        "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    ]
    if set(kinds) != {"full_attention"}:
        raise SettingError(f"{told}has layers that do not see their whole row; leave --cp out")
    count = min(21, vocabulary_of(module))
    rows = torch.arange(count)[None], torch.tensor([2]), torch.tensor([count - 2])
    dtype = next(iter(trained(module).values())).dtype
    with torch.no_grad():
        alone_BC, _ = row_log_probs(module, *rows, dtype)
        library.AttentionInterface.register(ACROSS, across)
        module.set_attn_implementation(ACROSS)
        found_BC, _, owned_BC = context_log_probs(module, context, *rows, dtype)
    apart = float((found_BC - alone_BC)[owned_BC].abs().max()) if owned_BC.any() else 0.0
    if not context.world.max([0.0 if apart <= SAME else 1.0])[0] == 0.0:
        raise SettingError(f"{told}computes other numbers on several ranks than on one; leave --cp out")
    return context


def _layers(module: Any) -> list[Any]:
    """The layers of a model, each of which is gathered by itself."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]


def _hull(module: Any, device: torch.device) -> Any:
    """A copy of a model whose parameters hold nothing."""
    held = [(value, value.data) for value in module.parameters()]
    try:
        for value, _ in held:
            value.data = value.data.new_empty(0)
        return copy.deepcopy(module).to(device)
    finally:
        for value, numbers in held:
            value.data = numbers
