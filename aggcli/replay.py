"""Recorded rollouts through the same objective, layouts and measurement as training, without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.errors import RolloutError
from aggcli.layout.schedule import Layout, Schedule, schedule_step
from aggcli.layout.steps import Part, layouts_of, need_whole_groups, optimizer_steps
from aggcli.layout.views import GlobalView, cut
from aggcli.measurement.groups import group_values
from aggcli.measurement.influence import influence
from aggcli.measurement.local import TOLERANCE, MeasureConfig, Partials, measure
from aggcli.measurement.notes import notes_on_step, skipped
from aggcli.measurement.ranks import measure_on_ranks
from aggcli.measurement.reduce import (
    LayoutReport,
    RankReport,
    Values,
    combine,
    deviation,
    gradient_comparison,
    not_finite,
    rank_values,
    reduced_values,
)
from aggcli.objective.aggregation import need_groups
from aggcli.objective.presets.registry import find_rule
from aggcli.objective.reducer import Reducer
from aggcli.objective.step import StepInputs, depends_on_layout, in_layout, step_inputs, why_it_depends, with_advantages
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, is_first
from aggcli.world import ALONE, World

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StepReport:
    """One optimizer step under every rule and layout.

    `values[rule]`: the numbers under the layout in force, with those of whole groups and of the rule's influence;
    `layouts`: the layout in force first; `deviation`: the largest relative difference between layouts (and between real
    processes and their in-process twin); `skipped`: metric -> what it would need; `samples`: per-sample columns;
    `sample_weights[rule]`: the total weight of each sample.
    """

    step: int
    source: str
    rules: tuple[str, ...]
    values: dict[str, Values]
    layouts: list[LayoutReport]
    deviation: float
    advantages: str
    empty: bool
    notes: list[str]
    skipped: dict[str, str]
    samples: dict[str, list[Any]]
    sample_weights: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """The step as `--json` prints it: modes -> numbers and layouts -> numbers and ranks."""
        modes = {
            rule: {**self.values[rule], "layouts": {report.layout: _layout_json(report, rule) for report in self.layouts}}
            for rule in self.rules
        }
        return {
            "step": self.step,
            "source": self.source,
            "advantages": self.advantages,
            "empty": self.empty,
            "layout_deviation": self.deviation,
            "modes": modes,
            "skipped": self.skipped,
            "notes": self.notes,
        }

    def metrics_line(self, rule: str) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        return {
            **self._head(rule),
            "layout": self.layouts[0].layout,
            **self.values[rule],
            "advantages": self.advantages,
            "empty": self.empty,
            "layout_deviation": self.deviation,
            "skipped": self.skipped,
            "notes": self.notes,
        }

    def layout_lines(self, rule: str) -> list[dict[str, Any]]:
        """The lines of layouts.jsonl for this step."""
        return [
            {**self._head(rule), "layout": report.layout, "evaluated": report.evaluated, **_layout_json(report, rule)}
            for report in self.layouts
        ]

    def sample_columns(self, rule: str) -> dict[str, list[Any]]:
        """The columns of the step's sample file."""
        return {**self.samples, "weight": self.sample_weights[rule]}

    def _head(self, rule: str) -> dict[str, Any]:
        return {"step": self.step, "source": self.source, "mode": rule}


@dataclass(frozen=True)
class Replay:
    """What a replay needs besides the rollouts.

    `modes`: the modes compared, in order (none: only the custom reducer); `lenient`: leave prompt_mean out, with a note,
    where the data cannot support it, instead of refusing; `max_response_length`: tokens.
    """

    config: RunConfig
    modes: tuple[str, ...]
    lenient: bool
    max_response_length: int
    reducer: Reducer | None = None
    world: World = ALONE

    def steps(self, batches: Iterable[RolloutBatch]) -> Iterator[StepReport]:
        """A report for every optimizer step, in order. The other ranks of the world run `serve` meanwhile.

        Raises `RolloutError` for data that the settings cannot use.
        """
        number = 0
        for batch in batches:
            advantages_T, origin = with_advantages(batch, self.config.objective)
            batch = dataclasses.replace(batch, advantages_T=advantages_T)
            parts = optimizer_steps(batch, self.config.layout.global_batch_size)
            groups = group_values(_global_view(batch), self.config.correct_threshold)
            for part in parts:
                step = batch.select(torch.tensor(part.positions, dtype=torch.int64), name=part.name)
                modes, left_out = self._usable_modes(step, batch, parts)
                dtype = DTYPES[self.config.dtype or "float64"]
                layouts = self._scheduled(step, part)
                inputs = step_inputs(step, self.config.objective, modes, dtype, self.reducer, layouts[0][1])
                report = self._report(number, inputs, layouts, groups)
                notes = [*batch.notes, *left_out, *part.notes, *report.notes]
                yield dataclasses.replace(report, source=batch.name, advantages=origin, notes=notes)
                number += 1

    def _usable_modes(self, step: RolloutBatch, batch: RolloutBatch, parts: list[Part]) -> tuple[tuple[str, ...], list[str]]:
        grouped = {mode for mode in self.modes if find_rule(mode).preset.needs_groups}
        if not grouped:
            return self.modes, []
        try:
            need_groups(step)
            need_whole_groups(batch, parts)
        except RolloutError as error:
            if not self.lenient:
                raise
            return tuple(mode for mode in self.modes if mode not in grouped), [
                f"{', '.join(sorted(grouped))} is left out: {str(error).removeprefix(step.name).lstrip(',: ')}"
            ]
        return self.modes, []

    def _scheduled(self, step: RolloutBatch, part: Part) -> list[tuple[Layout, Schedule]]:
        """The layouts of the step, the one in force first, each with what it makes of the step."""
        found = []
        for layout in layouts_of(self.config.layout, has_recorded=part.recorded is not None):
            schedule = part.recorded if layout.is_recorded else schedule_step(layout, step.total_length_S.tolist())
            if schedule is None:
                raise RolloutError(f"{step.name}: layout 'recorded': the file records none (slime train dumps do)")
            found.append((layout, schedule))
        return found

    def _report(
        self, number: int, inputs: StepInputs, layouts: Sequence[tuple[Layout, Schedule]], groups: Values
    ) -> StepReport:
        step, rules = inputs.step, inputs.rules
        measuring = self._measuring(inputs)
        reports, totals = self._layout_reports(inputs, measuring, layouts)
        if bad := not_finite(totals[0]):
            raise RolloutError(
                f"{step.name}: {bad} overflows float64: a log-probability or an advantage is too large; mask it out or mend it"
            )
        recorded = [report for report in reports if report.evaluated != TWIN]
        exact = [rule for rule in rules if not depends_on_layout(rule)]
        compared = gradient_comparison(totals[0], rules, rules[0])
        whole = groups | {"rollouts": int(is_first(step.rollout_S).sum()), "prompts": _count_groups(step)}
        values = {
            rule: recorded[0].values[rule] | whole | influence(step, inputs.weights[rule], measuring) | compared.get(rule, {})
            for rule in rules
        }
        return StepReport(
            step=number,
            source=step.name,
            rules=rules,
            values=values,
            layouts=[with_group_values(report, whole) for report in recorded],
            deviation=deviation([_of_rules(report, exact) for report in reports]),
            advantages="",
            empty=not bool(step.loss_mask_T.any()),
            notes=[*notes_on_step(inputs, values, recorded), *_moving(recorded, rules, exact)],
            skipped=skipped(inputs),
            samples=_sample_columns(step, self.config.correct_threshold),
            sample_weights={rule: _weight_of_samples(step, inputs.weights[rule]) for rule in rules},
        )

    def _measuring(self, inputs: StepInputs) -> MeasureConfig:
        return MeasureConfig(
            inputs.rules,
            inputs.metric_rule,
            self.config.objective,
            inputs.has_ratio,
            self.config.correct_threshold,
            self.max_response_length,
            self.config.log_correct_samples,
        )

    def _layout_reports(
        self, inputs: StepInputs, measuring: MeasureConfig, layouts: Sequence[tuple[Layout, Schedule]]
    ) -> tuple[list[LayoutReport], list[Partials]]:
        """One report a layout, the one in force first; on real ranks its in-process twin comes second, as a check."""
        reports, totals = [], []
        for at, (layout, schedule) in enumerate(layouts):
            weights = in_layout(inputs, self.config.objective, schedule).weights
            views = cut(inputs.step, schedule, layout.cp, tokens=inputs.tokens, weights=weights)
            on_processes = at == 0 and self.world.size > 1
            if on_processes:
                parts, total = measure_on_ranks(self.world, views, measuring)
                reports.append(_layout_report(layout, "processes", schedule, parts, total, inputs.rules))
                totals.append(total)
            parts = [measure(view, measuring) for view in views]
            totals.append(combine(parts))
            how = TWIN if on_processes else "in-process"
            reports.append(_layout_report(layout, how, schedule, parts, totals[-1], inputs.rules))
        return reports, totals


def _of_rules(report: LayoutReport, rules: Sequence[str]) -> LayoutReport:
    return dataclasses.replace(report, values={rule: report.values[rule] for rule in rules})


def _moving(reports: Sequence[LayoutReport], rules: Sequence[str], exact: Sequence[str]) -> list[str]:
    """A note for each rule whose numbers move with the layout, as it is made to: by how much, and why."""
    notes = []
    for rule in rules:
        moved = deviation([_of_rules(report, [rule]) for report in reports]) if rule not in exact else 0.0
        if moved > MOVED:
            notes.append(f"{rule} varies with the layout, by up to {moved:.3g}, relative: {why_it_depends(rule)}")
    return notes


MOVED = 1e-9
"""Relative difference between layouts that rounding cannot explain."""
TWIN = "in-process twin"
"""How the layout in force was evaluated a second time, to check the real ranks; never recorded."""


# -- reports --------------------------------------------------------------------------------------------------------


def _layout_report(
    layout: Layout, evaluated: str, schedule: Schedule, parts: Sequence[Partials], total: Partials, rules: Sequence[str]
) -> LayoutReport:
    ranks = []
    for rank, partition in enumerate(schedule.partitions):
        own = parts[rank * layout.cp : (rank + 1) * layout.cp]
        whole = combine(own)
        ranks.append(
            RankReport(
                rank,
                {rule: rank_values(whole, rule, empty=not total.sums[("tokens",)]) for rule in rules},
                [round(part.sums[("response_tokens",)]) for part in own],
                list(partition),
                whole.correct_lengths,
            )
        )
    values = {rule: reduced_values(total, rule) for rule in rules}
    return LayoutReport(layout.text, evaluated, values, ranks, total.correct_lengths)


def _layout_json(report: LayoutReport, rule: str) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank.rank,
            **rank.values[rule],
            "cp_tokens": rank.cp_tokens,
            "partition": rank.partition,
            **_lengths_json(rank.correct_lengths),
        }
        for rank in report.ranks
    ]
    return {**report.values[rule], **_lengths_json(report.correct_lengths), "ranks": ranks}


def _lengths_json(lengths: list[int] | None) -> dict[str, list[int]]:
    return {} if lengths is None else {"correct/lengths": lengths}


def with_group_values(report: LayoutReport, values: Values) -> LayoutReport:
    """The report with the numbers of the global view, which every rank of the layout shares."""
    return dataclasses.replace(report, values={rule: own | values for rule, own in report.values.items()})


def _global_view(batch: RolloutBatch) -> GlobalView:
    return GlobalView(batch.reward_S, batch.rollout_S, batch.group_S)


def _count_groups(step: RolloutBatch) -> int:
    known_S = step.group_S[step.group_S != NO_GROUP]
    return int(is_first(known_S).sum())


def _text(label: object) -> str:
    """A source's own id as text that can be written, whatever characters it has."""
    return str(label).encode("utf-8", "replace").decode()


def _weight_of_samples(step: RolloutBatch, weight_T: Tensor) -> list[float]:
    zero_S = torch.zeros(step.num_samples, dtype=torch.float64)
    return zero_S.index_add_(0, step.sample_of_token(), weight_T.double()).tolist()


def _sample_columns(step: RolloutBatch, threshold: float) -> dict[str, list[Any]]:
    """What is recorded of each training sample; None where the source has nothing."""
    groups, rollouts = step.labels.groups, step.labels.rollouts
    rewards = [None] * step.num_samples if step.reward_S is None else step.reward_S.tolist()
    rewards = [None if reward is None or reward != reward else reward for reward in rewards]
    return {
        "sample": step.position_S.tolist(),
        "rollout": [_text(rollouts[r]) if rollouts else str(r) for r in step.rollout_S.tolist()],
        "group": [None if g == NO_GROUP else _text(groups[g]) if groups else str(g) for g in step.group_S.tolist()],
        "response_length": step.response_length_S.tolist(),
        "trained_tokens": step.mask_sum_S().tolist(),
        "reward": rewards,
        "correct": [None if reward is None else reward >= threshold - TOLERANCE for reward in rewards],
    }
