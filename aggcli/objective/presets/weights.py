"""From a preset's facts to the weight of every token, by one function for all frameworks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig, check_divisor
from aggcli.errors import RolloutError, SettingError
from aggcli.layout.schedule import Schedule
from aggcli.objective.aggregation import need_groups
from aggcli.objective.presets.facts import Denominator, Preset, Scope, in_scope
from aggcli.objective.presets.own import own_preset
from aggcli.rollouts.batch import RolloutBatch, group_of_rollout, is_first


def preset_weights(preset: Preset, step: RolloutBatch, schedule: Schedule, *, divisor: float | None = None) -> Tensor:
    """The weight of every response token, float64 [T], such that `sum_t w_t * l_t` is the step loss the optimizer sees.

    That is the mean over ranks of the sum over micro-batches of what the framework hands to `backward`, with every factor
    that it puts in front. `schedule`: rank -> micro-batches; an idle rank counts in a mean over ranks, with nothing.
    `divisor`: the constant in tokens, or the padded width where the rule divides by it (default: the longest response).
    A rule that leaves the mask out of its numerator has weight on masked-out tokens; one that divides 0 by 0 is NaN everywhere.

    Raises `SettingError` for a missing divisor, `RolloutError` for a prompt rule without group_index, or one that looks at
    the sign of advantages without any.
    """
    if preset.needs_groups:
        need_groups(step)
    counting = _Counting(preset, step, _Places.of(step, schedule), _divisor(preset, divisor))
    weight_S, broken = counting.put_together(), False
    for denominator in preset.divides_by:
        count_S = counting.adjusted(denominator)
        broken = broken or (denominator.empty == "nan" and bool((count_S == 0).any()))
        weight_S = torch.where(count_S > 0, weight_S / count_S, 0.0)
    if broken:
        weight_S = torch.full_like(weight_S, math.nan)
    weight_T = weight_S[counting.sample_T]
    return weight_T if preset.numerator == "unmasked" else torch.where(counting.mask_T, weight_T, 0.0)


def scoped_weights(mode: str, step: RolloutBatch, schedule: Schedule, scope: Scope, objective: ObjectiveConfig) -> Tensor:
    """The weights of one of this project's modes with its denominators counted in `scope`, float64 [T].

    The step loss is then the mean over ranks of the mean over micro-batches (scope `micro-batch`), or the mean over ranks
    (scope `rank`): what the original DAPO runs did to token_mean. Scope `step` gives the mode itself, exact in any layout.
    Raises as `preset_weights` does.
    """
    preset = own_preset(mode, objective.prompt_mean_scale)
    return preset_weights(in_scope(preset, scope), step, schedule, divisor=objective.loss_aggregation_divisor)


def can_run(preset: Preset, schedule: Schedule) -> bool:
    """Whether the framework could deal this schedule at all: some only know equal ranks or equal micro-batches."""
    sizes = [tuple(len(micro_batch) for micro_batch in rank) for rank in schedule.micro_batches]
    if preset.layouts == "equal micro-batches":
        return len(set(sizes)) == 1 and len(set(sizes[0])) == 1
    return preset.layouts == "any" or len({sum(of_rank) for of_rank in sizes}) == 1


def _divisor(preset: Preset, divisor: float | None) -> float | None:
    chosen = divisor if preset.divisor is None else preset.divisor
    check_divisor(chosen)
    if chosen is None and preset.needs_divisor:
        raise SettingError(
            f"{preset.name} divides by {preset.divisor_is or 'a constant'}: give it with --loss-aggregation-divisor L, a"
            " positive number of tokens"
        )
    return chosen


@dataclass(frozen=True)
class _Places:
    """Where each sample of the step is: its rank, its micro-batch (numbered over all ranks), and the sizes of things."""

    ranks: int
    rank_S: Tensor
    micro_batch_S: Tensor
    accumulation_S: Tensor
    """Micro-batches of the sample's rank."""
    size_S: Tensor
    """Samples of the sample's micro-batch."""

    @staticmethod
    def of(step: RolloutBatch, schedule: Schedule) -> _Places:
        columns = torch.full((4, step.num_samples), -1, dtype=torch.int64)
        number = 0
        for rank, (partition, micro_batches) in enumerate(zip(schedule.partitions, schedule.micro_batches, strict=True)):
            for micro_batch in micro_batches:
                held = torch.tensor([partition[at] for at in micro_batch], dtype=torch.int64)
                columns[:, held] = torch.tensor([[rank], [number], [len(micro_batches)], [len(micro_batch)]])
                number += 1
        if bool((columns < 0).any()):
            raise RolloutError(f"{step.name}: the layout does not hold every sample of the step")
        return _Places(len(schedule.partitions), *columns)


class _Counting:
    """Counts of one step under one preset, each as a float64 [S]: at every sample the count of the unit it belongs to."""

    def __init__(self, preset: Preset, step: RolloutBatch, places: _Places, divisor: float | None) -> None:
        self.preset, self.step, self.places, self.divisor = preset, step, places, divisor
        self.mask_T, self.sample_T = step.loss_mask_T, step.sample_of_token()
        if preset.drops_zero_advantages and step.advantages_T is not None:
            self.mask_T = self.mask_T & (step.advantages_T != 0)
        if preset.drops_smaller_micro_batches:
            self.mask_T = self.mask_T & self._is_full()[self.sample_T]
        self.tokens_S = _summed(self.mask_T.double(), self.sample_T, step.num_samples)
        self.group_S = group_of_rollout(step.group_S, step.rollout_S)

    def put_together(self) -> Tensor:
        """The factor of each sample that comes from averaging micro-batches and ranks, not from a count."""
        places, preset = self.places, self.preset
        factor_S = torch.full((self.step.num_samples,), 1.0 / places.ranks if preset.ranks == "mean" else 1.0).double()
        if preset.micro_batches == "mean":
            factor_S = factor_S / places.accumulation_S
        elif preset.micro_batches == "share of samples":
            factor_S = factor_S * places.size_S / _shared(torch.ones_like(factor_S), places.rank_S)
        elif preset.micro_batches == "mean of the step":
            kept_S = self._is_full() if preset.drops_smaller_micro_batches else torch.ones_like(factor_S)
            factor_S = factor_S / max(float((kept_S / places.size_S).sum()), 1.0)
        return factor_S / places.accumulation_S if preset.divides_by_accumulation_again else factor_S

    def adjusted(self, denominator: Denominator) -> Tensor:
        """The count of each sample's unit, with the floor and the epsilon that keep it from 0."""
        return self._count(denominator).clamp(min=denominator.floor) + denominator.epsilon

    def _count(self, denominator: Denominator) -> Tensor:
        counted, scope_S = denominator.counted, self._scope(denominator.scope)
        if counted in ("divisor", "padded width") and self.divisor is not None:
            return torch.full_like(self.tokens_S, self.divisor)
        if counted == "padded width":
            width_S = self.step.response_length_S.double()
            return torch.zeros(int(scope_S.max()) + 1).double().scatter_reduce(0, scope_S, width_S, "amax")[scope_S]
        if "sign" in counted:
            return self._by_sign(counted, scope_S)
        if "power" in counted:
            return self._length_power(counted, scope_S)
        units = {
            "tokens of the sample": torch.arange(self.step.num_samples),
            "samples": torch.arange(self.step.num_samples),
            "tokens of the rollout": self.step.rollout_S,
            "rollouts": self.step.rollout_S,
            "tokens of the prompt": self.group_S,
            "prompts": self.group_S,
            "tokens": torch.zeros_like(self.step.rollout_S),
        }
        unit_S = _pair(units[counted], scope_S)
        tokens_S = self.tokens_S.clamp(min=1) if denominator.masked == "one token each" else self.tokens_S
        in_unit_S = _shared(tokens_S, unit_S)
        if counted.startswith("tokens"):
            return in_unit_S
        one_S = is_first(unit_S) & (in_unit_S > 0) if denominator.masked == "left out" else is_first(unit_S)
        return _shared(one_S.double(), scope_S)

    def _length_power(self, counted: str, scope_S: Tensor) -> Tensor:
        alpha = 1.0 if self.preset.alpha is None else self.preset.alpha
        power_S = self.tokens_S.clamp(min=1) ** alpha
        if counted == "length power":
            return power_S
        held_S = (self.tokens_S > 0).double()
        total_S = _shared(held_S / power_S, scope_S)
        return total_S if counted.startswith("sum") else total_S / _shared(held_S, scope_S).clamp(min=1)

    def _by_sign(self, counted: str, scope_S: Tensor) -> Tensor:
        if self.step.advantages_T is None:
            raise RolloutError(f"{self.step.name}: {self.preset.name} needs advantages, and nothing in the file gives one")
        advantages_T = torch.where(self.mask_T, self.step.advantages_T, 0.0)
        positive_S = (_summed(advantages_T, self.sample_T, self.step.num_samples) > 0).long()
        group_S = _pair(self.group_S, scope_S)
        half_S = _pair(group_S, positive_S)
        if counted.startswith("tokens"):
            return _shared(self.tokens_S, half_S)
        held_S = (self.tokens_S > 0).double()
        return _shared(held_S, group_S) / _shared(held_S, half_S).clamp(min=1)

    def _scope(self, scope: Scope) -> Tensor:
        """An id per sample of the scope it is counted in; runs of a stack never mix."""
        places = {"step": torch.zeros_like(self.step.run_S), "rank": self.places.rank_S}
        return _pair(places.get(scope, self.places.micro_batch_S), self.step.run_S)

    def _is_full(self) -> Tensor:
        """Whether the sample's micro-batch is as large as the largest of the step."""
        return self.places.size_S == self.places.size_S.max()


def _pair(a_S: Tensor, b_S: Tensor) -> Tensor:
    """A dense id for each pair of ids; ids may be -1."""
    low = int(b_S.min()) if b_S.numel() else 0
    span = int(b_S.max()) - low + 1 if b_S.numel() else 1
    return torch.unique(a_S * span + (b_S - low), return_inverse=True)[1]


def _summed(value: Tensor, key: Tensor, keys: int) -> Tensor:
    return torch.zeros(keys, dtype=torch.float64).index_add_(0, key, value.double())


def _shared(value_S: Tensor, key_S: Tensor) -> Tensor:
    """The sum of `value_S` over the samples that share a key, at each of those samples."""
    return _summed(value_S, key_S, int(key_S.max()) + 1 if key_S.numel() else 0)[key_S]
