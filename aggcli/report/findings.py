"""What a report says of its runs: which were trained, how they compare, and in which settings they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aggcli.analysis.efficiency import MOST_FITS, FittedRun, fit_runs, mode_curves
from aggcli.analysis.frames import Frames
from aggcli.analysis.histories import History, read_histories
from aggcli.analysis.outcomes import Comparison
from aggcli.analysis.settings import SettingDifference, differences, labelled, warnings
from aggcli.analysis.study import study
from aggcli.analysis.verdict import Verdict
from aggcli.report.base import first_reason


@dataclass(frozen=True)
class Findings:
    """`runs`: every run; `compared`: those that sampled their own rollouts, else all, labelled by arm, each arm and seed once
    (`aggcli.analysis.study.compared_runs`); `trained`: these where they sampled their own, else empty.

    `comparison` is of the trained runs, None where there is none, since the accuracy of recorded rollouts says nothing about a
    mode; `verdict` is of the trained runs, else of all. `differing`: settings and versions that are not the same in all runs.
    """

    runs: tuple[History, ...]
    compared: tuple[History, ...]
    trained: tuple[History, ...]
    fitted: tuple[FittedRun, ...]
    comparison: Comparison | None
    verdict: Verdict
    differing: tuple[SettingDifference, ...]
    notes: tuple[str, ...]

    @property
    def seeds(self) -> int:
        """The most seeds that an arm of the trained runs has; 0 without trained runs."""
        labels = [run.label for run in self.trained]
        return max(map(labels.count, labels), default=0)


def find(frames: Frames) -> Findings:
    """The findings of these runs. Raises `RecordError` where a record cannot be read."""
    read, notes = read_histories([run.directory for run in frames.runs])
    by_directory = {run.directory: run for run in labelled(read)}
    found = study(read, silent=frames.silent)
    trained = () if found.recorded else found.runs
    differing = differences([replace(run, label=by_directory[run.directory].label) for run in read])
    fitted = fit_runs(trained) if 0 < len(trained) <= MOST_FITS else []
    many = [f"{len(trained)} runs: no curves are fitted to more than {MOST_FITS}"] if len(trained) > MOST_FITS else []
    return Findings(
        runs=tuple(read),
        compared=found.runs,
        trained=trained,
        fitted=tuple(fitted),
        comparison=None if found.recorded else found.comparison,
        verdict=found.verdict,
        differing=tuple(differing),
        notes=(*warnings(differing), *notes, *found.notes, *many, *_refused(fitted)),
    )


def _refused(fitted: Sequence[FittedRun]) -> list[str]:
    return [
        f"{label}: no curve is fitted to {len(curve.refused)} of its runs ({first_reason(curve.refused)})"
        for label, curve in mode_curves(fitted).items()
        if curve.refused
    ]
