"""From the runs of results directories to their comparison and its verdict: which runs are compared, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aggcli.analysis.evaluations import evaluations_of
from aggcli.analysis.histories import History
from aggcli.analysis.outcomes import Comparison, compare
from aggcli.analysis.recorded import compare_recorded, on_recorded_rollouts, recorded_verdict
from aggcli.analysis.run_figures import WINDOW
from aggcli.analysis.settings import labelled, without_duplicates
from aggcli.analysis.verdict import Verdict, verdict
from aggcli.measurement.words import plural


@dataclass(frozen=True)
class Study:
    """`runs`: those that are compared, labelled by arm, each arm and seed once; `recorded`: whether their rollouts were
    recorded before them, so that no mode can be ahead of another.
    """

    runs: tuple[History, ...]
    recorded: bool
    comparison: Comparison
    verdict: Verdict
    notes: tuple[str, ...]


def study(
    read: Sequence[History],
    baseline: str | None = None,
    *,
    sampled: Sequence[History] | None = None,
    window: float = WINDOW,
    reach: float | None = None,
) -> Study:
    """Compare the runs that sampled their own rollouts; where none did, those on recorded rollouts, by what modes change there.

    `sampled`: the former, default those whose settings name no rollouts; see `compare` for the rest. Raises `SettingError` and
    `RecordError`.
    """
    if sampled is None:
        sampled = [run for run in read if not on_recorded_rollouts(run)]
    runs, notes = without_duplicates(labelled(sampled or read))
    if not sampled:
        comparison = compare_recorded(runs, baseline)
        return Study(tuple(runs), True, comparison, recorded_verdict(comparison, runs), tuple(notes))
    if left := len(read) - len(sampled):
        notes.append(f"{plural(left, 'run is', 'runs are')} on recorded rollouts and left out of the comparison")
    ends, missing = evaluations_of(runs)
    comparison = compare(runs, baseline, window=window, reach=reach, ends=ends)
    return Study(tuple(runs), False, comparison, verdict(comparison), (*notes, *missing, *comparison.notes))
