"""Numbers of whole responses, effective sample sizes of importance ratios, and who gets the gradient: worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from aggcli.config import settings_from
from aggcli.objective.sequences import sequence_numbers
from tests.cli import compared, exactly, per_layout
from tests.fixtures import Sample, batch_of, sample
from tests.train_worker import runs_of, setup_of, train

LAYOUTS = "dp1,dp2:contiguous,dp4:mb1,dp1cp2,dp2cp2:interleaved"
LN2 = math.log(2)


def of_ratios(*rows: tuple[list[float], float | list[float]], gaps: list[list[float]] | None = None) -> list[Sample]:
    """Samples of one token a log ratio, with an advantage (or one a token); `gaps`: trainer's - engine's log-probability."""
    made = []
    for at, (row, advantage) in enumerate(rows):
        old = [-3.0] * len(row)
        streams: dict[str, Any] = {"old_log_probs": old, "log_probs": [-3.0 + x for x in row], "group_index": 0}
        if gaps is not None:
            streams["rollout_log_probs"] = [-3.0 - gap for gap in gaps[at]]
        made.append(sample(len(row), advantage=advantage, reward=float(advantage == 1), **streams))
    return made


def five_responses() -> list[Sample]:
    """Of 2, 2, 1 and 1 trained tokens, and one without; a masked token of the first would spoil every number."""
    samples = of_ratios(
        ([LN2, LN2, 9.0], 1.0),
        ([LN2, -LN2], 1.0),
        ([-2 * LN2], -1.0),
        ([-2 * LN2], 1.0),
        ([7.0, 7.0], 1.0),
        gaps=[[0.1, -0.3, 8.0], [0.1, 0.1], [0.4], [-0.4], [5.0, 5.0]],
    )
    samples[0]["loss_mask"], samples[4]["loss_mask"] = [1, 1, 0], [0, 0]
    return samples


# GSPO's ratios are 2, 1, 1/4 and 1/4: the clip of 0.2 binds on the first and, of negative advantage, on the third
BY_HAND = {
    "sequence_ratio/log_sum": (2 + 0 - 2 - 2) * LN2 / 4,
    "sequence_ratio/log_mean": (1 + 0 - 2 - 2) * LN2 / 4,
    "sequence_ratio/clipfrac": 2 / 4,
    "importance_ess/tokens": (2 + 2 + 2 + 0.5 + 0.25 + 0.25) ** 2 / (4 + 4 + 4 + 0.25 + 2 * 0.0625),
    "importance_ess/samples": (4 + 1 + 0.25 + 0.25) ** 2 / (16 + 1 + 2 * 0.0625),
    "sampler_mismatch/sequence_sum": (0.2 + 0.2 + 0.4 + 0.4) / 4,
    "sampler_mismatch/sequence_mean": (0.1 + 0.1 + 0.4 + 0.4) / 4,
}


def test_a_policy_that_is_its_own_old_one_has_the_numbers_of_equal_streams() -> None:
    batch = batch_of(five_responses())
    assert batch.log_probs_T is not None
    assert batch.advantages_T is not None
    objective = settings_from({}).objective
    rest = {"loss_mask": batch.loss_mask_T, "advantages": batch.advantages_T, "log_probs": batch.log_probs_T}
    one, other = (
        sequence_numbers(batch, {**rest, "old_log_probs": old_T}, objective, has_ratio=True)
        for old_T in (batch.log_probs_T, batch.log_probs_T.clone())
    )
    assert one.keys() == other.keys() == {"log_ratio", "weight", "clipped"}
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["weight"].tolist() == [1, 1, 1, 1, 0]


def test_numbers_of_whole_responses_are_those_by_hand_under_every_mode_and_layout(tmp_path: Path, capsys) -> None:
    told = compared(capsys, tmp_path, five_responses(), "--layouts", LAYOUTS)
    for name, value in BY_HAND.items():
        for mode in told.modes:
            assert per_layout(told, mode, name) == [pytest.approx(value, rel=1e-12)] * 6, (name, mode)
    (first, second) = told.modes["sample_mean"]["layouts"]["dp2:contiguous"]["ranks"]
    assert [first["importance_ess/samples"], second["importance_ess/samples"]] != [None, None]


def test_a_rank_has_its_own_effective_sample_size_and_none_without_a_trained_token(tmp_path: Path, capsys) -> None:
    """Ratios 2 and 1 on the first rank: 9/5; a response that is masked on the second."""
    samples = of_ratios(([LN2], 1.0), ([0.0], 1.0), ([LN2], 1.0), ([0.0], 1.0))
    for one in samples[2:]:
        one["loss_mask"] = [0]
    told = compared(capsys, tmp_path, samples, "--layouts", "dp2:contiguous")
    ranks = told.modes["token_mean"]["layouts"]["dp2:contiguous"]["ranks"]
    assert [rank["importance_ess/tokens"] for rank in ranks] == [exactly(9 / 5), None]
    assert [rank["importance_ess/samples"] for rank in ranks] == [exactly(9 / 5), None]
    assert [rank["sequence_ratio/log_sum"] for rank in ranks] == [exactly(LN2 / 2), None]


def test_a_response_whose_advantages_differ_is_clipped_by_the_share_of_its_tokens(tmp_path: Path, capsys) -> None:
    told = compared(capsys, tmp_path, of_ratios(([LN2, LN2, LN2], [1.0, -1.0, 1.0])))
    assert told.modes["sample_mean"]["sequence_ratio/clipfrac"] == exactly(2 / 3)


def test_the_clip_of_whole_responses_is_gspos_own_under_the_sample_mean(tmp_path: Path, capsys) -> None:
    told = compared(capsys, tmp_path, five_responses()[:4], "--policy-loss", "gspo")
    assert told.modes["sample_mean"]["pg_clipfrac"] == exactly(0.5)
    assert told.modes["sample_mean"]["sequence_ratio/clipfrac"] == exactly(0.5)


def test_ratios_of_long_responses_that_no_float_holds_still_have_an_effective_sample_size(tmp_path: Path, capsys) -> None:
    """e^800 and e^(800 + ln 3): (1 + 3)^2 / (1 + 9)."""
    told = compared(capsys, tmp_path, of_ratios(([2.0] * 400, 1.0), ([2.0] * 399 + [2.0 + math.log(3)], 1.0)))
    assert told.modes["token_mean"]["importance_ess/samples"] == pytest.approx(1.6, rel=1e-9)


def test_what_needs_log_probabilities_is_left_out_with_the_reason(tmp_path: Path, capsys) -> None:
    samples = [sample(2, advantage=1.0, group_index=0), sample(1, advantage=-1.0, group_index=0)]
    told = compared(capsys, tmp_path, samples)
    assert not BY_HAND.keys() & told.modes["sample_mean"].keys()
    reasons = told.step["skipped"]
    need = "needs log_probs and old_log_probs (or rollout_log_probs)"
    assert [reasons["sequence_ratio/*"], reasons["importance_ess/*"]] == [need, need]
    assert reasons["sampler_mismatch/*"] == "needs rollout_log_probs and log_probs (or old_log_probs)"


def test_training_reports_them_and_its_first_update_has_ratios_of_1() -> None:
    setup = setup_of(steps=1, num_iterations=2, lr=0.01, layout_records=False)
    first, second = train(setup, runs_of(setup, ("token_mean",))).values("token_mean/seed-0")
    assert first["importance_ess/tokens"] == first["tokens"]
    assert first["importance_ess/samples"] == first["samples"]
    assert [first["sequence_ratio/log_sum"], first["sequence_ratio/clipfrac"]] == [0, 0]
    assert second["sequence_ratio/log_sum"] != 0
    ess, tokens = second["importance_ess/tokens"], second["tokens"]
    assert ess is not None
    assert tokens is not None
    assert 0 < ess < tokens


# -- who gets the gradient ------------------------------------------------------------------------------------------


def three_tokens() -> list[Sample]:
    """A right response of two tokens, the clip binding on the first, and a wrong one of one."""
    return of_ratios(([math.log(1.5), 0.0], 1.0), ([0.0], -1.0))


@pytest.mark.parametrize(
    ("loss", "mode", "sizes"),
    [
        ("ppo", "sample_mean", (0.0, 1 / 4, 1 / 2)),  # weights 1/4, 1/4, 1/2 times slopes 0, -1, +1
        ("ppo", "token_mean", (0.0, 1 / 3, 1 / 3)),
        ("cispo", "sample_mean", (1.2 / 4, 1 / 4, 1 / 2)),  # cispo cuts the ratio and keeps the slope
    ],
)
def test_shares_of_the_gradient_are_of_weight_times_slope(tmp_path: Path, capsys, loss: str, mode: str, sizes: tuple) -> None:
    told = compared(capsys, tmp_path, three_tokens(), "--policy-loss", loss, "--max-response-length", 2)
    clipped, free, wrong = (size / sum(sizes) for size in sizes)
    found = {name.removeprefix("gradient_share/"): x for name, x in told.modes[mode].items() if "gradient_share" in name}
    assert found == {
        "length_p25": 0,
        "length_p50": exactly(wrong),
        "length_p75": 0,
        "length_p100": exactly(clipped + free),
        "correct": exactly(clipped + free),
        "incorrect": exactly(wrong),
        "all_right_groups": 0,
        "all_wrong_groups": 0,
        "positive_advantage": exactly(clipped + free),
        "negative_advantage": exactly(wrong),
        "clipped": exactly(clipped),
    }
    assert told.modes["sample_mean"]["weight_share/correct"] == exactly(0.5)


def test_without_a_gradient_nobody_has_a_share_of_it(tmp_path: Path, capsys) -> None:
    samples = [{**one, "advantage": 0.0} for one in three_tokens()]
    told = compared(capsys, tmp_path, samples)
    assert told.modes["sample_mean"]["gradient_share/correct"] is None
    assert told.modes["sample_mean"]["weight_share/correct"] == exactly(0.5)
    told = compared(capsys, tmp_path, [sample(2, group_index=0)])
    assert not [name for name in told.modes["sample_mean"] if name.startswith("gradient_share")]
    assert told.step["skipped"]["gradient_share/*"] == "needs advantage, or reward and group_index"
