"""A user's own pg_loss reducer, with slime's signature, as token weights.

`fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)` returns a callable on the flat per-token tensor.
The gradient of its output with respect to its input *is* its weight vector.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from aggcli.errors import RolloutError, SettingError
from aggcli.rollouts.batch import RolloutBatch

Reducer = Callable[[list[int], list[int], list[Tensor], bool], Callable[[Tensor], Tensor]]


def load_reducer(path: str) -> Reducer:
    """Import `pkg.mod:fn` (the current folder is on the path). Raises `SettingError` when there is no such function."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise SettingError(f"--custom-pg-loss-reducer-function-path {path}: must be written pkg.mod:fn")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except (Exception, SystemExit) as error:  # a user's module may do anything when it is imported
        what = f"{type(error).__name__}: {error}"
        raise SettingError(f"--custom-pg-loss-reducer-function-path {path}: cannot import it ({what})") from error
    if not callable(function):
        raise SettingError(f"--custom-pg-loss-reducer-function-path {path}: {module_name} has no function {name}")
    return cast(Reducer, function)


def reducer_weights(reducer: Reducer, batch: RolloutBatch, *, calculate_per_token_loss: bool) -> Tensor:
    """The weights [T] of a reducer that is called once on the whole step, by the gradient of its output.

    Weights on masked-out tokens are dropped: what lies under the mask never reaches a number.
    Raises `RolloutError` when the reducer fails, returns no scalar, is not finite or is not linear in the per-token losses.
    """
    masks = [mask.to(torch.float64) for mask in batch.loss_mask_T.split(batch.response_length_S.tolist())]
    lengths = batch.total_length_S.tolist(), batch.response_length_S.tolist()
    tokens = batch.loss_mask_T.numel()
    generator = torch.Generator().manual_seed(0)
    probes = [torch.ones(tokens), torch.randn(tokens, generator=generator)]
    weights = []
    for probe in probes:
        x_T = torch.where(batch.loss_mask_T, probe.double(), 0.0).requires_grad_()
        try:
            value = reducer(*lengths, [mask.clone() for mask in masks], calculate_per_token_loss)(x_T)
            (weight_T,) = torch.autograd.grad(value, x_T, allow_unused=True)
        except (Exception, SystemExit) as error:  # a user's code may raise anything; it is the user's to mend
            raise RolloutError(f"{batch.name}: the custom reducer failed: {type(error).__name__}: {error}") from error
        weight_T = torch.zeros_like(x_T) if weight_T is None else weight_T
        weights.append(torch.where(batch.loss_mask_T, weight_T, 0.0))
        if not torch.isfinite(weights[-1]).all():
            raise RolloutError(f"{batch.name}: the custom reducer gives weights that are not finite")
        if not torch.allclose(value.detach().double(), torch.dot(weights[-1], x_T.detach()), rtol=1e-6, atol=1e-12):
            raise RolloutError(f"{batch.name}: the custom reducer is not linear in the per-token losses; it has no weights")
    if not torch.allclose(weights[0], weights[1], rtol=1e-6, atol=1e-12):
        raise RolloutError(f"{batch.name}: the custom reducer is not linear in the per-token losses; it has no weights")
    return weights[0]
