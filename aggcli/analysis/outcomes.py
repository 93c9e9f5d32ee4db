"""The outcomes that runs are compared by: what each is, where runs can be compared in it, and its value for one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aggcli.analysis.histories import LOGGED_TOKENS, Floats, History
from aggcli.analysis.statistics import POSITIVE, SHARE, Bounds

WINDOW = 0.1
"""An outcome is the mean over the last tenth of the common range: a single step's rollouts are too few to tell modes apart."""
_POINTS = 33
"""Points at which a curve is interpolated inside the window of a token range."""
REACH = 0.9
"""Without a level to reach: this share of the baseline's own way from its first steps to its last."""

COUNTED = ("tokens", "characters", "words", "nats")
"""Units of what is never below 0. An estimate of a divergence in nats may be; its interval is then Student's own."""

Axis = Literal["steps", "tokens", "end"]
"""What runs are equal in where an outcome is taken: rollout steps, tokens, or `end`: the steps that the whole training took."""


@dataclass(frozen=True)
class Outcome:
    """A number that is compared. `axis`: what the runs are equal in where it is taken; None for one of a run's whole course;
    `up_to`: the quantile of Student's t that its interval reaches up to, further than 97.5 % where its law over runs has a long
    upper end. That of mean lengths of correct responses has: most runs have nearly the same, and a few that still give long
    answers a larger one (skewness 1.7 and 3.6 on real runs, where Student's intervals cover 93 to 94 % and 86 to 88 % instead
    of 95 %). Experiment 05 holds both.
    """

    name: str
    head: str
    unit: str
    measure: str
    axis: Axis | None = "steps"
    better: Literal["higher", "lower"] | None = None
    up_to: float = 0.975

    @property
    def bounds(self) -> Bounds | None:
        """What its numbers lie between by their meaning; None where they have no such bounds."""
        if self.name == "gradient_cosine":
            return (-1.0, 1.0)
        return SHARE if self.unit == "share" else POSITIVE if self.unit in COUNTED else None


OUTCOMES = {
    outcome.name: outcome
    for outcome in (
        Outcome("accuracy", "accuracy in training rollouts, equal steps", "share", "accuracy", better="higher"),
        Outcome(
            "accuracy_at_equal_tokens",
            "accuracy in training rollouts, equal tokens",
            "share",
            "accuracy",
            "tokens",
            "higher",
        ),
        Outcome("accuracy_on_fresh_prompts", "accuracy on fresh prompts (end)", "share", "fresh/accuracy", "end", "higher"),
        Outcome("tokens_to_accuracy", "tokens to accuracy", "tokens", "accuracy", None, "lower"),
        Outcome("raw_reward", "raw reward in training rollouts, equal steps", "reward", "raw_reward", better="higher"),
        Outcome(
            "raw_reward_at_equal_tokens",
            "raw reward in training rollouts, equal tokens",
            "reward",
            "raw_reward",
            "tokens",
            "higher",
        ),
        Outcome("response_length", "response length in training rollouts", "tokens", "response_length"),
        Outcome(
            "correct/response_length",
            "length of correct responses in training rollouts",
            "tokens",
            "correct/response_length",
            up_to=0.9825,
        ),
        Outcome(
            "incorrect/response_length",
            "length of wrong responses in training rollouts",
            "tokens",
            "incorrect/response_length",
        ),
        Outcome(
            "response_length_on_fresh_prompts",
            "response length, fresh prompts (end)",
            "tokens",
            "fresh/response_length",
            "end",
        ),
        Outcome(
            "correct/response_length_on_fresh_prompts",
            "length of correct responses, fresh prompts (end)",
            "tokens",
            "fresh/correct_response_length",
            "end",
            up_to=0.995,
        ),
        Outcome(
            "incorrect/response_length_on_fresh_prompts",
            "length of wrong responses, fresh prompts (end)",
            "tokens",
            "fresh/incorrect_response_length",
            "end",
        ),
        Outcome("entropy_loss", "entropy of the policy", "nats", "entropy_loss"),
        Outcome("kl", "KL divergence from the reference policy, as logged", "nats", "kl"),
        Outcome("tokens", "tokens trained on before the last common step", "tokens", "tokens"),
    )
}
LOGGED_BEFORE = replace(OUTCOMES["tokens"], head=f"{LOGGED_TOKENS} before the last common step")
"""Of runs of which another trainer counted the tokens, those of prompts among them."""


@dataclass(frozen=True)
class Common:
    """Where runs are compared: up to `end` (a rollout step, or tokens), over the last part from `start` on; on the axis `end`
    both are the last rollout step that each run was trained on.

    `points`: common steps; `dropped`: steps that only some of the runs recorded. 0 for tokens, which are interpolated.
    """

    axis: Axis
    start: float
    end: float
    points: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Span:
    """Where runs are compared, and for steps the common ones of the window."""

    common: Common
    steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class Terms:
    """How outcomes are taken. `window`: share of the common range that they are means of; `reach`: the accuracy of
    tokens_to_accuracy; `ends`: measure -> run directory -> a number of the policy that its training ended with.
    """

    window: float = WINDOW
    reach: float | None = None
    ends: Mapping[str, Mapping[Path, float]] = field(default_factory=dict)


def bounds_of(outcome: Outcome, runs: Sequence[History]) -> Bounds | None:
    """What the numbers of these runs lie between; of a mean response length the largest response limit among them, where each
    records one in the unit of its lengths. None where there are no such bounds."""
    limits = [run.settings.get("max_response_length") for run in runs if run.length_unit == "tokens"]
    known = [float(limit) for limit in limits if isinstance(limit, int | float)]
    if outcome.measure.endswith("response_length") and runs and len(known) == len(runs):
        return (0.0, max(known))
    return outcome.bounds


# -- one number a run -----------------------------------------------------------------------------------------------


def values_in(outcome: Outcome, runs: Sequence[History], span: Span | None, terms: Terms) -> dict[int, float]:
    """Seed -> value, without the seeds that have none."""
    found = {run.seed: _value(outcome, run, span, terms) for run in runs}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _value(outcome: Outcome, run: History, span: Span | None, terms: Terms) -> float:
    if outcome.axis is None:
        return math.nan if terms.reach is None else tokens_to_reach(run, terms.reach)
    if span is None:
        return math.nan
    if outcome.axis == "end":
        return terms.ends.get(outcome.measure, {}).get(run.directory, math.nan)
    if outcome.measure == "tokens":
        return float(run.tokens[np.searchsorted(run.steps, span.steps[-1])])
    values = run.measures[outcome.measure]
    if outcome.axis == "tokens":
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


def steps_to_reach(run: History, level: float) -> float:
    """The rollout step at which `tokens_to_reach` finds `level`, whether tokens are known or not; NaN when it never does."""
    return tokens_to_reach(replace(run, tokens=run.axis("steps")), level)


def default_reach(base: Sequence[History], window: float) -> float | None:
    """`REACH` of the way from the baseline's first steps to its last, rounded down to hundredths; None if it did not rise."""
    shares = [run.measures["accuracy"][np.isfinite(run.measures["accuracy"])] for run in base]
    ways = [(part[:k].mean(), part[-k:].mean()) for part in shares if part.size and (k := max(1, round(window * part.size)))]
    if not ways:
        return None
    first, last = np.mean(ways, axis=0)
    return math.floor(100 * (first + REACH * (last - first))) / 100 if last > first else None


# -- where runs can be compared ---------------------------------------------------------------------------------------


def span_of(outcome: Outcome, runs: Sequence[History], window: float) -> Span | None:
    """Where these runs are equal in the outcome's axis; None where they are nowhere, or the outcome has no axis."""
    if outcome.axis is None:
        return None
    if outcome.axis == "end":
        return _common_end(runs)
    return _common_tokens(runs, outcome.measure, window) if outcome.axis == "tokens" else _common_steps(runs, window)


def steps_trained(run: History) -> int:
    """Rollout steps that a finished run was trained for: its setting, or where that is not recorded the steps themselves.

    A step in which no group had a signal may leave no line, so that the recorded steps can be fewer.
    """
    given = run.settings.get("steps")
    return given if isinstance(given, int) else int(run.steps[-1]) + 1


def _common_end(runs: Sequence[History]) -> Span | None:
    """The end of training, where all were trained for as many steps."""
    steps = {steps_trained(run) for run in runs}
    last = float(min(steps) - 1)
    return Span(Common("end", last, last)) if len(steps) == 1 else None


def _common_steps(runs: Sequence[History], window: float) -> Span | None:
    """The steps that every run recorded, and the last `window` of them (one at least); None without any."""
    distinct = {run.steps.tobytes(): run.steps for run in runs}.values()
    steps, union = reduce(np.intersect1d, distinct), reduce(np.union1d, distinct)
    if not steps.size:
        return None
    last = steps[-max(1, round(window * steps.size)) :]
    return Span(Common("steps", float(last[0]), float(last[-1]), int(steps.size), int(union.size - steps.size)), last)


def _common_tokens(runs: Sequence[History], measure: str, window: float) -> Span | None:
    """The tokens that every run has a measured number up to; runs without any are left aside. None when none has."""
    known = [run.tokens[np.isfinite(run.tokens) & np.isfinite(run.measures[measure])] for run in runs]
    end = min((float(tokens[-1]) for tokens in known if tokens.size > 1), default=0.0)
    return Span(Common("tokens", (1 - window) * end, end)) if end > 0 else None
