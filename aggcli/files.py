"""Files that are there whole or not at all, whatever ends the program while it writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

DRAFT = ".tmp"
"""How the name of a file ends while it is being written."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft beside `path`, to be written in the block; it takes the place of `path` in one step when the block ends well, and
    is removed when it does not.

    A reader sees the old file or the new one; a killed writer leaves the old one, and a draft that the next one replaces. Two
    processes that write the same file take turns: the lock of one that is killed goes with it. Raises the `OSError` of what
    cannot be written, under the name of `path`.
    """
    draft = path.with_name(path.name + DRAFT)
    try:
        with _locked(draft):
            try:
                yield draft
                draft.replace(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(draft), draft):  # somebody else's trouble
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error  # libraries put a paragraph there


@contextmanager
def _locked(draft: Path) -> Iterator[None]:
    """Around the writing of a draft: no other process has it meanwhile."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file that is open cannot be replaced anyway
        yield
        return
    while True:
        with draft.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, draft):  # not moved to its place, or removed, by whoever had it before
                yield
                return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
