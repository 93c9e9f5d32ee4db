"""What a reader had to assume, or could not use, is said in one line; where the number would be wrong, it refuses."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts import parquet, skyrl, trl
from aggcli.rollouts.sources import open_source
from tests.cli import aggcli, exactly, refused, write_jsonl
from tests.fixtures import sample

ON_POLICY = {"log_probs": [-1.0, -1.0], "old_log_probs": [-1.0, -1.0]}


def rows(*rewards: Any, **fields: Any) -> list[dict[str, Any]]:
    return [sample(2, group_index=i // 2, reward=reward, **fields) for i, reward in enumerate(rewards)]


def verl_rows(prompts: str, scores: list[Any], texts: list[str] | None = None, **columns: list[Any]) -> list[dict[str, Any]]:
    texts = texts or ["ab"] * len(scores)
    made = []
    for i, (prompt, score, text) in enumerate(zip(prompts, scores, texts, strict=True)):
        row = {"input": prompt, "output": text, "gts": "1", "score": score, "step": 1}
        row |= {name: values[i] for name, values in columns.items()}
        made.append({name: value for name, value in row.items() if value is not ...})
    return made


def compared(capsys: Any, tmp_path: Path, *arguments: object) -> Any:
    """The steps and the standard error of `compare --rollouts ...`, token_mean alone unless modes are given."""
    given = [str(argument) for argument in arguments]
    modes = [] if "--modes" in given else ["--modes", "token_mean"]
    result = aggcli(capsys, "compare", "--rollouts", *given, *modes, "--json", "--output", tmp_path / "o", "--overwrite")
    return result.steps, result.err


# -- several steps in one file ------------------------------------------------------------------------------------------


def completions(folder: Path, steps: list[Any], lengths: list[int], advantages: list[float]) -> Path:
    table = {
        "step": steps,
        "prompt": ["p"] * len(steps),
        "completion": ["x" * length for length in lengths],
        "reward": [1.0, 0.0] * (len(steps) // 2),
        "advantage": advantages,
    }
    pq.write_table(pa.table(table), folder / "completions.parquet")
    return folder / "completions.parquet"


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 0, 1], [2, 0, 3, 1]])
def test_completions_of_two_steps_are_two_steps_in_their_own_order(tmp_path: Path, capsys: Any, order: list[int]) -> None:
    """0.7071 * (4 - 2)/6 = 0.2357; 0.7071 * (8 - 6)/14 = 0.1010143; one step of one group of 4 would give 0.1414."""
    steps, lengths, advantages = ["10", "10", "11", "11"], [2, 4, 6, 8], [0.7071, -0.7071] * 2
    picked = [[values[i] for i in order] for values in (steps, lengths, advantages)]
    path = completions(tmp_path, *picked)  # pyright: ignore[reportArgumentType]
    told, _ = compared(capsys, tmp_path, path)
    values = [step["modes"]["token_mean"] for step in told]
    assert [value["pg_loss"] for value in values] == [exactly(0.7071 / 3), exactly(0.7071 / 7)]
    assert [step["source"] for step in told] == [
        "step 0 (completions.parquet, step 10)",
        "step 1 (completions.parquet, step 11)",
    ]
    assert all(value.get("pass@4") is None and value["groups"] == 1 for value in values)


@pytest.mark.parametrize(("rows_of_group", "read"), [(2, [2, 4, 6]), (1, [2, 4, 6]), (3, [4, 6, 6])])
def test_row_groups_of_one_step_each_are_read_in_the_order_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_of_group: int, read: list[int]
) -> None:
    """Steps 12, 10, 11 in the file, two rows each: two rows are read before the first step is there, where no row group holds
    rows of two steps; else four, in the file's order. Either way the first row of step 10 is the one of 2 characters."""
    path = completions(tmp_path, [12, 12, 10, 10, 11, 11], [6, 7, 2, 3, 4, 5], [0.5, -0.5] * 3)
    pq.write_table(pq.read_table(path), path, row_group_size=rows_of_group)
    taken = 0

    def counted(path: Path, wanted: Collection[str], *row_groups: Any) -> Iterator[dict[str, Any]]:
        nonlocal taken
        for row in parquet.parquet_rows(path, wanted, *row_groups):
            taken += len(wanted) > 1
            yield row

    monkeypatch.setattr(trl, "parquet_rows", counted)
    found = [(taken, batch.name, batch.response_length_S.tolist()) for batch in open_source(SourceConfig((str(path),)), 0)]
    names = [f"step {at} (completions.parquet, step {step})" for at, step in enumerate((10, 11, 12))]
    assert found == list(zip(read, names, ([2, 3], [4, 5], [6, 7]), strict=True))


def test_a_row_group_of_two_steps_leaves_every_step_its_rows_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Groups of steps 11 11, 10 11, 10 10: step 11 has the rows of 6, 7 and 8 characters in that order."""
    path = completions(tmp_path, [11, 11, 10, 11, 10, 10], [6, 7, 2, 8, 3, 4], [0.5, -0.5] * 3)
    pq.write_table(pq.read_table(path), path, row_group_size=2)
    assert [batch.response_length_S.tolist() for batch in open_source(SourceConfig((str(path),)), 0)] == [[2, 3, 4], [6, 7, 8]]


def test_verl_rows_of_several_steps_are_several_steps_and_9_comes_before_10(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", verl_rows("aabb", [1, 0, 1, 1], step=[10, 10, 9, 9]))
    told, _ = compared(capsys, tmp_path, path)
    assert [step["modes"]["token_mean"]["raw_reward"] for step in told] == [1.0, 0.5]
    half = write_jsonl(tmp_path / "b.jsonl", verl_rows("aabb", [1, 0, 1, 1], step=[10, 9, None, 9]))
    assert "step is null on 1 of 4 rows" in refused(aggcli(capsys, "inspect", half))


# -- groups -------------------------------------------------------------------------------------------------------------


def twice(order: list[int]) -> list[dict[str, Any]]:
    """Two groups of the same prompt, all wrong and all right, of lengths 2 to 9, in this order of rows."""
    made = verl_rows("p" * 8, [0] * 4 + [1] * 4, ["x" * n for n in range(2, 10)])
    return [made[i] for i in order]


def test_groups_of_equal_prompt_are_said_to_be_assumed_in_inspect_and_in_notes(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", twice(list(range(8))))
    shown = aggcli(capsys, "inspect", path)
    assert "assumed, rows of equal prompt" in " ".join(shown.out.split())
    assert "independent groups of one prompt are merged (--group-size N takes them apart)" in shown.err
    (step,), err = compared(capsys, tmp_path, path)
    assert step["modes"]["token_mean"]["groups"] == 1
    assert "groups are assumed, rows of equal prompt (1 group)" in err
    table = aggcli(capsys, "compare", "--rollouts", path, "--modes", "token_mean", "--output", tmp_path / "table").out
    assert "std with n-1; groups: assumed, rows of equal prompt" in " ".join(table.split())
    (step,), err = compared(capsys, tmp_path, path, "--group-size", 4, "--modes", "sample_mean,prompt_mean,token_mean")
    assert {values["zero_variance_groups"] for values in step["modes"].values()} == {2}
    assert {values["pg_loss"] for values in step["modes"].values()} == {0}
    assert "nothing in the file confirms which rows belong together" in err


def test_alternating_rows_of_two_groups_are_never_two_groups_without_a_signal(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", twice([0, 4, 1, 5, 2, 6, 3, 7]))
    (step,), err = compared(capsys, tmp_path, path, "--group-size", 4)
    assert step["modes"]["token_mean"]["zero_variance_groups"] == 0
    assert "assumed" in err
    assert "nothing in the file confirms which rows belong together" in err


@pytest.mark.parametrize("uids", [["x", "x", ..., ...], [0, 0, None, None]])
def test_uids_on_some_rows_only_are_refused_by_row(tmp_path: Path, capsys: Any, uids: list[Any]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", verl_rows("aabb", [1, 0, 1, 0], uid=uids))
    assert "uid is missing on samples 2, 3 but given on others" in refused(aggcli(capsys, "inspect", path))


def test_a_sample_without_a_group_takes_that_of_its_sibling(tmp_path: Path, capsys: Any) -> None:
    """Rollouts 0 (two samples, reward 1) and 1 (reward 0): advantages +-0.5, and 2 of 3 samples push up: -0.5*(4-2)/6."""
    made = [sample(2, rollout_id=r, reward=1 - r, group_index=g) for r, g in ((0, 0), (0, None), (1, 0))]
    path = write_jsonl(tmp_path / "a.jsonl", made)
    (step,), err = compared(capsys, tmp_path, path, "--advantages", "mean_only")
    assert step["modes"]["token_mean"]["pg_loss"] == exactly(-1 / 6)
    assert "1 sample without group_index takes that of a sibling, which shares the rollout_id" in err
    assert "advantage 0" not in err


def test_a_group_that_straddles_steps_for_its_order_is_told_to_be_sorted(tmp_path: Path, capsys: Any) -> None:
    made = [sample(2, group_index=g, reward=i % 2) for i, g in enumerate((0, 1, 0, 1))]
    path = write_jsonl(tmp_path / "a.jsonl", made)
    line = refused(aggcli(capsys, "compare", "--rollouts", path, "--global-batch-size", 2, "--modes", "prompt_mean"))
    assert "prompt group 0 straddles optimizer steps 0 and 1" in line
    assert "the samples of a group do not stand together: sort the file by group_index" in line
    path = write_jsonl(tmp_path / "b.jsonl", [made[0], made[2], made[1], made[3]])
    line = refused(aggcli(capsys, "compare", "--rollouts", path, "--global-batch-size", 3, "--modes", "prompt_mean"))
    assert "change --global-batch-size to a multiple of the group size" in line


# -- columns that contradict or lack something ----------------------------------------------------------------------------


def test_an_acc_that_contradicts_its_score_is_named_by_rows(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", verl_rows("aabb", [1, 0, 1, 0], acc=[False, True, True, False]))
    assert "acc contradicts score on 2 of 4 rows (0, 1)" in aggcli(capsys, "inspect", path).err
    for scores, acc in (
        ([1, 0, 1, 0], [True, False, True, False]),
        ([1, -1, 1, -1], [1, 0, 1, 0]),
        ([0.5, 0.0, 1.0, 0.1], [True, True, True, False]),  # shaped: a right answer may have lost all of its score
    ):
        path = write_jsonl(tmp_path / "a.jsonl", verl_rows("aabb", scores, acc=acc))
        assert "contradicts" not in aggcli(capsys, "inspect", path).err


def test_a_field_missing_in_the_first_row_is_named_as_what_it_is(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", verl_rows("aabb", [..., 0, 1, 0], acc=[..., 0, 1, 1]))
    shown = aggcli(capsys, "inspect", path)
    assert "score is missing on 1 sample (0): unscored" in shown.err
    shown = aggcli(capsys, "inspect", path, "--reward-weights", "acc=2", "--json")
    assert shown.steps[0]["raw_reward"] == 4 / 3
    assert "acc is missing on 1 sample (0): unscored" in shown.err


def test_a_null_in_one_of_several_reward_columns_is_counted_with_its_rule(tmp_path: Path, capsys: Any) -> None:
    table = {"step": [1] * 3, "prompt": ["p"] * 3, "completion": ["a"] * 3, "x": [1.0, None, None], "y": [0.5, 0.25, 0.0]}
    pq.write_table(pa.table({**table, "advantage": [0.0] * 3}), tmp_path / "c.parquet")
    shown = aggcli(capsys, "inspect", tmp_path / "c.parquet", "--json")
    assert shown.steps[0]["raw_reward"] == exactly((1.5 + 0.25 + 0.0) / 3)
    assert "x is null on 2 samples (1, 2): 0 in the sum, as TRL adds them" in shown.err


# -- tokens, keys, scale --------------------------------------------------------------------------------------------------


def test_a_sampler_log_prob_of_exactly_0_on_a_trained_token_is_said(tmp_path: Path, capsys: Any) -> None:
    """|-1 - 0| on one token of 8: a mismatch of 0.125."""
    drawn = [[-1.0, -1.0, -1.0, 0.0], [-1.0] * 4]
    made = [sample(4, group_index=0, reward=i, log_probs=[-1.0] * 4, rollout_log_probs=d) for i, d in enumerate(drawn)]
    (step,), err = compared(capsys, tmp_path, write_jsonl(tmp_path / "a.jsonl", made))
    assert "1 trained token has a sampler log-prob of exactly 0 (the first: sample 0, token 3)" in err
    assert step["modes"]["token_mean"]["sampler_mismatch"] == exactly(0.125)
    masked = [made[0] | {"loss_mask": [1, 1, 1, 0]}, made[1]]
    greedy = [row | {"rollout_log_probs": [0.0] * 4} for row in made]
    for quiet in (masked, greedy, [made[1], made[1]]):
        path = write_jsonl(tmp_path / "a.jsonl", quiet)
        assert "exactly 0" not in aggcli(capsys, "inspect", path).err


def test_log_probs_above_0_on_trained_tokens_are_said(tmp_path: Path, capsys: Any) -> None:
    """Three tokens above 0, of which one is masked and one is 0 but for rounding in bfloat16."""
    drawn = {
        "log_probs": [5.0, 0.004, -1.0],
        "old_log_probs": [-1.0] * 3,
        "loss_mask": [1, 1, 0],
        "ref_log_probs": [-1.0, -1.0, 2.0],
    }
    path = write_jsonl(tmp_path / "a.jsonl", [sample(3, group_index=0, reward=i, **drawn) for i in range(2)])
    _, err = compared(capsys, tmp_path, path)
    assert "note: log_probs above 0 at 2 trained tokens, up to 5: no probability is above 1" in err
    assert err.count("above 0 at") == 1


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("old_logprobs", "old_log_probs"),
        ("logprobs", "log_probs"),
        ("rewrad", "reward"),
        ("rewards", "reward"),
        ("Loss_Mask", "loss_mask"),
        ("response_mask", "loss_mask"),
        ("advantages", "advantage"),
        ("rollout_logprobs", "rollout_log_probs"),
    ],
)
def test_a_misspelt_key_of_a_field_that_changes_numbers_is_refused(tmp_path: Path, capsys: Any, key: str, field: str) -> None:
    made = [{name: value for name, value in row.items() if name != field} | {key: [1, 1]} for row in rows(1, 0)]
    for path in (write_jsonl(tmp_path / "a.jsonl", made), as_parquet(tmp_path / "a.parquet", made)):
        line = refused(aggcli(capsys, "inspect", path))
        assert f"key '{key}' is not read, and {field} is missing; did you mean '{field}'?" in line


def as_parquet(path: Path, made: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(made), path)
    return path


def test_other_keys_that_nobody_reads_are_named_once_with_the_nearest(tmp_path: Path, capsys: Any) -> None:
    extra = {"prompt_id": 3, "step": 7, "completion_ids": [1, 2], "old_logprobs": [-1, -1], "colour": "red", "uid": None}
    made = [row | extra | ON_POLICY | {"response": "x", "index": 1} for row in rows(1, 0)]
    for path in (write_jsonl(tmp_path / "a.jsonl", made), as_parquet(tmp_path / "a.parquet", made)):
        shown = aggcli(capsys, "inspect", path)
        assert shown.code == 0, shown.err
        (line,) = [line for line in shown.err.splitlines() if "not read" in line]
        for said in ("prompt_id (nearest: group_index)", "completion_ids (nearest: tokens)", "colour", "each file is one step"):
            assert said in line
        assert "old_logprobs (nearest: old_log_probs)" in line
        assert all(word not in line for word in ("uid", "response", "index,"))


def test_a_reward_scale_far_from_the_threshold_is_said(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(3.0, 12.5, 0.5, 20.0))
    said = "rewards run from 0.5 to 20 (mean 9), off the scale of --correct-threshold 1: 3 of 4 count as correct"
    assert said in aggcli(capsys, "inspect", path).err
    path = write_jsonl(tmp_path / "a.jsonl", rows(0.1, 0.3, 0.2, 0.3))
    assert "off the scale of --correct-threshold 1: 0 of 4 count as correct" in aggcli(capsys, "inspect", path).err
    for quiet in ((1, 0, 1, 0), (0, 0, 0, 0), (-1, 1, 1, -1), (1.2, 0.2, 0, 1)):
        assert "off the scale" not in aggcli(capsys, "inspect", write_jsonl(tmp_path / "a.jsonl", rows(*quiet))).err


def test_truncated_samples_are_counted_and_travel_with_the_batch(tmp_path: Path, capsys: Any) -> None:
    statuses = ["truncated"] * 3 + ["completed"] * 5
    made = [sample(8 - 2 * i % 6, group_index=0, reward=i % 2, status=status) for i, status in enumerate(statuses)]
    shown = aggcli(capsys, "inspect", write_jsonl(tmp_path / "a.jsonl", made), "--json")
    assert shown.steps[0]["truncated_samples"] == 3
    shown = aggcli(capsys, "inspect", write_jsonl(tmp_path / "a.jsonl", rows(1, 0)), "--json")
    assert shown.steps[0]["truncated_samples"] is None


# -- prompt groups ----------------------------------------------------------------------------------------------------------


def test_inspect_groups_shows_each_group_and_which_carry_no_signal(tmp_path: Path, capsys: Any) -> None:
    made = [
        sample(n, group_index=g, reward=r, tokens=[7, 7, 7, *([t] * n)])
        for n, g, r, t in ((2, "a", 1, 1), (4, "a", 0, 2), (3, "b", 0, 3), (3, "b", 0, 3), (1, "c", 1, 4), (5, "c", 1, 5))
    ]
    path = write_jsonl(tmp_path / "a.jsonl", made)
    (step,) = aggcli(capsys, "inspect", path, "--groups", "--json").steps
    groups = step["prompt_groups"]
    assert [group["group"] for group in groups] == ["a", "b", "c"]
    assert [group["state"] for group in groups] == [None, "starved", "saturated"]
    assert [group["duplicates"] for group in groups] == [0, 1, 0]
    assert [group["raw_reward"] for group in groups] == [0.5, 0.0, 1.0]
    assert [group["response_length"] for group in groups] == [3.0, 3.0, 3.0]
    assert (groups[2]["response_length_min"], groups[2]["response_length_max"]) == (1, 5)
    # Rewards 1 and 0: +-0.5 / (0.70711 + 1e-6), so 1.41421 apart.
    assert groups[0]["advantage_spread"] == exactly(1 / (0.5**0.5 + 1e-6))
    assert [group["advantage_spread"] for group in groups[1:]] == [0.0, 0.0]
    shown = aggcli(capsys, "inspect", path, "--groups").out
    assert "3 groups, lengths in tokens, 2 with an advantage spread of 0" in shown
    assert "prompt_groups" not in aggcli(capsys, "inspect", path, "--json").steps[0]


# -- files as people give them ----------------------------------------------------------------------------------------------


def test_a_folder_whose_subfolders_hold_rollouts_names_them(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run/first").mkdir(parents=True)
    write_jsonl(tmp_path / "run/first/0.jsonl", rows(1, 0))
    line = refused(aggcli(capsys, "inspect", tmp_path / "run"))
    assert f"the folder holds no rollout files (.pt, .jsonl, .parquet, .pkl), but {tmp_path}/run/first does" in line
    for at in range(2, 8):
        (tmp_path / f"run/{at}").mkdir()
        write_jsonl(tmp_path / f"run/{at}/0.jsonl", rows(1, 0))
    line = refused(aggcli(capsys, "inspect", tmp_path / "run"))
    assert all(f"{tmp_path}/run/{at}" in line for at in range(2, 8))
    assert line.endswith(f"do: give {tmp_path}/run/2, or several of them")


def test_inspect_opens_with_what_the_file_holds_what_can_be_computed_and_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    shown = aggcli(capsys, "inspect", "example").out
    assert " ".join(shown.split("\n\n")[0].split()) == (
        "example: format slime-train, 3 steps: 192 training samples, 1396 trained tokens; every mode can be computed"
        " (sample_mean, prompt_mean, token_mean and constant) in every step; missing: entropy_loss, correct/entropy."
    )
    assert "recorded per token" in shown
    assert re.search(r"\nreward +0\.547 +0\.625 +0\.484\n", shown), "35, 40 and 31 of 64"


def test_a_results_directory_given_as_rollouts_is_named_as_one(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(1, 0))
    for command in ("run", "compare"):
        out = tmp_path / command
        assert aggcli(capsys, command, "--rollouts", path, "--output", out).code == 0
        for place in (out, *out.glob("metrics.jsonl")):
            line = refused(aggcli(capsys, "inspect", place))
            assert "is what aggcli recorded (a results directory), not rollouts" in line
            assert f"aggcli compare {out}" in line


def test_a_tokenizer_for_a_dump_that_holds_tokens_is_said_to_be_unused(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(1, 0))
    for flag, value in (("--tokenizer", "x"), ("--length-unit", "chars")):
        shown = aggcli(capsys, "inspect", path, flag, value)
        assert shown.err.count(f"{flag} is not used: aggcli files hold lengths of their own") == 1
    assert (
        "not used"
        not in aggcli(
            capsys, "inspect", write_jsonl(tmp_path / "v.jsonl", verl_rows("aa", [1, 0])), "--length-unit", "chars"
        ).err
    )


def test_lengths_of_two_units_are_refused_side_by_side(tmp_path: Path, capsys: Any) -> None:
    tokens = write_jsonl(tmp_path / "a.jsonl", rows(1, 0))
    chars = write_jsonl(tmp_path / "b.jsonl", verl_rows("aa", [1, 0]))
    line = refused(aggcli(capsys, "inspect", tokens, chars))
    assert "step 1 (b.jsonl) counts lengths in characters, step 0 (a.jsonl) in tokens" in line


@pytest.mark.parametrize("make", ["blank", "parquet", "dump"])
def test_an_empty_step_between_two_full_ones_is_left_out_and_said(tmp_path: Path, capsys: Any, make: str) -> None:
    for name in ("0.jsonl", "2.jsonl"):
        write_jsonl(tmp_path / name, rows(1, 0))
    empty = tmp_path / {"blank": "1.jsonl", "parquet": "1.parquet", "dump": "1.pt"}[make]
    if make == "blank":
        empty.write_text("\n \n")
    elif make == "parquet":
        pq.write_table(pa.Table.from_pylist(rows(1, 0))[:0], empty)
    else:
        torch.save({"rollout_id": 1, "samples": []}, empty)
    shown = aggcli(capsys, "inspect", tmp_path, "--json")
    assert [step["source"] for step in shown.steps] == ["step 0 (0.jsonl)", "step 1 (2.jsonl)"]
    assert f"{empty.name} holds no sample: left out, and not counted as a step" in shown.err
    assert "holds no samples" in refused(aggcli(capsys, "inspect", empty)) or "is empty" in refused(
        aggcli(capsys, "inspect", empty)
    )


def test_lengths_in_characters_carry_their_unit_in_the_table(tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "v.jsonl", verl_rows("aa", [1, 0]))
    shown = " ".join(aggcli(capsys, "inspect", path, "--groups").out.split())
    for said in (
        "lengths in characters, not tokens",
        "response length (characters)",
        "trained characters",
        "1 group, lengths in characters",
    ):
        assert said in shown


# -- the last line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail",
    [
        '{"a',
        "{",
        '{"a": [1, {"b": "x\\',
        '{"a": tr',
        '{"a": -',
        '{"a": 1.5e',
        '{"a": "\\u00',
        '{"a": 1,',
        '{"a": "x" ',
        '{"a": Na',
    ],
)
def test_the_beginning_of_a_line_at_the_end_of_a_file_is_dropped(tmp_path: Path, capsys: Any, tail: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(1, 0)) + tail)
    shown = aggcli(capsys, "inspect", path, "--json")
    assert shown.steps[0]["samples"] == 2
    assert "1 half-written line dropped: the last, line 3" in shown.err
    path.write_text(path.read_text() + "\n")
    assert "line 3: is not valid JSON" in refused(aggcli(capsys, "inspect", path))


@pytest.mark.parametrize(
    "tail", ['{"response_length": 1}{"response_length": 1}', '{"a": 1}}', '{"a": 1 2', "[1, 2", "{a", '{"a": "x" "y']
)
def test_a_last_line_that_is_no_beginning_is_refused_by_number(tmp_path: Path, capsys: Any, tail: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(1, 0)) + tail)
    assert "line 3: " in refused(aggcli(capsys, "inspect", path))


def test_what_the_machine_lacks_is_not_called_damage_of_a_torch_file(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_room(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("aggcli.rollouts.torch_files.unpickled_file", without_room)
    assert refused(aggcli(capsys, "inspect", "example")).endswith("cannot be read (Too many open files)")


def test_what_the_machine_lacks_is_not_called_damage_of_a_skyrl_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "a.pkl").write_bytes(b"\x80\x04N.")
    monkeypatch.setattr(skyrl, "Unpickler", failing)
    with pytest.raises(RolloutError, match=r"a\.pkl: cannot be read \(Input/output error\)$"):
        skyrl._load(tmp_path / "a.pkl")
