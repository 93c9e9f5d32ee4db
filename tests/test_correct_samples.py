"""pass@k and the statistics of correct samples."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tests.cli import compared, exactly, per_layout, records, replay, write_jsonl
from tests.fixtures import Sample, fx_e, sample
from tests.speed import few


def scored(groups: Iterable[Iterable[int | None]]) -> list[Sample]:
    """On-policy samples of these rewards, one list a group, in order."""
    return [sample(2, group_index=f"g{at}", reward=reward) for at, rewards in enumerate(groups) for reward in rewards]


# -- pass@k -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", few([1, None, 2, 3, 4]))
def test_pass_at_k_follows_the_group_and_not_the_position(tmp_path, capsys, shuffle) -> None:
    """Groups 1,0,0,0 / 1,1,0 / 0,0,0,0. pass@1 (1/4 + 2/3 + 0)/3; pass@2 (1/2 + 1 + 0)/3; pass@4 (1 + 0)/2, the group of 3
    left out."""
    samples = scored(([1, 0, 0, 0], [1, 1, 0], [0, 0, 0, 0]))
    if shuffle is not None:
        random.Random(shuffle).shuffle(samples)
    told = compared(capsys, tmp_path, samples, "--layouts", "dp1,dp2:balanced,dp4")
    for name, value in {"pass@1": 0.25 / 3 + 2 / 9, "pass@2": 0.5, "pass@4": 0.5, "pass@4/groups_left_out": 1}.items():
        assert per_layout(told, "sample_mean", name) == [exactly(value)] * 4
    assert told.modes["sample_mean"]["pass@1"] == pytest.approx(0.3055556, abs=1e-7)
    assert "pass@1/groups_left_out" not in told.modes["sample_mean"]


def test_interleaved_groups_are_not_mixed(tmp_path, capsys) -> None:
    """ABABABAB, A all right and B all wrong: pass@4 0.5; by position it would be 1."""
    right, wrong = scored([[1] * 4])[:4], scored([[], [0] * 4])
    samples = [s for pair in zip(right, wrong, strict=True) for s in pair]
    told = compared(capsys, tmp_path, samples, "--layouts", "dp1,dp2,dp8")
    for name in ("pass@1", "pass@2", "pass@4"):
        assert per_layout(told, "sample_mean", name) == [0.5] * 4


def test_siblings_of_a_fan_out_are_one_try(tmp_path, capsys) -> None:
    """Rollouts x (right, three samples) and y (wrong): pass@1 1/2, not 3/4, and pass@4 has no value."""
    samples = [s | {"rollout_id": r} for s, r in zip(scored([[1, 1, 1, 0]]), "xxxy", strict=True)]
    values = compared(capsys, tmp_path, samples).modes["sample_mean"]
    assert (values["pass@1"], values["pass@2"], values["pass@4"]) == (0.5, 1.0, None)


def test_unscored_rollouts_are_no_tries(tmp_path, capsys) -> None:
    values = compared(capsys, tmp_path, scored([[1, 0, None, None]])).modes["sample_mean"]
    assert (values["pass@1"], values["pass@2"], values["pass@4"]) == (0.5, 1.0, None)


def test_cutting_optimizer_steps_does_not_cut_the_groups_of_pass_at_k(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, scored([[1, 0, 0, 0]]), "--global-batch-size", 2, "--modes", "sample_mean")
    assert [step["modes"]["sample_mean"]["pass@4"] for step in told.steps] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("groups", "known", "blank", "left_out"),
    [
        ([[0, 0, 0]], {"pass@1": 0.0, "pass@2": 0.0}, "pass@4", 1),
        ([[1, 1, 1]], {"pass@1": 1.0, "pass@2": 1.0}, "pass@4", 1),
        ([[1], [0], [0]], {"pass@1": 1 / 3}, "pass@2", 3),
    ],
    ids=["no success", "all success", "one sample each"],
)
def test_fewer_than_k_tries_give_a_blank_and_never_a_1(tmp_path, capsys, groups, known, blank, left_out) -> None:
    path = write_jsonl(tmp_path / "rollouts.jsonl", scored(groups))
    values = compared(capsys, tmp_path, path).modes["sample_mean"]
    assert {name: values[name] for name in known} == {name: exactly(value) for name, value in known.items()}
    assert (values[blank], values[f"{blank}/groups_left_out"]) == (None, left_out)
    rows = [line.split() for line in replay(capsys, tmp_path, path).out.splitlines()]
    assert [blank] in rows
    assert [f"{blank}/groups_left_out", str(left_out)] in rows


# -- correct samples --------------------------------------------------------------------------------------------------

FX_E_LAYOUTS = [f"dp{dp}:{rule}" for dp in (1, 2, 4, 8) for rule in ("first-fit", "interleaved", "contiguous", "balanced")]
FX_E_LAYOUTS += ["dp1:first-fit@64", "dp1:first-fit@110", "dp2:first-fit@80", "dp4cp2:balanced", "dp16"]


@pytest.mark.parametrize("order", ["as given", "reversed", "permuted"])
def test_the_correct_samples_are_the_same_in_every_layout(tmp_path, capsys, order) -> None:
    """4 correct, lengths 11,14,15,17, mean 14.25 (faults: 14.5 DP2, 14.75 DP1 reversed, 12.5 DP4, and IndexError)."""
    samples = fx_e()
    if order != "as given":
        random.Random(3).shuffle(samples) if order == "permuted" else samples.reverse()
    flags = ("--log-correct-samples", "--layouts", ",".join(FX_E_LAYOUTS))
    told = replay(capsys, tmp_path, samples, *flags, command="run")
    assert told.code == 0, told.err
    lines = records(told.output / "layouts.jsonl")
    assert [line["layout"] for line in lines] == FX_E_LAYOUTS
    if order == "reversed":  # total lengths 38, 37, 36, 35, ...: 36 does not fit behind 38 + 37, 35 does, so one rank permutes
        (packed,) = [line for line in lines if line["layout"] == "dp1:first-fit@110"]
        assert packed["ranks"][0]["partition"][:4] == [0, 1, 3, 2]
    for line in lines:
        assert (line["correct/count"], line["correct/response_length"]) == (4, 14.25)
        assert line["correct/lengths"] == [11, 14, 15, 17]
        assert (line["incorrect/count"], line["incorrect/response_length"]) == (4, 14.75)
        for rank in line["ranks"]:
            held = [samples[at] for at in rank["partition"]]
            lengths = sorted(s["response_length"] for s in held if s["reward"] == 1)
            assert rank["correct/lengths"] == lengths
            assert rank["correct/count"] == len(lengths)
            assert rank["correct/response_length"] == (sum(lengths) / len(lengths) if lengths else None)
    rows = [line.split() for line in told.out.splitlines()]
    for layout in FX_E_LAYOUTS:
        assert [layout, "4", "14.2"] in [row[:3] for row in rows]


def test_shares_of_the_response_limit_are_reduced_by_sum_and_count(tmp_path, capsys) -> None:
    """Limit 20: 11,14,15 in 50 to 75 %, 17 in 75 to 100 %. Two of eight ranks' own shares are whole, the idle ones blank."""
    told = compared(capsys, tmp_path, fx_e(), "--max-response-length", 20, "--layouts", "dp1,dp3,dp8:contiguous")
    for name, share in {"p25": 0, "p50": 0, "p75": 0.75, "p100": 0.25}.items():
        assert per_layout(told, "sample_mean", f"correct_length/{name}") == [share] * 4
    ranks = told.modes["sample_mean"]["layouts"]["dp8:contiguous"]["ranks"]
    assert [rank["correct_length/p75"] for rank in ranks] == [1, None, None, 1, 1, None, 0, None]


def test_a_batch_without_a_correct_sample_is_blank_and_not_0(tmp_path, capsys) -> None:
    path = write_jsonl(tmp_path / "rollouts.jsonl", (s | {"reward": 0} for s in fx_e()))
    told = compared(capsys, tmp_path, path, "--layouts", "dp1,dp4:balanced")
    assert per_layout(told, "sample_mean", "correct/count") == [0] * 3
    for name in ("correct/response_length", "correct_length/p25", "correct_length/p100"):
        assert per_layout(told, "sample_mean", name) == [None] * 3
    rows = [line.split() for line in replay(capsys, tmp_path, path, "--layouts", "dp1,dp4:balanced").out.splitlines()]
    assert ["dp1", "0", "0", "-"] in rows
    assert ["their", "length", "(tokens)"] in rows


@pytest.mark.parametrize(("threshold", "count"), [(0.5, 3), (0.7, 2), (1.0, 1), (-1, 4)])
def test_correct_means_reaching_the_threshold(tmp_path, capsys, threshold, count) -> None:
    """Rewards 1, 0.7 minus rounding, 0.5, 0."""
    samples = [s | {"reward": r} for s, r in zip(scored([[0] * 4]), (1.0, 0.7 - 1e-9, 0.5, 0.0), strict=True)]
    told = compared(capsys, tmp_path, samples, "--correct-threshold", threshold, "--layouts", "dp1,dp4")
    assert per_layout(told, "sample_mean", "correct/count") == [count] * 3


def test_without_rewards_nothing_is_correct_or_wrong_and_the_reason_is_given(tmp_path, capsys) -> None:
    samples = [{k: v for k, v in s.items() if k != "reward"} | {"advantage": 1.0} for s in fx_e()]
    told = compared(capsys, tmp_path, samples, "--log-correct-samples", "--layouts", "dp1,dp2")
    assert not [name for name in told.modes["sample_mean"] if name.startswith(("correct", "raw_reward", "pass@"))]
    assert "skipped: raw_reward, correct/*, correct_length/*, pass@k: needs reward" in replay(capsys, tmp_path, samples).out
