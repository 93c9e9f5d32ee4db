"""Runs on recorded rollouts, which are the same under every mode: what a mode changes there, and what it cannot.

No mode moves the accuracy or the lengths of rollouts that somebody recorded, so those are not compared. What differs is the
weight of each token, and the gradient that comes of it: means over the steps of these very rollouts, without a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from aggcli.analysis.answer import Answer
from aggcli.analysis.comparison import Comparison, Estimate, arms_of, estimate_of
from aggcli.analysis.histories import History
from aggcli.analysis.outcomes import Common, Outcome
from aggcli.analysis.reading import read_lines
from aggcli.analysis.replay_answer import ANSWERED_FROM, recorded_replay, replay_answer
from aggcli.analysis.settings import differences
from aggcli.analysis.units import in_length_unit, one_length_unit
from aggcli.analysis.verdict import Verdict
from aggcli.errors import some
from aggcli.measurement.catalogue import LENGTH_BINS, describe
from aggcli.measurement.words import listed, plural, short
from aggcli.records import METRICS

_LENGTHS = dict(zip(LENGTH_BINS, ("0-25 %", "25-50 %", "50-75 %", "75-100 %"), strict=True))
_NORMS = {
    "grad_norm_log_probs": "gradient norm",
    "grad_norm": "gradient norm of the parameters",
}
"""Of a replay, and of training: never set against each other."""
_HEADS = {
    "total_weight": "total weight",
    "effective_tokens": "effective sample size",
    **_NORMS,
    "gradient_ratio": "gradient norm over the baseline's",
    "gradient_cosine": "cosine to the baseline's gradient",
    **{f"weight_share/length_{bin_}": f"weight on length {share}" for bin_, share in _LENGTHS.items()},
    "weight_share/correct": "weight on correct rollouts",
    "weight_share/incorrect": "weight on wrong rollouts",
    "weight_share/positive_advantage": "weight on advantage > 0",
    "weight_share/negative_advantage": "weight on advantage < 0",
    "weight_share/zero_advantage": "weight on advantage = 0",
}
_OF_THE_POLICY = {"entropy_loss": "entropy of the policy", "kl_loss": "KL to the reference"}
"""What a mode changes besides where a policy is trained on recorded rollouts."""
RECORDED_OUTCOMES = {
    name: Outcome(name, head, describe(name).unit, name) for name, head in {**_HEADS, **_OF_THE_POLICY}.items()
}

MOST_NAMED = 4
"""Arms that a sentence names; the rest are counted."""

Lines = Mapping[int, Mapping[str, float | None]]
"""Optimizer step -> its numbers."""


def on_recorded_rollouts(run: History) -> bool:
    """Whether the rollouts of a run were recorded before it (a replay, or `--train` on a dump), instead of sampled by it."""
    return bool(run.settings.get("rollouts"))


def is_replay(run: History) -> bool:
    """Whether nothing was trained on the recorded rollouts."""
    return not run.settings.get("train")


def share_rollouts(runs: Iterable[History]) -> bool:
    """Whether the runs of each seed have the same rollouts, as far as their steps, tokens, rewards and lengths can tell."""
    found: dict[int, set[tuple[object, ...]]] = {}
    for run in runs:
        measured = (run.steps, run.tokens, *(run.measures[name] for name in ("accuracy", "raw_reward", "response_length")))
        known = any(np.isfinite(values).any() for values in measured[1:])
        name = None if known else str(run.settings.get("rollouts"))
        found.setdefault(run.seed, set()).add((name, *(values.tobytes() for values in measured)))
    return all(len(kinds) == 1 for kinds in found.values())


def compare_recorded(runs: Sequence[History], baseline: str | None = None) -> Comparison:
    """What each arm makes of its recorded rollouts: means over the steps, without pairs, since nothing was left to chance. An
    outcome that is 0 in every arm is left out.

    `gradient_ratio` is made from the norms, of the steps that the baseline's run of that seed has too, where both have the same
    rollouts; `gradient_cosine` is as it was recorded, where that was against the baseline's mode under the same settings.
    Raises `SettingError` for a baseline that is not among the labels, and `RecordError`.
    """
    arms = arms_of(runs, baseline)
    base = next(iter(arms))
    length_unit = one_length_unit({run.directory: run.length_unit for run in runs})
    lines = {run.directory: {line["step"]: line for line in read_lines(run.directory / METRICS).rows} for run in runs}
    of_seed = {run.seed: run for run in arms[base]}
    outcomes: dict[str, dict[str, Estimate]] = {}
    for label, own in arms.items():
        values: dict[str, dict[int, float]] = {}
        for run in own:
            theirs = of_seed.get(run.seed)
            against = lines[theirs.directory] if theirs is not None and share_rollouts([run, theirs]) else {}
            cosine = theirs is not None and bool(against) and run.modes[:1] == (theirs.mode,) and _as_set([run, theirs])
            for name, value in _means(lines[run.directory], against, cosine=cosine).items():
                values.setdefault(name, {})[run.seed] = value
        for name, found in values.items():
            outcomes.setdefault(name, {})[label] = estimate_of(RECORDED_OUTCOMES[name], label, found, _steps(own))
    names = _HEADS if all(map(is_replay, runs)) else RECORDED_OUTCOMES
    ordered = {name: outcomes[name] for name in names if name in outcomes and any(one.mean for one in outcomes[name].values())}
    defined = {name: replace(one, unit=in_length_unit(one.unit, length_unit)) for name, one in RECORDED_OUTCOMES.items()}
    return Comparison(base, tuple(arms), ordered, None, (), defined, length_unit=length_unit, recorded=True)


def _as_set(runs: Sequence[History]) -> bool:
    """Whether the runs have the same settings, but for their modes."""
    return not any(one.kind == "setting" for one in differences(runs))


def _means(lines: Lines, against: Lines, *, cosine: bool) -> dict[str, float]:
    """Name -> mean over the steps that have a number; without the names that none has."""
    found: dict[str, list[float]] = {}
    for step, line in lines.items():
        norms = [(line.get(name), against.get(step, {}).get(name)) for name in _NORMS]
        values = {**{name: line.get(name) for name in RECORDED_OUTCOMES}, "gradient_ratio": None}
        for norm, theirs in norms:
            if norm is not None and theirs:
                values["gradient_ratio"] = norm / theirs
        if not cosine:
            values["gradient_cosine"] = None
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def _steps(runs: Sequence[History]) -> Common:
    steps = np.unique(np.concatenate([run.steps for run in runs]))
    return Common("steps", float(steps[0]), float(steps[-1]), int(steps.size))


# -- in words -----------------------------------------------------------------------------------------------------------


def recorded_verdict(comparison: Comparison, runs: Sequence[History]) -> Verdict:
    """The answer of a replay where these runs are one, else what they are and which of them is farthest off; and how the modes'
    gradients differ. Raises `RecordError`.
    """
    lines = [_line(comparison, label) for label in comparison.labels if label != comparison.baseline]
    steps = next((outcome.common for own in comparison.outcomes.values() for outcome in own.values() if outcome.common), None)
    over = f", mean of {plural(steps.points, 'step')}" if steps else ""
    answer = _of_one_replay(comparison, runs) or Answer((_what_there_is(comparison, runs), *_farthest(comparison)))
    return Verdict(answer, remarks=(f"against {comparison.baseline}{over}", tuple(filter(None, lines))))


def what_no_mode_changes(runs: Sequence[History]) -> str:
    """What recorded rollouts cannot show of a mode, and what they can."""
    policy = "" if all(map(is_replay, runs)) else " and so the policy"
    return (
        "Accuracy and length are properties of the recorded rollouts, and no mode can change them; what the modes change is"
        f" the weight of each token{policy}."
    )


def _of_one_replay(comparison: Comparison, runs: Sequence[History]) -> Answer | None:
    """The answer of the replay that these runs are: each mode once, on the same rollouts, under the same settings, with cosines
    to this baseline, and with all that the answer is made of; None where they are none.
    """
    modes = [run.mode for run in runs]
    same = len({run.modes for run in runs}) == len({run.seed for run in runs}) == 1 and share_rollouts(runs)
    if not all(map(is_replay, runs)) or len(set(modes)) < len(modes) or not (same and _as_set(runs)):
        return None
    if len(runs) > 1 and runs[0].modes[:1] != (comparison.baseline,):
        return None
    head, steps = recorded_replay([run.directory for run in runs])
    return replay_answer({**head, "modes": comparison.labels}, steps) if head.keys() >= ANSWERED_FROM else None


def _what_there_is(comparison: Comparison, runs: Sequence[History]) -> str:
    """`6 replays of the same recorded rollouts: sample_mean (eps_clip=0.1), ...`."""
    kind = ("replay of", "replays of") if all(map(is_replay, runs)) else ("run trained on", "runs trained on")
    which = "recorded rollouts, not all of them the same" if not share_rollouts(runs) else "the same recorded rollouts"
    what = f"{plural(len(runs), *kind)} {which if len(runs) > 1 else 'recorded rollouts'}"
    names = comparison.labels
    return f"{what}: {listed(names) if len(names) <= MOST_NAMED else some(names, MOST_NAMED)}."


def _farthest(comparison: Comparison) -> list[str]:
    """The arm whose gradient norm is farthest from the baseline's, by the factor; none where no norm differs."""
    ratios = {label: _mean(comparison, "gradient_ratio", label) for label in comparison.labels if label != comparison.baseline}
    sizes = {label: abs(math.log(ratio)) for label, ratio in ratios.items() if ratio}
    label = max(sizes, key=lambda one: sizes[one], default="")
    if not label or sizes[label] < 1e-9:
        return []
    of = "Farthest" if None not in ratios.values() else "Of those with a gradient norm on the same rollouts, farthest"
    return [f"{of} from {comparison.baseline} in gradient norm is {_line(comparison, label)}."]


def _line(comparison: Comparison, label: str) -> str:
    """`prompt_mean: gradient norm 0.102x, cosine 0.855; effective sample size 459 tokens against 355`; empty without any."""
    ratio, cosine = (_mean(comparison, name, label) for name in ("gradient_ratio", "gradient_cosine"))
    tokens, theirs = (_mean(comparison, "effective_tokens", one) for one in (label, comparison.baseline))
    said = []
    if ratio is not None:
        said.append(f"gradient norm {short(ratio)}x" + ("" if cosine is None else f", cosine {short(cosine)}"))
    if tokens is not None and theirs is not None:
        unit = comparison.defined["effective_tokens"].unit
        said.append(f"effective sample size {short(tokens)} {unit} against {short(theirs)}")
    return f"{label}: {'; '.join(said)}" if said else ""


def _mean(comparison: Comparison, outcome: str, label: str) -> float | None:
    found = comparison.outcomes.get(outcome, {}).get(label)
    return None if found is None else found.mean
