"""Layouts are compared against the size of what was summed: no false alarm, no fault missed, and true closing sentences."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.measurement.comparison import Difference, LayoutComparison, between_layouts, beyond_rounding
from aggcli.measurement.words import apart
from tests import fuzz_layouts
from tests.cli import Result, aggcli, write_jsonl
from tests.fixtures import MODES, fx_a, fx_b

FOUR = "dp1:first-fit, dp2:interleaved, dp2:contiguous and dp4:balanced"


# -- any batch under any layout -------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_any_batch_under_any_layout_gives_plain_arithmetic_and_raises_no_alarm(seed: int) -> None:
    draw = random.Random(seed)
    samples = fuzz_layouts.random_samples(draw)
    report = fuzz_layouts.report_of(samples, fuzz_layouts.random_layouts(draw, 6))
    worst, where = fuzz_layouts.deviation(report, samples)
    assert worst <= fuzz_layouts.LIMIT, where
    assert beyond_rounding([(0, report.comparison)], fuzz_layouts.TOLERATED) is None


@pytest.mark.parametrize("fault", fuzz_layouts.FAULTS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_a_sample_twice_lost_or_on_another_rank_is_always_found(fault: str, seed: int) -> None:
    draw = random.Random(seed)
    assert fuzz_layouts.is_found(fuzz_layouts.random_samples(draw), fault, draw)


def test_a_lost_sample_in_whose_place_stands_its_equal_is_found_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four equal samples, of which a wrong layout holds the first twice and the second not at all: every sum is as it should
    be."""
    file = write_jsonl(tmp_path / "equal.jsonl", [fx_a()[1]] * 4)
    right = schedule_step(parse_layout("dp2:contiguous"), [6] * 4)
    assert right.partitions == ((0, 1), (2, 3))
    swapped = dataclasses.replace(right, partitions=((0, 0), (2, 3)))
    monkeypatch.setattr(
        "aggcli.jobs.steps.schedule_step", lambda layout, lengths: swapped if layout.dp == 2 else schedule_step(layout, lengths)
    )
    told = aggcli(capsys, "compare", "--rollouts", file, "--layouts", "dp1,dp2:contiguous", "-o", tmp_path / "out")
    assert told.code == 1
    last = "aggcli: step 0: layout dp2:contiguous: sample 1: held by no rank, so its numbers are not those of the step"
    assert told.err.splitlines()[-1].startswith(last)


# -- no false alarm -------------------------------------------------------------------------------------------------


def test_balanced_rewards_of_a_fan_out_raise_no_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """+1 and -1 in turn: their mean is 0, and what is left under some layouts is rounding."""
    rows = [
        {
            "group_index": r // 4,
            "rollout_id": r,
            "response_length": 3 + r + s,
            "total_length": 9 + r + s,
            "reward": r % 2 * 2 - 1,
        }
        for r in range(8)
        for s in range(3 if r % 3 else 1)
    ]
    _quiet(aggcli(capsys, "compare", "--rollouts", write_jsonl(tmp_path / "pm1.jsonl", rows), "-o", tmp_path / "out"))


def test_rewards_centred_beforehand_raise_no_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(1)
    rewards = [draw.gauss(0, 1) for _ in range(64)]
    mean = sum(rewards) / 64
    rows = [{"group_index": i // 8, "response_length": 5 + i % 9, "reward": reward - mean} for i, reward in enumerate(rewards)]
    _quiet(aggcli(capsys, "compare", "--rollouts", write_jsonl(tmp_path / "centred.jsonl", rows), "-o", tmp_path / "out"))


def _quiet(told: Result) -> None:
    assert told.code == 0, told.err
    said = " ".join(told.out.split())
    under = "sample_mean, prompt_mean, token_mean and constant"
    assert f"between the layouts {FOUR}, under {under}: all numbers that ranks add up are apart by at most" in said
    share = float(said.split("apart by at most ")[1].split()[0])
    assert 0 < share < 1e-14, "rounding, and not nothing: raw_reward is 0 under one layout and 1e-17 under another"


def test_sizes_are_the_sums_of_absolute_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FX-A, by hand: every loss term is -+0.5, so sample_mean, whose loss is 0, sums 0.5 in size, and constant (L = 10)
    16 tokens * 0.5 / 40 = 0.2; rewards 1, 0, 1, 0; one k1 term of -0.25 a token."""
    file = write_jsonl(tmp_path / "a.jsonl", fx_a())
    options = ("--loss-aggregation-divisor", 10, "--kl-estimator", "k1", "-o", tmp_path / "out")
    assert aggcli(capsys, "compare", "--rollouts", file, *options).code == 0
    for mode, size in {"sample_mean": 0.5, "constant": 0.2}.items():
        for line in map(json.loads, (tmp_path / "out" / mode / "layouts.jsonl").read_text().splitlines()):
            found = {name: line["sizes"][name] for name in ("pg_loss", "raw_reward", "kl_loss")}
            assert found == pytest.approx({"pg_loss": size, "raw_reward": 0.5, "kl_loss": 0.25}, rel=1e-12)
            assert line["kl_loss"] == pytest.approx(-0.25)
            assert "response_length" not in line["sizes"], "a number of one sign is its own size"


# -- the closing sentences ------------------------------------------------------------------------------------------


def difference(a: float | None, b: float | None, size: float, rule: str = "token_mean", metric: str = "pg_loss") -> Difference:
    return Difference(rule, metric, ("dp1", "dp2"), (a, b), size)


def comparison(largest: Difference | None, *, exact=("token_mean",), moving=None, layouts=("dp1", "dp2")) -> LayoutComparison:
    return LayoutComparison(layouts, exact, largest, moving or {})


LEFT_OUT = (
    "; not compared: micro_batches, and what the whole step gives once for all layouts (pass@k, groups, shares of weight and"
    " gradient)"
)


def test_a_difference_is_measured_against_the_sum_of_absolute_terms() -> None:
    assert difference(0.0, 1e-17, 0.5).share == 2e-17
    assert difference(0.0, 0.0, 0.0).share == 0.0
    assert difference(None, 0.1, 1.0).share == math.inf


def test_the_sentence_names_layouts_rules_and_what_is_left_out() -> None:
    said = between_layouts([comparison(difference(0.25, 0.25 + 2**-52, 0.5)), comparison(difference(1.0, 1.0, 1.0))])
    assert said == [
        "between the layouts dp1 and dp2, under token_mean: all numbers that ranks add up are apart by at most 4.5e-16 of the"
        f" sum of their absolute terms (pg_loss under token_mean, dp2 against dp1){LEFT_OUT}"
    ]


def test_equal_to_the_last_bit_is_said_only_of_equal_numbers() -> None:
    (said,) = between_layouts([comparison(difference(0.25, 0.25, 0.5))])
    assert "all numbers that ranks add up are equal to the last bit; not compared" in said


def test_a_number_that_only_one_layout_has_is_no_small_difference() -> None:
    (said,) = between_layouts([comparison(difference(0.25, None, 0.5))])
    assert "are different: pg_loss is there under dp1 and not under dp2;" in said


def test_one_layout_is_never_called_equal_to_itself() -> None:
    alone = comparison(None, layouts=("dp1",))
    assert alone.deviation is None
    assert between_layouts([alone]) == ["one layout, dp1: nothing was compared"]


def test_a_rule_that_varies_is_named_and_its_difference_is_relative_to_the_number_beside_it() -> None:
    """0.0558911 apart, which is 177.6 % of 0.0314627."""
    moves = difference(0.0314627, -0.0244284, 0.6, "trl:bnpo")
    said = between_layouts([comparison(difference(0.25, 0.25, 0.5), moving={"trl:bnpo": moves})])
    assert said[1:] == [
        "left out there: trl:bnpo varies with the layout, as it is made to: pg_loss is 0.0314627 under dp1 and -0.0244284 under"
        " dp2 (0.0559 apart, 178 % of 0.0314627)"
    ]


def test_near_0_a_difference_stands_alone() -> None:
    assert apart(1e-5, 0.05, 0.6) == " (0.05 apart)", "5000 times 1e-5 would tell nobody anything"
    assert apart(0.5, 0.45, 0.6) == " (0.05 apart, 10 % of 0.5)"


def test_a_rule_that_may_vary_and_does_not_is_not_said_to_vary() -> None:
    same = difference(0.25, 0.25, 0.5, "trl:bnpo")
    said = between_layouts([comparison(difference(0.25, 0.25, 0.5), moving={"trl:bnpo": same})])
    assert said[1].startswith(
        "left out there: trl:bnpo may vary with the layout; between these its numbers are apart by at most 0 "
    )


def test_a_rule_or_a_layout_that_only_some_steps_have_is_counted() -> None:
    one = comparison(difference(1.0, 1.0, 1.0), exact=("token_mean", "prompt_mean"), layouts=("recorded", "dp1"))
    two = comparison(difference(1.0, 1.0, 1.0), layouts=("dp1", "dp2"))
    (said,) = between_layouts([one, two])
    assert "recorded (1 step of 2), dp1 and dp2 (1 step of 2), under token_mean and prompt_mean (1 step of 2): all" in said


def test_the_line_of_a_changed_number_says_which_where_and_by_how_much() -> None:
    """0.01 apart of 0.5 summed: 2 %; the other step's 1e-6 of 1 is beyond rounding too."""
    worst, small = difference(0.25, 0.24, 0.5), difference(0.5, 0.500001, 1.0)
    said = beyond_rounding([(3, comparison(small)), (7, comparison(worst))], 1e-9)
    assert said == (
        "step 7: a layout changed a number: under token_mean, pg_loss is 0.25 under dp1 and 0.24 under dp2 (0.01 apart, 4 % of"
        " 0.25): 0.02 of the sum of its absolute terms, where 1e-09 is what rounding explains; 1 other step has such a number"
        " too"
    )
    assert beyond_rounding([(0, comparison(difference(0.0, 1e-17, 0.5)))], 1e-9) is None


def test_compare_under_a_rule_that_varies_says_so_in_its_closing_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FX-B in micro-batches (0,1) and (2,3): the sum over each of its loss divided by its tokens, then averaged. By hand:
    losses -.55 / +.5*3 -> (-.55+1.5)/4 = 0.2375, and (-.55*4+.5*8)/12 = 0.15; mean 0.19375, against 0.171875."""
    file = write_jsonl(tmp_path / "b.jsonl", fx_b())
    layouts = ("--layouts", "dp1,dp1:contiguous@15")
    told = aggcli(capsys, "compare", "--rollouts", file, "--modes", "token_mean,trl:bnpo", *layouts, "-o", tmp_path / "out")
    assert told.code == 0, told.err
    said = " ".join(told.out.split())
    assert "between the layouts dp1 and dp1:contiguous@15, under token_mean: all numbers" in said
    assert "left out there: trl:bnpo varies with the layout, as it is made to: pg_loss is 0.171875 under dp1 and" in said


def test_the_json_carries_the_closing_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_jsonl(tmp_path / "b.jsonl", fx_b())
    told = aggcli(capsys, "compare", "--rollouts", file, "--json", "-o", tmp_path / "out")
    said = json.loads(told.out)["between_layouts"]
    assert said[0].startswith(f"between the layouts {FOUR}, under {', '.join(MODES[:-1])} and constant: all numbers")
