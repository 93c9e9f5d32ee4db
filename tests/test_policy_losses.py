"""The policy losses against independent ones: polgrad's (gspo, cispo, ppo), the formula of SAPO by complex steps and DPPO's in
plain numbers, value and gradient; through the replay, under every mode and layout; and through the training step."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from polgrad.aggregate import Aggregation
from polgrad.losses import ClipConfig, PolicyLossConfig, RatioKind, SurrogateKind, policy_loss
from torch import Tensor

from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout
from aggcli.objective.policy_loss import averaged_log_ratio, policy_terms
from aggcli.training.stack import RunSpec
from aggcli.training.step import step_gradient, step_tokens
from aggcli.world import ALONE
from tests import closed_form
from tests.cli import aggcli, compared, exactly, per_layout, refused, write_jsonl
from tests.fixtures import MODES, Sample, batch_of, random_fanout, rules_named
from tests.test_training_update import Table

LOSSES = ("ppo", "gspo", "gmpo", "cispo", "sapo", "dppo")
LOW, HIGH = 0.1, 0.15
CLIP = ClipConfig(LOW, HIGH)
ORACLES = {
    "ppo": (RatioKind.TOKEN, SurrogateKind.PG_CLIP, CLIP),
    "gspo": (RatioKind.SEQUENCE_TOKEN, SurrogateKind.PG_CLIP, CLIP),
    "cispo": (RatioKind.TOKEN, SurrogateKind.CISPO, ClipConfig(None, HIGH)),
}


def sapo(new: complex, old: float, advantage: float) -> complex:
    """-4 / tau sigmoid(tau (r - 1)) A (arXiv:2511.20347)."""
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau / (1 + cmath.exp(-tau * (cmath.exp(new - old) - 1))) * advantage


def dppo(new: float, old: float, advantage: float, most: float = math.inf) -> tuple[float, float]:
    """Value and slope of DPPO's Binary-TV: -min(r, most) A log pi, nothing where the probability has moved with the advantage
    by more than the clip (sail-sg/Stable-RL, `dppo_binary_tv`)."""
    moved = math.exp(new) - math.exp(old)
    is_out = moved > HIGH if advantage > 0 else moved < -LOW
    slope = 0.0 if is_out else -min(math.exp(new - old), most) * advantage
    return slope * new, slope


def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-probabilities now and before [B, T], advantages [B], mask [B, T]: ragged, with holes, ratios far from 1."""
    draw = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(9, 17, generator=draw, dtype=torch.float64)
    new = old + 0.3 * torch.randn(9, 17, generator=draw, dtype=torch.float64)
    advantage = torch.randn(9, generator=draw, dtype=torch.float64)
    advantage[2] = 0
    mask = torch.rand(9, 17, generator=draw) < 0.7
    mask[:, 0] = True
    return new, old, advantage, mask


def own(
    name: str, new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, **settings: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss, its slope and clips of each token as this project has them, of rows [B, T]."""
    objective = settings_from({"policy_loss": name, "eps_clip": LOW, "eps_clip_high": HIGH, **settings}).objective
    by = new.clone().requires_grad_()
    spread = advantage[:, None].expand_as(new)
    ratio = averaged_log_ratio(new, old, spread, mask, objective)
    mean = torch.stack([ratio[at][mask[at]].mean() for at in range(len(new))])[:, None].expand_as(new)
    by_T, old_T, advantage_T, mask_T, mean_T = (one.reshape(-1) for one in (by, old, spread, mask, mean))
    terms = policy_terms(by_T, old_T, advantage_T, mask_T, objective, sequence_log_ratio_T=mean_T)
    (slope,) = torch.autograd.grad(terms.pg_loss_T.sum(), by)
    return terms.pg_loss_T.detach().view_as(new), slope, None if terms.clipped_T is None else terms.clipped_T.view_as(new)


def polgrads(name: str, aggregation: Aggregation, ratio: RatioKind | None = None) -> tuple[Any, Tensor]:
    """polgrad's result, and the gradient of its loss by the log-probabilities [B, T]."""
    new, old, advantage, mask = rows()
    kind, surrogate, clip = ORACLES[name]
    by = new.clone().requires_grad_()
    config = PolicyLossConfig(ratio or kind, surrogate, clip, aggregation)
    found = policy_loss(config, logprobs=by, old_logprobs=old, advantages=advantage, response_mask=mask)
    return found, torch.autograd.grad(found.loss, by)[0]


@pytest.mark.parametrize("name", ORACLES)
def test_each_loss_is_polgrads_token_by_token_and_so_is_its_gradient(name: str) -> None:
    given = rows()
    mask = given[-1]
    value, slope, clipped = own(name, *given)
    found, gradient = polgrads(name, Aggregation.TOKEN_MEAN)
    torch.testing.assert_close(value, found.per_token_objective.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(slope / mask.sum(), gradient, rtol=0, atol=1e-12)
    assert clipped is not None
    assert torch.equal(clipped.bool(), found.clipped_low | found.clipped_high)
    assert 0.1 < float(clipped[mask].mean()) < 0.9


def test_under_sample_mean_the_gradient_is_that_of_gspo_itself_whose_ratio_is_of_the_whole_response() -> None:
    given = rows()
    mask = given[-1]
    _, slope, _ = own("gspo", *given)
    weight = mask.double() / mask.sum(1, keepdim=True) / len(mask)
    _, gradient = polgrads("gspo", Aggregation.SEQ_MEAN_TOKEN_MEAN, RatioKind.SEQUENCE)
    torch.testing.assert_close(weight * slope, gradient, rtol=0, atol=1e-12)


def test_under_sample_mean_the_gradient_is_that_of_gmpos_geometric_mean() -> None:
    """The paper's product over each response: sign(A) * prod(|min(r A, clip(r) A)|)^(1/n), by autograd of the whole of it."""
    new, old, advantage, mask = rows()
    advantage[2] = 0.5  # the product has no derivative at an advantage of 0
    value, slope, clipped = own("gmpo", new, old, advantage, mask)
    by = new.clone().requires_grad_()
    losses = []
    for row, A in enumerate(advantage):
        r = torch.exp(by - old)[row][mask[row]]
        least = torch.minimum(r * A, r.clamp(1 - LOW, 1 + HIGH) * A)
        losses.append(-torch.sign(A) * least.abs().prod() ** (1 / len(r)))
        torch.testing.assert_close(value[row][mask[row]], losses[-1].detach().expand_as(r), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), by)
    weight = mask.double() / mask.sum(1, keepdim=True) / len(mask)
    torch.testing.assert_close(weight * slope, gradient, rtol=0, atol=1e-12)
    assert clipped is not None
    assert 0.1 < float(clipped[mask].mean()) < 0.9


def test_sapo_is_its_formula_and_its_slope_that_of_a_complex_step() -> None:
    new, old, advantage, mask = rows()
    value, slope, clipped = own("sapo", new, old, advantage, mask)
    assert clipped is None
    for row, at in mask.nonzero().tolist():
        step = sapo(complex(new[row, at], 1e-30), float(old[row, at]), float(advantage[row]))
        assert float(value[row, at]) == pytest.approx(step.real, abs=1e-12)
        assert float(slope[row, at]) == pytest.approx(step.imag / 1e-30, abs=1e-12)


@pytest.mark.parametrize("most", [None, 1.1])
def test_dppo_is_its_formula_and_masks_by_how_far_a_probability_has_moved(most: float | None) -> None:
    new, old, advantage, mask = rows()
    value, slope, clipped = own("dppo", new, old, advantage, mask, eps_clip_c=most)
    assert clipped is not None
    for row, at in mask.nonzero().tolist():
        numbers = float(new[row, at]), float(old[row, at]), float(advantage[row])
        expected = dppo(*numbers, *([] if most is None else [most]))
        assert (float(value[row, at]), float(slope[row, at])) == pytest.approx(expected, abs=1e-12)
        assert bool(clipped[row, at]) == (expected[1] == 0 and numbers[2] != 0)
    assert 0.05 < float(clipped[mask].mean()) < 0.9


def test_at_ratio_1_every_loss_has_the_gradient_minus_the_advantage() -> None:
    _, old, advantage, mask = rows()
    wanted = torch.where(mask, -advantage[:, None], 0.0)
    for name in LOSSES:
        _, slope, _ = own(name, old, old, advantage, mask)
        torch.testing.assert_close(slope, wanted, rtol=0, atol=1e-12)


# -- through the replay ---------------------------------------------------------------------------------------------


def by_hand(name: str, samples: Sequence[Sample]) -> tuple[list[list[float]], list[list[float]]]:
    """Loss and slope of each token, 0 where it is masked, in plain Python, one token after the other."""
    values, slopes = [], []
    for one, masks in zip(samples, closed_form.masks(samples), strict=True):
        streams = list(zip(one["log_probs"], one["old_log_probs"], masks, strict=True))
        trained = [(new, old) for new, old, mask in streams if mask]
        A = one["advantage"]
        values.append([])
        slopes.append([])
        sequence = math.exp(math.fsum(new - old for new, old in trained) / len(trained)) if trained else 1.0
        least = [min(math.exp(n - o), 1 + HIGH) if A > 0 else max(math.exp(n - o), 1 - LOW) for n, o in trained]
        mean = math.prod(least) ** (1 / len(trained)) if trained else 1.0
        for new, old, mask in streams:
            r = sequence if name == "gspo" else math.exp(new - old)
            if name == "sapo":
                step = sapo(complex(new, 1e-30), old, A)
                value, slope = step.real, step.imag / 1e-30
            elif name == "gmpo":
                value, slope = -mean * A, 0.0 if (r > 1 + HIGH if A > 0 else r < 1 - LOW) else -mean * A
            elif name == "cispo":
                slope = -min(r, 1 + HIGH) * A
                value = slope * new
            elif name == "dppo":
                value, slope = dppo(new, old, A)
            else:
                bound = -min(max(r, 1 - LOW), 1 + HIGH) * A
                value, slope = max(-r * A, bound), 0.0 if bound > -r * A else -r * A
            values[-1].append(value if mask else 0.0)
            slopes[-1].append(slope if mask else 0.0)
    return values, slopes


@pytest.mark.parametrize("name", LOSSES)
def test_a_replay_has_the_loss_and_gradient_by_hand_under_every_layout(capsys, tmp_path: Path, name: str) -> None:
    samples = random_fanout()
    flags = ("--policy-loss", name, "--eps-clip", LOW, "--eps-clip-high", HIGH, "--layouts", "dp1,dp2cp2:balanced@40,dp4:mb1")
    told = compared(capsys, tmp_path, samples, "--modes", "token_mean,sample_mean", *flags)
    values, slopes = by_hand(name, samples)
    weights = closed_form.weights(samples, "token_mean")
    loss, norm = closed_form.weighted(weights, values), math.hypot(*closed_form.gradient(weights, slopes))
    assert told.modes["token_mean"]["pg_loss"] == pytest.approx(loss, rel=1e-12)
    assert told.modes["token_mean"]["grad_norm_log_probs"] == pytest.approx(norm, rel=1e-12)
    assert per_layout(told, "token_mean", "pg_loss") == [exactly(loss)] * 4
    assert ("pg_clipfrac" in told.modes["token_mean"]) == (name != "sapo")


# -- through the training step --------------------------------------------------------------------------------------


def trained(name: str, samples: Sequence[Sample], mode: str, *, is_first: bool) -> list[float]:
    """d loss / d log-probability of each token by the training step, in micro-batches of three samples, of a policy whose
    parameters are the log-probabilities; `is_first`: it is its own old policy."""
    given = {"policy_loss": name, "eps_clip": LOW, "eps_clip_high": HIGH, "loss_aggregation_divisor": 10.0}
    objective = settings_from({**given, "loss_aggregation": "constant"}).objective
    (rule,) = rules_named((mode,), objective)
    step = batch_of(samples)
    assert step.log_probs_T is not None
    assert step.old_log_probs_T is not None
    real_SC = torch.arange(int(step.response_length_S.max())) < step.response_length_S[:, None]
    table_1SC = torch.zeros(1, *real_SC.shape, dtype=torch.float64)
    table_1SC[0][real_SC] = step.log_probs_T.double()
    tokens = step_tokens(step, [RunSpec(mode, 0, objective.under(rule), 1.0)], parse_layout("dp1"), torch.float64)
    tokens = tokens.beside(None if is_first else step.old_log_probs_T.double(), None)
    number_SL = torch.arange(step.num_samples)[:, None].expand(-1, int(step.total_length_S.max()))
    rows = list(torch.arange(step.num_samples)[None].split(3, dim=1))
    policy: Any = Table(table_1SC.requires_grad_())
    of_others = replace(objective, eps_clip=0.5, eps_clip_high=0.5)  # the clip is the run's own
    found = step_gradient(policy, rows, step, number_SL, tokens, of_others, ALONE)
    return found.gradient_RQ.view(real_SC.shape)[real_SC].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_the_training_step_has_the_gradient_by_hand_and_at_ratio_1_that_of_every_other_loss(name: str, mode: str) -> None:
    samples = random_fanout()
    weights = closed_form.weights(samples, mode)
    _, slopes = by_hand(name, samples)
    assert trained(name, samples, mode, is_first=False) == pytest.approx(closed_form.gradient(weights, slopes), abs=1e-12)
    plain = [[-one["advantage"]] * one["response_length"] for one in samples]
    assert trained(name, samples, mode, is_first=True) == pytest.approx(closed_form.gradient(weights, plain), abs=1e-12)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("replay", "{}", "--policy-loss", "gspo"),
            "--policy-loss gspo is of the ratio, and needs log_probs and old_log_probs",
        ),
        (("replay", "{}", "--policy-loss", "sapo", "--eps-clip-c", 3), "--eps-clip-c: sapo has no clipped loss"),
    ],
)
def test_what_a_loss_cannot_be_used_for_is_one_line(capsys, tmp_path: Path, arguments: Sequence[Any], said: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"response_length": 2, "advantage": 1.0, "group_index": 0}])
    words = [path if word == "{}" else word for word in arguments]
    assert said in refused(aggcli(capsys, *words, "--output", tmp_path / "out"))
