"""SkyRL's dumped batches (`trainer.dump_data_batch`): a pickled TensorBatch of [B, T] tensors, read only with --unsafe-load.

A pickle names functions to call. Even when asked for, none is called: see `unpickling`. SkyRL's own classes become stand-ins
that keep their items and do nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.files import is_of_the_machine, opened
from aggcli.rollouts.pickled import DamagedError, RefusedError, StandIn, plain_data
from aggcli.rollouts.sequences import Response, Sequences
from aggcli.rollouts.steps import Step
from aggcli.rollouts.torch_files import unpickled_file
from aggcli.rollouts.unpickling import Bounded, Unpickler

STREAMS = {
    "action_log_probs": "log_probs",
    "base_action_log_probs": "ref_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "advantages": "advantage",
}
LACKS = "SkyRL's dumps hold no rewards and no group ids (both are dropped before the dump), no entropy and no layout"


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one dump; refused without --unsafe-load."""
    if not config.unsafe_load:
        raise RolloutError(
            f"{step.path}: refused: it is a pickle, which can execute code when it is read; if you trust where it comes from,"
            " read it with --unsafe-load"
        )
    tensors, metadata = _load(step.path)
    builder = BatchBuilder(name, reward_key=config.reward_key)
    builder.notes.append(LACKS)
    mask_BT = _matrix(tensors, "loss_mask", step.path)
    real_BT = _matrix(tensors, "response_mask", step.path, mask_BT.shape)
    attention_BU = _matrix(tensors, "attention_mask", step.path).bool()
    if len(attention_BU) != len(mask_BT):
        raise RolloutError(f"{step.path}: attention_mask has {len(attention_BU)} rows but loss_mask {len(mask_BT)}")
    ids_BU = _matrix(tensors, "sequences", step.path, attention_BU.shape)
    streams = {o: _matrix(tensors, t, step.path, mask_BT.shape) for t, o in STREAMS.items() if tensors.get(t) is not None}
    rewards = None if tensors.get("rewards") is None else _matrix(tensors, "rewards", step.path, mask_BT.shape)
    uids = metadata.get("uids")
    sequences = Sequences(builder, config.group_size)
    for row in range(len(mask_BT)):
        real_T, ids = real_BT[row].bool(), ids_BU[row][attention_BU[row]].tolist()
        length = int(real_T.sum())
        fields: dict[str, object] = {ours: stream_BT[row][real_T].tolist() for ours, stream_BT in streams.items()}
        fields |= {"response_length": length, "total_length": len(ids), "tokens": ids}
        fields["loss_mask"] = mask_BT[row][real_T].bool().tolist()
        reward = None if rewards is None else rewards[row].sum().item()
        group = uids[row] if isinstance(uids, (list, tuple)) and len(uids) == len(mask_BT) else None
        sequences.add(Response(fields, tuple(ids[: len(ids) - length])), reward=reward, group_index=group)
    sequences.close()
    return builder.build()


def _matrix(tensors: Mapping[str, Any], field: str, path: Path, shape: torch.Size | None = None) -> Tensor:
    value = tensors.get(field)
    if not isinstance(value, Tensor) or value.dim() != 2 or (shape is not None and value.shape != shape):
        found = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else "is missing"
        must = tuple(shape) if shape is not None else "[B, T]"
        raise RolloutError(f"{path}: {field} {found}; must be a tensor of shape {must}")
    return value


# -- loading --------------------------------------------------------------------------------------------------------


def _load(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The tensors of the dump and its metadata."""
    with opened(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        try:
            state = plain_data(Unpickler(Bounded(file, size), more=_stand_in).load(), size)
            if not isinstance(state, Mapping):
                raise DamagedError(f"is a pickled {type(state).__name__}, not a SkyRL batch")
            batch, metadata = state.get("batch_dict", state), state.get("metadata")
            if not isinstance(batch, Mapping):
                raise DamagedError("has no batch_dict")
            tensors = {key: _tensor(value) for key, value in batch.items()}
        except RefusedError as error:
            why = f"refused: it holds {error}, which is neither plain data nor SkyRL's; nothing was executed"
        except DamagedError as error:
            why = str(error)
        except (MemoryError, RolloutError):
            raise
        except Exception as error:  # a damaged pickle can fail anywhere, with any exception
            if is_of_the_machine(error):
                raise
            why = f"is truncated or not a SkyRL dump ({type(error).__name__})"
        else:
            return tensors, metadata if isinstance(metadata, Mapping) else {}
    raise RolloutError(f"{path}: {why}")


def _stand_in(name: str) -> Callable[..., Any] | None:
    """What SkyRL's own classes and functions become: a stand-in made anew for each; and torch's loader of bytes, our own."""
    if name.split(".")[0] in ("skyrl", "skyrl_train"):
        return StandIn
    return _storage if name == "torch.storage._load_from_bytes" else None


def _storage(data: Any) -> Any:
    """A storage that was saved with torch.save into bytes; torch's own loader would execute what they hold."""
    return unpickled_file(io.BytesIO(data))[0]


def _tensor(value: Any) -> Any:
    """SkyRL's own form of a tensor, bytes with shape and dtype, as a tensor; everything else as it is."""
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), bytes):
        return value
    if value.get("format") == "torch":
        return plain_data(*unpickled_file(io.BytesIO(value["data"])))
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind not in "biuf":
        raise DamagedError(f"holds a tensor of {dtype}")
    return torch.from_numpy(np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"]).copy())
