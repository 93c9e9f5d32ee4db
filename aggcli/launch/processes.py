"""Shares in processes of this machine, each in one of its own, forked from a server that has imported what they need.

A process that is killed ends its own share and no other. It is multiprocessing's fork server, and not an executor of
`concurrent.futures`: that gives up every task when one process is killed, and cannot say which signal it was.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType, ModuleType
from typing import Any

from aggcli.errors import ExitCode, print_traceback, signal_name, told
from aggcli.interrupts import none_dropped
from aggcli.launch import Hear, Outcome, ShareFailed, Work
from aggcli.launch.server import FOLDER, end_with_server
from aggcli.lifeline import LAUNCHER

KILL_AFTER = 5.0
"""Seconds that processes have to end by themselves once they were told to end at once."""
AT_ONCE = signal.SIGUSR1
"""Has a share end where it stands; SIGTERM has it end where it can be gone on with. Ctrl-C is for the launcher alone."""
TURN = 0.2
"""Seconds after which the launcher looks whether it was told to stop."""
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20)}
"""Has glibc keep arrays of up to so many bytes on the heap, and so many freed bytes at its end, for what comes next: a share
that trains else gives them back in every step, and waits for pages of zeros again. Read where a process begins; no other C
library knows them."""


def can_fork_from_server() -> bool:
    """Whether this machine has fork servers."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def warm_up(modules: Sequence[str], *, keeps_freed: bool = False) -> None:
    """Start the server, which imports these modules while this process goes on with its own work; once is enough.
    `keeps_freed`: with `KEPT_MEMORY`, for shares of many small arrays; those of large ones would only hold more."""
    multiprocessing.set_forkserver_preload(["aggcli.launch.server", *modules])
    resource_tracker.ensure_running()  # which unblocks SIGINT, so it must come first
    path = os.pathsep.join(folder for folder in sys.path if folder)  # which the server of Python 3.11 is not told otherwise
    own = {LAUNCHER: str(os.getpid()), FOLDER: util.get_temp_dir(), "PYTHONPATH": path}
    own |= {name: value for name, value in KEPT_MEMORY.items() if keeps_freed and name not in os.environ}
    before = {name: os.environ.get(name) for name in own}
    os.environ |= own
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # stays blocked in the server: Ctrl-C would end its imports
    try:
        with _without_main():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for name, value in before.items():  # no other variable is touched: another thread may be reading or setting it
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A process that is started imports the main module of this one again: a script without a guard would run itself anew."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# -- at the launcher ----------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A share at work elsewhere. `outcome`: once it has said how it ended, or has ended without."""

    number: int
    name: str
    process: BaseProcess
    link: Connection
    outcome: Outcome | None = None
    is_told: bool = False

    def hear(self, hear: Hear) -> None:
        """Take one message."""
        try:
            kind, content = self.link.recv()
        except (EOFError, OSError):
            self.outcome = Outcome(self.number, error=self._lost())
            return
        if kind == "told":
            hear(self.number, content)
        elif kind == "done":
            self.outcome = Outcome(self.number, content)
        else:
            error = KeyboardInterrupt() if kind == "interrupted" else ShareFailed(*content)
            self.outcome = Outcome(self.number, error=error)

    def _lost(self) -> ShareFailed:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return ShareFailed(f"{self.name} (process {self.process.pid}) {how}; what was recorded is kept")

    def stop(self) -> None:
        """Have it end where it can be gone on with."""
        if not self.is_told:
            self.is_told = True
            with contextlib.suppress(OSError):  # it has ended
                self.link.send("stop")

    def end(self) -> None:
        """Have it end at once."""
        self.link.close()
        with contextlib.suppress(ProcessLookupError):
            if self.process.pid is not None and self.process.is_alive():
                os.kill(self.process.pid, AT_ONCE)

    def join(self, until: float) -> None:
        self.process.join(max(until - time.monotonic(), 0.0))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@dataclass
class Processes:
    """Processes of this machine, `workers` at a time. `modules`: what the shares import; `named`: what the only one is called
    where it is no share of a job."""

    workers: int
    modules: tuple[str, ...] = ()
    named: str = ""
    is_stopping: bool = field(default=False, init=False)
    is_elsewhere: bool = field(default=False, init=False)

    @property
    def slots(self) -> int:
        return self.workers

    def run(self, work: Work, shares: Sequence[Any], hear: Hear) -> Iterator[Outcome]:
        warm_up(self.modules)
        waiting = deque(range(len(shares)))
        running: dict[int, _Running] = {}
        ended: dict[int, Outcome] = {}
        try:
            for number in range(len(shares)):
                while number not in ended:
                    while waiting and len(running) < self.workers and waiting[0] <= number + self.workers:
                        at = waiting.popleft()
                        if self.is_stopping:
                            ended[at] = Outcome(at, error=KeyboardInterrupt())
                        else:
                            running[at] = self._started(at, work, shares[at])
                    self._hear(running, hear)
                    for at in [at for at, one in running.items() if one.outcome is not None]:
                        one = running.pop(at)
                        one.link.close()
                        one.join(time.monotonic() + KILL_AFTER)
                        assert one.outcome is not None
                        ended[at] = one.outcome
                        if isinstance(one.outcome.error, Exception) and (running or waiting):
                            hear(at, one.outcome.error)
                yield ended.pop(number)
        finally:
            for one in running.values():
                one.end()
            until = time.monotonic() + KILL_AFTER
            for one in running.values():
                one.join(until)

    def stop(self) -> None:
        self.is_stopping = True

    def close(self) -> None:
        """The server stays, for whoever comes next; it ends with this process."""

    def _started(self, number: int, work: Work, share: Any) -> _Running:
        near, far = multiprocessing.Pipe()
        threads = max(1, cores() // self.workers) if self.workers > 1 else 0
        given = (far, dict(os.environ), threads, pickle.dumps((work, share)))
        process = multiprocessing.get_context("forkserver").Process(target=_work, args=given, daemon=True)
        with _without_main():
            process.start()
        far.close()
        return _Running(number, self.named or f"share {number + 1}", process, near)

    def _hear(self, running: dict[int, _Running], hear: Hear) -> None:
        """Take what the shares have said within a turn."""
        if self.is_stopping:
            for one in running.values():
                one.stop()
        by_link: dict[Any, _Running] = {one.link: one for one in running.values()}
        for link in connection.wait(list(by_link), TURN) if by_link else ():
            by_link[link].hear(hear)


def cores() -> int:
    """How many threads torch takes by default: OMP_NUM_THREADS, else the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else os.cpu_count() or 1


# -- in the process of a share ------------------------------------------------------------------------------------------


class _Far:
    """The link of a share that runs in a process of its own."""

    def __init__(self, link: Connection) -> None:
        self._link, self._is_asked = link, False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(AT_ONCE, lambda number, frame: self.end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    @property
    def is_stopping(self) -> bool:
        self._is_asked = self._is_asked or self._link.poll()
        return self._is_asked

    def tell(self, message: Any) -> None:
        self.say("told", message)

    def say(self, kind: str, content: Any) -> None:
        """Say something to the launcher; one that has gone has the share end."""
        try:
            self._link.send((kind, content))
        except OSError:
            raise KeyboardInterrupt from None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            self.end()
        self._is_asked = True

    def end(self) -> None:
        """End at once: what is told to it from now on is no news."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(AT_ONCE, signal.SIG_IGN)
        raise KeyboardInterrupt


def _work(link: Connection, environment: dict[str, str], threads: int, given: bytes) -> None:
    """The whole life of the process of a share."""
    gc.freeze()  # what the server has imported stays
    gc.enable()
    code = int(ExitCode.INTERRUPTED)
    far = _Far(link)
    try:
        with none_dropped(far.end):
            os.environ.clear()
            os.environ |= {**environment, LAUNCHER: str(os.getppid())}
            end_with_server()
            import torch

            if threads:  # else as many as torch takes by itself
                torch.set_num_threads(threads)
            work, share = pickle.loads(given)
            far.say("done", work(share, far))
        code = int(ExitCode.DONE)
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            far.say("interrupted", None)
    except BaseException as error:
        print_traceback(error)
        code, text = told(error)
        with contextlib.suppress(KeyboardInterrupt):
            far.say("failed", (text, code))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
