"""The fast way into a batch takes plain samples only, and gives what the slower way gives, bit by bit, or leaves it to it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.jsonl import read_jsonl
from aggcli.rollouts.plain import PlainPath
from tests.test_formats_convert import everything, numbers_of


def plain(**changes: Any) -> dict[str, Any]:
    sample = {
        "group_index": 0,
        "rollout_id": None,
        "response_length": 2,
        "total_length": 3,
        "tokens": [5, 6, 7],
        "loss_mask": [1, 0],
        "reward": 1.0,
        "status": "completed",
        "log_probs": [-1.0, -2],
    }
    return {field: value for field, value in (sample | changes).items() if value is not ...}


def built(*samples: dict[str, Any]) -> RolloutBatch:
    builder = BatchBuilder("s")
    for sample in samples:
        builder.add_rows([(None, sample)])
    return builder.build()


def slowly(monkeypatch: pytest.MonkeyPatch, *samples: dict[str, Any]) -> RolloutBatch:
    with monkeypatch.context() as patch:
        patch.setattr(PlainPath, "add", lambda self, rows: False)
        return built(*samples)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each sample offered to the fast way was taken."""
    answers: list[bool] = []
    add = PlainPath.add

    def watched(self: PlainPath, rows: Any) -> bool:
        answers.append(add(self, rows))
        return answers[-1]

    monkeypatch.setattr(PlainPath, "add", watched)
    return answers


PLAIN = [
    plain(),
    plain(loss_mask=...),
    plain(loss_mask=[True, False]),
    plain(reward=None),
    plain(reward=3),
    plain(status=None),
    plain(total_length=...),
    plain(group_index=None),
    plain(response_length=0, tokens=[], total_length=0, loss_mask=[], log_probs=[]),
]
NOT_PLAIN = [
    plain(reward="0.5"),
    plain(reward=True),
    plain(reward=math.nan),
    plain(response_length=2.0),
    plain(response_length=...),
    plain(total_length=3.0),
    plain(loss_mask=[1, 1, 0]),
    plain(loss_mask=[1.0, 0.0]),
    plain(log_probs=[-1.0, None]),
    plain(log_probs=..., loss_mask=[0, 0]),
    plain(log_probs=(-1.0, -2.0)),
    plain(tokens=[5.0, 6, 7]),
    plain(group_index=2.0),
    plain(remove_sample=True),
]


@pytest.mark.parametrize("sample", PLAIN)
def test_a_plain_sample_goes_the_fast_way_to_the_same_numbers(
    sample: dict, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = built(plain(), sample, plain())
    assert taken == [True, True]
    slow = slowly(monkeypatch, plain(), sample, plain())
    assert (numbers_of(batch), batch.notes) == (numbers_of(slow), slow.notes)


@pytest.mark.parametrize("sample", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_the_slower_way_and_nothing_of_it_stays(
    sample: dict, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = built(plain(), sample, plain())
    assert taken == [False, True]
    slow = slowly(monkeypatch, plain(), sample, plain())
    assert (numbers_of(batch), batch.notes) == (numbers_of(slow), slow.notes)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (plain(log_probs=[-1.0]), r"s, sample 2: log_probs has 1 values but response_length is 2: .*"),
        (plain(log_probs=[-1.0, "x"]), r"s, sample 2: log_probs\[1\] is 'x': must be a number or null"),
        (plain(log_probs=...), r"s, sample 2: log_probs is missing but sample 0 has it; .*"),
        (plain(entropy=[1.0, 1.0]), r"s, sample 0: entropy is missing but sample 2 has it; .*"),
        (plain(loss_mask=[1, 2]), r"s, sample 2: loss_mask\[1\] is 2: must be 0 or 1"),
        (plain(tokens=[5]), r"s, sample 2: tokens has 1 ids but total_length is 3: .*"),
        (plain(response_length=4), r"s, sample 2: loss_mask has 2 entries but response_length is 4 .*|s, sample 2: .*"),
        (plain(reward=math.inf), r"s, sample 2: reward is inf: must be finite; .*"),
        (plain(group_index=True), r"s, sample 2: group_index is true: must be a whole number, a text or null"),
        (plain(status=3), r"s, sample 2: status is 3: must be a text or null"),
    ],
)
def test_what_is_wrong_is_still_named_after_plain_samples(sample: dict, text: str) -> None:
    with pytest.raises(RolloutError, match=rf"^({text})$"):
        built(plain(), plain(), sample)


def test_samples_without_token_ids_go_the_fast_way_too(taken: list[bool]) -> None:
    batch = built(*(plain(tokens=...) for _ in range(3)))
    assert taken == [True, True]
    assert batch.token_ids_U is None
    mixed = built(plain(), plain(tokens=...), plain())
    assert mixed.token_ids_U is None
    assert "1 sample has no tokens: token ids are left out" in mixed.notes


def test_a_batch_of_every_kind_of_field_is_the_same_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aggcli.rollouts.writers import write_jsonl

    batch = everything()
    write_jsonl(batch, tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(PlainPath, "add", lambda self, rows: False)
        slow = read_jsonl(tmp_path / "a.jsonl", "s")
    assert numbers_of(slow) == numbers_of(read_jsonl(tmp_path / "a.jsonl", "s")) == numbers_of(batch)


def test_what_the_fast_parser_refuses_is_read_all_the_same(tmp_path: Path) -> None:
    lines = [json.dumps(plain(log_probs=[-1.0, value])) for value in (-2.0, math.nan, -math.inf)]
    lines.append(json.dumps(plain(response="\ud800")))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    batch = read_jsonl(tmp_path / "a.jsonl", "s")
    assert str(batch.token_fields["log_probs_T"].tolist()) == "[-1.0, -2.0, -1.0, nan, -1.0, -inf, -1.0, -2.0]"


def test_ids_too_large_for_a_float_never_become_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(plain(group_index=i)) for i in (2**62, 2**62 + 1)))
    assert read_jsonl(tmp_path / "a.jsonl", "s").group_S.tolist() == [0, 1]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(plain(group_index=i)) for i in (2**70, 2**70 + 1)))
    with pytest.raises(RolloutError, match=r"group_index is 1\.18.*e\+21: must be a whole number, a text or null"):
        read_jsonl(tmp_path / "a.jsonl", "s")
