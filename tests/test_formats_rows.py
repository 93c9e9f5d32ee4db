"""JSON-line dumps with token ids or lengths: NeMo-RL, prime-rl, tinker-cookbook, OpenRLHF-style; fields as each writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RecordedStep, RolloutBatch
from aggcli.rollouts.sources import open_source
from tests.cli import aggcli, strict_json

Row = dict[str, Any]


def refused(text: str):
    """The error's whole single line must match."""
    return pytest.raises(RolloutError, match=rf"^{text}$")


def read(path: Path, **options: Any) -> RolloutBatch:
    (batch,) = open_source(SourceConfig(rollouts=(str(path),), **options), 0)
    return batch


def lines(path: Path, *rows: Row) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fields_of(batch: RolloutBatch) -> dict[str, list[float]]:
    return {field: value_T.tolist() for field, value_T in batch.token_fields.items()}


# -- NeMo-RL ----------------------------------------------------------------------------------------------------------


def nemo(**changes: Any) -> Row:
    """Prompt 7 8, response 1 2 3 of which 2 is masked, padded to 7; the writer wraps every value in a list of one."""
    row = {
        "content": ["q", "a"],
        "rewards": 1.0,
        "input_lengths": 5,
        "token_ids": [7, 8, 1, 2, 3, 0, 0],
        "token_loss_mask": [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        "sample_loss_mask": 1.0,
        "advantages": [0.5] * 7,
        "generation_logprobs": [0.0, 0.0, -1.0, -9.0, -2.0, 0.0, 0.0],
        "prev_logprobs": [0.0, 0.0, -1.5, -9.0, -2.5, 0.0, 0.0],
    }
    return {**{key: [value] for key, value in (row | changes).items()}, "idx": 0}


def test_nemo_rl_rows_lose_padding_and_prompt_and_keep_two_streams(tmp_path: Path) -> None:
    batch = read(lines(tmp_path / "train_data_step1.jsonl", nemo(), nemo(rewards=0.0)))
    assert (batch.response_length_S.tolist(), batch.total_length_S.tolist()) == ([3, 3], [5, 5])
    assert batch.loss_mask_T.tolist() == [True, False, True] * 2
    assert fields_of(batch) == {
        "log_probs_T": [-1.5, -9.0, -2.5] * 2,
        "rollout_log_probs_T": [-1.0, -9.0, -2.0] * 2,
        "advantages_T": [0.5] * 6,
    }
    assert batch.token_ids_U is not None
    assert batch.token_ids_U.tolist() == [7, 8, 1, 2, 3] * 2
    assert batch.reward_S is not None
    assert (batch.reward_S.tolist(), batch.group_S.tolist()) == ([1.0, 0.0], [0, 0])
    assert any(
        note.startswith("no group ids in the file: groups are assumed, rows of equal prompt (1 group)") for note in batch.notes
    )


def test_nemo_rl_unwrapped_rows_one_advantage_a_sample_and_dropped_samples_are_read(tmp_path: Path) -> None:
    plain = {key: value[0] for key, value in nemo(sample_loss_mask=0).items() if key != "idx"}
    batch = read(lines(tmp_path / "a.jsonl", plain | {"advantages": -0.25}, nemo(advantages=0.75, token_ids=[9] * 7)))
    assert batch.loss_mask_T.tolist() == [False] * 3 + [True, False, True]
    assert fields_of(batch)["advantages_T"] == [-0.25] * 3 + [0.75] * 3
    assert batch.group_S.tolist() == [0, 1]


def test_nemo_rl_filtered_rewards_belong_to_the_rows_and_win(tmp_path: Path) -> None:
    batch = read(lines(tmp_path / "a.jsonl", nemo(rewards=0.0, filtered_rewards=1.0)))
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [1.0]
    assert any(note.startswith("rewards are filtered_rewards") for note in batch.notes)


def test_nemo_rl_lists_that_are_too_short_and_unlocatable_responses_are_named(tmp_path: Path) -> None:
    with refused(r"step 0 \(a\.jsonl\), sample 1 \(line 2\): prev_logprobs has 4 values but the sequence 5 tokens: .*"):
        read(lines(tmp_path / "a.jsonl", nemo(), nemo(prev_logprobs=[-1.0] * 4)))
    with refused(r".*: token_loss_mask is missing: without it nobody knows where the response begins"):
        read(lines(tmp_path / "a.jsonl", nemo(token_loss_mask=None)))
    batch = read(lines(tmp_path / "a.jsonl", nemo(), nemo(token_loss_mask=[0] * 7)))
    assert (batch.response_length_S.tolist(), batch.total_length_S.tolist()) == ([3, 0], [5, 5])
    assert "1 sample has no trained token: where the response began is not known, length 0" in batch.notes


# -- prime-rl ---------------------------------------------------------------------------------------------------------


def prime(rank: int, micro_step: int, prompt: list[int], length: int, **changes: Any) -> Row:
    tokens = prompt + list(range(100, 100 + length))
    count = len(tokens)
    row = {
        "schema_version": 1,
        "step": 3,
        "rank": rank,
        "micro_step": micro_step,
        "micro_sequence_idx": 0,
        "export_sequence_idx": 0,
        "env_name": "math",
        "token_ids": tokens,
        "position_ids": list(range(count)),
        "loss_mask": [False] * len(prompt) + [True] * length,
        "advantages": [0.0] * len(prompt) + [0.5] * length,
        "inference_logprobs": [0.0] * len(prompt) + [-1.0] * length,
        "trainer_logprobs": [None] * len(prompt) + [-1.25] * length,
        "entropy": [0.0] * len(prompt) + [0.75] * length,
        "mismatch_kl": [0.0] * count,
        "importance_ratio": [1.0] * count,
        "is_masked": [False] * count,
    }
    return row | changes


def exported(folder: Path, step: int = 3, stable: bool = True) -> Path:
    """Two ranks: rank 0 packs lengths 1 and 2 into micro-batch 0 and 3 into micro-batch 1; rank 1 has 4 and 5."""
    place = folder / "token_exports" / f"step_{step}"
    lines(place / "rank_0.jsonl", prime(0, 0, [7], 1), prime(0, 0, [8, 8], 2), prime(0, 1, [7], 3))
    lines(place / "rank_1.jsonl", prime(1, 0, [8, 8], 4), prime(1, 1, [9], 5))
    if stable:
        (place / "STABLE").touch()
    return place


def test_a_prime_rl_step_is_one_folder_with_all_its_ranks_and_their_real_layout(tmp_path: Path) -> None:
    batch = read(exported(tmp_path))
    assert batch.name == "step 0 (step_3)"
    assert batch.response_length_S.tolist() == [1, 2, 3, 4, 5]
    assert batch.total_length_S.tolist() == [2, 4, 4, 6, 6]
    assert fields_of(batch) == {
        "log_probs_T": [-1.25] * 15,
        "rollout_log_probs_T": [-1.0] * 15,
        "entropy_T": [0.75] * 15,
        "advantages_T": [0.5] * 15,
    }
    assert batch.group_S.tolist() == [0, 1, 0, 1, 2]
    assert batch.reward_S is None
    assert batch.recorded is not None
    assert batch.recorded.steps == (RecordedStep(partitions=((0, 1, 2), (3, 4)), micro_batches=(((0, 1), (2,)), ((0,), (1,)))),)
    assert not any("STABLE" in note or "not given" in note for note in batch.notes)


def test_prime_rl_folders_are_found_in_order_from_above_and_by_glob(tmp_path: Path) -> None:
    for step in (10, 2):
        exported(tmp_path, step)
    for place in (tmp_path, tmp_path / "token_exports", tmp_path / "token_exports/step_*"):
        source = open_source(SourceConfig(rollouts=(str(place),)), 0)
        assert source.format == "prime-rl"
        assert [batch.name for batch in source] == ["step 0 (step_2)", "step 1 (step_10)"]


def test_prime_rl_steps_that_may_not_be_whole_say_so(tmp_path: Path) -> None:
    place = exported(tmp_path, stable=False)
    assert any(note.startswith("step_3 has no STABLE marker") for note in read(place).notes)
    alone = read(place / "rank_1.jsonl")
    assert alone.num_samples == 2
    assert "rank_0.jsonl of step_3 were not given: the step is not whole" in alone.notes
    with (place / "rank_1.jsonl").open("a") as file:
        file.write('{"schema_vers')
    assert "1 half-written line dropped: the last, line 3" in read(place).notes
    lines(place / "rank_1.jsonl", prime(1, 0, [9], 5, schema_version=2))
    assert any(note.startswith("schema_version 2 is not known") for note in read(place).notes)


def test_prime_rl_rewards_are_read_where_exports_have_them_and_errors_name_file_and_line(tmp_path: Path) -> None:
    place = exported(tmp_path)
    lines(place / "rank_0.jsonl", prime(0, 0, [7], 2, rewards=[None, 0.25, 0.25]))
    lines(place / "rank_1.jsonl", prime(1, 0, [7], 1, rewards=[None, 1.0]))
    batch = read(place)
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [0.25, 1.0]
    lines(place / "rank_1.jsonl", prime(1, 0, [7], 2, entropy=[0.0]))
    with refused(r"step 0 \(step_3\), sample 1 \(rank_1\.jsonl, line 1\): entropy has 1 values but the sequence 3 tokens: .*"):
        read(place)
    lines(place / "rank_1.jsonl", prime(1, 0, [7], 1) | {"micro_step": "a"})
    with refused(r".*, sample 1 \(rank_1\.jsonl, line 1\): micro_step is 'a': must be a whole number of at least 0"):
        read(place)


def test_a_masked_in_token_without_a_number_is_refused(tmp_path: Path) -> None:
    place = exported(tmp_path)
    lines(place / "rank_1.jsonl", prime(1, 0, [7], 2, trainer_logprobs=[None, -1.0, None]))
    with refused(r"step 0 \(step_3\), sample 3, token 1: log_probs is null where loss_mask is 1; .*"):
        read(place)


# -- tinker-cookbook ----------------------------------------------------------------------------------------------------


def tinker(group: int, trajectory: int, lengths: list[tuple[int, int]], reward: Any, **changes: Any) -> Row:
    steps = [
        {"step_idx": i, "ob_len": ob, "ac_len": ac, "reward": 0.0, "episode_done": False, "metrics": {}, "logs": {}}
        for i, (ob, ac) in enumerate(lengths)
    ]
    return {
        "schema_version": 1,
        "split": "train",
        "iteration": 0,
        "group_idx": group,
        "traj_idx": trajectory,
        "tags": ["math"],
        "sampling_client_step": None,
        "total_reward": reward,
        "final_reward": 0.0,
        "trajectory_metrics": {},
        "steps": steps,
        "final_ob_len": 0,
        **changes,
    }


def test_tinker_summaries_give_trained_lengths_rewards_and_groups(tmp_path: Path) -> None:
    rows = [tinker(0, 0, [(10, 4)], 1.0), tinker(1, 0, [(5, 3), (20, 6)], 0.5), tinker(0, 1, [(10, 2)], None)]
    rows[2]["steps"][-1]["stop_reason"] = "length"
    for iteration in (10, 2):
        lines(tmp_path / f"iteration_{iteration:06d}" / "train_rollout_summaries.jsonl", *rows)
        lines(tmp_path / f"iteration_{iteration:06d}" / "eval_test_rollout_summaries.jsonl", rows[0])
    source = open_source(SourceConfig(rollouts=(str(tmp_path),)), 0)
    batch, last = source
    assert source.format == "tinker"
    assert batch.name == "step 0 (iteration_000002/train_rollout_summaries.jsonl)"
    assert last.name == "step 1 (iteration_000010/train_rollout_summaries.jsonl)"
    assert batch.response_length_S.tolist() == [4, 9, 2]
    assert batch.total_length_S.tolist() == [14, 26, 12]
    assert batch.group_S.tolist() == [0, 1, 0]
    assert str(batch.reward_S.tolist() if batch.reward_S is not None else None) == "[1.0, 0.5, nan]"
    assert batch.status_S == (None, None, "truncated")


def test_tinker_steps_of_the_wrong_shape_are_refused_by_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", tinker(0, 0, [(1, 1)], 1.0), tinker(0, 1, [], 1.0, steps=3))
    with refused(r"step 0 .*, sample 1 \(line 2\): steps is 3: must be a list of objects"):
        read(path)
    lines(path, tinker(0, 1, [(1, -4)], 1.0))
    with refused(r".*, sample 0 \(line 1\): steps\[0\]\.ac_len is -4: must be a whole number of at least 0"):
        read(path)


# -- OpenRLHF-style -----------------------------------------------------------------------------------------------------


def openrlhf(**changes: Any) -> Row:
    """Prompt 7 8, response 1 2 3; log-probabilities over all tokens but the first."""
    row = {
        "sequences": [7, 8, 1, 2, 3],
        "action_mask": [0, 1, 1, 1],
        "action_log_probs": [-9.0, -1.0, -2.0, -3.0],
        "base_action_log_probs": [-9.0, -1.5, -2.5, -3.5],
        "rollout_log_probs": [-9.0, -1.25, -2.25, -3.25],
        "advantages": [0.0, 0.5, 0.5, 0.5],
        "rewards": 0.1,
        "scores": 1.0,
        "response_length": 3,
        "truncated": False,
    }
    return row | changes


def test_openrlhf_rows_are_read_over_the_sequence_or_over_the_response(tmp_path: Path) -> None:
    cut = {key: openrlhf()[key][1:] for key in openrlhf() if isinstance(openrlhf()[key], list) and key != "sequences"}
    batch = read(
        lines(tmp_path / "o.jsonl", openrlhf(), openrlhf(**cut, truncated=[True], scores=[0.0], response_length=[3.0]))
    )
    assert (batch.response_length_S.tolist(), batch.total_length_S.tolist()) == ([3, 3], [5, 5])
    assert fields_of(batch) == {
        "log_probs_T": [-1.0, -2.0, -3.0] * 2,
        "ref_log_probs_T": [-1.5, -2.5, -3.5] * 2,
        "rollout_log_probs_T": [-1.25, -2.25, -3.25] * 2,
        "advantages_T": [0.5] * 6,
    }
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [1.0, 0.0]
    assert batch.status_S == ("not truncated", "truncated")
    assert batch.group_S.tolist() == [0, 0]


def test_openrlhf_without_scores_takes_rewards_and_a_uid_wins_over_the_prompt(tmp_path: Path) -> None:
    batch = read(lines(tmp_path / "o.jsonl", openrlhf(scores=None, uid="a"), openrlhf(scores=None, uid="b", advantages=-1.0)))
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [0.1, 0.1]
    assert batch.labels.groups == ("a", "b")
    assert fields_of(batch)["advantages_T"] == [0.5] * 3 + [-1.0] * 3
    with refused(r".*, sample 0 \(line 1\): action_log_probs has 2 values but the sequence 4 tokens: .*"):
        read(lines(tmp_path / "o.jsonl", openrlhf(action_log_probs=[-1.0, -2.0])))


def test_a_prime_rl_export_is_audited_under_the_layout_it_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = exported(tmp_path)
    told = strict_json(aggcli(capsys, "audit", place, "--rules", "token_mean,trl:bnpo", "--no-search", "--json").out)
    assert told["layouts"][0] == "recorded"
    rules = told["steps"][0]["rules"]
    # every token: ratio exp(-0.25) below 1 - 0.2 and advantage 0.5, so the loss is the free one, -exp(-0.25) / 2
    assert rules["token_mean"]["pg_loss"] == pytest.approx(-math.exp(-0.25) / 2, abs=1e-12)
    assert rules["token_mean"]["verdict"] == "invariant"
