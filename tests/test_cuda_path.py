"""The training step keeps to one device: seen without CUDA, on fake CUDA tensors and on the meta device."""

from __future__ import annotations

import pytest
import torch

from aggcli import grid
from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout
from aggcli.policy.protocol import Shards
from aggcli.policy.weights import Optimizer, weights_of
from aggcli.rules import SAMPLE_MEAN, TOKEN_MEAN
from aggcli.training.stack import RunSpec
from aggcli.training.step import loss_of_rows, step_tokens
from aggcli.world import ALONE
from tests.fake_cuda import fake_cuda
from tests.fixtures import batch_of, fx_b


def test_the_loss_of_a_step_and_its_gradient_stay_on_the_device_of_the_policy() -> None:
    """On `meta` an operation that mixes devices fails; the loss's inputs come from the CPU, as in training."""
    settings = settings_from({"kl_coef": 0.5, "entropy_coef": 0.1, "eps_clip_c": 3.0, "kl_unbiased": True})
    step = batch_of(fx_b())
    runs = [RunSpec("sample_mean", 0, settings.objective, 1e-3)]
    given = step_tokens(step, runs, parse_layout("dp1"), torch.float32)
    own_T = torch.empty(16, device="meta", requires_grad=True)
    at, device = torch.arange(16), torch.device("meta")
    loss = loss_of_rows(own_T, torch.empty(16, device="meta"), at, step, given, settings.objective, device)
    loss.backward()
    assert loss.device.type == "meta"
    assert own_T.grad is not None
    assert own_T.grad.device.type == "meta"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_update_stays_on_the_device_of_the_policy(optimizer: str) -> None:
    training = settings_from({"optimizer": optimizer, "weight_decay": 0.1, "lr_warmup_steps": 3}).training
    with fake_cuda():
        flat_RQ = torch.empty(2, 10, device="cuda")
        taught = Optimizer(flat_RQ, [1e-3, 2e-3], training)
        gradient_RQ = torch.empty(2, 10, device="cuda")
        norm_R = Shards().norm(gradient_RQ)
        taught.step(flat_RQ, gradient_RQ, norm_R, [True, True])
        assert norm_R.device.type == flat_RQ.device.type == "cuda"
        assert all(value.device.type == "cuda" for value in taught.state().values() if value.dim() == 2)
        weights_of({"a": torch.empty(2, 3, 4, device="cuda"), "b": torch.empty(2, 5, device="cuda")})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_three_steps_on_cuda_end_where_the_cpu_ends() -> None:
    ends = {}
    for device in ("cpu", "cuda"):
        config = settings_from({"steps": 3, "dtype": "float64", "device": device, "layout_records": False})
        setup = grid.set_up(config)
        trainer = grid.trainer_of(setup, grid.runs_of(config, (SAMPLE_MEAN, TOKEN_MEAN), (0,), 32), ALONE)
        for _ in trainer.steps():
            pass
        ends[device] = trainer.policy.state()["parameters"].cpu()
    torch.testing.assert_close(ends["cuda"], ends["cpu"], rtol=1e-9, atol=1e-10)
