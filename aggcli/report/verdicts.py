"""The verdict of a page in words: what is shown, how sure it is, and what cannot be told from these records."""

from __future__ import annotations

import numpy as np
import pandas as pd

from aggcli.analysis.comparison import Comparison
from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.recorded import what_no_mode_changes
from aggcli.analysis.tolerance import tolerance_of
from aggcli.measurement.words import at_least, at_most, listed, plural
from aggcli.report.findings import Findings
from aggcli.report.layout_deviation import layout_deviations

_MOST_NAMES = 4
ONE_SEED = "One seed: no interval and no test, so no difference can be shown; give more seeds."


def question(frames: Frames, findings: Findings) -> str:
    """What these records can answer."""
    modes = list(dict.fromkeys(run.mode for run in frames.runs))
    if findings.of_others and findings.comparison is not None and len(findings.comparison.labels) > 1:
        return f"Do these runs differ in what they learned? {_listed(findings.comparison.labels)}"
    if findings.trained and findings.comparison and len(findings.comparison.labels) > 1:
        return f"Does the loss aggregation change what is learned? {_listed(findings.comparison.labels)}"
    if len(frames.runs) == 1 and findings.trained:
        return f"What did a run under {modes[0]} learn?"
    if findings.trained:
        return f"What did {plural(len(frames.runs), 'run')} under {_listed(modes)} learn?"
    what = f"What does {modes[0]} make" if len(modes) == 1 else f"What do {_listed(modes)} make"
    return f"{what} of the same rollouts, and does the layout change it?"


def uncertainty(findings: Findings) -> list[str]:
    """What the numbers of the verdict are, and how far they can be believed; of recorded rollouts, which
    nothing is tested on, what they cannot show.
    """
    if findings.comparison is None:
        return [what_no_mode_changes(findings.compared)]
    if findings.of_others:
        return _uncertainty_of_others(findings, findings.comparison)
    if not findings.verdict.rankings:
        return [ONE_SEED] if findings.seeds == 1 else []
    said = ["Modes are ranked by success at equal steps and at equal tokens, never by pg_loss, whose scale is the mode's own."]
    if any(ranking.outcome.endswith("_on_fresh_prompts") for ranking in findings.verdict.rankings):
        said.append(
            "At equal steps that is the accuracy at the end on prompts that no step trained on, the same for every mode of a"
            " seed; at equal tokens it is that of the training rollouts, which are measured at every budget."
        )
    if findings.seeds == 1:
        return said
    said.append(
        "Differences are paired by seed; brackets are 95 % intervals, each for itself; p is the paired t-test's, corrected by"
        " Holm over all outcomes and modes."
    )
    return said + _what_may_be_missed(findings, findings.comparison)


def _uncertainty_of_others(findings: Findings, comparison: Comparison) -> list[str]:
    said = ["Arms are compared by what their trainers logged; the settings of other trainers' runs are not known here."]
    if not comparison.tests:
        return said
    if comparison.paired:
        how = "Differences are paired by the seeds that paths and records tell; p is the paired t-test's"
    else:
        how = "Runs are not paired: a difference is of the means of two arms; its interval and p are of Welch's t-test"
    said.append(f"{how}, p corrected by Holm over all outcomes and arms; brackets are 95 % intervals, each for itself.")
    return said + _what_may_be_missed(findings, comparison)


def _what_may_be_missed(findings: Findings, comparison: Comparison) -> list[str]:
    said = []
    if not any(ranking.shown for ranking in findings.verdict.rankings):
        said.append("No difference shown does not mean that there is none: the intervals say how large it may still be.")
    floor = _floor(comparison)
    if floor is not None and floor > 0.05:
        said.append(
            f"So few seeds cannot be significant by signs alone: the sign-flip p cannot fall below {at_least(floor, 2):g}."
        )
    return said


def layouts(frames: Frames, findings: Findings) -> str:
    """Whether the layout moved pg_loss, with the difference over the sum of its absolute terms, by the limit of the dtype that
    each run recorded: the largest, or of those beyond their limit the one that is so by most. Empty where nothing could be
    compared.
    """
    found = layout_deviations(frames)
    if not len(found):
        return ""
    names = len(set(found["layout"])) + len(set(found["reference"]) - set(found["layout"]))
    over = f"{plural(names, 'layout')}, {plural(len(found), 'comparison')}"
    has_both = np.isfinite(numbers(found, "deviation"))
    missing = int((~has_both).sum())
    without = f"In {missing} of {plural(len(found), 'comparison')} one of the two layouts has no pg_loss." if missing else ""
    return " ".join(filter(None, [_moved(rows(found, has_both), frames, findings, over), without]))


def _moved(found: pd.DataFrame, frames: Frames, findings: Findings, over: str) -> str:
    """How far pg_loss differs in comparisons in which both layouts have it."""
    if not len(found):
        return ""
    deviation = numbers(found, "deviation")
    if deviation.max() == 0:
        return f"The layout changes nothing: pg_loss is the same to the last bit ({over})."
    settings = {run.directory: run.settings for run in findings.runs}
    of_run = {run.label: tolerance_of(settings.get(run.directory, {})) for run in frames.runs}
    limits = [of_run[label] for label in found["run"]]
    worst = int((deviation / [limit for _, limit in limits]).argmax())
    terms = "of the sum of its absolute terms, where differences"
    if deviation[worst] > limits[worst][1]:
        of = f"{terms} {_taken_for_rounding(limits[worst : worst + 1])} ({over})"
        return f"A layout changes pg_loss by {deviation[worst]:.1e} {of}; the figure of the layouts shows which."
    most = at_most(deviation.max(), 2)
    of = f"{terms} {_taken_for_rounding(limits)} ({over})"
    return f"The layout changes nothing but rounding: pg_loss differs by at most {most:.1e} {of}."


def _taken_for_rounding(limits: list[tuple[str, float]]) -> str:
    """`up to 1e-09 are taken for rounding in float64 and up to 0.0001 in float32`."""
    (dtype, limit), *others = dict(limits).items()
    return listed(
        [f"up to {limit:g} are taken for rounding in {dtype}", *(f"up to {more:g} in {name}" for name, more in others)]
    )


def _floor(comparison: Comparison) -> float | None:
    flips = [
        outcome.pair.test.sign_flip.floor
        for outcomes in comparison.outcomes.values()
        for outcome in outcomes.values()
        if outcome.pair is not None and outcome.pair.test.sign_flip is not None
    ]
    return min(flips, default=None)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    """`a, b and c`; beyond `_MOST_NAMES` names, the rest as a number."""
    told = [*names[:_MOST_NAMES], f"{len(names) - _MOST_NAMES} others"] if len(names) > _MOST_NAMES + 1 else list(names)
    return listed(told)
