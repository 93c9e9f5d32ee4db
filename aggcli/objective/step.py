"""One optimizer step, ready to be cut: its per-token inputs and the weight of every token under every rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aggcli.config import MODES, ObjectiveConfig
from aggcli.errors import RolloutError
from aggcli.layout.schedule import Schedule
from aggcli.objective.advantages import group_advantages
from aggcli.objective.aggregation import step_denominators, token_weights
from aggcli.objective.presets.facts import why_it_varies
from aggcli.objective.presets.registry import find_rule
from aggcli.objective.presets.weights import preset_weights
from aggcli.objective.reducer import Reducer, reducer_weights
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch

CUSTOM = "custom"
"""The name of the rule that a custom reducer makes."""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """`tokens`: flat [T] arrays by name (`loss_mask`, `log_probs`, `advantages`, ...); a missing one is absent.

    `weights`: float64 [T] by rule, for the rules compared and those that the metrics use; `rules`: the rules compared, in
    order; `metric_rule`: whose weights a rule's metrics use. `has_ratio`: two log-probability streams were there, so ratios
    are measured, not assumed to be 1.
    """

    step: RolloutBatch
    tokens: dict[str, Tensor]
    weights: dict[str, Tensor]
    rules: tuple[str, ...]
    metric_rule: dict[str, str]
    has_ratio: bool


def with_advantages(batch: RolloutBatch, objective: ObjectiveConfig) -> tuple[Tensor | None, str]:
    """The advantage of every token of a rollout batch, float64 [T] (None where nothing gives one), and where it came from.

    Group statistics need whole groups, so this runs before the batch is cut into optimizer steps.
    Raises `RolloutError` when recorded advantages are asked for and there are none.
    """
    rule = objective.advantages
    if batch.advantages_T is not None and rule in ("auto", "recorded"):
        return batch.advantages_T.double(), "recorded in the file"
    if rule == "recorded":
        raise RolloutError(f"{batch.name}: --advantages recorded, but the file has none; choose grpo or mean_only")
    divide = rule != "mean_only"
    if batch.reward_S is None or batch.reward_S.isnan().all():
        return None, "none: needs advantage or reward"
    if (batch.group_S == NO_GROUP).all():
        return None, "none: needs advantage or group_index (--group-size groups consecutive rollouts)"
    advantage_S = group_advantages(batch.reward_S, batch.rollout_S, batch.group_S, divide_by_std=divide)
    made_T = torch.repeat_interleave(advantage_S, batch.response_length_S, output_size=batch.loss_mask_T.numel())
    form = "(reward - group mean) / (std + 1e-6), std with n-1" if divide else "reward - group mean, no std"
    return made_T, f"from rewards: {form}"


def step_inputs(
    step: RolloutBatch,
    objective: ObjectiveConfig,
    modes: tuple[str, ...],
    dtype: torch.dtype,
    reducer: Reducer | None = None,
    schedule: Schedule | None = None,
) -> StepInputs:
    """Per-token inputs and weights of one optimizer step, whose `advantages_T` are already set (or None).

    `schedule`: the layout in force, which other frameworks' rules may depend on; default: the step in one piece.
    With `reducer`, the rule `custom` is added to `modes`. Raises `RolloutError` naming a sample without group_index under
    prompt_mean, and when a KL or entropy coefficient has nothing to act on.
    """
    if objective.kl_coef and (step.ref_log_probs_T is None or step.log_probs_T is None):
        lacks = "ref_log_probs" if step.ref_log_probs_T is None else "log_probs"
        raise RolloutError(
            f"{step.name}: --kl-coef {objective.kl_coef:g} needs log_probs and ref_log_probs; the file lacks {lacks}"
        )
    if objective.entropy_coef and step.entropy_T is None:
        raise RolloutError(f"{step.name}: --entropy-coef {objective.entropy_coef:g} needs entropy, which the file lacks")
    tokens, has_ratio = _streams(step)
    rules = (*modes, CUSTOM) if reducer is not None else modes
    metric_rule = {rule: metric_rule_of(rule, objective) for rule in rules}
    if has_ratio:
        _check_ratio(step, tokens, dtype)
    needed = dict.fromkeys((*rules, *metric_rule.values()))
    denominators = step_denominators(step, prompt_sums="prompt_mean" in needed)
    weights = {rule: token_weights(rule, step, denominators, objective) for rule in needed if rule in MODES}
    for rule in needed:
        if rule != CUSTOM and rule not in MODES:
            weights[rule] = weights_elsewhere(rule, step, objective, schedule or in_one_piece(step))
    if reducer is not None:
        weights[CUSTOM] = _custom_weights(reducer, step, objective, denominators["num_rollouts"])
    return StepInputs(
        step,
        {name: value if value.dtype == torch.bool else value.to(dtype) for name, value in tokens.items()},
        weights,
        rules,
        metric_rule,
        has_ratio,
    )


def in_one_piece(step: RolloutBatch) -> Schedule:
    """The layout of one rank that takes the whole step as one micro-batch."""
    whole = tuple(range(step.num_samples))
    return Schedule((whole,), ((whole,),))


def depends_on_layout(rule: str) -> bool:
    """Whether a layout can change the weights of the rule; never those of a mode or a custom reducer called on the step."""
    return rule not in (*MODES, CUSTOM) and find_rule(rule).preset.depends_on_layout


def why_it_depends(rule: str) -> str:
    """In words: why the loss of a rule that depends on the layout does."""
    return why_it_varies(find_rule(rule).preset) or "it is exact for equal micro-batches and ranks only"


def in_layout(inputs: StepInputs, objective: ObjectiveConfig, schedule: Schedule) -> StepInputs:
    """The inputs with the weights that rules have under another layout. Raises `RolloutError` for one that divides 0 by 0."""
    moved = {
        rule: weights_elsewhere(rule, inputs.step, objective, schedule) for rule in inputs.rules if depends_on_layout(rule)
    }
    return replace(inputs, weights=inputs.weights | moved) if moved else inputs


def weights_elsewhere(rule: str, step: RolloutBatch, objective: ObjectiveConfig, schedule: Schedule) -> Tensor:
    """The weights [T] of a framework's rule, or of a mode counted in less than the step, under a layout; 0 where the loss mask
    is 0. Raises `RolloutError` where the rule divides 0 by 0.
    """
    preset = find_rule(rule, prompt_mean_scale=objective.prompt_mean_scale).preset
    weight_T = preset_weights(preset, step, schedule, divisor=objective.loss_aggregation_divisor)
    if torch.isnan(weight_T).any():
        raise RolloutError(
            f"{step.name}: {rule} divides 0 by 0, since a piece of this step is fully masked under one of the layouts; leave"
            " that layout out with --layouts, or audit the rule"
        )
    return torch.where(step.loss_mask_T, weight_T, 0.0)


def _streams(step: RolloutBatch) -> tuple[dict[str, Tensor], bool]:
    """The log-probability streams by role. With one stream the ratio is 1 by assumption, with none as well."""
    current, sampled, engine = step.log_probs_T, step.old_log_probs_T, step.rollout_log_probs_T
    old = sampled if sampled is not None else engine
    has_ratio = current is not None and old is not None
    if not has_ratio:
        alone = current if current is not None else old
        current = old = torch.zeros(step.loss_mask_T.shape, dtype=torch.float64) if alone is None else alone
    assert current is not None
    assert old is not None
    tokens = {"loss_mask": step.loss_mask_T, "log_probs": current, "old_log_probs": old}
    trainer = sampled if sampled is not None else step.log_probs_T
    if engine is not None and trainer is not None:
        tokens |= {"trainer_log_probs": trainer, "rollout_log_probs": engine}
    reference = step.ref_log_probs_T if step.log_probs_T is not None else None  # the KL is the current policy's
    optional = {"ref_log_probs": reference, "entropy": step.entropy_T, "advantages": step.advantages_T}
    return tokens | {name: value for name, value in optional.items() if value is not None}, has_ratio


def _check_ratio(step: RolloutBatch, tokens: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse an importance ratio that the arithmetic cannot hold, by name, instead of reporting infinity."""
    log_ratio_T = torch.where(step.loss_mask_T, tokens["log_probs"] - tokens["old_log_probs"], 0.0)
    most = math.log(torch.finfo(dtype).max) / 2
    for token in (log_ratio_T > most).nonzero().flatten().tolist()[:1]:
        raise RolloutError(
            f"{step.token_name(token)}: log_probs - old_log_probs is {float(log_ratio_T[token]):g} nats, whose ratio"
            f" overflows {str(dtype).removeprefix('torch.')}; mask the token out or check both log-probabilities"
        )


def metric_rule_of(rule: str, objective: ObjectiveConfig) -> str:
    """pg_clipfrac, KL and entropy keep the sample mean so that they compare across modes; token_mean is per token
    everywhere; `matched` makes them follow the loss."""
    if objective.metric_aggregation == "matched" or rule == "token_mean":
        return rule
    return "token_mean" if rule == CUSTOM and objective.calculate_per_token_loss else "sample_mean"


def _custom_weights(reducer: Reducer, step: RolloutBatch, objective: ObjectiveConfig, num_rollouts_S: Tensor) -> Tensor:
    weight_T = reducer_weights(reducer, step, calculate_per_token_loss=objective.calculate_per_token_loss)
    if objective.custom_reducer_scale == "rollouts":
        rollouts_T = torch.repeat_interleave(num_rollouts_S, step.response_length_S, output_size=weight_T.numel())
        return weight_T / rollouts_T
    return weight_T
