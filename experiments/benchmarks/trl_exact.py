"""Is a mode inside TRL's own trainer the closed form of the mode? Every mode on every `loss_type` that can carry one.

    pip install '.[trl]'
    python experiments/benchmarks/trl_exact.py        about three minutes of one core

One optimizer step of 16 completions of 4 prompts on a tiny random Llama in float32, under four modes x the loss types grpo,
dr_grpo, dapo, luspo and cispo x gradient accumulation 1, 2 and 4 x one and two processes (accelerate, gloo). Each line is the
largest difference of any parameter's gradient from the closed form of the mode, worked out one sample at a time, without
padding, from the rollouts that the trainer wrote; beside it the largest gradient. See `tests/trl_worker.py`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.test_trl import MODES, found_by
from tests.trl_worker import Case

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "luspo", "cispo")


def main() -> None:
    cases = [
        Case(
            f"{mode}-{loss_type}-{accumulation}",
            mode,
            loss_type,
            accumulation,
            options={"divisor": 7.0} if mode == "constant" else {},
            trl={"epsilon_high": 5.0} if loss_type == "cispo" else {},  # there it is the largest ratio itself
        )
        for mode in MODES
        for loss_type in LOSS_TYPES
        for accumulation in (1, 2, 4)
    ]
    print(f"{'mode':12} {'loss_type':9} {'accumulation':>12} {'processes':>9} {'apart':>9} {'largest':>9}")
    most = 0.0
    for world in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            found = found_by(cases, world, Path(folder))
        for case in cases:
            (step,) = found[case.name]["steps"]
            most = max(most, step["apart"])
            print(
                f"{case.mode or '':12} {case.loss_type:9} {case.accumulation:12} {world:9}"
                f" {step['apart']:9.1e} {step['largest']:9.1e}"
            )
    print(f"{2 * len(cases)} steps; the largest difference of any gradient: {most:.1e}")


if __name__ == "__main__":
    main()
