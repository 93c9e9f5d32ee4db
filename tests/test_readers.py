"""JSONL and slime's dumps: real files give their known numbers, damaged ones are refused, and nothing is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import NO_GROUP, RecordedStep
from aggcli.rollouts.jsonl import read_jsonl
from aggcli.rollouts.slime import read_slime
from aggcli.rollouts.slime_layout import recorded_layout
from aggcli.rollouts.sources import open_source

DATA = Path(__file__).parent / "data"


def refused(text: str):
    """The error's whole single line must match."""
    return pytest.raises(RolloutError, match=rf"^{text}$")


# -- JSONL ------------------------------------------------------------------------------------------------------------


def jsonl(folder: Path, content: str | bytes, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_jsonl_takes_bare_nan_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeff{"response_length": 2, "log_probs": [-1, NaN], "loss_mask": [1, 0]}\n\n  \r\n'
    text += '{"response_length": 1, "reward": NaN, "log_probs": [-Infinity], "loss_mask": [0]}\r\n'
    batch = read_jsonl(jsonl(tmp_path, text), "s")
    assert batch.response_length_S.tolist() == [2, 1]
    assert str(batch.token_fields["log_probs_T"].tolist()) == "[-1.0, nan, -inf]"


@pytest.mark.parametrize("tail", [b'{"response_len', b'{"response_length": 1, "response": "\xc3'])
def test_a_half_written_last_line_is_dropped_with_a_note(tmp_path: Path, tail: bytes) -> None:
    batch = read_jsonl(jsonl(tmp_path, b'{"response_length": 1, "rollout_id": 0}\n' + tail), "s")
    assert batch.num_samples == 1
    assert batch.notes == ("1 half-written line dropped: the last, line 2",)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"response_len', r"s, line 2: is not valid JSON \(.*\); correct or delete the line"),
        (b'{"response": "\xff"}', r"s, line 2: is not valid UTF-8 \(invalid start byte at byte 15\); .*"),
        (b"[" * 100_000, r"s, line 2: is not valid JSON \(nested too deeply\); .*"),
        (b"[1, 2]", r"s, line 2: holds \[1, 2\]; each line must be a JSON object, one sample"),
        (b"null", r"s, line 2: holds null; each line must be a JSON object, one sample"),
        (b'{"response_length": "x"}', r"s, sample 1 \(line 2\): response_length is 'x': .*"),
    ],
)
def test_a_broken_line_elsewhere_is_refused_by_number(tmp_path: Path, line: bytes, text: str) -> None:
    good = b'{"response_length": 1}\n'
    with refused(text):
        read_jsonl(jsonl(tmp_path, good + line + b"\n" + good), "s")


@pytest.mark.parametrize(("content", "why"), [("", ""), ("\n \n", ""), ('{"res', r" \(1 half-written line dropped.*\)")])
def test_a_jsonl_file_without_samples_is_refused(tmp_path: Path, content: str, why: str) -> None:
    with refused(rf"s holds no samples{why}; give a file with at least one"):
        read_jsonl(jsonl(tmp_path, content), "s")


# -- slime ------------------------------------------------------------------------------------------------------------

FACTS = [(0.546875, 6.421875), (0.625, 7.859375), (0.484375, 7.53125)]


@pytest.mark.parametrize("kind", ["slime_rollout", "slime_train"])
def test_real_dumps_have_the_mean_rewards_and_lengths_they_were_written_with(kind: str) -> None:
    batches = list(open_source(SourceConfig(rollouts=(str(DATA / kind),)), 0))
    assert [batch.name for batch in batches] == ["step 0 (0.pt)", "step 1 (1.pt)", "step 2 (2.pt)"]
    means = [(b.reward_S.mean().item(), b.response_length_S.double().mean().item()) for b in batches if b.reward_S is not None]
    assert means == FACTS


def test_a_real_rollout_dump_has_groups_of_8_and_the_engines_log_probs() -> None:
    batch = read_slime(DATA / "slime_rollout/0.pt", "s")
    assert batch.group_S.tolist() == [i // 8 for i in range(64)]
    assert batch.rollout_S.tolist() == list(range(64))
    assert list(batch.token_fields) == ["rollout_log_probs_T"]
    first = [-0.69354, -0.058473, -0.037428, -0.037881, -0.036052, -0.031497, -0.173846]
    assert batch.token_fields["rollout_log_probs_T"][:7].tolist() == first
    assert batch.total_length_S[0] == 14
    assert batch.status_S is not None
    assert set(batch.status_S) == {"completed"}


def test_a_real_fanout_dump_is_the_same_64_rollouts_in_82_samples_each_token_trained_once() -> None:
    batch = read_slime(DATA / "slime_rollout_fanout/0.pt", "s")
    plain = read_slime(DATA / "slime_rollout/0.pt", "s")
    assert (batch.num_samples, int(batch.rollout_S.max()) + 1) == (82, 64)
    trained = torch.zeros(64, dtype=torch.int64).index_add(0, batch.rollout_S, batch.mask_sum_S)
    assert trained.tolist() == plain.response_length_S.tolist()


def test_a_real_train_dump_keeps_float32_exactly_and_the_raw_reward_not_the_normalised_one() -> None:
    payload = torch.load(DATA / "slime_train/0.pt", weights_only=True)
    batch = read_slime(DATA / "slime_train/0.pt", "s")
    assert list(batch.token_fields) == ["log_probs_T", "ref_log_probs_T", "rollout_log_probs_T", "advantages_T"]
    expected = torch.cat([sample["log_probs"].double() for sample in payload["samples"]])
    assert torch.equal(batch.token_fields["log_probs_T"], expected)
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == payload["raw_reward"]
    assert batch.group_S.eq(NO_GROUP).all()
    assert batch.status_S == ("not truncated",) * 64


# The partitions that the writer of the dumps printed.
RANKS_OF_1 = (
    (*range(10), 15, *range(21, 32), *range(42, 52), 59),
    (*range(10, 15), *range(16, 21), *range(32, 42), *range(52, 59), *range(60, 64)),
)
RANKS_OF_2 = (
    (*range(11), 43, 44, *range(46, 54)),
    (21, 13, 16, 20, 14, 19, *range(54, 64)),
    (*range(22, 32), 42, 33, 35, 37, 39, 40),
    (38, 34, 36, 32, 45, 41, 12, 17, 15, 18, 11),
)


@pytest.mark.parametrize(
    ("number", "ranks", "sizes"),
    [(1, RANKS_OF_1, [[11, 11, 11], [10, 10, 11]]), (2, RANKS_OF_2, [[11, 10], [6, 10], [10, 6], [6, 5]])],
)
def test_the_recorded_layout_is_the_real_partition(number: int, ranks: tuple, sizes: list) -> None:
    batch = read_slime(DATA / f"slime_train/{number}.pt", "s")
    assert batch.recorded is not None
    (step,) = batch.recorded.steps
    assert step.partitions == ranks
    assert [[len(indices) for indices in of_rank] for of_rank in step.micro_batches] == sizes
    for partition, of_rank in zip(step.partitions, step.micro_batches, strict=True):
        assert [index for indices in of_rank for index in indices] == list(range(len(partition)))


def test_micro_batches_are_dealt_to_optimizer_steps_in_sequence() -> None:
    shards = [
        {"data_parallel_rank": 1, "partition": [5, 1], "micro_batch_indices": [[1], [0]], "num_microbatches": [1, 1]},
        {"data_parallel_rank": 0, "partition": [0, 3, 2, 4], "micro_batch_indices": [[2], [0, 3], [1]]}
        | {"num_microbatches": [2, 1]},
    ]
    layout = recorded_layout(shards, range(6))
    assert layout is not None
    assert layout.steps == (
        RecordedStep(partitions=((0, 2, 4), (1,)), micro_batches=(((1,), (0, 2)), ((0,),))),
        RecordedStep(partitions=((3,), (5,)), micro_batches=(((0,),), ((0,),))),
    )
    for shard in shards:  # rollout positions with gaps name the same samples by place
        shard["partition"] = [10 * position for position in shard["partition"]]
    assert recorded_layout(shards, range(0, 60, 10)) == layout


def edited(tmp_path: Path, source: str, change) -> Path:
    """A copy of a real dump, changed by `change(payload)`."""
    payload = torch.load(DATA / source, weights_only=True)
    change(payload)
    torch.save(payload, tmp_path / "0.pt")
    return tmp_path / "0.pt"


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["dp_shards"].pop(),
        lambda p: p["dp_shards"].append(p["dp_shards"][0]),
        lambda p: p["dp_shards"][0].update(num_microbatches=[2]),
        lambda p: p["dp_shards"][0].update(partition="all"),
        lambda p: p["dp_shards"][0].pop("partition"),
        lambda p: p["dp_shards"][0]["micro_batch_indices"][0].append(0),
    ],
)
def test_shards_that_do_not_hold_every_sample_once_give_no_layout_and_a_note(tmp_path: Path, change) -> None:
    batch = read_slime(edited(tmp_path, "slime_train/1.pt", change), "s")
    assert batch.recorded is None
    assert batch.notes == ("dp_shards do not cover every sample exactly once: the recorded layout is left out",)


def test_a_train_dump_is_put_in_the_order_of_rollout_position(tmp_path: Path) -> None:
    batch = read_slime(DATA / "slime_train/1.pt", "s")
    other = read_slime(edited(tmp_path, "slime_train/1.pt", lambda p: p["samples"].reverse()), "s")
    assert torch.equal(other.response_length_S, batch.response_length_S)
    assert torch.equal(other.token_fields["log_probs_T"], batch.token_fields["log_probs_T"])
    assert other.recorded == batch.recorded


def test_without_raw_reward_the_local_one_is_taken_and_truncated_is_a_status(tmp_path: Path) -> None:
    def change(payload: dict) -> None:
        payload["samples"][3]["truncated"] = 1
        del payload["raw_reward"]

    batch = read_slime(edited(tmp_path, "slime_train/0.pt", change), "s")
    assert batch.reward_S is not None
    assert batch.reward_S.mean() == FACTS[0][0]
    assert batch.status_S == tuple("truncated" if i == 3 else "not truncated" for i in range(64))


@pytest.mark.parametrize(
    ("source", "change", "text"),
    [
        ("slime_train/0.pt", lambda p: p.update(format_version=3), r".*: train dump of format_version 3; only version 2 .*"),
        ("slime_train/0.pt", lambda p: p.pop("format_version"), r".*: train dump of format_version null; .*"),
        ("slime_train/0.pt", lambda p: p["samples"][5].pop("rollout_position"), r"s, sample 5: rollout_position is null; .*"),
        ("slime_train/0.pt", lambda p: p["samples"][5].update(rollout_position=4), r"s, sample 5: rollout_position is 4; .*"),
        ("slime_train/0.pt", lambda p: p["raw_reward"].pop(), r"s, sample 63: raw_reward has 63 entries and none at .* 63"),
        ("slime_rollout/0.pt", lambda p: p.update(samples=[]), r"s holds no samples; give a file with at least one"),
        ("slime_rollout/0.pt", lambda p: p.update(samples={"a": 1}), r"s: samples is an object; must be a list of samples"),
        ("slime_rollout/0.pt", lambda p: p["samples"].append(3), r"s, sample 64: is 3; each sample must be a dict .*"),
        ("slime_rollout/0.pt", lambda p: p.pop("samples"), r".*: is not a slime dump: it holds keys rollout_id, and no .*"),
    ],
)
def test_a_dump_that_contradicts_its_format_is_refused(tmp_path: Path, source: str, change, text: str) -> None:
    with refused(text):
        read_slime(edited(tmp_path, source, change), "s")


def test_a_train_dump_takes_groups_and_status_from_the_rollout_dump_of_the_same_rollout() -> None:
    paths = (str(DATA / "slime_train"), str(DATA / "slime_rollout"))
    for order in (paths, paths[::-1]):
        source = open_source(SourceConfig(rollouts=order), 0)
        assert (len(source), source.format) == (3, "slime-train")
        for i, batch in enumerate(source):
            assert batch.name == f"step {i} ({i}.pt)"
            assert batch.group_S.tolist() == [j // 8 for j in range(64)]
            assert batch.status_S == ("completed",) * 64
            assert "log_probs_T" in batch.token_fields
            assert batch.recorded is not None


def test_a_rollout_dump_of_other_lengths_or_too_few_samples_is_refused_by_sample(tmp_path: Path) -> None:
    train = DATA / "slime_train/0.pt"
    other = edited(tmp_path, "slime_rollout/0.pt", lambda p: p["samples"][7].update(response_length=99))
    with refused(r"s, sample 7: response_length is \d+ in the train dump but 99 in the rollout dump; .*"):
        read_slime(train, "s", rollout_dump=other)
    short = edited(tmp_path, "slime_rollout/0.pt", lambda p: p["samples"].pop())
    with refused(r"s, sample 63: rollout_position 63 is not in the rollout dump, which has 63 samples; .*"):
        read_slime(train, "s", rollout_dump=short)


def test_two_dumps_of_the_same_kind_and_rollout_leave_the_join_open_and_are_refused() -> None:
    paths = tuple(str(DATA / name / "0.pt") for name in ("slime_rollout", "slime_rollout_fanout", "slime_train"))
    assert len(open_source(SourceConfig(rollouts=paths[:2]), 0)) == 2
    with refused(r"rollout_id 0 has 1 train and 2 rollout dumps \(.*\); give one of each"):
        len(open_source(SourceConfig(rollouts=paths), 0))


# -- nothing is executed ----------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


class SomeClass:
    pass


@pytest.mark.parametrize("write", [torch.save, lambda payload, path: path.write_bytes(pickle.dumps(payload, protocol=2))])
def test_a_file_that_would_execute_code_is_refused_and_executes_nothing(tmp_path: Path, write) -> None:
    target, path = tmp_path / "executed", tmp_path / "0.pt"
    write({"rollout_id": 0, "samples": [{"reward": Malicious(target)}]}, path)
    for attempt in (lambda: read_slime(path, "s"), lambda: list(open_source(SourceConfig(rollouts=(str(path),)), 0))):
        with refused(r".*: refused: it holds posix\.mkdir, which is not plain data; only plain data .* nothing .* executed.*"):
            attempt()
    assert not target.exists()
    pickle.loads(pickle.dumps(Malicious(target)))
    assert target.exists()  # the file would have done it


def test_a_class_instance_and_a_damaged_file_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "0.pt"
    torch.save({"rollout_id": 0, "samples": [SomeClass()]}, path)
    with refused(r".*: refused: it holds .*SomeClass, which is not plain data; only plain data .*"):
        read_slime(path, "s")
    raw = (DATA / "slime_rollout/0.pt").read_bytes()
    for damaged in (raw[:5000], raw[:100], raw[:-10], b"hello"):
        path.write_bytes(damaged)
        with refused(r".*: refused: it is truncated or not a torch file; only plain data .*"):
            read_slime(path, "s")
