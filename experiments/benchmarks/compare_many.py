"""How long `aggcli compare` of a thousand recorded runs of a thousand steps takes, and how much memory.

    python experiments/benchmarks/compare_many.py [--runs 1000] [--steps 1000] [--folder DIR]

Writes a comparison of four modes with lines as long as training writes them (about 1.2 kB, 1.2 GB in all), then reads and
compares it in a process of its own. Limits: 20 s and 2 GiB; the exit code is 1 when one is exceeded. The folder is removed
afterwards unless --folder names it; one that exists is used as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SECONDS, GIBIBYTES = 20.0, 2.0
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
CHILD = """
import resource, sys, time
began = time.perf_counter()
from pathlib import Path
from aggcli.cli.results import compare_results
compare_results([Path(sys.argv[1])])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"{time.perf_counter() - began:.2f} {time.process_time():.2f} {peak:.3f}", file=sys.stderr)
"""


def write(folder: Path, runs: int, steps: int) -> None:
    """A comparison directory of `runs` runs."""
    names = [f"{MODES[at % len(MODES)]}/seed-{at // len(MODES)}" for at in range(runs)]
    for at, name in enumerate(names):
        directory = folder / name
        directory.mkdir(parents=True)
        manifest = {"schema": 1, "kind": "run", "mode": MODES[at % len(MODES)], "seed": at // len(MODES), "status": "done"}
        (directory / "manifest.json").write_text(json.dumps({**manifest, "settings": {"lr": 3e-4}}), encoding="utf-8")
        (directory / "metrics.jsonl").write_text("".join(lines(at, steps)), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "kind": "comparison", "runs": names}), encoding="utf-8")


def lines(seed: int, steps: int) -> list[str]:
    """One line a step: a curve that rises from 0.3 to 0.8 under the noise of 128 rollouts, and 28 columns nobody asks for."""
    rng = np.random.default_rng(seed)
    chance = 0.3 + 0.5 / (1 + (0.2 / np.linspace(1e-6, 1, steps)) ** 1.8)
    correct, length = rng.binomial(128, chance).tolist(), rng.normal(9, 0.4, steps).tolist()
    rest = ", ".join(f'"other/{column}": {rng.normal():.17g}' for column in range(28))
    return [
        f'{{"step": {step}, "rollout_step": {step}, "seed": {seed}, "samples": 128, "response_tokens": {round(128 * tokens)},'
        f' "raw_reward": {right / 128}, "response_length": {tokens}, "correct/count": {right}, "incorrect/count":'
        f" {128 - right},"
        f' "correct/response_length": {tokens - 1}, "incorrect/response_length": {tokens + 1}, "entropy_loss": 0.5, {rest}}}\n'
        for step, (right, tokens) in enumerate(zip(correct, length, strict=True))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="compare-many-"))
    try:
        if not (folder / "manifest.json").exists():
            write(folder, given.runs, given.steps)
        size = sum(path.stat().st_size for path in folder.rglob("metrics.jsonl"))
        done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], stderr=subprocess.PIPE, text=True, check=True)
        seconds, busy, peak = map(float, done.stderr.split("\n")[-2].split())
    finally:
        if given.folder is None:
            shutil.rmtree(folder)
    print(
        f"{given.runs} runs of {given.steps} steps ({size / 2**30:.2f} GiB): {seconds:.1f} s"
        f" ({busy:.1f} s of processor time), {peak:.2f} GiB at most"
    )
    return int(seconds > SECONDS or peak > GIBIBYTES)


if __name__ == "__main__":
    sys.exit(main())
