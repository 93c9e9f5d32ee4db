"""Clipping, KL, entropy, and losses that look like faults."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tests import closed_form
from tests.cli import compared, exactly, per_layout, replay, write_jsonl
from tests.fixtures import LAYOUTS, MODES, Sample, fx_a, fx_b, random_fanout, sample
from tests.speed import few

METRICS = ("pg_clipfrac", "ppo_kl", "kl_loss", "entropy_loss", "ratio_deviation", "sampler_mismatch")
NEGATIVE_ZERO = re.compile(r"(?<![\w.])-0(\.0+)?(?![\w.])")


def off_policy(*rows: list[float], advantage: float = 1.0) -> list[Sample]:
    """Samples with these log-ratios."""
    made = []
    for row in rows:
        old = [-2.0] * len(row)
        made.append(
            sample(len(row), group_index=0, advantage=advantage, old_log_probs=old, log_probs=[-2.0 + x for x in row], reward=1)
        )
    return made


# -- means of means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_clipfrac_is_no_mean_of_rank_means(tmp_path, capsys, size) -> None:
    """Rank 0 clips 2 of 16 tokens, rank 1 2 of 4: 4/20 (fault 0.3125, which is right for the sample mean)."""
    rows = ([0.5] * 2 + [0.0] * 14, [0.5] * 2 + [0.0] * 2)
    told = compared(capsys, tmp_path, off_policy(*rows), "--micro-batch-size", size, "--layouts", "dp1,dp2,dp2cp2")
    assert per_layout(told, "token_mean", "pg_clipfrac") == [exactly(0.2)] * 4
    for mode in ("sample_mean", "prompt_mean", "constant"):
        assert per_layout(told, mode, "pg_clipfrac") == [exactly(0.3125)] * 4
    told = compared(capsys, tmp_path, off_policy(*rows), "--metric-aggregation", "matched", "--layouts", "dp1,dp2")
    for mode, share in (("prompt_mean", 0.2), ("token_mean", 0.2), ("sample_mean", 0.3125), ("constant", 4 / 20)):
        assert per_layout(told, mode, "pg_clipfrac") == [exactly(share)] * 3, mode


def test_the_sample_mean_of_a_metric_is_over_all_samples_and_not_over_ranks(tmp_path, capsys) -> None:
    """Shares 1/8, 1/2 | 1 on ranks of two and one: 13/24 (fault 0.65625)."""
    rows = ([0.5] + [0.0] * 7, [0.5, 0.0], [0.5])
    told = compared(capsys, tmp_path, off_policy(*rows), "--layouts", "dp1,dp2:contiguous,dp2:interleaved,dp3")
    assert per_layout(told, "sample_mean", "pg_clipfrac") == [exactly(13 / 24)] * 5


def test_entropy_is_no_mean_of_rank_means(tmp_path, capsys) -> None:
    """4 tokens at 1, 96 at 2: 1.96 per token (fault 1.5)."""
    samples = [sample(n, group_index=0, advantage=1, entropy=[value] * n) for n, value in ((4, 1.0), (96, 2.0))]
    told = compared(capsys, tmp_path, samples, "--layouts", "dp1,dp2,dp1cp2,dp2cp4")
    assert per_layout(told, "token_mean", "entropy_loss") == [exactly(1.96)] * 5
    assert per_layout(told, "sample_mean", "entropy_loss") == [exactly(1.5)] * 5


def test_means_over_samples_are_divided_once_at_the_end(tmp_path, capsys) -> None:
    """Lengths 2, 4 | 9 and rewards 1, 0 | 1 on ranks of two and one: 5 and 2/3 (faults 6 and 0.75)."""
    rows = zip((2, 4, 9), (1, 0, 1), ([0.5] * 2, [0.0] * 4, [2.0] * 9), strict=True)
    samples = [sample(n, reward=r, group_index=0, entropy=entropy) for n, r, entropy in rows]
    told = compared(capsys, tmp_path, samples, "--layouts", "dp1,dp2:contiguous,dp3,dp8,dp2cp2:contiguous")
    for name, value in {
        "response_length": 5.0,
        "raw_reward": 2 / 3,
        "correct/response_length": 5.5,
        "correct/entropy": 1.25,
        "incorrect/response_length": 4.0,
    }.items():
        assert per_layout(told, "sample_mean", name) == [exactly(value)] * 6, name


@pytest.mark.parametrize("size", few([2, 1, 5, 100]))
def test_every_metric_has_its_closed_form_in_every_layout(tmp_path, capsys, size) -> None:
    samples = random_fanout(3)
    told = compared(capsys, tmp_path, samples, "--micro-batch-size", size, "--layouts", LAYOUTS, "--no-samples")
    tokens = closed_form.token_numbers(samples, [s["advantage"] for s in samples], 0.2, 0.2)
    for mode in MODES:
        weight = closed_form.weights(samples, "token_mean" if mode == "token_mean" else "sample_mean")
        for name in METRICS:
            assert per_layout(told, mode, name) == [exactly(closed_form.weighted(weight, tokens[name]))] * 11, (mode, name)


# -- the clip indicator -----------------------------------------------------------------------------------------------


def four_tokens() -> list[Sample]:
    made = []
    for at, (ratio, advantage) in enumerate(((1.5, 1), (1.5, 1), (1.5, -1), (0.5, -1))):
        made.append(
            sample(1, group_index=at, advantage=advantage, old_log_probs=[-1.0], log_probs=[-1.0 + math.log(ratio)], reward=1)
        )
    return made


@pytest.mark.parametrize(
    ("flags", "share", "loss"),
    [
        # -1.2, -1.2, +1.5 (free: the advantage is negative), +0.8 (bound below); reversed 0.25, band-only 1.0
        (("--eps-clip", 0.2), 0.75, -0.025),
        (("--eps-clip", 0.2, "--eps-clip-high", 0.6), 0.25, (-1.5 - 1.5 + 1.5 + 0.8) / 4),
        (("--eps-clip", 0.6), 0.0, (-1.5 - 1.5 + 1.5 + 0.5) / 4),
        (("--eps-clip", 0.2, "--eps-clip-c", 1.25), 0.75, (-1.2 - 1.2 + 1.25 + 0.8) / 4),
    ],
    ids=["symmetric", "clip-higher", "wide", "dual clip"],
)
def test_the_clip_indicator_follows_the_sign_of_the_advantage(tmp_path, capsys, flags, share, loss) -> None:
    told = compared(capsys, tmp_path, four_tokens(), *flags, "--layouts", "dp1,dp2,dp4")
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        assert per_layout(told, mode, "pg_clipfrac") == [exactly(share)] * 4
        assert per_layout(told, mode, "pg_loss") == [exactly(loss)] * 4
    if "--eps-clip-c" in flags:
        assert per_layout(told, "token_mean", "pg_clipfrac_dual") == [exactly(0.25)] * 4


# -- zeros that are explained -----------------------------------------------------------------------------------------


def test_no_update_since_sampling_is_named_as_the_reason_of_clipfrac_0(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, fx_a(), "--layouts", LAYOUTS)
    for mode in MODES:
        for name in ("pg_clipfrac", "ppo_kl", "ratio_deviation"):
            assert per_layout(told, mode, name) == [0.0] * 11
        assert per_layout(told, mode, "ratio_max") == [1.0] * 11
    hint = "every ratio is exactly 1: pg_clipfrac and ppo_kl are 0 because nothing was updated since sampling"
    assert hint in told.err


def test_after_an_update_the_ratio_shows_and_the_hint_does_not(tmp_path, capsys) -> None:
    """FX-B: ratio 1.1 on 5 of 16 tokens, inside the clip of 0.2 and outside one of 0.05 where the advantage is positive."""
    told = compared(capsys, tmp_path, fx_b())
    assert "every ratio is exactly 1" not in told.err
    values = told.modes["token_mean"]
    assert (values["ratio_deviation"], values["ratio_max"], values["pg_clipfrac"]) == (exactly(0.5 / 16), exactly(1.1), 0.0)
    assert compared(capsys, tmp_path, fx_b(), "--eps-clip", 0.05).modes["token_mean"]["pg_clipfrac"] == exactly(5 / 16)


def test_a_ratio_next_to_1_is_as_far_from_it_as_its_logarithm_says(tmp_path, capsys) -> None:
    """Log-ratios of 2^-40 at every token: exp(x) - 1 = x + x^2 / 2, of which float64 holds 13 digits of 1 + x alone."""
    samples = [s | {"log_probs": [-1.0 + 2.0**-40] * s["response_length"]} for s in fx_b()]
    samples = [s | {"old_log_probs": [-1.0] * s["response_length"]} for s in samples]
    values = compared(capsys, tmp_path, samples).modes["token_mean"]
    assert values["ratio_deviation"] == pytest.approx(2.0**-40 + 2.0**-81, rel=1e-15, abs=0)


def test_with_one_stream_the_ratio_is_assumed_and_not_reported_as_measured(tmp_path, capsys) -> None:
    samples = [{k: v for k, v in s.items() if k != "old_log_probs"} for s in fx_b()]
    told = compared(capsys, tmp_path, samples)
    assert not {"pg_clipfrac", "ppo_kl", "ratio_deviation", "ratio_max"} & set(told.modes["sample_mean"])
    assert "the importance ratio is taken as 1" in told.err
    assert told.step["skipped"]["pg_clipfrac"] == "needs log_probs and old_log_probs (or rollout_log_probs)"


def test_a_loss_of_0_is_explained_and_never_printed_as_minus_0(tmp_path, capsys) -> None:
    equal = [sample(5, group_index=at // 2, reward=at % 2) for at in range(6)]
    for samples, mode in ((fx_a(), "sample_mean"), (equal, "token_mean"), (equal, "prompt_mean")):
        path = write_jsonl(tmp_path / "rollouts.jsonl", samples)
        told = replay(capsys, tmp_path, path, "--json", "--loss-aggregation", mode, "--layouts", LAYOUTS, command="run")
        assert per_layout(told, mode, "pg_loss") == [pytest.approx(0.0, abs=1e-15)] * 11
        assert told.modes[mode]["grad_norm_log_probs"] > 0
        assert "but the gradient is not: with ratios of 1" in told.err
        assert f"pg_loss is 0 under {mode}" in told.err
        assert "cancel; this is how a step starts, not a fault" in told.err
        printed = replay(capsys, tmp_path, path, "--loss-aggregation", mode, "--layouts", LAYOUTS, command="run").out
        assert ["pg_loss", "0"] in [line.split() for line in printed.splitlines()]
        assert not NEGATIVE_ZERO.search(printed)
        assert not NEGATIVE_ZERO.search(told.out)


def test_unequal_lengths_move_token_mean_off_0_and_no_note_is_given(tmp_path, capsys) -> None:
    told = replay(capsys, tmp_path, fx_a(), "--json", "--loss-aggregation", "token_mean", command="run")
    assert told.modes["token_mean"]["pg_loss"] == exactly(0.1875)
    assert "pg_loss is 0" not in told.err


# -- the sampler and the reference ------------------------------------------------------------------------------------


def engine_rounded(samples: list[Sample]) -> tuple[list[Sample], list[list[float]]]:
    """The samples with the inference engine's log-probabilities rounded to bfloat16, and the gaps."""
    made, gaps = [], []
    for s in samples:
        exact = [x - 0.001 for x in s["old_log_probs"]]
        rounded = torch.tensor(exact, dtype=torch.float64).bfloat16().double().tolist()
        made.append(s | {"old_log_probs": exact, "log_probs": exact, "rollout_log_probs": rounded})
        gaps.append([abs(a - b) for a, b in zip(exact, rounded, strict=True)])
    return made, gaps


def test_rounded_engine_log_probabilities_show_as_mismatch_and_not_as_clipping(tmp_path, capsys) -> None:
    samples, gaps = engine_rounded(fx_a())
    told = compared(capsys, tmp_path, samples, "--layouts", LAYOUTS)
    for mode in MODES:
        weight = closed_form.weights(samples, "token_mean" if mode == "token_mean" else "sample_mean")
        assert per_layout(told, mode, "sampler_mismatch") == [exactly(closed_form.weighted(weight, gaps))] * 11
        assert told.modes[mode]["sampler_mismatch"] > 1e-4
        assert per_layout(told, mode, "pg_clipfrac") == per_layout(told, mode, "ratio_deviation") == [0.0] * 11


def test_without_the_trainers_own_the_engines_stream_is_taken_and_the_ratio_shows_it(tmp_path, capsys) -> None:
    samples, gaps = engine_rounded(fx_a())
    only = [{k: v for k, v in s.items() if k != "old_log_probs"} for s in samples]
    told = compared(capsys, tmp_path, only, "--layouts", "dp1,dp4,dp2cp2")
    assert "old_log_probs are missing: rollout_log_probs are taken as the policy that sampled" in told.err
    deviation = per_layout(told, "token_mean", "ratio_deviation")
    assert deviation == [exactly(deviation[0])] * 4
    assert 0.99 * sum(map(sum, gaps)) / 16 < deviation[0] < 1.01 * sum(map(sum, gaps)) / 16


def test_exact_data_is_on_policy_in_every_layout(tmp_path, capsys) -> None:
    flags = ("--synthetic-prompts", 3, "--synthetic-group-size", "2-5", "--synthetic-fanout", 0.3)
    told = compared(capsys, tmp_path, "synthetic", *flags, "--layouts", f"{LAYOUTS},dp4:first-fit@100")
    for mode in MODES:
        for name in ("pg_clipfrac", "ppo_kl", "ratio_deviation"):
            assert per_layout(told, mode, name) == [0.0] * 12
        assert per_layout(told, mode, "ratio_max") == [1.0] * 12


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", -0.2), ("k2", (0.01 + 0.04 + 0.09) / 6), ("k3", 0.0254775)],
)
def test_the_kl_estimator_is_named_where_its_number_stands(tmp_path, capsys, estimator, value) -> None:
    """new - reference = -0.1, -0.2, -0.3: k1 is negative and says it is k1; k3 is mean(exp(-d) - 1 + d) >= 0."""
    reference = [-1.0, -1.5, -2.0]
    new = [x + d for x, d in zip(reference, (-0.1, -0.2, -0.3), strict=True)]
    path = write_jsonl(
        tmp_path / "rollouts.jsonl", [sample(3, group_index=0, advantage=1, log_probs=new, ref_log_probs=reference)]
    )
    flags = ("--kl-estimator", estimator, "--layouts", "dp1,dp2cp2")
    told = compared(capsys, tmp_path, path, *flags)
    for mode in MODES:
        assert per_layout(told, mode, "kl_loss") == [pytest.approx(value, abs=1e-7)] * 3
    rows = [line.split() for line in replay(capsys, tmp_path, path, *flags).out.splitlines()]
    (row,) = [row for row in rows if row[:1] == ["kl_loss"]]
    assert row[1:3] == ["(nats,", f"{estimator})"]
    assert [float(cell) for cell in row[3:]] == [pytest.approx(value, rel=0.005)] * 2, "every mode but token_mean by one rule"


@pytest.mark.parametrize(("estimator", "value"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)])
def test_the_unbiased_kl_estimate_is_multiplied_by_the_importance_ratio(tmp_path, capsys, estimator, value) -> None:
    """Ratios 2 and 1; new - reference = ln 2 and 0, so k3 is 1/2 - 1 + ln 2 and 0: the mean over two tokens, times 2."""
    streams = {"log_probs": [-1 + math.log(2), -1], "old_log_probs": [-1, -1], "ref_log_probs": [-1, -1]}
    samples = [sample(2, group_index=0, advantage=1, **streams)]
    flags = ("--kl-estimator", estimator, "--layouts", "dp1,dp1cp2")
    unbiased = compared(capsys, tmp_path, samples, "--kl-unbiased", *flags)
    assert per_layout(unbiased, "token_mean", "kl_loss") == [exactly(value)] * 3
    assert per_layout(compared(capsys, tmp_path, samples, *flags), "token_mean", "kl_loss") == [exactly(value / 2)] * 3
