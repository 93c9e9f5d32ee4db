"""What a rollout batch holds, and what can be computed from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from aggcli.config import ObjectiveConfig
from aggcli.errors import RolloutError
from aggcli.measurement.local import is_correct
from aggcli.measurement.notes import skipped
from aggcli.measurement.words import plural
from aggcli.objective.step import step_inputs, with_advantages
from aggcli.objective.weights import need_groups
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, distinct, group_of_rollout, is_first
from aggcli.rules import MODES


def reward_scale(batch: RolloutBatch, threshold: float) -> list[str]:
    """One line where rewards lie far off the scale of the threshold from which an answer counts as correct.

    Far off: the largest reward is twice a positive threshold or more, so that less than full marks count as correct; or rewards
    differ and none reaches the threshold.
    """
    if batch.reward_S is None:
        return []
    reward_G = batch.reward_S[is_first(batch.rollout_S)]
    scored_G = reward_G[~reward_G.isnan()]
    if not scored_G.numel():
        return []
    least, most = float(scored_G.min()), float(scored_G.max())
    is_above = threshold > 0 and most >= 2 * threshold
    if not is_above and (least == most or bool(is_correct(scored_G, threshold).any())):
        return []
    right = int(is_correct(scored_G, threshold).sum())
    return [
        f"rewards run from {least:g} to {most:g} (mean {float(scored_G.mean()):.3g}), off the scale of --correct-threshold"
        f" {threshold:g}: {right} of {scored_G.numel()} count as correct"
    ]


def inventory(batch: RolloutBatch, objective: ObjectiveConfig, correct_threshold: float) -> dict[str, Any]:
    """Counts, lengths, rewards, streams and layout of a batch; `computable` and `skipped` say what follows from them."""
    advantages_T, origin = with_advantages(batch, objective)
    batch = dataclasses.replace(batch, advantages_T=advantages_T)
    missing = skipped(step_inputs(batch, objective, (), torch.float64))
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
        "truncated_samples": None if batch.truncated_S is None else int(batch.truncated_S.nansum()),
    }
    refused = _refused(batch)
    usable = [mode.name for mode in MODES if mode.name not in refused]
    return {
        **facts,
        "computable": [*(f"mode {mode}" for mode in usable), *_computable(missing)],
        "skipped": {**{f"mode {mode}": reason for mode, reason in refused.items()}, **missing},
        "notes": [*batch.notes, *reward_scale(batch, correct_threshold)],
    }


def _counts(batch: RolloutBatch) -> dict[str, Any]:
    group_G = group_of_rollout(batch.group_S, batch.rollout_S)[is_first(batch.rollout_S)]
    sizes = torch.bincount(group_G[group_G != NO_GROUP])
    sizes = sizes[sizes > 0]
    return {
        "samples": batch.num_samples,
        "rollouts": distinct(batch.rollout_S),
        "prompts": sizes.numel(),
        "group_sizes": sorted(set(sizes.tolist())),
        "groups_found": batch.grouping or ("named in the file" if sizes.numel() else None),
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
        "fully_masked_samples": int((batch.mask_sum_S == 0).sum()),
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
    refused = {}
    for mode in MODES:
        try:
            if mode.needs_groups:
                need_groups(batch, mode)
        except RolloutError as error:
            refused[mode.name] = str(error).removeprefix(batch.name).lstrip(", ")
    return refused


def _computable(missing: dict[str, str]) -> list[str]:
    wanted = ("pg_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "entropy_loss", "sampler_mismatch", "raw_reward", "pass@k")
    return [name for name in wanted if name not in missing]


# -- prompt groups ------------------------------------------------------------------------------------------------------


def group_facts(batch: RolloutBatch, objective: ObjectiveConfig, correct_threshold: float) -> list[dict[str, Any]]:
    """One dict for each prompt group, in order of first appearance: its size, rewards, lengths and advantages.

    `advantage_spread` is the largest advantage of its trained tokens minus the smallest, None where there is none.
    `state`: `starved` where no scored rollout is correct, `saturated` where all are, None where they differ or none is scored.
    `duplicates`: samples whose token ids are those of an earlier sample of the group; None without token ids.
    """
    advantages_T, _ = with_advantages(batch, objective)
    group_S = group_of_rollout(batch.group_S, batch.rollout_S)
    first_S = is_first(batch.rollout_S)
    ends_U = batch.total_length_S.cumsum(0).tolist()
    at_T, group_T = batch.loss_mask_T.nonzero().flatten(), group_S[batch.sample_of_token()]
    order = group_S[group_S != NO_GROUP].unique().tolist()
    facts = []
    for group in order:
        in_group_S = group_S == group
        reward_G = None if batch.reward_S is None else batch.reward_S[in_group_S & first_S]
        scored_G = reward_G[~reward_G.isnan()] if reward_G is not None else torch.empty(0)
        length_S = batch.response_length_S[in_group_S]
        advantage_T = None if advantages_T is None else advantages_T[at_T][group_T[at_T] == group]
        has_any = advantage_T is not None and advantage_T.numel() > 0
        right = is_correct(scored_G, correct_threshold)
        same = bool(right.all()) or not bool(right.any())
        facts.append(
            {
                "group": batch.labels.groups[group] if batch.labels.groups else group,
                "samples": int(in_group_S.sum()),
                "rollouts": int((in_group_S & first_S).sum()),
                "scored_rollouts": scored_G.numel(),
                "correct_rollouts": int(right.sum()) if scored_G.numel() else None,
                "reward_min": float(scored_G.min()) if scored_G.numel() else None,
                "raw_reward": float(scored_G.mean()) if scored_G.numel() else None,
                "reward_max": float(scored_G.max()) if scored_G.numel() else None,
                "response_length_min": int(length_S.min()),
                "response_length": float(length_S.double().mean()),
                "response_length_max": int(length_S.max()),
                "advantage_spread": float(advantage_T.max() - advantage_T.min()) if has_any else None,  # pyright: ignore[reportOptionalMemberAccess]
                "state": ("saturated" if right.any() else "starved") if scored_G.numel() and same else None,
                "duplicates": _duplicates(batch, in_group_S.nonzero().flatten().tolist(), ends_U),
            }
        )
    return facts


def _duplicates(batch: RolloutBatch, samples: list[int], ends_U: list[int]) -> int | None:
    if batch.token_ids_U is None:
        return None
    spans = [(ends_U[sample] - int(batch.total_length_S[sample]), ends_U[sample]) for sample in samples]
    return len(samples) - len({batch.token_ids_U[start:end].numpy().tobytes() for start, end in spans})
