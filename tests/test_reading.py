"""Rewards, NaN and odd dumps, read; strict records, written."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from tests.cli import aggcli, compared, exactly, records, refused, replay, strict_json, write_jsonl
from tests.fixtures import FX_B, MODES, Sample, fx_b, fx_c, sample
from tests.speed import few


def lines_of(*rewards: str) -> str:
    """One sample a line, all of one group; the rewards are written as they are."""
    return "".join(f'{{"response_length": 2, "group_index": 0, "reward": {reward}}}\n' for reward in rewards)


# -- rewards of any kind ----------------------------------------------------------------------------------------------


def test_numeric_text_and_booleans_are_numbers_with_a_note_and_null_is_no_0(tmp_path, capsys) -> None:
    """ "1.0", 1, true, null and "0": mean 3/4 over the four scored, never 3/5."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(lines_of('"1.0"', "1", "true", "null", '"0"'))
    told = compared(capsys, tmp_path, path, "--layouts", "dp1,dp2,dp5")
    values = told.modes["sample_mean"]
    assert (values["raw_reward"], values["unscored_samples"], values["correct/count"]) == (0.75, 1, 3)
    for note in (
        "2 rewards were given as text and read as numbers",
        "1 reward was given as true/false and read as 1/0",
        "1 sample is unscored (reward null or NaN)",
    ):
        assert f"note: {note}\n" in told.err


@pytest.mark.parametrize("text", ['"True"', '"good"', '""', '"1_0"'])
def test_a_text_that_is_no_number_is_refused_by_line_and_field(tmp_path, capsys, text) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(lines_of('"1.0"', "1", "true", text, "null"))
    line = refused(replay(capsys, tmp_path, path))
    assert f"sample 3 (line 4): reward is the text {text.replace(chr(34), chr(39))}: must be a number or null" in line


def test_records_hold_numbers_as_numbers(tmp_path, capsys) -> None:
    told = replay(capsys, tmp_path, fx_b(), command="run")
    texts = {"source", "mode", "layout", "evaluated", "advantages"}
    for name in ("metrics.jsonl", "layouts.jsonl"):
        for line in records(told.output / name):
            for key, value in [*line.pop("sizes", {}).items(), *line.items()]:
                if key not in texts | {"skipped", "notes", "ranks"}:
                    assert value is None or isinstance(value, (int, float)), (key, value)
    (line,) = records(told.output / "metrics.jsonl")
    assert [type(line[key]) for key in ("step", "tokens", "samples", "rollouts", "zero_variance_groups")] == [int] * 5


# -- strict JSON ------------------------------------------------------------------------------------------------------


def all_masked() -> list[Sample]:
    return [s | {"loss_mask": [0] * s["response_length"]} for s in fx_b()]


def no_reward_known() -> list[Sample]:
    return [s | {"reward": math.nan} for s in fx_b()]


@pytest.mark.parametrize("make", few([all_masked, fx_c, no_reward_known]))
@pytest.mark.parametrize("command", few(["compare", "run"]))
def test_every_record_is_strict_json(tmp_path, capsys, make, command) -> None:
    told = replay(capsys, tmp_path, make(), "--json", "--layouts", "dp1,dp8", "--log-correct-samples", command=command)
    assert told.code == 0, told.err
    assert told.steps
    written = [*told.output.rglob("*.json"), *told.output.rglob("*.jsonl")]
    assert len(written) == (3 if command == "run" else 13)
    for path in written:
        for text in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            strict_json(text)
            assert "NaN" not in text.replace("null or NaN", "")
            assert "Infinity" not in text


def test_bare_nan_and_infinity_are_read(tmp_path, capsys) -> None:
    """NaN as a reward is unscored; under the mask anything goes."""
    made = fx_b()
    made.append(
        sample(2, group_index=1, reward=math.nan, advantage=0.0, loss_mask=[0, 0])
        | {name: [math.nan, math.inf] for name in ("log_probs", "old_log_probs", "ref_log_probs")}
    )
    path = write_jsonl(tmp_path / "rollouts.jsonl", made)
    assert "NaN" in path.read_text()
    assert "Infinity" in path.read_text()
    told = compared(capsys, tmp_path, path)
    assert told.modes["token_mean"]["pg_loss"] == exactly(FX_B["token_mean"])
    assert told.modes["token_mean"]["unscored_samples"] == 1


@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "ref_log_probs", "advantage"])
@pytest.mark.parametrize("value", few([math.nan, math.inf, None]))
def test_nan_where_the_mask_is_1_is_refused_by_step_sample_and_token(tmp_path, capsys, name, value) -> None:
    made = fx_b()
    made[2][name] = [0.5, 0.5, value, 0.5]
    line = refused(replay(capsys, tmp_path, made))
    shown = "null" if value is None else "inf" if value == math.inf else "nan"
    field = "advantages" if name == "advantage" else name
    assert f"step 0 (rollouts-1.jsonl), sample 2, token 2: {field} is {shown} where loss_mask is 1" in line


# -- rewards in dumps -------------------------------------------------------------------------------------------------


def dump(path, samples: list[dict[str, Any]]):
    torch.save({"rollout_id": 0, "samples": samples}, path)
    return path


@pytest.mark.parametrize(
    ("value", "mean"),
    [(None, None), (1, 1.0), (torch.tensor(0.5), 0.5), ("0.5", 0.5), (True, 1.0), (torch.tensor([0.25])[0], 0.25)],
    ids=["null", "int", "tensor", "text", "bool", "scalar tensor"],
)
def test_a_reward_of_any_type_that_means_a_number_is_that_number(tmp_path, capsys, value, mean) -> None:
    samples = [{"response_length": 2, "tokens": [1, 2, 3], "group_index": 0, "reward": r} for r in (value, 1.0)]
    values = compared(capsys, tmp_path, dump(tmp_path / "0.pt", samples)).modes["sample_mean"]
    assert values["raw_reward"] == (1.0 if mean is None else (mean + 1) / 2)
    assert values["unscored_samples"] == (1 if mean is None else 0)


@pytest.mark.parametrize("command", ["run", "compare", "inspect"])
def test_an_object_needs_a_key_and_without_one_is_refused_by_its_keys(tmp_path, capsys, command) -> None:
    path = write_jsonl(
        tmp_path / "rollouts.jsonl", (sample(2, group_index=0, reward={"score": score, "fmt": 0.2}) for score in (1.0, 0.0))
    )
    arguments = ("inspect", path) if command == "inspect" else (command, "--rollouts", path, "--output", tmp_path / "out")
    assert "reward is an object with the keys fmt, score: choose one with --reward-key" in refused(aggcli(capsys, *arguments))
    assert "reward has no key 'acc', only fmt, score: change --reward-key" in refused(
        aggcli(capsys, *arguments, "--reward-key", "acc")
    )
    told = aggcli(capsys, *arguments, "--reward-key", "score", "--json")
    assert told.code == 0, told.err
    step = told.step if command == "inspect" else next(iter(told.modes.values()))
    assert step["raw_reward"] == 0.5


# -- masks, groups and odd fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [([1, 1, 0, 1], 3), (None, 4), ([0, 0, 0, 1, 1, 0, 1], 3), ([1, 1, 1, 1, 1, 0, 1], 3)],
    ids=["response", "none", "prompt and response", "a prompt that is not 0"],
)
def test_a_mask_over_the_response_or_the_sequence_or_none_is_read(tmp_path, capsys, mask, tokens) -> None:
    """4 response tokens after 3 of the prompt."""
    told = compared(capsys, tmp_path, [sample(4, group_index=0, advantage=1, loss_mask=mask)])
    assert told.modes["token_mean"]["tokens"] == tokens
    sliced = mask is not None and len(mask) == 7
    assert ("1 loss_mask covers prompt and response: the last response_length entries were taken" in told.err) == sliced


@pytest.mark.parametrize("entries", [0, 3, 5, 8])
def test_a_mask_of_another_length_is_refused_by_sample(tmp_path, capsys, entries) -> None:
    made = [sample(4, group_index=0, advantage=1), sample(4, group_index=0, advantage=1, loss_mask=[1] * entries)]
    line = refused(replay(capsys, tmp_path, made))
    assert f"sample 1 (line 2): loss_mask has {entries} entries but response_length is 4 (total_length 7)" in line


def test_without_group_index_prompt_mean_is_refused_by_sample_and_the_other_modes_run(tmp_path, capsys) -> None:
    path = write_jsonl(tmp_path / "rollouts.jsonl", ({k: v for k, v in s.items() if k != "group_index"} for s in fx_b()))
    for flags in (("--loss-aggregation", "prompt_mean"), ("--modes", "token_mean,prompt_mean")):
        told = replay(capsys, tmp_path, path, *flags, command="run" if flags[0] == "--loss-aggregation" else "compare")
        assert "sample 0: group_index is missing and prompt_mean needs one for every sample" in refused(told)
        assert "--group-size" in refused(told)
    told = compared(capsys, tmp_path, path)
    assert list(told.modes) == [mode for mode in MODES if mode != "prompt_mean"]
    assert told.modes["token_mean"]["pg_loss"] == exactly(FX_B["token_mean"])
    assert "note: prompt_mean is left out: sample 0: group_index is missing" in told.err
    told = compared(capsys, tmp_path, path, "--group-size", 2)
    assert {mode: told.modes[mode]["pg_loss"] for mode in MODES} == {mode: exactly(FX_B[mode]) for mode in MODES}
    assert "cannot be cut into groups of 3" in refused(replay(capsys, tmp_path, path, "--group-size", 3))


def test_one_null_group_index_among_others_is_named(tmp_path, capsys) -> None:
    made = fx_b()
    made[2]["group_index"] = None
    told = replay(capsys, tmp_path, made, "--loss-aggregation", "prompt_mean", command="run")
    assert "sample 2: group_index is missing" in refused(told)
    others = compared(capsys, tmp_path, made).modes
    assert {mode: others[mode]["pg_loss"] for mode in others} == {
        mode: exactly(FX_B[mode]) for mode in MODES if mode != "prompt_mean"
    }


@pytest.mark.parametrize("status", few(["truncated", "completed", "aborted", "failed", None]))
def test_bytes_in_a_response_and_any_status_are_read_from_a_dump(tmp_path, capsys, status) -> None:
    samples = [
        {"response_length": 2, "tokens": [1, 2, 3], "group_index": 0, "reward": r, "response": b"\xff\x00", "status": status}
        for r in (1.0, 0.0)
    ]
    path = dump(tmp_path / "0.pt", samples)
    assert compared(capsys, tmp_path, path).modes["sample_mean"]["raw_reward"] == 0.5
    (step,) = strict_json(aggcli(capsys, "inspect", path, "--json").out)["steps"]
    assert step["status"] == ({} if status is None else {status: 2})


def test_a_dump_without_samples_is_refused(tmp_path, capsys) -> None:
    assert "holds no samples" in refused(replay(capsys, tmp_path, dump(tmp_path / "0.pt", [])))


def test_accuracy_alone_needs_neither_tokens_nor_log_probabilities(tmp_path, capsys) -> None:
    """Only rewards and lengths: accuracy, pass@k and lengths are there; what is missing is named."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"response_length": n, "group_index": 0, "reward": n % 2}) + "\n" for n in (1, 2, 3, 4)))
    told = compared(capsys, tmp_path, path)
    values = told.modes["sample_mean"]
    assert (values["raw_reward"], values["pass@1"], values["correct/response_length"]) == (0.5, 0.5, 2.0)
    assert told.step["skipped"]["ppo_kl"] == "needs log_probs and old_log_probs (or rollout_log_probs)"
