"""Runs that went wrong, which a comparison must say before anything else: those that diverged, and those that ended with no
right answer and every response at the limit; and runs that were stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggcli.analysis.histories import History, when_diverged, with_labels
from aggcli.analysis.reading import run_manifest
from aggcli.errors import some
from aggcli.measurement.words import listed, plural

_MOST = 4
"""Unfinished runs that a note names."""


@dataclass(frozen=True)
class Diverged:
    """A run that trained no further. `label`: its arm; `step`: the rollout step; `recorded`: whether any step of it is."""

    label: str
    mode: str
    seed: int
    step: int
    text: str
    recorded: bool = True


def diverged_of(runs: Sequence[History], silent: Sequence[Path] = ()) -> list[Diverged]:
    """Those of the compared runs that diverged, and of `silent`, run directories without a recorded step."""
    found = [Diverged(run.label, run.mode, run.seed, *run.diverged) for run in runs if run.diverged]
    for manifest in map(run_manifest, silent):
        if when := when_diverged(manifest):
            mode = manifest.get("mode", "custom")
            found.append(Diverged(mode, mode, manifest.get("seed", 0), *when, recorded=False))
    return found


def in_words(found: Sequence[Diverged], runs: Mapping[str, int]) -> str:
    """`2 of 4 runs of token_mean diverged, at steps 20 and 21; the numbers are ...`; empty without any.

    `runs`: label -> number of compared runs.
    """
    if not found:
        return ""
    said = []
    for label in dict.fromkeys(one.label for one in found):
        own = [one for one in found if one.label == label]
        total = runs.get(label, 0) + sum(not one.recorded for one in own)
        steps = sorted({one.step for one in own})
        named = listed(list(map(str, steps))) if len(steps) <= 4 else some(steps, 4)
        at = "step" if len(steps) == 1 else "steps"
        said.append(f"{len(own)} of {plural(total, 'run')} of {label} diverged, at {at} {named}")
    having = "that all runs have" if all(one.recorded for one in found) else "that all runs with a recorded step have"
    return f"{'; '.join(said)}; the numbers are of the steps {having}."


def is_collapsed(accuracy: float | None, response_length: float | None, limit: float | None) -> bool:
    """Whether no rollout is right and every response is as long as a response can be."""
    return limit is not None and response_length is not None and accuracy == 0 and response_length >= limit


def collapsed_in_words(runs: Sequence[History]) -> str:
    """`2 of 3 runs of token_mean end with accuracy 0 and every response at the limit of 24 tokens: ...`; empty without any.

    A run counts by the last tenth of its recorded steps (one at least).
    """
    said = []
    for label, own in with_labels(runs).items():
        gone = [run for run in own if _ends_collapsed(run)]
        if gone:
            limits = listed(sorted({f"{run.settings['max_response_length']:g}" for run in gone}))
            ends = "ends" if len(gone) == 1 else "end"
            total = plural(len(own), "run")
            said.append(
                f"{len(gone)} of {total} of {label} {ends} with accuracy 0 and every response at the limit of {limits} tokens"
            )
    return f"{'; '.join(said)}: collapsed, or nothing was ever learned." if said else ""


def _ends_collapsed(run: History) -> bool:
    last = slice(-max(1, len(run.steps) // 10), None)
    accuracy, length = (run.measures[name][last] for name in ("accuracy", "response_length"))
    limit = run.settings.get("max_response_length")
    if not (np.isfinite(accuracy).all() and np.isfinite(length).all()):
        return False
    return is_collapsed(float(accuracy.max()), float(length.min()), limit)


def unfinished(runs: Sequence[History]) -> list[str]:
    """A note on the runs that were stopped, or are running: `token_mean, seed 1: 8 of 40 steps (running)`.

    What diverged is left to `diverged_of`, and so is the plan of a replay, whose steps are those of the dump.
    """
    said = []
    for run in runs:
        trained, planned = int(run.steps[-1]) + 1, None if run.settings.get("rollouts") else run.settings.get("steps")
        short = isinstance(planned, int) and trained < planned
        if run.diverged or not (short or run.status not in ("done", "")):
            continue
        steps = f"{trained} of {plural(planned, 'step')}" if isinstance(planned, int) else plural(trained, "step")
        said.append(f"{run.label}, seed {run.seed}: {steps}" + (f" ({run.status})" if run.status else ""))
    more = f"; and {len(said) - _MOST} more" if len(said) > _MOST else ""
    return [f"not done, or of fewer recorded steps than planned: {'; '.join(said[:_MOST])}{more}"] if said else []
