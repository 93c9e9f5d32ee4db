"""The parameters of a stack of runs and how they are updated: one AdamW or SGD step for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import TrainingConfig
from aggcli.policy.protocol import Shards
from aggcli.policy.transformer import Parameters


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of R runs twice: `flat_RQ` [R, numbers of a run] is what the optimizer updates; `parameters` are the
    contiguous leaves that forward passes read and gradients are taken by, brought up to date by `refresh`."""

    flat_RQ: Tensor
    parameters: Parameters

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the flat numbers into the leaves."""
        start = 0
        for value in self.parameters.values():
            size = math.prod(value.shape[1:])
            value.copy_(self.flat_RQ[:, start : start + size].view(value.shape))
            start += size


def weights_of(parameters: Parameters) -> Weights:
    """Copies of stacked parameters [R, ...], flat and as leaves."""
    flat_RQ = torch.cat([value.detach().flatten(1) for value in parameters.values()], dim=1)
    return Weights(flat_RQ, {name: value.detach().clone().requires_grad_() for name, value in parameters.items()})


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) or SGD on a stack: every run has its own learning rate, clipping and step count.

    `flat_RQ` is updated in place; runs that are not `stepping` keep parameters and moments untouched, to the bit. `shards`:
    where the rest of the numbers is, if `flat_RQ` is a part of them.
    """

    def __init__(self, flat_RQ: Tensor, lr: Sequence[float], training: TrainingConfig, shards: Shards = Shards()) -> None:
        self.training, self.shards = training, shards
        self.lr_R = torch.tensor(lr, dtype=torch.float64, device=flat_RQ.device)
        self.steps_R = torch.zeros(len(lr), dtype=torch.float64, device=flat_RQ.device)
        adaptive = training.optimizer == "adamw"
        self.mean_RQ = torch.zeros_like(flat_RQ) if adaptive else torch.zeros(0)
        self.square_RQ = torch.zeros_like(flat_RQ) if adaptive else torch.zeros(0)

    @torch.no_grad()
    def step(self, flat_RQ: Tensor, gradient_RQ: Tensor, stepping_R: Tensor) -> Tensor:
        """Clip, update, and return the norm of each run's gradient before clipping, float64 [R]."""
        training = self.training
        norm_R = self.shards.norm(gradient_RQ)
        if training.clip_grad:
            shrink_R = (training.clip_grad / norm_R.clamp(min=1e-30)).clamp(max=1.0)
            gradient_RQ = gradient_RQ * shrink_R.to(gradient_RQ.dtype)[:, None]
        gradient_RQ = torch.where(stepping_R[:, None], gradient_RQ, 0.0)
        self.steps_R += stepping_R
        rate_R1 = self._rates(stepping_R).to(flat_RQ.dtype)[:, None]
        if training.weight_decay:
            flat_RQ.mul_(1 - rate_R1 * training.weight_decay)
        if training.optimizer == "sgd":
            flat_RQ.sub_(rate_R1 * gradient_RQ)
        else:
            self._adam(flat_RQ, gradient_RQ, rate_R1, stepping_R)
        return norm_R

    def _rates(self, stepping_R: Tensor) -> Tensor:
        """Learning rate of each run for this step, warmed up linearly; 0 where a run does not step."""
        warmup = self.training.lr_warmup_steps
        grown_R = (self.steps_R / warmup).clamp(max=1.0) if warmup else torch.ones_like(self.steps_R)
        return self.lr_R * grown_R * stepping_R

    def _adam(self, flat_RQ: Tensor, gradient_RQ: Tensor, rate_R1: Tensor, stepping_R: Tensor) -> None:
        """A run that does not step has decay 1, so its moments stay; its rate is 0, so its parameters do."""
        training, dtype = self.training, flat_RQ.dtype
        moving_R1 = stepping_R.to(dtype)[:, None]
        beta1_R1 = 1 - (1 - training.adam_beta1) * moving_R1
        beta2_R1 = 1 - (1 - training.adam_beta2) * moving_R1
        self.mean_RQ.mul_(beta1_R1).addcmul_(gradient_RQ, 1 - beta1_R1)
        self.square_RQ.mul_(beta2_R1).addcmul_(gradient_RQ * gradient_RQ, 1 - beta2_R1)
        taken_R = self.steps_R.clamp(min=1)
        unbias1_R1 = (1 - training.adam_beta1**taken_R).to(dtype)[:, None]
        unbias2_R1 = (1 - training.adam_beta2**taken_R).sqrt().to(dtype)[:, None]
        denominator_RQ = self.square_RQ.sqrt().div_(unbias2_R1).add_(training.adam_eps)
        flat_RQ.sub_(self.mean_RQ.div(denominator_RQ).mul_(rate_R1 / unbias1_R1))

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint."""
        return {"lr_R": self.lr_R, "steps_R": self.steps_R, "mean_RQ": self.mean_RQ, "square_RQ": self.square_RQ}

    def load(self, state: dict[str, Tensor]) -> None:
        self.lr_R, self.steps_R = state["lr_R"], state["steps_R"]
        self.mean_RQ, self.square_RQ = state["mean_RQ"], state["square_RQ"]

    def keep(self, runs: Tensor) -> None:
        """Drop all runs but these (positions)."""
        self.lr_R, self.steps_R = self.lr_R[runs], self.steps_R[runs]
        if self.training.optimizer == "adamw":
            self.mean_RQ, self.square_RQ = self.mean_RQ[runs], self.square_RQ[runs]
