"""Files of torch.save, in either of its formats, as plain data.

The newer format is a zip archive: a pickle, and a member of raw bytes for each storage. Stored members are mapped, not
read; compressed ones are unpacked, as torch.load does, within a limit. Nothing in a file is ever executed.
"""

from __future__ import annotations

import io
import mmap
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from aggcli.errors import RolloutError
from aggcli.rollouts.files import is_of_the_machine, opened
from aggcli.rollouts.limits import UNPACKED, limit, raised
from aggcli.rollouts.pickled import DamagedError, RefusedError, Storage, plain_data
from aggcli.rollouts.unpickling import Bounded, Unpickler, legacy_storages

ZIP = b"PK\x03\x04"
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9"
"""How a file of torch.save in its older format begins: a pickle of torch's magic number."""
ADVICE = "only plain data (dicts, lists, numbers, texts, tensors) is loaded, nothing in a dump is executed"


def load(path: Path) -> Any:
    """The file's content as dicts, lists, numbers, texts, numpy arrays and dense tensors, whatever device it was saved from.

    Raises `RolloutError` for anything else in it, unexecuted; for a damaged file; and for one that unpacks to far more than
    its size.
    """
    with opened(path) as file:
        try:
            return plain_data(*unpickled_file(file))
        except RefusedError as error:
            why, advice = f"it holds {error}, which is not plain data", "; write the dump again as plain data"
        except DamagedError as error:
            why, advice = str(error), ""
        except (MemoryError, RolloutError):
            raise
        except Exception as error:  # a damaged file can fail anywhere in the zip archive or the pickle, with any exception
            if is_of_the_machine(error):
                raise
            why, advice = "it is truncated or not a torch file", "; write the dump again as plain data"
    raise RolloutError(f"{path}: refused: {why}; {ADVICE}{advice}") from None


def unpickled_file(file: BinaryIO) -> tuple[Any, int]:
    """The content of an open torch file, not yet made plain, and the number of bytes that hold it; see `load`."""
    head = file.read(len(LEGACY))
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if head.startswith(ZIP):
        return _from_zip(file, size)
    if head == LEGACY:
        return _from_pickles(Bounded(file, size)), size
    if head.startswith(b"\x80"):
        plain_data(Unpickler(Bounded(file, size)).load(), size)  # names what it holds, if that is not plain data
        raise DamagedError("it is a plain pickle, not a file of torch.save: save it with torch.save")
    raise DamagedError("it is truncated or not a torch file")


# -- the newer format -----------------------------------------------------------------------------------------------------


def _from_zip(file: BinaryIO, size: int) -> tuple[Any, int]:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        unpacked = sum(member.file_size for member in members.values())
        if unpacked > 10 * size + limit(UNPACKED):
            raise DamagedError(f"its {size} bytes would unpack to {unpacked:.3g}; {raised()}")
        root = next(name for name in members if name.endswith("data.pkl")).removesuffix("data.pkl")
        if f"{root}byteorder" in members and archive.read(f"{root}byteorder") == b"big":
            raise DamagedError("it was written on a machine of the other byte order; save it on one like this")
        storages: dict[str, Storage] = {}

        def storage(key: str, kind: str, elements: int) -> Storage:
            if key not in storages:
                storages[key] = Storage(kind, elements, _bytes(file, archive, members[f"{root}data/{key}"]))
            found = storages[key]
            return found if found.kind == kind else Storage(kind, elements, found.data)

        data = io.BytesIO(archive.read(f"{root}data.pkl"))
        return Unpickler(data, storage).load(), max(size, unpacked)


def _bytes(file: BinaryIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    """A member's bytes: mapped where they are stored as they are, else unpacked, which checks their sum."""
    if member.compress_type != zipfile.ZIP_STORED or not _has_descriptor(file) or not member.file_size:
        return bytearray(archive.read(member))
    if member.flag_bits & 1 or member.file_size != member.compress_size:
        raise DamagedError("one of its members contradicts the archive's list")
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != ZIP:
        raise DamagedError("one of its members is not where the archive's list says")
    name, extra = struct.unpack("<HH", header[26:30])
    start = member.header_offset + 30 + name + extra
    page = start - start % mmap.ALLOCATIONGRANULARITY
    end = start + member.file_size
    if end > file.seek(0, io.SEEK_END):
        raise DamagedError("it is truncated or not a torch file")
    mapped = mmap.mmap(file.fileno(), end - page, access=mmap.ACCESS_COPY, offset=page)
    return memoryview(mapped)[start - page :]


def _has_descriptor(file: BinaryIO) -> bool:
    try:
        file.fileno()
    except OSError:  # content kept in memory
        return False
    return True


# -- the older format -----------------------------------------------------------------------------------------------------


def _from_pickles(file: Bounded) -> Any:
    storages: dict[str, Storage] = {}

    def storage(key: str, kind: str, elements: int) -> Storage:
        return storages.setdefault(key, Storage(kind, elements))

    for _ in range(3):  # the magic number, the version, the system it was written on
        Unpickler(file).load()
    root = Unpickler(file, storage).load()
    legacy_storages(file, storages, Unpickler(file).load())
    return root


def head_words(path: Path, most: int) -> list[object]:
    """The values of the first opcodes of a newer file's pickle, which are only decoded; none where that cannot be done."""
    words: list[object] = []
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            inside = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
            with archive.open(inside) as pickled:
                for (op, value, _), _ in zip(pickletools.genops(pickled), range(most), strict=False):
                    if op.name not in ("PROTO", "MARK", "EMPTY_DICT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                        words.append(value)
    except Exception:  # not a zip, or damaged: the full load has the message
        return []
    return words
