"""The process that the processes of shares are forked from: it has imported what they need, and runs nothing.

This is the first module that it imports, so that it ends with the program that started it, whenever that is killed.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from types import FrameType

from aggcli.errors import DEBUG
from aggcli.lifeline import LAUNCHER, end_with, end_with_launcher

FOLDER = "AGGCLI_LAUNCHER_FOLDER"
"""Set, to the folder that holds the server's socket, in the environment that it is started with."""
SERVER = os.getpid()
"""The process id of the server, in the server and in what is forked from it."""


def end_with_server() -> None:
    """Tie a forked process to the server. Raises `SystemExit` where that has ended already."""
    if not end_with(os.getppid() if os.getpid() == SERVER else SERVER):
        raise SystemExit(1)


def _end(number: int, frame: FrameType | None) -> None:
    """On SIGTERM: by Linux where the parent has ended, or a thread of it; by others where it was meant for a whole group."""
    if os.getpid() == SERVER and os.getppid() != int(os.environ[LAUNCHER]):
        _leave()


def _leave() -> None:
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)  # a parent that was killed could not remove it
    os._exit(1)


def _say_nothing(*error: object) -> None:
    """A process that cannot even begin is told of by the one that wanted it, in one line."""


if FOLDER in os.environ:
    gc.disable()  # imports make nothing but what stays; whatever is forked from here enables it again
    signal.signal(signal.SIGTERM, _end)
    try:
        end_with_launcher(signal.SIGTERM)
    except SystemExit:
        _leave()
    if DEBUG not in os.environ:
        sys.excepthook = _say_nothing
