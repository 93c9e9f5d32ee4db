"""Measuring one optimizer step: every layout's ranks compute their own partial sums from their own slices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from aggcli.config import ObjectiveConfig, RunConfig
from aggcli.errors import RolloutError, some
from aggcli.layout.schedule import Layout, Schedule
from aggcli.layout.views import LocalView, Rank, WholeStep, cut, cut_in_pieces
from aggcli.measurement.catalogue import checked
from aggcli.measurement.comparison import ROUNDING, LayoutComparison, compare_layouts, moved
from aggcli.measurement.influence import gradient_shares, influence
from aggcli.measurement.local import HELD, MeasureConfig, Partials, marks, measure
from aggcli.measurement.notes import notes_on_step, skipped
from aggcli.measurement.ranks import Measured
from aggcli.measurement.reduce import combine, gradient_comparison, overflowed, rank_values, reduced_values, sizes
from aggcli.measurement.report import TWIN, LayoutReport, RankReport, StepReport, Values
from aggcli.measurement.samples import sample_columns, weight_of_samples
from aggcli.measurement.tokens import overflowing
from aggcli.measurement.trained_rollouts import over_trained_rollouts
from aggcli.objective.step import StepInputs, in_layout
from aggcli.rollouts.batch import NO_GROUP, distinct


@dataclass(frozen=True)
class Head:
    """What a step is: its number, where it comes from, where its advantages do, what was said of it before, and numbers from
    elsewhere (`extra`, such as the norm of a gradient by parameters)."""

    step: int
    source: str
    advantages: str
    notes: Sequence[str] = ()
    extra: Values = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredLayout:
    """What the ranks of a layout contribute to one run's step, data-parallel rank by rank and context-parallel within, and all
    of that added up. `evaluated`: as of `LayoutReport`."""

    layout: Layout
    schedule: Schedule
    evaluated: str
    ranks: Sequence[Partials]
    total: Partials


def measure_config(
    inputs: StepInputs, objective: ObjectiveConfig, config: RunConfig, max_response_length: int, *, with_gradient: bool = True
) -> MeasureConfig:
    """What is measured of these inputs, under these settings."""
    return MeasureConfig(
        inputs.names,
        inputs.weight_names,
        objective,
        inputs.has_ratio,
        config.correct_threshold,
        max_response_length,
        config.log_correct_samples,
        with_gradient,
    )


def measure_layouts(
    inputs: StepInputs,
    layouts: Sequence[tuple[Layout, Schedule]],
    measuring: MeasureConfig,
    processes: Callable[[Sequence[LocalView]], Measured] | None = None,
) -> list[MeasuredLayout]:
    """What the ranks of each layout measure of a step. `layouts`: the one in force first, each with what it makes of the step;
    `processes`: measures the views of the layout in force on real ranks, with the same layout in one process beside them as
    the check."""
    found = []
    for layout, schedule in layouts:
        whole = in_layout(inputs, schedule).whole
        how = "in-process"
        if processes is not None and not found:
            views = cut(whole, [schedule], layout.cp)
            found.append(MeasuredLayout(layout, schedule, "processes", *processes(views)))
            how = TWIN
        (ranks,) = measure_ranks(whole, [schedule], layout.cp, measuring)
        found.append(MeasuredLayout(layout, schedule, how, ranks, combine(ranks)))
    return found


def measure_ranks(whole: WholeStep, schedules: Sequence[Schedule], cp: int, measuring: MeasureConfig) -> list[list[Partials]]:
    """What each rank contributes, run by run, in this process: data-parallel rank by rank, context-parallel within."""
    found: dict[Rank, Partials] = {}
    for pieces in cut_in_pieces(whole, schedules, cp):
        found |= measure(pieces, measuring)
    of_runs: list[list[Partials]] = [[] for _ in schedules]
    for rank in sorted(found):
        of_runs[rank.run].append(found[rank])
    return of_runs


def report_step(
    head: Head,
    inputs: StepInputs,
    measured: Sequence[MeasuredLayout],
    measuring: MeasureConfig,
    groups: Values,
    *,
    is_detailed: bool = True,
) -> StepReport:
    """The report of one optimizer step. `measured`: the layout in force first, and after real ranks their twin; `groups`: the
    numbers of whole groups; `is_detailed`: with notes, per-sample columns and what each rule does to the batch.

    A metric that overflows is None, and `skipped` says why. Raises `RolloutError` where the loss overflows.
    """
    step, rules, total = inputs.step, inputs.names, measured[0].total
    shared = groups | {"rollouts": distinct(step.rollout_S), "prompts": distinct(step.group_S[step.group_S != NO_GROUP])}
    mark_S = marks(step.position_S).tolist()
    reports = [_layout_report(of_layout, inputs, mark_S, shared) for of_layout in measured]
    reasons = _overflows(inputs, total, measuring)
    recorded = [report for report in reports if report.evaluated != TWIN]
    done = _what_rules_do(inputs, total, measuring) if is_detailed else {}
    beside = over_trained_rollouts(inputs, measuring) if total.sums[("fully_masked_samples",)] else {}
    values = {
        rule: recorded[0].values[rule] | beside.get(rule, {}) | shared | done.get(rule, {}) | checked(head.extra)
        for rule in rules
    }
    moving = {rule.name: rule for rule in inputs.rules if inputs.moves(rule)}
    comparison = compare_layouts(reports, [rule for rule in rules if rule not in moving], list(moving))
    notes = [*notes_on_step(inputs, values, recorded), *_moving(comparison, inputs)] if is_detailed else []
    return StepReport(
        step=head.step,
        source=head.source,
        rules=rules,
        values=values,
        layouts=recorded,
        comparison=comparison,
        advantages=head.advantages,
        empty=not bool(step.loss_mask_T.any()),
        notes=[*head.notes, *notes],
        skipped=skipped(inputs) | reasons,
        samples=sample_columns(step, measuring.correct_threshold) if is_detailed else {},
        weights={rule: weight_of_samples(step, inputs.weight_T(rule)) for rule in rules} if is_detailed else {},
    )


def _overflows(inputs: StepInputs, total: Partials, measuring: MeasureConfig) -> dict[str, str]:
    """Metric -> why it is blank, for those that overflow. Raises `RolloutError` where the loss does."""
    reasons = {}
    for name in overflowed(total):
        token = overflowing(inputs.tokens, measuring.objective, name, has_ratio=inputs.has_ratio)
        where = inputs.step.name if token is None else inputs.step.token_name(token)
        dtype = torch.float64 if token is None else inputs.tokens["log_probs"].dtype
        what = f"overflows {str(dtype).removeprefix('torch.')}"
        if name in ("pg_loss", "loss"):
            raise RolloutError(
                f"{where}: {name} {what}: a log-probability or an advantage is too large; mask the token out or mend it"
            )
        reasons[name] = f"{what} at {where}"
    return reasons


def _what_rules_do(inputs: StepInputs, total: Partials, measuring: MeasureConfig) -> dict[str, Values]:
    """By rule: where its weight and its gradient go, and its gradient against the first rule's."""
    compared = gradient_comparison(total, inputs.names, inputs.names[0])
    shares = gradient_shares(inputs, measuring)
    return {
        rule: influence(inputs.step, inputs.weights[rule], measuring) | shares[rule] | compared.get(rule, {})
        for rule in inputs.names
    }


def _moving(comparison: LayoutComparison, inputs: StepInputs) -> list[str]:
    """A note for each rule whose numbers move with the layout, as it is made to: by how much, and why."""
    most = [found for found in comparison.moving.values() if found is not None and found.share > ROUNDING]
    why = {rule.name: inputs.why_it_moves(rule) for rule in inputs.rules if inputs.moves(rule)}
    return [moved(difference, why[difference.rule]) for difference in most]


def _layout_report(measured: MeasuredLayout, inputs: StepInputs, mark_S: Sequence[float], shared: Values) -> LayoutReport:
    """`mark_S`: the mark of each sample of the step (`marks`)."""
    layout, total, rules = measured.layout, measured.total, inputs.names
    ranks = []
    misplaced = _not_once(measured.schedule, inputs.step.num_samples)
    for rank, partition in enumerate(measured.schedule.partitions):
        own = measured.ranks[rank * layout.cp : (rank + 1) * layout.cp]
        whole = combine(own)
        if whole.sums[HELD] != math.fsum(mark_S[sample] for sample in partition):
            misplaced.append(f"rank {rank} does not hold the samples that the layout gives it")
        ranks.append(
            RankReport(
                rank,
                {rule: rank_values(whole, rule, empty=not total.sums[("tokens",)]) for rule in rules},
                {rule: sizes(whole, rule) for rule in rules},
                [round(part.sums[("response_tokens",)]) for part in own],
                list(partition),
                whole.correct_lengths,
            )
        )
    values = {rule: reduced_values(total, rule) for rule in rules}
    of = {rule: sizes(total, rule) for rule in rules}
    return LayoutReport(layout.text, measured.evaluated, values, of, misplaced, shared, ranks, total.correct_lengths)


def _not_once(schedule: Schedule, samples: int) -> list[str]:
    """In words: the samples of the step that the layout gives to no rank, or more than once."""
    if sorted(chain.from_iterable(schedule.partitions)) == list(range(samples)):
        return []
    times = Counter(sample for partition in schedule.partitions for sample in partition)
    lost, twice = [at for at in range(samples) if not times[at]], [at for at in times if times[at] > 1]
    told = (("held by no rank", lost), ("held more than once", sorted(twice)))
    return [f"{'sample' if len(of) == 1 else 'samples'} {some(of)}: {how}" for how, of in told if of]
