"""Runs that diverged: which, when, and what a comparison must say before anything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aggcli.analysis.histories import History, when_diverged
from aggcli.errors import some
from aggcli.measurement.words import listed, plural
from aggcli.records import read_manifest


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
    for manifest in map(read_manifest, silent):
        if when := when_diverged(manifest):
            mode = manifest.get("mode", "custom")
            found.append(Diverged(mode, mode, manifest.get("seed", 0), *when, recorded=False))
    return found


def in_words(found: Sequence[Diverged], runs: Mapping[str, int]) -> str:
    """`2 of 4 runs of token_mean diverged, at steps 20 and 21; the figures are ...`; empty without any.

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
    return f"{'; '.join(said)}; the figures are of the steps {having}."
