"""From a rule, a batch and a schedule to the weight of every token: one function, for every mode and every framework's rule.

`loss = sum_t w_t * l_t` over all response tokens of one optimizer step. Weights are made once per optimizer step, before the
step is cut into ranks, micro-batches and context-parallel slices; each piece then only sums, and only sums cross ranks. So a
rule whose counts are the whole step's cannot be changed by a layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from aggcli.errors import RolloutError, SettingError
from aggcli.layout.schedule import Schedule
from aggcli.rollouts.batch import NO_GROUP, RolloutBatch, Spread, group_of_rollout, is_first
from aggcli.rules import Denominator, Rule, Scope


def rule_weights(rule: Rule, step: RolloutBatch, schedules: Sequence[Schedule] | None = None) -> Tensor:
    """The weight of every response token, float64 [T], such that `sum_t w_t * l_t` is the step loss the optimizer sees.

    For a framework's rule that is the mean over ranks of the sum over micro-batches of what the framework hands to
    `backward`, with every factor that it puts in front; its source is in `Rule.version`. `schedules`: rank -> micro-batches
    of each run of the step (one schedule for a step of one run); default: every run in one piece. An idle rank counts in a
    mean over ranks, with nothing. Runs of a stack never mix.

    A denominator of 0 (nothing trained) gives weight 0, or NaN all over the run for a rule that divides 0 by 0. A rule that
    leaves the mask out of its numerator has weight on masked tokens.
    Raises `SettingError` for a missing divisor, `RolloutError` naming a sample without group_index under a rule that counts
    prompts, or for a rule that looks at the sign of advantages without any.
    """
    return weight_by_sample(rule, step, schedules).whole()


def weight_by_sample(
    rule: Rule, step: RolloutBatch, schedules: Sequence[Schedule] | None = None, nan_in: Literal["run", "piece"] = "run"
) -> Spread:
    """`rule_weights` as the one number of each sample that it is at the sample's tokens. `nan_in`: of what divides 0 by 0, NaN
    all over the run, as the loss is, or at the samples of the piece that does."""
    if rule.needs_groups:
        need_groups(step, rule)
    if rule.needs_divisor:
        raise SettingError(
            f"{rule.name} divides by {rule.divisor_is or 'a constant'}: give it with --loss-aggregation-divisor L, a positive"
            " number of tokens"
        )
    counting = _Counting(rule, step, _Places(step, schedules))
    product_S = torch.ones(step.num_samples, dtype=torch.float64)
    broken_S = torch.zeros(step.num_samples, dtype=torch.bool)
    for denominator in rule.divides_by:
        count_S = counting.adjusted(denominator)
        product_S = product_S * count_S
        if denominator.empty == "nan":
            broken_S |= count_S == 0 if nan_in == "piece" else _shared((count_S == 0).double(), step.run_S) > 0
    weight_S = torch.where(product_S > 0, counting.put_together() / product_S, 0.0)
    weight_S = torch.where(broken_S, math.nan, weight_S)
    return Spread(weight_S, step.response_length_S, None if rule.numerator == "unmasked" else counting.mask_T)


def masked_weights(rule: Rule, step: RolloutBatch, schedules: Sequence[Schedule] | None = None) -> Spread:
    """`rule_weights` for a loss whose masked tokens are selected away: exactly 0 where the loss mask is 0, float64 [T].

    Raises `RolloutError` where the rule divides 0 by 0, and as `rule_weights` does.
    """
    found = weight_by_sample(rule, step, schedules)
    if any(d.empty == "nan" for d in rule.divides_by):
        need_no_nan(found.whole(), rule, step)
    return replace(found, mask_T=step.loss_mask_T) if found.mask_T is None else found


def need_no_nan(weight_T: Tensor, rule: Rule, step: RolloutBatch) -> None:
    """Raise `RolloutError` where the rule divides 0 by 0."""
    if any(d.empty == "nan" for d in rule.divides_by) and torch.isnan(weight_T).any():
        raise RolloutError(
            f"{step.name}: {rule.name} divides 0 by 0, since a piece of this step is fully masked under one of the layouts;"
            " leave that layout out with --layouts, or audit the rule"
        )


def aggregate(loss_T: Tensor, weights_T: Tensor) -> Tensor:
    """`sum_t w_t * l_t`; both [T], of one dtype. What is masked out must have been selected away from `loss_T` before."""
    return torch.dot(loss_T, weights_T)


def need_groups(step: RolloutBatch, rule: Rule) -> None:
    """Raise `RolloutError` naming the first sample without a group_index; no rule ever invents a group."""
    for sample in (step.group_S == NO_GROUP).nonzero().flatten().tolist()[:1]:
        raise RolloutError(
            f"{step.sample_name(sample)}: group_index is missing and {rule.name} needs one for every sample;"
            " add it, give --group-size to group consecutive rollouts, or choose another --loss-aggregation"
        )


def can_represent(rule: Rule, schedule: Schedule) -> bool:
    """Whether the framework could deal this schedule at all: some only know equal ranks or equal micro-batches."""
    sizes = [tuple(len(micro_batch) for micro_batch in rank) for rank in schedule.micro_batches]
    if rule.layouts == "equal micro-batches":
        return len(set(sizes)) == 1 and len(set(sizes[0])) == 1
    return rule.layouts == "any" or len({sum(of_rank) for of_rank in sizes}) == 1


class _Places:
    """Where each sample is: its rank, its micro-batch (numbered over all ranks of all runs), and the sizes of things.

    Looked up only by rules that depend on it.
    """

    def __init__(self, step: RolloutBatch, schedules: Sequence[Schedule] | None) -> None:
        self.step, self.schedules = step, schedules

    @functools.cached_property
    def ranks(self) -> int:
        return 1 if self.schedules is None else len(self.schedules[0].partitions)

    @property
    def rank_S(self) -> Tensor:
        return self._columns[0]

    @property
    def micro_batch_S(self) -> Tensor:
        return self._columns[1]

    @property
    def accumulation_S(self) -> Tensor:
        """Micro-batches of the sample's rank."""
        return self._columns[2]

    @property
    def size_S(self) -> Tensor:
        """Samples of the sample's micro-batch."""
        return self._columns[3]

    @functools.cached_property
    def _columns(self) -> Tensor:
        step, columns_4S = self.step, torch.full((4, self.step.num_samples), -1, dtype=torch.int64)
        if self.schedules is None:
            _, size_S = torch.unique(step.run_S, return_counts=True)
            return torch.stack(
                [torch.zeros_like(step.run_S), step.run_S, torch.ones_like(step.run_S), size_S[_dense(step.run_S)]]
            )
        number = 0
        for run in step.run_S.unique().tolist():
            schedule = self.schedules[run] if len(self.schedules) > 1 else self.schedules[0]
            samples_S = (step.run_S == run).nonzero().flatten()
            for rank, (partition, micro_batches) in enumerate(zip(schedule.partitions, schedule.micro_batches, strict=True)):
                for micro_batch in micro_batches:
                    held = samples_S[[partition[at] for at in micro_batch]]
                    columns_4S[:, held] = torch.tensor([[rank], [number], [len(micro_batches)], [len(micro_batch)]])
                    number += 1
        if bool((columns_4S < 0).any()):
            raise RolloutError(f"{step.name}: the layout does not hold every sample of the step")
        return columns_4S


@dataclass(frozen=True, eq=False)
class _Counting:
    """Counts of one step under one rule, each as a float64 [S]: at every sample the count of the unit it belongs to."""

    rule: Rule
    step: RolloutBatch
    places: _Places

    @functools.cached_property
    def mask_T(self) -> Tensor:
        """The tokens that the rule counts and weighs."""
        mask_T = self.step.loss_mask_T
        if self.rule.drops_zero_advantages and self.step.advantages_T is not None:
            mask_T = mask_T & (self.step.advantages_T != 0)
        if self.rule.drops_smaller_micro_batches:
            mask_T = mask_T & self._is_full[self.step.sample_of_token()]
        return mask_T

    @functools.cached_property
    def tokens_S(self) -> Tensor:
        if self.mask_T is self.step.loss_mask_T:
            return self.step.mask_sum_S.double()
        return _summed(self.mask_T.double(), self.step.sample_of_token(), self.step.num_samples)

    @functools.cached_property
    def group_S(self) -> Tensor:
        return group_of_rollout(self.step.group_S, self.step.rollout_S)

    def put_together(self) -> Tensor:
        """The factor of each sample that comes from averaging micro-batches and ranks, not from a count."""
        places, rule = self.places, self.rule
        factor_S = torch.full((self.step.num_samples,), 1.0 / places.ranks if rule.ranks == "mean" else 1.0).double()
        if rule.micro_batches == "mean":
            factor_S = factor_S / places.accumulation_S
        elif rule.micro_batches == "share of samples":
            factor_S = factor_S * places.size_S / _shared(torch.ones_like(factor_S), self._scope("rank"))
        elif rule.micro_batches == "share of tokens":
            factor_S = factor_S * _shared(self.tokens_S, self._scope("micro-batch"))
            factor_S = factor_S / _shared(self.tokens_S, self._scope("step")).clamp(min=1.0)
        elif rule.micro_batches == "mean of the step":
            kept_S = self._is_full.double() if rule.drops_smaller_micro_batches else torch.ones_like(factor_S)
            factor_S = factor_S / _shared(kept_S / places.size_S, self._scope("step")).clamp(min=1.0)
        return factor_S / places.accumulation_S if rule.divides_by_accumulation_again else factor_S

    def adjusted(self, denominator: Denominator) -> Tensor:
        """The count of each sample's unit, with the floor and the epsilon that keep it from 0."""
        return self._count(denominator).clamp(min=denominator.floor) + denominator.epsilon

    def _count(self, denominator: Denominator) -> Tensor:
        counted, scope_S = denominator.counted, self._scope(denominator.scope)
        if counted in ("divisor", "padded width") and self.rule.divisor is not None:
            return torch.full_like(self.tokens_S, self.rule.divisor)
        if counted == "padded width":
            width_S = self.step.response_length_S.double()
            return torch.zeros(int(scope_S.max()) + 1).double().scatter_reduce(0, scope_S, width_S, "amax")[scope_S]
        if "sign" in counted:
            return self._by_sign(counted, scope_S)
        if "power" in counted:
            return self._length_power(counted, scope_S)
        if counted == "mean tokens of a sample":
            return _shared(self.tokens_S, scope_S) / _shared(torch.ones_like(self.tokens_S), scope_S)
        if "samples of the rollout" in counted:
            held_S = _shared(torch.ones_like(self.tokens_S), self.step.rollout_S)
            if counted == "samples of the rollout":
                return held_S
            return _shared(1.0 / held_S, scope_S) / _shared(torch.ones_like(held_S), scope_S)
        units = {
            "tokens of the sample": lambda: torch.arange(self.step.num_samples),
            "samples": lambda: torch.arange(self.step.num_samples),
            "tokens of the rollout": lambda: self.step.rollout_S,
            "rollouts": lambda: self.step.rollout_S,
            "tokens of the prompt": lambda: self.group_S,
            "prompts": lambda: self.group_S,
            "tokens": lambda: torch.zeros_like(self.step.rollout_S),
        }
        unit_S = units[counted]()
        if counted == "tokens":
            unit_S = scope_S
        elif denominator.scope != "step":  # within the step, rollouts and groups of different runs are different ones
            unit_S = _pair(unit_S, scope_S)
        tokens_S = self.tokens_S.clamp(min=1) if denominator.masked == "one token each" else self.tokens_S
        if counted.startswith("tokens"):
            return _shared(tokens_S, unit_S)
        one_S = is_first(unit_S)
        if denominator.masked == "left out":
            one_S = one_S & (_shared(tokens_S, unit_S) > 0)
        return _shared(one_S.double(), scope_S)

    def _length_power(self, counted: str, scope_S: Tensor) -> Tensor:
        alpha = 1.0 if self.rule.alpha is None else self.rule.alpha
        power_S = self.tokens_S.clamp(min=1) ** alpha
        if counted == "length power":
            return power_S
        held_S = (self.tokens_S > 0).double()
        total_S = _shared(held_S / power_S, scope_S)
        return total_S if counted.startswith("sum") else total_S / _shared(held_S, scope_S).clamp(min=1)

    def _by_sign(self, counted: str, scope_S: Tensor) -> Tensor:
        if self.step.advantages_T is None:
            raise RolloutError(f"{self.step.name}: {self.rule.name} needs advantages, and nothing in the file gives one")
        advantages_T = torch.where(self.mask_T, self.step.advantages_T, 0.0)
        positive_S = (_summed(advantages_T, self.step.sample_of_token(), self.step.num_samples) > 0).long()
        group_S = _pair(self.group_S, scope_S)
        half_S = _pair(group_S, positive_S)
        if counted.startswith("tokens"):
            return _shared(self.tokens_S, half_S)
        held_S = (self.tokens_S > 0).double()
        return _shared(held_S, group_S) / _shared(held_S, half_S).clamp(min=1)

    def _scope(self, scope: Scope) -> Tensor:
        """An id per sample of the scope it is counted in; runs of a stack never mix."""
        if scope == "step":
            return self.step.run_S
        return _pair(self.places.rank_S if scope == "rank" else self.places.micro_batch_S, self.step.run_S)

    @functools.cached_property
    def _is_full(self) -> Tensor:
        """Whether the sample's micro-batch is as large as the largest of its run's step."""
        run_S, size_S = _dense(self.step.run_S), self.places.size_S
        return size_S == torch.zeros_like(size_S).scatter_reduce(0, run_S, size_S, "amax")[run_S]


def _dense(key_S: Tensor) -> Tensor:
    """Ids 0, 1, 2, ... for any ids."""
    return torch.unique(key_S, return_inverse=True)[1]


def _pair(a_S: Tensor, b_S: Tensor) -> Tensor:
    """A dense id for each pair of ids; ids may be -1."""
    low = int(b_S.min()) if b_S.numel() else 0
    span = int(b_S.max()) - low + 1 if b_S.numel() else 1
    return _dense(a_S * span + (b_S - low))


def _summed(value: Tensor, key: Tensor, keys: int) -> Tensor:
    return torch.zeros(keys, dtype=torch.float64).index_add_(0, key, value.double())


def _shared(value_S: Tensor, key_S: Tensor) -> Tensor:
    """The sum of `value_S` over the samples that share a key, at each of those samples."""
    return _summed(value_S, key_S, int(key_S.max()) + 1 if key_S.numel() else 0)[key_S]
