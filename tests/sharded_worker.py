"""A tiny language model cut over four real ranks, in a grid of layouts (tests/test_sharded.py); writes what it finds."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aggcli import grid
from aggcli.config import settings_from
from aggcli.policy.causal_lm import causal_start
from aggcli.policy.sharded import ShardedStart
from aggcli.records import CHECKPOINT_PARTS
from aggcli.training.checkpoint import Saver, filled, load, need_fit
from aggcli.training.loop import Trainer
from aggcli.world import ALONE, World, join, leave
from tests.fixtures import MODES
from tests.tiny_models import FAMILIES, tiny, write_tiny
from tests.train_worker import largest_difference, runs_of

BASE: dict[str, Any] = {
    "task": "tests.sharded_worker:Often",
    "dtype": "float64",
    "device": "cpu",
    "lr": 1e-2,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "max_response_length": 10,
    "micro_batch_size": 3,
    "kl_coef": 0.05,
    "clip_grad": 0.1,
    "layout_records": False,
}
LAYOUTS = {"dp1": (1, 1), "dp2": (2, 1), "dp4": (4, 1), "dp2cp2": (2, 2)}
SETTINGS: dict[str, dict[str, Any]] = {
    "all parameters": {},
    "whole responses": {"policy_loss": "gspo", "num_iterations": 2},
    "idle rank": {"rollout_batch_size": 1, "n_samples_per_prompt": 3},
    "adapters": {"lora_rank": 2, "gradient_checkpointing": True, "optimizer": "sgd"},
}
"""Whole responses: their ratio in a second update, from parts that context-parallel ranks hold; three samples leave one of four
ranks without any."""


@dataclasses.dataclass(frozen=True)
class Cases:
    """`trained`: (settings, layout), each against one process; `families`: (family, context-parallel ranks of four); `resumed`:
    (layout that a run is begun in for all steps but the last two, layout in which it goes on)."""

    steps: int
    trained: tuple[tuple[str, str], ...]
    families: tuple[tuple[str, int], ...]
    resumed: tuple[tuple[str, str], ...]


QUICK = Cases(
    3,
    (("whole responses", "dp2cp2"), ("idle rank", "dp4")),
    (("gpt2", 1), ("qwen2", 4)),
    (("dp2", "dp1"), ("dp2", "dp4"), ("dp1", "dp4")),
)
FULL = Cases(
    5,
    (
        *(("all parameters", layout) for layout in ("dp2", "dp4", "dp2cp2")),
        ("whole responses", "dp2cp2"),
        ("idle rank", "dp4"),
        ("adapters", "dp2"),
        ("adapters", "dp2cp2"),
    ),
    tuple((family, cp) for family in FAMILIES for cp in (1, 2, 4)),
    tuple((begun, layout) for begun in ("dp2", "dp1") for layout in ("dp1", "dp2", "dp4", "dp2cp2")),
)
"""The whole grid, minutes of two cores: `python -m tests.sharded_worker FOLDER FILE full`."""


class Often:
    """A task that random answers are right at half of the time."""

    def question(self, number: int) -> str:
        return f"say {number % 1000}"

    def score(self, number: int, response: str) -> float:
        return float(sum(map(ord, response)) % 2)


@dataclasses.dataclass(frozen=True)
class Done:
    """A trained stack, whole: parameters and the last step's gradient [R, Q], the numbers of each step of each run."""

    parameters_RQ: Tensor
    gradient_RQ: Tensor
    initial_Q: Tensor
    values: dict[str, list[Any]]
    held: list[int]


class Grid:
    def __init__(self, world: World, folder: Path, steps: int) -> None:
        self.world, self.folder, self.steps = world, folder, steps
        self.worlds = {size: World(world.rank, size, dist.new_group(list(range(size)))) for size in (2, 4)} | {1: ALONE}

    def trainer(self, layout: str, **more: Any) -> Trainer:
        dp, cp = LAYOUTS[layout]
        setup = grid.set_up(
            settings_from({**BASE, "model": str(self.folder / "tiny"), "steps": self.steps, **more, "dp": dp, "cp": cp})
        )
        return grid.trainer_of(setup, runs_of(setup), self.worlds[dp * cp])

    def takes_part(self, layout: str) -> bool:
        return self.world.rank < LAYOUTS[layout][0] * LAYOUTS[layout][1]

    def trained(self, trainer: Trainer) -> Done:
        policy: Any = trainer.policy
        step, gradients, values = policy.step, [], {}

        def kept(gradient_RQ: Tensor, norm_R: Tensor, stepping_R: Tensor) -> None:
            gradients.append(gradient_RQ.clone())
            step(gradient_RQ, norm_R, stepping_R)

        policy.step = kept
        for done in trainer.steps():
            for reports in done.optimizer_steps:
                for report in reports:
                    values.setdefault(report.run.name, []).append(dict(report.values))
        held = [int(size) for size in policy.shards.world.everyone(policy.flat_RQ.shape[1])]
        initial_RQ = policy.start.initial_Q[None].expand_as(policy.flat_RQ)
        numbers = [whole(policy, value) for value in (policy.flat_RQ, gradients[-1], initial_RQ)]
        return Done(numbers[0], numbers[1], numbers[2][0], values, held)


def whole(policy: Any, value_RQ: Tensor) -> Tensor:
    """The numbers of all ranks [R, Q], parameter after parameter."""
    parts = value_RQ.split([shape.numel() for shape in policy._shapes().values()], 1)
    found = []
    for (name, shape), part in zip(policy._shapes().items(), parts, strict=True):
        cut: Any = policy._to_state(name, part.reshape(len(part), *shape))
        found.append((cut.full_tensor() if policy.shards.world.size > 1 else cut).flatten(1))
    return torch.cat(found, 1)


def against(done: Done, base: Done) -> dict[str, Any]:
    return {
        "parameters": dict(zip(MODES, (done.parameters_RQ - base.parameters_RQ).abs().amax(1).tolist(), strict=True)),
        "gradient": dict(zip(MODES, (done.gradient_RQ - base.gradient_RQ).abs().amax(1).tolist(), strict=True)),
        "metrics": max(largest_difference(done.values[run], base.values[run]) for run in base.values),
        "size": float(base.gradient_RQ.abs().amax(1).min()),
        "moved": float((base.parameters_RQ - base.initial_Q).abs().amax(1).min()),
        "apart": float((base.parameters_RQ[1:] - base.parameters_RQ[:1]).abs().amax(1).min()),
        "held": done.held,
        "all": base.parameters_RQ.shape[1],
    }


def begin(ranks: Grid, layout: str, path: Path) -> None:
    """A run's first steps, the checkpoint after each, the last one written twice; then a killed writer's leftovers."""
    if ranks.takes_part(layout):
        path.parent.mkdir(exist_ok=True)
        trainer = ranks.trainer(layout)
        with Saver(path, trainer.world) as saver:
            for _ in range(ranks.steps - 2):
                next(iter(trainer.steps()))
                saver.save(trainer.checkpoint())
            saver.save(trainer.checkpoint())
        if trainer.world.is_root and trainer.world.size > 1:
            (unused,) = [name for name in CHECKPOINT_PARTS if not (path.parent / name).exists()]
            (path.parent / unused).mkdir()
            (path.parent / unused / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"cut")


def resumed(ranks: Grid, layout: str, path: Path) -> Done:
    """The rest of it, by ranks that may be others."""
    trainer = ranks.trainer(layout)
    checkpoint, like = load(path), trainer.checkpoint().tensors
    assert checkpoint is not None
    need_fit(path, checkpoint, [run.name for run in trainer.runs], like)
    trainer.restore(filled(checkpoint, like, trainer.world))
    return ranks.trained(trainer)


def gradients(family: str, world: World, start: Callable[[Any, Any], Any], cp: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a few rows, and the gradient of a weighted sum of them, of this rank's part of the world's rows."""
    generator = torch.Generator().manual_seed(1)
    prompt_B, length_B = torch.tensor([3, 5, 2, 4, 3]), torch.tensor([6, 1, 9, 0, 4])
    tokens_BL = torch.randint(40, (5, 12), generator=generator)
    weight_BC = torch.linspace(-1, 1, 45, dtype=torch.float64).view(5, 9)
    policy = start(copy.deepcopy(tiny(family)), settings_from({"dtype": "float64", "dp": world.size // cp, "cp": cp})).stack(
        [1.0], world
    )
    dp, mine = world.size // cp, torch.arange(5) % (world.size // cp) == world.rank // cp
    assert dp == 1 or not mine.all()
    log_probs_BC, gradient_RQ = torch.zeros(5, 9, dtype=torch.float64), policy.no_gradient()
    for some in policy.passes():
        log_prob_RBC, _, owned = some.log_probs(tokens_BL[mine][None], prompt_B[mine][None], length_B[mine][None])
        columns = log_prob_RBC.shape[-1]
        shown_BC = log_prob_RBC[0] if owned is None else torch.where(owned[0], log_prob_RBC[0], 0.0)
        some.add_gradient((shown_BC * weight_BC[mine, :columns]).sum(), gradient_RQ)
        log_probs_BC[mine, :columns] = shown_BC.detach()
    return world.add_up(log_probs_BC), whole(policy, gradient_RQ)


def main(folder: Path, output: Path, cases: Cases) -> None:
    world = join()
    ranks, trained, families, handed = Grid(world, folder, cases.steps), [], [], []
    names = dict.fromkeys(("all parameters", *(name for name, _ in cases.trained))) if world.is_root else ()
    base = {name: ranks.trained(ranks.trainer("dp1", **SETTINGS[name])) for name in names}
    for name, layout in cases.trained:
        dist.barrier()
        if ranks.takes_part(layout):
            done = ranks.trained(ranks.trainer(layout, **SETTINGS[name]))
            if world.is_root:
                trained.append({"settings": name, "layout": layout, **against(done, base[name])})
    for family, cp in cases.families:
        expected = gradients(family, ALONE, causal_start, 1)
        made = gradients(family, ranks.worlds[4], lambda module, config: ShardedStart(module, config, torch.device("cpu")), cp)
        apart = [float((mine - theirs).abs().max()) for mine, theirs in zip(made, expected, strict=True)]
        families.append({"family": family, "cp": cp, "apart": apart, "size": float(expected[1].abs().max())})
    for begun in dict.fromkeys(begun for begun, _ in cases.resumed):
        begin(ranks, begun, folder / begun / "checkpoint.safetensors")
    for begun, layout in cases.resumed:
        dist.barrier()
        if ranks.takes_part(layout):
            done = resumed(ranks, layout, folder / begun / "checkpoint.safetensors")
            if world.is_root:
                whole_run = base["all parameters"]
                late = {run: values[-2:] for run, values in whole_run.values.items()}
                entry = against(done, dataclasses.replace(whole_run, values=late))
                handed.append({"begun": begun, "layout": layout, **entry})
    if world.is_root:
        output.write_text(json.dumps({"trained": trained, "families": families, "resumed": handed}, indent=1) + "\n")
    leave(world)


def start(folder: Path, work: Callable[[], None]) -> int:
    """Four ranks, forked where everything is imported, which takes longer than the work. The first exit code that is not 0."""
    torch.set_num_threads(1)
    write_tiny(folder / "tiny")
    grid.set_up(settings_from({**BASE, "model": str(folder / "tiny")}))  # without a backward pass, after which none may fork
    import_module("torch.distributed.checkpoint")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ |= {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = []
    for rank in range(4):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ["RANK"] = str(rank)
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    code = 0
    for _ in range(4):
        code = os.waitstatus_to_exitcode(os.wait()[1])
        if code:
            break
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    return code


if __name__ == "__main__":
    place, cases = Path(sys.argv[1]), FULL if "full" in sys.argv[3:] else QUICK
    sys.exit(start(place, lambda: main(place, Path(sys.argv[2]), cases)))
