"""How many values the columns of a Parquet file hold, from its footer, before anything of them is read.

Arrow's own way to ask for it ends the process where the footer is damaged in certain ways. The footer is a struct in Thrift's
compact protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md, and parquet.thrift).
"""

from __future__ import annotations

import io
import struct
from typing import BinaryIO, NamedTuple

DEPTH = 32


class ColumnSize(NamedTuple):
    """A column of a row group: the name of the whole column, its values (entries of lists too), its bytes unpacked."""

    name: str
    values: int
    unpacked: int


def column_sizes(file: BinaryIO) -> list[ColumnSize]:
    """The columns of all row groups of an open Parquet file; raises ValueError for a damaged footer."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(end - 8, 0))
    tail = file.read(8)
    if len(tail) < 8 or tail[4:] != b"PAR1":
        raise ValueError("it has no footer")
    (length,) = struct.unpack("<I", tail[:4])
    if length > end - 12:
        raise ValueError("its footer is longer than the file")
    file.seek(end - 8 - length)
    footer = _Compact(file.read(length)).struct(0)
    found = []
    for group in _listed(footer.get(4)):
        for chunk in _listed(group.get(1)):
            about = chunk.get(3)
            path = about.get(3) if isinstance(about, dict) else None
            if not isinstance(about, dict) or not isinstance(path, list) or not path or not isinstance(path[0], bytes):
                raise ValueError("its footer describes a column without a name")
            numbers = [about.get(at) for at in (5, 6)]
            if not all(isinstance(number, int) for number in numbers):
                raise ValueError("its footer describes a column without a size")
            found.append(ColumnSize(path[0].decode(errors="replace"), *(max(int(number or 0), 0) for number in numbers)))
    return found


def _listed(value: object) -> list[dict[int, object]]:
    """A list of structs; raises ValueError for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("its footer describes no columns")
    return value


class _Compact:
    """A reader of Thrift's compact protocol: structs as dicts by field number."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self, depth: int) -> dict[int, object]:
        if depth > DEPTH:
            raise ValueError("its footer is nested too deeply")
        fields: dict[int, object] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._signed()
            fields[field] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> object:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._number())
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._number()
            return [self._element(head & 15, depth) for _ in range(self._possible(count))]
        if kind == 11:
            count = self._possible(self._number())
            kinds = self._byte() if count else 0
            return [(self._element(kinds >> 4, depth), self._element(kinds & 15, depth)) for _ in range(count)]
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError("its footer holds a value of no known type")

    def _element(self, kind: int, depth: int) -> object:
        return self._byte() == 1 if kind in (1, 2) else self._value(kind, depth + 1)

    def _possible(self, count: int) -> int:
        if count > len(self._data) - self._at:  # each entry takes a byte or more
            raise ValueError("its footer is damaged")
        return count

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        found = self._data[self._at : self._at + self._possible(count)]
        self._at += count
        return found

    def _number(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("its footer holds a number that is too long")

    def _signed(self) -> int:
        value = self._number()
        return (value >> 1) ^ -(value & 1)
