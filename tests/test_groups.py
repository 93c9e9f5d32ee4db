"""Prompt groups, fan-out and advantages."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aggcli.config import settings_from
from aggcli.errors import RolloutError
from aggcli.layout.views import GlobalView
from aggcli.measurement.groups import group_values
from aggcli.objective.weights import rule_weights
from aggcli.rules import PROMPT_MEAN
from tests.cli import aggcli, compared, exactly, per_layout, records, refused, replay, write_jsonl
from tests.fixtures import Sample, batch_of, fx_b, fx_d, rules_named, sample
from tests.speed import few

STD = "(reward - group mean) / (std + 1e-6), std with n-1"


def rewarded(*rewards: tuple[int, float | None], lengths: Sequence[int] | None = None) -> list[Sample]:
    """On-policy samples of (group, reward), of 2 tokens unless told otherwise."""
    return [
        sample(lengths[at] if lengths else 2, group_index=group, reward=reward) for at, (group, reward) in enumerate(rewards)
    ]


def advantages_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, samples: list[Sample], rule: str = "mean_only"
) -> list[float]:
    """Each sample's advantage, seen from outside: alone on its rank, its share under `constant` is -A * tokens / (N * 10)."""
    n = len(samples)
    told = compared(capsys, tmp_path, samples, "--advantages", rule, "--layouts", f"dp{n}:contiguous")
    ranks = told.modes["constant"]["layouts"][f"dp{n}:contiguous"]["ranks"]
    assert [rank["partition"] for rank in ranks] == [[at] for at in range(n)]
    rollouts = told.modes["constant"]["rollouts"]
    return [-rank["pg_loss"] * rollouts * 10 / rank["tokens"] for rank in ranks]


# -- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", few([None, 1, 2, 3]))
def test_uneven_groups_each_have_their_own_baseline_in_any_row_order(tmp_path, capsys, shuffle) -> None:
    """FX-D: ±0.5; exactly 0 for equal rewards; -1/3, -1/3, 2/3. One baseline for all would give g1 0.4444."""
    expected = [0.5, -0.5, 0.5, -0.5, 0.0, 0.0, -1 / 3, -1 / 3, 2 / 3]
    rows = [
        ({k: v for k, v in s.items() if "log_probs" not in k}, advantage) for s, advantage in zip(fx_d(), expected, strict=True)
    ]
    if shuffle is not None:
        random.Random(shuffle).shuffle(rows)
    assert advantages_of(capsys, tmp_path, [s for s, _ in rows]) == [exactly(advantage) for _, advantage in rows]
    # With the n-1 deviation: 1/sqrt(3) = 0.57735 in g0 and in g2 alike.
    by_std = [exactly(advantage / (3**-0.5 + 1e-6)) for _, advantage in rows]
    assert advantages_of(capsys, tmp_path, [s for s, _ in rows], "grpo") == by_std


def test_equal_rewards_up_to_rounding_give_exactly_0(tmp_path, capsys) -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit; divided by their tiny deviation they would give ±0.7."""
    samples = rewarded((0, 0.1 + 0.2), (0, 0.3), (1, 1.0), (1, 0.0))
    assert advantages_of(capsys, tmp_path, samples, "grpo")[:2] == [0.0, 0.0]


def test_a_rollout_of_many_samples_enters_its_group_once(tmp_path, capsys) -> None:
    """Rollout x has reward 1 and three samples, y has 0: mean 0.5, not 0.75."""
    samples = [s | {"rollout_id": r} for s, r in zip(rewarded((0, 1), (0, 1), (0, 1), (0, 0)), "xxxy", strict=True)]
    assert advantages_of(capsys, tmp_path, samples) == [exactly(a) for a in (0.5, 0.5, 0.5, -0.5)]
    # Of two rewards, 1 and 0, and not of four: sqrt(1/2).
    assert compared(capsys, tmp_path, samples).modes["sample_mean"]["raw_reward_batch_std"] == exactly(0.5**0.5)


def test_an_unscored_rollout_stays_out_of_its_group_and_gets_0(tmp_path, capsys) -> None:
    samples = rewarded((0, 1), (0, 0), (0, None), (0, math.nan))
    assert advantages_of(capsys, tmp_path, samples) == [exactly(0.5), exactly(-0.5), 0.0, 0.0]
    told = compared(capsys, tmp_path, samples)
    assert told.modes["sample_mean"]["unscored_samples"] == 2
    assert told.modes["sample_mean"]["rollouts"] == 4


def test_a_group_without_a_scored_rollout_is_none_of_right_wrong_and_equal(tmp_path, capsys) -> None:
    samples = rewarded((0, None), (0, None), (1, 1), (1, 0))
    values = compared(capsys, tmp_path, samples).modes["sample_mean"]
    names = ("groups", "zero_variance_groups", "all_right_groups", "all_wrong_groups", "prompts")
    assert [values[name] for name in names] == [1, 0, 0, 0, 2]


# -- rollouts of several samples --------------------------------------------------------------------------------------


def fan_out(ids: Sequence[object], rewards: Sequence[float] = (1, 1, 0)) -> list[Sample]:
    """2 and 3 tokens of loss 1 and 3, and 1 token of loss 7."""
    rows = zip((2, 3, 1), (-1, -3, -7), ids, rewards, strict=True)
    return [sample(n, advantage=a, rollout_id=r, reward=reward, group_index=0) for n, a, r, reward in rows]


def test_with_no_rollout_id_at_all_each_row_is_its_own_rollout_and_that_is_said_once(tmp_path, capsys) -> None:
    """(1 + 3 + 7)/3. As a fan-out of two siblings: ((2*1 + 3*3)/5 + 7)/2."""
    folder = tmp_path / "steps"
    folder.mkdir()
    for step in range(3):
        write_jsonl(tmp_path / f"steps/{step}.jsonl", fan_out([None] * 3))
    told = compared(capsys, tmp_path, folder)
    assert [step["modes"]["sample_mean"]["pg_loss"] for step in told.steps] == [exactly(11 / 3)] * 3
    assert told.err.count("rollout_id is null on every sample: each sample is its own rollout") == 1
    told = compared(capsys, tmp_path, fan_out([5, 5, 6]))
    assert told.modes["sample_mean"]["pg_loss"] == exactly((11 / 5 + 7) / 2)
    assert "rollout_id is null" not in told.err


def test_rollout_ids_on_some_rows_only_are_refused_by_row(tmp_path, capsys) -> None:
    line = refused(replay(capsys, tmp_path, fan_out([5, None, 6])))
    assert "rollout_id is null on samples 1 but given on others" in line


def test_siblings_with_different_rewards_are_refused_by_row(tmp_path, capsys) -> None:
    line = refused(replay(capsys, tmp_path, fan_out([5, 6, 5])))
    assert "samples 0, 2 share rollout_id 5 but differ in reward" in line


def test_a_sibling_is_scored_or_unscored_like_its_rollout(tmp_path, capsys) -> None:
    line = refused(replay(capsys, tmp_path, fan_out([5, 6, 5], [1, 0, math.nan])))
    assert "samples 0, 2 share rollout_id 5 but differ in reward" in line


# -- groups as denominators -------------------------------------------------------------------------------------------


def test_only_prompt_mean_reads_the_groups_and_misses_them_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    """FX-B's groups have 4 and 12 tokens; the three other modes never ask which group a rollout is in."""
    objective = settings_from({"loss_aggregation_divisor": 10.0}).objective
    batch, bare = batch_of(fx_b()), batch_of([{**s, "group_index": None} for s in fx_b()])
    weight_T = rule_weights(PROMPT_MEAN, batch)
    assert weight_T.tolist() == pytest.approx([1 / 16] * 4 + [1 / 48] * 12, rel=1e-14)
    with pytest.raises(RolloutError, match="sample 0: group_index is missing and prompt_mean needs one"):
        rule_weights(PROMPT_MEAN, bare)

    def asked(*_: object) -> None:
        raise AssertionError("the groups were read")

    monkeypatch.setattr("aggcli.objective.weights.group_of_rollout", asked)
    for rule in rules_named(("sample_mean", "token_mean", "constant"), objective):
        assert torch.equal(rule_weights(rule, bare), rule_weights(rule, batch))
    with pytest.raises(AssertionError, match="the groups were read"):
        rule_weights(PROMPT_MEAN, batch)


def test_a_group_that_straddles_two_optimizer_steps_is_refused_with_the_flag_to_change(tmp_path, capsys) -> None:
    flags = ("--loss-aggregation", "prompt_mean", "--global-batch-size", 3)
    line = refused(replay(capsys, tmp_path, fx_b(), *flags, command="run"))
    assert "straddles optimizer steps 0 and 1" in line
    assert "--global-batch-size" in line


# -- groups without a signal ------------------------------------------------------------------------------------------


def test_groups_that_carry_no_signal_are_counted(tmp_path, capsys) -> None:
    """3 groups of 4: all 1, all 0, and 1,0,0,0; nothing is dropped in a replay, so N = 12 and P = 3."""
    samples = rewarded(*((0, 1),) * 4, *((1, 0),) * 4, (2, 1), (2, 0), (2, 0), (2, 0))
    told = compared(capsys, tmp_path, samples, "--layouts", "dp1,dp4")
    names = ("groups", "zero_variance_groups", "all_right_groups", "all_wrong_groups", "rollouts", "prompts")
    for mode in told.modes:
        assert [told.modes[mode][name] for name in names] == [3, 2, 1, 1, 12, 3]
        assert told.modes[mode]["weight_share/zero_advantage"] == exactly(8 / 12)
    assert "zero-variance groups 2/3" in told.err


def test_a_batch_of_equal_groups_only_ends_with_a_plain_message(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, rewarded(*((0, 1),) * 4, *((1, 0),) * 4, *((2, 1),) * 4))
    assert told.modes["sample_mean"]["zero_variance_groups"] == 3
    assert "zero-variance groups 3/3: every advantage is 0, so pg_loss is exactly 0 and there is no signal" in told.err


@pytest.mark.parametrize("beta", few([0.1, 0]))
def test_equal_groups_lose_nothing_but_the_kl_term_shown_apart(tmp_path, capsys, beta) -> None:
    """new - reference = 0.1 on every token: k3 = exp(-0.1) - 1 + 0.1 = 0.0048374; the batch's n-1 deviation is 0.5774."""
    streams = {"log_probs": [-1.0, -2.0], "old_log_probs": [-1.0, -2.0], "ref_log_probs": [-1.1, -2.1]}
    samples = [s | streams for s in rewarded((0, 1), (0, 1), (1, 0), (1, 0))]
    path = write_jsonl(tmp_path / "rollouts.jsonl", samples)
    told = compared(capsys, tmp_path, path, "--kl-coef", beta, "--layouts", "dp1,dp2")
    kl = math.exp(-0.1) - 0.9
    for mode in told.modes:
        assert per_layout(told, mode, "pg_loss") == [0.0] * 3
        assert per_layout(told, mode, "kl_loss") == [exactly(kl)] * 3
        assert per_layout(told, mode, "loss") == [exactly(beta * kl)] * 3
        assert (told.modes[mode]["grad_norm_log_probs"] > 0) == (beta > 0)
        assert told.modes[mode]["raw_reward_batch_std"] == pytest.approx(0.5773503, abs=1e-7)
    assert "zero-variance groups 2/2: every advantage is 0, so pg_loss is exactly 0" in told.err
    assert ("what moves the policy is the KL term alone" in told.err) == (beta > 0)
    rows = [line.split() for line in replay(capsys, tmp_path, path, "--kl-coef", beta, "--layouts", "dp1").out.splitlines()]
    assert ["every", "advantage", "is", "0", "2"] in rows
    assert ["prompt", "groups", "with", "a", "reward", "2"] in rows
    assert ["pg_loss", "0", "0"] in rows, "all modes but prompt_mean, whose total weight is P/N, in one column"
    assert ["standard", "deviation", "over", "the", "batch", "0.577"] in rows
    assert [row[0] for row in rows if row[:1] == ["loss"]] == (["loss"] if beta else [])


# -- the deviation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["grpo", "mean_only"])
def test_a_group_of_one_gets_0_and_stays_finite(tmp_path, capsys, rule) -> None:
    found = advantages_of(capsys, tmp_path, rewarded((0, 1), (1, 1), (1, 0), (1, 0)), rule)
    scale = 1.0 if rule == "mean_only" else 1 / (3**-0.5 + 1e-6)
    assert found == [0.0, *(exactly(a * scale) for a in (2 / 3, -1 / 3, -1 / 3))]


def test_singletons_only_are_told_to_carry_no_signal(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, rewarded((0, 1), (1, 0), (2, 1)), "--layouts", "dp1,dp3")
    for mode in told.modes:
        assert per_layout(told, mode, "pg_loss") == [0.0] * 3
        assert told.modes[mode]["grad_norm_log_probs"] == 0.0
    assert "zero-variance groups 3/3: every advantage is 0, so pg_loss is exactly 0 and there is no signal" in told.err


def test_the_deviation_divides_by_n_minus_1_and_the_rule_is_printed(tmp_path, capsys) -> None:
    """Rewards 1,0: 0.5 / (0.70711 + 1e-6) = 0.70711; dividing by n would give 1."""
    samples = rewarded((0, 1), (0, 0))
    found = advantages_of(capsys, tmp_path, samples, "grpo")
    assert found == [exactly(0.5 / (0.5**0.5 + 1e-6)), exactly(-0.5 / (0.5**0.5 + 1e-6))]
    assert found[0] == pytest.approx(0.7071, abs=1e-4)
    assert f"advantages: from rewards: {STD}" in replay(capsys, tmp_path, samples).out


def slime_dump(path: Path, samples: list[Sample]) -> Path:
    rows: list[dict[str, Any]] = [{**s, "tokens": list(range(s.pop("total_length")))} for s in map(dict, samples)]
    torch.save({"rollout_id": 0, "samples": rows}, path)
    return path


def test_every_source_of_rollouts_uses_the_same_rule(tmp_path, capsys) -> None:
    """JSONL, a slime dump and synthetic rollouts; a file's own advantages are used, and named, where it has them."""
    samples = rewarded((0, 1), (0, 0), (1, 1), (1, 0), lengths=(1, 3, 4, 8))
    lines = compared(capsys, tmp_path, samples)
    dump = compared(capsys, tmp_path, slime_dump(tmp_path / "0.pt", samples))
    synthetic = compared(capsys, tmp_path, "synthetic", "--synthetic-prompts", 4)
    for told in (lines, dump, synthetic):
        assert told.step["advantages"] == f"from rewards: {STD}"
    assert lines.modes["token_mean"]["pg_loss"] == exactly(0.1875 / (0.5**0.5 + 1e-6))
    for mode in lines.modes:
        assert dump.modes[mode]["pg_loss"] == lines.modes[mode]["pg_loss"]
    own = compared(capsys, tmp_path, [s | {"advantage": 0.25} for s in samples])
    assert own.step["advantages"] == "recorded in the file"
    assert own.modes["token_mean"]["pg_loss"] == exactly(-0.25)
    again = compared(capsys, tmp_path, [s | {"advantage": 0.25} for s in samples], "--advantages", "grpo")
    assert again.modes["token_mean"]["pg_loss"] == exactly(0.1875 / (0.5**0.5 + 1e-6))


# -- what the gradient saw --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "zero_variance", "told_apart", "loss"), [("acc", 1, 0, 0.0471404), ("score", 0, 1, 0.3952950)], ids=["acc", "score"]
)
def test_groups_are_counted_by_the_advantages_that_the_gradient_saw(
    tmp_path, capsys, key: str, zero_variance: int, told_apart: int, loss: float
) -> None:
    """Group 0: acc 0, 0, 0, 0, score 0, 0, -0.5, -1 at lengths 2, 4, 8, 10; group 1: acc and score 1, 0 at lengths 2, 4."""
    group_0 = [(0, 2, 0.0, 0.0), (0, 4, 0.0, 0.0), (0, 8, 0.0, -0.5), (0, 10, 0.0, -1.0)]
    rows = [
        {"group_index": group, "response_length": n, "total_length": n + 2, "reward": {"acc": acc, "score": score}}
        for group, n, acc, score in [*group_0, (1, 2, 1.0, 1.0), (1, 4, 0.0, 0.0)]
    ]
    told = compared(capsys, tmp_path, rows, "--reward-key", key)
    values = told.modes["token_mean"]
    assert (values["zero_variance_groups"], values["all_wrong_groups"]) == (zero_variance, 1)
    assert values["all_wrong_groups_with_advantage"] == told_apart
    assert values["pg_loss"] == pytest.approx(loss, abs=1e-7)
    assert ("warning: groups without a right answer whose advantages are not 0: 1 of 2; wrong" in told.err) == bool(told_apart)


@pytest.mark.parametrize(("buffer", "zero_variance", "told_apart"), [(0, 4, 0), (14, 2, None)])
def test_in_training_a_penalised_group_is_no_zero_variance_group(
    tmp_path, capsys, buffer: int, zero_variance: int, told_apart: int | None
) -> None:
    """The task running-sum, seed 0, 8 prompts x 4: 4 groups of equal rewards, of which the penalty tells 2 apart."""
    options = ["--steps=1", "--rollout-batch-size=8", "--n-samples-per-prompt=4", "--device=cpu", f"--overlong-buffer={buffer}"]
    told = aggcli(capsys, "run", *options, "--output", tmp_path / "out")
    (step,) = records(tmp_path / "out" / "metrics.jsonl")
    assert step["zero_variance_groups"] == zero_variance
    assert step["groups"] == 8
    apart = step["all_wrong_groups_with_advantage"]
    assert apart == told_apart if told_apart is not None else apart <= 2
    assert ("warning: 1 step of a run was trained on a group without a right answer" in told.err) == bool(apart)


def test_a_single_rollout_is_not_announced_as_equal_rewards(tmp_path, capsys) -> None:
    rows = [{"group_index": g, "response_length": 3, "total_length": 5, "reward": r} for g, r in ((0, 1), (1, 1), (1, 0))]
    told = compared(capsys, tmp_path, rows)
    assert "zero-variance groups 1/2: every advantage in them is 0" in told.err
    assert "equal rewards" not in told.err


def test_each_run_of_a_stack_has_the_numbers_of_its_own_groups() -> None:
    """Rewards 1 1 | 1 0 in two groups of the first run, none in the second, 0 0 in one group of the third."""
    reward_S = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    group_S, run_S = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 0, 2, 2])
    first, none, third = group_values(GlobalView(reward_S, torch.arange(6), group_S, run_S), 1.0, 3)
    assert first["raw_reward_batch_std"] == 0.5  # mean 3/4: sqrt((3 * 1/16 + 9/16) / 3)
    assert [first[name] for name in ("groups", "zero_variance_groups", "all_right_groups", "all_wrong_groups")] == [2, 1, 1, 0]
    assert [first[name] for name in ("pass@1", "pass@2", "pass@4", "pass@4/groups_left_out")] == [0.75, 1.0, None, 2]
    assert none == {}
    assert [third[name] for name in ("groups", "zero_variance_groups", "all_right_groups", "all_wrong_groups")] == [1, 1, 0, 1]
    assert [third[name] for name in ("raw_reward_batch_std", "pass@1", "pass@2")] == [0.0, 0.0, 0.0]
