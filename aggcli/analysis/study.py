"""From the runs of results directories to their comparison and its verdict: which runs are compared, and by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aggcli.analysis.divergence import Diverged, diverged_of, in_words, unfinished
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
    recorded before them, so that no mode can be ahead of another; `diverged`: which of them trained no further, which the
    verdict says first.
    """

    runs: tuple[History, ...]
    recorded: bool
    comparison: Comparison
    verdict: Verdict
    notes: tuple[str, ...]
    diverged: tuple[Diverged, ...] = ()


def compared_runs(read: Sequence[History]) -> tuple[list[History], bool, list[str]]:
    """The runs that sampled their own rollouts, or all where none did, labelled by arm, each arm and seed once; whether they
    are on recorded rollouts; and notes on the runs left out.

    What a report compares and what it draws are both chosen here.
    """
    sampled = [run for run in read if not on_recorded_rollouts(run)]
    runs, notes = without_duplicates(labelled(sampled or read))
    if sampled and (left := len(read) - len(sampled)):
        notes.append(f"{plural(left, 'run is', 'runs are')} on recorded rollouts and left out of the comparison")
    return runs, not sampled, notes


def study(
    read: Sequence[History],
    baseline: str | None = None,
    *,
    silent: Sequence[Path] = (),
    window: float = WINDOW,
    reach: float | None = None,
) -> Study:
    """Compare the runs that sampled their own rollouts; where none did, those on recorded rollouts, by what modes change there.

    `silent`: directories of runs without a recorded step, which may have diverged; see `compared_runs` and `compare` for the
    rest. Raises `SettingError` and `RecordError`.
    """
    runs, recorded, notes = compared_runs(read)
    gone = tuple(diverged_of(runs, silent))
    notes += [one.text for one in gone]
    notes += unfinished(runs)
    if recorded:
        comparison = compare_recorded(runs, baseline)
        found = _said_first(recorded_verdict(comparison, runs), runs, gone)
        return Study(tuple(runs), True, comparison, found, tuple(notes), gone)
    ends, missing = evaluations_of(runs)
    comparison = compare(runs, baseline, window=window, reach=reach, ends=ends)
    found = _said_first(verdict(comparison), runs, gone)
    return Study(tuple(runs), False, comparison, found, (*notes, *missing, *comparison.notes), gone)


def _said_first(found: Verdict, runs: Sequence[History], gone: Sequence[Diverged]) -> Verdict:
    said = in_words(gone, Counter(run.label for run in runs))
    return replace(found, headline=f"{said} {found.headline}") if said else found
