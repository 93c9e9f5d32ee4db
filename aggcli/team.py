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
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar

from aggcli.errors import AggcliError, ExitCode

Result = TypeVar("Result")


class MemberFailed(AggcliError):
    """A member of the team ended without finishing. `exit_code` is its own where it said no in an orderly way."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Left(Exception):
    """The root went away: it says why, so a member ends without a word."""


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
            self._send(link, items)
        return items

    def _received(self, member: int) -> Any:
        try:
            kind, content = pickle.loads(self.links[member - 1].recv_bytes())
        except (EOFError, OSError):
            raise self._lost(member) from None
        if kind == "failed":
            raise MemberFailed(*content)
        return content

    def _received_from_root(self) -> Any:
        try:
            return pickle.loads(self.links[0].recv_bytes())
        except (EOFError, OSError):
            raise _Left from None

    def _send(self, link: Connection, message: Any) -> None:
        with contextlib.suppress(OSError):  # who has gone is noticed where its answer is waited for
            link.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _lost(self, member: int) -> MemberFailed:
        pid = self.pids[member - 1]
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
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
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(1, size):
        near, far = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: idle ones of the linear algebra library
            pid = os.fork()
        if pid == 0:  # the member
            for link in (*links, near):
                link.close()
            _member(Team(rank, size, (far,)), work, root)
        far.close()
        links.append(near)
        pids.append(pid)
    team = Team(0, size, tuple(links), tuple(pids))
    try:
        return team.gather(work(team))
    finally:
        for link in links:
            link.close()
        _reap(pids)


def _reap(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # seen already
            os.waitpid(pid, 0)


def _member(team: Team, work: Callable[[Team], Any], root: int) -> NoReturn:
    """The whole life of a forked member; it never returns into the code that forked it."""
    code = ExitCode.INTERRUPTED
    try:
        _end_with(root)
        team.gather(work(team))
        code = ExitCode.DONE
    except (KeyboardInterrupt, _Left):
        pass
    except BaseException as error:
        code = getattr(error, "exit_code", ExitCode.CHECK_FAILED)
        text = str(error) if isinstance(error, AggcliError) else f"process {team.rank}: {type(error).__name__}: {error}"
        if not isinstance(error, (AggcliError, OSError)):
            import traceback

            traceback.print_exc()
        team._send(team.links[0], ("failed", (text, int(code))))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def _end_with(root: int) -> None:
    """Have Linux end this process when the root ends, killed ones included: a member left alone would go on writing records."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != root:
        raise _Left
