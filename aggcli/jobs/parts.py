"""Recorded rollouts read and measured in parts, wherever a launcher puts them: what comes back is in the order of the parts.

A part is what can be read apart from the others, which for most formats is a file. Each is read twice: for what settings need
to know of all before the first is measured, and to be measured. A place has one part in memory at a time, and is sent nothing
of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aggcli.jobs.listening import say
from aggcli.launch import Launcher, Link, Work, launcher_of
from aggcli.launch.processes import cores
from aggcli.objective.reducer import load_reducer
from aggcli.policy.groups import one_thread
from aggcli.rollouts.files import is_pipe
from aggcli.rollouts.sources import RecordedPart, RecordedSource, Source, need_one_unit

if TYPE_CHECKING:
    from aggcli.config import LaunchConfig, RunConfig
    from aggcli.jobs.steps import Replay
    from aggcli.measurement.report import StepReport
    from aggcli.rollouts.batch import RolloutBatch

IMPORTED = ("torch", "aggcli.jobs.steps", "aggcli.jobs.parts", "aggcli.auditing", "pyarrow.parquet")
"""What parts import."""


@dataclass(frozen=True)
class Part:
    """A part of a source, and what is to be done with it. `folder`: what its paths start from."""

    source: RecordedPart
    folder: str
    task: Any = None

    def batches(self) -> Iterator[RolloutBatch]:
        with contextlib.chdir(self.folder):
            yield from self.source.batches()


@dataclass(frozen=True)
class Parts:
    """A source in parts, and where they are read. Its length is the number of batches."""

    parts: Sequence[RecordedPart]
    launcher: Launcher

    def __len__(self) -> int:
        return sum(len(part.names) for part in self.parts)

    def looked_at(self) -> list[tuple[str, int]]:
        """The unit and the longest response of each batch. Raises `RolloutError`, also where units differ."""
        found = [one for of_part in self.results(look) for one in of_part]
        for name, unit, _ in found:
            need_one_unit(found[0][:2], (name, unit))
        return [(unit, longest) for _, unit, longest in found]

    def measured(self, replay: Replay) -> Generator[StepReport, None, None]:
        """A report for every optimizer step, in order, as `Replay.steps` gives them. Raises `RolloutError`."""
        from aggcli.jobs.steps import say_skipped

        number, skipped = 0, list[str]()
        for reports in self.results(measure, dataclasses.replace(replay, reducer=None, config=without_paths(replay.config))):
            for report in reports:
                if isinstance(report, str):
                    skipped.append(report)
                    continue
                yield dataclasses.replace(report, step=number)
                number += 1
        say_skipped(skipped, number)

    def results(self, work: Work, task: Any = None) -> Iterator[Any]:
        """What each part returns, in order. Raises the error of the first that fails."""
        parts = [Part(part, os.getcwd(), task) for part in self.parts]
        for outcome in self.launcher.run(work, parts, lambda number, message: None):
            if outcome.error is not None:
                raise outcome.error
            yield outcome.result


@contextlib.contextmanager
def in_parts(source: Source, launch: LaunchConfig) -> Iterator[Parts | None]:
    """The parts of a source at the place that these settings name, which is left afterwards; None where they name none, and for
    what is no file, which only this process can read. Raises `SettingError` and `RolloutError`."""
    if launch.launcher is None:
        yield None
    elif not isinstance(source, RecordedSource) or any(is_pipe(path) for path in source.files):
        if launch.launcher != "here":
            say(f"--launcher {launch.launcher}: only files are read elsewhere; this process reads what is no file")
        yield None
    else:
        workers = min(launch.workers or cores(), len(source.parts))
        with contextlib.closing(launcher_of(launch, launch.launcher, workers, IMPORTED)) as launcher:
            yield Parts(source.parts, launcher)


def without_paths(config: RunConfig) -> RunConfig:
    """The settings without the paths of the rollouts, which would be sent with each of them."""
    return dataclasses.replace(config, source=dataclasses.replace(config.source, rollouts=()))


def look(part: Part, link: Link) -> list[tuple[str, str, int]]:
    """Name, unit and longest response of each batch of a part."""
    return [(batch.name, batch.length_unit, int(batch.response_length_S.max())) for batch in part.batches()]


def measure(part: Part, link: Link) -> list[StepReport | str]:
    """The reports of a part's steps, numbered from 0; in the place of a batch none of which is counted, why."""
    given: Replay = part.task
    path = given.config.objective.custom_pg_loss_reducer_function_path
    found: list[StepReport | str] = []
    replay = dataclasses.replace(given, reducer=load_reducer(path) if path else None)
    with one_thread():
        for batch in part.batches():
            reports = replay.reports(batch.derived(token_ids_U=None), 0)
            found += [reports] if isinstance(reports, str) else list(reports)
            del batch, reports
    return found
