"""A stack of runs that train as one batch: what differs from run to run, and the parameters and moments they carry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig, TrainingConfig
from aggcli.policy.transformer import Parameters
from aggcli.rules import Rule


@dataclass(frozen=True)
class RunSpec:
    """One run of a stack. Everything that is not here is the same for all runs of the stack."""

    name: str
    """Where its records go, relative to the results directory."""
    seed: int
    objective: ObjectiveConfig
    lr: float

    @property
    def rule(self) -> Rule:
        """How its policy loss is aggregated."""
        return self.objective.loss_aggregation

    @property
    def mode(self) -> str:
        """What that rule is called."""
        return self.rule.name


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of R runs twice: `flat_RP` [R, numbers of a run] is what the optimizer updates; `parameters` are the
    contiguous leaves that forward passes read and gradients are taken by, brought up to date by `refresh`."""

    flat_RP: Tensor
    parameters: Parameters

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the flat numbers into the leaves."""
        start = 0
        for value in self.parameters.values():
            size = math.prod(value.shape[1:])
            value.copy_(self.flat_RP[:, start : start + size].view(value.shape))
            start += size


def weights_of(parameters: Parameters) -> Weights:
    """Copies of stacked parameters [R, ...], flat and as leaves."""
    flat_RP = torch.cat([value.detach().flatten(1) for value in parameters.values()], dim=1)
    return Weights(flat_RP, {name: value.detach().clone().requires_grad_() for name, value in parameters.items()})


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) or SGD on a stack: every run has its own learning rate, clipping and step count.

    `flat_RP` is updated in place; runs that are not `stepping` keep parameters and moments untouched, to the bit.
    """

    def __init__(self, flat_RP: Tensor, lr: Sequence[float], training: TrainingConfig) -> None:
        self.training = training
        self.lr_R = torch.tensor(lr, dtype=torch.float64, device=flat_RP.device)
        self.steps_R = torch.zeros(len(lr), dtype=torch.float64, device=flat_RP.device)
        adaptive = training.optimizer == "adamw"
        self.mean_RP = torch.zeros_like(flat_RP) if adaptive else torch.zeros(0)
        self.square_RP = torch.zeros_like(flat_RP) if adaptive else torch.zeros(0)

    @torch.no_grad()
    def step(self, flat_RP: Tensor, gradient_RP: Tensor, stepping_R: Tensor) -> Tensor:
        """Clip, update, and return the norm of each run's gradient before clipping, float64 [R]."""
        training = self.training
        norm_R = torch.linalg.vector_norm(gradient_RP, dim=1, dtype=torch.float64)
        if training.clip_grad:
            shrink_R = (training.clip_grad / norm_R.clamp(min=1e-30)).clamp(max=1.0)
            gradient_RP = gradient_RP * shrink_R.to(gradient_RP.dtype)[:, None]
        gradient_RP = torch.where(stepping_R[:, None], gradient_RP, 0.0)
        self.steps_R += stepping_R
        rate_R1 = self._rates(stepping_R).to(flat_RP.dtype)[:, None]
        if training.weight_decay:
            flat_RP.mul_(1 - rate_R1 * training.weight_decay)
        if training.optimizer == "sgd":
            flat_RP.sub_(rate_R1 * gradient_RP)
        else:
            self._adam(flat_RP, gradient_RP, rate_R1, stepping_R)
        return norm_R

    def _rates(self, stepping_R: Tensor) -> Tensor:
        """Learning rate of each run for this step, warmed up linearly; 0 where a run does not step."""
        warmup = self.training.lr_warmup_steps
        grown_R = (self.steps_R / warmup).clamp(max=1.0) if warmup else torch.ones_like(self.steps_R)
        return self.lr_R * grown_R * stepping_R

    def _adam(self, flat_RP: Tensor, gradient_RP: Tensor, rate_R1: Tensor, stepping_R: Tensor) -> None:
        """A run that does not step has decay 1, so its moments stay; its rate is 0, so its parameters do."""
        training, dtype = self.training, flat_RP.dtype
        moving_R1 = stepping_R.to(dtype)[:, None]
        beta1_R1 = 1 - (1 - training.adam_beta1) * moving_R1
        beta2_R1 = 1 - (1 - training.adam_beta2) * moving_R1
        self.mean_RP.mul_(beta1_R1).addcmul_(gradient_RP, 1 - beta1_R1)
        self.square_RP.mul_(beta2_R1).addcmul_(gradient_RP * gradient_RP, 1 - beta2_R1)
        taken_R = self.steps_R.clamp(min=1)
        unbias1_R1 = (1 - training.adam_beta1**taken_R).to(dtype)[:, None]
        unbias2_R1 = (1 - training.adam_beta2**taken_R).sqrt().to(dtype)[:, None]
        denominator_RP = self.square_RP.sqrt().div_(unbias2_R1).add_(training.adam_eps)
        flat_RP.sub_(self.mean_RP.div(denominator_RP).mul_(rate_R1 / unbias1_R1))

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint."""
        return {"lr_R": self.lr_R, "steps_R": self.steps_R, "mean_RP": self.mean_RP, "square_RP": self.square_RP}

    def load(self, state: dict[str, Tensor]) -> None:
        self.lr_R, self.steps_R = state["lr_R"], state["steps_R"]
        self.mean_RP, self.square_RP = state["mean_RP"], state["square_RP"]

    def keep(self, runs: Tensor) -> None:
        """Drop all runs but these (positions)."""
        self.lr_R, self.steps_R = self.lr_R[runs], self.steps_R[runs]
        if self.training.optimizer == "adamw":
            self.mean_RP, self.square_RP = self.mean_RP[runs], self.square_RP[runs]
