"""One optimizer step, ready to be cut: its per-token inputs and the weight of every token under every rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.errors import RolloutError
from aggcli.layout.schedule import Schedule
from aggcli.layout.views import WholeStep
from aggcli.objective.advantages import group_advantages
from aggcli.objective.policy_loss import OF_SEQUENCES, averaged_log_ratio
from aggcli.objective.reducer import Reducer, reducer_weights
from aggcli.objective.sequences import sequence_numbers
from aggcli.objective.weighing import Weighing, WeightNames, weighing_of
from aggcli.objective.weights import masked_weights
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, Spread, distinct, first_where
from aggcli.rules import CUSTOM, Rule, names_of

OWN = "own"
"""In place of a rule's name where runs are measured together, each under its own rule."""
OWN_WEIGHTS = WeightNames("loss", "metrics", "kl", "entropy")
"""The names of the weights of that rule, whichever they are in each run."""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """`tokens`: flat [T] arrays by name (`loss_mask`, `log_probs`, `advantages`, ...); a missing one is absent.

    `rules`: the rules compared, in order; `weights`: float64 [T] by the rule's name, for the rules compared and those that
    weigh their metrics, KL and entropy (`weighing`, by the name of the compared rule); a rule's own are one number a sample
    until they are asked for. `has_ratio`: two log-probability
    streams were there, so ratios are measured, not assumed to be 1. `sequences`: numbers of whole samples (`sequence_numbers`).
    The step may be that of a stack, whose runs stand one after the other; its weights are then those of each run's own rule
    (`OWN_WEIGHTS`), and no rule is compared.
    """

    step: RolloutBatch
    tokens: dict[str, Tensor]
    weights: dict[str, Tensor | Spread]
    rules: tuple[Rule, ...]
    weighing: dict[str, Weighing]
    has_ratio: bool
    sequences: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """What the compared rules are called, in order."""
        return names_of(self.rules)

    def weight_T(self, rule: str) -> Tensor:
        """The weights of a rule, float64 [T]."""
        weight = self.weights[rule]
        return weight.whole() if isinstance(weight, Spread) else weight

    @property
    def whole(self) -> WholeStep:
        """The step, to be cut into what ranks hold."""
        return WholeStep(self.step, self.tokens, self.weights, self.sequences)

    @property
    def weight_names(self) -> dict[str, WeightNames]:
        """Whose weights the numbers of each compared rule take, by its name."""
        return {name: one.names for name, one in self.weighing.items()}

    def moves(self, rule: Rule) -> bool:
        """Whether a layout can change a number of this step under the rule: its loss, or a KL or entropy that the step has."""
        return any(used.depends_on_layout for used in self._used(rule))

    def why_it_moves(self, rule: Rule) -> str:
        """In words: why a layout can change a number under the rule."""
        used = next(used for used in self._used(rule) if used.depends_on_layout)
        of = "" if used == rule else "of its KL or entropy term: "
        return of + used.why_it_depends()

    def _used(self, rule: Rule) -> list[Rule]:
        weighing = self.weighing[rule.name]
        has_kl, has_entropy = "ref_log_probs" in self.tokens, "entropy" in self.tokens
        return [
            weighing.loss,
            weighing.metrics,
            *([weighing.kl] if has_kl else []),
            *([weighing.entropy] if has_entropy else []),
        ]


def with_advantages(batch: RolloutBatch, objective: ObjectiveConfig) -> tuple[Tensor | None, str]:
    """The advantage of every token of a rollout batch, float64 [T] (None where nothing gives one), and where it came from.

    Where the file does not name its groups, that says how they were found, too. Group statistics need whole groups, so this
    runs before the batch is cut into optimizer steps.
    Raises `RolloutError` when recorded advantages are asked for and there are none.
    """
    rule = objective.advantages
    groups = f"; groups: {batch.grouping}" if batch.grouping else ""
    if batch.advantages_T is not None and rule in ("auto", "recorded"):
        return batch.advantages_T.double(), f"recorded in the file{groups}"
    if rule == "recorded":
        raise RolloutError(f"{batch.name}: --advantages recorded, but the file has none; choose grpo or mean_only")
    divide = rule != "mean_only"
    if batch.reward_S is None or batch.reward_S.isnan().all():
        return None, "none: needs advantage or reward"
    if (batch.group_S == NO_GROUP).all():
        return None, "none: needs advantage or group_index (--group-size groups consecutive rollouts)"
    advantage_S = group_advantages(batch.reward_S, batch.rollout_S, batch.group_S, divide_by_std=divide)
    made_T = Spread(advantage_S, batch.response_length_S, None).whole()
    form = "(reward - group mean) / (std + 1e-6), std with n-1" if divide else "reward - group mean, no std"
    return made_T, f"from rewards: {form}{groups}"


def step_inputs(
    step: RolloutBatch,
    objective: ObjectiveConfig,
    rules: Sequence[Rule],
    dtype: torch.dtype,
    reducer: Reducer | None = None,
    schedule: Schedule | None = None,
) -> StepInputs:
    """Per-token inputs and weights of one optimizer step, whose `advantages_T` are already set (or None).

    `schedule`: the layout in force, which other frameworks' rules may depend on; default: the step in one piece.
    With `reducer`, the rule `custom` is added to `rules`. Raises `RolloutError` naming a sample without group_index under a
    rule that counts prompts, and when a KL or entropy coefficient has nothing to act on.
    """
    if objective.kl_coef and (step.ref_log_probs_T is None or step.log_probs_T is None):
        lacks = "ref_log_probs" if step.ref_log_probs_T is None else "log_probs"
        raise RolloutError(
            f"{step.name}: --kl-coef {objective.kl_coef:g} needs log_probs and ref_log_probs; the file lacks {lacks}"
        )
    if objective.entropy_coef and step.entropy_T is None:
        raise RolloutError(f"{step.name}: --entropy-coef {objective.entropy_coef:g} needs entropy, which the file lacks")
    tokens, has_ratio = _streams(step)
    if objective.policy_loss != "ppo" and not has_ratio:
        raise RolloutError(
            f"{step.name}: --policy-loss {objective.policy_loss} is of the ratio, and needs log_probs and old_log_probs (or"
            " rollout_log_probs); without both every ratio is 1 and all policy losses have one gradient"
        )
    if objective.policy_loss in OF_SEQUENCES:
        tokens["sequence_log_ratio"] = _sequence_log_ratio(step, tokens, objective)
    compared = (*rules, CUSTOM) if reducer is not None else tuple(rules)
    weighing = {rule.name: weighing_of(rule, objective) for rule in compared}
    if has_ratio:
        _check_ratio(step, tokens, objective, dtype)
    needed = dict.fromkeys(used for one in weighing.values() for used in one.rules)
    schedules = None if schedule is None else [schedule]
    weights: dict[str, Tensor | Spread] = {
        rule.name: masked_weights(rule, step, schedules) for rule in needed if rule != CUSTOM
    }
    if reducer is not None:
        weights[CUSTOM.name] = _custom_weights(reducer, step, objective)
    return StepInputs(
        step,
        {name: value if value.dtype == torch.bool else value.to(dtype) for name, value in tokens.items()},
        weights,
        compared,
        weighing,
        has_ratio,
        sequence_numbers(step, tokens, objective, has_ratio=has_ratio),
    )


def in_layout(inputs: StepInputs, schedule: Schedule) -> StepInputs:
    """The inputs with the weights that rules have under another layout. Raises `RolloutError` for one that divides 0 by 0."""
    used = dict.fromkeys(used for one in inputs.weighing.values() for used in one.rules if used.depends_on_layout)
    moved = {rule.name: masked_weights(rule, inputs.step, [schedule]) for rule in used}
    return replace(inputs, weights=inputs.weights | moved) if moved else inputs


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


def _sequence_log_ratio(step: RolloutBatch, tokens: Mapping[str, Tensor], objective: ObjectiveConfig) -> Tensor:
    """The mean of `averaged_log_ratio` over the trained tokens of each sample, at each of its tokens: float64 [T]."""
    streams = (tokens["log_probs"], tokens["old_log_probs"], tokens.get("advantages"))
    ratio_T = averaged_log_ratio(*streams, step.loss_mask_T, objective)
    lengths_S = step.response_length_S
    sum_S, trained_S = (
        torch.segment_reduce(value_T, "sum", lengths=lengths_S) for value_T in (ratio_T, step.loss_mask_T.double())
    )
    return (sum_S / trained_S.clamp(min=1)).repeat_interleave(lengths_S)


def _check_ratio(step: RolloutBatch, tokens: dict[str, Tensor], objective: ObjectiveConfig, dtype: torch.dtype) -> None:
    """Refuse, by name, an importance ratio that the arithmetic cannot hold where the loss needs it: of a token of negative
    advantage, whose loss nothing bounds without a dual clip, and of any token under dppo, or where the ratio multiplies a KL
    term."""
    multiplies_kl = objective.kl_coef and objective.kl_unbiased
    if not multiplies_kl and ("advantages" not in tokens or objective.eps_clip_c is not None):
        return
    any_sign = multiplies_kl or objective.policy_loss == "dppo"
    most = math.log(torch.finfo(dtype).max) / 2

    def too_large(part: slice) -> Tensor:
        is_needed = step.loss_mask_T[part] if any_sign else step.loss_mask_T[part] & (tokens["advantages"][part] < 0)
        return (tokens["log_probs"][part] - tokens["old_log_probs"][part] > most) & is_needed

    token = first_where(step.loss_mask_T.numel(), too_large)
    if token is not None:
        raise RolloutError(
            f"{step.token_name(token)}: log_probs - old_log_probs is"
            f" {float(tokens['log_probs'][token] - tokens['old_log_probs'][token]):g} nats, whose ratio"
            f" overflows {str(dtype).removeprefix('torch.')}; mask the token out or check both log-probabilities"
        )


def _custom_weights(reducer: Reducer, step: RolloutBatch, objective: ObjectiveConfig) -> Tensor:
    weight_T = reducer_weights(reducer, step, calculate_per_token_loss=objective.calculate_per_token_loss)
    if objective.custom_reducer_scale == "rollouts":
        return weight_T / distinct(step.rollout_S)
    return weight_T
