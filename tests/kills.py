"""Kill commands at random moments and look at what is left: `python tests/kills.py --count 100 --seed 0`.

Each kill starts one command in an empty folder of its own, sends SIGKILL, SIGTERM or SIGINT at a random moment (every other
one after its first file is there, since half of a short command is imports), and then checks that the following holds. SIGINT
is sent to all processes of the command, as by Ctrl-C in a terminal; `twice`: and again up to half a second later; `to one`: to
the command alone.

- the command and every process that it had started have ended;
- every file is whole: JSON and JSONL parse (a last line may be cut where the writer was killed), figures, Parquet, safetensors
  and pages open to their end;
- the folder for temporary files is as empty as it was, and no draft or scratch folder is left, but for what SIGKILL leaves no
  time to remove: then the same command, given again, must take the place of it;
- training goes on with --resume to the bytes of the undisturbed run.

Every fourth round of kills is of new interpreters, and may hit their imports. The others are of forks of this process, which
has imported everything already: they take a third of the time, and are hit while they work. Ranks are always new interpreters,
and have a turn in every fourth round.

Prints a line for each kill and the counts at the end; exit code 1 if there is a fault. A command that had ended by itself is
run again: it counts as no kill.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
SMALL = ["--task=control", "--steps=8", "--rollout-batch-size=2", "--n-samples-per-prompt=2", "--checkpoint-every=2"]
TRAINED = ("metrics.jsonl", "layouts.jsonl")
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGINT twice": signal.SIGINT,
    "SIGINT to one": signal.SIGINT,
}
IMPORTS = 2.0
"""Seconds that a new interpreter takes for its imports, about."""
NEW = ", new"
ENDS_WITHIN = 60.0
"""Seconds after which a command that was told to end, with all that it had started, counts as hung."""
HIDES = (".", ".tmp")
"""How the name of a scratch folder begins, and that of a draft ends."""


@dataclass(frozen=True)
class Kind:
    """A command to kill: its arguments (`new` is where it writes), and those that go on or begin again afterwards."""

    arguments: tuple[str, ...]
    again: tuple[str, ...] = ()
    has_ranks: bool = False
    """Its writer is a rank, which its launcher may end by SIGKILL whatever signal the launcher had."""


_APART = ("--launcher=processes", "--workers=2", "--output=new")
_SHARED = ("compare", *SMALL, "--modes=sample_mean,token_mean", "--seeds=1", *_APART)
KINDS = {
    "training": Kind(("run", *SMALL, "--output=new"), ("--resume",)),
    "training in 2 processes": Kind(_SHARED, ("--resume",)),
    "training on 2 ranks": Kind(("run", *SMALL, "--dp=2", "--output=new"), ("--resume",), has_ranks=True),
    "comparing records": Kind(("compare", "records", "--format=md")),
    "replaying": Kind(("compare", "--rollouts=example", "--output=new"), ("--overwrite",)),
    "replaying in 2 processes": Kind(("compare", "--rollouts=example", *_APART), ("--overwrite",)),
    "replaying on 2 ranks": Kind(("run", "--rollouts=example", "--dp=2", "--output=new"), ("--overwrite",), has_ranks=True),
    "plotting": Kind(("plot", "records", "--html", "--format=png", "--output=new")),
    "converting": Kind(("convert", "example", "new", "--to=parquet"), ("--overwrite",)),
    "converting to a file": Kind(("convert", "example-0.pt", "new.jsonl"), ("--overwrite",)),
}  # fmt: skip


class Fork:
    """`aggcli` in a fork of this process, in a session of its own; what is used of `subprocess.Popen`."""

    def __init__(self, folder: Path, said: Path, environment: dict[str, str], arguments: tuple[str, ...]) -> None:

        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of the linear algebra library
            self.pid = os.fork()
        if self.pid == 0:
            self._work(folder, said, environment, arguments)
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 3600.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("aggcli", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _work(self, folder: Path, said: Path, environment: dict[str, str], arguments: tuple[str, ...]) -> NoReturn:
        code = 130
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(folder)
            os.environ.update(environment)
            tempfile.tempdir = None
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.setsid()
            from aggcli.cli.main import main

            code = main(arguments)
            sys.stdout.flush()
        except KeyboardInterrupt:  # before `main` could see it
            pass
        finally:
            os._exit(code)


def import_all() -> None:
    """What the commands import, before they are forked."""
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib.pyplot  # noqa: F401
    import torch

    import aggcli.analysis.study
    import aggcli.cli.main
    import aggcli.grid
    import aggcli.jobs.replay
    import aggcli.jobs.training
    import aggcli.report.page  # noqa: F401

    torch.set_num_threads(1)


@dataclass(frozen=True)
class Place:
    """A folder to run in, with its own folder for temporary files."""

    folder: Path

    @property
    def said(self) -> Path:
        """What the command said on stderr: a file, since a process that is left behind would keep a pipe open for good."""
        return self.folder.with_name(self.folder.name + ".stderr")

    @property
    def has_begun(self) -> bool:
        return (self.folder / "new").exists() or (self.folder / "new.jsonl").exists()

    @property
    def is_written_to(self) -> bool:
        """Whether there is more than what was prepared, if only a draft."""
        return any(path.name not in ("tmp", "records", "example-0.pt") for path in self.folder.iterdir())

    def start(self, *arguments: str, new: bool) -> subprocess.Popen[bytes] | Fork:
        """In a process group of its own, so that Ctrl-C reaches the whole of it. `new`: a new interpreter, and not a fork."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")}
        if not new:
            return Fork(self.folder, self.said, environment, arguments)
        with self.said.open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "aggcli", *arguments],
                cwd=self.folder, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=said,
                start_new_session=True,
            )  # fmt: skip

    def finish(self, *arguments: str) -> str | None:
        """Run to the end; what was said where it failed, or hung."""
        process = self.start(*arguments, new=False)
        try:
            code = process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            self.end_all(process.pid)
            process.wait()
            return f"hung: {self.tail()}"
        return None if code == 0 else f"exit {code}: {self.tail()}"

    def tail(self) -> str:
        return self.said.read_text(errors="replace")[-400:]

    def processes(self, session: int | None = None) -> list[int]:
        """The processes that were started here and have not ended: new interpreters by the folder for temporary files in their
        environment, forks by the session of the command. Session 0 is everybody's, and never meant."""
        assert session != 0
        mark, found = f"TMPDIR={self.folder / 'tmp'}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = mark in (entry / "environ").read_bytes().split(b"\0")
                if state != "Z" and (marked or int(its_session) == session):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def end_all(self, session: int | None = None) -> None:
        for process in self.processes(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def undisturbed(folder: Path, kinds: list[str], say: bool) -> dict[str, tuple[Place, float]]:
    """Each kind run to its end once: where, and the seconds it took. What reads records has those of a replay."""
    found: dict[str, tuple[Place, float]] = {}
    reads = any("records" in KINDS[name].arguments for name in kinds)
    for name in dict.fromkeys(["replaying", *kinds] if reads else kinds):
        kind = KINDS[name]
        place = prepared(folder / name.replace(" ", "-"), found)
        began = time.monotonic()
        said = place.finish(*kind.arguments)
        assert said is None, (name, said)
        found[name] = (place, time.monotonic() - began)
        if say:
            print(f"undisturbed: {name}, {found[name][1]:.1f} s", flush=True)
    return found


def prepared(folder: Path, done: dict[str, tuple[Place, float]]) -> Place:
    """An empty folder with what commands read: the records of a replay, and one recorded step."""
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "data" / "slime_rollout" / "0.pt", folder / "example-0.pt")
    if "replaying" in done:
        shutil.copytree(done["replaying"][0].folder / "new", folder / "records")
    return Place(folder)


# -- what is looked at --------------------------------------------------------------------------------------------------


def half_written(path: Path, *, may_be_cut: bool) -> str | None:
    """Why a file is not whole; None where it is. `may_be_cut`: the last line of a log may be."""
    whole = path.read_bytes()
    try:
        if path.suffix == ".json":
            json.loads(whole)
        elif path.suffix == ".jsonl" or ".before-resume" in path.name:
            lines = whole.split(b"\n")
            if lines.pop() and not may_be_cut:
                return "its last line is cut"
            for line in lines:
                json.loads(line)
        elif path.suffix == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.read_table(path)
        elif path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            load_file(path)
        elif (
            end := {".png": b"IEND\xaeB`\x82", ".svg": b"</svg>", ".pdf": b"%%EOF", ".html": b"</html>"}.get(path.suffix)
        ) and (not whole.rstrip().endswith(end)):
            return f"does not end in {end!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def is_hidden(path: Path) -> bool:
    """A draft, a scratch folder or what lies in one."""
    return any(part.startswith(HIDES[0]) or part.endswith(HIDES[1]) for part in path.parts)


def faults_of(place: Place, kind: Kind, number: int, session: int) -> Iterator[str]:
    """What is wrong in a folder after a command was killed in it."""
    until = time.monotonic() + 10
    while (left := place.processes(session)) and time.monotonic() < until:
        time.sleep(0.02)
    if left:
        yield f"processes {left} go on"
        place.end_all(session)
    killed = number == signal.SIGKILL
    if scratch := os.listdir(place.folder / "tmp"):
        yield f"left in the folder for temporary files: {scratch}"
    for path in sorted(place.folder.rglob("*")):
        name = path.relative_to(place.folder)
        if is_hidden(name):
            if not killed:
                yield f"a draft or scratch folder is left: {name}"
        elif path.is_file() and (reason := half_written(path, may_be_cut=killed or kind.has_ranks)):
            yield f"half-written: {name}: {reason}"


def faults_afterwards(place: Place, kind: Kind, whole: Place) -> Iterator[str]:
    """What is wrong when the command is given again: with --resume, it must make the bytes of an undisturbed run."""
    said = place.finish(*kind.arguments, *(kind.again if place.has_begun else ()))
    if said is not None:
        yield f"afterwards: {said}"
        return
    before = {path.relative_to(whole.folder): path for path in whole.folder.rglob("*") if path.is_file()}
    for name, path in before.items():
        again = place.folder / name
        if not again.exists():
            yield f"{name} is missing afterwards"
        elif _is_compared(name) and again.read_bytes() != path.read_bytes():
            yield f"{name} is not, byte for byte, that of the undisturbed run"
    for path in sorted(place.folder.rglob("*")):
        if is_hidden(name := path.relative_to(place.folder)):
            yield f"still there afterwards: {name}"


def _is_compared(name: Path) -> bool:
    return name.name in TRAINED or (
        name.suffix in (".png", ".svg", ".parquet", ".safetensors", ".jsonl") and name.stem != "timings"
    )


# -- the harness --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One kill: what was hit, how, when, and what was wrong. `late`: the command had ended by itself."""

    kind: str
    signal: str
    after: float
    late: bool
    faults: list[str]


def kill_one(
    place: Place, kind_name: str, whole: tuple[Place, float], draw: random.Random, *, new: bool, signals: list[str]
) -> Kill:
    """Start a command, kill it and look at what is left."""
    kind, (undone, seconds), signal_name = KINDS[kind_name], whole, draw.choice(signals)
    share, once_begun = draw.random(), draw.random() < 0.5 and any("new" in argument for argument in kind.arguments)
    began = time.monotonic()
    process = place.start(*kind.arguments, new=new)
    while once_begun and not place.is_written_to and process.poll() is None:
        time.sleep(0.002)
    waited = time.monotonic() - began if once_begun else 0.0
    time.sleep(share * max(seconds + (IMPORTS if new else 0.0) - waited, 0.2))
    after, late = time.monotonic() - began, process.poll() is not None
    if not late:
        send(process, signal_name, draw.random() / 2)
    found = []
    try:
        code = process.wait(timeout=ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        found.append(
            f"has not ended {ENDS_WITHIN:g} s after the signal: processes {place.processes(process.pid)}: {place.tail()}"
        )
        place.end_all(process.pid)
        code = process.wait()
    said = place.said.read_text(errors="replace")
    if "Traceback" in said or "bug in aggcli" in said or code == 1:
        found.append(f"exit {code}: {said[-400:]}")
    found += faults_of(place, kind, SIGNALS[signal_name], process.pid)
    found += faults_afterwards(place, kind, undone)
    return Kill(kind_name + (NEW if new else ""), signal_name, after, late, found)


def send(process: subprocess.Popen[bytes] | Fork, signal_name: str, again_after: float) -> None:
    """Send the command a signal, or all processes of its group."""
    if signal_name not in ("SIGINT", "SIGINT twice"):
        process.send_signal(SIGNALS[signal_name])
        return
    os.killpg(process.pid, signal.SIGINT)
    if signal_name == "SIGINT twice":
        time.sleep(again_after)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)


def in_turn(kinds: list[str]) -> list[tuple[int, str]]:
    """Four rounds of the kinds, each with the number of its round, 0 to 3; those with ranks, which take ten times as long, have
    one turn in them."""
    rounds = [(number, name) for number in range(4) for name in kinds]
    return [(number, name) for number, name in rounds if not KINDS[name].has_ranks or number == 0]


def kill(count: int, seed: int, kinds: list[str], *, signals: Sequence[str] = tuple(SIGNALS), say: bool = True) -> list[Kill]:
    """Kill commands of these kinds in turn until `count` were hit; those that had ended by themselves are in the list too."""
    draw, done, turns = random.Random(seed), list[Kill](), in_turn(kinds)
    with tempfile.TemporaryDirectory(prefix="aggcli-kills-") as name:
        folder = Path(name)
        import_all()
        whole = undisturbed(folder, kinds, say)
        while (hits := sum(not one.late for one in done)) < count:
            round_number, kind_name = turns[hits % len(turns)]
            place = prepared(folder / f"kill-{len(done)}", whole)
            began = time.monotonic()
            try:
                one = kill_one(place, kind_name, whole[kind_name], draw, new=round_number == 3, signals=[*signals])
            finally:
                place.end_all()
            done.append(one)
            if say:
                verdict = "; ".join(one.faults) or ("had ended" if one.late else "whole")
                took = f"{time.monotonic() - began:.1f} s in all"
                number = hits + (not one.late)
                print(f"{number:3d} {one.kind}, {one.signal} after {one.after:.2f} s: {verdict} ({took})", flush=True)
            shutil.rmtree(place.folder)
    return done


def counts(done: list[Kill]) -> Iterator[str]:
    """A table of how often each kind was hit by each signal, with the faults found."""
    hit = [one for one in done if not one.late]
    number = collections.Counter((one.kind, one.signal) for one in hit)
    yield "".join([f"{'kills':30}", *(f"{name:>14}" for name in SIGNALS), f"{'faults':>9}"])
    for kind in sorted({one.kind for one in done}):
        faults = sum(len(one.faults) for one in done if one.kind == kind)
        yield "".join([f"{kind:30}", *(f"{number[kind, name]:14d}" for name in SIGNALS), f"{faults:9d}"])
    faults = sum(len(one.faults) for one in done)
    yield "".join([f"{'all':30}", *(f"{sum(one.signal == name for one in hit):14d}" for name in SIGNALS), f"{faults:9d}"])
    yield f"{len(hit)} kills ({len(done) - len(hit)} more came too late), {faults} faults"


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    given.add_argument("--count", type=int, default=100)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--kinds", default=",".join(KINDS), help="comma-separated, of " + ", ".join(KINDS))
    given.add_argument("--signals", default=",".join(SIGNALS), help="comma-separated, of " + ", ".join(SIGNALS))
    asked = given.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the folder is removed
    done = kill(asked.count, asked.seed, asked.kinds.split(","), signals=asked.signals.split(","))
    print("\n".join(["", *counts(done)]))
    return 1 if any(one.faults for one in done) else 0


if __name__ == "__main__":
    sys.exit(main())
