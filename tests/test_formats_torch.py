"""Dumps as torch files and pickles: miles' per-rank train dumps, SkyRL's batches; and nothing in them is ever executed."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import NO_GROUP, RecordedStep, RolloutBatch
from aggcli.rollouts.sources import detect_format, open_source


def refused(text: str):
    """The error's whole single line must match."""
    return pytest.raises(RolloutError, match=rf"^{text}$")


def read(*paths: Path, **options: Any) -> RolloutBatch:
    (batch,) = open_source(SourceConfig(rollouts=tuple(map(str, paths)), **options), 0)
    return batch


# -- miles ------------------------------------------------------------------------------------------------------------

LENGTHS = [1, 2, 3, 4]
PARTITIONS = ([2, 0], [1, 3])


def miles(folder: Path, rank: int, partition: list[int], changes: Any = None, rollout: int = 7) -> Path:
    """What one rank saves: its samples' lists, and the raw rewards of the whole rollout."""
    data = {
        "partition": range(partition[0], partition[0] + 1) if len(partition) == 1 else partition,
        "tokens": [torch.tensor([9] + [p] * LENGTHS[p]) for p in partition],
        "response_lengths": [LENGTHS[p] for p in partition],
        "total_lengths": [1 + LENGTHS[p] for p in partition],
        "rewards": [0.0 for _ in partition],
        "truncated": [int(p == 3) for p in partition],
        "loss_masks": [torch.ones(LENGTHS[p], dtype=torch.int) for p in partition],
        "log_probs": [torch.full((LENGTHS[p],), -1.0 - p) for p in partition],
        "advantages": [torch.full((LENGTHS[p],), 0.5) for p in partition],
        "sample_indices": partition,
        "raw_reward": [1.0, 0.0, 0.5, 0.25],
        **(changes or {}),
    }
    path = folder / f"{rollout}_{rank}.pt"
    torch.save({"rollout_id": rollout, "rank": rank, "rollout_data": data}, path)
    return path


def test_the_files_that_miles_ranks_wrote_are_one_step_in_the_rollouts_order(tmp_path: Path) -> None:
    for rank, partition in enumerate(PARTITIONS):
        miles(tmp_path, rank, partition)
        miles(tmp_path, rank, partition, rollout=8)
    source = open_source(SourceConfig(rollouts=(str(tmp_path),)), 0)
    batch, _ = source
    assert (source.format, len(source), batch.name) == ("miles-train", 2, "step 0 (7_0.pt)")
    assert batch.response_length_S.tolist() == LENGTHS
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [1.0, 0.0, 0.5, 0.25]
    assert batch.token_fields["log_probs_T"].tolist() == [-1.0, -2.0, -2.0] + [-3.0] * 3 + [-4.0] * 4
    assert batch.token_ids_U is not None
    assert batch.token_ids_U.tolist() == [9, 0, 9, 1, 1, 9, 2, 2, 2, 9, 3, 3, 3, 3]
    assert batch.status_S == ("not truncated", "not truncated", "not truncated", "truncated")
    assert batch.group_S.eq(NO_GROUP).all()
    assert batch.recorded is not None
    assert batch.recorded.steps == (RecordedStep(partitions=((2, 0), (1, 3)), micro_batches=(((0, 1),), ((0, 1),))),)
    assert "the dump names no micro-batches: in the recorded layout each rank's samples are one" in batch.notes


def test_miles_tensor_parallel_copies_count_once_and_micro_batches_are_taken_where_given(tmp_path: Path) -> None:
    micro = {"micro_batch_indices": [[1], [0]], "num_microbatches": [2]}
    paths = [miles(tmp_path, rank, PARTITIONS[rank // 2], micro) for rank in range(4)]
    batch = read(*paths)
    assert batch.num_samples == 4
    assert batch.recorded is not None
    assert batch.recorded.steps[0].micro_batches == (((1,), (0,)), ((1,), (0,)))


def test_miles_under_context_parallelism_loses_the_slices_with_a_note(tmp_path: Path) -> None:
    path = miles(tmp_path, 0, [0, 1, 2, 3])
    payload = torch.load(path, weights_only=True) | {"cp_rank": 0, "cp_size": 2}
    payload["rollout_data"]["log_probs"] = [torch.zeros(1)] * 4
    torch.save(payload, path)
    batch = read(path)
    assert not batch.token_fields
    assert batch.response_length_S.tolist() == LENGTHS
    assert "context parallel: per-token numbers are slices of the responses, and left out" in batch.notes


def test_a_miles_rollout_dump_adds_the_groups(tmp_path: Path) -> None:
    for rank, partition in enumerate(PARTITIONS):
        miles(tmp_path, rank, partition)
    samples = [{"group_index": i // 2, "response_length": LENGTHS[i], "reward": 0.0, "status": "completed"} for i in range(4)]
    torch.save({"rollout_id": 7, "samples": samples, "metadata": {}}, tmp_path / "7.pt")
    batch = read(tmp_path)
    assert batch.group_S.tolist() == [0, 0, 1, 1]
    assert batch.recorded is not None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"partition": [0]}, r".*7_0\.pt: partition is \[0\]; must be the positions of its 2 samples"),
        ({"response_lengths": None}, r".*7_0\.pt: rollout_data holds no response_lengths; is it a train dump of miles\?"),
        ({"log_probs": [torch.zeros(1)]}, r"step 0 .*, sample 0: log_probs of 7_0\.pt has 1 entries and none at 1"),
        ({"log_probs": [torch.zeros(2)] * 2}, r"step 0 .*, sample 0 \(7_0\.pt\): log_probs has 2 values but .* is 1: .*"),
        ({"loss_masks": [[1], [1] * 3]}, r"step 0 .*, sample 0 \(7_0\.pt\): loss_mask has 3 entries but .*"),
    ],
)
def test_a_miles_dump_that_contradicts_itself_is_refused_by_file_and_sample(tmp_path: Path, changes: dict, text: str) -> None:
    with refused(text):
        read(miles(tmp_path, 0, PARTITIONS[0], changes))


def test_miles_ranks_that_share_only_some_samples_are_refused(tmp_path: Path) -> None:
    paths = [miles(tmp_path, 0, [0, 1]), miles(tmp_path, 1, [1, 2])]
    with refused(r"step 0 \(7_0\.pt\): ranks share some samples but not all \(7_0\.pt, 7_1\.pt\); .*"):
        read(*paths)


# -- SkyRL ------------------------------------------------------------------------------------------------------------


def serialized(tensor: torch.Tensor) -> dict[str, Any]:
    """SkyRL's own form of a tensor."""
    array = tensor.numpy()
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


def tensors() -> dict[str, torch.Tensor | None]:
    """Two rows, prompts padded on the left, responses on the right; the second row's last token is masked."""
    return {
        "sequences": torch.tensor([[0, 7, 8, 1, 2, 0], [6, 7, 8, 3, 4, 5]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]),
        "action_log_probs": torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]),
        "base_action_log_probs": torch.tensor([[-1.5, -2.5, 0.0], [-3.5, -4.5, -5.5]]),
        "rollout_logprobs": None,
        "advantages": torch.full((2, 3), 0.25),
        "values": None,
    }


def skyrl_module(old: bool) -> ModuleType:
    """A stand-in for SkyRL while a dump is written; it does not exist when the dump is read."""
    module = ModuleType("skyrl.backends.skyrl_train.training_batch")
    module.__dict__["_rebuild_tensor_batch"] = rebuild = lambda cls, state: None
    rebuild.__module__, rebuild.__qualname__ = module.__name__, "_rebuild_tensor_batch"

    def getstate(self: Any) -> dict[str, Any]:
        batch = {key: None if value is None else serialized(value) for key, value in self.items()}
        return {"batch_dict": batch, "batch_size": 2, "device": torch.device("cpu"), "metadata": {"response_length": 3}}

    body: dict[str, Any] = {"__getstate__": getstate}
    if not old:
        body["__reduce__"] = lambda self: (rebuild, (type(self), self.__getstate__()))
    made = type("TrainingInputBatch", (dict,), {**body, "__module__": module.__name__})
    module.__dict__["TrainingInputBatch"] = made
    return module


@pytest.fixture(params=["new", "old"])
def dump(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A dump in either way that SkyRL pickled: by a rebuilding function, or as a dict with a state."""
    module = skyrl_module(request.param == "old")
    parents = ["skyrl", "skyrl.backends", "skyrl.backends.skyrl_train"]
    with pytest.MonkeyPatch.context() as patch:
        for name in parents:
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        data = pickle.dumps(module.__dict__["TrainingInputBatch"](tensors()))
    path = tmp_path / "global_step_3_training_input.pkl"
    path.write_bytes(data)
    return path


def test_a_skyrl_pickle_is_refused_without_the_unsafe_flag(dump: Path) -> None:
    assert detect_format(dump) == "skyrl"
    with refused(r".*\.pkl: refused: it is a pickle, which can execute code when it is read; .* read it with --unsafe-load"):
        read(dump)


def test_a_skyrl_pickle_is_read_with_the_flag_and_without_skyrl(dump: Path) -> None:
    batch = read(dump, unsafe_load=True)
    assert (batch.response_length_S.tolist(), batch.total_length_S.tolist()) == ([2, 3], [4, 6])
    assert batch.loss_mask_T.tolist() == [True, True, True, True, False]
    assert {field: value_T.tolist() for field, value_T in batch.token_fields.items()} == {
        "log_probs_T": [-1.0, -2.0, -3.0, -4.0, -5.0],
        "ref_log_probs_T": [-1.5, -2.5, -3.5, -4.5, -5.5],
        "advantages_T": [0.25] * 5,
    }
    assert batch.token_ids_U is not None
    assert batch.token_ids_U.tolist() == [7, 8, 1, 2, 6, 7, 8, 3, 4, 5]
    assert batch.group_S.tolist() == [0, 1]
    assert batch.reward_S is None
    assert any(note.startswith("SkyRL's dumps hold no rewards") for note in batch.notes)


def test_a_skyrl_batch_without_its_masks_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    for change, text in (
        ({"response_mask": None}, r".*: response_mask is missing; must be a tensor of shape \(2, 3\)"),
        (
            {"action_log_probs": torch.zeros(2, 4)},
            r".*: action_log_probs has shape \(2, 4\); must be a tensor of shape \(2, 3\)",
        ),
    ):
        path = tmp_path / "a.pkl"
        path.write_bytes(pickle.dumps(tensors() | change))
        with refused(text):
            read(path, unsafe_load=True)


# -- nothing is executed ----------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


class Nested:
    """Hides the call in what torch's own storage loader would unpickle."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        import io

        inside = io.BytesIO()
        torch.save(Malicious(self.target), inside)
        return torch.storage._load_from_bytes, (inside.getvalue(),)


class Dotted:
    """Reaches for a function through an attribute of an allowed module."""

    def __reduce__(self) -> tuple:
        return np.load, ("x",)


@pytest.mark.parametrize("hidden", [Malicious, Nested])
@pytest.mark.parametrize("flag", [False, True])
def test_a_malicious_pickle_leaves_no_trace_with_or_without_the_flag(tmp_path: Path, hidden: type, flag: bool) -> None:
    target, path = tmp_path / "executed", tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(tensors() | {"sequences": hidden(target)}))
    with refused(r".*a\.pkl: (refused: .*|is truncated or not a SkyRL dump \(.*\))"):
        read(path, unsafe_load=flag)
    assert not target.exists()
    pickle.loads(path.read_bytes())
    assert target.exists()  # the file would have done it


def test_what_is_neither_data_nor_skyrls_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"a": Dotted()}))
    with refused(r".*: refused: it holds numpy\.load, which is neither plain data nor SkyRL's; nothing was executed"):
        read(path, unsafe_load=True)
    path.write_bytes(pickle.dumps(tensors())[:100])
    with refused(r".*: is truncated or not a SkyRL dump \(.*\)"):
        read(path, unsafe_load=True)
    path.write_bytes(pickle.dumps([1, 2]))
    with refused(r".*: is a pickled list, not a SkyRL batch"):
        read(path, unsafe_load=True)


def test_a_malicious_miles_dump_leaves_no_trace(tmp_path: Path) -> None:
    target, path = tmp_path / "executed", tmp_path / "7_0.pt"
    torch.save({"rollout_id": 7, "rank": 0, "rollout_data": {"tokens": [Malicious(target)]}}, path)
    with refused(r".*: refused: it holds posix\.mkdir, which is not plain data; only plain data .*"):
        read(path)
    assert not target.exists()
