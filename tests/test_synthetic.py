"""Synthetic rollouts: the laws they are drawn from, and that a seed is all they depend on."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch

from aggcli.config import SourceConfig, SyntheticConfig
from aggcli.errors import SettingError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.sources import open_source
from aggcli.rollouts.synthetic import SyntheticSource, parse_group_size

BIG = SyntheticConfig(synthetic_prompts=2000, synthetic_group_size="8")


def drawn(seed: int = 0, step: int = 0, **changes) -> RolloutBatch:
    return SyntheticSource(dataclasses.replace(BIG, **changes), seed).step(step)


def same(one: RolloutBatch, other: RolloutBatch) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) and a.shape == b.shape else a == b for a, b in pairs)


def test_the_source_yields_its_steps_by_name() -> None:
    config = SourceConfig(rollouts=("synthetic",), synthetic=SyntheticConfig(synthetic_steps=3))
    source = open_source(config, 0)
    assert (source.name, source.format, len(source)) == ("synthetic", "synthetic", 3)
    assert [batch.name for batch in source] == [f"step {i} (synthetic)" for i in range(3)]
    assert all(same(a, b) for a, b in zip(source, source, strict=True))


def test_a_step_depends_on_the_seed_and_its_number_only() -> None:
    config = SyntheticConfig(synthetic_fanout=0.3, synthetic_masked=0.2, synthetic_off_policy=0.1)
    longer = dataclasses.replace(config, synthetic_steps=5)
    second = list(SyntheticSource(longer, 7))[1]
    assert same(second, SyntheticSource(config, 7).step(1))
    assert not torch.equal(second.response_length_S, SyntheticSource(config, 7).step(0).response_length_S)
    assert not torch.equal(second.response_length_S, SyntheticSource(config, 8).step(1).response_length_S)


def test_groups_are_even_or_drawn_from_a_range() -> None:
    even = drawn(synthetic_prompts=5, synthetic_group_size="3")
    assert even.group_S.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    sizes = torch.bincount(drawn(synthetic_group_size="4-12").group_S)
    assert (int(sizes.min()), int(sizes.max())) == (4, 12)
    assert sizes.double().mean().item() == pytest.approx(8, abs=0.25)  # sd of the mean 2.58 / sqrt(2000) = 0.06


@pytest.mark.parametrize("text", ["", "0", "-3", "12-4", "4-", "a", "4.5", "0-3", "4-12-13"])
def test_a_group_size_that_is_no_number_or_range_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(SettingError, match=rf"^--synthetic-group-size '{text}': must be a number of at least 1, or .*$"):
        SyntheticSource(SyntheticConfig(synthetic_group_size=text), 0)
    assert parse_group_size(" 4 - 12 ") == (4, 12)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^--seed -1: must be at least 0$"):
        SyntheticSource(SyntheticConfig(), -1)


def test_lengths_are_lognormal_around_the_median_without_a_tail() -> None:
    length_S = drawn(synthetic_length=200.0, synthetic_tail=0.0, synthetic_max_length=10**6).response_length_S.double()
    assert length_S.median().item() == pytest.approx(200, rel=0.03)
    assert length_S.log().std().item() == pytest.approx(0.6, abs=0.02)


@pytest.mark.slow
def test_the_tail_is_pareto_from_the_median_up_and_is_cut() -> None:
    tail = drawn(synthetic_length=200.0, synthetic_tail=1.0, synthetic_max_length=10**9).response_length_S.double()
    assert tail.min() == 200
    # P(length > 200 x) = x ** -1.5: 0.3536 at x = 2, 0.0316 at x = 10
    assert (tail > 400).double().mean().item() == pytest.approx(0.3536, abs=0.02)
    assert (tail > 2000).double().mean().item() == pytest.approx(0.0316, abs=0.006)
    cut = drawn(synthetic_length=200.0, synthetic_tail=1.0, synthetic_max_length=1000)
    assert cut.response_length_S.max() == 1000
    assert cut.status_S == tuple("truncated" if n == 1000 else "completed" for n in cut.response_length_S.tolist())


@pytest.mark.parametrize("extreme", [{"synthetic_length": 0.0}, {"synthetic_length_sigma": 1e6}, {"synthetic_max_length": 1}])
def test_extreme_settings_still_give_lengths_between_1_and_the_limit(extreme: dict) -> None:
    batch = drawn(synthetic_prompts=50, synthetic_fanout=1.0, synthetic_masked=0.5, **extreme)
    limit = extreme.get("synthetic_max_length", 1024)
    assert 1 <= int(batch.response_length_S.min()) <= int(batch.response_length_S.max()) <= limit


def test_prompts_have_8_to_32_tokens_and_one_length_a_group() -> None:
    batch = drawn()
    prompt_S = batch.total_length_S - batch.response_length_S
    assert (int(prompt_S.min()), int(prompt_S.max())) == (8, 32)
    assert torch.equal(prompt_S.view(-1, 8).amax(1), prompt_S.view(-1, 8).amin(1))


@pytest.mark.parametrize("accuracy", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_mean_reward_is_the_accuracy_asked_for(accuracy: float) -> None:
    reward_S = drawn(synthetic_accuracy=accuracy).reward_S
    assert reward_S is not None
    assert set(reward_S.tolist()) <= {0.0, 1.0}
    # The sd of a group's mean is about 0.35, over 2000 groups 0.008.
    assert reward_S.mean().item() == pytest.approx(accuracy, abs=0.03 if 0 < accuracy < 1 else 0)


def test_groups_that_are_all_right_and_all_wrong_occur_far_more_than_by_chance() -> None:
    reward_S = drawn().reward_S
    assert reward_S is not None
    right_P = reward_S.view(-1, 8).sum(1)
    # By chance 2 ** -8 = 0.004 each. With half the variance shared, the shared part's own law: a uniform number of right
    # answers, so 1/9 each.
    assert (right_P == 8).double().mean().item() == pytest.approx(1 / 9, abs=0.025)
    assert (right_P == 0).double().mean().item() == pytest.approx(1 / 9, abs=0.025)


@pytest.mark.slow
def test_length_and_correctness_are_linked_as_asked() -> None:
    longest = drawn(synthetic_length=200.0, synthetic_tail=0.0, synthetic_length_correctness=1.0)
    assert longest.reward_S is not None
    length_S = longest.response_length_S
    clear_S = length_S != 200  # the threshold of accuracy 0.5 is the median
    assert torch.equal(longest.reward_S[clear_S] == 1, length_S[clear_S] > 200)
    for rho in (-0.6, 0.0, 0.6):
        batch = drawn(synthetic_length=200.0, synthetic_tail=0.0, synthetic_length_correctness=rho)
        assert batch.reward_S is not None
        found = torch.corrcoef(torch.stack([batch.response_length_S.double().log(), batch.reward_S]))[0, 1].item()
        # A normal with correlation rho to another has rho * phi(0) / sqrt(1/4) = 0.798 rho with the sign of that.
        assert found == pytest.approx(rho * 2 / math.sqrt(2 * math.pi), abs=0.03)


def test_log_probs_are_old_ones_exactly_or_with_the_noise_asked_for() -> None:
    on = drawn().token_fields
    assert torch.equal(on["log_probs_T"], on["old_log_probs_T"])
    assert torch.equal(on["rollout_log_probs_T"], on["old_log_probs_T"])
    assert on["old_log_probs_T"].max() < 0
    off = drawn(synthetic_off_policy=0.05).token_fields
    assert off["log_probs_T"].max() <= 0
    far_T = off["old_log_probs_T"] < -0.5  # where the clip at 0 is ten deviations away
    difference_T = (off["log_probs_T"] - off["old_log_probs_T"])[far_T]
    assert difference_T.std().item() == pytest.approx(0.05, rel=0.01)
    assert difference_T.mean().item() == pytest.approx(0.0, abs=0.001)
    reference_T = off["ref_log_probs_T"] - off["old_log_probs_T"]
    assert 0 < reference_T.abs().mean() < 0.06
    assert off["ref_log_probs_T"].max() <= 0


def test_masked_spans_are_contiguous_and_cover_the_share_asked_for() -> None:
    batch = drawn(synthetic_masked=0.3)
    assert batch.loss_mask_T.double().mean().item() == pytest.approx(0.7, abs=0.005)
    for mask in batch.loss_mask_T.split(batch.response_length_S.tolist())[:500]:
        edges = torch.diff(mask.int(), prepend=torch.ones(1), append=torch.ones(1))
        assert int((edges == -1).sum()) <= 1
    assert not drawn(synthetic_masked=1.0).loss_mask_T.any()
    assert drawn().loss_mask_T.all()


@pytest.mark.slow
def test_fanout_splits_the_share_into_siblings_that_train_each_token_once() -> None:
    whole, split = drawn(synthetic_length=200.0), drawn(synthetic_length=200.0, synthetic_fanout=0.25)
    pieces_G = torch.bincount(split.rollout_S)
    assert int((pieces_G > 1).sum()) == 4000  # a quarter of 16000
    assert set(pieces_G.tolist()) == {1, 2, 3}
    # Lengths, groups and rewards are drawn before the split, so both have the same rollouts.
    trained_G = torch.zeros(16000, dtype=torch.int64).index_add(0, split.rollout_S, split.mask_sum_S)
    assert torch.equal(trained_G, whole.response_length_S)
    assert split.mask_sum_S.min() >= 1


def test_a_later_sibling_holds_the_earlier_ones_tokens_masked_out() -> None:
    batch = drawn(synthetic_prompts=20, synthetic_fanout=1.0, synthetic_length=200.0, synthetic_off_policy=0.1)
    lengths = batch.response_length_S.tolist()
    masks = batch.loss_mask_T.split(lengths)
    for field, value_T in batch.token_fields.items():
        rows = value_T.split(lengths)
        for i in range(1, len(rows)):
            if batch.rollout_S[i] == batch.rollout_S[i - 1]:
                assert torch.equal(rows[i][: lengths[i - 1]], rows[i - 1]), field
                assert not masks[i][: lengths[i - 1]].any()
                assert masks[i][lengths[i - 1] :].all()


def test_4096_samples_take_well_under_a_second() -> None:
    config = SyntheticConfig(synthetic_prompts=512, synthetic_fanout=0.2, synthetic_masked=0.1, synthetic_off_policy=0.1)
    times = []
    for seed in range(3):
        start = time.process_time()
        assert SyntheticSource(config, seed).step(0).num_samples >= 4096
        times.append(time.process_time() - start)
    assert min(times) < 0.8
