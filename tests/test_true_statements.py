"""Statements of a comparison that must hold whatever the runs: what the headline covers, bounds, units, warnings."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggcli.analysis.comparison import compare
from aggcli.analysis.effects import effects_of
from aggcli.analysis.statistics import ALPHA, SHARE, interval, paired_test
from aggcli.analysis.study import study
from aggcli.cli.results import FORMATS
from aggcli.report.comparison_rows import rows_of
from aggcli.report.comparison_tables import text_table
from tests.cli import aggcli, refused
from tests.test_results import step, write_run
from tests.test_verdict import run

# -- the answer -------------------------------------------------------------------------------------------------------


def slower(mode: str, seed: int, pace: float) -> Any:
    """A run that ends where all end, and gets there at its own pace: 10 tokens a step, level 0.5 after 10 / pace steps."""
    way = np.minimum(np.arange(40) * pace, 10) / 10
    return run(mode, seed, 0.1 + 0.4 * way + 0.001 * ((seed * 7 + np.arange(40)) % 5))


def test_a_difference_in_the_table_is_named_in_the_answer() -> None:
    """At the end nothing differs; a is there after 10 steps and b after 20, which is 100 tokens later in every seed."""
    runs = [slower("a", seed, 1.0 - 0.01 * seed) for seed in range(5)]
    runs += [slower("b", seed, 0.5 - 0.01 * seed * seed) for seed in range(5)]
    found = study(runs, fit=False, reach=0.4)
    row = found.comparison.outcomes["tokens_to_accuracy"]["b"].pair
    assert row is not None
    assert row.p_holm is not None
    assert row.p_holm < 0.05
    first, rest, _ = found.verdict.answer.sentences
    assert first.startswith("1 of 4 differences from a under b is shown: tokens to accuracy 0.4 +")
    assert rest.startswith("Accuracy in training rollouts, equal steps, no difference shown under b: b ")


@pytest.mark.parametrize("seed", range(6))
def test_the_answer_counts_every_row_that_the_table_marks_as_different_and_no_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [
        run(mode, at, np.clip(rng.normal(0.5 + 0.1 * up + 0.01 * np.arange(20), 0.05), 0, 1), 10 + (3 * up if at % 2 else 0))
        for up, mode in enumerate("abc")
        for at in range(4)
    ]
    found = study(runs, fit=False)
    shown = {
        (name, label)
        for name, outcomes in found.comparison.outcomes.items()
        for label, one in outcomes.items()
        if one.pair is not None and one.pair.p_holm is not None and one.pair.p_holm < ALPHA
    }
    assert {(one.outcome, one.label) for one in effects_of(found.comparison) if one.shown} == shown
    marked = {(row.outcome, row.mode): row.shown for row in rows_of(found.comparison) if row.p is not None}
    assert {at for at, is_shown in marked.items() if is_shown} == shown
    lines = text_table(rows_of(found.comparison), 4, "").plain.splitlines()
    assert sum("~ p " in line for line in lines) == len(marked) - len(shown)
    counted = f"{len(shown)} of {found.comparison.tests} differences from a " if shown else "No difference from a is shown"
    assert found.verdict.answer.text.startswith(counted)
    for ranking in found.verdict.rankings:  # the table has the very p that the verdict decided by
        for standing in ranking.standings:
            pair = found.comparison.outcomes[ranking.outcome][standing.label].pair
            assert standing.p_holm == (None if pair is None else pair.p_holm)


# -- intervals --------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_share_is_students_on_the_logit_scale_of_the_mean() -> None:
    """0.8, 0.9, 1.0: mean 0.9, standard error 0.1/sqrt(3), t of 2 degrees 4.302653; logit 2.197225 +- 4.302653 * 0.641500."""
    found = interval([0.8, 0.9, 1.0], SHARE)
    assert found.mean == pytest.approx(0.9)
    low, high = 2.1972245773 - 4.3026527297 * 0.6415002990, 2.1972245773 + 4.3026527297 * 0.6415002990
    assert found.low == pytest.approx(1 / (1 + math.exp(-low)), rel=1e-9)
    assert found.high == pytest.approx(1 / (1 + math.exp(-high)), rel=1e-9)
    plain = interval([0.8, 0.9, 1.0])
    assert plain.high is not None
    assert plain.high > 1.1  # what it was before


def test_intervals_of_shares_stay_inside_their_bounds_and_hold_their_mean() -> None:
    for values in itertools.product((0.0, 0.01, 0.5, 0.97, 1.0), repeat=3):
        found = interval(values, SHARE)
        if found.low is not None and found.high is not None:
            assert 0 <= found.low <= found.mean <= found.high <= 1, values
    narrow = interval([0.500, 0.501, 0.502], SHARE)
    student = interval([0.500, 0.501, 0.502])
    assert narrow.low == pytest.approx(student.low, abs=1e-5)  # the same to first order
    assert narrow.high == pytest.approx(student.high, abs=1e-5)


def test_the_interval_of_a_difference_of_shares_is_cut_at_1_and_still_agrees_with_its_p() -> None:
    found = paired_test({0: 1.0, 1: 0.9}, {0: 0.0, 1: 0.5}, SHARE)
    assert found is not None
    assert (found.difference.low, found.difference.high) == (-1.0, 1.0)
    assert found.p is not None
    assert found.p > 0.05


def test_the_text_says_which_scale_an_interval_is_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {seed: [step(at, 85 + 7 * seed, 15 - 7 * seed) for at in range(4)] for seed in range(3)}
    runs = [write_run(tmp_path / f"{m}{s}", m, s, own) for m in ("sample_mean", "token_mean") for s, own in lines.items()]
    told = " ".join(aggcli(capsys, "compare", *runs).out.split())
    assert "Of shares and cosines: interval on the logit scale of the mean, so that it stays within their bounds." in told
    bounds = [float(b) for pair in re.findall(r"\[([\d.]+), ([\d.]+)\] +n = 3", told.split("tokens to acc")[0]) for b in pair]
    assert bounds
    assert max(bounds) <= 1


def test_what_has_no_interval_says_why_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """c has a seed of its own, b one in common with a."""
    runs = [
        write_run(tmp_path / m / str(s), m, s, [step(0, 2 + s)])
        for m, seeds in {"a": [0, 1], "b": [0], "c": [7]}.items()
        for s in seeds
    ]
    for kind in FORMATS:
        told = " ".join(aggcli(capsys, "compare", *runs, "--format", kind).out.split())
        assert "not paired: no seed in common with a" in told, kind
        assert "one seed" in told, kind
    rows = json.loads(aggcli(capsys, "compare", *runs, "--json").out)["outcomes"]
    for row in rows:
        assert (row["low"] is None) == bool(row["no_interval"]), row
        assert (row["difference"] is None) == (row["mode"] == "a" or bool(row["no_difference"])), row
        assert (row["difference"] is not None and row["difference_low"] is None) == bool(row["no_difference_interval"]), row


# -- units ------------------------------------------------------------------------------------------------------------


def replayed(folder: Path, unit: str | None, mode: str = "sample_mean") -> Path:
    lines = [{"step": at, "pg_loss": 0.1, "grad_norm_log_probs": 1.0 + at, "effective_tokens": 10.0} for at in range(2)]
    facts = {} if unit is None else {"length_unit": unit}
    return write_run(folder, mode, 0, lines, settings={"rollouts": ["dump"], "train": False}, modes=["sample_mean"], **facts)


@pytest.mark.parametrize(
    ("unit", "word"),
    [("tokens", "tokens"), ("chars", "characters"), ("words", "words"), (None, "length units of unknown kind")],
)
def test_lengths_carry_their_unit_in_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str | None, word: str
) -> None:
    runs = [replayed(tmp_path / mode, unit, mode) for mode in ("sample_mean", "token_mean")]
    found = json.loads(aggcli(capsys, "compare", *runs, "--json").out)
    assert found["length_unit"] == word
    assert {row["unit"] for row in found["outcomes"] if row["outcome"] == "effective_tokens"} == {word}
    for kind in ("table", "md", "latex", "csv"):
        told = aggcli(capsys, "compare", *runs, "--format", kind)
        assert word in " ".join(told.out.split()), kind


def test_lengths_in_different_units_are_not_put_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [replayed(tmp_path / "a", "chars"), replayed(tmp_path / "b", "tokens", "token_mean")]
    for command in (("compare",), ("plot", "--html", "--output", tmp_path / "figures")):
        said = refused(aggcli(capsys, *command, *runs))
        assert f"lengths are in different units and cannot be compared (characters: {runs[0]}; tokens: {runs[1]})" in said


# -- warnings and collapsed runs --------------------------------------------------------------------------------------


def test_the_warning_of_more_than_the_mode_stands_first_in_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        write_run(tmp_path / f"{m}{s}", m, s, [step(at) for at in range(3)], settings={"lr": lr, "seed": s})
        for m, lr in (("sample_mean", 0.001), ("token_mean", 0.01))
        for s in range(2)
    ]
    first = (
        "Warning: more than the mode differs, so a difference may come from it: lr: 0.001 in sample_mean; 0.01 in token_mean."
    )
    for kind, before in (("table", ""), ("md", ""), ("latex", "% "), ("csv", "note: ")):
        told = aggcli(capsys, "compare", *runs, "--format", kind, "--no-fit")
        where = told.err if kind == "csv" else told.out
        assert " ".join(where.split()).startswith(before + first), kind
    assert json.loads(aggcli(capsys, "compare", *runs, "--json").out)["verdict"]["warnings"] == [first[len("Warning: ") : -1]]
    told = aggcli(capsys, "plot", "--html", "--output", tmp_path / "out", *runs)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.index("Warning: more than the mode differs") < page.index("No difference has a spread")


def ended(folder: Path, mode: str, seed: int, right: int, length: float, limit: int = 24) -> Path:
    lines = [step(at, right if at > 2 else 5, 10, response_length=length if at > 2 else 8.0) for at in range(20)]
    return write_run(folder / f"{mode}{seed}", mode, seed, lines, response_limit=limit)


def test_collapsed_runs_are_said_first_as_diverged_ones_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [ended(tmp_path, "sample_mean", seed, 9, 9.0) for seed in range(3)]
    runs += [ended(tmp_path, "token_mean", seed, 0 if seed else 9, 24.0 if seed else 9.0) for seed in range(3)]
    headline = json.loads(aggcli(capsys, "compare", *runs, "--json").out)["answer"][0]
    assert headline == (
        "2 of 3 runs of token_mean end with accuracy 0 and every response at the limit of 24 tokens: collapsed, or nothing was"
        " ever learned."
    )
    fine: Sequence[tuple[int, float]] = ((0, 23.0), (1, 24.0))  # wrong but shorter; at the limit but right
    for at, (right, length) in enumerate(fine):
        own = [ended(tmp_path / str(at), mode, 0, right, length) for mode in ("sample_mean", "token_mean")]
        assert "at the limit" not in aggcli(capsys, "compare", *own).out


def test_a_comparison_names_its_outcomes_by_their_unit_and_level() -> None:
    found = compare([run("a", s, [0.1, 0.5 + s / 100]) for s in range(3)], reach=0.3)
    assert found.named("tokens_to_accuracy") == "tokens to accuracy 0.3"
    assert found.named("accuracy") == "accuracy in training rollouts, equal steps"
