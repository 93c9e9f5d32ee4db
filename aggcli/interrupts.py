"""Interrupts that arrive where Python drops what is raised."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AGAIN_AFTER = 0.01
"""Seconds until an interrupt that was dropped comes again."""


@contextmanager
def none_dropped(again: Callable[[], None]) -> Iterator[None]:
    """Around the work of a program, in its main thread: where a signal's handler raises `KeyboardInterrupt` in a finaliser or
    in the callback of a weak reference (imports have both), Python prints it and goes on; here nothing is printed, and `again`,
    which raises it anew, is called in the main thread a moment later. In other threads, and on systems without interval timers,
    nothing is changed.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    shown, handled = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def note(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            shown(dropped)
            return
        signal.signal(signal.SIGALRM, lambda number, frame: again())
        signal.setitimer(signal.ITIMER_REAL, AGAIN_AFTER)

    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = shown
        if signal.getsignal(signal.SIGALRM) is not handled:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handled)
