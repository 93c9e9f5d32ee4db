"""What an optimizer step of a stack reports: every run's own, by the same measurement as a replayed step.

Each run's ranks measure their own slices under the layout in force: in this process, or on real ranks from what each rank has
computed itself. On steps that are checked, the other layouts are evaluated too, and the layout in force once more in one
process where its ranks are real.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig, RunConfig
from aggcli.layout.schedule import Layout, Schedule, schedule_step
from aggcli.layout.views import GlobalView, cut_out
from aggcli.measurement.groups import group_values
from aggcli.measurement.local import MeasureConfig, measure
from aggcli.measurement.ranks import Measured, reduced
from aggcli.measurement.reduce import combine
from aggcli.measurement.report import TWIN, StepReport, Values
from aggcli.measurement.step import Head, MeasuredLayout, measure_config, measure_ranks, report_step
from aggcli.objective.step import OWN, OWN_WEIGHTS, StepInputs, step_inputs
from aggcli.objective.weighing import weighing_of
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, Spread
from aggcli.rules import SAMPLE_MEAN
from aggcli.training.stack import RunSpec
from aggcli.training.step import Gradient, StepTokens, stack_weights
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
class _Stack:
    """Runs whose settings are the same but for their rules, ready to be measured together.

    `inputs`: of all of them, run after run, with the weights of each run's own rule by what they weigh (`OWN_WEIGHTS`);
    `of_runs`: of each run; `own`: what this rank has computed itself of the log-probabilities and entropies.
    """

    runs: list[RunSpec]
    inputs: StepInputs
    of_runs: list[StepInputs]
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
        numbers: Sequence[int],
        runs: Mapping[int, RunSpec],
        step: RolloutBatch,
        given: StepTokens,
        found: Gradient,
        groups: Sequence[Values],
        extra: Sequence[Values],
        *,
        is_checked: bool,
    ) -> list[RunReport]:
        """A report for each of these runs (by position in the stack), at the root; nothing elsewhere. `numbers`: of this
        optimizer step in every run of the stack; `groups`: the numbers of its whole groups; `extra`: further ones (gradient
        norm, ...).

        A run without a KL term reports no kl_loss, whatever the others of its stack need. The numbers of the runs must be
        finite (`not_reportable`).
        """
        alike: dict[ObjectiveConfig, dict[int, RunSpec]] = {}
        for at, run in runs.items():
            alike.setdefault(run.objective.under(SAMPLE_MEAN), {})[at] = run
        reports: dict[int, RunReport] = {}
        for some in alike.values():
            stack = self._stack(some, step, given, found)
            measured = self._measured(stack, is_checked=is_checked)
            if not self.world.is_root:
                continue
            for (at, run), inputs, layouts in zip(some.items(), stack.of_runs, measured, strict=True):
                head = Head(numbers[at], step.name, "", extra=extra[at])
                report = report_step(head, inputs, layouts, stack.measuring, groups[at], is_detailed=False)
                reports[at] = RunReport(run, report, is_checked)
        return [reports[at] for at in runs if at in reports]

    def groups(self, batch: RolloutBatch, runs: int) -> list[Values]:
        """The numbers of each run that need whole groups, from the whole rollout batch."""
        return group_values(GlobalView.of(batch), self.config.correct_threshold, runs)

    def _stack(self, runs: Mapping[int, RunSpec], step: RolloutBatch, given: StepTokens, found: Gradient) -> _Stack:
        specs, at_R = list(runs.values()), torch.tensor(list(runs))
        objective = specs[0].objective
        mine_S = torch.isin(step.run_S, at_R)
        is_whole = bool(mine_S.all())
        mine_T = slice(None) if is_whole else torch.repeat_interleave(mine_S, step.response_length_S)
        mine = step if is_whole else step.select(mine_S.nonzero().flatten())
        batch = _with_streams(mine, mine_T, given, found, with_kl=bool(objective.kl_coef))
        inputs = step_inputs(batch.derived(run_S=torch.searchsorted(at_R, batch.run_S)), objective, (), torch.float64)
        weights = {name: weight_T if is_whole else weight_T[mine_T] for name, weight_T in given.weights.items()}
        inputs = replace(inputs, weights=weights)
        measuring = measure_config(inputs, objective, self.config, self.response_limit, with_gradient=False)
        own = {"log_probs": found.own_log_probs_T[mine_T], "entropy": found.own_entropy_T[mine_T]}
        if given.old_log_probs_T is None:  # the policy itself is the old one
            own |= {name: own["log_probs"] for name in ("old_log_probs", "trainer_log_probs") if name in inputs.tokens}
        return _Stack(
            specs, inputs, _of_runs(inputs, specs), replace(measuring, rules=(OWN,), weighing={OWN: OWN_WEIGHTS}), own
        )

    def _measured(self, stack: _Stack, *, is_checked: bool) -> list[list[MeasuredLayout]]:
        """By run: what the ranks measure under the layout in force and, where the step is checked, under the others."""
        measured = [list[MeasuredLayout]() for _ in stack.runs]
        whole, moves = stack.inputs.whole, any(one.moves(*one.rules) for one in stack.of_runs)
        for layout in (self.in_force, *(self.others if is_checked and self.world.is_root else ())):
            schedules = [schedule_step(layout, one.step.total_length_S.tolist()) for one in stack.of_runs]
            of_ranks: list[tuple[str, list[Measured]]] = []
            if layout is self.in_force and self.world.size > 1:
                of_ranks.append(("processes", self._on_ranks(stack, schedules)))
            elif layout is not self.in_force and moves:
                weights = stack_weights(whole.step, stack.runs, layout)
                whole = whole.under(dict(zip(OWN_WEIGHTS, weights, strict=True)))
            if self.world.is_root and (is_checked or not of_ranks):
                found = [
                    [part.under(run.mode) for part in parts]
                    for run, parts in zip(stack.runs, measure_ranks(whole, schedules, layout.cp, stack.measuring), strict=True)
                ]
                of_ranks.append((TWIN if of_ranks else "in-process", [(parts, combine(parts)) for parts in found]))
            for how, of_runs in of_ranks:
                for at, (parts, total) in enumerate(of_runs):
                    measured[at].append(MeasuredLayout(layout, schedules[at], how, parts, total))
        return measured

    def _on_ranks(self, stack: _Stack, schedules: Sequence[Schedule]) -> list[Measured]:
        """What real ranks measure of each run, each from its own slice and from what it has computed itself."""
        inputs = replace(stack.inputs, tokens=stack.inputs.tokens | stack.own)
        own = measure([cut_out(inputs.whole, schedules, self.in_force.cp, self.world.rank)], stack.measuring).values()
        return reduced(self.world, [part.under(run.mode) for part, run in zip(own, stack.runs, strict=True)])


def _of_runs(inputs: StepInputs, runs: Sequence[RunSpec]) -> list[StepInputs]:
    """Each run's own part of the inputs of a stack, under its own rule."""
    steps = by_run(inputs.step, len(runs))
    tokens = _split(inputs.tokens, [step.loss_mask_T.numel() for step in steps])
    weights = _split({name: inputs.weight_T(name) for name in OWN_WEIGHTS}, [step.loss_mask_T.numel() for step in steps])
    sequences = _split(inputs.sequences, [step.num_samples for step in steps])
    found = []
    for at, run in enumerate(runs):
        weighing = weighing_of(run.rule, run.objective)
        own: dict[str, Tensor | Spread] = {name: weights[at][of] for name, of in zip(weighing.names, OWN_WEIGHTS, strict=True)}
        found.append(StepInputs(steps[at], tokens[at], own, (run.rule,), {run.mode: weighing}, inputs.has_ratio, sequences[at]))
    return found


def _split(arrays: Mapping[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """The arrays of each run, so many numbers each."""
    of_runs = zip(*(torch.split_with_sizes(value, sizes) for value in arrays.values()), strict=True)
    return [dict(zip(arrays, of_run, strict=True)) for of_run in of_runs] if arrays else [{} for _ in sizes]


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
    refused: dict[str, str] = {}
    for text, wrong_T in wrong.items():
        if wrong_T.any():
            run_T = torch.repeat_interleave(step.run_S, step.response_length_S)
            for at in run_T[step.loss_mask_T & wrong_T].unique().tolist():
                refused.setdefault(runs[at].name, text)
    return refused


def by_run(step: RolloutBatch, runs: int) -> list[RolloutBatch]:
    """The samples of each run of a stack, which stand run after run, with ids from 0; of a run alone, as they are."""
    if runs == 1:
        return [step]
    from_0 = step.derived(
        rollout_S=_from_0(step.rollout_S, step.run_S),
        group_S=_from_0(step.group_S, step.run_S),
        run_S=torch.zeros_like(step.run_S),
    )
    return from_0.split(torch.bincount(step.run_S, minlength=runs).tolist())


def _from_0(id_S: Tensor, run_S: Tensor) -> Tensor:
    """Ids less the smallest of their run; `NO_GROUP` stays."""
    known_S = id_S != NO_GROUP
    first_R = torch.full((int(run_S.max()) + 1 if run_S.numel() else 0,), torch.iinfo(torch.int64).max)
    first_R.scatter_reduce_(0, run_S[known_S], id_S[known_S], "amin")
    return torch.where(known_S, id_S - first_R[run_S], NO_GROUP)


def _with_streams(
    own: RolloutBatch, mine_T: Tensor | slice, given: StepTokens, found: Gradient, *, with_kl: bool
) -> RolloutBatch:
    """Some runs' samples with the log-probabilities and entropies of this optimizer step, float64; `mine_T`: their tokens. What
    is not finite has been looked for (`not_reportable`)."""
    log_probs_T, old_T, ref_T = found.log_probs_T[mine_T], given.old_log_probs_T, given.ref_log_probs_T
    sampler_T = own.rollout_log_probs_T
    return own.derived(
        log_probs_T=log_probs_T,
        old_log_probs_T=log_probs_T if old_T is None else old_T[mine_T].double(),
        ref_log_probs_T=ref_T[mine_T].double() if with_kl and ref_T is not None else None,
        entropy_T=found.entropy_T[mine_T],
        rollout_log_probs_T=None if sampler_T is None else sampler_T.double(),
    )
