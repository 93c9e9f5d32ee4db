"""How fast is a stack of runs against TRL's GRPOTrainer on the same task, model size, batch, steps and response limit?

    pip install '.[trl]'
    python experiments/benchmarks/trl_side_by_side.py [--steps 100] [--threads 2] [--rounds 5] [--json]

Both train on `running-sum` (six digits, 16 prompts x 8 rollouts, at most 32 tokens) from a policy taught by
demonstrations (TRL's own model, a two-layer Llama of width 64, is taught here the same way), on the CPU:

1. TRL 1.16, one process of `--steps` steps: median seconds a step, and the seconds of the whole process.
2. aggcli, R = 1 (`run`), 4 (four modes) and 20 (4 modes x 5 seeds, `compare`): the whole command, and one run's step in it.
3. The ratios: a step of one run, a run's step in the stack of 20, and the whole of 20 runs against 20 TRL processes. All this
   `--rounds` times, every side in turn; ratios are taken within a round, and their median is told. The run alone takes a few
   seconds, in which a machine may be quicker or slower than in the half minute of TRL: it runs before TRL and after it, and
   its steps are taken together.
4. Where the time goes; the floating-point operations that a run's step does, counted by torch, beside those of
   the linear layers if every row were read as it stands; the share of the machine's measured float32 matmul rate that the
   stack of 20 reaches; and how many operations torch is asked for in a step, views among them.

The response lengths of both sides are printed, since the time depends on them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, GROUP, LIMIT, SEED = 16, 8, 32, 0
SUPERVISED_STEPS = 500
STACKS = {1: ["run"], 4: ["compare", "--seeds", "1"], 20: ["compare", "--seeds", "5"]}
"""Runs -> the command that trains them."""
TRL = 0
TURNS = (1, TRL, 1, 4, 20)
"""What runs in a round, in this order: TRL, or so many runs of ours."""


# -- TRL, in a process of its own -----------------------------------------------------------------------------------


def trl_model(task: Any) -> Any:
    """A Llama of the size of our policy (2 layers, width 64, 4 heads), taught on the task's demonstrations."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(task.vocabulary),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=task.pad_id,
        eos_token_id=task.end_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SUPERVISED_STEPS)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(SUPERVISED_STEPS):
        tokens_BL, prompt_length, length_B = task.demonstrations(generator, 128)
        place_L = torch.arange(tokens_BL.shape[1])
        taught_BL = (place_L >= prompt_length) & (place_L < length_B[:, None])
        loss = model(input_ids=tokens_BL, labels=torch.where(taught_BL, tokens_BL, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def trl_tokenizer(task: Any) -> Any:
    """One token a character, with the task's ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: at for at, character in enumerate(task.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=task.vocabulary[task.pad_id]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=task.vocabulary[task.end_id],
        pad_token=task.vocabulary[task.pad_id],
        padding_side="left",
    )


def trl_process(model_folder: Path, steps: int, threads: int) -> None:
    """One TRL run; prints JSON: seconds of each step, mean response length and reward of the last step."""
    import torch
    from datasets import Dataset
    from transformers import LlamaForCausalLM, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from aggcli.tasks import make_task

    torch.set_num_threads(threads)
    task = make_task("running-sum")
    prompts = task.prompts(SEED, 0, PROMPTS * steps)
    questions = zip(prompts.tokens_SL, prompts.answer_S, strict=True)
    rows = [{"prompt": task.text(tokens), "answer": int(answer)} for tokens, answer in questions]

    def reward(completion_ids: list[list[int]], answer: list[int], **_: Any) -> list[float | None]:
        found: list[float | None] = []
        for ids, right in zip(completion_ids, answer, strict=True):
            ended = bool(ids) and ids[-1] == task.end_id
            digits = [token for token in ids if token < 10]
            found.append(float(ended and bool(digits) and digits[-1] == right))
        return found

    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=LIMIT,
            max_steps=steps,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            max_grad_norm=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            logging_steps=max(steps // 4, 1),
            disable_tqdm=True,
            seed=SEED,
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(model_folder),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=trl_tokenizer(task),
            callbacks=[Clock()],
        )
        trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    told = {
        "steps": [after - before for before, after in itertools.pairwise(stamps)],
        "length_first": logs[0]["completions/mean_length"],
        "length_last": logs[-1]["completions/mean_length"],
        "reward_last": logs[-1]["reward"],
    }
    print("RESULT " + json.dumps(told))


# -- both sides -----------------------------------------------------------------------------------------------------


def timed(command: list[str], threads: int, **environment: str) -> tuple[float, str]:
    """Seconds of a whole process, and what it printed."""
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **environment}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return seconds, done.stdout


def shares(runs: int, steps: int) -> dict[str, float]:
    """Where the time of one process goes that trains `runs` runs: the shares of a step's parts, medians over steps."""
    trainer = trainer_of(runs, steps)
    sampling, reporting = Stopwatch(trainer.sampler, "step"), Stopwatch(trainer.reporter, "step")
    seconds = [done.seconds for done in trainer.steps()][1:]
    parts = {"sampling": statistics.median(sampling.seconds[1:]), "records": statistics.median(reporting.seconds[1:])}
    step = statistics.median(seconds)
    parts["gradient and update"] = step - sum(parts.values())
    return {name: part / step for name, part in parts.items()}


def trainer_of(runs: int, steps: int) -> Any:
    """Trains as many runs as a share has, mode by mode."""
    from aggcli import grid
    from aggcli.config import settings_from
    from aggcli.rules import MODES
    from aggcli.world import ALONE

    setup = grid.set_up(settings_from({"steps": steps, "max_response_length": LIMIT}))
    seeds = range(-(-runs // len(MODES)))
    return grid.trainer_of(setup, grid.runs_of(setup.config, MODES, seeds, LIMIT)[:runs], ALONE)


def step_operations(runs: int, steps: int) -> dict[str, float]:
    """Floating-point operations of a run's step, medians over steps but the first: `done`, as torch counts those of matrix
    products, attention among them, and `needed` by the linear layers to decode every token of every row (2 a parameter and
    token) and to train on it (6)."""
    from torch.utils.flop_counter import FlopCounterMode

    from aggcli.policy.transformer import shapes

    trainer = trainer_of(runs, steps)
    shape = trainer.policy.start.shape
    sizes = [math.prod(size) for name, size in shapes(shape).items() if name not in ("embedding", "position")]
    counted = []
    taken = trainer.steps()
    while True:
        with FlopCounterMode(display=False) as counter:
            step = next(taken, None)
        if step is None:
            break
        read = step.tokens + runs * PROMPTS * GROUP * trainer.policy.start.prompt_length
        counted.append((counter.get_total_flops() / runs, 8 * sum(sizes) * read / runs))
    done, needed = zip(*counted[1:], strict=True)
    return {"done": statistics.median(done), "needed": statistics.median(needed)}


def step_calls(runs: int, steps: int) -> int:
    """Operations that torch dispatches in a step of so many runs, views among them; median over steps but the first."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    found = []
    taken = trainer_of(runs, steps).steps()
    while True:
        with Counted() as counted:
            if next(taken, None) is None:
                return int(statistics.median(found[1:]))
        found.append(counted.calls)


def step_seconds(results: Path) -> list[float]:
    """Seconds of each step but the first of all runs of a results directory: of the slowest of the processes that share
    them."""
    slowest: dict[int, float] = {}
    for path in results.rglob("timings.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            slowest[line["rollout_step"]] = max(slowest.get(line["rollout_step"], 0.0), line["seconds"])
    return [seconds for step, seconds in slowest.items() if step]


class Stopwatch:
    """Times every call of one method of an object."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds: list[float] = []
        method = getattr(owner, name)

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - began)

        object.__setattr__(owner, name, timed_call)


def matmul_rate(threads: int) -> float:
    """Measured float32 matrix product rate of the machine, in floating-point operations a second."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(12):
        began = time.perf_counter()
        _ = a @ b
        times.append(time.perf_counter() - began)
    return 2 * 1024**3 / statistics.median(times[2:])


def one_round(model: Path, steps: int, threads: int) -> dict[str, Any]:
    """Every side in its turn, one after the other: seconds of whole processes, and of a run's step (medians over steps)."""
    here = str(Path(__file__).resolve())
    common = ["--steps", str(steps), "--max-response-length", str(LIMIT), "--json"]
    processes: dict[int, list[float]] = {side: [] for side in TURNS}
    took: dict[int, list[float]] = {side: [] for side in TURNS}
    trl, cut_into, told_us = {}, {}, ""
    for side in TURNS:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / str(side)
            own = ["-m", "aggcli", *STACKS.get(side, []), *common, "--output", str(output)]
            command = [here, "--trl", str(model), "--steps", str(steps)] if side == TRL else own
            seconds, told = timed([sys.executable, *command], threads)
            processes[side].append(seconds)
            if side == TRL:
                trl = json.loads(told.split("RESULT ", 1)[1].splitlines()[0])
                took[side] += trl.pop("steps")[2:]
            else:
                took[side] += [seconds / side for seconds in step_seconds(output)]
                cut_into[side] = json.loads((output / "manifest.json").read_text())["shares"]
                told_us = told
    whole, trl_step = processes[TRL][0], statistics.median(took[TRL])
    ours = {
        runs: {
            "process_s": statistics.median(processes[runs]),
            "step_s": statistics.median(took[runs]),
            "cut_into": cut_into[runs],
        }
        for runs in STACKS
    }
    return {
        "trl": {"process_s": whole, "step_s": trl_step, **trl},
        "aggcli": ours,
        "final": json.loads(told_us)["modes"],
        "matmul": matmul_rate(threads),
        "ratios": {
            "trl_step_over_single_run_step": trl_step / ours[1]["step_s"],
            "trl_step_over_stacked_run_step": trl_step / ours[20]["step_s"],
            "20_trl_processes_over_the_stack": 20 * whole / ours[20]["process_s"],
        },
    }


def measure(steps: int, threads: int, rounds: int) -> dict[str, Any]:
    from aggcli.tasks import make_task

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        trl_model(make_task("running-sum")).save_pretrained(model)
        done = [one_round(model, steps, threads) for _ in range(rounds)]

    def median(*place: Any) -> float:
        values: list[Any] = [functools.reduce(operator.getitem, place, one) for one in done]
        return statistics.median(values)

    last = done[-1]
    operations = step_operations(20 // last["aggcli"][20]["cut_into"], steps)
    return {
        "threads": threads,
        "steps": steps,
        "rounds": rounds,
        "trl": {**last["trl"], **{name: median("trl", name) for name in ("process_s", "step_s")}},
        "aggcli": {
            runs: {
                **cost,
                **{name: median("aggcli", runs, name) for name in ("process_s", "step_s")},
                "shares": shares(runs // cost["cut_into"], min(steps, 30)),
            }
            for runs, cost in last["aggcli"].items()
        },
        "final": last["final"],
        "ratios": {name: [one["ratios"][name] for one in done] for name in last["ratios"]},
        "matmul_gflops": median("matmul") / 1e9,
        "operations": operations,
        "calls": {runs: step_calls(runs // last["aggcli"][runs]["cut_into"], min(steps, 30)) for runs in (1, 20)},
        "share_of_matmul_rate": statistics.median(
            operations["done"] / one["aggcli"][20]["step_s"] / one["matmul"] for one in done
        ),
    }


def show(found: dict[str, Any]) -> None:
    from aggcli.measurement.words import plural

    trl, ours = found["trl"], found["aggcli"]
    accuracy = ", ".join(f"{mode} {figures['accuracy']['mean']:.3f}" for mode, figures in found["final"].items())
    print(f"{found['steps']} steps of {PROMPTS} x {GROUP} rollouts, at most {LIMIT} tokens, {found['threads']} threads")
    print(f"every side in turn, medians over {plural(found['rounds'], 'round')}:")
    print(f"TRL, one process:        {trl['process_s']:8.1f} s, {1e3 * trl['step_s']:7.1f} ms a step (median)")
    for runs, cost in ours.items():
        step, cut = f"{1e3 * cost['step_s']:7.1f} ms a run's step (median)", plural(cost["cut_into"], "share")
        print(f"aggcli, {plural(runs, 'run', 'runs'):16} {cost['process_s']:8.1f} s, {step}, in {cut}")
    lengths = f"TRL {trl['length_first']:.1f} to {trl['length_last']:.1f}"
    print(f"response length: {lengths}; final accuracy, aggcli: {accuracy}")
    for name, ratios in found["ratios"].items():
        each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"{name.replace('_', ' ')}: {statistics.median(ratios):.1f} (by round: {each})")
    done, needed = (found["operations"][name] / 1e9 for name in ("done", "needed"))
    print(f"a run's step: {done:.2f} GFLOP of matrix products; the linear layers alone, every row as it stands: {needed:.2f}")
    alone, stacked = found["calls"][1], found["calls"][20]
    together = plural(20 // ours[20]["cut_into"], "run")
    print(f"torch is asked for {alone:,} operations in a step of 1 run, {stacked:,} in one of {together} together")
    share = found["share_of_matmul_rate"]
    print(f"float32 matmul of the machine: {found['matmul_gflops']:.0f} GFLOP/s; the stack's share of it: {share:.2f}")
    for runs, cost in ours.items():
        told = ", ".join(f"{name} {share:.0%}" for name, share in cost["shares"].items())
        print(f"where the time goes, {plural(runs, 'run', 'runs')} in {plural(cost['cut_into'], 'share')}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl is not None:
        trl_process(given.trl, given.steps, int(os.environ["OMP_NUM_THREADS"]))
        return
    found = measure(given.steps, given.threads, given.rounds)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
