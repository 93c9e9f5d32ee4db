"""What a comparison says of runs that went wrong, of a pair's own range, of what p is corrected over, and of windows."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aggcli.analysis.comparison import compare
from aggcli.analysis.frames import read_frames
from aggcli.analysis.training_answer import verdict
from aggcli.errors import RecordError
from aggcli.jobs.compare import compare as compared
from aggcli.report.comparison_rows import Row
from aggcli.report.comparison_tables import caption, text_table
from aggcli.report.findings import find
from tests.cli import aggcli, refused
from tests.test_results import comparison, printed, step, write_run
from tests.test_verdict import run

GONE = "run {mode}, seed {seed} diverged in step {step}: its gradient is not finite; its records are kept"


def flowing(text: str) -> str:
    return " ".join(text.split())


def trained(folder: Path, mode: str, seed: int, steps: int, diverged: int | None = None, right: int = 50) -> Path:
    facts = (
        {} if diverged is None else {"diverged": GONE.format(mode=mode, seed=seed, step=diverged), "diverged_step": diverged}
    )
    lines = [step(at, right + seed if right else 0, 100 - right) for at in range(steps)]
    return write_run(folder / mode / str(seed), mode, seed, lines, **facts)


# -- runs that went wrong ---------------------------------------------------------------------------------------------


@pytest.fixture
def with_diverged(tmp_path: Path) -> list[Path]:
    """Two of token_mean's four runs diverged: seed 1 in step 6, seed 2 in step 5; every other run has 12 steps."""
    runs = [trained(tmp_path, "sample_mean", seed, 12) for seed in range(4)]
    ends = {1: (6, 6), 2: (6, 5)}
    return runs + [trained(tmp_path, "token_mean", s, *ends.get(s, (12, None)), right=60) for s in range(4)]


def test_diverged_runs_come_first_in_the_verdict_and_are_named_in_notes_and_json(with_diverged: list[Path], capsys) -> None:
    first = "2 of 4 runs of token_mean diverged, at steps 5 and 6; the numbers are of the steps that all runs have."
    found = json.loads(printed(capsys, with_diverged, format="json", fit=False)[0])
    assert found["answer"][0] == first
    texts = [GONE.format(mode="token_mean", seed=1, step=6), GONE.format(mode="token_mean", seed=2, step=5)]
    assert found["diverged"] == [
        {"mode": "token_mean", "seed": 1, "step": 6, "text": texts[0]},
        {"mode": "token_mean", "seed": 2, "step": 5, "text": texts[1]},
    ]
    for kind in ("table", "md", "latex", "csv"):
        out, said = printed(capsys, with_diverged, format=kind, fit=False)
        assert first in flowing((said if kind == "csv" else out).replace("%", ""))
        assert all(f"note: {text}" in said for text in texts)
    on_the_page = find(read_frames(with_diverged))
    assert list(on_the_page.answer.sentences) == found["answer"]
    assert set(texts) <= set(on_the_page.notes)


def test_a_run_that_diverged_before_its_first_line_is_counted_too(tmp_path: Path, capsys) -> None:
    runs = [trained(tmp_path, mode, seed, 12) for mode in ("sample_mean", "constant") for seed in range(2)]
    runs.append(trained(tmp_path, "constant", 2, 0, 0))
    found = json.loads(printed(capsys, runs, format="json", fit=False)[0])
    assert found["answer"][0].startswith("1 of 3 runs of constant diverged, at step 0; the numbers are of the steps")
    assert GONE.format(mode="constant", seed=2, step=0) in found["notes"]
    assert [one["seed"] for one in found["diverged"]] == [2]
    on_the_page = find(read_frames(runs))
    assert list(on_the_page.answer.sentences) == found["answer"]
    assert GONE.format(mode="constant", seed=2, step=0) in on_the_page.notes


def test_without_diverged_runs_nothing_is_said_of_them(tmp_path: Path, capsys) -> None:
    found = json.loads(printed(capsys, comparison(tmp_path, {"constant": [50, 51], "token_mean": [50, 52]}), format="json")[0])
    assert found["diverged"] == []
    assert "diverged" not in " ".join(found["answer"])


def test_it_is_said_when_every_run_ends_at_an_accuracy_of_0(tmp_path: Path, capsys) -> None:
    gone = [trained(tmp_path / "a", mode, seed, 12, right=0) for mode in ("constant", "token_mean") for seed in range(2)]
    said = "every run ends at an accuracy of 0 in its training rollouts: the policies have collapsed or never learned"
    assert said in printed(capsys, gone, fit=False)[1]
    fine = [*gone, trained(tmp_path / "b", "sample_mean", 0, 12, right=1)]
    assert said not in printed(capsys, fine, fit=False)[1]


def test_a_run_without_metrics_is_left_out_with_a_note_as_an_empty_one_is(tmp_path: Path, capsys) -> None:
    runs = comparison(tmp_path, {"constant": [50, 51], "token_mean": [50, 52]})
    (runs[3] / "metrics.jsonl").unlink()
    found = json.loads(printed(capsys, runs, format="json", fit=False)[0])
    assert f"no steps are recorded, left out: {runs[3]}" in found["notes"]
    told = aggcli(capsys, "plot", *runs, "--output", tmp_path / "figures")
    assert told.code == 0
    assert f"note: {runs[3]}: no steps are recorded; left out" in told.err


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"seed": "first"}, "seed in its manifest.json is not of type int"),
        ({"settings": [1]}, "settings in its manifest.json is not of type dict"),
        ({"runs": ["../elsewhere"]}, "runs in its manifest.json must be folders inside it"),
        ({"runs": ["/tmp"]}, "runs in its manifest.json must be folders inside it"),
        ({"runs": []}, "runs in its manifest.json is not a list of folders"),
    ],
)
def test_a_manifest_with_fields_of_other_types_is_refused_by_every_reader(
    tmp_path: Path, capsys, facts: dict[str, Any], text: str
) -> None:
    broken = write_run(tmp_path / "a", "constant", 0, [step(0)], command="run")
    manifest = json.loads((broken / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps({**manifest, **facts}))
    with pytest.raises(RecordError, match=re.escape(text)):
        compared([broken])
    for arguments in (("plot", broken), ("runs", "show", broken), ("runs", "rm", "-y", broken)):
        assert text in refused(aggcli(capsys, *arguments))


# -- a pair's own range -----------------------------------------------------------------------------------------------


def crossing(folder: Path) -> list[Path]:
    """Both rise by 0.04 a step; token_mean takes half the tokens, so that sample_mean has 0.22 less at its end."""
    runs = []
    for seed in range(3):
        rising = [step(at, 400 + 40 * at + seed, 600 - 40 * at - seed) for at in range(12)]
        short = [{**one, "response_tokens": 50} for one in rising]
        runs += [write_run(folder / f"s{seed}", "sample_mean", seed, rising)]
        runs += [write_run(folder / f"t{seed}", "token_mean", seed, short)]
    return runs


def test_a_pairs_two_means_at_its_own_range_stand_with_the_difference_in_every_format(tmp_path: Path, capsys) -> None:
    """At equal tokens the arms' own ends agree, so that the difference of some 0.2 could not be seen in the means."""
    runs = crossing(tmp_path)
    found = json.loads(printed(capsys, runs, format="json", fit=False, window=0)[0])
    row = next(r for r in found["outcomes"] if (r["outcome"], r["mode"]) == ("accuracy_at_equal_tokens", "token_mean"))
    assert row["mean"] == pytest.approx(0.841)
    assert (row["pair_mean"], row["baseline_pair_mean"]) == (pytest.approx(0.841), pytest.approx(0.621))
    assert row["difference"] == pytest.approx(row["pair_mean"] - row["baseline_pair_mean"])
    assert (row["compared_from"], row["compared_until"], row["pairs"]) == (550, 550, 3)
    out, _ = printed(capsys, runs, fit=False, window=0)
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("accuracy in training rollouts, equal tokens"))
    assert [line.strip() for line in lines[at + 1 : at + 6] if "at 550 tokens" in line][-1] == "0.841 - 0.621, at 550 tokens"
    assert "own two means" in flowing(out)
    assert max(map(len, lines)) <= 80
    md, _ = printed(capsys, runs, format="md", fit=False, window=0)
    assert "| +0.22 (0.841 - 0.621) |" in md
    assert "own two means" in md
    assert "+0.22 (0.841 - 0.621)" in printed(capsys, runs, format="latex", fit=False, window=0)[0]
    cells = csv.DictReader(io.StringIO(printed(capsys, runs, format="csv", fit=False, window=0)[0]))
    own = next(r for r in cells if (r["outcome"], r["mode"]) == ("accuracy_at_equal_tokens", "token_mean"))
    assert float(own["baseline_pair_mean"]) == row["baseline_pair_mean"]


def test_where_the_means_are_the_pairs_own_they_are_not_repeated(tmp_path: Path, capsys) -> None:
    out, _ = printed(capsys, comparison(tmp_path, {"constant": [50, 51], "token_mean": [60, 62]}), fit=False)
    assert "own two means" not in flowing(out)
    assert " - 0." not in out


def test_an_arms_own_range_is_told_where_arms_differ_in_it(tmp_path: Path, capsys) -> None:
    out, _ = printed(capsys, crossing(tmp_path), fit=False)
    block = out[out.index("accuracy in training rollouts, equal tokens") :].split("\n\n")[0]
    assert "mean from 990 to 1,100 tokens" in block
    assert "mean from 495 to 550 tokens" in block


# -- what p is corrected over, and what it is ---------------------------------------------------------------------------


def test_the_caption_and_the_verdict_say_over_how_many_tests_they_correct(tmp_path: Path, capsys) -> None:
    runs = comparison(tmp_path, {"sample_mean": [50, 51, 50], "prompt_mean": [60, 62, 61], "constant": [50, 50, 53]})
    out = flowing(printed(capsys, runs, fit=False)[0])
    assert "against sample_mean (Holm over the 7 tests of this comparison):" in out
    assert (
        "p: paired t-test, corrected by Holm over all 7 tests of the comparison; ~ where it shows no difference (5 % or more)."
        in out
    )


def test_the_sign_flip_floor_is_said_with_its_seeds_and_drawn_patterns_are_not_called_exact(tmp_path: Path, capsys) -> None:
    few = comparison(tmp_path / "few", {"sample_mean": [50, 51, 50, 52], "constant": [50, 50, 53]})
    out = flowing(printed(capsys, few, fit=False)[0])
    assert "Sign-flip: exact permutation p, uncorrected; it cannot fall below 0.25 with 3 seeds." in out
    seven = comparison(
        tmp_path / "seven", {"sample_mean": [50, 51, 50, 52, 50, 53, 51], "constant": [50, 50, 53, 51, 50, 52, 50]}
    )
    out = flowing(printed(capsys, seven, fit=False)[0])
    assert "it cannot fall below 0.015 with 7 seeds or " in out, "2 / 2^7 is 0.0156"
    rows = [(mode, n) for mode, n in (("a", 15), ("b", 15))]
    many = [trained(tmp_path / "many", mode, seed, 3, right=40 + seed % 3) for mode, n in rows for seed in range(n)]
    out = flowing(printed(capsys, many, fit=False)[0])
    assert "exact" not in out
    assert "Sign-flip: permutation p of 16384 drawn sign patterns" in out


def test_a_zero_difference_in_all_seeds_has_no_interval_and_its_p_is_said_to_be_the_sign_flips(tmp_path: Path, capsys) -> None:
    runs = [trained(tmp_path, mode, seed, 12) for mode in ("constant", "token_mean") for seed in range(2)]
    out = printed(capsys, runs, fit=False)[0]
    assert "+0 in all 2 seeds, so no interval" in flowing(out)
    assert "[+0, +0]" not in out
    assert "A difference that is the same in all seeds has no interval, and its p is the sign-flip's." in flowing(out)


def test_a_caption_speaks_of_iqm_only_where_there_is_such_a_number(tmp_path: Path, capsys) -> None:
    runs = comparison(tmp_path, {"sample_mean": [50, 51, 50, 52], "constant": [50, 50, 53, 51]})
    assert "IQM" in printed(capsys, runs, fit=False)[0]
    for kind in ("md", "latex"):
        assert "IQM" not in printed(capsys, runs, format=kind, fit=False)[0]


# -- windows ------------------------------------------------------------------------------------------------------------


def headings(window: float, lengths: Sequence[int] = (40, 40)) -> list[str]:
    runs = [run(mode, s, [0.5 + s / 100] * lengths[s % 2]) for mode in "ab" for s in range(2)]
    return [one.heading.partition(", against")[0] for one in verdict(compare(runs, window=window)).rankings]


def test_a_heading_says_what_part_of_the_steps_and_tokens_it_is_the_mean_of() -> None:
    rollouts = "accuracy in training rollouts"
    assert headings(0.1) == [
        f"{rollouts}, equal steps, mean of the last 10 % of the steps, 36 to 39",
        f"{rollouts}, equal tokens, mean over the last 10 % of the tokens up to 390",
    ]
    assert headings(1) == [
        f"{rollouts}, equal steps, mean of all steps, 0 to 39",
        f"{rollouts}, equal tokens, mean over all of the 390 tokens",
    ]
    assert headings(0) == [
        f"{rollouts}, equal steps, step 39",
        f"{rollouts}, equal tokens, at 390 tokens",
    ]


def test_a_level_that_nobody_reaches_is_said(tmp_path: Path, capsys) -> None:
    runs = comparison(tmp_path, {"constant": [50, 51], "token_mean": [60, 62]})
    assert "no run reaches an accuracy of 0.99" in printed(capsys, runs, reach=0.99, fit=False)[1]
    some = printed(capsys, runs, reach=0.55, fit=False)[1]
    assert "no run reaches" not in some
    assert "constant: none of its 2 runs reached an accuracy of 0.55" in some


# -- options that only hold with results directories, or without -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("--format", "jsn"), "--format"),
        (("--format", "table"), "--format"),
        (("--sort-by", "accuracy"), "--sort-by"),
        (("--baseline", "constant", "--window", "0.5"), "--baseline, --window"),
        (("--only-changed",), "--only-changed"),
        (("--no-fit",), "--fit"),
    ],
)
def test_without_directories_options_that_need_them_are_refused(capsys, arguments: tuple[str, ...], flag: str) -> None:
    holds = "hold" if "," in flag else "holds"
    line = refused(aggcli(capsys, "compare", *arguments, "--dry-run"))
    assert f"{flag}: only {holds} with results directories" in line


@pytest.mark.parametrize("arguments", [("--output", "x"), ("--dry-run",), ("--overwrite",), ("--resume",), ("--no-samples",)])
def test_with_directories_options_of_a_run_are_refused(tmp_path: Path, capsys, arguments: tuple[str, ...]) -> None:
    runs = comparison(tmp_path, {"constant": [50, 51], "token_mean": [60, 62]})
    line = refused(aggcli(capsys, "compare", *runs, *arguments))
    flag = arguments[0].replace("--no-", "--")
    assert f"{flag}: nothing is run when results directories are compared; leave it out" in line


# -- how a table reads -----------------------------------------------------------------------------------------------------


def test_numbers_stay_in_their_column_below_a_name_that_is_too_long_for_a_line(tmp_path: Path, capsys) -> None:
    name = "verl-legacy:token-mean"
    lines = printed(capsys, comparison(tmp_path, {"constant": [50, 51], name: [60, 62]}), fit=False)[0].splitlines()
    at = lines.index(f"  {name}")
    columns = {line.index("[") for line in lines[at - 1 : at + 3] if "[" in line}
    assert columns == {33}
    assert max(map(len, lines)) <= 80


def test_a_wide_rows_numbers_stay_in_their_column_and_its_evidence_goes_below() -> None:
    own = Row("curve/exponent_ratio", "B", "", None, "A = 0.9251", "constant", 4, 1.027, 0.1, 0.9085, 1.162, None)
    row = dataclasses.replace(own, p=0.0034, p_holm=0.0034, sign_flip_p=0.12, sign_flip_floor=0.12)
    other = dataclasses.replace(row, mode="token_mean", where="A = 0.93")
    assert text_table([row, other], 4, "").plain.splitlines()[1:3] == [
        "  constant                1.027  [0.9085, 1.162]       n = 4,",
        "                        p 0.0034, sign-flip 0.12, A = 0.9251",
    ]


def test_a_symmetric_interval_is_a_half_width_and_the_best_is_bold_where_it_is_shown_to_be_the_best() -> None:
    """0.6 is better than 0.5 where more is, and 0.5 is where less is; nothing is where no difference is shown."""
    base = Row("accuracy", "accuracy", "share", "higher", "", "a", 3, 0.5, 0.1, 0.4899, 0.51, None)
    paired = {"difference": 0.1, "difference_low": 0.0757, "difference_high": 0.1243, "p": 0.001, "p_holm": 0.002}
    other = dataclasses.replace(base, mode="b", mean=0.6, low=0.59, high=0.61, baseline="a", pairs=3, shown=True, **paired)
    lines = text_table([base, other], 3, "").plain.splitlines()
    assert lines[1:4] == [
        "  a                         0.5  [0.49, 0.51]          n = 3",
        "  b                       0.600 ± 0.010                n = 3",
        "    minus a              +0.100 ± 0.024                p 0.002",
    ]

    def bold(*rows: Row) -> list[str]:
        text = text_table(rows, 3, "")
        return [text.plain[span.start : span.end] for span in text.spans if span.style == "bold"][1:]

    assert bold(base, other) == ["  b                       0.600"]
    assert bold(base, dataclasses.replace(other, shown=False)) == []
    lower = [dataclasses.replace(row, better="lower") for row in (base, other)]
    assert bold(*lower) == ["  a                         0.5"]
    third = dataclasses.replace(lower[1], mode="c", shown=False)
    assert bold(*lower, third) == [], "c may be as good as a"
    assert bold(*(dataclasses.replace(row, better=None) for row in (base, other))) == []


def test_geometric_means_and_the_level_to_reach_are_said_where_they_are_shown() -> None:
    asymptote = Row("curve/asymptote", "A", "", None, "", "a", 2, 0.9, 0.1, 0.8, 1.0, None)
    exponent = dataclasses.replace(asymptote, outcome="curve/exponent")
    level = dataclasses.replace(asymptote, outcome="tokens_to_accuracy", head="tokens to accuracy 0.84")
    said = "Of B: geometric mean, and interval on the log scale."
    assert said in caption([asymptote, exponent], 4)
    assert "geometric" not in caption([asymptote], 4)
    assert "Accuracy" not in caption([asymptote], 4)
    assert "Accuracy 0.84: nine tenths of the baseline's own way" in caption([level], 4)
    assert "Accuracy 0.84: as given with --reach." in caption([level], 4, reach=0.84)


@pytest.mark.parametrize("kind", ["table", "md", "latex"])
def test_a_difference_that_is_the_same_in_all_seeds_says_so_in_place_of_its_interval(tmp_path: Path, capsys, kind) -> None:
    runs = [trained(tmp_path, mode, seed, 12) for mode in ("constant", "token_mean") for seed in range(2)]
    out = printed(capsys, runs, fit=False, format=kind)[0]
    said = {
        "table": "+0  the same in all 2 seeds ",
        "md": "| +0 | the same in all 2 seeds |",
        "latex": "& +0 & the same in all 2 seeds &",
    }
    assert said[kind] in out


def test_runs_that_were_stopped_or_have_fewer_steps_than_planned_are_named_by_four(tmp_path: Path, capsys) -> None:
    settings = {"settings": {"steps": 40}}
    runs = [write_run(tmp_path / "whole", "constant", 0, [step(at) for at in range(40)], **settings)]
    runs += [
        write_run(tmp_path / str(seed), "token_mean", seed, [step(at) for at in range(8)], status="running", **settings)
        for seed in range(6)
    ]
    first = "; ".join(f"token_mean, seed {seed}: 8 of 40 steps (running)" for seed in range(4))
    assert f"not done, or of fewer recorded steps than planned: {first}; and 2 more" in printed(capsys, runs, fit=False)[1]
    assert "not done" not in printed(capsys, runs[:1], fit=False)[1]
