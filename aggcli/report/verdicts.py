"""The verdict of a page in words: what is shown, how sure it is, and what cannot be told from these records."""

from __future__ import annotations

import numpy as np

from aggcli.analysis.frames import Frames, numbers, rows
from aggcli.analysis.outcomes import Comparison
from aggcli.report.base import plural
from aggcli.report.findings import Findings
from aggcli.report.layout_deviation import layout_deviations

ONE_SEED = "One seed: no interval and no test, so no difference can be shown; give more seeds."
RECORDED = (
    "The rollouts are recorded and the same under every mode, so nothing here says which mode learns better;"
    " what differs is the gradient that they would give."
)
ROUNDING = 1e-9
"""Relative differences between layouts below this are rounding of float64 sums; `aggcli run` fails above it."""


def question(frames: Frames, findings: Findings) -> str:
    """What these records can answer."""
    modes = list(dict.fromkeys(run.mode for run in frames.runs))
    if findings.trained and findings.comparison and len(findings.comparison.labels) > 1:
        return f"Does the loss aggregation change what is learned? {_listed(findings.comparison.labels)}"
    if len(frames.runs) == 1 and findings.trained:
        return f"What did a run under {modes[0]} learn?"
    if findings.trained:
        return f"What did {plural(len(frames.runs), 'run')} under {_listed(modes)} learn?"
    what = f"What does {modes[0]} make" if len(modes) == 1 else f"What do {_listed(modes)} make"
    return f"{what} of the same rollouts, and does the layout change it?"


def headline(findings: Findings) -> str:
    """The verdict in one sentence."""
    found = findings.verdict
    if found is None:
        return RECORDED
    if not found.rankings:
        return found.sentence
    measure = "accuracy" if found.rankings[0].measure == "accuracy" else "raw reward"
    if any(ranking.shown for ranking in found.rankings):
        return f"A difference in {measure} is shown."
    if findings.seeds == 1:
        return ONE_SEED
    return f"No difference in {measure} is shown."


def evidence(findings: Findings) -> list[str]:
    """A sentence per ranking, with differences, intervals and p-values; empty without one."""
    if findings.verdict is None:
        return []
    return [_sentence(ranking.sentence) for ranking in findings.verdict.rankings]


def uncertainty(findings: Findings) -> list[str]:
    """What the numbers of the verdict are, and how far they can be believed."""
    if findings.verdict is None or findings.comparison is None:
        return []
    if not findings.verdict.rankings:
        return [ONE_SEED] if findings.seeds == 1 else []
    said = ["Modes are ranked by success at equal steps and at equal tokens, never by pg_loss, whose scale is the mode's own."]
    if findings.seeds == 1:
        return said
    said.append(
        "Differences are paired by seed; brackets are 95 % Student-t intervals; p is the paired t-test's, corrected by Holm"
        " over the pairs."
    )
    if not any(ranking.shown for ranking in findings.verdict.rankings):
        said.append("No difference shown does not mean that there is none: the intervals say how large it may still be.")
    floor = _floor(findings.comparison)
    if floor is not None and floor > 0.05:
        said.append(f"So few seeds cannot be significant by signs alone: the sign-flip p cannot fall below {floor:.2g}.")
    return said


def gradients(frames: Frames) -> list[str]:
    """Per run of a replay: how long its gradient is and where it points, against the baseline's."""
    said = []
    for run in frames.runs[1:]:
        own = rows(frames.metrics, run=run.label)
        ratio, cosine = (values[np.isfinite(values)] for values in (numbers(own, name) for name in _GRADIENTS))
        if len(ratio) and len(cosine):
            over = f"mean of {plural(len(ratio), 'step')}" if len(ratio) > 1 else "one step"
            said.append(
                f"{run.label}: its gradient is {ratio.mean():.3g} times as long as the baseline's, at a cosine of"
                f" {cosine.mean():.3g} ({over})."
            )
    return said


def layouts(frames: Frames) -> str:
    """Whether the layout moved pg_loss, with the largest relative difference; empty where nothing could be compared."""
    found = layout_deviations(frames)
    if not len(found):
        return ""
    worst = float(numbers(found, "deviation").max())
    names = len(set(found["layout"])) + len(set(found["reference"]) - set(found["layout"]))
    over = f"{plural(names, 'layout')}, {plural(len(found), 'comparison')}"
    if worst == 0:
        return f"The layout changes nothing: pg_loss is the same to the last bit ({over})."
    if worst < ROUNDING:
        return f"The layout changes nothing but rounding: pg_loss differs by at most {worst:.1e}, relative ({over})."
    if np.isinf(worst):
        return f"Some layouts have no pg_loss where others have one ({over})."
    return f"A layout changes pg_loss by {worst:.1e}, relative ({over}); the figure of the layouts shows which."


_GRADIENTS = ("gradient_ratio", "gradient_cosine")


def _floor(comparison: Comparison) -> float | None:
    flips = [
        outcome.pair.test.sign_flip.floor
        for outcomes in comparison.outcomes.values()
        for outcome in outcomes.values()
        if outcome.pair is not None and outcome.pair.test.sign_flip is not None
    ]
    return min(flips, default=None)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
