"""Every way a user can be told no, and the exit codes of the command line.

An error says what was given, what must hold and what to change, in one line.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    CHECK_FAILED = 1  # a layout changed the loss, a run diverged
    USER_INPUT = 2  # also what this program cannot do: a full disk, too little memory, a fault of its own
    INTERRUPTED = 130  # resumable


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35` where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class AggcliError(Exception):
    """Base of all errors meant for the user: shown as one line, without a traceback."""

    exit_code = ExitCode.USER_INPUT


class SettingError(AggcliError, ValueError):
    """A flag, a config key or a combination of them that cannot be used."""


class RolloutError(AggcliError, ValueError):
    """Rollout data that is missing, unreadable or contradicts itself."""


class RecordError(AggcliError, ValueError):
    """A results directory that cannot be written or read."""


class CheckFailed(AggcliError):
    """A check ran and failed; the numbers are right, the news is bad."""

    exit_code = ExitCode.CHECK_FAILED


# -- what ends a command -------------------------------------------------------------------------------------------------

FAULT = "this is a bug in aggcli"
"""Stands in the line of an exception that nobody foresaw, and in no other."""
DEBUG = "AGGCLI_DEBUG"
"""Set where tracebacks are wanted: by --debug, for this process and those that it starts."""
_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "bad_alloc", "Cannot allocate memory")


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Around work on something that has a name, such as `reading x.jsonl`: an exception that nobody foresaw is told with it."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, AggcliError):
            error.add_note(what)
        raise


def told(error: BaseException) -> tuple[int, str]:
    """Exit code and line of what ended a command or a part of it; an exception that nobody foresaw is a fault of this program,
    and told as such. No exit code of it is 1, which says that a check ran and failed."""
    if isinstance(error, AggcliError):
        return int(error.exit_code), str(error)
    while_ = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    if _is_memory(error):
        advice = "split the files, or use fewer rollouts, runs or ranks"
        return int(ExitCode.USER_INPUT), f"not enough memory{while_}: {_first_line(error)}; {advice}"
    if isinstance(error, OSError):
        return int(ExitCode.USER_INPUT), f"{error.filename or 'output'}: {error.strerror or error}"
    what = f"{type(error).__name__}: {_first_line(error)}{while_}"
    report = "please report it with the command and what it read; --debug shows where it happened"
    return int(ExitCode.USER_INPUT), f"{what}; {FAULT}: {report}"


def _first_line(error: BaseException) -> str:
    text = next(iter(str(error).splitlines()), "")
    return text if len(text) <= 300 else text[:300] + " ..."


def _is_memory(error: BaseException) -> bool:
    """Too little memory, also as torch says it: a RuntimeError, without a type of its own on the CPU."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY))


def print_traceback(error: BaseException) -> None:
    """Where it happened, on stderr, if --debug asks for it."""
    if os.environ.get(DEBUG) and sys.stderr is not None:
        import traceback

        with suppress(OSError, ValueError):
            traceback.print_exception(error)


# -- words for messages --------------------------------------------------------------------------------------------------


_HARMFUL = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """A text that a terminal only shows: what would act on it (escapes, bells, newlines, marks of direction) is spelled out."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char.encode("unicode_escape").decode() if unicodedata.category(char) in _HARMFUL else char for char in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {some(names, 12)}"


def some(items: Iterable[object], most: int = 5) -> str:
    """`3, 7, 9` or `3, 7, 9, 11, 12 and 40 more`: a list short enough for one line."""
    listed = list(items)
    text = ", ".join(str(item) for item in listed[:most])
    return text if len(listed) <= most else f"{text} and {len(listed) - most} more"
