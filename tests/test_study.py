"""What `compare DIR` says: the verdict in every format, evaluations on fresh prompts, and what recorded rollouts can tell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aggcli.analysis.final import final_summary
from aggcli.analysis.histories import read_histories
from aggcli.analysis.study import study
from aggcli.errors import SettingError
from aggcli.report.training_tables import training_table
from tests.cli import compared_directories
from tests.test_results import comparison, step, write_run


def printed(capsys: pytest.CaptureFixture[str], directories: Sequence[Path], **options: Any) -> tuple[str, str]:
    form = options.pop("format", "table")
    return compared_directories(capsys, directories, form, **options)


def found_in(capsys: pytest.CaptureFixture[str], directories: Sequence[Path], **options: Any) -> dict[str, Any]:
    return json.loads(printed(capsys, directories, format="json", fit=False, **options)[0])


def rows(found: Mapping[str, Any], figure: str) -> dict[str, dict[str, Any]]:
    return {row["mode"]: row for row in found["outcomes"] if row["outcome"] == figure}


# -- the verdict ---------------------------------------------------------------------------------------------------


def test_the_verdict_is_an_answer_and_a_list_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = comparison(tmp_path, {"sample_mean": [50, 51, 50], "prompt_mean": [60, 62, 61], "constant": [50, 50, 53]})
    corrected = "(Holm over the 7 tests of this comparison)"
    heading = f"Accuracy in training rollouts, equal steps, step 11, against sample_mean {corrected}:"
    whole = json.loads(printed(capsys, runs, format="json", fit=False)[0])
    headline, found = " ".join(whole["answer"]), whole["verdict"]
    assert len(whole["answer"]) == 4
    assert [(line["axis"], line["mode"], line["word"]) for line in found["lines"]] == [
        (axis, mode, word)
        for axis in ("steps", "tokens")
        for mode, word in (("prompt_mean", "higher"), ("constant", "no difference shown"))
    ]
    line = found["lines"][0]
    assert (line["baseline"], line["difference"]["n"], line["sign_flip"]) == (
        "sample_mean",
        3,
        {"p": 0.25, "floor": 0.25, "exact": True},
    )
    texts = [line["text"] for line in found["lines"]]
    assert re.fullmatch(
        r"prompt_mean: higher, \+0\.\d+ \[\+0\.\d+, \+0\.\d+\], Holm p = 0\.0\d+, sign-flip p = 0\.25 \(floor 0\.25\), 3 seeds",
        texts[0],
    )
    assert texts[1].startswith("constant: no difference shown, +0.00")
    table = printed(capsys, runs, fit=False)[0].split("\n\n")
    assert [" ".join(part.split()) for part in table[:2]] == [headline, " ".join([heading, *texts[:2]])]
    assert [line for line in table[1].splitlines() if line.startswith("  prompt_mean: higher, +0.")]
    md = printed(capsys, runs, format="md", fit=False)[0].splitlines()
    assert md[:6] == [headline, "", heading, "", f"- {texts[0]}", f"- {texts[1]}"]
    latex = printed(capsys, runs, format="latex", fit=False)[0].splitlines()
    assert latex[:4] == [f"% {headline}", f"% {heading}", f"% - {texts[0]}", f"% - {texts[1]}"]
    out, said = printed(capsys, runs, format="csv", fit=False)
    assert out.startswith("outcome,unit,")
    assert said.splitlines()[:3] == [f"note: {headline}", f"note: {heading}", f"note: - {texts[0]}"]


# -- on fresh prompts -------------------------------------------------------------------------------------------------


def evaluation(accuracy: float, wrong: float | None = 9.0) -> dict[str, Any]:
    lengths = {"response_length": 8.0, "correct_response_length": 7.0, "incorrect_response_length": wrong}
    return {"accuracy": accuracy, **lengths, "response_length_std": 1.0}


def evaluated(folder: Path, given: Mapping[str, Sequence[dict[str, Any] | None]], steps: int = 10) -> list[Path]:
    """Runs with half of the rollouts right in every step, and these evaluations (None: not evaluated), a seed each."""
    return [
        write_run(
            folder / mode / str(seed),
            mode,
            seed,
            [step(at, 50 + seed, 50 - seed) for at in range(steps)],
            settings={"steps": steps, "lr": 0.001},
            **({} if one is None else {"evaluation": one}),
        )
        for mode, own in given.items()
        for seed, one in enumerate(own)
    ]


def test_evaluations_of_the_manifests_are_rows_paired_by_seed_and_the_verdict_at_equal_steps(tmp_path: Path, capsys) -> None:
    """token_mean is ahead by 0.1, 0.12 and 0.11; its wrong responses are 2 shorter, of the one seed pair that has any."""
    own = {
        "sample_mean": [evaluation(0.5), evaluation(0.52), evaluation(0.54)],
        "token_mean": [evaluation(0.6, None), evaluation(0.64, 7.0), evaluation(0.65, None)],
    }
    found = found_in(capsys, evaluated(tmp_path, own))
    accuracy = rows(found, "accuracy_on_fresh_prompts")
    assert accuracy["sample_mean"]["mean"] == pytest.approx(0.52)
    ahead = accuracy["token_mean"]
    assert (ahead["head"], ahead["where"], ahead["pairs"]) == ("accuracy on fresh prompts (end)", "after step 9", 3)
    assert ahead["difference"] == pytest.approx(0.11)
    assert ahead["difference_high"] - ahead["difference"] == pytest.approx(4.302652729911275 * 0.01 / 3**0.5)  # t, 2 degrees
    wrong = rows(found, "incorrect/response_length_on_fresh_prompts")["token_mean"]
    assert (wrong["n"], wrong["pairs"], wrong["difference"], wrong["p"]) == (1, 1, -2.0, None)
    assert set(rows(found, "correct/response_length_on_fresh_prompts")) == {"sample_mean", "token_mean"}
    assert rows(found, "accuracy")["token_mean"]["difference"] == pytest.approx(0)  # the rollouts stay in the table
    by_steps, by_tokens = found["verdict"]["lines"]
    assert by_steps["heading"].startswith(
        "at equal steps, accuracy on fresh prompts (end), after step 9, against sample_mean (Holm"
    )
    assert (by_steps["word"], by_tokens["word"]) == ("higher", "no difference shown")
    assert by_tokens["heading"].endswith(
        "last 10 % of the tokens up to 900, against sample_mean (Holm over the 6 tests of this comparison)"
    )
    assert found["answer"][0].startswith(
        "1 of 6 differences from sample_mean under token_mean is shown: accuracy on fresh prompts (end) +0.11 [+0.0852, +0.135]"
        " (0.63 against 0.52)."
    )


def test_the_table_after_training_marks_the_differences_that_the_answer_does_not_count(tmp_path: Path) -> None:
    """Accuracy is ahead by 0.1, 0.12 and 0.11 (t = 19, p = 0.0027, six tests), wrong responses by 1, 1.1 and 0.6 (p = 0.03)."""
    own = {
        "sample_mean": [evaluation(0.5), evaluation(0.52), evaluation(0.54)],
        "token_mean": [evaluation(0.6, 10.0), evaluation(0.64, 10.1), evaluation(0.65, 9.6)],
    }
    runs = evaluated(tmp_path, own)
    comparison = study(read_histories(runs)[0], fit=False).comparison
    names = [(f"{mode}/{seed}", mode, seed) for mode in own for seed in range(3)]
    summary = final_summary(names, {name: own[mode][seed] for name, mode, seed in names})
    table = training_table(summary, comparison)
    cells = {str(column.header): list(column.cells)[-1] for column in table.columns}
    assert cells["accuracy ↑"] == "+0.110 ± 0.025"
    assert str(cells["length, wrong"]).startswith("~ +0.90 ± 0.")
    assert "corrected by Holm over all 7 tests" in str(table.caption)


def test_without_an_evaluation_of_every_run_none_is_compared_and_it_is_said(tmp_path: Path, capsys) -> None:
    own = {"sample_mean": [evaluation(0.5), evaluation(0.52)], "token_mean": [evaluation(0.6), None]}
    found = found_in(capsys, evaluated(tmp_path, own))
    assert not [row for row in found["outcomes"] if row["outcome"].endswith("_on_fresh_prompts")]
    assert "1 run was not evaluated at the end, so no figures on fresh prompts are compared" in found["notes"]
    assert found["verdict"]["lines"][0]["outcome"] == "accuracy"


def test_policies_that_were_trained_for_different_numbers_of_steps_are_not_paired(tmp_path: Path, capsys) -> None:
    runs = evaluated(tmp_path / "short", {"sample_mean": [evaluation(0.5), evaluation(0.52)]})
    runs += evaluated(tmp_path / "long", {"token_mean": [evaluation(0.6), evaluation(0.64)]}, steps=20)
    found = found_in(capsys, runs)
    assert [(row["where"], row["difference"]) for row in rows(found, "accuracy_on_fresh_prompts").values()] == [
        ("after step 9", None),
        ("after step 19", None),
    ]
    assert found["verdict"]["lines"][0]["heading"].startswith("accuracy in training rollouts, equal steps, step 9,")
    assert (
        "token_mean was trained for 20 steps and sample_mean for 10, so the policies they ended with are not compared"
        in (found["notes"])
    )


# -- recorded rollouts --------------------------------------------------------------------------------------------------

NORMS = {"sample_mean": (2.0, 4.0), "token_mean": (1.0, 1.0), "constant": (0.2, 0.8)}
"""Gradient norms of the two steps: token_mean's are 1/2 and 1/4 of sample_mean's, constant's 1/10 and 1/5."""
SAID = (
    "Accuracy and length are properties of the recorded rollouts, and no mode can change them; what the modes change is the"
    " weight of each token"
)


def replayed(folder: Path, rollouts: str = "dump", right: int = 50, **settings: Any) -> list[Path]:
    """A replay of two steps, as `compare --rollouts` records it."""
    return [
        write_run(
            folder / mode,
            mode,
            0,
            [
                {
                    **{name: value for name, value in step(at, right, 50).items() if name != "rollout_step"},
                    "grad_norm_log_probs": norm,
                    "gradient_ratio": norm / NORMS["sample_mean"][at],
                    "gradient_cosine": 1.0 if mode == "sample_mean" else 0.5,
                    "effective_tokens": 100.0 if mode == "sample_mean" else 200.0,
                    "weight_share/correct": 0.25,
                    "weight_share/zero_advantage": 0.0,
                }
                for at, norm in enumerate(norms)
            ],
            settings={"rollouts": [rollouts], "train": False, **settings},
            modes=list(NORMS),
            length_unit="tokens",
        )
        for mode, norms in NORMS.items()
    ]


def test_replays_of_the_same_rollouts_have_no_verdict_on_accuracy_but_weights_and_gradients(tmp_path: Path, capsys) -> None:
    runs = replayed(tmp_path)
    found = found_in(capsys, runs)
    assert found["answer"] == [
        "3 replays of the same recorded rollouts: sample_mean, token_mean and constant.",
        "Farthest from sample_mean in gradient norm is constant: gradient norm 0.15x, cosine 0.5; effective sample size 200"
        " tokens against 100.",
    ]
    assert [line["text"] for line in found["verdict"]["lines"]] == [
        f"{mode}: gradient norm {ratio}x, cosine 0.5; effective sample size 200 tokens against 100"
        for mode, ratio in (("token_mean", "0.375"), ("constant", "0.15"))
    ]
    assert found["verdict"]["lines"][0]["heading"] == "against sample_mean, mean of 2 steps"
    figures = {row["outcome"] for row in found["outcomes"]}
    assert figures == {"grad_norm_log_probs", "gradient_ratio", "gradient_cosine", "effective_tokens", "weight_share/correct"}
    assert not any(row["difference"] is not None or row["p"] is not None for row in found["outcomes"])
    for kind in ("table", "md", "latex"):
        out, said = printed(capsys, runs, format=kind)
        assert SAID in " ".join(out.replace("%", "").split())
        assert "no difference" not in out + said
        assert "accuracy in training rollouts" not in out
        assert "one seed" not in (out + said).lower()
        assert "no curve is fitted" not in said
    table = printed(capsys, runs)[0].splitlines()
    assert max(map(len, table)) <= 80
    assert any(line.split() == ["gradient", "norm", "3", "1", "0.5"] for line in table), table


def test_another_baseline_has_its_own_ratios_and_no_cosine_that_was_recorded_against_another_mode(
    tmp_path: Path, capsys
) -> None:
    found = found_in(capsys, replayed(tmp_path), baseline="constant")
    ratios = rows(found, "gradient_ratio")
    assert list(ratios) == ["constant", "sample_mean", "token_mean"]
    assert ratios["sample_mean"]["mean"] == pytest.approx((10 + 5) / 2)
    assert ratios["token_mean"]["mean"] == pytest.approx((5 + 1.25) / 2)
    assert rows(found, "gradient_cosine") == {}
    with pytest.raises(SettingError, match="--baseline prompt_mean: is not among the compared runs"):
        found_in(capsys, replayed(tmp_path / "again"), baseline="prompt_mean")


def test_replays_of_different_rollouts_say_so_and_compare_no_gradients_across_them(tmp_path: Path, capsys) -> None:
    found = found_in(capsys, [*replayed(tmp_path / "a"), *replayed(tmp_path / "b", "other", right=60)])
    assert found["answer"][0].startswith(
        "6 replays of recorded rollouts, not all of them the same: sample_mean (rollouts=dump), "
    )
    assert found["answer"][1].startswith(
        "Of those with a gradient norm on the same rollouts, farthest from sample_mean (rollou"
    )
    assert "constant (rollouts=other)" not in rows(found, "gradient_ratio")
    assert "constant (rollouts=dump)" in rows(found, "gradient_ratio")


def test_training_on_recorded_rollouts_is_said_as_that_and_one_replay_too(tmp_path: Path, capsys) -> None:
    runs = replayed(tmp_path / "a", train=True)
    trained = found_in(capsys, runs)["answer"][0]
    assert trained == "3 runs trained on the same recorded rollouts: sample_mean, token_mean and constant."
    assert f"{SAID} and so the policy." in " ".join(printed(capsys, runs)[0].split())
    found = found_in(capsys, replayed(tmp_path / "b")[:1])
    assert found["answer"] == ["1 replay of recorded rollouts: sample_mean."]
    assert found["verdict"]["lines"] == []
    assert "gainst" not in printed(capsys, [tmp_path / "b" / "sample_mean"])[0]


def test_replays_of_many_arms_stand_in_blocks_of_columns_and_break_no_number(tmp_path: Path, capsys) -> None:
    arms = [one for at in range(3) for one in replayed(tmp_path / str(at), eps_clip=0.1 * (at + 1))]
    out, _ = printed(capsys, arms)
    assert max(map(len, out.splitlines())) <= 80
    gradients = [[cell for cell in line.split() if cell[0].isdigit()] for line in out.splitlines() if line[:8] == "gradient"]
    rows = [cells for cells in gradients if cells and {*cells} <= {"3", "1", "0.5"}]  # the norms, and not their ratios
    assert len(rows) == 3, "four, four and one of nine arms find room"
    assert [cell for row in rows for cell in row] == ["3", "1", "0.5"] * 3, "means of the two steps"


def test_beside_runs_that_sampled_their_own_rollouts_replays_are_left_out_and_it_is_said(tmp_path: Path, capsys) -> None:
    own = {"sample_mean": [None, None], "token_mean": [None, None]}
    found = found_in(capsys, [*replayed(tmp_path / "a"), *evaluated(tmp_path / "b", own)])
    assert found["modes"] == ["sample_mean", "token_mean"]
    assert "3 runs are on recorded rollouts and left out of the comparison" in found["notes"]
    assert found["verdict"]["lines"][0]["outcome"] == "accuracy"
