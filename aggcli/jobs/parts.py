"""Recorded rollouts read and measured in parts, wherever a launcher puts them: what comes back is in the order of the parts.

A part is what can be read apart from the others, which for most formats is a file. Each is read twice: for what settings need
to know of all before the first is measured, and to be measured. A place has one part in memory at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aggcli.launch import Launcher, Link, Work, launcher_of
from aggcli.launch.processes import cores
from aggcli.objective.reducer import load_reducer
from aggcli.policy.groups import one_thread
from aggcli.rollouts.sources import RecordedSource, need_one_unit

if TYPE_CHECKING:
    from aggcli.config import LaunchConfig
    from aggcli.jobs.steps import Replay
    from aggcli.measurement.report import StepReport
    from aggcli.rollouts.batch import RolloutBatch

IMPORTED = ("torch", "aggcli.jobs.steps", "aggcli.jobs.parts", "pyarrow.parquet")
"""What parts import."""


@dataclass(frozen=True)
class Part:
    """A part of a source: to be looked at, or with `replay` to be measured."""

    source: RecordedSource
    number: int
    folder: str
    """That the paths of the source start from."""
    replay: Replay | None = None

    def batches(self) -> Iterator[RolloutBatch]:
        with contextlib.chdir(self.folder):
            yield from self.source.part(self.number)


@dataclass(frozen=True)
class Parts:
    """A source in parts, and where they are read."""

    source: RecordedSource
    launch: LaunchConfig

    def __len__(self) -> int:
        return len(self.source)

    def looked_at(self) -> list[tuple[str, int]]:
        """The unit and the longest response of each batch. Raises `RolloutError`, also where units differ."""
        found = [one for of_part in self._results(look, None) for one in of_part]
        for name, unit, _ in found:
            need_one_unit(found[0][:2], (name, unit))
        return [(unit, longest) for _, unit, longest in found]

    def measured(self, replay: Replay) -> Generator[StepReport, None, None]:
        """A report for every optimizer step, in order, as `Replay.steps` gives them. Raises `RolloutError`."""
        from aggcli.jobs.steps import say_skipped

        number, skipped = 0, list[str]()
        for reports in self._results(measure, dataclasses.replace(replay, reducer=None)):
            for report in reports:
                if isinstance(report, str):
                    skipped.append(report)
                    continue
                yield dataclasses.replace(report, step=number)
                number += 1
        say_skipped(skipped, number)

    def _results(self, work: Work, replay: Replay | None) -> Iterator[Any]:
        """What each part returns, in order. Raises the error of the first that fails."""
        parts = [Part(self.source, number, os.getcwd(), replay) for number in range(self.source.parts)]
        for outcome in self._launcher().run(work, parts, lambda number, message: None):
            if outcome.error is not None:
                raise outcome.error
            yield outcome.result

    def _launcher(self) -> Launcher:
        assert self.launch.launcher is not None
        workers = min(self.launch.workers or cores(), self.source.parts)
        return launcher_of(self.launch, self.launch.launcher, workers, IMPORTED)


def look(part: Part, link: Link) -> list[tuple[str, str, int]]:
    """Name, unit and longest response of each batch of a part."""
    return [(batch.name, batch.length_unit, int(batch.response_length_S.max())) for batch in part.batches()]


def measure(part: Part, link: Link) -> list[StepReport | str]:
    """The reports of a part's steps, numbered from 0; in the place of a batch none of which is counted, why."""
    assert part.replay is not None
    path = part.replay.config.objective.custom_pg_loss_reducer_function_path
    found: list[StepReport | str] = []
    replay = dataclasses.replace(part.replay, reducer=load_reducer(path) if path else None)
    with one_thread():
        for batch in part.batches():
            reports = replay.reports(batch.derived(token_ids_U=None), 0)
            found += [reports] if isinstance(reports, str) else list(reports)
            del batch, reports
    return found
