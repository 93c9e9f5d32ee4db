"""Recorded rollouts through the same objective, layouts and measurement as training, without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from aggcli.config import RunConfig
from aggcli.errors import RolloutError
from aggcli.jobs.listening import say
from aggcli.layout.chosen import layouts_of
from aggcli.layout.schedule import Layout, Schedule, schedule_step
from aggcli.layout.steps import Part, need_whole_groups, optimizer_steps
from aggcli.layout.views import GlobalView, LocalView
from aggcli.measurement.groups import group_values
from aggcli.measurement.inventory import reward_scale
from aggcli.measurement.local import MeasureConfig
from aggcli.measurement.ranks import Measured, measure_on_ranks
from aggcli.measurement.report import StepReport, Values
from aggcli.measurement.selection import Selected, selected
from aggcli.measurement.step import Head, measure_config, measure_layouts, report_step
from aggcli.measurement.words import listed
from aggcli.objective.reducer import Reducer
from aggcli.objective.step import step_inputs, with_advantages
from aggcli.objective.weights import can_represent, need_groups
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rules import Rule
from aggcli.world import ALONE, World

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Replay:
    """What a replay needs besides the rollouts.

    `modes`: the rules compared, in order (none: only the custom reducer); `lenient`: leave rules out, with a note, where the
    data lack the prompt groups that they need, instead of refusing; `max_response_length`: tokens.
    """

    config: RunConfig
    modes: tuple[Rule, ...]
    lenient: bool
    max_response_length: int
    reducer: Reducer | None = None
    world: World = ALONE

    def steps(self, batches: Iterable[RolloutBatch]) -> Generator[StepReport, None, None]:
        """A report for every optimizer step, in order. The other ranks of the world run `serve` meanwhile.

        Raises `RolloutError` for data that the settings cannot use.
        """
        number = 0
        skipped: list[str] = []
        for batch in batches:
            found = self.reports(batch, number)
            if isinstance(found, str):
                skipped.append(found)
                continue
            for report in found:
                yield report
                number += 1
        say_skipped(skipped, number)

    def reports(self, batch: RolloutBatch, number: int) -> Iterator[StepReport] | str:
        """The reports of the optimizer steps of a batch, numbered from `number`; or why none of it is counted."""
        advantages_T, origin = with_advantages(batch, self.config.objective)
        found = selected(dataclasses.replace(batch, advantages_T=advantages_T), self.config)
        if found.batch is None:
            return f"{batch.name}: {'; '.join(found.notes)}"
        return self._reports(found.batch, found, origin, number)

    def _reports(self, batch: RolloutBatch, found: Selected, origin: str, number: int) -> Iterator[StepReport]:
        scale = reward_scale(batch, self.config.correct_threshold)
        extra: Values = {} if found.kept is None else {"groups_generated": found.generated, "groups_kept": found.kept}
        parts = optimizer_steps(batch, self.config.layout.global_batch_size)
        (groups,) = group_values(GlobalView.of(batch), self.config.correct_threshold)
        for at, part in enumerate(parts, start=number):
            step = batch.select(torch.tensor(part.positions, dtype=torch.int64), name=part.name)
            modes, left_out = self._usable_modes(step, batch, parts)
            dtype = DTYPES[self.config.dtype or "float64"]
            layouts = self._scheduled(step, part)
            inputs = step_inputs(step, self.config.objective, modes, dtype, self.reducer, layouts[0][1])
            notes = [*batch.notes, *scale, *found.notes, *left_out, *part.notes, *_foreign_layouts(modes, layouts)]
            head = Head(at, batch.name, origin, notes, extra)
            measuring = measure_config(inputs, self.config.objective, self.config, self.max_response_length)
            measured = measure_layouts(inputs, layouts, measuring, self._processes(measuring))
            yield report_step(head, inputs, measured, measuring, groups)

    def _usable_modes(self, step: RolloutBatch, batch: RolloutBatch, parts: list[Part]) -> tuple[tuple[Rule, ...], list[str]]:
        grouped = [mode for mode in self.modes if mode.needs_groups]
        if not grouped:
            return self.modes, []
        try:
            need_groups(step, grouped[0])
            need_whole_groups(batch, parts, grouped[0])
        except RolloutError as error:
            if not self.lenient:
                raise
            return tuple(mode for mode in self.modes if mode not in grouped), [
                f"{', '.join(mode.name for mode in grouped)} is left out: {str(error).removeprefix(step.name).lstrip(',: ')}"
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

    def _processes(self, measuring: MeasureConfig) -> Callable[[Sequence[LocalView]], Measured] | None:
        """The real ranks, where there are any."""
        if self.world.size == 1:
            return None
        return lambda views: measure_on_ranks(self.world, views, measuring)


def _foreign_layouts(modes: Sequence[Rule], layouts: Sequence[tuple[Layout, Schedule]]) -> list[str]:
    """Notes on the rules whose frameworks cannot represent some of these layouts."""
    of_layouts: dict[tuple[str, ...], list[str]] = {}
    for mode in modes:
        foreign = tuple(layout.text for layout, schedule in layouts if not can_represent(mode, schedule))
        if foreign:
            of_layouts.setdefault(foreign, []).append(mode.name)
    return [
        f"{', '.join(rules)}: {'its' if len(rules) == 1 else 'their'} framework cannot represent {listed(foreign)}; the numbers"
        f" there are the formula's, and no run's; aggcli audit --rules {','.join(rules)} compares the layouts that it can"
        for foreign, rules in of_layouts.items()
    ]


def say_skipped(skipped: Sequence[str], number: int) -> None:
    """Say of which batches no step is counted. Raises `RolloutError` where none is left of the `number` of steps."""
    if not number:
        raise RolloutError(f"{'; '.join(skipped)}; leave the flag out, or give rollouts whose rewards differ in a group")
    for text in skipped:
        say(f"{text}: no step of it is counted")
