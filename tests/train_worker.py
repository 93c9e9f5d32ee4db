"""Small training runs for the tests; as a program, a grid of them on four real ranks (tests/test_training_ranks.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aggcli import grid
from aggcli.config import settings_from
from aggcli.policy.stacked import SmallStart
from aggcli.training.loop import Trainer
from aggcli.training.report import RunReport
from aggcli.training.stack import RunSpec
from aggcli.world import ALONE, World, join, leave
from tests.fixtures import MODES, rules_named

SMALL: dict[str, Any] = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "max_response_length": 16,
    "steps": 5,
    "dtype": "float64",
    "device": "cpu",
}
"""4 prompts x 4 of the six-digit task from its shipped warm start, in float64."""


def flags(**settings: Any) -> list[str]:
    """The small training's settings as the command line takes them; None leaves one out."""
    given = {**SMALL, **settings}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"recipe": "grpo", "kl_coef": 0.05},
    "dapo": {"recipe": "dapo"},
    "dr_grpo": {"recipe": "dr_grpo"},
    "several updates a batch": {"recipe": "grpo", "global_batch_size": 8, "num_iterations": 2, "entropy_coef": 0.01},
}
CUTS: dict[str, dict[str, Any]] = {"all": {}, "micro-batch 1": {"micro_batch_size": 1}, "40 tokens": {"max_tokens_per_gpu": 40}}
LAYOUTS = {"dp1": (1, 1), "dp2": (2, 1), "dp4": (4, 1), "dp2cp2": (2, 2), "dp1cp2": (1, 2)}
CASES = [
    (recipe, cut, layout)
    for recipe in RECIPES
    for cut in CUTS
    for layout in ("dp1", "dp2", "dp4", "dp2cp2")
    if cut == "all" or recipe != "several updates a batch"
]
"""The first of each recipe, one rank and one micro-batch, is what the others are compared with."""
FURTHER: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("gspo", ("dp1", "dp2cp2"), {"policy_loss": "gspo", "num_iterations": 3, "steps": 1, "micro_batch_size": 2, "lr": 0.01}),
    ("bfloat16", ("dp1", "dp1cp2"), {"dtype": "bfloat16", "steps": 2, "optimizer": "sgd", "lr": 0.1}),
    ("idle ranks", ("dp1", "dp4"), {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "steps": 3, "temperature": 1.3}),
)
"""(name, layouts, settings), each against its first layout; two samples leave two of four ranks without any."""


@dataclass(frozen=True)
class Trained:
    """A finished stack: the numbers of each run [R, P], and its reports, optimizer step by optimizer step."""

    trainer: Trainer
    flat_RQ: Tensor
    reports: dict[str, list[RunReport]]

    def values(self, run: str) -> list[dict[str, float | None]]:
        return [dict(report.values) for report in self.reports[run]]


def setup_of(**settings: Any) -> grid.Setup:
    return grid.set_up(settings_from({**SMALL, **settings}))


def small(setup: grid.Setup) -> SmallStart:
    """Where the small policies of a setup begin."""
    assert isinstance(setup.start, SmallStart)
    return setup.start


def runs_of(setup: grid.Setup, modes: Sequence[str] = MODES, seeds: Sequence[int] = (0,)) -> list[RunSpec]:
    return grid.runs_of(setup.config, rules_named(modes, setup.config.objective), seeds, setup.response_limit)


def train(setup: grid.Setup, runs: Sequence[RunSpec], world: World = ALONE) -> Trained:
    """Train to the end, keeping every report."""
    trainer = grid.trainer_of(setup, runs, world)
    reports: dict[str, list[RunReport]] = {run.name: [] for run in runs}
    for step in trainer.steps():
        for of_step in step.optimizer_steps:
            for report in of_step:
                reports[report.run.name].append(report)
    return Trained(trainer, trainer.policy.state()["parameters"], reports)


def largest_difference(a: Sequence[Mapping[str, float | None]], b: Sequence[Mapping[str, float | None]]) -> float:
    """Between two lists of metrics, absolute; infinite where only one has a number. Micro-batches are the layout's own."""
    assert len(a) == len(b)
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys(), left.keys() ^ right.keys()
        for name in left.keys() - {"micro_batches"}:
            value, other = left[name], right[name]
            if value is None or other is None:
                worst = max(worst, 0.0 if value is other else float("inf"))
            else:
                worst = max(worst, abs(value - other))
    return worst


def main(output: Path) -> None:
    world = join()
    torch.set_num_threads(1)
    worlds = {size: World(world.rank, size, dist.new_group(list(range(size)))) for size in (2, 4)} | {1: ALONE}
    found = []
    base: dict[str, Trained] = {}
    for recipe, cut, layout in CASES:
        dp, cp = LAYOUTS[layout]
        if world.rank >= dp * cp:
            continue
        setup = setup_of(**RECIPES[recipe], **CUTS[cut], dp=dp, cp=cp, layout_records=False)
        done = train(setup, runs_of(setup), worlds[dp * cp])
        spread = [float((other - done.flat_RQ).abs().max()) for other in worlds[dp * cp].tensors(done.flat_RQ)]
        if world.is_root:
            against = _against(done, base.setdefault(recipe, done))
            found.append({"recipe": recipe, "cut": cut, "layout": layout, "ranks": max(spread), **against})
    for name, layouts, settings in FURTHER:
        for layout in layouts:
            dp, cp = LAYOUTS[layout]
            if world.rank < dp * cp:
                setup = setup_of(**settings, dp=dp, cp=cp, layout_records=False)
                done = train(setup, runs_of(setup), worlds[dp * cp])
                found.append({"recipe": name, "cut": "all", "layout": layout, **_against(done, base.setdefault(name, done))})
    if world.is_root:
        output.write_text(json.dumps(found))
    leave(world)


def _against(done: Trained, base: Trained) -> dict[str, Any]:
    """How far each mode's parameters are from those of one rank (`parted`: as a share of the way that those have gone), and how
    far they are from where they began."""
    policy: Any = done.trainer.policy
    start_P = torch.cat([value.flatten() for value in policy.start.initial.values()])
    return {
        "parameters": dict(zip(MODES, (done.flat_RQ - base.flat_RQ).abs().amax(1).tolist(), strict=True)),
        "parted": ((done.flat_RQ - base.flat_RQ).norm(dim=1) / (base.flat_RQ - start_P).norm(dim=1)).tolist(),
        "moved": (base.flat_RQ - start_P).abs().amax(1).min().item(),
        "apart": (base.flat_RQ[1:] - base.flat_RQ[:1]).abs().amax(1).min().item(),
        "metrics": max(largest_difference(done.values(run), base.values(run)) for run in base.reports),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
