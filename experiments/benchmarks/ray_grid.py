"""A grid on a Ray cluster whose worker and node are killed while it runs, held against the same grid in this process.

    python experiments/benchmarks/ray_grid.py [--steps 40] [--returned | --replay 200]

Starts a cluster of two raylets of one CPU each on this machine (`ray.cluster_utils.Cluster`), and trains 4 modes x 3 seeds in
4 shares on it. When the first share has recorded 5 steps the process that trains it is killed (SIGKILL); when it has recorded
15, the whole second raylet. Metrics and layouts must then be, byte for byte, those of `--launcher here` with as many shares.
Then it is interrupted (SIGINT) in the middle, and resumed. `--returned`: only that the cluster cannot see the results directory
(which needs the right to mount a file system of its own for the command), so that its files come back through Ray's object
store. Exit code 1 where a record differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scale import write

ROOT = Path(__file__).resolve().parents[2]
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
SMALL = ("--rollout-batch-size=4", "--n-samples-per-prompt=4", "--max-response-length=16", "--checkpoint-every=5")
MEMORY = 100 * 2**20
"""Bytes of an object store."""


UNSEEN = 'mount -t tmpfs tmpfs "$0" && "$@"; code=$?; cp -r "$0/out" "$0-seen"; exit $code'
"""A shell in a mount namespace of its own: a folder that no other process sees, whose `out` is copied where all do."""


def aggcli(output: Path, *more: str, unseen: Path | None = None) -> subprocess.Popen[str]:
    """A grid of 4 modes x 3 seeds in 4 shares. `unseen`: a folder that only this command is to see."""
    place = [] if unseen is None else ["unshare", "--mount", "sh", "-c", UNSEEN, str(unseen)]
    return started(output, *SMALL, "--seeds=3", "--shares=4", *more, place=place)


def started(output: Path, *given: str, place: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A comparison of the modes. `place`: what the command is run by."""
    command = [*place, sys.executable, "-m", "aggcli", "compare", f"--modes={','.join(MODES)}", *given, f"--output={output}"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=settings, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it said, once it has ended with this code."""
    said = process.communicate(timeout=900)[1]
    if process.returncode != code:
        raise SystemExit(f"exit code {process.returncode} and not {code}:\n{said}")
    return said


def steps(output: Path, run: str) -> int:
    path = output / run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(process: subprocess.Popen[str], output: Path, run: str, count: int) -> None:
    """Wait until a run has recorded so many steps."""
    while steps(output, run) < count and process.poll() is None:
        time.sleep(0.05)
    if process.poll() is not None:
        raise SystemExit(f"ended before {run} had {count} steps:\n{process.communicate()[1]}")


def different(first: Path, second: Path) -> list[str]:
    """The files of records that are not the same byte for byte."""
    names = [f"{mode}/seed-{seed}/{file}.jsonl" for mode in MODES for seed in range(3) for file in ("metrics", "layouts")]
    return [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()]


def killed_worker(node: Any) -> str:
    """Kill a process that works on a share at a raylet, by SIGKILL; what it was."""
    raylet = next(one.process.pid for one in node.all_processes["raylet"])
    for pid in map(int, Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            if name == "ray::task":
                os.kill(pid, signal.SIGKILL)
                return f"{name} {pid}"
    return ""


def replayed(folder: Path, count: int, cluster: Any) -> list[str]:
    """Replay files here, then on the cluster while a worker and a node of it are killed; the files of records that differ."""
    alone = {"num_cpus": 1, "object_store_memory": MEMORY}
    files = [folder / f"step-{at:03d}.parquet" for at in range(count)]
    for at, path in enumerate(files):
        write(path, 20_000, at)
    serial, output, given = folder / "serial", folder / "ray", [str(path) for path in files]
    began = time.monotonic()
    ended(started(serial, *given, "--launcher=here"))
    print(f"here: {time.monotonic() - began:.1f} s for {count} files", flush=True)
    second = cluster.add_node(**alone)
    began = time.monotonic()
    process = started(output, *given, "--launcher=ray", f"--ray-address={cluster.address}")
    until(process, output, MODES[0], count // 3)
    killed = ""
    while not killed and process.poll() is None:
        killed = killed_worker(cluster.head_node)
    print(f"killed {killed} with {steps(output, MODES[0])} of {count} steps recorded", flush=True)
    until(process, output, MODES[0], 2 * count // 3)
    at = steps(output, MODES[0])
    cluster.remove_node(second, allow_graceful=False)
    print(f"killed the second raylet with {at} of {count} steps recorded", flush=True)
    ended(process)
    names = {str(path.relative_to(serial)) for path in serial.rglob("*") if path.suffix in (".jsonl", ".parquet")}
    others = {str(path.relative_to(output)) for path in output.rglob("*") if path.suffix in (".jsonl", ".parquet")}
    apart = sorted(names ^ others) + [n for n in names & others if (serial / n).read_bytes() != (output / n).read_bytes()]
    print(
        f"ray: {time.monotonic() - began:.1f} s; {len(names) - len(apart)} of {len(names)} files of records are those of"
        f" --launcher here, byte for byte; {steps(output, MODES[0])} steps",
        flush=True,
    )
    return apart + ([] if killed else ["no worker was found"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--returned", action="store_true", help="bring the records back through the object store")
    parser.add_argument("--replay", type=int, metavar="FILES", help="replay so many files instead of training")
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = str(ROOT)
    cluster_utils = import_module("ray.cluster_utils")
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder, length = Path(name), f"--steps={given.steps}"
        alone = {"num_cpus": 1, "object_store_memory": MEMORY}
        first = {**alone, "include_dashboard": False}
        if given.replay:
            cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=first)
            try:
                faults += replayed(folder, given.replay, cluster)
            finally:
                cluster.shutdown()
            print("\n".join(faults) if faults else "no fault")
            return int(bool(faults))
        serial = folder / "serial"
        began = time.monotonic()
        ended(aggcli(serial, length, "--launcher=here"))
        print(f"here: {time.monotonic() - began:.1f} s", flush=True)
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=first)
        try:
            second = cluster.add_node(**alone)
            on_ray = ("--launcher=ray", f"--ray-address={cluster.address}")
            began, output = time.monotonic(), folder / "ray"
            if given.returned:
                (folder / "unseen").mkdir()
                process = aggcli(folder / "unseen" / "out", length, *on_ray, unseen=folder / "unseen")
                output = folder / "unseen-seen"
            else:
                process = aggcli(output, length, *on_ray)
                until(process, output, "sample_mean/seed-0", 5)
                at = steps(output, "sample_mean/seed-0")
                told = killed_worker(cluster.head_node) or killed_worker(second)
                print(f"killed {told} with sample_mean/seed-0 at step {at}", flush=True)
                faults += [] if told else ["no worker was found"]
                until(process, output, "sample_mean/seed-0", 15)
                at = steps(output, "sample_mean/seed-0")
                cluster.remove_node(second, allow_graceful=False)
                print(f"killed the second raylet with sample_mean/seed-0 at step {at}", flush=True)
            said = ended(process)
            apart = different(serial, output)
            faults += apart
            cut = len(list(output.rglob("*.before-resume*")))
            print(
                f"ray: {time.monotonic() - began:.1f} s; {24 - len(apart)} of 24 files of records are those of --launcher here,"
                f" byte for byte; {cut} files had lines past a checkpoint, which were cut",
                flush=True,
            )
            if not given.returned:
                stopped = folder / "stopped"
                process = aggcli(stopped, length, *on_ray)
                until(process, stopped, "sample_mean/seed-0", 8)
                process.send_signal(signal.SIGINT)
                said = ended(process, 130)
                print("interrupted:", next(iter(re.findall(r"stopped after [^;]*", said)), said), flush=True)
                ended(aggcli(stopped, length, *on_ray, "--resume"))
                apart = different(serial, stopped)
                faults += apart
                print(f"resumed: {24 - len(apart)} of 24 files are the same, byte for byte", flush=True)
        finally:
            cluster.shutdown()
    print("\n".join(faults) if faults else "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
