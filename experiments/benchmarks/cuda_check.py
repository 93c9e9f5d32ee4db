"""Does the GPU give the CPU's numbers, and what does a stack cost there? A run of a few minutes.

    python experiments/benchmarks/cuda_check.py [--steps 10] [--runs 1 4 20 100] [--json]

Prints the largest difference of the parameters after three float64 steps on CPU and CUDA, then for stacks of R runs the median
milliseconds per run and step, trained tokens a second, and the share of the device's measured float32 matmul rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from aggcli import grid
from aggcli.config import settings_from
from aggcli.policy.stacked import SmallStart
from aggcli.policy.transformer import shapes
from aggcli.rules import MODES
from aggcli.world import ALONE


def trained(device: str, dtype: str, runs: int, steps: int) -> tuple[torch.Tensor, list[tuple[float, int]], int]:
    """Final parameters [R, P], (seconds, response tokens) of each step, and the policy's matrix numbers."""
    config = settings_from({"steps": steps, "dtype": dtype, "device": device, "layout_records": False})
    setup = grid.set_up(config)
    modes = MODES if runs >= len(MODES) else MODES[:1]
    specs = grid.runs_of(config, modes, range(max(runs // len(modes), 1)), setup.response_limit)
    trainer = grid.trainer_of(setup, specs, ALONE)
    told = []
    for done in trainer.steps():
        if device == "cuda":
            torch.cuda.synchronize()
        told.append((done.seconds, done.tokens))
    assert isinstance(setup.start, SmallStart)
    matrices = sum(a * b for name, (a, b) in shapes(setup.start.shape).items() if name not in ("embedding", "position"))
    return trainer.policy.state()["parameters"].cpu(), told, matrices


def matmul_rate() -> float:
    """Measured float32 matrix product rate of the device, in operations a second (TF32 off)."""
    a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * 8192**3 / statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 20, 100])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("cuda_check: this machine has no CUDA device that torch can use; nothing was measured")
    on_cpu, on_gpu = (trained(device, "float64", 4, 3)[0] for device in ("cpu", "cuda"))
    rate = matmul_rate()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "largest_parameter_difference": float((on_cpu - on_gpu).abs().max()),
        "matmul_tflops": rate / 1e12,
        "stacks": {},
    }
    for runs in given.runs:
        _, told, matrices = trained("cuda", "float32", runs, given.steps)
        seconds = statistics.median(one[0] for one in told[1:])
        tokens = statistics.median(one[1] for one in told[1:])
        found["stacks"][runs] = {
            "ms_per_run_and_step": 1e3 * seconds / runs,
            "tokens_per_second": tokens / seconds,
            "share_of_matmul_rate": 8 * matrices * tokens / seconds / rate,
        }
    if given.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['device']}: parameters differ by at most {found['largest_parameter_difference']:.2e} after 3 float64 steps")
    print(f"float32 matmul: {found['matmul_tflops']:.1f} TFLOP/s")
    for runs, row in found["stacks"].items():
        print(
            f"R = {runs:>3}: {row['ms_per_run_and_step']:8.2f} ms per run and step, {row['tokens_per_second']:10.0f} tokens/s,"
            f" {row['share_of_matmul_rate']:.4f} of the matmul rate"
        )


if __name__ == "__main__":
    main()
