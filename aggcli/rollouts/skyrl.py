"""SkyRL's dumped batches (`trainer.dump_data_batch`): a pickled TensorBatch of [B, T] tensors, read only with --unsafe-load.

A pickle names functions to call. Even when asked for, only those that rebuild plain data and tensors are: SkyRL's own
classes are replaced by empty stand-ins, tensors inside are loaded as data only, and anything else is refused by name.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.formats import Step
from aggcli.rollouts.sequences import Response, Sequences

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
    ids_BU = _matrix(tensors, "sequences", step.path, attention_BU.shape)
    streams = {o: _matrix(tensors, t, step.path, mask_BT.shape) for t, o in STREAMS.items() if tensors.get(t) is not None}
    rewards = tensors.get("rewards")
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
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except _RefusedError as error:
        raise RolloutError(
            f"{path}: refused: it holds {error}, which is neither plain data nor SkyRL's; nothing was executed"
        ) from None
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged pickle can fail anywhere, with any exception
        raise RolloutError(f"{path}: is truncated or not a SkyRL dump ({type(error).__name__})") from None
    state = found.state if isinstance(found, _StandIn) else found
    if not isinstance(state, Mapping):
        raise RolloutError(f"{path}: is a pickled {type(found).__name__}, not a SkyRL batch")
    batch, metadata = state.get("batch_dict", state), state.get("metadata")
    return {key: _tensor(value) for key, value in batch.items()}, metadata if isinstance(metadata, Mapping) else {}


def _tensor(value: Any) -> Any:
    """SkyRL's own form of a tensor, bytes with shape and dtype, as a tensor; everything else as it is."""
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), bytes):
        return value
    if value.get("format") == "torch":
        return _load_tensor(value["data"])
    return torch.from_numpy(np.frombuffer(value["data"], dtype=np.dtype(str(value["dtype"]))).reshape(value["shape"]).copy())


class _RefusedError(pickle.UnpicklingError):
    """Names what the pickle would have called."""


class _StandIn(dict):
    """Stands in for every class and function of SkyRL: keeps the state it is given, and does nothing."""

    def __init__(self, *arguments: object, **_: object) -> None:
        super().__init__()
        states = [argument for argument in arguments if isinstance(argument, Mapping)]
        self.state: object = states[-1] if states else self

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, Mapping) and "batch_dict" in state else self

    def __new__(cls, *_: object, **__: object) -> _StandIn:
        made = super().__new__(cls)
        made.state = made
        return made


def _load_tensor(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "device"): torch.device,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _load_tensor,  # torch's own would execute what the bytes hold
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module.split(".")[0] in ("skyrl", "skyrl_train") and "." not in name:
            return _StandIn
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise _RefusedError(f"{module}.{name}")
