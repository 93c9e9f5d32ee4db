"""Normalisation across micro-batches, accumulation and sample order."""

from __future__ import annotations

import math

import pytest

from tests.cli import compared, exactly, per_layout, records, replay
from tests.faults import averaged, off_by_half, ranks_add_up_to
from tests.fixtures import FX_B, MODES, Sample, fx_b, sample
from tests.speed import few

ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2))


def ordered(samples: list[Sample], order: tuple[int, ...]) -> list[Sample]:
    return [samples[at] for at in order]


def with_losses(*rows: list[float], **fields: object) -> list[Sample]:
    """On-policy samples with these per-token losses: the advantage is minus the loss."""
    return [sample(len(row), advantage=[-x for x in row], group_index=at, **fields) for at, row in enumerate(rows)]


# -- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", few(ORDERS))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_split_into_micro_batches_moves_the_loss(tmp_path, capsys, order, size) -> None:
    """The fault gives token_mean 0.0078125 for (0,1,2),(3), which order 0123 with size 3 is."""
    told = compared(
        capsys, tmp_path, ordered(fx_b(), order), "--micro-batch-size", size, "--layouts", "dp1,dp2:interleaved,dp2:contiguous"
    )
    for mode in MODES:
        assert per_layout(told, mode, "pg_loss") == [exactly(FX_B[mode])] * 4, mode
    assert told.modes["token_mean"]["micro_batches"] == -(-4 // size)


@pytest.mark.parametrize("tokens", few([11, 1, 4, 16, 28]))
def test_no_token_budget_moves_the_loss_either(tmp_path, capsys, tokens) -> None:
    """Total lengths 4, 6, 7, 11: one sample a micro-batch, pairs, everything."""
    told = compared(capsys, tmp_path, fx_b(), "--max-tokens-per-gpu", tokens, "--layouts", "dp1,dp2:balanced,dp1cp2")
    for mode in MODES:
        assert per_layout(told, mode, "pg_loss") == [exactly(FX_B[mode])] * 4, mode
    assert told.modes["token_mean"]["micro_batches"] == {1: 4, 4: 4, 11: 3, 16: 3, 28: 1}[tokens]


def test_accumulation_steps_move_neither_the_loss_nor_the_gradient_norm(tmp_path, capsys) -> None:
    """d pg_loss / d log_prob is w*r*A: 5 tokens of 0.55/16 and 11 of 0.5/16. The fault: 0.171875, 0.0859375, 0.0429688."""
    norm = math.sqrt(5 * 0.55**2 + 11 * 0.5**2) / 16
    for size, micro_batches in ((4, 1), (2, 2), (1, 4)):
        told = replay(capsys, tmp_path, fx_b(), "--loss-aggregation", "token_mean", "--micro-batch-size", size, command="run")
        assert told.code == 0
        (line,) = records(told.output / "metrics.jsonl")
        assert (line["micro_batches"], line["pg_loss"]) == (micro_batches, exactly(0.171875))
        assert line["grad_norm_log_probs"] == exactly(norm)
        assert "grad_norm" not in line, "that is the norm by a policy's parameters, and a replay has none"


# -- order and ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", few(["balanced", "first-fit", "interleaved", "contiguous"]))
def test_neither_sample_order_nor_the_number_of_ranks_moves_any_mode(tmp_path, capsys, rule) -> None:
    layouts = ",".join(f"dp{dp}:{rule}" for dp in (1, 2, 4))
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)):
        told = compared(capsys, tmp_path, ordered(fx_b(), order), "--layouts", layouts)
        for mode in MODES:
            assert per_layout(told, mode, "pg_loss") == [exactly(FX_B[mode])] * 4, (mode, order)
        assert told.step["layout_deviation"] < 1e-12


def test_the_layout_check_fails_when_a_layout_does_move_a_number(tmp_path, capsys, monkeypatch) -> None:
    """An average over ranks where a sum belongs, put into the engine: exit code 1, and all is recorded."""
    ranks_add_up_to(monkeypatch, averaged)
    told = replay(capsys, tmp_path, fx_b(), "--layouts", "dp1,dp2,dp4")
    assert told.code == 1
    assert told.err.splitlines()[-1].startswith("aggcli: step 0: a layout changed a number")
    assert "pg_loss" in told.out  # the table is printed all the same
    lines = records(told.output / "token_mean" / "layouts.jsonl")
    assert [line["pg_loss"] for line in lines] == [exactly(0.171875 / dp) for dp in (1, 2, 4)]


@pytest.mark.parametrize(
    "name",
    few(
        [
            *("ppo_kl", "gradient", "ratio_max", "raw_reward", "samples", "pg_loss", "loss", "total_weight", "pg_clipfrac"),
            *("kl_loss", "entropy_loss", "ratio_deviation", "response_length", "correct/response_length"),
            *("correct/entropy", "tokens", "correct/count", "correct_length/p25"),
        ],
        fast=5,
    ),
)
def test_the_layout_check_looks_at_every_number_and_not_at_the_loss_alone(tmp_path, capsys, monkeypatch, name) -> None:
    """Each kind of number (weighted, norm, mean, count, maximum) wrong alone, in a layout that is right in all the others."""
    samples = [s | {"entropy": [1.0] * s["response_length"]} for s in fx_b()]
    flags = ("--eps-clip", 0.05, "--kl-coef", 0.1, "--modes", "sample_mean", "--layouts", "dp1,dp2")
    assert replay(capsys, tmp_path, samples, *flags).code == 0
    ranks_add_up_to(monkeypatch, off_by_half(name))
    told = replay(capsys, tmp_path, samples, *flags)
    assert told.code == 1
    assert told.err.splitlines()[-1].startswith("aggcli: step 0: a layout changed a number")


# -- counts that do not divide evenly ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", few(["contiguous", "first-fit", "interleaved", "balanced"]))
def test_a_count_that_does_not_divide_evenly_drops_no_sample(tmp_path, capsys, rule) -> None:
    """7 samples of 1 to 7 tokens of loss 1 on 3 ranks, two a micro-batch: 7 samples, 28 tokens; constant 28/(7*10)."""
    samples = with_losses(*([1.0] * n for n in range(1, 8)))
    told = compared(capsys, tmp_path, samples, "--micro-batch-size", 2, "--layouts", f"dp3:{rule}")
    for mode, loss in {"sample_mean": 1.0, "prompt_mean": 1.0, "token_mean": 1.0, "constant": 0.4}.items():
        values = told.modes[mode]["layouts"][f"dp3:{rule}"]
        assert (values["samples"], values["tokens"], values["pg_loss"]) == (7, 28, exactly(loss))
        assert sorted(s for rank in values["ranks"] for s in rank["partition"]) == list(range(7))
        assert sum(rank["tokens"] for rank in values["ranks"]) == 28


def test_the_last_optimizer_step_holds_what_is_left(tmp_path, capsys) -> None:
    """7 rollouts in steps of 3: 3 + 3 + 1 samples, 6 + 15 + 7 tokens, each step's own denominators."""
    samples = with_losses(*([float(n)] * n for n in range(1, 8)))
    told = compared(capsys, tmp_path, samples, "--global-batch-size", 3)
    values = [step["modes"]["sample_mean"] for step in told.steps]
    assert [(v["samples"], v["tokens"]) for v in values] == [(3, 6), (3, 15), (1, 7)]
    assert [v["pg_loss"] for v in values] == [exactly(2.0), exactly(5.0), exactly(7.0)]
    assert "7 rollouts are no multiple of --global-batch-size 3: the last optimizer step has 1" in told.err


def test_denominators_are_counted_per_optimizer_step(tmp_path, capsys) -> None:
    """Steps of two: 1 and 3 tokens of losses -.55 and .5, then 4 and 8 tokens of the same."""
    told = compared(capsys, tmp_path, fx_b(), "--global-batch-size", 2)
    expected = [(-0.55 + 3 * 0.5) / 4, (4 * -0.55 + 8 * 0.5) / 12]
    assert [step["step"] for step in told.steps] == [0, 1]
    assert [step["modes"]["token_mean"]["pg_loss"] for step in told.steps] == [exactly(value) for value in expected]


# -- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("order", few([(0, 1), (1, 0)]))
def test_one_big_batch_and_the_same_batch_accumulated_agree(tmp_path, capsys, dtype, limit, size, order) -> None:
    """5 tokens of loss 1 and 1 token of loss 3: token_mean 8/6 (fault: 2), sample_mean 2, constant 8/(2*10)."""
    samples = ordered(with_losses([1.0] * 5, [3.0]), order)
    told = compared(
        capsys, tmp_path, samples, "--micro-batch-size", size, "--dtype", dtype, "--layouts", "dp1,dp2:contiguous,dp2:balanced"
    )
    for mode, loss in {"token_mean": 8 / 6, "sample_mean": 2.0, "prompt_mean": 2.0, "constant": 0.4}.items():
        assert per_layout(told, mode, "pg_loss") == [pytest.approx(loss, rel=limit)] * 4
