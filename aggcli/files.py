"""Files and folders that are there whole or not at all, whatever ends the program while it writes them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRAFT = ".tmp"
"""How the name of a file ends while it is being written."""
NEW, OLD = "new", "old"
"""What a scratch folder holds: what is being written, and what it takes the place of."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft beside `path`, to be written in the block; it takes the place of `path` in one step when the block ends well, and
    is removed when it does not. A link that has the draft's name is removed, and never written through.

    A SIGTERM that would end the process at once, as a launcher ends its ranks, does so when the file is in its place. A reader
    sees the old file or the new one; a killed writer leaves the old one, and a draft that the next one replaces. Two
    processes that write the same file take turns: the lock of one that is killed goes with it. Raises the `OSError` of what
    cannot be written, under the name of `path`.
    """
    draft = path.with_name(path.name + DRAFT)
    try:
        ending = [signal.SIGTERM] if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else []  # nobody handles it
        with _held_back(*ending), _locked(draft):
            try:
                yield draft
                draft.replace(path)
            except BaseException:
                with _held_back(signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C, while the first is seen to
                    draft.unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(draft), draft):  # somebody else's trouble
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error  # libraries put a paragraph there


@contextmanager
def _held_back(*numbers: int) -> Iterator[None]:
    """Hold back these signals until the block is left, where this thread is the one that handles them."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    handled = [number for number in numbers if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def _locked(draft: Path) -> Iterator[None]:
    """Around the writing of a draft: no other process has it meanwhile."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file that is open cannot be replaced anyway
        yield
        return
    while True:
        if draft.is_symlink():
            draft.unlink(missing_ok=True)
        with draft.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file.fileno(), draft):  # not moved to its place, or removed, by whoever had it before
                yield
                return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path`, empty, from whose subfolders `NEW` and `OLD` things are moved to and from `path` in one
    step; removed when the block ends, however it does.

    One that a killed process left is taken over; two processes with the same `path` take turns. Raises `FileExistsError` where
    something else has its name.
    """
    folder = path.with_name(f".{path.name}{DRAFT}")
    with _locked_folder(folder):
        if folder.is_symlink() or not set(os.listdir(folder)) <= {NEW, OLD}:
            raise FileExistsError(errno.EEXIST, f"{folder.name} beside it holds something else: move that away", str(path))
        try:
            for left in folder.iterdir():
                shutil.rmtree(left)
            yield folder
        finally:
            with _held_back(signal.SIGINT, signal.SIGTERM):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows, where a folder cannot be opened
        folder.mkdir(exist_ok=True)
        yield
        return
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # removed by whoever had it before
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, folder):
                yield
                return
        finally:
            os.close(descriptor)
