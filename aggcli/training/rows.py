"""Which rows of the step this rank runs, in which micro-batches: the schedule of the layout in force, run by run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aggcli.config import LayoutConfig
from aggcli.layout.schedule import Layout, Schedule, parse_layout, schedule_step, split_rollouts
from aggcli.rollouts.batch import RolloutBatch
from aggcli.world import World


def layout_in_force(config: LayoutConfig) -> Layout:
    """The layout that training runs on: its ranks are real."""
    ranks = f"dp{config.dp}cp{config.cp}" if config.cp > 1 else f"dp{config.dp}"
    return parse_layout(
        f"{ranks}:{config.partition}", max_tokens=config.max_tokens_per_gpu, micro_batch_size=config.micro_batch_size
    )


def rows_of_rank(step: RolloutBatch, runs: int, layout: Layout, world: World) -> list[Tensor]:
    """The micro-batches of this data-parallel rank, each [R, B] sample positions, -1 where a run has fewer rows.

    Micro-batch m of the rank holds micro-batch m of every run.
    """
    dp_rank = world.rank // layout.cp
    per_run: list[list[list[int]]] = []
    for schedule, samples in schedules_of_runs(step, runs, layout):
        partition = schedule.partitions[dp_rank]
        per_run.append([[samples[partition[at]] for at in part] for part in schedule.micro_batches[dp_rank]])
    most = max(len(micro_batches) for micro_batches in per_run)
    return [_matrix([parts[m] if m < len(parts) else [] for parts in per_run]) for m in range(most)]


def schedules_of_runs(step: RolloutBatch, runs: int, layout: Layout) -> list[tuple[Schedule, list[int]]]:
    """How the layout deals each run's share of the step, and the positions in the step of that run's samples."""
    lengths = step.total_length_S.tolist()
    found = []
    for run in range(runs):
        samples = (step.run_S == run).nonzero().flatten().tolist()
        found.append((schedule_step(layout, [lengths[sample] for sample in samples]), samples))
    return found


def _matrix(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(max(map(len, rows)), 1)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64)


def optimizer_step_positions(batch: RolloutBatch, runs: int, global_batch_size: int | None) -> list[Tensor]:
    """Sample positions of each optimizer step of a rollout batch: step k joins the k-th step of every run.

    Without a single sample there is one, empty, step.
    """
    if global_batch_size is None:
        return [torch.arange(batch.num_samples)]
    parts: list[list[int]] = []
    for run in range(runs):
        samples = (batch.run_S == run).nonzero().flatten().tolist()
        rollouts = batch.rollout_S[batch.run_S == run].tolist()
        for at, positions in enumerate(split_rollouts(rollouts, global_batch_size)):
            if at == len(parts):
                parts.append([])
            parts[at] += [samples[position] for position in positions]
    return [torch.tensor(part, dtype=torch.int64) for part in parts or [[]]]
