"""What a step of many tokens takes: time and peak memory of `inspect` and `compare` against the size of the step's own arrays.

    python experiments/benchmarks/scale.py [--tokens 1000000 10000000] [--commands inspect compare] [--before FOLDER]

Writes one Parquet file (format aggcli) for each number of tokens: samples of 500 to 1,500 tokens in groups of 8, two
log-probability streams and a loss mask, a reward each. Each command runs on it in a process of its own, whose time and peak
memory are its own; the same on a file of 64 tokens is what the program takes before it has read anything, and is taken off.
`--before`: the folder of another version of the program, measured in the same sitting after this one.

The arrays that a step needs, bytes a token: 1 of the mask and 8 of each of the two streams, which is what the file holds, and 8
of the advantages: 25, by `inspect` and by `compare` alike, however many rules are compared: a rule's weights are one number a
sample. Peak memory from the second largest number of tokens to the largest, a token, must be at most twice that; exponents of
growth are those of a power law through one number of tokens and the next, of processor time and of memory beyond the start.
A command that takes more than `--most-gib` is ended, and that is what is said of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COMMANDS = ("inspect", "compare")
ARRAYS = 1 + 8 + 8 + 8
"""Bytes a token."""
MOST = 2.0
ROWS = 4096
CHILD = """
import json, resource, subprocess, sys, time
began, most = time.perf_counter(), float(sys.argv[1])
command = [sys.executable, "-m", "aggcli", *sys.argv[2:]]
running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
held = 0
while running.poll() is None:
    with open(f"/proc/{running.pid}/statm") as file:
        held = int(file.read().split()[1]) * resource.getpagesize()
    if held > most:
        running.kill()
        running.wait()
        break
    time.sleep(0.05)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = time.perf_counter() - began
print(json.dumps([seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, running.returncode, held > most]))
"""


def write(path: Path, tokens: int, seed: int = 0) -> None:
    """A file of about so many response tokens, in row groups of 4,096 samples."""
    rng = np.random.default_rng(seed)
    samples = max(1, tokens // 1000)
    longest = min(1500, 2 * tokens)
    writer = None
    for start in range(0, samples, ROWS):
        at = np.arange(start, min(start + ROWS, samples))
        length = rng.integers(min(500, tokens), longest + 1, at.size)
        offsets = pa.array(np.concatenate([[0], length.cumsum()]).astype(np.int32))
        count = int(length.sum())
        old = -rng.gamma(1.0, 0.3, count)
        table = pa.table(
            {
                "group_index": at // 8,
                "response_length": length,
                "total_length": length + 64,
                "loss_mask": pa.ListArray.from_arrays(offsets, pa.array((rng.random(count) < 0.9).astype(np.int8))),
                "reward": (rng.random(at.size) < 0.4).astype(np.float64),
                "log_probs": pa.ListArray.from_arrays(offsets, pa.array(old + rng.normal(0, 0.02, count))),
                "old_log_probs": pa.ListArray.from_arrays(offsets, pa.array(old)),
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


class Used(NamedTuple):
    """What a command took on a file: seconds, processor seconds, and peak bytes; `is_ended` where those were too many."""

    tokens: int
    seconds: float
    busy: float
    peak: int
    is_ended: bool


def measured(version: Path, command: str, tokens: int, folder: Path, most: float) -> Used:
    """What a command takes on the file of so many tokens."""
    path = folder / f"{tokens}.parquet"
    given = {
        "inspect": ["inspect", str(path)],
        "compare": ["compare", "--rollouts", str(path), "--no-samples", "--output", str(folder / "out"), "--overwrite"],
    }[command]
    environment = {**os.environ, "PYTHONPATH": str(version)}
    child = [sys.executable, "-c", CHILD, str(most), *given]
    done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=folder)
    seconds, busy, peak, code, is_ended = json.loads(done.stdout)
    if code and not is_ended:
        raise SystemExit(f"{command} {path.name} ended with {code}")
    return Used(tokens, seconds, busy, peak, is_ended)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--before", type=Path, help="another version of the program")
    parser.add_argument("--most-gib", type=float, default=14.0, help="memory beyond which a command is ended")
    given = parser.parse_args()
    here = Path(__file__).resolve().parents[2]
    versions = {"now": here, **({"before": given.before.resolve()} if given.before else {})}
    print(
        f"{'command':<8} {'version':<7} {'tokens':>9} {'seconds':>9} {'processor':>10} {'peak MiB':>10}"
        f" {'beyond the start':>17} {'arrays MiB':>11} {'times the arrays':>17}  exponents of growth"
    )
    too_much = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for tokens in (64, *given.tokens):
            write(folder / f"{tokens}.parquet", tokens)
        for command in given.commands:
            for version, place in versions.items():
                start = measured(place, command, 64, folder, math.inf).peak
                rows: list[Used] = []
                for tokens in sorted(given.tokens):
                    rows.append(measured(place, command, tokens, folder, given.most_gib * 2**30))
                    told(command, version, rows, start)
                too_much |= version == "now" and more_than_allowed(command, rows)
    return int(too_much)


def told(command: str, version: str, rows: Sequence[Used], start: int) -> None:
    """Print the last of the rows."""
    used = rows[-1]
    arrays, beyond, more = ARRAYS * used.tokens, used.peak - start, ">" if used.is_ended else ""
    peak = f"{more}{used.peak / 2**20:.0f}"
    growth = "ended: too much memory" if used.is_ended else "" if len(rows) < 2 else exponents(rows[-2], used, start)
    print(
        f"{command:<8} {version:<7} {used.tokens:>9} {used.seconds:>9.1f} {used.busy:>10.1f} {peak:>10}"
        f" {f'{more}{beyond / 2**20:.0f}':>17} {arrays / 2**20:>11.1f} {f'{more}{beyond / arrays:.2f}':>17}  {growth}",
        flush=True,
    )


def more_than_allowed(command: str, rows: Sequence[Used]) -> bool:
    """Print what each further token takes, from the second largest file to the largest; whether that is too much."""
    if len(rows) < 2 or rows[-1].is_ended:
        return rows[-1].is_ended
    fewer, more = rows[-2:]
    times = (more.peak - fewer.peak) / (more.tokens - fewer.tokens) / ARRAYS
    print(
        f"{command}: each further token takes {times:.2f} times the bytes of its arrays (must be at most {MOST:g})", flush=True
    )
    return times > MOST


def exponents(before: Used, after: Used, start: int) -> str:
    """Exponents of growth from one number of tokens to the next: of processor time, and of memory beyond the start."""
    wider, least = math.log(after.tokens / before.tokens), 2**20
    memory = math.log(max(after.peak - start, least) / max(before.peak - start, least)) / wider
    return f"time {math.log(after.busy / before.busy) / wider:.2f}, memory {memory:.2f}"


if __name__ == "__main__":
    sys.exit(main())
