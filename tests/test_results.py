"""`compare` on results directories: reading, arms, duplicates, what differs, and every format of the table."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggcli.analysis.histories import read_histories, read_history
from aggcli.analysis.settings import arm_labels, differences, labelled, warnings, without_duplicates
from aggcli.errors import RecordError, SettingError
from aggcli.jobs.compare import compare
from tests.cli import aggcli, compared_directories, refused


def write_run(directory: Path, mode: str, seed: int, lines: Sequence[dict[str, Any]], **manifest: Any) -> Path:
    """A run directory by hand."""
    directory.mkdir(parents=True)
    head = {"schema": 1, "kind": "run", "mode": mode, "seed": seed, "status": "done", "settings": {"lr": 0.001, "seed": seed}}
    (directory / "manifest.json").write_text(json.dumps({**head, **manifest}), encoding="utf-8")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return directory


def step(number: int, right: int = 1, wrong: int = 1, **values: Any) -> dict[str, Any]:
    counts = {"correct/count": right, "incorrect/count": wrong, "samples": right + wrong, "response_tokens": 100}
    return {"step": number, "rollout_step": number, **counts, "raw_reward": right / (right + wrong), "pg_loss": 0.1, **values}


def reward(value: float) -> list[dict[str, Any]]:
    return [{"step": 0, "raw_reward": value}]


def comparison(folder: Path, modes: dict[str, Sequence[int]], steps: int = 12) -> list[Path]:
    """Runs whose accuracy at a step is (its mode's number + seed) of 100 right rollouts, and one more every other step."""
    return [
        write_run(
            folder / mode / f"seed-{seed}", mode, seed, [step(at, right + seed + at % 2, 100 - right) for at in range(steps)]
        )
        for mode, numbers in modes.items()
        for seed, right in enumerate(numbers)
    ]


def printed(capsys: pytest.CaptureFixture[str], directories: Sequence[Path], **options: Any) -> tuple[str, str]:
    form = options.pop("format", "table")
    return compared_directories(capsys, directories, form, **options)


# -- reading --------------------------------------------------------------------------------------------------------


def test_tokens_count_what_was_trained_on_before_the_step(tmp_path: Path):
    lines = [step(0, response_tokens=100), step(1, response_tokens=50), step(2, response_tokens=70)]
    found = read_history(write_run(tmp_path / "a", "sample_mean", 0, lines))
    assert found is not None
    assert found.tokens.tolist() == [0, 100, 150]
    assert np.isnan(found.seconds).all()


def test_optimizer_steps_of_one_rollout_step_are_pooled_by_what_they_averaged(tmp_path: Path):
    lines = [
        {**step(0, 3, 1, response_length=10, **{"correct/response_length": 4.0}), "rollout_step": 0},
        {**step(1, 1, 1, response_length=40, **{"correct/response_length": 12.0}), "rollout_step": 0},
        {**step(2, 0, 2, response_length=40, **{"correct/response_length": None}), "rollout_step": 1},
    ]
    found = read_history(write_run(tmp_path / "a", "sample_mean", 0, lines))
    assert found is not None
    assert found.steps.tolist() == [0, 1]
    assert found.measures["accuracy"].tolist() == pytest.approx([4 / 6, 0])
    assert found.measures["response_length"].tolist() == pytest.approx([(4 * 10 + 2 * 40) / 6, 40])
    assert found.measures["correct/response_length"][0] == pytest.approx((3 * 4 + 1 * 12) / 4)
    assert np.isnan(found.measures["correct/response_length"][1])
    assert found.tokens.tolist() == [0, 200]


def test_repeated_steps_count_once_by_the_last_line_and_it_is_said(tmp_path: Path):
    lines = [step(0, 1, 1), step(1, 1, 1), step(1, 3, 1), step(2, 1, 1)]
    (found,), notes = read_histories([write_run(tmp_path / "a", "sample_mean", 0, lines)])
    assert found.measures["accuracy"].tolist() == [0.5, 0.75, 0.5]
    assert notes == [
        "1 recorded step is a repetition (a run that was resumed writes them again); the last one counts: "
        + str(tmp_path / "a")
    ]


def test_tokens_are_not_known_behind_a_missing_step(tmp_path: Path):
    found = read_history(write_run(tmp_path / "a", "sample_mean", 0, [step(0), step(1), step(3), step(4)]))
    assert found is not None
    assert found.tokens.tolist()[:2] == [0, 100]
    assert np.isnan(found.tokens[2:]).all()


def test_a_half_written_last_line_is_left_out_and_a_broken_one_is_refused_by_file(tmp_path: Path):
    directory = write_run(tmp_path / "a", "sample_mean", 0, [step(0), step(1)])
    path = directory / "metrics.jsonl"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + '{"step": 2, "corr', encoding="utf-8")
    found = read_history(directory)
    assert found is not None
    assert found.steps.tolist() == [0, 1]
    path.write_text(whole + '{"step": 2, "corr\n' + whole, encoding="utf-8")
    with pytest.raises(RecordError, match=r"metrics\.jsonl: line 3 is not the record of a step: it is no JSON"):
        read_history(directory)
    path.write_text('{"step": 0}\n{"pg_loss": 1}\n', encoding="utf-8")
    with pytest.raises(RecordError, match="line 2 is not the record of a step"):
        read_history(directory)


def test_folders_without_results_are_refused_in_one_line(tmp_path: Path):
    with pytest.raises(RecordError, match="is not a results directory"):
        compare([tmp_path])
    with pytest.raises(RecordError, match="no steps are recorded"):
        compare([write_run(tmp_path / "a", "sample_mean", 0, [])])


# -- arms, duplicates, settings -----------------------------------------------------------------------------------------


def test_one_mode_under_two_settings_is_two_arms_named_by_what_differs(tmp_path: Path):
    runs, _ = read_histories(
        [
            write_run(
                tmp_path / "a",
                "sample_mean",
                0,
                [step(0)],
                settings={"lr": 0.001, "steps": 5, "loss_aggregation_divisor": None},
            ),
            write_run(tmp_path / "b", "sample_mean", 1, [step(0)], settings={"lr": 0.0003, "steps": 9, "seed": 1}),
            write_run(tmp_path / "c", "constant", 0, [step(0)], settings={"lr": 0.001, "steps": 5, "seed": 0}, divisor=32.0),
        ]
    )
    runs = labelled(runs)
    assert [one.label for one in runs] == ["sample_mean (lr=0.001)", "sample_mean (lr=0.0003)", "constant"]
    found = {one.name: one for one in differences(runs)}
    assert set(found) == {"lr", "steps"}  # the divisor is constant's own, the seed is the unit
    assert found["lr"].text == "lr: 0.001 in sample_mean (lr=0.001), constant; 0.0003 in sample_mean (lr=0.0003)"
    (warning,) = warnings(list(found.values()))
    assert warning.startswith("more than the mode differs, so a difference may come from it: lr: ")


def test_arms_of_many_differing_settings_are_named_by_three_and_stay_distinct(tmp_path: Path):
    few = [arm_labels([("constant", {f"s{i}": at * (i < 5) for i in range(9)}) for at in range(n)]) for n in (1, 3)]
    assert few[0] == ["constant"]
    assert few[1][1] == "constant (s0=1, s1=1, s2=1 and 2 others)"
    bits = [("constant", {f"s{i}": at >> i & 1 for i in range(4)}) for at in range(16)]
    assert len(set(arm_labels(bits))) == 16
    assert arm_labels(bits)[0] == "constant (s0=0, s1=0, s2=0 and 1 other, no. 1)"
    runs, _ = read_histories(
        [write_run(tmp_path / str(at), "constant", 0, [step(0)], settings={f"s{i}": at for i in range(30)}) for at in range(12)]
    )
    (warning,) = warnings(differences(labelled(runs)))
    assert warning.endswith(" and 27 others")
    assert len(warning) < 1000


def test_versions_warn_and_two_divisors_of_constant_differ(tmp_path: Path):
    runs, _ = read_histories(
        [
            write_run(tmp_path / "a", "constant", 0, [step(0)], divisor=32.0, environment={"aggcli": "0.1.0"}),
            write_run(tmp_path / "b", "constant", 1, [step(0)], divisor=64.0, environment={"aggcli": "0.2.0"}),
            write_run(tmp_path / "c", "sample_mean", 0, [step(0)], environment={"aggcli": "0.2.0"}),
        ]
    )
    found = differences(labelled(runs))
    assert [(one.name, one.kind) for one in found] == [("loss_aggregation_divisor", "setting"), ("aggcli", "provenance")]
    divisors = "32 in constant (loss_aggregation_divisor=32); 64 in constant (loss_aggregation_divisor=64)"
    assert found[0].text == f"loss_aggregation_divisor: {divisors}"
    assert "aggcli: 0.1.0 in constant (loss_aggregation_divisor=32); 0.2.0 in" in warnings(found)[1]


def test_of_a_run_recorded_twice_the_longest_counts_then_the_one_that_is_done_then_the_last(tmp_path: Path):
    def kept(*runs: tuple[int, str]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        given = [
            write_run(folder / str(at), "constant", 0, [step(i) for i in range(length)], status=status)
            for at, (length, status) in enumerate(runs)
        ]
        found, notes = without_duplicates(labelled(read_histories(given)[0]))
        assert len(found) == 1
        out = "2 are" if len(runs) == 3 else "1 is"
        assert notes[0].startswith(
            f"of {len(runs)} runs {out} left out, since another records the same mode, seed and settings;"
        )
        return found[0].directory.name

    assert kept((2, "done"), (3, "interrupted"), (1, "done")) == "1"
    assert kept((2, "done"), (2, "interrupted")) == "0"
    assert kept((2, "done"), (2, "done")) == "1"


def test_a_directory_that_is_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    """In whatever way its path is written: what is printed, and what is drawn, is that of the directories given once."""
    runs = comparison(tmp_path, {"constant": [50, 51], "token_mean": [60, 62]})
    once = printed(capsys, runs, fit=False)
    monkeypatch.chdir(runs[0])
    (tmp_path / "link").symlink_to(runs[3])
    again = [*runs, runs[0], Path("."), runs[1] / ".." / runs[1].name, tmp_path / "link"]
    assert printed(capsys, again, fit=False) == once
    drawn = []
    for number, given in enumerate((runs, again)):
        told = aggcli(capsys, "plot", *given, "--html", "--format", "svg", "--output", tmp_path / str(number))
        assert told.code == 0
        drawn.append({path.name: path.read_bytes() for path in sorted((tmp_path / str(number)).glob("*.svg"))})
    assert drawn[0]
    assert drawn[0] == drawn[1]


def test_a_copy_of_a_directory_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = comparison(tmp_path, {"constant": [50, 51], "token_mean": [60, 62]})
    copy = Path(shutil.copytree(runs[0], tmp_path / "copy"))
    rows = [json.loads(printed(capsys, given, format="json", fit=False)[0]) for given in (runs, [copy, *runs])]
    assert rows[0]["outcomes"] == rows[1]["outcomes"]
    assert {row["mode"]: row["n"] for row in rows[1]["outcomes"] if row["outcome"] == "accuracy"} == {
        "constant": 2,
        "token_mean": 2,
    }
    (note,) = [note for note in rows[1]["notes"] if note not in rows[0]["notes"]]
    assert note.startswith("of 5 runs 1 is left out, since another records the same mode, seed and settings;")
    assert note.endswith(str(copy))


# -- formats ----------------------------------------------------------------------------------------------------------


def test_mean_deviation_and_n_are_those_worked_out_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """0.2, 0.4, 0.9 over seeds 1, 2, 3 give 0.5 and 0.3606 (n-1); one seed has no deviation; C moves neither A nor B."""
    a = [write_run(tmp_path / f"a{s}", "sample_mean", s, reward(v)) for s, v in ((1, 0.2), (2, 0.4), (3, 0.9))]
    b = [write_run(tmp_path / f"b{s}", "constant", s, reward(v)) for s, v in ((1, 0.3), (2, 0.45), (3, 0.8))]
    c = [write_run(tmp_path / "c1", "token_mean", 1, reward(0.7))]

    def rows(directories: list[Path]) -> dict[str, dict[str, str]]:
        out, _ = printed(capsys, directories, format="csv")
        return {row["mode"]: row for row in csv.DictReader(io.StringIO(out)) if row["outcome"] == "raw_reward"}

    two, three = rows([*a, *b]), rows([*a, *b, *c])
    assert float(two["sample_mean"]["mean"]) == pytest.approx(0.5)
    assert float(two["sample_mean"]["std"]) == pytest.approx(0.36056, abs=1e-5)
    assert two["sample_mean"]["n"] == "3"
    assert (three["token_mean"]["n"], three["token_mean"]["std"], three["token_mean"]["low"]) == ("1", "", "")
    assert {mode: row for mode, row in three.items() if mode in two} == two


def test_the_table_fits_80_columns_and_shows_arrows_intervals_differences_and_the_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = comparison(
        tmp_path, {"sample_mean": [50, 51, 50, 52], "prompt_mean": [60, 62, 61, 64], "constant": [50, 50, 52, 51]}
    )
    out, said = printed(capsys, runs)
    assert max(map(len, out.splitlines())) <= 80
    for text in (
        "accuracy in training rollouts, equal steps ↑",
        "minus sample_mean",
        "sign-flip",
        "cannot fall below 0.12",
        "IQM",
        "Holm over all 8 tests",
    ):
        assert text in " ".join(out.split()), text
    assert " ".join(out.split()).startswith("2 of 8 differences from sample_mean are shown; the largest")
    assert "no curve is fitted" in said


def test_precision_sorting_and_only_changed_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = comparison(tmp_path, {"sample_mean": [50, 51], "prompt_mean": [60, 62], "constant": [40, 41]})
    out, _ = printed(capsys, runs, format="json", sort_by="accuracy", only_changed=True, fit=False)
    found = json.loads(out)
    assert [row["mode"] for row in found["outcomes"] if row["outcome"] == "accuracy"] == [
        "prompt_mean",
        "sample_mean",
        "constant",
    ]
    assert "tokens" not in {row["outcome"] for row in found["outcomes"]}  # all took as many
    assert found["baseline"] == "sample_mean"
    md, _ = printed(capsys, runs, format="md", precision=2, fit=False)
    assert "| accuracy in training rollouts, equal steps ↑, share | prompt_mean | 2 | 0.62 |" in md
    latex, _ = printed(capsys, runs, format="latex", fit=False)
    assert r"sample\_mean" in latex
    assert r"$\uparrow$" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": 0}, "--precision 0: must lie between 1 and 17"),
        ({"sort_by": "accuracies"}, "--sort-by accuracies: is not in the table; did you mean 'accuracy'"),
        ({"reach": 1.5}, "--reach 1.5: must be an accuracy above 0 and at most 1"),
        ({"window": 2.0}, "--window 2: must be a share"),
        ({"axis": "flops"}, "--axis flops: is not known"),
        ({"baseline": "constnt"}, "--baseline constnt: is not among the compared runs; did you mean 'constant'"),
    ],
)
def test_options_that_cannot_be_used_are_refused_and_named(capsys, tmp_path: Path, options: dict[str, Any], text: str):
    with pytest.raises(SettingError, match=text):
        compared_directories(capsys, comparison(tmp_path, {"constant": [50]}), **options)


def test_a_format_that_is_not_known_is_refused_and_the_nearest_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = refused(aggcli(capsys, "compare", *comparison(tmp_path, {"constant": [50]}), "--format", "tabel"))
    assert "--format tabel: is not known; did you mean 'table'" in line


def test_bent_curves_are_fitted_and_stand_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = []
    for mode, midpoint in (("sample_mean", 2000), ("prompt_mean", 1000)):
        for seed in range(2):
            rng = np.random.default_rng([seed, midpoint])
            chance = 0.3 + 0.5 / (1 + (midpoint / np.maximum(np.arange(100) * 100, 1e-9)) ** 2)
            right = rng.binomial(500, chance).tolist()
            runs.append(write_run(tmp_path / f"{mode}{seed}", mode, seed, [step(i, r, 500 - r) for i, r in enumerate(right)]))
    out, _ = printed(capsys, runs, format="json")
    found = {(row["outcome"], row["mode"]): row for row in json.loads(out)["outcomes"]}
    assert found["curve/midpoint", "sample_mean"]["mean"] == pytest.approx(2000, rel=0.15)
    assert found["curve/midpoint", "prompt_mean"]["mean"] == pytest.approx(1000, rel=0.15)
    assert found["curve/asymptote", "prompt_mean"]["mean"] == pytest.approx(0.8, abs=0.03)
    assert found["curve/exponent_ratio", "prompt_mean"]["n"] == 2
    own = found["curve/asymptote", "prompt_mean"]
    reach = 12.706204736 * own["std"] / 2**0.5 / (own["mean"] * (1 - own["mean"]))  # t of 1 degree, on the logit scale
    odds = own["mean"] / (1 - own["mean"]) * np.exp(reach)
    assert own["high"] == pytest.approx(odds / (1 + odds))
    assert all(found[name, "prompt_mean"]["std"] > 0 for name in ("curve/exponent", "curve/midpoint", "curve/exponent_ratio"))


@pytest.mark.slow
def test_nothing_of_it_imports_torch():
    code = (
        "import sys, aggcli.cli.results, aggcli.analysis.verdict, aggcli.analysis.efficiency, aggcli.analysis.settings,"
        " aggcli.report.comparison_tables; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
