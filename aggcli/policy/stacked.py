"""The stacked small transformer as a policy: R independent parameter sets, a few runs at a time in one batched pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.policy.forward import Forward, make_forward
from aggcli.policy.groups import SMALL_WIDTH, groups_of, threads_for
from aggcli.policy.protocol import Noise, Sampled, Shards
from aggcli.policy.sampling import sample
from aggcli.policy.transformer import Parameters, PolicyConfig, run_of, stacked
from aggcli.policy.weights import Optimizer, Weights, weights_of
from aggcli.world import World

RUNS_AT_ONCE = 10
"""Runs of one pass: enough that the work outweighs the calls, few enough for a core's cache."""
FEWEST_APART = 256
"""See `Policy.fewest_apart`: fewer rows cost less to differentiate than another pass."""


@dataclass(frozen=True, eq=False)
class SmallStart:
    """`initial`: the parameters of one run, on the device and in the arithmetic of training; `prompt_length`: that of every
    row, where they share one (rows are then packed)."""

    shape: PolicyConfig
    initial: Parameters
    config: RunConfig
    prompt_length: int | None

    @property
    def is_small(self) -> bool:
        return self.shape.width < SMALL_WIDTH and self.initial["head"].device.type == "cpu"

    def on(self, device: torch.device) -> SmallStart:
        """See `Start.on`."""
        return replace(self, initial={name: value.to(device) for name, value in self.initial.items()})

    def threads(self) -> AbstractContextManager[None]:
        return threads_for(self.shape.width)

    def stack(self, lr: Sequence[float], world: World) -> StackedTransformer:
        """See `Start.stack`."""
        return StackedTransformer(self, lr, world)


class StackedTransformer:
    """See `Policy`. `weights`: the parameters of all runs, flat [R, Q] and by name."""

    def __init__(self, start: SmallStart, lr: Sequence[float], world: World) -> None:
        self.start, self.world, self.shards = start, world, Shards()
        self._take(weights_of(stacked(start.initial, len(lr))))
        self.optimizer = Optimizer(self.weights.flat_RQ, lr, start.config.training)

    def _take(self, weights: Weights) -> None:
        """Have these parameters; the runs of one pass, and the leaves that their gradients are taken by."""
        self.weights = weights
        self._groups = [
            (group, _leaves(run_of(weights.parameters, group)))
            for group in groups_of(len(weights.flat_RQ), RUNS_AT_ONCE, weights.flat_RQ.device)
        ]

    @property
    def device(self) -> torch.device:
        return self.weights.flat_RQ.device

    @property
    def flat_RQ(self) -> Tensor:
        """See `Policy.flat_RQ`."""
        return self.weights.flat_RQ

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.flat_RQ.dtype

    @property
    def fewest_apart(self) -> int:
        """See `Policy.fewest_apart`."""
        return FEWEST_APART

    def threads(self) -> AbstractContextManager[None]:
        """See `Policy.threads`."""
        return self.start.threads()

    def sample(
        self, prompts_RPL: Tensor, prompt_length_RP: Tensor, noise: Noise, limit: int, *, end_id: int, pad_id: int
    ) -> Sampled:
        """See `Policy.sample`; all prompts are as long as their rows."""
        if not noise.count:
            return Sampled.none(len(prompts_RPL))
        drawn = sample(
            self.weights.parameters,
            self.start.shape,
            prompts_RPL.to(self.device),
            noise.uniforms(limit).to(self.device),
            end_id=end_id,
            pad_id=pad_id,
            temperature=self.start.config.training.temperature,
        )
        return Sampled(drawn.tokens_RBL.cpu(), drawn.length_RB.cpu(), drawn.log_probs_RBL.cpu(), drawn.truncated_RB.cpu())

    def passes(self, *, reference: bool = False) -> Iterator[_SomeRuns]:
        """See `Policy.passes`."""
        for group, own in self._groups:
            if reference:
                own = _leaves(stacked(self.start.initial, group.stop - group.start))
            yield _SomeRuns(group, own, self._forward)

    @cached_property
    def _forward(self) -> Forward:
        start = self.start
        return make_forward(start.shape, start.prompt_length, start.config, start.config.layout.cp, self.world)

    def no_gradient(self) -> Tensor:
        """See `Policy.no_gradient`."""
        return torch.zeros_like(self.weights.flat_RQ)

    def summed(self, gradient_RQ: Tensor, world: World) -> Tensor:
        """See `Policy.summed`."""
        return world.add_up(gradient_RQ)

    def step(self, gradient_RQ: Tensor, norm_R: Tensor, stepping_R: Tensor) -> None:
        """See `Policy.step`."""
        self.optimizer.step(self.weights.flat_RQ, gradient_RQ, norm_R, stepping_R.tolist())

    def sizes(self) -> dict[str, int]:
        """See `Policy.sizes`."""
        return {name: value[0].numel() for name, value in self.weights.parameters.items()}

    def keep(self, runs_R: Tensor) -> None:
        """See `Policy.keep`."""
        self._take(weights_of({name: value[runs_R] for name, value in self.weights.parameters.items()}))
        self.optimizer.keep(runs_R)

    def state(self) -> dict[str, Tensor]:
        """See `Policy.state`."""
        moments = {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        return {"parameters": self.weights.flat_RQ, **moments}

    def load(self, state: dict[str, Tensor]) -> None:
        """See `Policy.load`."""
        self.weights.flat_RQ.copy_(state["parameters"])
        moments = {name.removeprefix("optimizer."): value for name, value in state.items() if "." in name}
        self.optimizer.load({name: value.to(self.device) for name, value in moments.items()})


def _leaves(parameters: Parameters) -> Parameters:
    """The same numbers, as leaves of autograd's graph."""
    return {name: value.detach().requires_grad_() for name, value in parameters.items()}


@dataclass(frozen=True, eq=False)
class _SomeRuns:
    """See `Pass`."""

    runs: slice
    parameters: Parameters
    forward: Forward

    def log_probs(self, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        device = self.parameters["head"].device
        return self.forward(self.parameters, tokens_RBL.to(device), prompt_RB.to(device), length_RB.to(device))

    def add_gradient(self, loss: Tensor, gradient_RQ: Tensor, *, is_first: bool = False, is_last: bool = True) -> None:
        parts = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=not is_last)
        own_RQ, flat = gradient_RQ[self.runs], [part.flatten(1) for part in parts]
        if is_first:
            torch.cat(flat, 1, out=own_RQ)
        else:
            own_RQ.add_(torch.cat(flat, 1))
