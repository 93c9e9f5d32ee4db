"""Plain rollouts as Parquet (format `aggcli-parquet`): the JSONL fields as columns, one row per sample, lists for tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.formats import Step

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS = 4096
"""Rows turned into Python objects at a time, which bounds the memory they take."""


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one file."""
    builder = BatchBuilder(name, reward_key=config.reward_key, group_size=config.group_size)
    rows = parquet_rows(step.path)
    while some_rows := [(None, row) for row in islice(rows, 64)]:
        builder.add_rows(some_rows)
    return builder.build()


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file as dicts, a few thousand in memory at a time."""
    try:
        with _opened(path) as file:
            for batch in file.iter_batches(ROWS):
                yield from batch.to_pylist()
    except OSError as error:  # Arrow's own errors while it reads a damaged file are OSErrors too
        raise RolloutError(f"{path}: cannot be read as Parquet ({error})") from None


def schema_of(path: Path) -> pa.Schema:
    """The columns of a Parquet file."""
    with _opened(path) as file:
        return file.schema_arrow


def column_names(path: Path) -> frozenset[str]:
    """The names of its columns."""
    return frozenset(schema_of(path).names)


def _opened(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise RolloutError(f"{path}: is not a whole Parquet file ({str(error).splitlines()[0]})") from None
