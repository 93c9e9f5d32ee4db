"""Batches out again: as our own JSONL or Parquet, which read back to the very same numbers, or as slime's rollout dumps.

Files are written beside their place and moved there when whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from aggcli.errors import RolloutError, some
from aggcli.files import NEW, OLD, scratch_folder, whole_file
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch

FIELD_NAMES = {
    "log_probs_T": "log_probs",
    "old_log_probs_T": "old_log_probs",
    "ref_log_probs_T": "ref_log_probs",
    "rollout_log_probs_T": "rollout_log_probs",
    "entropy_T": "entropy",
    "advantages_T": "advantage",
}
"""Field of the batch -> field of a sample."""
SAMPLES = 4096
"""Samples turned into Python objects at a time, which bounds the memory they take."""
INFINITE = {math.inf: "1e999", -math.inf: "-1e999"}
"""Infinity, which stands only under a mask, as a JSON number that reads back as infinity."""


# -- samples --------------------------------------------------------------------------------------------------------


def samples_of(batch: RolloutBatch) -> Iterator[dict[str, Any]]:
    """The batch's samples in the canonical fields, plain Python; what a sample does not have is left out.

    Null stands for NaN. A loss mask of all ones is left out, as it is the default.
    """
    own = batch.rollout_S == torch.arange(batch.num_samples)
    has_rollouts = bool(batch.labels.rollouts) or not bool(own.all())  # else each sample is its own rollout
    for start in range(0, batch.num_samples, SAMPLES):
        chosen = torch.arange(start, min(start + SAMPLES, batch.num_samples))
        yield from _samples(batch.select(chosen), has_rollouts)


def _samples(batch: RolloutBatch, has_rollouts: bool) -> Iterator[dict[str, Any]]:
    lists: dict[str, list[Any]] = {FIELD_NAMES[field]: value_T.tolist() for field, value_T in batch.token_fields.items()}
    lists["loss_mask"] = batch.loss_mask_T.long().tolist()
    ids = None if batch.token_ids_U is None else batch.token_ids_U.tolist()
    lengths, totals = batch.response_length_S.tolist(), batch.total_length_S.tolist()
    rewards: list[float] = [math.nan] * len(lengths) if batch.reward_S is None else batch.reward_S.tolist()
    at_T = at_U = 0
    for i, (length, total) in enumerate(zip(lengths, totals, strict=True)):
        sample: dict[str, Any] = {
            "group_index": _label(batch.labels.groups, int(batch.group_S[i])),
            "rollout_id": _label(batch.labels.rollouts, int(batch.rollout_S[i])) if has_rollouts else None,
            "response_length": length,
            "total_length": total,
            "reward": None if math.isnan(rewards[i]) else rewards[i],
            "status": batch.status_S[i] if batch.status_S else None,
            "length_unit": None if batch.length_unit == "tokens" else batch.length_unit,
            "tokens": None if ids is None else ids[at_U : at_U + total],
            **{field: values[at_T : at_T + length] for field, values in lists.items()},
        }
        if 0 not in sample["loss_mask"]:
            del sample["loss_mask"]
        at_T, at_U = at_T + length, at_U + total
        yield {field: value for field, value in sample.items() if value is not None}


def _label(labels: tuple[object, ...], dense: int) -> object:
    if dense == NO_GROUP:
        return None
    return labels[dense] if labels else dense


# -- formats --------------------------------------------------------------------------------------------------------


def write_jsonl(batch: RolloutBatch, path: Path) -> None:
    """One sample a line; strict JSON."""
    with path.open("wb") as file:
        for sample in samples_of(batch):
            file.write(orjson.dumps({field: _json_safe(value) for field, value in sample.items()}) + b"\n")


def _json_safe(value: Any) -> Any:
    """What orjson cannot write, written out: infinities (it would write null), ids beyond 64 bits, broken texts."""
    if (isinstance(value, int) and not -(2**63) <= value < 2**63) or (isinstance(value, str) and not value.isascii()):
        return orjson.Fragment(json.dumps(value).encode())
    if not isinstance(value, list) or not (math.inf in value or -math.inf in value):
        return value
    numbers = [INFINITE.get(number) or ("null" if math.isnan(number) else repr(number)) for number in value]
    return orjson.Fragment(f"[{','.join(numbers)}]".encode())


def write_parquet(batch: RolloutBatch, path: Path) -> None:
    """One row a sample; the columns are the fields that any sample has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(batch)
    rows = samples_of(batch)
    with pq.ParquetWriter(path, schema) as writer:
        while chunk := [row for row, _ in zip(rows, range(SAMPLES), strict=False)]:
            writer.write_table(pa.Table.from_pylist([_writable(row) for row in chunk], schema))


def _writable(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose status is UTF-8, whatever it holds."""
    status = row.get("status")
    return row if status is None or _is_unicode(status) else row | {"status": status.encode(errors="backslashreplace").decode()}


def _schema(batch: RolloutBatch) -> Any:
    import pyarrow as pa

    numbers = pa.list_(pa.float64())
    fields = {
        "group_index": _id_type("group_index", batch.labels.groups),
        "rollout_id": _id_type("rollout_id", batch.labels.rollouts),
        "response_length": pa.int64(),
        "total_length": pa.int64(),
        "loss_mask": pa.list_(pa.int8()),
        "reward": pa.float64(),
        "status": pa.string(),
        "length_unit": pa.string(),
        "tokens": pa.list_(pa.int64()),
    }
    fields |= {FIELD_NAMES[field]: numbers for field in batch.token_fields}
    return pa.schema(list(fields.items()))


def _id_type(field: str, labels: Iterable[object]) -> Any:
    import pyarrow as pa

    kinds = {type(label) for label in labels}
    if kinds == {str} and all(str(label).isascii() or _is_unicode(str(label)) for label in labels):
        return pa.string()
    if kinds <= {int} and all(-(2**63) <= label < 2**63 for label in labels):  # pyright: ignore[reportOperatorIssue]
        return pa.int64()
    raise RolloutError(
        f"{field} mixes whole numbers and texts, or has too large or broken ones: write .jsonl, which holds any id"
    )


def _is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_slime(batch: RolloutBatch, path: Path) -> None:
    """slime's rollout dump; it has no place for the fields that `lost` names."""
    kept = ("group_index", "rollout_id", "response_length", "loss_mask", "reward", "status", "tokens", "rollout_log_probs")
    samples = []
    for index, sample in enumerate(samples_of(batch)):
        fields = {field: sample.get(field) for field in kept}
        more = {} if "tokens" in sample else {"total_length": sample["total_length"]}
        samples.append({"index": index, **fields, **more})
    digits = path.name.split(".")[0]
    with path.open("wb") as file:  # by name, torch would say of a full disk that something of its own failed
        torch.save({"rollout_id": int(digits) if digits.isdecimal() else 0, "samples": samples}, file)


@dataclass(frozen=True)
class Target:
    """A format that is written: its file extension, its writer, and the batch's fields that it has no place for."""

    extension: str
    write: Callable[[RolloutBatch, Path], None]
    lacks: tuple[str, ...] = ()


TARGETS = {
    "jsonl": Target(".jsonl", write_jsonl),
    "parquet": Target(".parquet", write_parquet),
    "slime": Target(".pt", write_slime, tuple(name for name in FIELD_NAMES if name != "rollout_log_probs_T")),
}


def lost(batch: RolloutBatch, target: Target) -> list[str]:
    """Notes on what of the batch the target cannot hold."""
    fields = [FIELD_NAMES[field] for field in batch.token_fields if field in target.lacks]
    notes = [f"{some(fields)}: no place for it in this format, left out"] if fields else []
    if batch.recorded is not None:
        notes.append("the recorded layout has no place in this format and is left out")
    if target.lacks and batch.token_ids_U is None:
        notes.append("the rollouts hold no token ids: slime itself needs them, aggcli reads the file without")
    if target.lacks and batch.length_unit != "tokens":
        notes.append(f"lengths are in {batch.length_unit}, which this format cannot say")
    return notes


# -- places ---------------------------------------------------------------------------------------------------------


@contextmanager
def one_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """A path to write to, moved to `path` when the block ends well; refused where something is there already."""
    if path.is_dir() or (path.exists() and not overwrite):
        hint = "it is a folder" if path.is_dir() else "it exists already; replace it with --overwrite"
        raise RolloutError(f"{path}: {hint}")
    with _writing(path), whole_file(path) as draft:
        yield draft


@contextmanager
def whole_folder(path: Path, extension: str, overwrite: bool) -> Iterator[Path]:
    """A folder to write `0.jsonl`, `1.jsonl`, ... to, moved to `path` when the block ends well.

    With `overwrite` an earlier folder of that kind is replaced as a whole, so that old and new steps never mix; a folder
    that holds anything else is refused.
    """
    if path.exists() and not path.is_dir():
        raise RolloutError(f"{path}: is a file; several steps need a folder")
    there = sorted(path.iterdir()) if path.is_dir() else []
    foreign = [file.name for file in there if file.suffix != extension or not file.stem.isdecimal()]
    if foreign:
        raise RolloutError(f"{path}: holds other files ({some(foreign)}); give a new folder")
    if there and not overwrite:
        raise RolloutError(f"{path}: holds steps already ({some(file.name for file in there)}); replace them with --overwrite")
    with _writing(path), scratch_folder(path) as folder:
        made = folder / NEW
        made.mkdir()
        yield made
        if path.is_dir():
            os.replace(path, folder / OLD)
        os.replace(made, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RolloutError(f"{path}: cannot be written ({error.strerror or error})") from error
