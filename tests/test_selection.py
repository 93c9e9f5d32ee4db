"""Training on less than all of a batch: truncated responses masked, groups without signal left out."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet
import pytest

from aggcli.analysis.frames import read_frames
from tests.cli import aggcli, compared, exactly, records, refused, replay, write_jsonl
from tests.fixtures import MODES, sample
from tests.test_truncated import CUT, of_four

A = 0.5 / (3**-0.5 + 1e-6)
"""GRPO's advantage of the rewards 1, 0, 1, 0."""


def grouped(*rewards: tuple[int, ...], **fields: Any) -> list[dict[str, Any]]:
    """A group for each tuple of rewards; the responses are 2, 3, 4, ... tokens long."""
    flat = [(group, reward) for group, own in enumerate(rewards) for reward in own]
    return [sample(2 + at, group_index=group, reward=reward, **fields) for at, (group, reward) in enumerate(flat)]


# -- truncated responses ----------------------------------------------------------------------------------------------


def test_masked_truncated_responses_train_nothing_and_count_in_n(tmp_path, capsys) -> None:
    """Only the last of four is trained, 5 tokens of loss A: A/4 per rollout, A per token, 5A/(4*10) over the constant."""
    told = compared(capsys, tmp_path, of_four(*CUT), "--mask-truncated", "--layouts", "dp1,dp2cp2,dp4")
    for mode, loss in zip(MODES, (A / 4, A, A, A / 8), strict=True):
        values = told.modes[mode]
        assert [values["pg_loss"], *(layout["pg_loss"] for layout in values["layouts"].values())] == [exactly(loss)] * 4, mode
        assert (values["rollouts"], values["fully_masked_samples"], values["tokens"]) == (4, 3, 5)
        assert (values["truncated"], values["response_tokens"]) == (0.75, 23)
    assert "--mask-truncated: truncated responses: 3 of 4; their loss mask is 0, and they still count in N" in told.err
    plain = compared(capsys, tmp_path, of_four(*CUT))
    assert (plain.modes["token_mean"]["tokens"], "--mask-truncated" in plain.err) == (23, False)


def test_without_a_word_on_truncation_the_mask_is_refused_and_partly_known_it_says_whose_mask_stays(tmp_path, capsys) -> None:
    nothing = of_four(None, None, None, None)
    line = refused(replay(capsys, tmp_path, nothing, "--mask-truncated"))
    assert "--mask-truncated needs to know which responses are truncated (status), and nothing here says it" in line
    partly = replay(capsys, tmp_path, of_four("truncated", None, None, "completed"), "--mask-truncated")
    said = "truncated responses: 1 of 4; its loss mask is 0, and it still counts in N; samples that do not say how they ended,"
    assert said + " and keep their mask: 2" in partly.err
    none = replay(capsys, tmp_path, of_four(*["completed"] * 4), "--mask-truncated")
    assert "truncated responses: 0 of 4\n" in none.err


def test_training_masks_truncated_responses_which_still_count_in_n(tmp_path, capsys) -> None:
    """Every rollout weighs 1/N in all under sample_mean, so the total weight is the share that was not cut."""
    flags = ("--steps", 1, "--rollout-batch-size", 4, "--max-response-length", 6, "--temperature", 1.5)
    for masks in (False, True):
        told = aggcli(capsys, "run", *flags, *(["--mask-truncated"] * masks), "-o", tmp_path / str(masks))
        assert told.code == 0, told.err
        (line,) = records(tmp_path / str(masks) / "metrics.jsonl")
        cut = round(line["truncated"] * line["samples"])
        assert 0 < cut < line["samples"] == line["rollouts"]
        assert line["fully_masked_samples"] == cut * masks
        assert line["total_weight"] == pytest.approx(1 - masks * line["truncated"])
        assert (line["tokens"] == line["response_tokens"] - cut * 6 * masks) or not masks


# -- groups without signal --------------------------------------------------------------------------------------------


def test_groups_without_variance_are_left_out_before_n_and_p_are_counted(tmp_path, capsys) -> None:
    """The same numbers as of a file without the second group, of equal rewards."""
    samples = grouped((1, 0), (1, 1), (0, 1, 1))
    told = compared(capsys, tmp_path, samples, "--drop-zero-variance", "--layouts", "dp1,dp2cp2")
    without = compared(capsys, tmp_path, [s for s in samples if s["group_index"] != 1], "--layouts", "dp1,dp2cp2")
    for mode in MODES:
        values = dict(told.modes[mode])
        assert (values.pop("groups_generated"), values.pop("groups_kept")) == (3, 2)
        assert values == without.modes[mode]
        assert (values["rollouts"], values["prompts"], values["zero_variance_groups"]) == (5, 2, 0)
    assert "--drop-zero-variance: 1 of 3 prompt groups left out, since every advantage in them is 0" in told.err
    kept = compared(capsys, tmp_path, grouped((1, 0), (0, 1)), "--drop-zero-variance").modes["sample_mean"]
    assert (kept["groups_generated"], kept["groups_kept"]) == (2, 2)


def test_where_no_group_has_variance_that_is_said_and_a_flat_step_among_others_is_left_out(tmp_path, capsys) -> None:
    line = refused(replay(capsys, tmp_path, grouped((1, 1), (0, 0)), "--drop-zero-variance"))
    assert "all 2 prompt groups have advantages of 0 alone, and --drop-zero-variance leaves nothing" in line
    folder = tmp_path / "steps"
    folder.mkdir()
    for at, rewards in enumerate(((1, 1), (1, 0))):
        write_jsonl(folder / f"{at}.jsonl", grouped(rewards))
    told = compared(capsys, tmp_path, folder, "--drop-zero-variance")
    assert [step["source"] for step in told.steps] == ["step 1 (1.jsonl)"]
    assert (
        "step 0 (0.jsonl): its only prompt group has advantages of 0 alone, and --drop-zero-variance leaves nothing" in told.err
    )


def test_groups_are_dropped_by_advantages_before_truncated_responses_are_masked(tmp_path, capsys) -> None:
    """The only wrong answer of the second group was cut: the group stays, and its right answer is trained."""
    samples = grouped((1, 1), (1, 0))
    for at, status in enumerate(("completed", "completed", "completed", "truncated")):
        samples[at]["status"] = status
    values = compared(capsys, tmp_path, samples, "--drop-zero-variance", "--mask-truncated").modes["sample_mean"]
    assert (values["groups_kept"], values["rollouts"], values["tokens"], values["fully_masked_samples"]) == (1, 2, 4, 1)


@pytest.mark.parametrize("flag", ["--drop-zero-variance", "--mask-truncated"])
def test_training_on_recorded_rollouts_leaves_out_what_a_replay_does(tmp_path, capsys, flag) -> None:
    samples = grouped((1, 0), (1, 1), (0, 1), status="completed")
    samples[5]["status"] = "truncated"
    for at, s in enumerate(samples):
        s["tokens"] = [(at + t) % 5 for t in range(s["total_length"])]
    path = write_jsonl(tmp_path / "rollouts.jsonl", samples)
    small = ("--train", "--layers", 1, "--width", 8, "--heads", 1, "--loss-aggregation", "token_mean")
    trained = replay(capsys, tmp_path, path, flag, *small, command="run")
    assert trained.code == 0, trained.err
    (line,) = records(trained.output / "metrics.jsonl")
    replayed = compared(capsys, tmp_path, path, flag).modes["token_mean"]
    for name in ("rollouts", "prompts", "tokens", "fully_masked_samples", "truncated", "total_weight"):
        assert line[name] == replayed[name], name
    kept = 2 if flag == "--drop-zero-variance" else 3
    assert (line["groups_generated"], line["groups_kept"]) == (3, kept)
    assert f"{flag}: " in trained.err


def test_dropping_groups_needs_recorded_rollouts_with_groups_and_advantages(tmp_path, capsys) -> None:
    line = refused(aggcli(capsys, "run", "--drop-zero-variance", "-o", tmp_path / "o"))
    assert "--drop-zero-variance is for recorded rollouts; use --dynamic-sampling" in line
    ungrouped = [sample(2, advantage=0.5), sample(3, advantage=-0.5)]
    assert "needs group_index" in refused(replay(capsys, tmp_path, ungrouped, "--drop-zero-variance"))
    assert "needs advantages" in refused(replay(capsys, tmp_path, [sample(2, group_index=0)], "--drop-zero-variance"))


# -- from a step to its samples ---------------------------------------------------------------------------------------


def test_the_sample_file_leads_from_a_step_to_its_groups_and_samples(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, of_four(*CUT), "--mask-truncated")
    rows = pyarrow.parquet.read_table(told.output / "token_mean" / "samples" / "step-000000.parquet").to_pylist()
    assert [row["truncated"] for row in rows] == [True, True, True, False]
    assert [row["advantage"] for row in rows] == [None, None, None, exactly(-A)], "nothing else is trained"
    assert {(row["group"], row["group_rollouts"], row["group_reward"], row["group_reward_spread"]) for row in rows} == {
        ("0", 4, 0.5, 1.0)
    }
    frame = read_frames([told.output]).samples
    mine = frame[(frame["mode"] == "token_mean") & (frame["step"] == 0)]
    assert mine["advantage"].tolist()[3:] == [exactly(-A)]
    assert mine["truncated"].tolist() == [True, True, True, False]
    uneven = [
        sample(3, group_index=0, reward=1, advantage=[0.25, 0.75, 9.0], loss_mask=[1, 1, 0], rollout_id="a"),
        sample(1, group_index=0, reward=1, advantage=1.0, rollout_id="a"),
        sample(1, group_index=0, reward=None, advantage=0.0, rollout_id="b"),
        sample(1, reward=0.5, advantage=-1.0, rollout_id="c"),
    ]
    told = compared(capsys, tmp_path, uneven, "--modes", "token_mean")
    rows = pyarrow.parquet.read_table(told.output / "token_mean" / "samples" / "step-000000.parquet").to_pylist()
    assert [row["advantage"] for row in rows] == [0.5, 1.0, 0.0, -1.0]
    assert [row["group_rollouts"] for row in rows] == [2, 2, 2, None]
    assert [row["group_reward"] for row in rows] == [1.0, 1.0, 1.0, None]
    assert [row["truncated"] for row in rows] == [None] * 4
