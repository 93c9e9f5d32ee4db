"""The figures of a comparison: per arm over its seeds, and paired with the baseline's, seed by seed.

Every number of an arm, and every difference of a pair, is made from the runs of that arm or pair alone: another arm beside
them changes none (only Holm's correction, which counts the pairs that are shown).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aggcli.analysis.histories import Floats, History, with_labels
from aggcli.analysis.statistics import (
    PairedTest,
    holm,
    interquartile_mean,
    interval,
    paired_test,
    standard_deviation,
)
from aggcli.errors import SettingError, nearest

WINDOW = 0.1
"""A figure is the mean over the last tenth of the common range: a single step's rollouts are too few to tell modes apart."""
_POINTS = 33
"""Points at which a curve is interpolated inside the window of a token range."""
REACH = 0.9
"""Without a level to reach: this share of the baseline's own way from its first steps to its last."""


@dataclass(frozen=True)
class Figure:
    """A number that is compared. `axis`: what the runs are equal in where it is taken; None for one of a run's whole course."""

    name: str
    head: str
    unit: str
    measure: str
    axis: Literal["steps", "tokens"] | None = "steps"
    better: Literal["higher", "lower"] | None = None


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("accuracy", "accuracy at equal steps", "share", "accuracy", better="higher"),
        Figure("accuracy_at_equal_tokens", "accuracy at equal tokens", "share", "accuracy", "tokens", "higher"),
        Figure("tokens_to_accuracy", "tokens to accuracy", "tokens", "accuracy", None, "lower"),
        Figure("raw_reward", "raw reward at equal steps", "reward", "raw_reward", better="higher"),
        Figure("raw_reward_at_equal_tokens", "raw reward at equal tokens", "reward", "raw_reward", "tokens", "higher"),
        Figure("response_length", "response length", "tokens", "response_length"),
        Figure("correct/response_length", "length of correct responses", "tokens", "correct/response_length"),
        Figure("incorrect/response_length", "length of wrong responses", "tokens", "incorrect/response_length"),
        Figure("entropy_loss", "entropy of the policy", "nats", "entropy_loss"),
        Figure("tokens", "tokens trained on before the last common step", "tokens", "tokens"),
    )
}


@dataclass(frozen=True)
class Common:
    """Where runs are compared: up to `end` (a rollout step, or tokens), over the last part from `start` on.

    `points`: common steps; `dropped`: steps that only some of the runs recorded. 0 for tokens, which are interpolated.
    """

    axis: Literal["steps", "tokens"]
    start: float
    end: float
    points: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Pair:
    """An arm against the baseline. `p_holm` and `sign_flip_holm`: corrected over the pairs of this figure."""

    baseline: str
    common: Common | None
    test: PairedTest
    p_holm: float | None = None
    sign_flip_holm: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A figure of an arm: `values` a seed, their mean with its interval, and the pair where it is not the baseline's own."""

    label: str
    values: Mapping[int, float]
    mean: float
    std: float | None
    low: float | None
    high: float | None
    interquartile_mean: float | None
    common: Common | None
    pair: Pair | None = None


@dataclass(frozen=True)
class Comparison:
    """`outcomes`: figure -> label -> outcome, the baseline first; without the figures and arms that have nothing to show."""

    baseline: str
    labels: tuple[str, ...]
    outcomes: Mapping[str, Mapping[str, Outcome]]
    reach: float | None
    notes: tuple[str, ...]


def compare(
    runs: Sequence[History], baseline: str | None = None, *, window: float = WINDOW, reach: float | None = None
) -> Comparison:
    """Every figure of every arm. `baseline`: its label, default the first; `reach`: the accuracy of tokens_to_accuracy.

    `window`: share of the common range that a figure is the mean of; 0 takes the last point alone. Raises `SettingError` for
    a baseline that is not among the labels.
    """
    arms = with_labels(runs)
    base = baseline or next(iter(arms))
    if base not in arms:
        raise SettingError(f"--baseline {base}: is not among the compared runs{nearest(base, arms)}")
    arms = {base: arms[base], **arms}
    if reach is None:
        reach = _default_reach(arms[base], window)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for figure in FIGURES.values():
        if figure.measure == "raw_reward" and _reward_is_accuracy(runs):
            continue
        found = {label: _outcome(figure, label, own, window, reach) for label, own in arms.items()}
        present = {label: outcome for label, outcome in found.items() if outcome is not None}
        if present:
            outcomes[figure.name] = _with_pairs(figure, present, arms, base, window, reach)
    return Comparison(base, tuple(arms), outcomes, reach, tuple(_notes(arms, base, outcomes)))


def _outcome(figure: Figure, label: str, runs: Sequence[History], window: float, reach: float | None) -> Outcome | None:
    values, common = _values(figure, runs, window, reach)
    if not values:
        return None
    own = list(values.values())
    found = interval(own)
    return Outcome(label, values, found.mean, standard_deviation(own), found.low, found.high, interquartile_mean(own), common)


def _with_pairs(
    figure: Figure,
    present: Mapping[str, Outcome],
    arms: Mapping[str, Sequence[History]],
    base: str,
    window: float,
    reach: float | None,
) -> dict[str, Outcome]:
    pairs = {label: _pair(figure, arms[label], arms[base], window, reach) for label in present if label != base}
    shown = {label: pair for label, pair in pairs.items() if pair is not None}
    p = holm([pair.test.p for pair in shown.values()])
    flips = holm([None if (flip := pair.test.sign_flip) is None else flip.p for pair in shown.values()])
    done = {
        label: Pair(base, pair.common, pair.test, one, flip)
        for (label, pair), one, flip in zip(shown.items(), p, flips, strict=True)
    }
    return {label: dataclasses.replace(outcome, pair=done.get(label)) for label, outcome in present.items()}


def _pair(figure: Figure, arm: Sequence[History], base: Sequence[History], window: float, reach: float | None) -> Pair | None:
    shared = {run.seed for run in arm} & {run.seed for run in base}
    mine, theirs = ([run for run in runs if run.seed in shared] for runs in (arm, base))
    if not shared:
        return None
    common = _common(figure, [*mine, *theirs], window)
    test = paired_test(_values_in(figure, mine, common, reach), _values_in(figure, theirs, common, reach))
    return None if test is None else Pair(base[0].label, common and common.common, test)


# -- one number a run -----------------------------------------------------------------------------------------------


def _values(
    figure: Figure, runs: Sequence[History], window: float, reach: float | None
) -> tuple[dict[int, float], Common | None]:
    common = _common(figure, runs, window)
    return _values_in(figure, runs, common, reach), common and common.common


def _values_in(figure: Figure, runs: Sequence[History], common: _Span | None, reach: float | None) -> dict[int, float]:
    """Seed -> value, without the seeds that have none."""
    found = {run.seed: _value(figure, run, common, reach) for run in runs}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _value(figure: Figure, run: History, span: _Span | None, reach: float | None) -> float:
    if figure.axis is None:
        return math.nan if reach is None else tokens_to_reach(run, reach)
    if span is None:
        return math.nan
    if figure.measure == "tokens":
        return float(run.tokens[np.searchsorted(run.steps, span.steps[-1])])
    values = run.measures[figure.measure]
    if span.common.axis == "tokens":
        return mean_between(run.tokens, values, span.common.start, span.common.end)
    inside = values[np.searchsorted(run.steps, span.steps)]
    known = inside[np.isfinite(inside)]
    return float(known.mean()) if known.size else math.nan


def mean_between(x: Floats, values: Floats, start: float, end: float) -> float:
    """Mean over [start, end] of `values`, interpolated linearly in x; NaN where that reaches outside what was measured."""
    known = np.isfinite(x) & np.isfinite(values)
    if not known.any() or x[known][0] > start or x[known][-1] < end:
        return math.nan
    return float(np.interp(np.linspace(start, end, _POINTS), x[known], values[known]).mean())


def tokens_to_reach(run: History, level: float, window: float = WINDOW) -> float:
    """Tokens trained on when the accuracy, as a running mean over `window` of the run's steps, first reaches `level`.

    Linear between the two steps around the crossing; NaN when it is never reached.
    """
    known = np.isfinite(run.tokens) & np.isfinite(run.measures["accuracy"])
    x, values = run.tokens[known], run.measures["accuracy"][known]
    width = max(1, round(window * len(values)))
    if len(values) < width or not len(values):
        return math.nan
    smooth = np.convolve(values, np.full(width, 1 / width), mode="valid")
    x = x[width - 1 :]
    above = smooth >= level - 1e-12
    if not above.any():
        return math.nan
    at = int(above.argmax())
    return float(x[0]) if at == 0 else float(np.interp(level, smooth[at - 1 : at + 1], x[at - 1 : at + 1]))


# -- where runs can be compared ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """Where runs are compared, and for steps the common ones of the window."""

    common: Common
    steps: NDArray[np.int64]


def _common(figure: Figure, runs: Sequence[History], window: float) -> _Span | None:
    if figure.axis is None:
        return None
    return _common_tokens(runs, figure.measure, window) if figure.axis == "tokens" else _common_steps(runs, window)


def _common_steps(runs: Sequence[History], window: float) -> _Span | None:
    """The steps that every run recorded, and the last `window` of them (one at least); None without any."""
    distinct = {run.steps.tobytes(): run.steps for run in runs}.values()
    steps, union = reduce(np.intersect1d, distinct), reduce(np.union1d, distinct)
    if not steps.size:
        return None
    last = steps[-max(1, round(window * steps.size)) :]
    return _Span(Common("steps", float(last[0]), float(last[-1]), int(steps.size), int(union.size - steps.size)), last)


def _common_tokens(runs: Sequence[History], measure: str, window: float) -> _Span | None:
    """The tokens that every run has a measured number up to; runs without any are left aside. None when none has."""
    known = [run.tokens[np.isfinite(run.tokens) & np.isfinite(run.measures[measure])] for run in runs]
    end = min((float(tokens[-1]) for tokens in known if tokens.size > 1), default=0.0)
    return _Span(Common("tokens", (1 - window) * end, end), np.empty(0, dtype=np.int64)) if end > 0 else None


def _default_reach(base: Sequence[History], window: float) -> float | None:
    """`REACH` of the way from the baseline's first steps to its last, rounded down to hundredths; None if it did not rise."""
    shares = [run.measures["accuracy"][np.isfinite(run.measures["accuracy"])] for run in base]
    ways = [(part[:k].mean(), part[-k:].mean()) for part in shares if part.size and (k := max(1, round(window * part.size)))]
    if not ways:
        return None
    first, last = np.mean(ways, axis=0)
    return math.floor(100 * (first + REACH * (last - first))) / 100 if last > first else None


def _reward_is_accuracy(runs: Sequence[History]) -> bool:
    """Whether the reward is 1 for right and 0 for wrong, so that its mean is the accuracy."""
    return all(
        np.allclose(run.measures["raw_reward"], run.measures["accuracy"], rtol=0, atol=1e-9, equal_nan=True) for run in runs
    )


# -- what is said beside the numbers ----------------------------------------------------------------------------------


def _notes(arms: Mapping[str, Sequence[History]], base: str, outcomes: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    said = []
    if all(len(runs) == 1 for runs in arms.values()):
        said.append("one seed: no interval and no test, so no difference can be shown; give more seeds")
    for label, runs in arms.items():
        seeds = {run.seed for run in runs}
        shared = seeds & {run.seed for run in arms[base]}
        if not shared:
            said.append(f"{label} and {base} have no seed in common, so they are not paired")
        elif label != base and len(shared) < max(len(seeds), len(arms[base])):
            said.append(f"{label} and {base} are paired by the {len(shared)} seeds that both have")
        holes = [run for run in runs if np.isnan(run.tokens).any()]
        if holes:
            said.append(f"{label}: {len(holes)} of {len(runs)} runs count no tokens behind a missing step")
    for label, outcome in next(iter(outcomes.values()), {}).items():
        common = outcome.pair.common if outcome.pair else outcome.common
        if common is not None and common.dropped:
            against = f" and {base}" if label != base else ""
            said.append(f"{label}{against}: {common.points} common steps; {common.dropped} are missing in some run, left out")
    for label, outcome in outcomes.get("tokens_to_accuracy", {}).items():
        if len(outcome.values) < len(arms[label]):
            said.append(
                f"{label}: only {len(outcome.values)} of {len(arms[label])} runs reached the accuracy, so its tokens to"
                " accuracy are those of the faster ones"
            )
    return said
