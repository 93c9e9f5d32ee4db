"""The divisor of `constant`, modes told apart, and the mode in force."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cli import aggcli, compared, exactly, per_layout, records, refused, replay, strict_json, write_jsonl
from tests.fixtures import FX_B, MODES, Sample, fx_b, sample
from tests.speed import few

PER_TOKEN = ("log_probs", "old_log_probs", "ref_log_probs")


def padded(made: Sample, tokens: int) -> Sample:
    """The sample with masked-out padding at its end, which has numbers of its own."""
    length = made["response_length"]
    return {
        **made,
        **{name: [*made[name], *[-9.0] * tokens] for name in PER_TOKEN},
        "response_length": length + tokens,
        "total_length": made["total_length"] + tokens,
        "loss_mask": [1] * length + [0] * tokens,
    }


# -- the divisor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", few([2, 1, 4]))
@pytest.mark.parametrize("padding", [0, 20])
def test_constant_knows_no_width_of_a_batch(tmp_path, capsys, size, padding) -> None:
    """0.06875 for L = 10 (faults: 0.1354167 by the padded widths 3 and 8, 0.0006875 by a fixed 1000)."""
    samples = [padded(s, padding) for s in fx_b()]
    told = compared(capsys, tmp_path, samples, "--micro-batch-size", size, "--layouts", "dp1,dp2,dp4,dp2cp2")
    for mode in MODES:
        assert per_layout(told, mode, "pg_loss") == [exactly(FX_B[mode])] * 5, mode


def test_doubling_the_divisor_halves_the_loss_and_the_gradient(tmp_path, capsys) -> None:
    flags = ("--json", "--loss-aggregation", "constant", "--loss-aggregation-divisor")
    ten, twenty = (replay(capsys, tmp_path, fx_b(), *flags, L, command="run").modes["constant"] for L in (10, 20))
    assert (ten["pg_loss"], twenty["pg_loss"]) == (exactly(0.06875), exactly(0.034375))
    assert twenty["grad_norm_log_probs"] == exactly(ten["grad_norm_log_probs"] / 2)


@pytest.mark.parametrize("divisor", ["0", "-0.0", "-1", "nan", "inf", "-inf", None])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["", "dry run"])
def test_a_divisor_that_divides_nothing_is_refused_at_start_up(tmp_path, capsys, divisor, dry) -> None:
    given = () if divisor is None else ("--loss-aggregation-divisor", divisor)
    told = replay(capsys, tmp_path, fx_b(), "--loss-aggregation", "constant", *given, *dry, command="run")
    assert "--loss-aggregation-divisor" in refused(told)
    assert "positive" in refused(told)
    assert not told.output.exists()


def test_compare_says_and_records_the_divisor_it_falls_back_to(tmp_path, capsys) -> None:
    """Without a flag: the longest response, 8 tokens; 2.75/(4*8) = 0.0859375. With a response limit: that, 16."""
    for flags, divisor in (((), 8), (("--max-response-length", 16), 16)):
        told = replay(capsys, tmp_path, fx_b(), "--json", *flags)
        assert f"constant divides by {divisor}" in told.err
        assert told.modes["constant"]["pg_loss"] == exactly(2.75 / (4 * divisor))
        assert strict_json(told.out)["divisor"] == divisor
        assert strict_json((told.output / "constant" / "manifest.json").read_text())["divisor"] == divisor


# -- three means ------------------------------------------------------------------------------------------------------


def test_pooling_in_each_prompt_over_the_batch_and_in_each_sample_are_three_numbers_in_one_table(tmp_path, capsys) -> None:
    told = replay(
        capsys,
        tmp_path,
        fx_b(),
        "--prompt-mean-scale",
        "prompts",
        "--modes",
        "token_mean,prompt_mean,sample_mean",
        "--layouts",
        "dp1,dp2",
    )
    assert told.code == 0
    table = [line.split() for line in told.out.splitlines()]
    assert ["step", "0", "token_mean", "prompt_mean", "sample_mean"] in table
    assert ["pg_loss", "0.172", "0.194", "-0.025"] in table


def test_prompt_mean_pools_the_tokens_of_a_group_and_does_not_average_its_samples(tmp_path, capsys) -> None:
    """Group of 1 token of loss 0 and 3 of loss 4: pooled 3, mean of sample means 2."""
    samples = [sample(1, advantage=0, group_index=0), sample(3, advantage=-4, group_index=0)]
    told = compared(capsys, tmp_path, samples)
    assert told.modes["prompt_mean"]["pg_loss"] == exactly(3.0)
    assert told.modes["sample_mean"]["pg_loss"] == exactly(2.0)


@pytest.mark.parametrize(
    ("mode", "weight"),
    [("sample_mean", "1/(N*n_r)"), ("prompt_mean", "1/(N*T_p)"), ("token_mean", "1/T"), ("constant", "1/(N*L)")],
)
def test_one_line_says_how_a_mode_weighs_a_token(tmp_path, capsys, mode, weight) -> None:
    told = aggcli(capsys, "modes", mode)
    (line,) = [line for line in told.out.splitlines() if "weight of a token" in line]
    assert weight in line


@pytest.mark.parametrize(
    ("mode", "weight"),
    [("sample_mean", "1/(N*n_r)"), ("prompt_mean", "1/(N*T_p)"), ("token_mean", "1/T"), ("constant", "1/(N*L)")],
)
def test_the_help_of_run_says_how_each_mode_weighs_a_token(tmp_path, capsys, mode, weight) -> None:
    told = aggcli(capsys, "run", "--help-all")
    text = re.sub(r"\s+", " ", told.out)
    assert mode in text
    assert weight in re.sub(r"\s", "", told.out)


# -- the mode in force ------------------------------------------------------------------------------------------------


def test_the_mode_in_force_is_printed_and_recorded_even_when_it_is_the_default(tmp_path, capsys) -> None:
    path = write_jsonl(tmp_path / "rollouts.jsonl", fx_b())
    plain = replay(capsys, tmp_path, path, command="run")
    given = replay(capsys, tmp_path, path, "--loss-aggregation", "sample_mean", command="run")
    for told in (plain, given):
        assert "mode: sample_mean" in told.out.splitlines()
        manifest = strict_json((told.output / "manifest.json").read_text())
        assert manifest["mode"] == manifest["settings"]["loss_aggregation"] == "sample_mean"
        assert [line["mode"] for line in records(told.output / "metrics.jsonl")] == ["sample_mean"]
    for name in ("metrics.jsonl", "layouts.jsonl"):
        assert (plain.output / name).read_bytes() == (given.output / name).read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_record_holds_every_setting_that_moves_the_loss(tmp_path, capsys, mode) -> None:
    divisor = ("--loss-aggregation-divisor", 10) if mode == "constant" else ()
    flags = ("--eps-clip", 0.1, "--eps-clip-high", 0.3, "--advantages", "mean_only", "--prompt-mean-scale", "prompts")
    told = replay(capsys, tmp_path, fx_b(), "--loss-aggregation", mode, *flags, *divisor, command="run")
    manifest = strict_json((told.output / "manifest.json").read_text())
    settings: dict[str, Any] = manifest["settings"]
    assert manifest["mode"] == mode
    assert (settings["eps_clip"], settings["eps_clip_high"], settings["advantages"]) == (0.1, 0.3, "mean_only")
    assert settings["prompt_mean_scale"] == "prompts"
    assert manifest["divisor"] == (10 if mode == "constant" else None)
    for part in (f"mode: {mode}", "clip: 0.1 below, 0.3 above", "advantages: from rewards: reward - group mean, no std"):
        assert part in told.out.splitlines()


def test_a_record_holds_the_advantage_rule_that_auto_came_to(tmp_path, capsys) -> None:
    without = [{k: v for k, v in s.items() if k != "advantage"} for s in fx_b()]
    for samples, rule in ((fx_b(), "recorded in the file"), (without, "(reward - group mean) / (std + 1e-6), std with n-1")):
        told = replay(capsys, tmp_path, samples, command="run")
        assert rule in told.out
        assert rule in (told.output / "metrics.jsonl").read_text() + (told.output / "manifest.json").read_text()
