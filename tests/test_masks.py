"""Masks, fully masked samples, empty steps and idle ranks."""

from __future__ import annotations

import math
import random

import pyarrow.parquet
import pytest

from tests.cli import aggcli, compared, exactly, per_layout, records, refused, replay, write_jsonl
from tests.fixtures import FX_B, LAYOUTS, MODES, Sample, fx_b, fx_c, random_fanout, sample
from tests.speed import few

STREAMS = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy")
WITH_KL = ("--kl-coef", 0.1, "--entropy-coef", 0.01)


# -- what lies under the mask -----------------------------------------------------------------------------------------


def test_masked_tokens_are_in_neither_numerator_nor_denominator(tmp_path, capsys) -> None:
    """Losses 1,7 / 1,9 with masks 1,0 / 1,0: 1 (fault 9); constant 2/(2*10)."""
    rows = ([1, 7], [1, 9])
    samples = [sample(2, advantage=[-x for x in row], loss_mask=[1, 0], group_index=at) for at, row in enumerate(rows)]
    told = compared(capsys, tmp_path, samples, "--layouts", LAYOUTS)
    for mode, loss in zip(MODES, (1.0, 1.0, 1.0, 0.1), strict=True):
        assert per_layout(told, mode, "pg_loss") == [exactly(loss)] * 11


def junk(samples: list[Sample], values: list[float | None]) -> list[Sample]:
    """The samples with other numbers wherever the mask is 0, in every stream and in the advantage."""
    draw, made = random.Random(1), []
    for s in samples:
        changed = dict(s)
        for name in (*STREAMS, "advantage"):
            row = s[name] if isinstance(s[name], list) else [s[name]] * s["response_length"]
            changed[name] = [x if m else draw.choice(values) for x, m in zip(row, s["loss_mask"], strict=True)]
        made.append(changed)
    return made


@pytest.mark.parametrize(
    "values",
    few([[math.nan], [-3.5, -0.001, 2.0, 17.25], [math.inf, -math.inf], [1e300, -1e300], [None]]),
    ids=["NaN", "numbers", "infinity", "overflow", "null"],
)
def test_nothing_under_the_mask_reaches_any_record(tmp_path, capsys, values) -> None:
    clean, dirty = random_fanout(), junk(random_fanout(), values)
    results = []
    for samples in (clean, dirty):
        path = write_jsonl(tmp_path / "rollouts.jsonl", samples)
        told = replay(capsys, tmp_path, path, *WITH_KL, "--layouts", "dp1,dp2:balanced,dp2cp2")
        assert told.code == 0, told.err
        results.append(told)
    for mode in MODES:
        for name in ("metrics.jsonl", "layouts.jsonl"):
            first, second = ((told.output / mode / name).read_bytes() for told in results)
            assert first == second
        first, second = (pyarrow.parquet.read_table(next((t.output / mode / "samples").iterdir())) for t in results)
        assert first.equals(second)


# -- masks in the middle ----------------------------------------------------------------------------------------------


def test_masked_tokens_in_the_middle_lengthen_the_response_and_change_nothing_else(tmp_path, capsys) -> None:
    """Masks 1,1,0...0,1,1 with 0 to 50 zeros: loss 1 and 4 trained tokens each time (faults: 4/(4+k) and 4+k)."""
    folder = tmp_path / "middles"
    folder.mkdir()
    for k in range(51):
        mask = [1, 1, *[0] * k, 1, 1]
        loss = [-1.0, -1.0, *[-5.0] * k, -1.0, -1.0]
        write_jsonl(tmp_path / f"middles/{k}.jsonl", [sample(4 + k, advantage=loss, loss_mask=mask, group_index=0)])
    told = compared(capsys, tmp_path, folder, "--layouts", "dp1,dp1cp2", "--no-samples")
    assert len(told.steps) == 51
    for k, step in enumerate(told.steps):
        for mode, loss in zip(MODES, (1.0, 1.0, 1.0, 0.4), strict=True):
            values = step["modes"][mode]
            assert [values["layouts"][name]["pg_loss"] for name in ("dp1", "dp1cp2")] == [exactly(loss)] * 2
            assert (values["tokens"], values["response_tokens"], values["response_length"]) == (4, 4 + k, 4 + k)


# -- fully masked samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", few([3, 1, 2, 4]))
def test_a_fully_masked_sample_counts_in_n_under_every_layout(tmp_path, capsys, size) -> None:
    """N = 4: sample_mean -0.125 (not -0.1667), constant -0.0375 (not -0.05)."""
    told = compared(
        capsys, tmp_path, fx_c(), "--micro-batch-size", size, "--layouts", "dp1,dp2:interleaved,dp2:contiguous,dp4:contiguous"
    )
    for mode, loss in zip(MODES, (-0.125, -1 / 7, -1.5 / 13, -0.0375), strict=True):
        assert per_layout(told, mode, "pg_loss") == [exactly(loss)] * 5, mode
        assert per_layout(told, mode, "fully_masked_samples") == [1] * 5
        alone = told.modes[mode]["layouts"]["dp4:contiguous"]["ranks"][3]
        assert (alone["partition"], alone["tokens"], alone["fully_masked_samples"], alone["pg_loss"]) == ([3], 0, 1, 0.0)
    assert "fully masked samples: 1" in told.err


def test_a_fully_masked_group_counts_among_the_prompts(tmp_path, capsys) -> None:
    """FX-C with all of group b masked: group a's 1.5/7 over P = 2 groups; sample_mean (-0.5 + 0.5)/4; token_mean 1.5/7."""
    samples = fx_c()
    samples[2]["loss_mask"] = [0] * 6
    told = compared(capsys, tmp_path, samples, "--layouts", LAYOUTS)
    for mode, loss in zip(MODES, (0.0, 1.5 / 14, 1.5 / 7, 1.5 / 40), strict=True):
        assert per_layout(told, mode, "pg_loss") == [exactly(loss)] * 11, mode


def test_a_fully_masked_sibling_is_no_rollout_of_its_own(tmp_path, capsys) -> None:
    """Rollout x: 2 tokens of loss 1 and a masked sibling; rollout y: 1 token of loss 4. N = 2: (1 + 4)/2."""
    rows = (("x", 2, -1, [1, 1]), ("x", 3, -1, [0, 0, 0]), ("y", 1, -4, [1]))
    samples = [sample(n, rollout_id=r, group_index=0, advantage=a, loss_mask=mask) for r, n, a, mask in rows]
    told = compared(capsys, tmp_path, samples, "--layouts", LAYOUTS)
    for mode, loss in zip(MODES, (2.5, 2.0, 2.0, 0.3), strict=True):
        assert per_layout(told, mode, "pg_loss") == [exactly(loss)] * 11, mode
    assert told.modes["sample_mean"]["rollouts"] == 2


# -- nothing trained --------------------------------------------------------------------------------------------------


def test_an_all_masked_row_gives_no_nan_in_any_number(tmp_path, capsys) -> None:
    samples = [s | {"entropy": [1.0] * s["response_length"]} for s in fx_c()]
    told = compared(capsys, tmp_path, samples, *WITH_KL, "--layouts", LAYOUTS)
    for mode in MODES:
        for name in ("pg_loss", "loss", "kl_loss", "ppo_kl", "entropy_loss", "grad_norm_log_probs", "correct/entropy"):
            assert all(math.isfinite(x) for x in per_layout(told, mode, name)), name
    assert per_layout(told, "token_mean", "entropy_loss") == [exactly(1.0)] * 11
    # The masked sample counts in the N of the metrics' sample mean too: 3 of 4.
    assert per_layout(told, "sample_mean", "entropy_loss") == [exactly(0.75)] * 11


def test_a_step_without_a_trained_token_is_marked_empty_and_has_no_loss(tmp_path, capsys) -> None:
    """Blank, not 0: in the JSON, in the records and in the table. The counts stay."""
    path = write_jsonl(tmp_path / "rollouts.jsonl", [s | {"loss_mask": [0] * s["response_length"]} for s in fx_b()])
    told = compared(capsys, tmp_path, path, "--layouts", "dp1,dp2,dp4")
    assert told.step["empty"] is True
    assert "no trained token at all: the step is empty and takes no optimizer step" in told.err
    for mode in MODES:
        for name in ("pg_loss", "loss", "grad_norm_log_probs", "pg_clipfrac", "ppo_kl", "kl_loss", "total_weight"):
            assert per_layout(told, mode, name) == [None] * 4, name
        assert per_layout(told, mode, "tokens") == [0] * 4
        (line,) = records(told.output / mode / "metrics.jsonl")
        assert (line["pg_loss"], line["samples"]) == (None, 4)
        assert any("the step is empty" in note for note in line["notes"])
    lines = replay(capsys, tmp_path, path, "--layouts", "dp1,dp2").out.splitlines()
    assert lines[:2] == [
        "There is no trained token in any step, so no mode does anything here.",
        "There is no pg_loss to compare the layouts by (dp1, dp2).",
    ]
    assert not [line for line in lines if line.startswith("pg_loss")]


# -- idle ranks and empty files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", few(["balanced", "first-fit", "interleaved", "contiguous"]))
def test_more_ranks_than_samples_leave_ranks_idle_and_the_numbers_right(tmp_path, capsys, rule) -> None:
    told = compared(capsys, tmp_path, fx_b(), "--layouts", f"dp1,dp8:{rule},dp8cp2:{rule}")
    for mode in MODES:
        assert per_layout(told, mode, "pg_loss") == [exactly(FX_B[mode])] * 4
        ranks = told.modes[mode]["layouts"][f"dp8:{rule}"]["ranks"]
        assert sorted(len(rank["partition"]) for rank in ranks) == [0, 0, 0, 0, 1, 1, 1, 1]
        idle = next(rank for rank in ranks if not rank["partition"])
        assert (idle["samples"], idle["tokens"], idle["pg_loss"], idle["response_length"]) == (0, 0, 0.0, None)
    assert f"layout dp8:{rule}: ranks " in told.err
    assert "hold no sample and stay idle" in told.err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\n\n  \n", "is empty"),
        (b'{"response_length": 2, "re', "holds no samples"),
        (b"\xff", "line 1: is not valid UTF-8"),
    ],
    ids=["nothing", "blank lines", "half a line", "no text"],
)
@pytest.mark.parametrize("command", few(["run", "compare", "inspect"]))
def test_a_file_without_samples_is_refused_in_one_line(tmp_path, capsys, content, reason, command) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    arguments = ("inspect", path) if command == "inspect" else (command, "--rollouts", path, "--output", tmp_path / "out")
    line = refused(aggcli(capsys, *arguments))
    assert "rollouts.jsonl" in line
    assert reason in line
    assert line.isprintable()
