"""What a training step reports, for every run of the stack, in force and under each layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aggcli.config import RunConfig
from aggcli.layout.schedule import Layout, schedule_step
from aggcli.layout.views import GlobalView, whole
from aggcli.measurement.catalogue import checked
from aggcli.measurement.groups import group_values
from aggcli.measurement.local import Contributions, MeasureConfig, Partials, contributions, per_cell
from aggcli.measurement.reduce import combine, rank_values, reduced_values
from aggcli.measurement.report import Values
from aggcli.objective.step import WeightNames, weighing_of
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch
from aggcli.training.stack import RunSpec
from aggcli.training.step import Gradient, StepTokens, stack_weights

IN_FORCE = "in force"
"""The rule of a stack: every run's own mode, by its own weights."""
METRICS = "metrics"
KL = "kl"
ENTROPY = "entropy"


@dataclass(frozen=True)
class RunReport:
    """One run's optimizer step: `values` under the layout in force; `layouts`: its line of each layout."""

    run: RunSpec
    values: Values
    layouts: list[dict[str, Any]]


@dataclass(frozen=True)
class Reporter:
    """Measures optimizer steps of a stack; everything is measured once, then added up by run and by rank."""

    config: RunConfig
    layouts: tuple[Layout, ...]
    response_limit: int

    def step(
        self,
        runs: Sequence[RunSpec],
        step: RolloutBatch,
        given: StepTokens,
        found: Gradient,
        groups: Sequence[Values],
        extra: Sequence[Values],
    ) -> list[RunReport]:
        """A report for every run. `groups`: each run's numbers of whole groups; `extra`: further ones (gradient norm, ...).

        A run without a KL term reports no kl_loss, whatever the others of its stack need.
        """
        measuring = self._measuring()
        columns = self._contributions(step, given, found, measuring)
        totals = per_cell(columns, step.run_S, len(runs), measuring)
        by_layout = [
            self._layout_lines(layout, runs, step, self._columns_in(layout, runs, step, given, found, columns), measuring)
            for layout in self.layouts
        ]
        reports = []
        for at, run in enumerate(runs):
            hidden = () if run.objective.kl_coef else ("kl_loss",)
            whole_step = groups[at] | _counts(step, step.run_S == at)
            values = _without(hidden, reduced_values(totals[at], IN_FORCE)) | whole_step | checked(extra[at])
            reports.append(RunReport(run, values, [{**_without(hidden, lines[at]), **whole_step} for lines in by_layout]))
        return reports

    def groups(self, batch: RolloutBatch, runs: int) -> list[Values]:
        """The numbers of each run that need whole groups, from the whole rollout batch."""
        return [_group_values(batch, batch.run_S == run, self.config.correct_threshold) for run in range(runs)]

    def _columns_in(
        self,
        layout: Layout,
        runs: Sequence[RunSpec],
        step: RolloutBatch,
        given: StepTokens,
        found: Gradient,
        in_force: Contributions,
    ) -> Contributions:
        """The columns under a layout: those in force, unless a run's rule has other weights there."""
        if not any(map(_moves, runs)):
            return in_force
        loss_T, metric_T, kl_T, entropy_T = stack_weights(step, runs, layout)
        moved = dataclasses.replace(
            given, loss_weight_T=loss_T, metric_weight_T=metric_T, kl_weight_T=kl_T, entropy_weight_T=entropy_T
        )
        return self._contributions(step, moved, found, self._measuring())

    def _measuring(self) -> MeasureConfig:
        return MeasureConfig(
            (IN_FORCE,),
            {IN_FORCE: WeightNames(IN_FORCE, METRICS, KL, ENTROPY)},
            self.config.objective,
            True,
            self.config.correct_threshold,
            self.response_limit,
            self.config.log_correct_samples,
            with_gradient=False,
        )

    def _contributions(self, step: RolloutBatch, given: StepTokens, found: Gradient, measuring: MeasureConfig) -> Contributions:
        new_T = found.log_probs_T
        tokens = {
            "loss_mask": step.loss_mask_T,
            "log_probs": new_T,
            "old_log_probs": new_T if given.old_log_probs_T is None else given.old_log_probs_T.double(),
            "advantages": given.advantages_T.double(),
            "entropy": found.entropy_T,
            "clip_low": given.clip_low_T.double(),
            "clip_high": given.clip_high_T.double(),
            "kl_coef": given.kl_coef_T.double(),
        }
        if given.ref_log_probs_T is not None:
            tokens["ref_log_probs"] = given.ref_log_probs_T.double()
        if step.rollout_log_probs_T is not None:
            tokens |= {
                "trainer_log_probs": tokens["old_log_probs"],
                "rollout_log_probs": step.rollout_log_probs_T.double(),
            }
        weights = {
            IN_FORCE: given.loss_weight_T.double(),
            METRICS: given.metric_weight_T.double(),
            KL: given.kl_weight_T.double(),
            ENTROPY: given.entropy_weight_T.double(),
        }
        return contributions(whole(step, tokens=tokens, weights=weights), measuring)

    def _layout_lines(
        self, layout: Layout, runs: Sequence[RunSpec], step: RolloutBatch, columns: Contributions, measuring: MeasureConfig
    ) -> list[dict[str, Any]]:
        """One line a run: the run's numbers reduced over the layout's ranks, and each rank's."""
        lengths = step.total_length_S.tolist()
        cell_S = torch.empty(step.num_samples, dtype=torch.int64)
        micro_batches = []
        for run in range(len(runs)):
            samples = (step.run_S == run).nonzero().flatten().tolist()
            schedule = schedule_step(layout, [lengths[sample] for sample in samples])
            for rank, partition in enumerate(schedule.partitions):
                cell_S[[samples[at] for at in partition]] = run * layout.dp + rank
                micro_batches.append(len(schedule.micro_batches[rank]))
        cells = per_cell(columns, cell_S, len(runs) * layout.dp, measuring)
        for cell, count in zip(cells, micro_batches, strict=True):
            cell.sums[("micro_batches",)] = float(count)
        return [_layout_line(layout, cells[run * layout.dp : (run + 1) * layout.dp]) for run in range(len(runs))]


def _layout_line(layout: Layout, ranks: Sequence[Partials]) -> dict[str, Any]:
    total = combine(ranks)
    line: dict[str, Any] = {"layout": layout.text, "evaluated": "in-process", **reduced_values(total, IN_FORCE)}
    shown = [{"rank": rank, **rank_values(part, IN_FORCE), **_lengths(part)} for rank, part in enumerate(ranks)]
    return {**line, **_lengths(total), "ranks": shown}


def _lengths(part: Partials) -> dict[str, Any]:
    return {} if part.correct_lengths is None else {"correct/lengths": part.correct_lengths}


def _group_values(step: RolloutBatch, mine_S: torch.Tensor, threshold: float) -> Values:
    reward_S = None if step.reward_S is None else step.reward_S[mine_S]
    group_S, rollout_S = step.group_S[mine_S], step.rollout_S[mine_S]
    if not group_S.numel():
        return {}
    known_S = group_S != NO_GROUP
    first = int(group_S[known_S].min()) if known_S.any() else 0
    view = GlobalView(reward_S, rollout_S - rollout_S.min(), torch.where(known_S, group_S - first, NO_GROUP))
    return group_values(view, threshold)


def _counts(step: RolloutBatch, mine_S: torch.Tensor) -> Values:
    group_S = step.group_S[mine_S]
    return {
        "rollouts": step.rollout_S[mine_S].unique().numel(),
        "prompts": group_S[group_S != NO_GROUP].unique().numel(),
    }


def _without(names: Sequence[str], line: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in line.items() if name not in names}
    return kept if "ranks" not in kept else {**kept, "ranks": [_without(names, rank) for rank in kept["ranks"]]}


def _moves(run: RunSpec) -> bool:
    """Whether a layout can change a number of the run."""
    return any(rule.depends_on_layout for rule in weighing_of(run.rule, run.objective).rules)


def deviation(report: RunReport) -> float:
    """The largest relative difference of pg_loss between the layouts of a report; 0 for a rule that is made to move."""
    if _moves(report.run):
        return 0.0
    losses = [line["pg_loss"] for line in report.layouts if line.get("pg_loss") is not None]
    scale = max([abs(loss) for loss in losses] + [report.values.get("total_weight") or 0.0], default=0.0)
    return (max(losses) - min(losses)) / scale if losses and scale else 0.0
