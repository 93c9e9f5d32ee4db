"""`compare --gradients`: each mode's gradient by the parameters, against a brute-force double and against a replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aggcli as program
from aggcli.config import RunConfig, settings_from
from aggcli.layout.schedule import parse_layout
from aggcli.policy.causal_lm import causal_start
from aggcli.training.gradients import WHOLE, ModeGradients, cosines_of, group_of, mode_gradients, norms_of
from aggcli.training.stack import RunSpec
from aggcli.world import ALONE
from tests import closed_form
from tests.cli import aggcli
from tests.fixtures import MODES, batch_of, rules_named
from tests.test_policy_losses import HIGH, LOSSES, LOW, by_hand
from tests.tiny_models import FAMILIES, tiny

LENGTHS = (1, 3, 4, 8, 2, 6)
REWARDS = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0)
GROUPS = (0, 0, 0, 1, 1, 1)
DIVISOR = 10.0


def _samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "group_index": group,
            "response_length": length,
            "total_length": length + 3,
            "reward": reward,
            "advantage": [1.0 if reward else -0.5] * length,
            "old_log_probs": (-3 + torch.rand(length, generator=generator, dtype=torch.float64)).tolist(),
            "tokens": torch.randint(2, 40, (length + 3,), generator=generator).tolist(),
        }
        for group, length, reward in zip(GROUPS, LENGTHS, REWARDS, strict=True)
    ]


def _log_probs(module: Any, sample: dict[str, Any]) -> Tensor:
    """Of each response token, by the model's own logits, [T]."""
    ids, length = torch.tensor(sample["tokens"]), sample["response_length"]
    all_LV = torch.log_softmax(module(input_ids=ids[None]).logits[0], -1)[-length - 1 : -1]
    return all_LV.gather(1, ids[-length:, None])[:, 0]


def _found(module: Any, samples: list[dict[str, Any]], config: RunConfig, modes: Sequence[str]) -> ModeGradients:
    """What is under test, in several micro-batches."""
    objectives = [config.objective.under(rule) for rule in rules_named(modes, config.objective)]
    runs = [RunSpec(objective.loss_aggregation.name, 0, objective, 0.0) for objective in objectives]
    step = batch_of(samples)
    tokens_SL = torch.zeros(len(samples), 11, dtype=torch.int64)
    for at, sample in enumerate(samples):
        tokens_SL[at, : sample["total_length"]] = torch.tensor(sample["tokens"])
    policy = causal_start(module, config).stack([0.0], ALONE)
    layout = parse_layout("dp1:first-fit@20")
    return mode_gradients(policy, runs, step, tokens_SL, layout, config.objective, step.old_log_probs_T)


def _token_losses(module: Any, sample: dict[str, Any]) -> Tensor:
    """The clipped loss of each response token, [T]."""
    new_T = _log_probs(module, sample)
    ratio_T = torch.exp(new_T - torch.tensor(sample["old_log_probs"], dtype=torch.float64))
    advantage_T = torch.tensor(sample["advantage"], dtype=torch.float64)
    return torch.maximum(-ratio_T * advantage_T, -ratio_T.clamp(0.8, 1.2) * advantage_T)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_cosines_are_those_of_gradients_taken_one_by_one(family: str) -> None:
    module, samples = tiny(family), _samples()
    config = settings_from({"dtype": "float64", "loss_aggregation_divisor": DIVISOR, "loss_aggregation": "constant"})
    found = _found(module, samples, config, MODES)
    named = list(module.named_parameters())
    expected = []
    for mode in MODES:
        weights = closed_form.weights(samples, mode, DIVISOR)
        terms = [
            torch.tensor(weight_T, dtype=torch.float64) @ _token_losses(module, sample)
            for weight_T, sample in zip(weights, samples, strict=True)
        ]
        expected.append(torch.autograd.grad(sum(terms, torch.zeros(())), [value for _, value in named]))
    for group in {WHOLE, *(group_of(name) for name, _ in named)}:
        flat_MQ = torch.stack(
            [
                torch.cat(
                    [part.flatten() for (name, _), part in zip(named, parts, strict=True) if group in (WHOLE, group_of(name))]
                )
                for parts in expected
            ]
        )
        product_MM = flat_MQ @ flat_MQ.mT
        assert norms_of(found.by_parameters[group]) == pytest.approx(norms_of(product_MM), rel=1e-10)
        for mine, theirs in zip(cosines_of(found.by_parameters[group]), cosines_of(product_MM), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-10)
    spread = [value for row in cosines_of(found.by_parameters[WHOLE]) for value in row if value is not None]
    assert min(spread) < 0.98, "modes that hardly differ would be no test"


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_each_policy_loss_is_weight_times_slope_through_the_models_own_log_probabilities(name: str) -> None:
    """By parameters: the log-probabilities' gradients, each times its closed form; by log-probabilities: the closed form."""
    module, samples = tiny(FAMILIES[0]), _samples()
    generator = torch.Generator().manual_seed(5)
    new: list[Tensor] = []
    for sample in samples:
        new.append(_log_probs(module, sample))
        noise_T = 0.3 * torch.randn(sample["response_length"], generator=generator, dtype=torch.float64)
        sample |= {"log_probs": new[-1].tolist(), "old_log_probs": (new[-1].detach() + noise_T).tolist()}
        sample["advantage"] = sample["advantage"][0]
    config = settings_from({"dtype": "float64", "policy_loss": name, "eps_clip": LOW, "eps_clip_high": HIGH})
    found = _found(module, samples, config, ("sample_mean", "token_mean"))
    _, slopes = by_hand(name, samples)
    named = list(module.named_parameters())
    by_hand_MQ, by_token_MT = [], []
    for mode in ("sample_mean", "token_mean"):
        slope_T = torch.tensor(closed_form.gradient(closed_form.weights(samples, mode), slopes), dtype=torch.float64)
        parts = torch.autograd.grad(torch.cat(new), [value for _, value in named], slope_T, retain_graph=True)
        by_hand_MQ.append(torch.cat([part.flatten() for part in parts]))
        by_token_MT.append(slope_T)
    flat_MQ, flat_MT = torch.stack(by_hand_MQ), torch.stack(by_token_MT)
    torch.testing.assert_close(found.by_parameters[WHOLE], flat_MQ @ flat_MQ.mT, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.by_log_probs_MM, flat_MT @ flat_MT.mT, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_the_cheap_answer_beside_it_is_the_one_that_a_replay_gives(tmp_path: Path, capsys) -> None:
    """For the small policy, too: the samples carry no log-probabilities, so both take a ratio of 1."""
    dump = tmp_path / "dump.jsonl"
    rows = [{key: value for key, value in sample.items() if key != "old_log_probs"} for sample in _samples()]
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = aggcli(capsys, "compare", "--gradients", dump, "--dtype=float64", "--json")
    assert told.code == 0, told.err
    (step,) = json.loads(told.out)["steps"]
    replayed = aggcli(capsys, "replay", dump, "--json", "-o", tmp_path / "out").modes
    for at, mode in enumerate(MODES):
        assert step["by_log_probs"]["norm"][at] == pytest.approx(replayed[mode]["grad_norm_log_probs"], rel=1e-9)
        assert step["by_log_probs"]["cosine"][at][0] == pytest.approx(replayed[mode]["gradient_cosine"] or 1.0, abs=1e-9)
    whole = step["by_parameters"][WHOLE]
    assert set(step["by_parameters"]) == {WHOLE, "embeddings", "layer 0", "layer 1", "the rest"}
    assert whole["cosine"][2][0] != pytest.approx(step["by_log_probs"]["cosine"][2][0], abs=1e-3)
    found = program.gradients(dump, list(MODES), dtype="float64").gradients.set_index(["parameters", "mode"])
    assert len(found) == 6 * len(MODES)
    for at, mode in enumerate(MODES):
        row = found.loc[("layer 1", mode)]
        told_of = step["by_parameters"]["layer 1"]
        assert row["norm_ratio"] == pytest.approx(told_of["norm"][at] / told_of["norm"][0], rel=1e-9)
        assert row["cosine"] == pytest.approx(told_of["cosine"][at][0], abs=1e-9)
        assert found.loc[("by log-probabilities", mode)]["cosine"] == pytest.approx(step["by_log_probs"]["cosine"][at][0])
