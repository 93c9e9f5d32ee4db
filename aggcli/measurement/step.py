"""Measuring one optimizer step: every layout's ranks compute their own partial sums from their own slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from aggcli.config import ObjectiveConfig, RunConfig
from aggcli.errors import RolloutError, some
from aggcli.layout.schedule import Layout, Schedule
from aggcli.layout.views import LocalView, cut, cut_in_pieces
from aggcli.measurement.catalogue import checked
from aggcli.measurement.comparison import ROUNDING, LayoutComparison, compare_layouts, moved
from aggcli.measurement.influence import gradient_shares, influence
from aggcli.measurement.local import HELD, Adding, MeasureConfig, Partials, marks
from aggcli.measurement.notes import notes_on_step, skipped
from aggcli.measurement.ranks import Measured
from aggcli.measurement.reduce import combine, gradient_comparison, overflowed, rank_values, reduced_values, sizes
from aggcli.measurement.report import TWIN, LayoutReport, RankReport, StepReport, Values
from aggcli.measurement.samples import sample_columns, weight_of_samples
from aggcli.measurement.tokens import overflowing
from aggcli.measurement.trained_rollouts import over_trained_rollouts
from aggcli.objective.step import StepInputs, in_layout
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, is_first

Processes = Measured | Callable[[Sequence[LocalView]], Measured]
"""What real ranks have measured, or will when they are given their views."""


@dataclass(frozen=True)
class Head:
    """What a step is: its number, where it comes from, where its advantages do, what was said of it before, and numbers from
    elsewhere (`extra`, such as the norm of a gradient by parameters)."""

    step: int
    source: str
    advantages: str
    notes: Sequence[str] = ()
    extra: Values = field(default_factory=dict)


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


def report_step(
    head: Head,
    inputs: StepInputs,
    layouts: Sequence[tuple[Layout, Schedule]],
    measuring: MeasureConfig,
    groups: Values,
    processes: Processes | None = None,
    *,
    is_checked: bool = True,
    is_detailed: bool = True,
) -> StepReport:
    """The report of one optimizer step. `layouts`: the one in force first, each with what it makes of the step; `groups`: the
    numbers of whole groups; `processes`: the real ranks of the layout in force, whose numbers are then recorded, with the same
    layout in one process beside them as the check, where the step `is_checked`; `is_detailed`: with per-sample columns and what
    each rule does to the batch.

    A metric that overflows is None, and `skipped` says why. Raises `RolloutError` where the loss overflows.
    """
    step, rules = inputs.step, inputs.names
    shared = groups | {"rollouts": int(is_first(step.rollout_S).sum()), "prompts": _count_groups(step)}
    reports, total = _layout_reports(inputs, layouts, measuring, shared, processes, is_checked=is_checked)
    reasons = _overflows(inputs, total, measuring)
    recorded = [report for report in reports if report.evaluated != TWIN]
    done = _what_rules_do(inputs, total, measuring) if is_detailed else {}
    beside = over_trained_rollouts(inputs, measuring)
    values = {
        rule: recorded[0].values[rule] | beside.get(rule, {}) | shared | done.get(rule, {}) | checked(head.extra)
        for rule in rules
    }
    moving = {rule.name: rule for rule in inputs.rules if inputs.moves(rule)}
    comparison = compare_layouts(reports, [rule for rule in rules if rule not in moving], list(moving))
    return StepReport(
        step=head.step,
        source=head.source,
        rules=rules,
        values=values,
        layouts=recorded,
        comparison=comparison,
        advantages=head.advantages,
        empty=not bool(step.loss_mask_T.any()),
        notes=[*head.notes, *notes_on_step(inputs, values, recorded), *_moving(comparison, inputs)],
        skipped=skipped(inputs) | reasons,
        samples=sample_columns(step, measuring.correct_threshold) if is_detailed else {},
        weights={rule: weight_of_samples(step, inputs.weight_T(rule)) for rule in rules} if is_detailed else {},
    )


def _layout_reports(
    inputs: StepInputs,
    layouts: Sequence[tuple[Layout, Schedule]],
    measuring: MeasureConfig,
    shared: Values,
    processes: Processes | None,
    *,
    is_checked: bool,
) -> tuple[list[LayoutReport], Partials]:
    """A report for every layout, and the partial sums of the one in force, added up; after real ranks comes their twin."""
    reports: list[LayoutReport] = []
    totals: list[Partials] = []
    for at, (layout, schedule) in enumerate(layouts):
        placed = in_layout(inputs, schedule)
        measured: list[tuple[str, list[Partials], Partials]] = []
        if at == 0 and processes is not None:
            measured.append(("processes", *_of_processes(processes, placed, layout, schedule)))
        if not measured or is_checked:
            pieces = cut_in_pieces(
                placed.step, schedule, layout.cp, tokens=placed.tokens, weights=placed.weights, sequences=placed.sequences
            )
            parts = [part for of_rank in pieces for part in _measured(of_rank, layout.cp, measuring)]
            measured.append((TWIN if measured else "in-process", parts, combine(parts)))
        for how, of_ranks, total in measured:
            reports.append(_layout_report(layout, how, schedule, of_ranks, total, inputs, shared))
            totals.append(total)
    return reports, totals[0]


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


def _of_processes(processes: Processes, inputs: StepInputs, layout: Layout, schedule: Schedule) -> Measured:
    """What the real ranks measure of the layout in force, whose weights the inputs have."""
    if not callable(processes):
        return processes
    return processes(
        cut(inputs.step, schedule, layout.cp, tokens=inputs.tokens, weights=inputs.weights, sequences=inputs.sequences)
    )


def _measured(pieces: Iterable[Sequence[LocalView]], cp: int, measuring: MeasureConfig) -> list[Partials]:
    """What each context-parallel rank of a data-parallel rank contributes, from its pieces one after the other."""
    ranks = [Adding(measuring) for _ in range(cp)]
    for piece in pieces:
        for rank, view in zip(ranks, piece, strict=True):
            rank.add(view)
    return [rank.added() for rank in ranks]


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


def _layout_report(
    layout: Layout,
    evaluated: str,
    schedule: Schedule,
    parts: Sequence[Partials],
    total: Partials,
    inputs: StepInputs,
    shared: Values,
) -> LayoutReport:
    rules = inputs.names
    ranks = []
    misplaced = _not_once(schedule, inputs.step.num_samples)
    for rank, partition in enumerate(schedule.partitions):
        own = parts[rank * layout.cp : (rank + 1) * layout.cp]
        whole = combine(own)
        if whole.sums[HELD] != float(marks(torch.tensor(partition, dtype=torch.int64)).sum()):
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
    return LayoutReport(layout.text, evaluated, values, of, misplaced, shared, ranks, total.correct_lengths)


def _not_once(schedule: Schedule, samples: int) -> list[str]:
    """In words: the samples of the step that the layout gives to no rank, or more than once."""
    times = Counter(sample for partition in schedule.partitions for sample in partition)
    lost, twice = [at for at in range(samples) if not times[at]], [at for at in times if times[at] > 1]
    told = (("held by no rank", lost), ("held more than once", sorted(twice)))
    return [f"{'sample' if len(of) == 1 else 'samples'} {some(of)}: {how}" for how, of in told if of]


def _count_groups(step: RolloutBatch) -> int:
    known_S = step.group_S[step.group_S != NO_GROUP]
    return int(is_first(known_S).sum())
