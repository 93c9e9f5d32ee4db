"""Does reading our JSONL keep up with its parser? Times the reader against a bare orjson loop over the same file.

    python experiments/benchmarks/read_jsonl.py --lines 1000000

Must hold: at least a third of the loop's speed, and peak memory within a few times the arrays that come out. Lines are
about 1 kB: two log-probability streams, token ids, a mask, ids, reward and status. The file is made in a temporary folder
and read from the page cache; each timing is the best of `--repeats`, loop and reader in turn, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

MEBIBYTE = 2**20
LEAST_SHARE = 1 / 3
MOST_MEMORY = 4.0
"""Peak memory beyond the imports, in units of the arrays' bytes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000, help="lines of the file, about 1 kB each (default: 10^5)")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each, the best counts (default: 3)")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(MEASURES[arguments.measure](arguments.file)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        write_rollouts(path, arguments.lines)
        return report(path, arguments.lines, arguments.repeats)


def write_rollouts(path: Path, lines: int, seed: int = 0) -> None:
    """Groups of 8 with lengths from 8 to 26 tokens."""
    rng = random.Random(seed)
    with path.open("wb") as file:
        for i in range(lines):
            length = rng.randint(8, 26)
            old = [-rng.expovariate(2.0) for _ in range(length)]
            row = {
                "group_index": i // 8,
                "rollout_id": i,
                "response_length": length,
                "total_length": length + 6,
                "tokens": [rng.randrange(150_000) for _ in range(length + 6)],
                "loss_mask": [1] * length,
                "reward": float(rng.random() < 0.5),
                "status": "completed",
                "old_log_probs": old,
                "log_probs": [value + rng.gauss(0.0, 0.01) for value in old],
            }
            file.write(orjson.dumps(row) + b"\n")


def report(path: Path, lines: int, repeats: int) -> int:
    """Print what was measured; 1 where a bound does not hold."""
    found: dict[str, list[dict[str, float]]] = {"orjson": [], "aggcli": []}
    for _ in range(repeats):
        for measure, results in found.items():
            results.append(measured(measure, path))
    best = {measure: min(result["seconds"] for result in results) for measure, results in found.items()}
    share = best["orjson"] / best["aggcli"]
    last = found["aggcli"][-1]
    memory = last["peak_bytes"] / last["array_bytes"]
    size = path.stat().st_size
    print(f"file          {lines} lines, {size / MEBIBYTE:.0f} MiB, {size / lines:.0f} bytes a line")
    for measure, seconds in best.items():
        print(f"{measure:<13} {seconds:.2f} s, {1e6 * seconds / lines:.2f} us a line, {size / MEBIBYTE / seconds:.0f} MiB/s")
    print(f"speed         {share:.2f} of the bare loop's (must be at least {LEAST_SHARE:.2f})")
    print(
        f"memory        peak {last['peak_bytes'] / MEBIBYTE:.0f} MiB beyond the imports, arrays"
        f" {last['array_bytes'] / MEBIBYTE:.0f} MiB: {memory:.2f} times (must be at most {MOST_MEMORY:g})"
    )
    return int(share < LEAST_SHARE or memory > MOST_MEMORY)


def measured(measure: str, path: Path) -> dict[str, float]:
    """One measurement, in a process of its own so that its peak memory is its own."""
    command = [sys.executable, __file__, "--measure", measure, "--file", str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_orjson(path: Path) -> dict[str, float]:
    start = time.perf_counter()
    with path.open("rb") as file:
        for line in file:
            orjson.loads(line)
    return {"seconds": time.perf_counter() - start}


def measure_aggcli(path: Path) -> dict[str, float]:
    from aggcli.rollouts.jsonl import read_jsonl

    before, start = peak_bytes(), time.perf_counter()
    batch = read_jsonl(path, "benchmark")
    seconds = time.perf_counter() - start
    tensors: list[Any] = [value for value in vars(batch).values() if hasattr(value, "nbytes")]
    return {
        "seconds": seconds,
        "peak_bytes": peak_bytes() - before,
        "array_bytes": sum(value.nbytes for value in tensors),
    }


def peak_bytes() -> int:
    """Peak resident memory of this process (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


MEASURES = {"orjson": measure_orjson, "aggcli": measure_aggcli}

if __name__ == "__main__":
    sys.exit(main())
