"""The parameters of a stack of runs and how they are updated: one AdamW or SGD step for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from aggcli.config import TrainingConfig
from aggcli.policy.transformer import Parameters


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of R runs: `flat_RQ` [R, numbers of a run] is what the optimizer updates; `parameters` are its parts by
    name, [R, ...] each, as views."""

    flat_RQ: Tensor
    parameters: Parameters


def weights_of(parameters: Parameters) -> Weights:
    """A copy of stacked parameters [R, ...]: in the order of their names, wherever they come from, so that one process reads
    the flat numbers of another's checkpoint as they were."""
    parameters = dict(sorted(parameters.items()))
    flat_RQ = torch.cat([value.detach().flatten(1) for value in parameters.values()], dim=1)
    parts = flat_RQ.split([math.prod(value.shape[1:]) for value in parameters.values()], dim=1)
    named = zip(parameters.items(), parts, strict=True)
    return Weights(flat_RQ, {name: part.view(value.shape) for (name, value), part in named})


class Optimizer:
    """torch's AdamW (Loshchilov and Hutter, 2019) or SGD on a stack: every run has its own learning rate, clipping and step
    count.

    `flat_RQ` is updated in place; runs that are not `stepping` keep parameters and moments untouched, to the bit.
    """

    def __init__(self, flat_RQ: Tensor, lr: Sequence[float], training: TrainingConfig) -> None:
        self.training = training
        self.lr, self.taken = list(lr), [0] * len(lr)
        adaptive = training.optimizer == "adamw"
        self.mean_RQ = torch.zeros_like(flat_RQ) if adaptive else torch.zeros(0)
        self.square_RQ = torch.zeros_like(flat_RQ) if adaptive else torch.zeros(0)

    @torch.no_grad()
    def step(self, flat_RQ: Tensor, gradient_RQ: Tensor, norm_R: Tensor, stepping: Sequence[bool]) -> None:
        """Clip each run's gradient by its norm, float64 [R], in its place, and update the runs that step."""
        training = self.training
        if training.clip_grad:
            shrink_R = (training.clip_grad / norm_R.clamp(min=1e-30)).clamp(max=1.0)
            gradient_RQ.mul_(shrink_R.to(gradient_RQ.dtype)[:, None])
        by_rate: dict[float, list[int]] = {}
        for run, steps in enumerate(stepping):
            if steps:
                self.taken[run] += 1
                rate = self.lr[run] * min(self.taken[run] / (training.lr_warmup_steps or 1), 1.0)
                by_rate.setdefault(rate, []).append(run)
        for rate, runs in by_rate.items():
            self._update(runs, rate, flat_RQ, gradient_RQ)

    def _update(self, runs: Sequence[int], rate: float, flat_RQ: Tensor, gradient_RQ: Tensor) -> None:
        """Update these runs, whose next step is counted already, at one learning rate."""
        training = self.training
        if training.optimizer == "sgd":
            for run in runs:
                flat_RQ[run].mul_(1 - rate * training.weight_decay).sub_(rate * gradient_RQ[run])
            return
        adamw(
            [flat_RQ[run] for run in runs],
            [gradient_RQ[run] for run in runs],
            [self.mean_RQ[run] for run in runs],
            [self.square_RQ[run] for run in runs],
            [],
            [torch.tensor(float(self.taken[run] - 1), device=flat_RQ.device) for run in runs],  # which is counted up
            fused=True,
            amsgrad=False,
            beta1=training.adam_beta1,
            beta2=training.adam_beta2,
            lr=rate,
            weight_decay=training.weight_decay,
            eps=training.adam_eps,
            maximize=False,
        )

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint."""
        counted = {"lr_R": torch.tensor(self.lr, dtype=torch.float64), "steps_R": torch.tensor(self.taken, dtype=torch.float64)}
        return {**counted, "mean_RQ": self.mean_RQ, "square_RQ": self.square_RQ}

    def load(self, state: dict[str, Tensor]) -> None:
        self.lr, self.taken = state["lr_R"].tolist(), state["steps_R"].long().tolist()
        self.mean_RQ, self.square_RQ = state["mean_RQ"], state["square_RQ"]

    def keep(self, runs: Tensor) -> None:
        """Drop all runs but these (positions)."""
        self.lr, self.taken = [self.lr[run] for run in runs.tolist()], [self.taken[run] for run in runs.tolist()]
        if self.training.optimizer == "adamw":
            self.mean_RQ, self.square_RQ = self.mean_RQ[runs], self.square_RQ[runs]
