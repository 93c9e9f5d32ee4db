"""How long do decoding and one training pass take, per run and step, for stacks of 1, 4, 16 and 20 runs?

    python experiments/benchmarks/policy_speed.py [--runs 1 4 16 20] [--threads 1 2] [--repeats 7] [--profile]

128 rollouts a run (16 prompts x 8) of at most 32 tokens, float32, from the shipped warm start of `running-sum`, each run with
noise of its own. `decode` samples them; `train` is the forward and backward pass over them with prompts read once and rows
packed by length. Medians of `--repeats` steps, each on other prompts, then the fastest in brackets and the processor time of
all threads, since other work on the machine adds to the median most and to the processor time least.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch
from torch import Tensor

from aggcli.policy.log_probs import response_log_probs
from aggcli.policy.protocol import Noise
from aggcli.policy.sampling import sample
from aggcli.policy.transformer import Parameters, PolicyConfig, stacked
from aggcli.policy.warm_start import default_policy, starting_policy
from aggcli.tasks import SmallTask, make_task

PROMPTS, GROUP, LIMIT = 16, 8, 32


def step(task: SmallTask, config: PolicyConfig, parameters: Parameters, number: int) -> dict[str, float]:
    """Seconds of decoding and of training, on the clock and of processor time, and tokens drawn, all runs together."""
    runs, rows = parameters["head"].shape[0], PROMPTS * GROUP
    prompts = task.prompts(seed=0, step=number, count=PROMPTS)
    prompts_RPL = prompts.tokens_SL.expand(runs, -1, -1)
    noise_RBL = torch.stack([Noise((run,), number, 0, rows).uniforms(LIMIT)[0] for run in range(runs)])
    marks = [(time.perf_counter(), time.process_time())]
    sampled = sample(parameters, config, prompts_RPL, noise_RBL, end_id=task.end_id, pad_id=task.pad_id)
    marks.append((time.perf_counter(), time.process_time()))
    tokens_RBL = torch.cat([prompts_RPL.repeat_interleave(GROUP, 1), sampled.tokens_RBL], -1)
    train(task, config, parameters, tokens_RBL, sampled.length_RB)
    marks.append((time.perf_counter(), time.process_time()))
    (decode, decode_cpu), (train_, train_cpu) = [
        [after - before for before, after in zip(*pair, strict=True)] for pair in itertools.pairwise(marks)
    ]
    tokens = float(sampled.length_RB.sum())
    return {"decode": decode, "decode_cpu": decode_cpu, "train": train_, "train_cpu": train_cpu, "tokens": tokens}


def train(task: SmallTask, config: PolicyConfig, parameters: Parameters, tokens_RBL: Tensor, length_RB: Tensor) -> None:
    log_prob_RBC, _ = response_log_probs(parameters, config, tokens_RBL, task.prompt_length, length_RB)
    (log_prob_RBC.sum() / length_RB.numel()).backward()
    for value in parameters.values():
        value.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 16, 20])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    given = parser.parse_args()
    task = make_task("running-sum")
    config = default_policy(task, LIMIT)
    start = starting_policy(task, config)
    print("milliseconds per run and step: median (fastest; processor time)")
    print(f"{'threads':>7} {'runs':>4} {'decode':>25} {'train':>25} {'tokens/s':>9}")
    for threads in given.threads:
        torch.set_num_threads(threads)
        for runs in given.runs:
            parameters = {name: value.requires_grad_(True) for name, value in stacked(start, runs).items()}
            step(task, config, parameters, 0)  # the first pass allocates
            if given.profile:
                with torch.profiler.profile() as profile:
                    step(task, config, parameters, 0)
                print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))
            steps = [step(task, config, parameters, number) for number in range(1, given.repeats + 1)]
            cells = []
            for part in ("decode", "train"):
                wall, cpu = ([one[name] / runs * 1e3 for one in steps] for name in (part, part + "_cpu"))
                cells.append(f"{statistics.median(wall):8.2f} ({min(wall):6.2f}; {statistics.median(cpu):6.2f})")
            rate = statistics.median(one["tokens"] / (one["decode"] + one["train"]) for one in steps)
            print(f"{threads:7d} {runs:4d} {cells[0]:>25} {cells[1]:>25} {rate:9.0f}", flush=True)


if __name__ == "__main__":
    main()
