"""The final metrics of a trained comparison: per mode over seeds, and against the first mode, seed by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aggcli.analysis.outcomes import OUTCOMES
from aggcli.analysis.statistics import interval, paired_difference

FINAL = {
    "accuracy": "accuracy",
    "response_length": "response_length",
    "correct_response_length": "correct/response_length",
    "incorrect_response_length": "incorrect/response_length",
}
"""Field of an evaluation -> name in the summary."""


def final_summary(
    runs: Sequence[tuple[str, str, int]], evaluations: Mapping[str, Mapping[str, float | None]], limit: float | None = None
) -> dict[str, Any]:
    """`modes` -> metric -> mean, low, high, n, and the paired `difference` to the baseline mode's; and the missing runs.

    `runs`: (name, mode, seed) of every run that was asked for; `evaluations`: run name -> metric -> value (None where there
    was nothing to measure) of those that finished; `limit`: the response limit, where intervals of mean lengths are cut.
    """
    modes = list(dict.fromkeys(mode for _, mode, _ in runs))
    summary: dict[str, Any] = {"baseline": modes[0], "modes": {}}
    values = {
        (mode, field): {
            seed: value
            for name, of_mode, seed in runs
            if of_mode == mode and name in evaluations and (value := evaluations[name][field]) is not None
        }
        for mode in modes
        for field in FINAL
    }
    for mode in modes:
        metrics: dict[str, Any] = {}
        for field, name in FINAL.items():
            own, outcome = values[mode, field], OUTCOMES[f"{name}_on_fresh_prompts"]
            found = interval(list(own.values()), outcome.bounds, up_to=outcome.up_to) if own else None
            if found is not None and found.high is not None and limit is not None and field.endswith("response_length"):
                found = dataclasses.replace(found, high=min(found.high, limit))
            metrics[name] = None if found is None else dataclasses.asdict(found)
            if own and mode != modes[0]:
                difference = paired_difference(own, values[modes[0], field], outcome.bounds)
                metrics[name]["difference"] = None if difference is None else dataclasses.asdict(difference)
        summary["modes"][mode] = metrics
    summary["missing"] = [name for name, _, _ in runs if name not in evaluations]
    return summary


LAST_STEP = ("pg_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "entropy_loss", "sampler_mismatch", "grad_norm", "raw_reward")
"""Numbers of the last optimizer step that are compared where there are no fresh prompts to evaluate on."""


def last_step_summary(runs: Sequence[tuple[str, str, int]], last: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`modes` -> number of the last optimizer step, mean over seeds; None where there is none. `last`: run name -> its line."""
    modes = list(dict.fromkeys(mode for _, mode, _ in runs))
    summary: dict[str, Any] = {"baseline": modes[0], "modes": {}}
    for mode in modes:
        lines = [last[name] for name, of_mode, _ in runs if of_mode == mode and name in last]
        values = {name: [line[name] for line in lines if line.get(name) is not None] for name in LAST_STEP}
        summary["modes"][mode] = {
            name: dataclasses.asdict(interval(numbers)) if numbers else None for name, numbers in values.items()
        }
    summary["missing"] = [name for name, _, _ in runs if name not in last]
    return summary
