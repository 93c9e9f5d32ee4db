"""Runs that other trainers made, kept, drawn and written on a page: from the numbers that were compared, in words that hold."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

import aggcli as package
from aggcli.analysis.arms import read_arms
from aggcli.analysis.frames import frames_of
from aggcli.analysis.kept_curves import Kept, keep_curves, read_curves
from aggcli.analysis.study import compared_runs
from aggcli.errors import RecordError, SettingError
from aggcli.jobs.compare import ComparisonOptions
from aggcli.jobs.curves import compare_curves, compare_kept
from aggcli.jobs.plot import plot
from aggcli.report.curves import learning_curves
from tests.cli import aggcli, refused, strict_json
from tests.test_curves_of_trainers import NO_FIT, own_records, put, trainer_state, written
from tests.test_page import Page
from tests.test_page_shown import Outline
from tests.test_schema import validator_of


def unpaired(folder: Path) -> list[str]:
    return written(folder, trainer_state, name="")


def words(curves: list[str]) -> list[str]:
    return [word for one in curves for word in ("--curves", one)]


def _list(points: ArrayLike) -> list[float]:
    return np.asarray(points).tolist()


# -- what is kept -------------------------------------------------------------------------------------------------------


def test_what_was_kept_is_compared_and_drawn_again_without_the_logs(tmp_path: Path) -> None:
    """One arm is of our own records, whose settings, seconds and evaluations are kept too."""
    own_records(tmp_path / "own")
    curves = [f"ours={tmp_path}/own/grpo-*", written(tmp_path / "logs", trainer_state)[1]]
    out = tmp_path / "out"
    found = compare_curves(curves, (), ComparisonOptions(fit=False, window=0.5), out)
    assert found.page == out / "figures" / "report.html"
    before = {path.name: path.read_bytes() for path in (out / "figures").iterdir()}
    assert set(before) == {"report.html", "effects.png", "learning_curves.png", "reward_by_tokens.png"}
    kept = strict_json((out / "curves.json").read_text())
    assert [error.message for error in validator_of("curves.json").iter_errors(kept)] == []
    assert {run["source"] == "" for run in kept["runs"]} == {True, False}
    for name in ("own", "logs"):
        shutil.rmtree(tmp_path / name)
    again = compare_kept(out)
    assert {**again.as_json(), "report": str(found.page)} == found.as_json()
    assert again.options.window == 0.5
    drawn = plot([out], html=True)
    assert {path.name: path.read_bytes() for path in (out / "figures").iterdir()} == before
    assert [name for name, _ in drawn.figures] == ["learning_curves", "effects", "reward_by_tokens"]


def test_every_number_of_a_run_is_kept_to_the_last_bit(tmp_path: Path) -> None:
    """Thirds, blanks, and tokens beyond what an int32 holds."""
    rows = [{"step": at, "reward": at / 3, "num_tokens": 3e9 * at} for at in range(4)] + [{"step": 9, "entropy": 0.1}]
    put(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    arms = read_arms([f"a={tmp_path}/x.jsonl"])
    keep_curves(tmp_path, Kept(arms, {"curves": [], "metrics": [], "options": {}}))
    (before,), (after,) = arms.runs, read_curves(tmp_path).arms.runs
    for name in ("steps", "tokens", "seconds"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        assert getattr(after, name).dtype == getattr(before, name).dtype
    for name, values in before.measures.items():
        np.testing.assert_array_equal(after.measures[name], values)
    told = (after.directory, after.mode, after.seed, after.source, after.stack, after.diverged, after.modes)
    assert told == (before.directory, "a", 0, before.source, None, None, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2, "kind": "curves"}',
        '{"schema": 1, "kind": "curves", "runs": [{"steps": [1]}], "paired": true}',
    ],
)
def test_a_file_that_was_not_kept_here_is_one_line(tmp_path: Path, capsys, text: str) -> None:
    put(tmp_path / "curves.json", text)
    for command in ("compare", "plot"):
        assert "curves.json: " in refused(aggcli(capsys, command, tmp_path))


def test_an_output_that_holds_something_else_is_never_replaced(tmp_path: Path, capsys) -> None:
    curves = words(unpaired(tmp_path / "logs"))
    out = put(tmp_path / "out" / "mine.txt", "mine").parent
    line = refused(aggcli(capsys, "compare", *curves, "--output", out))
    assert "already holds something; choose another folder or give --overwrite" in line
    assert "holds no curves.json" in refused(aggcli(capsys, "compare", *curves, "--output", out, "--overwrite"))
    assert "is a file" in refused(aggcli(capsys, "compare", *curves, "--output", out / "mine.txt"))
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    for foreign in ("{}", '{"mine": 1}', '{"schema": 1, "kind": "mine"}'):
        put(out / "curves.json", foreign)
        assert "is not replaced" in refused(aggcli(capsys, "compare", *curves, "--output", out, "--overwrite"))
        assert (out / "curves.json").read_text() == foreign
    assert aggcli(capsys, "compare", *curves, "--output", tmp_path / "first", "--no-fit").code == 0
    put(out / "curves.json", (tmp_path / "first" / "curves.json").read_text())
    for name in ("pg_loss_by_rank.png", "own.png"):
        put(out / "figures" / name, "of before")
    told = aggcli(capsys, "compare", *curves, "--output", out, "--overwrite", "--no-fit")
    assert (told.code, f"page: {out}/figures/report.html" in told.err) == (0, True)
    assert {path.name for path in out.rglob("*") if path.is_file()} == {
        "mine.txt",
        "curves.json",
        "own.png",
        "report.html",
        "effects.png",
        "learning_curves.png",
        "reward_by_tokens.png",
    }
    assert "compared alone" in refused(aggcli(capsys, "compare", out, *curves))
    assert "--step 3: is of figures that show a single step" in refused(aggcli(capsys, "plot", out, "--step", "3"))


# -- what is drawn and said -----------------------------------------------------------------------------------------------


def test_the_page_of_runs_that_are_not_paired_says_so_and_holds_the_numbers_of_the_table(tmp_path: Path) -> None:
    found = compare_curves(unpaired(tmp_path / "logs"), (), NO_FIT, tmp_path / "out")
    assert found.page is not None
    source = found.page.read_text(encoding="utf-8")
    page, outline = Page(source), Outline(source)
    assert outline.headings[0] == (1, found.answer.sentences[0])
    assert outline.headings[1] == (2, "How far each arm is from grpo")
    row = next(one for one in found.rows if (one.outcome, one.mode) == ("raw_reward", "dapo"))
    (_, cells) = [
        one
        for one in page.table("The comparison")
        if one["outcome"][0].startswith("raw reward in training rollouts, equal steps")
    ]
    assert set(cells) == {"outcome", "arm", "runs", "mean", "difference", "p (Holm)"}
    assert float(cells["difference"][1] or "nan") == row.difference == pytest.approx((53 + 56 + 55 - 41 - 43 - 44) / 3 / 64)
    assert float(cells["p (Holm)"][1] or "nan") == row.p_holm
    assert [cells["arm"][0] for cells in page.table("Mean over 3 runs an arm")] == ["grpo", "dapo"]
    runs = page.table("The runs")
    assert [(one["arm"][0], one["steps with numbers"][0], one["last"][0]) for one in runs] == [("grpo", "12", "11")] * 3 + [
        ("dapo", "12", "11")
    ] * 3
    labels = [text for name, text in page.attributes if name == "aria-label"]
    told = " ".join([page.text, *labels])
    for said in (
        "Do these runs differ in what they learned? grpo and dapo",
        "difference of the means from grpo's, not paired, of 3 runs against 3; line: 95 % interval, by Welch's t-test",
        "line: mean over runs, at the steps that all runs of the arm have; faint: each run; band: 95 % Student-t interval",
        "Runs are not paired: a difference is of the means of two arms",
        "The settings of other trainers' runs are not known",
        "Raw reward against the tokens as logged: 2 arms, 6 runs",
        f"aggcli compare --curves 'grpo={tmp_path}/logs/grpo-*'",
        "--no-fit --overwrite --output",
        "runs are not paired by seed: 6 runs tell no seed by their paths",
    ):
        assert said in told, said
    caption = next(label for label in page.tables if label.startswith("The comparison"))
    assert "5 % or more shows no difference" in caption
    assert "Could show" not in caption, "the page has no such column"
    shown = (
        told.replace("not paired by seed", "")
        .replace("no seed by their paths", "")
        .replace("since their seeds are not known", "")
    )
    shown = shown.replace("pairing needs the same seeds in all arms, as in runs/grpo-seed1", "")
    for untrue in (
        "seed",
        "mode",
        "paired t-test",
        "sign-flip",
        "optimizer step",
        "pg_loss",
        "scored rollouts",
        "git checkout",
    ):
        assert untrue not in shown, shown[max(0, shown.index(untrue) - 80) : shown.index(untrue) + 40]


def test_the_page_of_paired_runs_names_the_paired_test(tmp_path: Path) -> None:
    found = compare_curves(written(tmp_path / "logs", trainer_state), (), NO_FIT, tmp_path / "out")
    assert found.page is not None
    page = Page(found.page.read_text(encoding="utf-8"))
    told = " ".join([page.text, *(text for name, text in page.attributes if name == "aria-label")])
    assert "mean difference to grpo, paired by seed, of 3 seeds; line: 95 % interval; filled" in told
    assert "Differences are paired by the seeds that paths and records tell; p is the paired t-test's" in told
    assert [row["seed"][0] for row in page.table("The runs")] == ["0", "1", "2"] * 2
    assert "Welch" not in told


def test_one_run_an_arm_has_no_interval_in_a_figure_or_on_the_page(tmp_path: Path) -> None:
    for arm in ("grpo", "dapo"):
        trainer_state(tmp_path, arm, "", 0)
    found = compare_curves([f"{arm}={tmp_path}/{arm}-0" for arm in ("grpo", "dapo")], (), NO_FIT, tmp_path / "out")
    assert found.page is not None
    page = Page(found.page.read_text(encoding="utf-8"))
    told = " ".join([page.text, *(text for name, text in page.attributes if name == "aria-label")])
    assert "difference of the means from grpo's, not paired, of 1 run against 1: no interval and no test" in told
    assert "one run an arm: a line is one run, so there is no band" in told
    assert not any("[" in text for row in page.table("The comparison") for text, _ in row.values())
    for untrue in ("95 %", "Holm", "Welch", "One seed"):
        assert untrue not in told.replace("p (Holm)", ""), untrue


def test_a_mean_is_drawn_at_the_steps_that_all_runs_of_its_arm_logged_and_at_no_other(tmp_path: Path) -> None:
    """Of a, one run logs every second step and the other every third up to 6, where both are known at 0 and 6; the second
    has no length, so that of the first stands alone."""
    logged = {"a1": range(0, 12, 2), "a2": range(0, 9, 3), "b1": range(12)}
    for name, steps in logged.items():
        rows = [
            {"step": at, "reward": at + (name == "a2"), **({"response_length": 5 + at} if name == "a1" else {})} for at in steps
        ]
        put(tmp_path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    runs, _, _ = compared_runs(read_arms([f"{arm}={tmp_path}/{arm}*.jsonl" for arm in "ab"]).runs)
    reward, length = learning_curves(frames_of(runs), runs).axes
    (line,) = [one for one in reward.lines if one.get_label() == "a"]
    assert (_list(line.get_xdata()), _list(line.get_ydata())) == ([0, 6], [0.5, 6.5])
    (line,) = [one for one in length.lines if one.get_label() == "a"]
    assert _list(line.get_ydata()) == [5, 7, 9, 11, 13, 15]
    faint = [_list(one.get_xdata()) for one in reward.lines if one.get_alpha() == 0.25]
    assert faint == [list(logged[name]) for name in logged]
    assert reward.get_xlabel() == "step, as logged"
    assert reward.get_title(loc="left").splitlines() == ["raw reward", "as the trainers logged it"]


# -- from Python ----------------------------------------------------------------------------------------------------------


def test_python_compares_curves_as_the_command_line_does(tmp_path: Path, capsys) -> None:
    curves = unpaired(tmp_path / "logs")
    given = dict(one.split("=", 1) for one in curves)
    found = package.compare(curves=given, metrics={"reward": "completions/mean_length"}, output=tmp_path / "o", fit=False)
    words_ = [*words(curves), "--metric", "reward=completions/mean_length", "--no-fit", "--json"]
    told = json.loads(aggcli(capsys, "compare", *words_).out)
    assert found.as_json() == {**told, "report": str(tmp_path / "o" / "figures" / "report.html")}
    assert package.compare(tmp_path / "o").as_json()["answer"] == told["answer"]
    refusals: list[tuple[Any, str]] = [
        ({"curves": given, "directories": tmp_path}, "give directories or curves"),
        ({"directories": tmp_path, "metrics": {"reward": "x"}}, "are of curves"),
        ({}, "give results directories, or curves"),
        ({"curves": {}}, "curves: names no arm"),
        ({"curves": words(curves)}, "curves: must be a dict"),
        ({"curves": {"a": [tmp_path]}}, "curves: a is a list; it must be one text"),
        ({"curves": given, "metrics": ["reward=x"]}, "metrics: must be a dict"),
        ({"curves": given, "wndow": 1}, "unexpected keyword argument 'wndow'"),
    ]
    for wrong, said in refusals:
        with pytest.raises(SettingError, match=re.escape(said)):
            package.compare(**wrong)
    with pytest.raises(RecordError, match=re.escape("is no log that is read here")):
        package.compare(curves={"a": put(tmp_path / "x.dat", "")})


def test_a_plan_of_runs_that_are_not_paired_counts_runs_of_each_arm(tmp_path: Path, capsys) -> None:
    """Last rewards 41, 43, 44 and 53, 56, 55 in 64ths: variances 7/3 and 7/3, so by Cohen's table 26 runs show 0.8 of that."""
    size = 0.8 * (7 / 3) ** 0.5 / 64
    curves = words(unpaired(tmp_path / "logs"))
    out = aggcli(capsys, "compare", *curves, "--no-fit", "--plan", str(size), "--plan-outcome", "raw_reward").out
    said = " ".join(out.split())
    assert (
        "Runs of each arm that show a difference of 0.0191 reward in raw reward in training rollouts, equal steps with 80 %"
        in said
    )
    assert "26 runs as the only test (standard deviation over its 3 runs 0.0239, over grpo's 3 runs 0.0239)" in said
    none = [f"{arm}={tmp_path}/logs/{arm}-0" for arm in ("grpo", "dapo")]
    told = aggcli(capsys, "compare", *words(none), "--no-fit", "--plan", "0.1").out
    assert "dapo: not known, an arm has one run, or neither has a spread" in " ".join(told.split())
