"""Kill commands at random moments and look at what is left: `python tests/kills.py --count 100 --seed 0`.

Each kill starts one command in an empty folder of its own, sends SIGKILL, SIGTERM or SIGINT at a random moment of the time
that it takes undisturbed, and then checks that

- every process that it had started has ended;
- every file is whole: JSON and JSONL parse (a last line may be cut where the writer was killed), figures, Parquet, safetensors
  and pages open to their end;
- the folder for temporary files is as empty as it was, and no draft or scratch folder is left, but for SIGKILL, which leaves no
  time to remove one: then `--overwrite` or a second run must take the place of it;
- training goes on with --resume to the bytes of the undisturbed run.

Prints a line for each fault and the counts at the end; exit code 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = ["--task=control", "--steps=30", "--rollout-batch-size=4", "--n-samples-per-prompt=4", "--checkpoint-every=4"]
TRAINED = ("metrics.jsonl", "layouts.jsonl")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@dataclass(frozen=True)
class Kind:
    """A command to kill: its arguments (`new` is where it writes), and those that go on or begin again afterwards."""

    arguments: tuple[str, ...]
    again: tuple[str, ...]
    resumes: bool = False


KINDS = {
    "training": Kind(("run", *SMALL, "--output=new"), ("--resume",), True),
    "comparing": Kind(("compare", *SMALL, "--modes=sample_mean,token_mean", "--seeds=1", "--processes=2", "--output=new"),
                      ("--resume",), True),
    "training on ranks": Kind(("run", *SMALL, "--dp=2", "--output=new"), ("--resume",), True),
    "replaying": Kind(("compare", "--rollouts=example", "--output=new"), ("--overwrite",)),
    "replaying on ranks": Kind(("compare", "--rollouts=example", "--dp=2", "--output=new"), ("--overwrite",)),
    "plotting": Kind(("plot", "records", "--html", "--format=png,svg,pdf", "--output=new"), ()),
    "converting": Kind(("convert", "example", "new", "--to=parquet"), ("--overwrite",)),
    "converting to a file": Kind(("convert", "example-0.pt", "new.jsonl"), ("--overwrite",)),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A folder to run in, with its own folder for temporary files."""

    folder: Path

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """In a process group of its own, so that Ctrl-C reaches the whole of it."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")}
        return subprocess.Popen(
            [sys.executable, "-m", "aggcli", *arguments],
            cwd=self.folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def finish(self, *arguments: str) -> str | None:
        """Run to the end; what was said where it failed."""
        process = self.start(*arguments)
        said = process.communicate(timeout=300)[1].decode(errors="replace")
        return None if process.returncode == 0 else f"exit {process.returncode}: {said[-400:]}"

    def processes(self) -> list[int]:
        """The processes that were started here and have not ended, by the folder for temporary files in their environment."""
        mark = f"TMPDIR={self.folder / 'tmp'}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


def undisturbed(folder: Path, kinds: list[str]) -> dict[str, tuple[Place, float]]:
    """Each kind run to its end once: where, and the seconds it took. Plotting reads the records of a replay."""
    found = {}
    for name in dict.fromkeys(["replaying", *kinds] if "plotting" in kinds else kinds):
        kind = KINDS[name]
        place = prepared(folder / name.replace(" ", "-"), found)
        began = time.monotonic()
        said = place.finish(*kind.arguments)
        assert said is None, (name, said)
        found[name] = (place, time.monotonic() - began)
        if name == "replaying":
            found["records"] = (place, 0.0)
    return found


def prepared(folder: Path, done: dict[str, tuple[Place, float]]) -> Place:
    """An empty folder with what commands read: the records of a replay, and one recorded step."""
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "data" / "slime_rollout" / "0.pt", folder / "example-0.pt")
    if "records" in done:
        shutil.copytree(done["records"][0].folder / "new", folder / "records")
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


def faults_of(place: Place, kind: Kind, number: int) -> Iterator[str]:
    """What is wrong in a folder after a command was killed in it."""
    until = time.monotonic() + 10
    while (left := place.processes()) and time.monotonic() < until:
        time.sleep(0.02)
    for process in left:
        yield f"process {process} goes on"
        os.kill(process, signal.SIGKILL)
    killed = number == signal.SIGKILL
    if scratch := os.listdir(place.folder / "tmp"):
        yield f"left in the folder for temporary files: {scratch}"
    for path in sorted(place.folder.rglob("*")):
        hidden = path.name.startswith(".") or path.name.endswith(".tmp")
        if hidden and not killed:
            yield f"a draft or scratch folder is left: {path.relative_to(place.folder)}"
        if path.is_file() and not hidden and not any(part.startswith(".") for part in path.relative_to(place.folder).parts):
            reason = half_written(path, may_be_cut=killed or ((place.folder / "new" / "manifest.json").exists() and _dp(kind)))
            if reason is not None:
                yield f"half-written: {path.relative_to(place.folder)}: {reason}"


def _dp(kind: Kind) -> bool:
    """Ranks are ended by their launcher with SIGKILL where SIGTERM does not end them in time."""
    return "--dp=2" in kind.arguments


def faults_afterwards(place: Place, kind: Kind, whole: Place) -> Iterator[str]:
    """What is wrong when the command is given again: with --resume, it must make the bytes of an undisturbed run."""
    begun = (place.folder / "new").exists() or (place.folder / "new.jsonl").exists()
    said = place.finish(*kind.arguments, *(kind.again if begun else ()))
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
    yield from (f"still there afterwards: {path.name}" for path in place.folder.rglob("*.tmp"))


def _is_compared(name: Path) -> bool:
    return name.name in TRAINED or (
        name.suffix in (".png", ".svg", ".parquet", ".safetensors", ".jsonl") and name.stem != "timings"
    )


# -- the harness --------------------------------------------------------------------------------------------------------


def kill(count: int, seed: int, kinds: list[str], *, say: bool = True) -> tuple[collections.Counter[str], list[str]]:
    """Kill `count` commands; how often each kind was hit by each signal, and every fault."""
    draw, hits, faults = random.Random(seed), collections.Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="aggcli-kills-") as name:
        folder = Path(name)
        whole = undisturbed(folder, kinds)
        for at in range(count):
            kind_name, signal_name = kinds[at % len(kinds)], draw.choice([*SIGNALS])
            kind, (undone, seconds) = KINDS[kind_name], whole[kind_name]
            place = prepared(folder / f"kill-{at}", whole)
            process = place.start(*kind.arguments)
            moment = draw.random() * seconds
            time.sleep(moment)
            ended = process.poll() is not None
            if not ended:
                os.killpg(process.pid, signal.SIGINT) if signal_name == "SIGINT" else process.send_signal(SIGNALS[signal_name])
            said = process.communicate(timeout=120)[1].decode(errors="replace")
            found = list(faults_of(place, kind, SIGNALS[signal_name]))
            if "Traceback" in said or process.returncode == 1:
                found.append(f"exit {process.returncode}: {said[-300:]}")
            found += faults_afterwards(place, kind, undone)
            hits[f"{kind_name}, {'too late' if ended else signal_name}"] += 1
            faults += [f"kill {at} ({kind_name}, {signal_name} after {moment:.2f} s): {fault}" for fault in found]
            if say and found:
                print("\n".join(faults[-len(found) :]), flush=True)
            shutil.rmtree(place.folder)
    return hits, faults


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    given.add_argument("--count", type=int, default=100)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--kinds", default=",".join(KINDS), help="comma-separated, of " + ", ".join(KINDS))
    asked = given.parse_args()
    hits, faults = kill(asked.count, asked.seed, asked.kinds.split(","))
    for what, number in sorted(hits.items()):
        print(f"{number:4d}  {what}")
    print(f"{sum(hits.values())} kills, seed {asked.seed}: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
