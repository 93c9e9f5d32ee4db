"""What a run's manifest says of the policy that its training ended with, evaluated on fresh prompts.

They are drawn by the seed alone and no training step draws them, so that the runs of one seed answer the same prompts under the
same noise: differences are paired by seed, as in the training rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

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


def _number(value: object) -> float:
    """NaN where there was nothing to measure, such as the length of wrong responses where none is wrong."""
    return float(value) if isinstance(value, (int, float)) else math.nan
