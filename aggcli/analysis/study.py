"""From the runs of results directories to their comparison and its verdict: which runs are compared, and by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from aggcli.analysis.answer import Answer
from aggcli.analysis.comparison import Comparison, arms_of, compare
from aggcli.analysis.divergence import Diverged, collapsed_in_words, diverged_of, in_words, unfinished
from aggcli.analysis.efficiency import MOST_FITS, EfficiencyPair, FittedRun, ModeCurve, efficiency, fit_runs, mode_curves
from aggcli.analysis.evaluations import evaluations_of
from aggcli.analysis.histories import AXES, LOGGED_TOKENS, History, shared_seconds
from aggcli.analysis.outcomes import WINDOW
from aggcli.analysis.recorded import compare_recorded, on_recorded_rollouts, recorded_verdict
from aggcli.analysis.settings import SettingDifference, differences, labelled, warnings, without_duplicates
from aggcli.analysis.training_answer import verdict
from aggcli.analysis.units import one_length_unit
from aggcli.analysis.verdict import Verdict
from aggcli.measurement.words import number, plural


@dataclass(frozen=True)
class Curves:
    """The fitted curves of the compared runs, `measure` against compute in `unit`, on `axis`; empty where none were fitted."""

    fitted: tuple[FittedRun, ...] = ()
    ratios: tuple[EfficiencyPair, ...] = ()
    unit: str = AXES["tokens"]
    measure: str = "accuracy"
    axis: str = "tokens"

    @property
    def of_modes(self) -> dict[str, ModeCurve]:
        """Label -> A, B and C_mid over its seeds."""
        return mode_curves(self.fitted, self.measure)


@dataclass(frozen=True)
class Study:
    """`runs`: those that are compared, labelled by arm, each arm and seed once; `recorded`: whether their rollouts were
    recorded before them, so that no mode can be ahead of another; `diverged`: which of them trained no further, which the
    verdict says first; `differing`: settings and versions that are not the same in all of them, of which it warns.
    """

    runs: tuple[History, ...]
    recorded: bool
    comparison: Comparison
    verdict: Verdict
    notes: tuple[str, ...]
    diverged: tuple[Diverged, ...] = ()
    differing: tuple[SettingDifference, ...] = ()
    curves: Curves = field(default_factory=Curves)


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
    fit: bool | None = None,
    axis: str = "tokens",
    paired: bool = True,
) -> Study:
    """Compare the runs that sampled their own rollouts; where none did, those on recorded rollouts, by what modes change there.

    `silent`: directories of runs without a recorded step, which may have diverged; `fit`: fit compute-performance curves
    against `axis` (tokens, steps or seconds), by default for up to `MOST_FITS` runs; `paired`: by seed, else
    by Welch's test; see `compared_runs` and `compare` for the rest. Raises `SettingError`, and `RecordError` for runs whose
    lengths are in different units.
    """
    runs, recorded, notes = compared_runs(read)
    unit = one_length_unit({run.directory: run.length_unit for run in runs})
    gone = tuple(diverged_of(runs, silent))
    notes += [one.text for one in gone]
    notes += unfinished(runs)
    curves = Curves()
    if recorded:
        comparison = compare_recorded(runs, baseline)
        found = recorded_verdict(comparison, runs)
        notes += ["--fit: the accuracy of recorded rollouts is no learning curve, so none is fitted"] if fit else []
    else:
        ends, missing = evaluations_of(runs)
        curves, refused = _curves(runs, next(iter(arms_of(runs, baseline))), fit, axis, paired)
        comparison = compare(runs, baseline, window=window, reach=reach, ends=ends, ratios=curves.ratios, paired=paired)
        comparison = replace(comparison, length_unit=unit)
        curves = replace(curves, ratios=comparison.ratios)
        found = verdict(comparison, runs)
        notes += [*missing, *comparison.notes, *refused]
    differing = tuple(differences([run for run in runs if not run.source]))  # the settings of others are not known
    collapsed = "" if recorded else collapsed_in_words(runs)
    first = tuple(filter(None, (in_words(gone, Counter(run.label for run in runs)), collapsed)))
    answer = Answer((*first, *found.answer.sentences))
    found = replace(found, answer=answer, warnings=tuple(warnings(differing)))
    return Study(tuple(runs), recorded, comparison, found, tuple(notes), gone, differing, curves)


def _curves(runs: Sequence[History], baseline: str, fit: bool | None, axis: str, paired: bool) -> tuple[Curves, list[str]]:
    """The curves, and notes on those that are not fitted."""
    measure = "accuracy" if any(np.isfinite(run.measures["accuracy"]).any() for run in runs) else "raw_reward"
    if fit is False:
        return Curves(measure=measure), []
    if fit is None and len(runs) > MOST_FITS:
        note = f"{len(runs)} runs: no curves are fitted to more than {MOST_FITS} unless --fit asks for it"
        return Curves(measure=measure), [note]
    fitted = fit_runs(runs, axis, measure)
    unit = LOGGED_TOKENS if axis == "tokens" and any(run.source for run in runs) else AXES[axis]
    found = Curves(tuple(fitted), tuple(efficiency(fitted, baseline, axis, measure, paired=paired)), unit, measure, axis)
    notes = [
        f"{label}: no curve is fitted to {len(curve.refused)} of its runs ({curve.refused[0]}"
        + (f"; {len(curve.refused) - 1} more not shown)" if len(curve.refused) > 1 else ")")
        for label, curve in found.of_modes.items()
        if curve.refused
    ]
    notes += _apart(found.of_modes, baseline)
    notes += shared_seconds(runs) if axis == "seconds" else []
    return found, notes


def _apart(curves: Mapping[str, ModeCurve], baseline: str) -> list[str]:
    """Notes on the modes whose asymptotes and the baseline's are apart, so that a comparison of B under one A says little."""
    base, said = curves[baseline].asymptote if baseline in curves else None, []
    for label, curve in curves.items():
        own = curve.asymptote
        if label == baseline or own is None or base is None or None in (own.low, own.high, base.low, base.high):
            continue
        low, high = sorted((own, base), key=lambda one: one.mean)
        if (low.high or 0.0) < (high.low or 0.0):
            of = [f"{number(one.mean, 3)} [{number(one.low or 0.0, 3)}, {number(one.high or 0.0, 3)}]" for one in (own, base)]
            said.append(
                f"{label}: its own A is {of[0]} and {baseline}'s {of[1]}, which lie apart: B over {baseline}'s, with one A for"
                " both, then holds that difference too, and each one's own B stands in the table"
            )
    return said
