"""What a report says of its runs: which were trained, how they compare, and in which settings they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aggcli.analysis.answer import Answer
from aggcli.analysis.comparison import Comparison
from aggcli.analysis.frames import Frames
from aggcli.analysis.histories import History, read_histories
from aggcli.analysis.settings import SettingDifference, differences, labelled, warnings
from aggcli.analysis.study import Curves, Study, study
from aggcli.analysis.verdict import Verdict


@dataclass(frozen=True)
class Findings:
    """`runs`: every run; `compared`: those that sampled their own rollouts, else all, labelled by arm, each arm and seed once
    (`aggcli.analysis.study.compared_runs`); `trained`: these where they sampled their own, else empty.

    `comparison` is of the trained runs, None where there is none, since the accuracy of recorded rollouts says nothing about a
    mode; `verdict` is of the trained runs, else of all. `differing`: settings and versions that
    are not the same in all runs.
    """

    runs: tuple[History, ...]
    compared: tuple[History, ...]
    trained: tuple[History, ...]
    curves: Curves
    comparison: Comparison | None
    verdict: Verdict
    differing: tuple[SettingDifference, ...]
    notes: tuple[str, ...]

    @property
    def answer(self) -> Answer:
        """What stands above everything else."""
        return self.verdict.answer

    @property
    def seeds(self) -> int:
        """The most seeds that an arm of the trained runs has; 0 without trained runs."""
        labels = [run.label for run in self.trained]
        return max(map(labels.count, labels), default=0)

    @property
    def of_others(self) -> bool:
        """Whether runs are among them that another trainer made."""
        return any(run.source for run in self.compared)


def find(frames: Frames) -> Findings:
    """The findings of these runs. Raises `RecordError` where a record cannot be read."""
    read, notes = read_histories([run.directory for run in frames.runs])
    by_directory = {run.directory: run for run in labelled(read)}
    found = study(read, silent=frames.silent)
    differing = differences([replace(run, label=by_directory[run.directory].label) for run in read])
    told = findings_of(replace(found, verdict=replace(found.verdict, warnings=tuple(warnings(differing)))), notes)
    return replace(told, runs=tuple(read), differing=tuple(differing))


def findings_of(found: Study, notes: Sequence[str]) -> Findings:
    """The findings of a study. `notes`: what is to be known of its runs besides."""
    return Findings(
        runs=found.runs,
        compared=found.runs,
        trained=() if found.recorded else found.runs,
        curves=found.curves,
        comparison=None if found.recorded else found.comparison,
        verdict=found.verdict,
        differing=found.differing,
        notes=(*notes, *found.notes),
    )
