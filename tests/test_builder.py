"""The rules that every recorded format shares: what a sample may hold, what is refused, and in which words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aggcli.errors import RolloutError
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch
from aggcli.rollouts.builder import BatchBuilder

NAN = math.nan


def built(*samples: dict, reward_key: str | None = None, group_size: int | None = None) -> RolloutBatch:
    builder = BatchBuilder("f", reward_key=reward_key, group_size=group_size)
    for sample in samples:
        builder.add(sample)
    return builder.build()


def refused(text: str):
    """The error's whole single line must match."""
    return pytest.raises(RolloutError, match=rf"^{text}$")


def of(*lengths: int, **fields: list) -> list[dict]:
    """Samples with these response lengths; each field is a list with one value per sample."""
    return [
        {"response_length": length, **{name: values[i] for name, values in fields.items()}} for i, length in enumerate(lengths)
    ]


# -- lengths and masks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "response", "total"),
    [
        ({"response_length": 2, "total_length": 5}, 2, 5),
        ({"response_length": 2, "tokens": [9, 8, 7]}, 2, 3),
        ({"response_length": 2, "prompt": [9, 8, 7]}, 2, 5),
        ({"response_length": 2, "prompt": "three words here"}, 2, 2),
        ({"loss_mask": [1, 0, 1]}, 3, 3),
        ({"log_probs": [-1.0, -2.0]}, 2, 2),
        ({"response_length": 7.0, "total_length": np.int64(9)}, 7, 9),
        ({"response_length": torch.tensor(4)}, 4, 4),
    ],
)
def test_lengths_come_from_the_field_or_from_what_implies_it(sample: dict, response: int, total: int) -> None:
    batch = built(sample)
    assert (batch.response_length_S.tolist(), batch.total_length_S.tolist()) == ([response], [total])


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ({"tokens": [1, 2]}, r"response_length is missing: give it, .*"),
        ({"response_length": "abc"}, r"response_length is 'abc': must be a whole number of at least 0"),
        ({"response_length": -1}, r"response_length is -1: must be .*"),
        ({"response_length": 3.5}, r"response_length is 3\.5: must be .*"),
        ({"response_length": True}, r"response_length is true: must be .*"),
        ({"response_length": 10**30}, r"response_length is 1000.*: must be .*"),
        ({"response_length": 2, "total_length": "9"}, r"total_length is '9': must be .*"),
        ({"response_length": 2, "total_length": 4, "tokens": [1, 2, 3]}, r"tokens has 3 ids but total_length is 4: .*"),
        ({"response_length": 2, "total_length": 1}, r"total_length is 1 but response_length is 2: .*"),
        ({"response_length": 2, "tokens": [1]}, r"tokens has 1 but response_length is 2: .*"),
        ({"response_length": 1, "tokens": ["a"]}, r"tokens\[0\] is 'a': must be a whole number, a token id"),
        ({"response_length": 2, "loss_mask": "11"}, r"loss_mask is '11': must be a list of numbers, or null"),
        ({"response_length": 2, "loss_mask": [1, 2]}, r"loss_mask\[1\] is 2: must be 0 or 1"),
        ({"response_length": 2, "loss_mask": [0.5, 1]}, r"loss_mask\[0\] is 0\.5: must be 0 or 1"),
        ({"response_length": 2, "loss_mask": [None, 1]}, r"loss_mask\[0\] is null: must be 0 or 1"),
        ({"response_length": 2, "log_probs": [-1, "x"]}, r"log_probs\[1\] is 'x': must be a number or null"),
        ({"response_length": 2, "log_probs": -1.0}, r"log_probs is -1\.0: must be a list of numbers, or null"),
        ({"response_length": 2, "advantage": "up"}, r"advantage is 'up': must be a number or null"),
        ({"response_length": 2, "advantage": True}, r"advantage is true: must be a number or null"),
        ({"response_length": 2, "status": 3}, r"status is 3: must be a text or null"),
        ({"response_length": 2, "rollout_id": 1.5}, r"rollout_id is 1\.5: must be a whole number, a text or null"),
        ({"response_length": 2, "group_index": [1]}, r"group_index is \[1\]: must be a whole number, a text or null"),
    ],
)
def test_a_wrong_field_is_refused_by_sample_and_field(sample: dict, text: str) -> None:
    with refused(rf"f, sample 1: {text}"):
        built({"response_length": 1}, sample)


def test_the_place_in_the_file_is_named_when_it_is_known() -> None:
    builder = BatchBuilder("step 0 (a.jsonl)")
    with refused(r"step 0 \(a\.jsonl\), sample 0 \(line 7\): response_length is -1: .*"):
        builder.add({"response_length": -1}, "line 7")


def test_a_missing_mask_is_all_ones_and_any_spelling_of_0_and_1_is_a_mask() -> None:
    masks = [None, [1, 0], [True, False], [1.0, 0.0], np.array([1, 0]), torch.tensor([1, 0], dtype=torch.int32)]
    batch = built(*of(*[2] * 6, loss_mask=masks))
    assert batch.loss_mask_T.tolist() == [True, True] + 5 * [True, False]


def test_a_mask_over_prompt_and_response_loses_the_prompts_part_and_another_length_is_refused() -> None:
    whole = {"response_length": 2, "total_length": 5, "loss_mask": [0, 0, 0, 0, 1]}
    batch = built(whole)
    assert batch.loss_mask_T.tolist() == [False, True]
    assert batch.notes[-1] == "1 loss_mask covers prompt and response: the last response_length entries were taken"
    with refused(r"f, sample 0: loss_mask has 4 entries but response_length is 2 \(total_length 5\): must have one .*"):
        built({**whole, "loss_mask": [0, 0, 0, 1]})


def test_remove_sample_masks_everything_out() -> None:
    batch = built({"response_length": 2, "remove_sample": True}, {"response_length": 1, "remove_sample": False})
    assert batch.loss_mask_T.tolist() == [False, False, True]
    assert "1 sample has remove_sample: fully masked out" in batch.notes


# -- per-token numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy"])
def test_a_per_token_list_is_read_exactly_and_must_have_one_value_per_token(field: str) -> None:
    batch = built(*of(2, 1, **{field: [[-0.1, -2], torch.tensor([-0.3])]}))
    assert batch.token_fields[f"{field}_T"].tolist() == [-0.1, -2.0, float(np.float32(-0.3))]
    assert batch.token_fields[f"{field}_T"].dtype == torch.float64
    with refused(rf"f, sample 1: {field} has 3 values but response_length is 2: must have one per response token"):
        built(*of(1, 2, **{field: [[-1.0], [-1.0, -1.0, -1.0]]}))


@pytest.mark.parametrize("lacking", [0, 2])
def test_a_list_on_some_samples_only_is_refused_by_the_sample_that_lacks_it(lacking: int) -> None:
    values: list = [[-1.0], [-1.0], [-1.0]]
    values[lacking] = None
    has = 1 if lacking == 0 else 0
    with refused(rf"f, sample {lacking}: old_log_probs is missing but sample {has} has it; give it on every sample .*"):
        built(*of(1, 1, 1, old_log_probs=values))


def test_a_sample_without_a_trained_token_may_lack_a_list() -> None:
    values = [None, [-1.0, -2.0], None, None]
    masks = [[0, 0], None, None, [0]]
    batch = built(*of(2, 2, 0, 1, log_probs=values, loss_mask=masks))
    assert str(batch.token_fields["log_probs_T"].tolist()) == "[nan, nan, -1.0, -2.0, nan]"


def test_null_in_a_list_is_nan_and_is_fine_only_under_the_mask() -> None:
    batch = built(*of(2, loss_mask=[[1, 0]], log_probs=[[-1.0, None]], old_log_probs=[[-1.0, math.inf]]))
    assert str(batch.token_fields["log_probs_T"].tolist()) == "[-1.0, nan]"
    with refused(r"f, sample 0, token 1: log_probs is null where loss_mask is 1; .*"):
        built(*of(2, log_probs=[[-1.0, None]]))
    with refused(r"f, sample 0, token 1: log_probs is nan where loss_mask is 1; .*"):
        built(*of(2, log_probs=[[-1.0, math.nan]]))


def test_an_advantage_is_a_number_for_all_tokens_or_a_list() -> None:
    batch = built(*of(2, 2, 1, advantage=[0.5, [1, 2], None], loss_mask=[None, None, [0]]))
    assert batch.advantages_T is not None
    assert str(batch.advantages_T.tolist()) == "[0.5, 0.5, 1.0, 2.0, nan]"
    with refused(r"f, sample 1: advantage is missing but sample 0 has it; .*"):
        built(*of(2, 2, advantage=[0.5, None]))


# -- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (0.5, 0.5), (torch.tensor(0.5), 0.5), (np.float32(0.25), 0.25), ("1.0", 1.0), (" 0.5 ", 0.5), (True, 1.0)],
)
def test_rewards_that_mean_a_number_are_that_number(value: object, number: float) -> None:
    batch = built(*of(1, reward=[value]))
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [number]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("True", r"reward is the text 'True': must be a number or null"),
        ("", r"reward is the text '': must be a number or null"),
        ("1_0", r"reward is the text '1_0': must be a number or null"),
        ("inf", r"reward is 'inf': must be finite; .*"),
        (-math.inf, r"reward is -inf: must be finite; .*"),
        (10**400, r"reward is 1000.*: too large for a float64"),
        ([1.0], r"reward is \[1\.0\]: must be a number or null"),
        ({"score": 1.0, "fmt": 0.2}, r"reward is an object with the keys fmt, score: choose one with --reward-key"),
        ({}, r"reward is an object with the keys \(none\): .*"),
    ],
)
def test_rewards_that_mean_no_number_are_refused(value: object, text: str) -> None:
    with refused(rf"f, sample 0: {text}"):
        built(*of(1, reward=[value]))


def test_five_ways_to_write_a_reward_and_what_is_noted() -> None:
    lines = [{"reward": "1.0"}, {"reward": 1}, {"reward": True}, {"reward": None}, {"reward": NAN}, {"reward": "nan"}, {}]
    batch = built(*({"response_length": 1, "rollout_id": i, **line} for i, line in enumerate(lines)))
    assert str(batch.reward_S.tolist() if batch.reward_S is not None else None) == "[1.0, 1.0, 1.0, nan, nan, nan, nan]"
    assert batch.notes == (
        "2 rewards were given as text and read as numbers",
        "1 reward was given as true/false and read as 1/0",
        "4 samples are unscored (reward null or NaN)",
    )


def test_no_reward_anywhere_is_none_and_not_zero() -> None:
    assert built(*of(1, 1, reward=[None, None])).reward_S is None
    assert built(*of(1)).reward_S is None


def test_an_object_reward_is_read_by_its_key() -> None:
    rewards = [{"score": 1.0, "fmt": 0.2}, {"score": "0.5"}, {"score": None}, 0.25]
    batch = built(*of(1, 1, 1, 1, reward=rewards), reward_key="score")
    assert batch.reward_S is not None
    assert str(batch.reward_S.tolist()) == "[1.0, 0.5, nan, 0.25]"
    with refused(r"f, sample 0: reward has no key 'acc', only fmt, score: change --reward-key"):
        built(*of(1, reward=[rewards[0]]), reward_key="acc")
    with refused(r"f, sample 0: reward\['score'\] is the text 'good': must be a number or null"):
        built(*of(1, reward=[{"score": "good"}]), reward_key="score")


# -- ids, groups, the rest --------------------------------------------------------------------------------------------


def test_rollout_ids_become_dense_in_order_of_appearance_and_keep_their_names() -> None:
    batch = built(*of(1, 1, 1, 1, rollout_id=["b", 7, "b", "7"]))
    assert batch.rollout_S.tolist() == [0, 1, 0, 2]
    assert batch.labels.rollouts == ("b", 7, "7")


def test_rollout_id_null_on_all_is_each_its_own_and_on_some_is_refused() -> None:
    batch = built(*of(1, 1, 1))
    assert batch.rollout_S.tolist() == [0, 1, 2]
    assert batch.notes == ("rollout_id is null on every sample: each sample is its own rollout",)
    with refused(r"f: rollout_id is null on samples 1, 3 but given on others; .*"):
        built(*of(1, 1, 1, 1, rollout_id=[5, None, 5, None]))


def test_siblings_with_different_rewards_are_refused_by_name() -> None:
    with refused(r"f: samples 0, 2 share rollout_id 5 but differ in reward; .*"):
        built(*of(1, 1, 1, rollout_id=[5, 6, 5], reward=[1, 1, 0]))


def test_a_null_group_index_is_no_group_and_never_one_of_its_own() -> None:
    batch = built(*of(1, 1, 1, group_index=[4, None, "x"], rollout_id=[0, 1, 2]))
    assert batch.group_S.tolist() == [0, NO_GROUP, 1]
    assert batch.labels.groups == (4, "x")
    assert batch.notes == ("1 sample has no group_index",)


def test_group_size_groups_consecutive_rollouts_not_samples() -> None:
    samples = of(1, 1, 1, 1, 1, rollout_id=[0, 0, 1, 2, 3])
    batch = built(*samples, group_size=2)
    assert batch.group_S.tolist() == [0, 0, 0, 1, 1]
    assert batch.notes == ("no group_index in the file: grouped every 2 consecutive rollouts (--group-size)",)
    with refused(r"f: 4 rollouts cannot be cut into groups of 3; give a --group-size that divides 4, .*"):
        built(*samples, group_size=3)
    batch = built(*of(1, 1, group_index=[0, 1], rollout_id=[0, 1]), group_size=2)
    assert batch.group_S.tolist() == [0, 1]
    assert batch.notes == ("--group-size 2 is ignored: the file has group_index",)


def test_token_ids_are_kept_where_every_sample_has_them() -> None:
    batch = built(*of(1, 1, tokens=[[5, 6], np.array([7])], status=["completed", None], response=[b"\xff", None]))
    assert batch.token_ids_U is not None
    assert batch.token_ids_U.tolist() == [5, 6, 7]
    assert batch.status_S == ("completed", None)
    batch = built(*of(1, 1, tokens=[[5, 6], None]))
    assert (batch.token_ids_U, batch.status_S) == (None, None)
    assert batch.notes[-1] == "1 sample has no tokens: token ids are left out"


def test_no_samples_at_all_is_refused() -> None:
    with refused(r"f holds no samples; give a file with at least one"):
        built()
