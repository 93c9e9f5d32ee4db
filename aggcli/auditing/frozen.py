"""A frozen batch: one optimizer step whose per-token losses are fixed, and the layouts that it is audited under."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.errors import RolloutError
from aggcli.layout.schedule import Schedule, parse_layout, schedule_step
from aggcli.layout.steps import Part
from aggcli.objective.policy_loss import policy_terms
from aggcli.objective.step import step_inputs, with_advantages
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder

Split = Sequence[Sequence[Sequence[int]]]
"""Rank -> micro-batches -> sample positions."""


@dataclass(frozen=True, eq=False)
class FrozenBatch:
    """`step`: one optimizer step, its advantages set; `loss_T`: the policy loss of each token, `slope_T`: its derivative by
    the log-probability (both float64 [T], 0 under the mask, None where nothing gives an advantage); `recorded`: the layout
    that the source says was used.
    """

    step: RolloutBatch
    loss_T: Tensor | None
    slope_T: Tensor | None
    recorded: Schedule | None = None


def freeze(batch: RolloutBatch, objective: ObjectiveConfig, part: Part | None = None) -> FrozenBatch:
    """The per-token losses of one optimizer step (`part`; default: the whole batch).

    Advantages come from whole groups, before the cut. Raises `RolloutError` as a replay does.
    """
    advantages_T, _ = with_advantages(batch, objective)
    step = dataclasses.replace(batch, advantages_T=advantages_T)
    if part is not None:
        step = step.select(torch.tensor(part.positions, dtype=torch.int64), name=part.name)
    if step.advantages_T is None:
        return FrozenBatch(step, None, None, part.recorded if part else None)
    tokens = step_inputs(step, objective, (), torch.float64).tokens
    new_T = tokens["log_probs"].detach().clone().requires_grad_()
    streams = (tokens["old_log_probs"], tokens["advantages"], tokens["loss_mask"])
    terms = policy_terms(new_T, *streams, objective, sequence_log_ratio_T=tokens.get("sequence_log_ratio"))
    (slope_T,) = torch.autograd.grad(terms.pg_loss_T.sum(), new_T)
    return FrozenBatch(step, terms.pg_loss_T.detach(), slope_T, part.recorded if part else None)


def batch_of(samples: Iterable[Mapping[str, object]], name: str = "samples") -> RolloutBatch:
    """Samples in the canonical fields (DESIGN, plain rollout JSONL) as a batch. Raises `RolloutError`."""
    builder = BatchBuilder(name)
    for sample in samples:
        builder.add(sample)
    return builder.build()


def schedule_of(split: Split, samples: int) -> Schedule:
    """The schedule that deals exactly this split. Raises `RolloutError` unless it holds each of `samples` samples once."""
    partitions = tuple(tuple(at for micro_batch in rank for at in micro_batch) for rank in split)
    if sorted(at for partition in partitions for at in partition) != list(range(samples)):
        raise RolloutError(
            f"the split must hold each of the {samples} samples exactly once; rank -> micro-batches -> positions"
        )
    micro_batches = []
    for rank in split:
        starts = [sum(len(micro_batch) for micro_batch in rank[:at]) for at in range(len(rank))]
        micro_batches.append(
            tuple(tuple(range(start, start + len(held))) for start, held in zip(starts, rank, strict=True) if len(held))
        )
    return Schedule(partitions, tuple(micro_batches))


# -- layouts --------------------------------------------------------------------------------------------------------

DEFAULT_LAYOUTS = (
    "dp1:contiguous",
    "dp1:contiguous:mb1",
    "dp1:contiguous:mb2",
    "dp1:contiguous:mb4",
    "dp2:interleaved:mb2",
    "dp2:contiguous:mb2",
    "dp2cp2:contiguous",
    "dp4:interleaved:mb1",
    "dp4:balanced",
)
"""The first is the reference: one rank that takes the whole step as one micro-batch."""


@dataclass(frozen=True)
class AuditLayout:
    """A layout as it was asked for, and what it makes of one step. `was_used`: the source says that it ran under it, so every
    rule is asked what it would have given there, also one whose own framework would not deal it."""

    text: str
    schedule: Schedule
    cp: int = 1
    was_used: bool = False


def scheduled_layouts(frozen: FrozenBatch, texts: Sequence[str], **budget: Any) -> list[AuditLayout]:
    """Schedules for `texts`: layouts as everywhere, or `recorded`.

    `budget`: `max_tokens`, `micro_batch_size` of layouts that name none. Raises `SettingError` for one that cannot be read.
    """
    lengths = frozen.step.total_length_S.tolist()
    found = []
    for text in dict.fromkeys(texts):
        layout = parse_layout(text, **budget)
        if layout.is_recorded:
            if frozen.recorded is None:
                raise RolloutError(f"{frozen.step.name}: layout 'recorded': the file records none (slime train dumps do)")
            found.append(AuditLayout(text, frozen.recorded, was_used=True))
        else:
            found.append(AuditLayout(text, schedule_step(layout, lengths), layout.cp))
    return found


# -- the built-in batch ---------------------------------------------------------------------------------------------


def built_in_batch() -> RolloutBatch:
    """Eight samples, made to tell rules apart. (Its 7 rollouts are as many as its rows that are not empty, so `constant` and
    tunix:sequence-mean-token-scale coincide, which differ elsewhere.)

    A rollout of two samples, prompt groups of 3, 3 and 2 samples, a fully masked sample, masked tokens at the end of the
    longest response and within another, a group of zero advantage, clipped ratios on either side, and no two lengths alike.
    """
    rows = (  # group, rollout, advantage, mask
        (0, 0, 0.75, "110"),
        (0, 0, 0.75, "11111"),
        (0, 1, -1.25, "1110111"),
        (1, 2, 2.0, "1111"),
        (1, 3, -0.5, "111111111100"),
        (1, 4, -1.0, "000000"),
        (2, 5, 0.0, "11"),
        (2, 6, 0.0, "111111111"),
    )
    samples = []
    for at, (group, rollout, advantage, mask) in enumerate(rows):
        old = [-1.0 - 0.125 * ((3 * t + at) % 7) for t in range(len(mask))]
        shift = [0.3 * math.sin(1.0 + 2.5 * t + at) for t in range(len(mask))]
        samples.append(
            {
                "group_index": group,
                "rollout_id": rollout,
                "response_length": len(mask),
                "total_length": len(mask) + 3 + group,
                "loss_mask": [int(bit) for bit in mask],
                "advantage": advantage,
                "reward": float(advantage > 0),
                "old_log_probs": old,
                "log_probs": [value + by for value, by in zip(old, shift, strict=True)],
            }
        )
    return batch_of(samples, "the built-in batch")
