"""Processes that end with the one that started them, killed ones included: one left alone would go on writing records."""

from __future__ import annotations

import os
import signal
import sys

LAUNCHER = "AGGCLI_LAUNCHER"
"""Set, to the process id of the launcher, in every process that this program starts to do a part of its work."""


def started_here() -> bool:
    """Whether a process of this program started this one."""
    return LAUNCHER in os.environ


def end_with(parent: int, number: int = signal.SIGKILL) -> bool:
    """Have Linux end this process, by this signal, when its parent ends; False where the parent has ended already. Elsewhere
    nothing is tied."""
    if sys.platform != "linux":
        return True
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def end_with_launcher(number: int = signal.SIGKILL) -> None:
    """Tie this process to the launcher that started it, if one did; for the first line that it runs, since a launcher may be
    killed in the seconds that it takes to import torch. Raises `SystemExit` where the launcher is gone already.
    """
    launcher = os.environ.get(LAUNCHER, "")
    if launcher.isdecimal() and not end_with(int(launcher), number):
        raise SystemExit(1)
