"""Rules by a second route: each framework's own loop, laws over random splits, and polgrad as an independent oracle."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polgrad.aggregate import Aggregation, effective_token_weights, microbatch_token_weights

from aggcli.auditing import batch_of, rule_loss, rule_named, schedule_of
from aggcli.config import settings_from
from aggcli.objective.weights import can_represent, rule_weights
from aggcli.rules import ELSEWHERE, RULES, find_rule, names_of
from tests import closed_form
from tests.closed_form import token_numbers
from tests.fixtures import MODES, Sample, fx_a, fx_b, fx_d, fx_e, fx_f, random_fanout, rules_named
from tests.framework_loops import LOOPS, rows_of, step_loss
from tests.speed import few

# -- a second route --------------------------------------------------------------------------------------------------


def _with_grpo_advantages(samples: list[Sample]) -> list[Sample]:
    """FX-D's rewards minus the group's mean, written into the samples."""
    made = []
    for sample in samples:
        group = [other["reward"] for other in samples if other["group_index"] == sample["group_index"]]
        made.append({**sample, "advantage": sample["reward"] - sum(group) / len(group)})
    return made


def _random_batch() -> list[Sample]:
    """24 samples of `random_fanout`, none fully masked, so that every framework has a number."""
    samples = [dict(sample) for sample in random_fanout(11)][:24]
    for sample in samples:
        sample["loss_mask"] = [1, *sample["loss_mask"][1:]]
    return samples


def _on_policy(samples: list[Sample]) -> list[Sample]:
    """FX-E has rewards and lengths only: advantages from its rewards, and every log-probability the same."""
    streams = ("log_probs", "old_log_probs", "ref_log_probs")
    return [s | dict.fromkeys(streams, [-1.0] * s["response_length"]) for s in _with_grpo_advantages(samples)]


BATCHES = {
    "random": _random_batch(),
    "FX-A": fx_a(),
    "FX-B": fx_b(),
    "FX-D": _with_grpo_advantages(fx_d())[:8],
    "FX-E": _on_policy(fx_e()),
    "FX-F twice": [*fx_f(), *fx_f()],
}


@pytest.mark.parametrize("batch", few(BATCHES))
@pytest.mark.parametrize("name", names_of(ELSEWHERE))
def test_a_rule_equals_its_framework_run_as_a_loop(name: str, batch: str) -> None:
    samples = BATCHES[batch]
    losses = token_numbers(samples, [sample["advantage"] for sample in samples], 0.2, 0.28)["pg_loss"]
    rows = rows_of(samples, losses)
    order = list(range(len(samples)))
    random.Random(3).shuffle(order)
    half, quarter = len(order) // 2, len(order) // 4
    splits = (
        [[order]],
        [[order[:half], order[half:]]],
        [[order[:quarter], order[quarter:half]], [order[half : half + quarter], order[half + quarter :]]],
        [[[at] for at in order[:half]], [[at] for at in order[half:]]],
    )
    for split in splits:
        expected = step_loss(name, rows, split, 20.0)
        assert rule_loss(name, samples, split, divisor=20) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_every_rule_has_a_loop_to_be_checked_against() -> None:
    assert set(LOOPS) == set(names_of(ELSEWHERE))


# -- laws ------------------------------------------------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn, samples: int) -> list[list[list[int]]]:
    order = draw(st.permutations(range(samples)))
    cuts = sorted(draw(st.sets(st.integers(1, samples - 1), max_size=samples - 1)))
    pieces = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]
    ranks = sorted(draw(st.sets(st.integers(1, len(pieces)), max_size=3)) | {len(pieces)})
    return [pieces[a:b] for a, b in zip([0, *ranks[:-1]], ranks, strict=True)]


EXACT = [rule.name for rule in ELSEWHERE if rule.layouts == "any" and not rule.local_counts]


def test_the_rules_that_count_over_the_step_are_these() -> None:
    assert not {name for name in EXACT if name.startswith("verl-legacy") or "bnpo" in name}
    assert {"slime:per_token", "trl:dapo", "skyrl:prompt_mean", "prime-rl", "balanced"} <= set(EXACT)


@settings(max_examples=30, deadline=None)
@given(split=splits(9))
def test_a_rule_that_counts_over_the_step_has_the_same_weights_under_any_split(split: list) -> None:
    step = batch_of(_with_grpo_advantages(fx_d()))
    whole, cut = schedule_of([[list(range(9))]], 9), schedule_of(split, 9)
    for name in (*MODES, *EXACT):
        rule = find_rule(name).with_divisor(20)
        expected_T = rule_weights(rule, step, [whole])
        assert torch.allclose(rule_weights(rule, step, [cut]), expected_T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", ["rollouts", "prompts"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_its_closed_form_under_any_split(mode: str, scale: str) -> None:
    objective = settings_from({"loss_aggregation_divisor": 10.0, "prompt_mean_scale": scale}).objective
    (rule,) = rules_named([mode], objective)
    samples = random_fanout()
    step = batch_of(samples)
    expected = [weight for row in closed_form.weights(samples, mode, 10.0, scale) for weight in row]
    for size in (1, step.num_samples):
        split = [[list(range(at, min(at + size, step.num_samples))) for at in range(0, step.num_samples, size)]]
        found_T = rule_weights(rule, step, [schedule_of(split, step.num_samples)])
        assert found_T.tolist() == pytest.approx(expected, rel=1e-13, abs=0)


def test_an_idle_rank_counts_in_a_mean_over_ranks() -> None:
    assert rule_loss("token_mean@rank", fx_b(), [[[0, 1, 2, 3]], []]) == pytest.approx(2.75 / 16 / 2, abs=1e-12)
    assert rule_loss("token_mean", fx_b(), [[[0, 1, 2, 3]], []]) == pytest.approx(2.75 / 16, abs=1e-12)


def test_equal_micro_batches_are_asked_of_the_frameworks_that_only_deal_those() -> None:
    assert can_represent(RULES["trl:grpo"], schedule_of([[[0, 3], [1, 2]]], 4))
    assert not can_represent(RULES["trl:grpo"], schedule_of([[[0, 1, 2], [3]]], 4))
    assert not can_represent(RULES["trl:grpo"], schedule_of([[[0, 1]], [[2], [3]]], 4))
    assert can_represent(RULES["verl-legacy:token-mean"], schedule_of([[[0, 1]], [[2], [3]]], 4))
    assert not can_represent(RULES["verl-legacy:token-mean"], schedule_of([[[0, 1, 2]], [[3]]], 4))
    assert can_represent(RULES["trl:dapo"], schedule_of([[[0, 1, 2]], [[3]]], 4))


# -- polgrad 0.2.1, an oracle of its own -------------------------------------------------------------------------------

POLGRAD = {
    "token_mean": Aggregation.TOKEN_MEAN,
    "sample_mean": Aggregation.SEQ_MEAN_TOKEN_MEAN,
    "verl:seq-mean-token-sum": Aggregation.SEQ_MEAN_TOKEN_SUM,
    "constant": Aggregation.TOKEN_SUM_NORM,
}


def _padded_masks(samples: list[Sample]) -> torch.Tensor:
    width = max(sample["response_length"] for sample in samples)
    rows = [sample.get("loss_mask") or [1] * sample["response_length"] for sample in samples]
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]).bool()


@pytest.mark.parametrize("name", POLGRAD)
def test_polgrad_gives_the_same_weights(name: str) -> None:
    samples = [{key: value for key, value in sample.items() if key != "rollout_id"} for sample in _random_batch()]
    mask_BT = _padded_masks(samples)
    expected_T = effective_token_weights(mask_BT, POLGRAD[name], norm_len=10)[mask_BT]
    step = batch_of(samples)
    rule = rule_named(name, divisor=10.0)
    found_T = rule.weights(step, schedule_of([[list(range(step.num_samples))]], step.num_samples), 1)
    assert torch.allclose(found_T[step.loss_mask_T], expected_T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["token_mean", "sample_mean", "constant"])
def test_polgrad_gives_the_same_mean_of_micro_batch_means(name: str) -> None:
    samples = [{key: value for key, value in sample.items() if key != "rollout_id"} for sample in _random_batch()]
    mask_BT, sizes = _padded_masks(samples), [5, 1, 9, len(samples) - 15]
    expected_T = microbatch_token_weights(mask_BT, POLGRAD[name], sizes, norm_len=10)[mask_BT]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    split = [[list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]]
    step = batch_of(samples)
    rule = rule_named(f"{name}@micro-batch", divisor=10.0)
    found_T = rule.weights(step, schedule_of(split, step.num_samples), 1)
    assert torch.allclose(found_T[step.loss_mask_T], expected_T, rtol=1e-12, atol=0)
