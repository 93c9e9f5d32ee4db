"""What a rollout batch holds, and what can be computed from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from aggcli.config import MODES, ObjectiveConfig
from aggcli.errors import RolloutError
from aggcli.measurement.local import is_correct
from aggcli.measurement.notes import skipped
from aggcli.measurement.words import plural
from aggcli.objective.aggregation import need_groups
from aggcli.objective.step import step_inputs, with_advantages
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, group_of_rollout, is_first


def inventory(batch: RolloutBatch, objective: ObjectiveConfig, correct_threshold: float) -> dict[str, Any]:
    """Counts, lengths, rewards, streams and layout of a batch; `computable` and `skipped` say what follows from them."""
    advantages_T, origin = with_advantages(batch, objective)
    batch = dataclasses.replace(batch, advantages_T=advantages_T)
    missing = skipped(step_inputs(batch, objective, ("sample_mean",), torch.float64))
    facts = {
        "source": batch.name,
        **_counts(batch),
        **_lengths(batch),
        **_rewards(batch, correct_threshold),
        "streams": [field.removesuffix("_T") for field in batch.token_fields if field != "advantages_T"],
        "token_ids": batch.token_ids_U is not None,
        "advantages": origin,
        "recorded_layout": _recorded(batch),
        "status": _statuses(batch),
    }
    refused = _refused(batch)
    usable = [mode for mode in MODES if mode not in refused]
    return {
        **facts,
        "computable": [*(f"mode {mode}" for mode in usable), *_computable(missing)],
        "skipped": {**{f"mode {mode}": reason for mode, reason in refused.items()}, **missing},
        "notes": list(batch.notes),
    }


def _counts(batch: RolloutBatch) -> dict[str, Any]:
    group_G = group_of_rollout(batch.group_S, batch.rollout_S)[is_first(batch.rollout_S)]
    sizes = torch.bincount(group_G[group_G != NO_GROUP])
    sizes = sizes[sizes > 0]
    return {
        "samples": batch.num_samples,
        "rollouts": int(is_first(batch.rollout_S).sum()),
        "prompts": sizes.numel(),
        "group_sizes": sorted(set(sizes.tolist())),
        "samples_without_group": int((batch.group_S == NO_GROUP).sum()),
    }


def _lengths(batch: RolloutBatch) -> dict[str, Any]:
    length_S = batch.response_length_S
    tokens = int(batch.loss_mask_T.sum())
    return {
        "length_unit": batch.length_unit,
        "response_length": float(length_S.double().mean()),
        "response_length_min": int(length_S.min()),
        "response_length_max": int(length_S.max()),
        "response_tokens": int(length_S.sum()),
        "tokens": tokens,
        "fully_masked_samples": int((batch.mask_sum_S() == 0).sum()),
    }


def _rewards(batch: RolloutBatch, threshold: float) -> dict[str, Any]:
    if batch.reward_S is None:
        return {"scored_rollouts": 0, "raw_reward": None, "correct_rollouts": None}
    reward_G = batch.reward_S[is_first(batch.rollout_S)]
    scored_G = reward_G[~reward_G.isnan()]
    return {
        "scored_rollouts": scored_G.numel(),
        "raw_reward": float(scored_G.mean()) if scored_G.numel() else None,
        "correct_rollouts": int(is_correct(scored_G, threshold).sum()),
    }


def _recorded(batch: RolloutBatch) -> str | None:
    if batch.recorded is None:
        return None
    first = batch.recorded.steps[0]
    ranks, micro_batches = len(first.partitions), sum(len(of_rank) for of_rank in first.micro_batches)
    steps, cut = len(batch.recorded.steps), plural(micro_batches, "micro-batch", "micro-batches")
    return f"dp{ranks}, {cut}" + (f", {steps} optimizer steps" if steps > 1 else "")


def _statuses(batch: RolloutBatch) -> dict[str, int]:
    found: dict[str, int] = {}
    for status in batch.status_S or ():
        found[str(status)] = found.get(str(status), 0) + 1
    return found


def _refused(batch: RolloutBatch) -> dict[str, str]:
    """Modes that the batch cannot give, with the reason."""
    try:
        need_groups(batch)
    except RolloutError as error:
        return {"prompt_mean": str(error).removeprefix(batch.name).lstrip(", ")}
    return {}


def _computable(missing: dict[str, str]) -> list[str]:
    wanted = ("pg_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "entropy_loss", "sampler_mismatch", "raw_reward", "pass@k")
    return [name for name in wanted if name not in missing]
