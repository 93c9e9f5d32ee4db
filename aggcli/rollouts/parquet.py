"""Parquet as rows, and plain rollouts as Parquet (format `aggcli-parquet`): the JSONL fields as columns, one row per sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.files import opened
from aggcli.rollouts.known import FIELDS, Unread
from aggcli.rollouts.limits import ENTRIES, UNPACKED, limit, raised
from aggcli.rollouts.parquet_footer import ColumnSize, column_sizes
from aggcli.rollouts.steps import Step

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS = 4096
"""Most rows turned into Python objects at a time, which bounds the memory they take."""
VALUES = 2**18
"""Most entries of them, all columns together."""
BUFFER = 2**20
"""Bytes read of a column at a time, instead of all that a row group has of it."""


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one file."""
    builder = BatchBuilder(name, reward_key=config.reward_key, group_size=config.group_size)
    unread = Unread(name)
    rows = parquet_rows(step.path, FIELDS)
    at = 0
    others = [(column, is_empty) for column, is_empty in columns_of(step.path).items() if column not in FIELDS]
    while some_rows := [(None, row) for row in islice(rows, 64)]:
        if at == 0:
            unread.look([(None, {**some_rows[0][1], **{column: True for column, is_empty in others if not is_empty}})], at)
        builder.add_rows(some_rows)
        at += len(some_rows)
    builder.notes += unread.notes()
    return builder.build()


def parquet_rows(
    path: Path, wanted: Collection[str] | None = None, row_groups: Sequence[int] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file as dicts, some thousands in memory at a time; of the `wanted` columns that it has, or of all;
    row group after row group, in the order of `row_groups` where one is given.

    Raises `RolloutError` for a damaged file, and for one that stands for far more than its size.
    """
    with _opened(path) as (file, size, sizes):
        names = [name for name in dict.fromkeys(file.schema_arrow.names) if wanted is None or name in wanted]
        values = _check_size(path, sizes, names, size)
        rows = max(1, min(ROWS, VALUES * max(file.metadata.num_rows, 1) // max(values, 1)))
        for batch in file.iter_batches(rows, row_groups=row_groups, columns=names):
            batch.validate(full=True)
            columns = [_values(column) for column in batch.columns]
            yield from (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _values(column: Any) -> list[Any]:
    """A column as Python objects; those of a dictionary are made once, however often it is used."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    values = column.dictionary.to_pylist()
    return [None if at is None else values[at] for at in column.indices.to_pylist()]


def _check_size(path: Path, sizes: Sequence[ColumnSize], names: Collection[str], size: int) -> int:
    """Refuse a file whose columns of these names unpack to far more than it holds; the number of their values."""
    unpacked = sum(column.unpacked for column in sizes if column.name in names)
    values = sum(column.values for column in sizes if column.name in names)
    if unpacked > 10 * size + limit(UNPACKED) or values > 8 * size + limit(ENTRIES):
        raise RolloutError(f"{path}: its {size} bytes would unpack to {unpacked:.3g} and {values:.3g} entries; {raised()}")
    return values


def schema_of(path: Path) -> pa.Schema:
    """The columns of a Parquet file."""
    with _opened(path) as (file, *_):
        return file.schema_arrow


def rows_of(path: Path) -> int:
    """The number of its rows."""
    with _opened(path) as (file, *_):
        return file.metadata.num_rows


def rows_of_groups(path: Path) -> list[int]:
    """The number of rows of each of its row groups."""
    with _opened(path) as (file, *_):
        return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]


def columns_of(path: Path) -> dict[str, bool]:
    """The names of its columns, and whether each is known to be empty of values."""
    import pyarrow as pa

    return {field.name: pa.types.is_null(field.type) for field in schema_of(path)}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[pq.ParquetFile, int, Sequence[ColumnSize]]]:
    """The file, its size and those of its columns; whatever Arrow says of a damaged one, then or later, becomes one line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened(path) as handle:
        size = handle.seek(0, 2)
        handle.seek(0)
        try:
            sizes = column_sizes(handle)
            handle.seek(0)
            # Texts stay dictionaries where they are written so: one long text used by every row is then held once.
            with pq.ParquetFile(handle, pre_buffer=False) as plain:
                texts = [field.name for field in plain.schema_arrow if pa.types.is_string(field.type)]
            handle.seek(0)
            with pq.ParquetFile(handle, read_dictionary=texts, pre_buffer=False, buffer_size=BUFFER) as file:
                yield file, size, sizes
        except (MemoryError, RolloutError):
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise RolloutError(f"{path}: is not a whole Parquet file ({why})") from None
