"""Shares as tasks of a Ray cluster: each on any node that has the room, again on another where its worker or node is lost.

A board, an actor on the head node, carries what shares tell and whether they are to stop.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from aggcli.config import LaunchConfig
from aggcli.errors import SettingError, told
from aggcli.launch import Hear, Outcome, ShareFailed, Work

RETRIES = 3
"""How often a share is begun again whose worker or node is lost: it goes on from its checkpoint."""
HEAD = "node:__internal_head__"
"""The resource that Ray gives to the head node alone."""
TURN = 0.5
"""Seconds after which the launcher looks whether it was told to stop."""
REACHED_WITHIN = 5.0
"""Seconds that a cluster has to answer. Ray itself goes on trying for minutes."""


def _ray() -> Any:
    return import_module("ray")  # an extra, which type checkers need not have


class Board:
    """What shares have told and not yet been heard, and whether they are to stop."""

    def __init__(self) -> None:
        self._told: list[tuple[int, Any]] = []
        self._is_stopping = False

    def tell(self, number: int, message: Any) -> None:
        self._told.append((number, message))

    def take(self, is_stopping: bool) -> list[tuple[int, Any]]:
        """What was told since the last time."""
        self._is_stopping |= is_stopping
        told, self._told = self._told, []
        return told

    def is_stopping(self) -> bool:
        return self._is_stopping


@dataclass
class _Link:
    """The link of a share that runs as a task."""

    number: int
    board: Any

    @property
    def is_stopping(self) -> bool:
        ray = _ray()
        try:
            return ray.get(self.board.is_stopping.remote())
        except ray.exceptions.RayError:  # the board is begun again; were the launcher gone, Ray would end this task
            return False

    def tell(self, message: Any) -> None:
        self.board.tell.remote(self.number, message)


def task(given: bytes, number: int, board: Any) -> tuple[str, Any]:
    """A share, in a worker of the cluster: how it ended, with what it returns, or what it says no with and the exit code."""
    try:
        work, share = pickle.loads(given)
        return "done", work(share, _Link(number, board))
    except KeyboardInterrupt:
        return "interrupted", None
    except Exception as error:
        code, text = told(error)
        return "failed", (text, code)


# -- at the launcher ----------------------------------------------------------------------------------------------------


@dataclass
class RayCluster:
    """A cluster that this process has joined. `slots`: how many shares have room at a time."""

    launch: LaunchConfig
    slots: int
    is_stopping: bool = field(default=False, init=False)
    is_elsewhere: bool = field(default=True, init=False)

    def run(self, work: Work, shares: Sequence[Any], hear: Hear) -> Iterator[Outcome]:
        ray, scheduling = _ray(), import_module("ray.util.scheduling_strategies")

        (head,) = [node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"]]
        at_head = scheduling.NodeAffinitySchedulingStrategy(head, soft=True)
        board = ray.remote(Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=at_head).remote()
        asked = {"num_cpus": self.launch.cpus_per_share, "num_gpus": self.launch.gpus_per_share}
        remote = ray.remote(max_retries=RETRIES, **asked)(task)
        waiting, running, ended = deque(range(len(shares))), dict[Any, int](), dict[int, Outcome]()
        try:
            for number in range(len(shares)):
                while number not in ended:
                    while waiting and waiting[0] <= number + self.slots:
                        at = waiting.popleft()
                        if self.is_stopping:
                            ended[at] = Outcome(at, error=KeyboardInterrupt())
                        else:
                            running[remote.remote(pickle.dumps((work, shares[at])), at, board)] = at
                    ready, _ = ray.wait(list(running), timeout=TURN) if running else ([], [])
                    for message in _taken(board, self.is_stopping):
                        hear(*message)
                    for ref in ready:
                        at = running.pop(ref)
                        ended[at] = outcome = _outcome(at, ref)
                        if isinstance(outcome.error, Exception) and (running or waiting):
                            hear(at, outcome.error)
                yield ended.pop(number)
        finally:
            for ref in running:
                with contextlib.suppress(Exception):
                    ray.cancel(ref, force=True)

    def stop(self) -> None:
        self.is_stopping = True

    def close(self) -> None:
        _ray().shutdown()


def _taken(board: Any, is_stopping: bool) -> list[tuple[int, Any]]:
    """What was told to the board; nothing while it is begun again."""
    ray = _ray()
    with _in_one_line(), contextlib.suppress(ray.exceptions.ActorUnavailableError):
        return ray.get(board.take.remote(is_stopping))
    return []


def _outcome(number: int, ref: Any) -> Outcome:
    """How a task ended. Raises `SettingError` where the cluster cannot run any."""
    ray = _ray()
    try:
        with _in_one_line():
            kind, content = ray.get(ref)
    except ray.exceptions.RayError as error:
        lost = f"share {number + 1}: its worker was lost {RETRIES + 1} times"
        return Outcome(number, error=ShareFailed(f"{lost} ({_first_line(error)}); what was recorded is kept"))
    if kind == "done":
        return Outcome(number, content)
    return Outcome(number, error=KeyboardInterrupt() if kind == "interrupted" else ShareFailed(*content))


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Around what waits for the cluster. Raises `SettingError` where its workers lack this package."""
    try:
        yield
    except Exception as error:
        if "No module named 'aggcli" in str(error):
            raise SettingError(
                "--launcher ray: a worker of the cluster has no aggcli; install the same version on every node, or start the"
                " nodes with it on PYTHONPATH"
            ) from None
        raise


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def joined(launch: LaunchConfig) -> RayCluster:
    """Join the cluster of --ray-address or RAY_ADDRESS, else one that is started on this machine. Raises `SettingError`."""
    try:
        ray = _ray()
    except ImportError:
        raise SettingError('--launcher ray: ray is not installed; pip install "aggcli[ray]"') from None
    address = launch.ray_address or os.environ.get("RAY_ADDRESS") or None
    _need_somebody_at(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here reports to nobody
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=None if address else False)
    except (Exception, SystemExit) as error:
        raise SettingError(f"--ray-address {address}: no Ray cluster could be joined ({_first_line(error)})") from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)  # Ray has put in one of its own, which ends the program
    return RayCluster(launch, _slots(launch, [node["Resources"] for node in ray.nodes() if node["Alive"]]))


def _need_somebody_at(address: str | None) -> None:
    """Raise `SettingError` where nobody listens at an address."""
    if address is None or address in ("auto", "local"):
        return
    is_url = "://" in address
    try:
        parts = urlsplit(address if is_url else f"//{address}")
        port = parts.port or (10001 if is_url else 6379)
    except ValueError:
        raise SettingError(f"--ray-address {address}: must be host:port, ray://host:port or auto") from None
    try:
        socket.create_connection((parts.hostname, port), REACHED_WITHIN).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingError(f"--ray-address {address}: no Ray cluster is there ({reason}); start one, or give another") from None


def _slots(launch: LaunchConfig, nodes: Sequence[dict[str, float]]) -> int:
    """How many shares the nodes have room for. Raises `SettingError` where none has room for one."""
    asked = {"CPU": launch.cpus_per_share, "GPU": launch.gpus_per_share}
    wanted = {kind: number for kind, number in asked.items() if number > 0}
    room = [min((math.floor(node.get(kind, 0) / number) for kind, number in wanted.items()), default=1) for node in nodes]
    if not any(room):
        most = ", ".join(f"{max((node.get(kind, 0) for node in nodes), default=0):g} {kind}s" for kind in asked)
        raise SettingError(
            f"--cpus-per-share {asked['CPU']:g} --gpus-per-share {asked['GPU']:g}: no node of the Ray cluster has so many (the"
            f" most are {most})"
        )
    return sum(room)
