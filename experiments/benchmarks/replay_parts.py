"""What a replay of many large files takes: tokens a second, memory of each worker, and whether time is linear in files.

    python experiments/benchmarks/replay_parts.py [--files 30] [--tokens 10000000] [--folder DIR]

Writes Parquet files as scale.py does (25 bytes of arrays a token; three with numbers of their own, the others copies of them)
and replays them by `aggcli compare` under the four modes and one layout: three files in one process (`--launcher here`) and in
1 and 2 processes (`--launcher processes --workers N`), then all of them in 2. Metrics and layouts of each place must be those
of `here`, byte for byte.

Peak memory is VmHWM of each process, read while it runs: of the process that reads files, the largest of them all; beyond the
start is what it is more than on files of 64 tokens. It is told against the arrays of one file. Seconds are of the whole
command, its start and both passes over the files; `processor` are processor seconds of all its processes. Whether time is
linear is seen in the run of all files: when the first was recorded, which is after the first pass over all, and when each third
was. Exit code 1 where a record differs, or where a worker takes more than twice the arrays.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scale import ARRAYS, MOST, write

ROOT = Path(__file__).resolve().parents[2]
PLACES = {"here": ("here", 1), "1 process": ("processes", 1), "2 processes": ("processes", 2)}
MIB = 2**20
FEW = 3


class Used(NamedTuple):
    """What a replay took: seconds, processor seconds, and the peak bytes of the process that reads files and of the command;
    `marks`: (files recorded, seconds, processor seconds)."""

    files: int
    seconds: float
    busy: float
    reader: int
    command: int
    marks: list[tuple[int, float, float]]


def replayed(files: Sequence[Path], place: str, output: Path) -> Used:
    """Replay these files at a place."""
    launcher, workers = PLACES[place]
    command = [sys.executable, "-m", "aggcli", "compare", *map(str, files), f"--launcher={launcher}", f"--workers={workers}"]
    command += ["--layouts=dp1", "--no-samples", f"--output={output}"]
    began, settings = time.monotonic(), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peaks: dict[tuple[int, str], int] = {}
    busy: dict[int, float] = {}
    due, marks = [1, *(len(files) * third // 3 for third in (1, 2, 3))], list[tuple[int, float, float]]()
    while running.poll() is None:
        for depth, pid in family(running.pid):
            who = "command" if depth == 0 else "reader" if depth == 2 else "server"  # the fork server's children read files
            peaks[pid, who] = max(peaks.get((pid, who), 0), peak_of(pid))
            busy[pid] = max(busy.get(pid, 0.0), busy_of(pid))
        done = recorded(output)
        while due and done >= due[0]:
            marks.append((due.pop(0), time.monotonic() - began, sum(busy.values())))
        time.sleep(0.05)
    seconds = time.monotonic() - began
    if running.returncode:
        raise SystemExit(f"{place}: exit code {running.returncode}: {running.communicate()[1].decode()}")
    most = {kind: max((peak for (_, who), peak in peaks.items() if who == kind), default=0) for kind in ("command", "reader")}
    return Used(len(files), seconds, sum(busy.values()), most["reader"] or most["command"], most["command"], marks)


def recorded(output: Path) -> int:
    """How many steps are recorded."""
    path = output / "sample_mean" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def busy_of(pid: int) -> float:
    """Processor seconds of a process; 0 of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pid: int, depth: int = 0) -> list[tuple[int, int]]:
    """(generation, process) of a process and all that descend from it."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [(depth, pid), *(one for child in children for one in family(child, depth + 1))]


def peak_of(pid: int) -> int:
    """VmHWM in bytes; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def records(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*.jsonl")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=10**7, help="of each file, about")
    parser.add_argument("--folder", type=Path, help="where the files are written for the time of the run")
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        return measured(scratch, given.files, given.tokens)
    finally:
        shutil.rmtree(scratch)


def measured(folder: Path, count: int, tokens: int) -> int:
    files = [folder / f"step-{at:02d}.parquet" for at in range(count)]
    small = [folder / f"small-{at}.parquet" for at in range(FEW)]
    for at, path in enumerate((*files[:FEW], *small)):
        write(path, tokens if path in files else 64, at)
    for at, path in enumerate(files[FEW:]):
        shutil.copy(files[at % FEW], path)
    arrays = ARRAYS * tokens
    size = sum(path.stat().st_size for path in files)
    print(f"{count} files of about {tokens:.0e} tokens: {size / 1e9:.2f} GB, {arrays / MIB:.0f} MiB of arrays each", flush=True)
    print(
        f"{'place':<12} {'files':>5} {'seconds':>8} {'processor':>10} {'tokens/s':>9} {'a processor second':>19}"
        f" {'reader MiB':>11} {'beyond the start':>17} {'times the arrays':>17} {'command MiB':>12}"
    )
    start = {place: replayed(small, place, folder / f"start {place}").reader for place in PLACES}
    faults: list[str] = []
    for place, number in dict.fromkeys([*((place, FEW) for place in PLACES), ("2 processes", count)]):
        output = folder / f"{number} {place}"
        used = replayed(files[:number], place, output)
        beyond = used.reader - start[place]
        print(
            f"{place:<12} {number:>5} {used.seconds:>8.1f} {used.busy:>10.1f} {tokens * number / used.seconds:>9.0f}"
            f" {tokens * number / used.busy:>19.0f} {used.reader / MIB:>11.0f} {beyond / MIB:>17.0f} {beyond / arrays:>17.2f}"
            f" {used.command / MIB:>12.0f}",
            flush=True,
        )
        if number == FEW and records(output) != records(folder / f"{FEW} here"):
            faults.append(f"{place}: other records than here")
        if beyond > MOST * arrays:
            faults.append(f"{place}, {number} files: more than twice the arrays")
        if number == count:
            for done, seconds, busy in used.marks:
                print(f"  {done} of {count} files recorded after {seconds:.1f} s and {busy:.1f} processor seconds")
            more = 1e9 / tokens / count
            print(f"10^9 tokens at this rate: {more * used.seconds:.0f} s, {more * used.busy:.0f} processor seconds")
    print("\n".join(faults) if faults else "no fault: the records of each place are those of here, byte for byte")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
