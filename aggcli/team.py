"""Processes that share the runs of a stack on one machine: forked from this one, and in step with it by small messages.

Ranks (`aggcli.world`) share one run and add up its gradient; the members of a team have runs of their own and exchange only
what all must agree on: whether to stop, and what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar

from aggcli.errors import AggcliError, ExitCode, print_traceback, signal_name, told
from aggcli.lifeline import end_with

Result = TypeVar("Result")


class MemberFailed(AggcliError):
    """A member of the team ended without finishing. `exit_code` is its own where it said no in an orderly way."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Left(Exception):
    """The root went away: it says why, so a member ends without a word."""


KILL_AFTER = 5.0
"""Seconds that members have to end by themselves once the root is done with them."""


@dataclass(frozen=True)
class Team:
    """This process as a member of a team; member 0, the root, is the process that forked the others.

    `links`: the root's connections to members 1, 2, ..., or a member's connection to the root; `pids`: of members 1, 2, ...
    """

    rank: int = 0
    size: int = 1
    links: tuple[Connection, ...] = ()
    pids: tuple[int, ...] = ()

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:
        """Every member's item, in order, at the root; an empty list elsewhere. Every member must call it.

        Raises `MemberFailed` at the root when a member has ended, with its reason.
        """
        if self.is_root:
            return [item, *(self._received(member) for member in range(1, self.size))]
        self._send(self.links[0], ("item", item))
        return []

    def everyone(self, item: Any) -> list[Any]:
        """Every member's item, in order, on every member. Every member must call it."""
        items = self.gather(item)
        if not self.is_root:
            return self._received_from_root()
        for link in self.links:
            self._send(link, ("item", items))
        return items

    def dismiss(self, *, interrupted: bool) -> None:
        """Let the members go: one that still waits for an answer ends as interrupted, or without a word."""
        for link in self.links:
            if interrupted:
                self._send(link, ("interrupted", None))
            link.close()

    def _received(self, member: int) -> Any:
        try:
            kind, content = pickle.loads(self.links[member - 1].recv_bytes())
        except (EOFError, OSError):
            raise self._lost(member) from None
        if kind == "failed":
            raise MemberFailed(*content)
        if kind == "interrupted":
            raise KeyboardInterrupt
        return content

    def _received_from_root(self) -> Any:
        try:
            kind, content = pickle.loads(self.links[0].recv_bytes())
        except (EOFError, OSError):
            raise _Left from None
        if kind == "interrupted":
            raise KeyboardInterrupt
        return content

    def _send(self, link: Connection, message: Any) -> None:
        with contextlib.suppress(OSError):  # who has gone is noticed where its answer is waited for
            link.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _lost(self, member: int) -> MemberFailed:
        pid = self.pids[member - 1]
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return MemberFailed(
            f"process {member} (pid {pid}), which trained a share of the runs, {how}; what was recorded is kept",
            ExitCode.CHECK_FAILED,
        )


ALONE = Team()
"""A team of one."""


def can_fork() -> bool:
    """Whether teams of several processes are made here: forking a process that holds torch is only safe on Linux."""
    return sys.platform == "linux"


def together(size: int, work: Callable[[Team], Result]) -> list[Result]:
    """`work(team)` in `size` processes, this one being the root; what each returned, in order.

    The others are forked here, so they have all that this process has, and end with it. `work` must run torch on one thread
    in them. Raises `MemberFailed`, and whatever `work` raises in this process.
    """
    if size == 1:
        return [work(ALONE)]
    root, links, pids = os.getpid(), list[Connection](), list[int]()
    _flush()
    interrupted = False
    try:
        for rank in range(1, size):
            near, far = Pipe()
            pid = _fork()
            if pid == 0:  # the member
                _member(Team(rank, size, (far,)), work, root, [*links, near])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            far.close()
            links.append(near)
            pids.append(pid)
        team = Team(0, size, tuple(links), tuple(pids))
        return team.gather(work(team))
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        Team(0, size, tuple(links)).dismiss(interrupted=interrupted)
        _reap(pids)


def _fork() -> int:
    """Fork with SIGINT blocked, so that a member is never interrupted before it can end by its own rules."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: idle ones of the linear algebra library
        return os.fork()


def _flush() -> None:
    """Empty the buffers of the standard streams; one that is closed or full has nothing to say."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _reap(pids: Sequence[int]) -> None:
    """Wait for the members, and end those that do not end by themselves."""
    until, waiting = time.monotonic() + KILL_AFTER, list(pids)
    while waiting:
        for pid in list(waiting):
            try:
                ended = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:  # seen already
                ended = True
            if ended:
                waiting.remove(pid)
            elif time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005 if waiting else 0)


def _member(team: Team, work: Callable[[Team], Any], root: int, others: Sequence[Connection]) -> NoReturn:
    """The whole life of a forked member; it never returns into the code that forked it. `others`: the root's connections."""
    code = int(ExitCode.INTERRUPTED)
    try:
        try:
            for link in others:
                link.close()
            if not end_with(root):
                raise _Left
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            team.gather(work(team))
            code = int(ExitCode.DONE)
        except KeyboardInterrupt:
            team._send(team.links[0], ("interrupted", None))
        except _Left:
            pass
        except BaseException as error:
            print_traceback(error)
            code, text = told(error)
            team._send(team.links[0], ("failed", (text, code)))
    finally:
        try:
            _flush()
        finally:
            os._exit(code)
