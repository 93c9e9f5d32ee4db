"""What a step of many tokens takes: time and peak memory of `inspect` and `compare` against the size of the step's own arrays.

    python experiments/benchmarks/scale.py [--tokens 100000 1000000 10000000] [--commands inspect compare] [--before FOLDER]

Writes one Parquet file (format aggcli) for each number of tokens: samples of 500 to 1,500 tokens in groups of 8, two
log-probability streams and a loss mask, a reward each. Each command runs on it in a process of its own, whose time and peak
memory are its own; the same on a file of 64 tokens is what the program takes before it has read anything, and is taken off.
`--before`: the folder of another version of the program, measured in the same sitting.

The arrays that a step needs, bytes a token: 1 of the mask and 8 of each of the two streams (17, what the file holds as
arrays); 8 of the advantages (25, `inspect`); 8 of each of the four modes' weights (57, `compare`). Peak memory from the
second largest number of tokens to the largest, a token, must be at most twice that; the exponent of growth is that of a power
law through the two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ARRAYS = {"inspect": 1 + 8 + 8 + 8, "compare": 1 + 8 + 8 + 8 + 4 * 8}
"""Bytes a token."""
MOST = 2.0
ROWS = 4096
CHILD = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
command = [sys.executable, "-m", "aggcli", *sys.argv[1:]]
done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = time.perf_counter() - began
print(json.dumps([seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, done.returncode, done.stderr[-500:]]))
"""


def write(path: Path, tokens: int) -> None:
    """A file of about so many response tokens, in row groups of 4,096 samples."""
    rng = np.random.default_rng(0)
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


def measured(version: Path, command: str, path: Path, folder: Path) -> tuple[float, float, int]:
    """Seconds, processor seconds and peak bytes of a command on a file."""
    given = {
        "inspect": ["inspect", str(path)],
        "compare": ["compare", "--rollouts", str(path), "--no-samples", "--output", str(folder / "out"), "--overwrite"],
    }[command]
    environment = {**os.environ, "PYTHONPATH": str(version)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *given], stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=folder
    )
    seconds, busy, peak, code, said = json.loads(done.stdout)
    if code:
        raise SystemExit(f"{command} {path.name} ended with {code}: {said}")
    return seconds, busy, peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--commands", nargs="+", choices=ARRAYS, default=list(ARRAYS))
    parser.add_argument("--before", type=Path, help="another version of the program, measured first")
    given = parser.parse_args()
    here = Path(__file__).resolve().parents[2]
    versions = {**({"before": given.before.resolve()} if given.before else {}), "now": here}
    print(
        f"{'command':<8} {'version':<7} {'tokens':>9} {'seconds':>9} {'processor':>10} {'peak MiB':>10}"
        f" {'beyond the start':>21} {'arrays MiB':>11} {'times the arrays':>17}  exponents of growth"
    )
    too_much = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {tokens: folder / f"{tokens}.parquet" for tokens in (64, *sorted(given.tokens))}
        for tokens, path in files.items():
            write(path, tokens)
        for command in given.commands:
            for version, place in versions.items():
                found = {tokens: measured(place, command, path, folder) for tokens, path in files.items()}
                start = found.pop(64)[2]
                rows = [(tokens, *used) for tokens, used in found.items()]
                for before, (tokens, seconds, busy, peak) in zip([None, *rows[:-1]], rows, strict=True):
                    arrays = ARRAYS[command] * tokens
                    growth = "" if before is None else exponents(before, (tokens, seconds, busy, peak), start)
                    print(
                        f"{command:<8} {version:<7} {tokens:>9} {seconds:>9.1f} {busy:>10.1f} {peak / 2**20:>10.0f}"
                        f" {(peak - start) / 2**20:>21.0f} {arrays / 2**20:>11.1f} {(peak - start) / arrays:>17.2f}  {growth}",
                        flush=True,
                    )
                for (fewer, *_, less), (more, *_, most) in list(pairwise(rows))[-1:]:
                    times = (most - less) / (more - fewer) / ARRAYS[command]
                    print(f"{command:<8} {version:<7} each further token takes {times:.2f} times its arrays' bytes")
                    too_much |= version == "now" and times > MOST
    return int(too_much)


def exponents(before: tuple[int, float, float, int], after: tuple[int, float, float, int], start: int) -> str:
    """Exponents of growth from one number of tokens to the next: of processor time, and of memory beyond the start."""
    wider = math.log(after[0] / before[0])
    least = 2**20
    memory = math.log(max(after[3] - start, least) / max(before[3] - start, least)) / wider
    return f"time {math.log(after[2] / before[2]) / wider:.2f}, memory {memory:.2f}"


if __name__ == "__main__":
    sys.exit(main())
