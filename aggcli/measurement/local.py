"""What one rank computes from its local view: partial sums and maxima, nothing divided.

Every sum is first a column over samples: what any rank that holds the sample adds. A rank adds up its own samples, micro-batch
by micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.layout.views import LocalView
from aggcli.measurement.catalogue import LENGTH_BINS
from aggcli.measurement.tokens import TokenNumbers, token_numbers
from aggcli.objective.step import WeightNames

Key = tuple[str, ...]
HELD: Key = ("held",)
"""Sum of the marks of the samples that a rank holds: what tells its samples from any other choice of them."""
TOLERANCE = 1e-6
"""A rollout is correct when its raw reward is at least the threshold minus this."""


@dataclass(frozen=True)
class MeasureConfig:
    """What is measured, the same on every rank.

    `rules`: names of the aggregation rules compared; `weighing`: whose weights a rule's loss, KL, entropy and metrics take, by
    its name; `has_ratio`: ratios were measured; `max_response_length`: tokens, what correct_length/p25 ... are quarters of.
    """

    rules: tuple[str, ...]
    weighing: dict[str, WeightNames]
    objective: ObjectiveConfig
    has_ratio: bool
    correct_threshold: float
    max_response_length: int
    log_correct_samples: bool = False
    with_gradient: bool = True
    """Whether d loss / d log_probs is measured; training reports the gradient by its parameters instead."""


@dataclass(frozen=True)
class Partials:
    """One rank's contribution. Every rank has the same keys, so sums and maxima cross as two vectors.

    `sums` keys: (metric, rule) for weighted numbers, (metric, "sum" or "count") for means, (metric, "sum" or "squares") for
    effective sample sizes, (metric,) for counts, ("gradient", rule, rule) for inner products of gradients, HELD for which
    samples it holds. `maxima` keys: (metric,).
    `sizes`: the sum of the absolute terms, for the keys of `sums` whose terms may have either sign: what a difference between
    layouts is measured against, since such a sum can cancel to 0 and keep its rounding.
    `correct_lengths`: sorted response lengths of the rank's correct samples, None unless asked for.
    """

    sums: dict[Key, float]
    sizes: dict[Key, float]
    maxima: dict[Key, float]
    correct_lengths: list[int] | None = None


@dataclass(frozen=True)
class Contributions:
    """What each sample of a view adds: float64 [S] columns by key, in the view's sample order; see `Partials` for keys."""

    sums: dict[Key, Tensor]
    sizes: dict[Key, Tensor]
    maxima: dict[Key, Tensor]
    correct_S: Tensor | None
    response_length_S: Tensor


def measure(view: LocalView, config: MeasureConfig) -> Partials:
    """Everything a rank contributes to a step's numbers, from its own tokens and samples alone."""
    own = Adding(config)
    own.add(view)
    return own.added()


class Adding:
    """Adds up what the samples of one rank contribute, piece after piece in the order of its partition: in each micro-batch
    by itself, and the micro-batches at the end. The pieces do not show in the result, which is `measure`'s of the whole view.
    """

    def __init__(self, config: MeasureConfig) -> None:
        self.config = config
        self._sums: _Sums | None = None
        self._sizes: _Sums | None = None
        self._maxima: dict[Key, Tensor] = {}
        self._correct_lengths: list[int] | None = None
        self._micro_batches = 0

    def add(self, view: LocalView) -> None:
        """Take in the next piece; the first of an idle rank is empty, and there must be one."""
        found, cells = contributions(view, self.config), view.num_micro_batches
        self._sums = _added(self._sums, found.sums, view.micro_batch_S, cells)
        self._sizes = _added(self._sizes, found.sizes, torch.zeros_like(view.micro_batch_S), 1)
        for key, column_S in found.maxima.items():
            most = column_S.max() if column_S.numel() else column_S.new_tensor(float("-inf"))
            self._maxima[key] = torch.maximum(self._maxima.get(key, most), most)
        self._micro_batches = view.counts_samples * cells
        if self.config.log_correct_samples and found.correct_S is not None:
            own_S = found.response_length_S[found.correct_S]
            self._correct_lengths = [*(self._correct_lengths or []), *(own_S.tolist() if view.counts_samples else [])]

    def added(self) -> Partials:
        """The rank's contribution."""
        assert self._sums is not None
        assert self._sizes is not None
        sums = self._sums.by_key()
        sums[("micro_batches",)] = float(self._micro_batches)
        sizes = self._sizes.by_key()
        maxima = {key: float(most) for key, most in self._maxima.items()}
        return Partials(sums, sizes, maxima, None if self._correct_lengths is None else sorted(self._correct_lengths))


@dataclass(frozen=True)
class _Sums:
    """The sums of each key in each cell, float64 [K, cells]; one tensor, since a step of a small run has many keys of few
    samples, and each operation costs more than what it adds."""

    keys: tuple[Key, ...]
    sums_KM: Tensor

    def by_key(self) -> dict[Key, float]:
        return {key: math.fsum(row) for key, row in zip(self.keys, self.sums_KM.tolist(), strict=True)}


def _added(before: _Sums | None, columns: dict[Key, Tensor], cell_S: Tensor, cells: int) -> _Sums:
    """The sums with the columns of another piece, in the order of its samples; keys are the same in every piece."""
    if not columns:
        return _Sums((), torch.zeros(0, cells, dtype=torch.float64))
    columns_KS = torch.stack(list(columns.values()))
    if before is None:
        before = _Sums(tuple(columns), torch.zeros(len(columns), cells, dtype=torch.float64, device=cell_S.device))
    before.sums_KM.index_add_(1, cell_S, columns_KS)
    return before


def contributions(view: LocalView, config: MeasureConfig) -> Contributions:
    """The columns of a view: per-token numbers weighted and summed over each sample's tokens here, and sample counts."""
    numbers = token_numbers(view.tokens, config.objective, has_ratio=config.has_ratio, with_slopes=config.with_gradient)
    sums, sizes = _weighted_columns(view, config, numbers)
    sums |= _gradient_columns(view, config, numbers)
    samples, sizes_of_samples = _sample_columns(view, config)
    of_sequences, sizes_of_sequences = _sequence_columns(view)
    samples, sizes_of_samples = samples | of_sequences, sizes_of_samples | sizes_of_sequences
    maxima: dict[Key, Tensor] = {}
    if config.has_ratio:
        mask_T, ratio_T = view.tokens["loss_mask"], numbers.ratio_T.double()
        maxima[("ratio_max",)] = _per_sample(view, torch.where(mask_T, ratio_T, float("-inf")), "max")
        trained_T = torch.where(mask_T, ratio_T, 0.0)
        sums["importance_ess/tokens", "sum"] = _per_sample(view, trained_T)
        sums["importance_ess/tokens", "squares"] = _per_sample(view, trained_T * trained_T)
    reward_S = view.local_raw_reward_S
    correct_S = None if reward_S is None else is_correct(reward_S, config.correct_threshold)
    return Contributions(sums | samples, sizes | sizes_of_samples, maxima, correct_S, view.response_length_S)


def gradients(view: LocalView, config: MeasureConfig) -> dict[str, Tensor]:
    """d loss / d log_probs of each rule at the view's tokens, [T] each; empty where nothing gives an advantage."""
    numbers = token_numbers(view.tokens, config.objective, has_ratio=config.has_ratio, with_slopes=True)
    if "pg_loss" not in numbers.slopes:
        return {}
    return {rule: _gradient(view, config, rule, numbers) for rule in config.rules}


def _per_sample(view: LocalView, value_T: Tensor, reduce: str = "sum") -> Tensor:
    """Sum (or maximum) over each sample's tokens here, in the view's sample order; float64 [S]."""
    if not value_T.numel():
        return torch.full(view.order_S.shape, 0.0 if reduce == "sum" else float("-inf"), dtype=torch.float64)
    in_token_order_S = torch.segment_reduce(value_T.double(), reduce, lengths=view.token_count_S)
    found_S = torch.empty_like(in_token_order_S)
    found_S[view.order_S] = in_token_order_S
    return found_S


def _weighted_columns(
    view: LocalView, config: MeasureConfig, numbers: TokenNumbers
) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """`sum_t w_t * x_t` and `sum_t |w_t * x_t|` of each sample for every rule; rules whose metrics share weights share them."""
    shared: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def summed(rule: str, name: str) -> tuple[Tensor, Tensor]:
        if (rule, name) not in shared:
            weight_T = view.weights[rule]
            shared[rule, name] = _with_size(view, weight_T if name == "total_weight" else weight_T * numbers.values[name])
        return shared[rule, name]

    sums: dict[Key, Tensor] = {}
    sizes: dict[Key, Tensor] = {}
    for rule in config.rules:
        names = config.weighing[rule]
        for name in ("total_weight", *numbers.values):
            sums[name, rule], sizes[name, rule] = summed(names.loss if name == "total_weight" else names.of(name), name)
        if "pg_loss" in numbers.values:
            penalty_S, size_S = _penalties(view, config, names, numbers)
            sums["loss", rule], sizes["loss", rule] = sums["pg_loss", rule] + penalty_S, sizes["pg_loss", rule] + size_S
    return sums, sizes


def _with_size(view: LocalView, terms_T: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each sample's terms, and of their absolute values; the same tensor where no term is negative."""
    sum_S = _per_sample(view, terms_T)
    return sum_S, _per_sample(view, terms_T.abs()) if terms_T.numel() and terms_T.min() < 0 else sum_S


def _penalties(
    view: LocalView, config: MeasureConfig, names: WeightNames, numbers: TokenNumbers
) -> tuple[Tensor | float, Tensor | float]:
    """kl_coef * kl_loss - entropy_coef * entropy_loss of each sample, and the sum of the absolute terms."""
    total: Tensor | float = 0.0
    size: Tensor | float = 0.0
    for name, coefficient in (
        ("kl_loss", view.tokens.get("kl_coef", config.objective.kl_coef)),
        ("entropy_loss", -config.objective.entropy_coef),
    ):
        if name in numbers.values and (isinstance(coefficient, Tensor) or coefficient):
            sum_S, size_S = _with_size(view, coefficient * view.weights[names.of(name)] * numbers.values[name])
            total, size = total + sum_S, size + size_S
    return total, size


def _gradient(view: LocalView, config: MeasureConfig, rule: str, numbers: TokenNumbers) -> Tensor:
    names = config.weighing[rule]
    gradient_T = view.weights[names.loss] * numbers.slopes["pg_loss"]
    kl_coef = view.tokens.get("kl_coef", config.objective.kl_coef)
    if "kl_loss" in numbers.slopes and (isinstance(kl_coef, Tensor) or kl_coef):
        gradient_T = gradient_T + kl_coef * view.weights[names.kl] * numbers.slopes["kl_loss"]
    return gradient_T


def _gradient_columns(view: LocalView, config: MeasureConfig, numbers: TokenNumbers) -> dict[Key, Tensor]:
    """Inner products of the rules' gradients over each sample's tokens: norms and cosines are made of their sums."""
    if "pg_loss" not in numbers.slopes:
        return {}
    gradient = {rule: _gradient(view, config, rule, numbers) for rule in config.rules}
    found: dict[Key, Tensor] = {}
    for i, a in enumerate(config.rules):
        for b in config.rules[: i + 1]:
            found["gradient", a, b] = found["gradient", b, a] = _per_sample(view, gradient[a] * gradient[b])
    return found


# -- samples --------------------------------------------------------------------------------------------------------


def _sample_columns(view: LocalView, config: MeasureConfig) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Counts of samples, zero on all but one context-parallel rank, and counts of tokens; and sizes, as of `Partials`."""
    mask_T = view.tokens["loss_mask"]
    length_S = view.response_length_S.double()
    counted_S = torch.full_like(length_S, float(view.counts_samples))
    here_S = torch.empty_like(length_S)
    here_S[view.order_S] = view.token_count_S.double()
    found: dict[Key, Tensor] = {
        HELD: counted_S * marks(view.sample_S),
        ("samples",): counted_S,
        ("tokens",): _per_sample(view, mask_T),
        ("response_tokens",): here_S,
        ("fully_masked_samples",): counted_S * (view.mask_sum_S == 0),
        ("response_length", "sum"): counted_S * length_S,
        ("response_length", "count"): counted_S,
    }
    if view.truncated_S is not None:
        said_S = ~view.truncated_S.isnan()
        found[("truncated", "sum")] = counted_S * torch.where(said_S, view.truncated_S, 0.0)
        found[("truncated", "count")] = counted_S * said_S
    sizes: dict[Key, Tensor] = {}
    if view.local_raw_reward_S is None:
        return found, sizes
    scored_S = ~view.local_raw_reward_S.isnan()
    share_S = counted_S * view.rollout_share_S * scored_S
    found[("unscored_samples",)] = counted_S * ~scored_S
    found[("raw_reward", "sum")] = torch.where(scored_S, share_S * view.local_raw_reward_S, 0.0)
    sizes[("raw_reward", "sum")] = found[("raw_reward", "sum")].abs()
    found[("raw_reward", "count")] = share_S
    correct_S = is_correct(view.local_raw_reward_S, config.correct_threshold)
    for name, chosen_S in (("correct", correct_S), ("incorrect", scored_S & ~correct_S)):
        found[(f"{name}/count",)] = found[(f"{name}/response_length", "count")] = counted_S * chosen_S
        found[(f"{name}/response_length", "sum")] = counted_S * chosen_S * length_S
    bins_S = length_bins(view.response_length_S, config.max_response_length)
    for at, label in enumerate(LENGTH_BINS):
        found[(f"correct_length/{label}", "sum")] = counted_S * (correct_S & (bins_S == at))
        found[(f"correct_length/{label}", "count")] = counted_S * correct_S
    if "entropy" in view.tokens:
        chosen_S = correct_S & (view.mask_sum_S > 0)
        entropy_S, size_S = _with_size(view, torch.where(mask_T, view.tokens["entropy"].double(), 0.0))
        tokens_S = view.mask_sum_S.clamp(min=1)
        found[("correct/entropy", "sum")] = torch.where(chosen_S, entropy_S / tokens_S, 0.0)
        sizes[("correct/entropy", "sum")] = torch.where(chosen_S, size_S / tokens_S, 0.0)
        found[("correct/entropy", "count")] = counted_S * chosen_S
    return found, sizes


def _sequence_columns(view: LocalView) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Numbers of whole responses (`sequence_numbers`), zero on all but one context-parallel rank; and sizes, as of
    `Partials`."""
    of = view.sequences
    sums: dict[Key, Tensor] = {}
    sizes: dict[Key, Tensor] = {}
    trained_S = (view.mask_sum_S > 0).double() * view.counts_samples
    tokens_S = view.mask_sum_S.clamp(min=1)
    found: dict[str, Tensor] = {}
    if "log_ratio" in of:
        found |= {"sequence_ratio/log_sum": of["log_ratio"], "sequence_ratio/log_mean": of["log_ratio"] / tokens_S}
        sums["importance_ess/samples", "sum"] = trained_S * of["weight"]
        sums["importance_ess/samples", "squares"] = trained_S * of["weight"] ** 2
    if "clipped" in of:
        found["sequence_ratio/clipfrac"] = of["clipped"]
    if "mismatch" in of:
        apart_S = of["mismatch"].abs()
        found |= {"sampler_mismatch/sequence_sum": apart_S, "sampler_mismatch/sequence_mean": apart_S / tokens_S}
    for name, value_S in found.items():
        sums[name, "sum"], sums[name, "count"] = trained_S * value_S, trained_S
        sizes[name, "sum"] = sums[name, "sum"].abs()
    return sums, sizes


def marks(sample_S: Tensor) -> Tensor:
    """A mark of each sample by its position in the step: whole numbers below 2^31 that look random, so that no two choices of
    samples have one sum, but by a chance of 5e-10; their sums are exact in float64 for up to 4 million samples."""
    mixed_S = (sample_S + 1) * 2654435761 % 2**32
    mixed_S = (mixed_S ^ (mixed_S >> 15)) * 2246822519 % 2**32
    return ((mixed_S ^ (mixed_S >> 13)) % 2**31).double()


def is_correct(reward: Tensor, threshold: float) -> Tensor:
    """True where the raw reward reaches the threshold; an unscored (NaN) reward is not correct."""
    return reward >= threshold - TOLERANCE


def length_bins(length_S: Tensor, max_response_length: int) -> Tensor:
    """The quarter (0 to 3) of the maximum response length that each response length lies in; int64 [S].

    A length on a boundary belongs to the lower quarter; one beyond the maximum to the last.
    """
    return ((4 * length_S + max_response_length - 1) // max_response_length - 1).clamp(0, 3)
