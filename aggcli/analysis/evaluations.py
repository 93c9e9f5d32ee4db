"""What a run's manifest says of the policy that its training ended with, evaluated on fresh prompts.

They are drawn by the seed alone and no training step draws them, so that the runs of one seed answer the same prompts under the
same noise: differences are paired by seed, as in the training rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from aggcli.analysis.comparison import Comparison
from aggcli.analysis.histories import History
from aggcli.measurement.words import plural

_FIELDS = ("accuracy", "response_length", "correct_response_length", "incorrect_response_length")
"""Fields of an evaluation; the measure of each is named `fresh/<field>`."""


def evaluations_of(runs: Sequence[History]) -> tuple[dict[str, dict[Path, float]], list[str]]:
    """Measure -> run directory -> number, and notes. Empty unless every run was evaluated: an arm of those runs alone that came
    to their end would be one of survivors.
    """
    known = {run.directory: run.evaluation for run in runs if run.evaluation is not None}
    if not known:
        return {}, []
    if len(known) < len(runs):
        missing = plural(len(runs) - len(known), "run was", "runs were")
        return {}, [f"{missing} not evaluated at the end, so no figures on fresh prompts are compared"]
    ends = {f"fresh/{name}": {at: _number(found.get(name)) for at, found in known.items()} for name in _FIELDS}
    return ends, []


def behind_accuracy(runs: Sequence[History], comparison: Comparison, outcome: str) -> str:
    """What an accuracy of one seed is the mean of: `512 fresh prompts a seed`, of training rollouts at equal steps `96 prompts
    x 8 rollouts a seed`; empty where the records do not say, or where not all runs have the same.
    """
    if outcome == "accuracy_on_fresh_prompts":
        counts = {run.evaluation.get("prompts") if run.evaluation is not None else None for run in runs}
        (count,) = counts if len(counts) == 1 else (None,)
        return f"{count} fresh prompts a seed" if isinstance(count, int) else ""
    if outcome != "accuracy" or any(run.settings.get("dynamic_sampling") for run in runs):
        return ""  # what sampling drops or samples again is not known here
    names = ("rollout_batch_size", "n_samples_per_prompt")
    sizes = {tuple(run.settings.get(name) for name in names) for run in runs}
    points = {one.common.points for one in comparison.outcomes[outcome].values() if one.common is not None}
    if len(sizes) != 1 or len(points) != 1:
        return ""
    ((prompts, rollouts),) = sizes
    if not isinstance(prompts, int) or not isinstance(rollouts, int):
        return ""
    steps = max(1, round(comparison.window * points.pop()))
    return f"{prompts * steps} prompts x {plural(rollouts, 'rollout')} a seed"


def _number(value: object) -> float:
    """NaN where there was nothing to measure, such as the length of wrong responses where none is wrong."""
    return float(value) if isinstance(value, (int, float)) else math.nan
