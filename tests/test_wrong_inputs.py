"""What people type: each gets one clear line that names the next step, or simply works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli import aggcli, refused, replay, strict_json, write_jsonl
from tests.fixtures import sample

DATA = Path(__file__).parent / "data" / "slime_train"


def scored(scale: float = 1.0, **fields: Any) -> list[dict[str, Any]]:
    """Two groups of a right and a wrong answer, of 2 to 5 tokens."""
    return [sample(n, group_index=n // 2 - 1 if n < 4 else 1, reward=scale * (n % 2), **fields) for n in (2, 3, 4, 5)]


@pytest.fixture
def results(capsys, tmp_path: Path) -> Path:
    told = replay(capsys, tmp_path, scored(), "--modes", "sample_mean", "--layouts", "dp1")
    assert told.code == 0, told.err
    return told.output


def test_a_glob_that_the_shell_has_expanded_and_a_dump_as_an_argument_are_read(capsys, tmp_path: Path) -> None:
    dumps = [DATA / "1.pt", DATA / "2.pt"]
    for number, given in enumerate((["--rollouts", *dumps], dumps[:1])):
        told = aggcli(
            capsys, "compare", *given, "--layouts", "dp1", "--modes", "token_mean", "--json", "-o", tmp_path / str(number)
        )
        assert len(told.steps) == 2 - number


def test_a_folder_whose_subfolders_hold_the_dumps_names_them(capsys, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "dumps" / name).mkdir(parents=True)
        shutil.copy(DATA / "1.pt", tmp_path / "dumps" / name)
    line = refused(aggcli(capsys, "compare", tmp_path / "dumps"))
    assert f"but {tmp_path}/dumps/a, {tmp_path}/dumps/b do: give {tmp_path}/dumps/a" in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("old_logprobs", [-1.0, -1.0], "did you mean 'old_log_probs'? rename the key, or drop it"),
        ("logprobs", [-1.0, -1.0], "did you mean 'log_probs'? rename the key, or drop it"),
        ("rewrad", 1, "did you mean 'reward'? rename the key, or drop it"),
        ("prompt_id", 3, "keys that are not read: prompt_id (nearest: group_index)"),
        ("completion_ids", [5, 6], "keys that are not read: completion_ids (nearest: tokens)"),
        ("step", 4, "keys that are not read: step; each file is one step"),
    ],
)
def test_a_key_that_nobody_reads_is_named_with_the_nearest_that_is_read(capsys, tmp_path: Path, key, value, said: str) -> None:
    told = replay(capsys, tmp_path, [{"response_length": 2, key: value}])
    line = refused(told) if told.code else told.err
    assert key in line
    assert said in line


def test_a_run_that_collapses_says_so_first(capsys, tmp_path: Path) -> None:
    small = ("--steps=3", "--rollout-batch-size=4", "--n-samples-per-prompt=4", "--device=cpu", "--layouts=dp1")
    told = aggcli(capsys, "run", "--lr", "1e3", *small, "--output", tmp_path / "out")
    assert told.code == 0, told.err
    words = " ".join(told.out.split())
    assert words.startswith(
        "sample_mean, seed 0, collapsed: after 3 steps, accuracy 0 (0.459 before) and every response at the limit"
    )
    assert words.count("accuracy 0 ") == 1, "it is said once"


def test_a_tokenizer_for_a_dump_that_holds_tokens_is_said_to_be_of_no_use(capsys, tmp_path: Path) -> None:
    told = replay(capsys, tmp_path, scored(), "--tokenizer", "gpt2", "--layouts", "dp1")
    assert told.code == 0
    assert "note: --tokenizer is not used: aggcli files hold lengths of their own" in told.err


@pytest.mark.parametrize("command", ["compare", "run", "audit"])
def test_micro_batches_may_be_named_without_a_rule_in_every_command(capsys, tmp_path: Path, command: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", scored())
    where = () if command == "audit" else ("--output", tmp_path / "out")
    told = aggcli(capsys, command, path, "--layouts", "dp1,dp2:mb2", *where)
    assert told.code == 0, told.err
    assert "dp2:mb2" in told.out


def test_rollouts_whose_lengths_differ_in_unit_are_refused_with_what_to_do(capsys, tmp_path: Path) -> None:
    folder = tmp_path / "verl"
    folder.mkdir()
    write_jsonl(folder / "1.jsonl", [{"input": "p", "output": "abcd", "score": 1.0, "step": 1}])
    path = write_jsonl(tmp_path / "a.jsonl", scored())
    line = refused(aggcli(capsys, "compare", "--rollouts", folder, "--rollouts", path))
    assert "in tokens" in line
    assert "in characters" in line
    assert line.endswith("read them one by one, or count both with --tokenizer")


def test_rewards_far_from_the_threshold_are_named(capsys, tmp_path: Path) -> None:
    told = replay(capsys, tmp_path, scored(100.0), "--layouts", "dp1")
    assert "rewards run from 0 to 100 (mean 50), off the scale of --correct-threshold 1: 2 of 4 count as correct" in told.err


def test_of_runs_that_differ_in_more_than_the_mode_the_warning_stands_first(capsys, tmp_path: Path, results: Path) -> None:
    other = replay(capsys, tmp_path, scored(2.0), "--modes", "token_mean", "--layouts", "dp1").output
    told = aggcli(capsys, "compare", results, other)
    assert " ".join(told.out.split()).startswith(
        "Warning: more than the mode differs, so a difference may come from it: rollouts: "
    )


def test_directories_are_listed_in_natural_order(capsys, tmp_path: Path, results: Path) -> None:
    for name in ("compare-10", "compare-2"):
        shutil.copytree(results, tmp_path / "all" / name)
    found = strict_json(aggcli(capsys, "runs", "list", tmp_path / "all", "--json").out)["runs"]
    assert [Path(run.get("name") or run["directory"]).name for run in found] == ["compare-2", "compare-10"]


def test_a_framework_of_which_no_rule_is_written_down_is_answered_with_those_that_are(capsys) -> None:
    line = refused(aggcli(capsys, "modes", "--map", "acme-rl:prompt_mean"))
    assert "no rule of acme-rl is known here; known frameworks: slime, miles, verl" in line


def test_an_empty_step_between_two_full_ones_is_left_out_of_the_means_and_said(capsys, tmp_path: Path) -> None:
    masked = [{**one, "loss_mask": [0] * one["response_length"]} for one in scored()]
    files = [write_jsonl(tmp_path / f"{at}.jsonl", lines) for at, lines in enumerate((scored(), masked, scored()))]
    told = aggcli(
        capsys, "compare", *files, "--modes", "sample_mean,token_mean", "--layouts", "dp1,dp2", "-o", tmp_path / "out"
    )
    assert told.code == 0, told.err
    assert "(mean of the 2 of 3 steps with a gradient)" in " ".join(told.out.split())
    assert "note: step 1 (1.jsonl): no trained token at all: the step is empty and takes no optimizer step" in told.err


@pytest.mark.parametrize("command", [("compare", "--rollouts"), ("inspect",)])
def test_a_results_directory_given_as_rollouts_is_called_what_it_is(capsys, results: Path, command: tuple[str, ...]) -> None:
    line = refused(aggcli(capsys, *command, results))
    assert f"{results}: is what aggcli recorded (a results directory), not rollouts; look at it with `aggcli compare" in line


def test_the_value_of_a_recipe_is_completed(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash asks by environment variables, and reads a candidate a line."""
    for name, value in (("_AGGCLI_COMPLETE", "complete_bash"), ("COMP_WORDS", "aggcli run --recipe da"), ("COMP_CWORD", "3")):
        monkeypatch.setenv(name, value)
    told = aggcli(capsys)
    assert told.out.split() == ["dapo"]
    assert json.dumps(told.err) == '""'
