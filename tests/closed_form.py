"""The numbers of a step by plain arithmetic, token by token: the second route that the engine is checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.fixtures import Sample


def masks(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.get("loss_mask") or [1] * sample["response_length"] for sample in samples]


def rollout_ids(samples: Sequence[Sample]) -> list[Any]:
    return [sample.get("rollout_id", at) for at, sample in enumerate(samples)]


def weights(samples: Sequence[Sample], mode: str, divisor: float = 10.0, scale: str = "rollouts") -> list[list[float]]:
    """The weight of every response token, by the table of the modes."""
    mask, ids = masks(samples), rollout_ids(samples)
    n_rollouts = len(set(ids))
    n_prompts = len({sample["group_index"] for sample in samples}) if mode == "prompt_mean" else 0
    total = sum(map(sum, mask))
    found = []
    for at, sample in enumerate(samples):
        if mode == "sample_mean":
            count = n_rollouts * sum(sum(m) for m, other in zip(mask, ids, strict=True) if other == ids[at])
        elif mode == "prompt_mean":
            group = sample["group_index"]
            pooled = sum(sum(m) for m, other in zip(mask, samples, strict=True) if other["group_index"] == group)
            count = (n_prompts if scale == "prompts" else n_rollouts) * pooled
        elif mode == "token_mean":
            count = total
        else:
            count = n_rollouts * divisor
        found.append([m / count if m else 0.0 for m in mask[at]])
    return found


def token_numbers(
    samples: Sequence[Sample], advantages: Sequence[float], eps_clip: float, eps_clip_high: float
) -> dict[str, list[list[float]]]:
    """Every per-token number: policy loss and its slope, clip indicator, KLs, mismatch, entropy."""
    names = ("pg_loss", "slope", "pg_clipfrac", "ppo_kl", "kl_loss", "ratio_deviation", "entropy_loss", "sampler_mismatch")
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for sample, advantage in zip(samples, advantages, strict=True):
        rows: dict[str, list[float]] = {name: [] for name in names}
        for t in range(sample["response_length"]):
            new, old = sample["log_probs"][t], sample["old_log_probs"][t]
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - eps_clip), 1 + eps_clip_high)
            free, bound = -ratio * advantage, -clipped * advantage
            rows["pg_loss"].append(max(free, bound))
            rows["slope"].append(-ratio * advantage if free >= bound else 0.0)
            rows["pg_clipfrac"].append(float(bound > free))
            rows["ppo_kl"].append(old - new)
            rows["ratio_deviation"].append(abs(math.expm1(new - old)))
            d = sample["ref_log_probs"][t] - new
            rows["kl_loss"].append(math.expm1(d) - d)
            rows["entropy_loss"].append(sample["entropy"][t] if "entropy" in sample else 0.0)
            rows["sampler_mismatch"].append(abs(old - sample["rollout_log_probs"][t]) if "rollout_log_probs" in sample else 0.0)
        for name in names:
            found[name].append(rows[name])
    return found


def weighted(weight: Sequence[Sequence[float]], value: Sequence[Sequence[float]]) -> float:
    return math.fsum(w * x for row, values in zip(weight, value, strict=True) for w, x in zip(row, values, strict=True) if w)


def gradient(weight: Sequence[Sequence[float]], slope: Sequence[Sequence[float]]) -> list[float]:
    """d pg_loss / d log_probs at every response token, flat."""
    return [w * s if w else 0.0 for row, slopes in zip(weight, slope, strict=True) for w, s in zip(row, slopes, strict=True)]
