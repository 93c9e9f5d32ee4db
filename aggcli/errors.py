"""Every way a user can be told no, and the exit codes of the command line.

An error says what was given, what must hold and what to change, in one line.
"""

from __future__ import annotations

import difflib
import signal
import unicodedata
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    CHECK_FAILED = 1  # a layout changed the loss, a run diverged
    USER_INPUT = 2
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
