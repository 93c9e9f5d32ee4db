"""What an optimizer step of a stack reports: every run's own, by the same measurement as a replayed step.

Each run's ranks measure their own slices under the layout in force: in this process, or on real ranks from what each rank has
computed itself. On steps that are checked, the other layouts are evaluated too, and the layout in force once more in one
process where its ranks are real.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.layout.schedule import Layout, Schedule, schedule_step
from aggcli.layout.views import GlobalView, cut
from aggcli.measurement.groups import group_values
from aggcli.measurement.local import MeasureConfig, measure
from aggcli.measurement.ranks import reduced
from aggcli.measurement.report import StepReport, Values
from aggcli.measurement.step import Head, Measured, measure_config, report_step
from aggcli.objective.step import StepInputs, step_inputs, weighing_of
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch
from aggcli.training.stack import RunSpec
from aggcli.training.step import Gradient, StepTokens
from aggcli.world import World

MOST_LOG_RATIO = math.log(torch.finfo(torch.float64).max) / 2
"""The largest log-probability ratio, in nats, whose square float64 holds."""


@dataclass(frozen=True)
class RunReport:
    """One run's optimizer step. `checked`: whether it was evaluated under the other layouts too."""

    run: RunSpec
    step: StepReport
    checked: bool

    @property
    def values(self) -> Values:
        """The numbers under the layout in force."""
        return self.step.values[self.run.mode]

    def metrics_line(self) -> dict[str, Any]:
        """What metrics.jsonl holds of the step."""
        return {**self.values, "layout_deviation": self.step.comparison.deviation}

    def layout_lines(self) -> list[dict[str, Any]]:
        """What layouts.jsonl holds of the step: nothing, unless it was checked."""
        mode = self.run.mode
        return [
            {"layout": report.layout, "evaluated": report.evaluated, **report.as_json(mode)}
            for report in (self.step.layouts if self.checked else [])
        ]


@dataclass(frozen=True, eq=False)
class _Ready:
    """One run's step, ready to be reported: `batch` holds its samples alone, `schedule` is the layout in force, and `own` what
    this rank has computed itself of the log-probabilities and entropies."""

    inputs: StepInputs
    schedule: Schedule
    measuring: MeasureConfig
    own: dict[str, Tensor]


@dataclass(frozen=True)
class Reporter:
    """Measures optimizer steps of a stack. `in_force`: the layout that training runs on; `others`: those that a checked step is
    evaluated under too. Every rank of the world must call `step`."""

    config: RunConfig
    in_force: Layout
    others: tuple[Layout, ...]
    response_limit: int
    world: World

    def step(
        self,
        number: int,
        runs: Mapping[int, RunSpec],
        step: RolloutBatch,
        given: StepTokens,
        found: Gradient,
        groups: Sequence[Values],
        extra: Sequence[Values],
        *,
        is_checked: bool,
    ) -> list[RunReport]:
        """A report for each of these runs (by position in the stack), at the root; nothing elsewhere. `groups`: the numbers of
        whole groups of every run of the stack; `extra`: further ones (gradient norm, ...).

        A run without a KL term reports no kl_loss, whatever the others of its stack need. The numbers of the runs must be
        finite (`not_reportable`).
        """
        ready = [self._ready(run, step, step.run_S == at, given, found) for at, run in runs.items()]
        measured = self._on_ranks(ready)
        if not self.world.is_root:
            return []
        reports = []
        for (at, run), one, of_ranks in zip(runs.items(), ready, measured, strict=True):
            others = [(layout, _schedule(layout, one.inputs.step)) for layout in (self.others if is_checked else ())]
            report = report_step(
                Head(number, step.name, "", extra=extra[at]),
                one.inputs,
                [(self.in_force, one.schedule), *others],
                one.measuring,
                groups[at],
                of_ranks,
                is_checked=is_checked,
                is_detailed=False,
            )
            reports.append(RunReport(run, report, is_checked))
        return reports

    def groups(self, batch: RolloutBatch, runs: int) -> list[Values]:
        """The numbers of each run that need whole groups, from the whole rollout batch."""
        found = []
        for run in range(runs):
            own = of_run(batch, batch.run_S == run)
            found.append(group_values(GlobalView.of(own), self.config.correct_threshold) if own.num_samples else {})
        return found

    def _ready(self, run: RunSpec, step: RolloutBatch, mine_S: Tensor, given: StepTokens, found: Gradient) -> _Ready:
        mine_T = torch.repeat_interleave(mine_S, step.response_length_S)
        batch = _with_streams(of_run(step, mine_S), mine_T, given, found, with_kl=bool(run.objective.kl_coef))
        schedule = _schedule(self.in_force, batch)
        names = weighing_of(run.rule, run.objective).names
        made = {
            names.metrics: given.metric_weight_T[mine_T],
            names.kl: given.kl_weight_T[mine_T],
            names.entropy: given.entropy_weight_T[mine_T],
            names.loss: given.loss_weight_T[mine_T],
        }
        inputs = step_inputs(batch, run.objective, (run.rule,), torch.float64, schedule=schedule, made=made)
        measuring = measure_config(inputs, run.objective, self.config, self.response_limit, with_gradient=False)
        own = {"log_probs": found.own_log_probs_T[mine_T], "entropy": found.own_entropy_T[mine_T]}
        if given.old_log_probs_T is None:  # the policy itself is the old one
            own |= {name: own["log_probs"] for name in ("old_log_probs", "trainer_log_probs") if name in inputs.tokens}
        return _Ready(inputs, schedule, measuring, own)

    def _on_ranks(self, ready: Sequence[_Ready]) -> list[Measured | None]:
        """What real ranks measure, each from its own slice and from what it has computed itself; None where there are none."""
        if self.world.size == 1:
            return [None] * len(ready)
        own = []
        for one in ready:
            (view,) = cut(
                one.inputs.step,
                one.schedule,
                self.in_force.cp,
                tokens=one.inputs.tokens | one.own,
                weights=one.inputs.weights,
                sequences=one.inputs.sequences,
                only=self.world.rank,
            )
            own.append(measure(view, one.measuring))
        return [*reduced(self.world, own)]


def not_reportable(step: RolloutBatch, runs: Sequence[RunSpec], given: StepTokens, found: Gradient) -> dict[str, str]:
    """Runs with a trained token whose log-probability or entropy is not finite, or whose ratio overflows: by name, what is
    wrong."""
    log_ratio_T = torch.zeros(()) if given.old_log_probs_T is None else found.log_probs_T - given.old_log_probs_T
    streams = [found.log_probs_T, found.entropy_T, given.old_log_probs_T, given.ref_log_probs_T]
    infinite_T = torch.zeros_like(step.loss_mask_T)
    for stream_T in streams:
        if stream_T is not None:
            infinite_T |= ~torch.isfinite(stream_T)
    wrong = {
        "its log-probabilities are not finite": infinite_T,
        "its importance ratio overflows": log_ratio_T > MOST_LOG_RATIO,
    }
    run_T = torch.repeat_interleave(step.run_S, step.response_length_S)
    refused: dict[str, str] = {}
    for text, wrong_T in wrong.items():
        for at in run_T[step.loss_mask_T & wrong_T].unique().tolist():
            refused.setdefault(runs[at].name, text)
    return refused


def of_run(step: RolloutBatch, mine_S: Tensor) -> RolloutBatch:
    """The samples of one run of a stack, with ids from 0."""
    own = step.select(mine_S.nonzero().flatten())
    if not own.num_samples:
        return own
    known_S = own.group_S != NO_GROUP
    first = int(own.group_S[known_S].min()) if known_S.any() else 0
    return own.derived(
        rollout_S=own.rollout_S - own.rollout_S.min(),
        group_S=torch.where(known_S, own.group_S - first, NO_GROUP),
        run_S=torch.zeros_like(own.run_S),
    )


def _with_streams(own: RolloutBatch, mine_T: Tensor, given: StepTokens, found: Gradient, *, with_kl: bool) -> RolloutBatch:
    """One run's samples with the log-probabilities and entropies of this optimizer step, float64; `mine_T`: its tokens. What is
    not finite has been looked for (`not_reportable`)."""
    log_probs_T, old_T, ref_T = found.log_probs_T[mine_T], given.old_log_probs_T, given.ref_log_probs_T
    sampler_T = own.rollout_log_probs_T
    return own.derived(
        log_probs_T=log_probs_T,
        old_log_probs_T=log_probs_T if old_T is None else old_T[mine_T].double(),
        ref_log_probs_T=ref_T[mine_T].double() if with_kl and ref_T is not None else None,
        entropy_T=found.entropy_T[mine_T],
        rollout_log_probs_T=None if sampler_T is None else sampler_T.double(),
    )


def _schedule(layout: Layout, step: RolloutBatch) -> Schedule:
    return schedule_step(layout, step.total_length_S.tolist())
