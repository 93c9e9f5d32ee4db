"""What a rank computes from its local view: partial sums and maxima, nothing divided.

Every sum is first a column over samples: what any rank that holds the sample adds. A rank adds up its own samples, micro-batch
by micro-batch. Columns are made for many ranks at once; each rank then adds its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import ObjectiveConfig
from aggcli.layout.views import LocalView, Rank
from aggcli.measurement.catalogue import LENGTH_BINS
from aggcli.measurement.tokens import TokenNumbers, token_numbers
from aggcli.objective.step import OWN
from aggcli.objective.weighing import WeightNames

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

    def under(self, rule: str) -> Partials:
        """The same with the numbers under each run's own rule as those of this rule, which is the run's."""
        sums, sizes = (
            dict(zip(_under(tuple(numbers), rule), numbers.values(), strict=True)) for numbers in (self.sums, self.sizes)
        )
        return Partials(sums, sizes, self.maxima, self.correct_lengths)


@functools.lru_cache(maxsize=64)
def _under(keys: tuple[Key, ...], rule: str) -> list[Key]:
    return [tuple(rule if part == OWN else part for part in key) for key in keys]


@dataclass(frozen=True)
class Contributions:
    """What each sample of a view adds: float64 [S] columns by key, in the view's sample order; see `Partials` for keys."""

    sums: dict[Key, Tensor]
    sizes: dict[Key, Tensor]
    maxima: dict[Key, Tensor]
    correct_S: Tensor | None
    response_length_S: Tensor


def measure(pieces: Iterable[LocalView], config: MeasureConfig) -> dict[Rank, Partials]:
    """Everything that each rank contributes to a step's numbers, from its own tokens and samples alone.

    `pieces`: of the same ranks, at least one, in the order of the ranks' partitions. Neither the pieces nor the other ranks
    show in a rank's result.
    """
    own: _Added | None = None
    for view in pieces:
        found = contributions(view, config)
        if own is None:
            own = _Added.none(view.ranks, found, has_lengths=config.log_correct_samples)
        own.add(view, found)
    assert own is not None
    return own.of_ranks()


@dataclass(frozen=True)
class _Added:
    """What the samples of ranks contribute, added up as they come: in each micro-batch by itself, and the micro-batches at the
    end; sizes and maxima rank by rank. `ranks`: as of `LocalView`."""

    ranks: dict[Rank, int]
    sums: _Cells
    sizes: _Cells
    maxima: _Cells
    correct_lengths: list[list[int]] | None

    @classmethod
    def none(cls, ranks: dict[Rank, int], found: Contributions, *, has_lengths: bool) -> _Added:
        """Nothing yet, of what has the keys of these contributions."""
        return cls(
            ranks,
            _Cells.of(found.sums, sum(ranks.values()), 0.0),
            _Cells.of(found.sizes, len(ranks), 0.0),
            _Cells.of(found.maxima, len(ranks), -math.inf),
            [[] for _ in ranks] if has_lengths and found.correct_S is not None else None,
        )

    def add(self, view: LocalView, found: Contributions) -> None:
        """Take in the next piece."""
        self.sums.add(found.sums, view.micro_batch_S)
        self.sizes.add(found.sizes, view.rank_S)
        self.maxima.raise_to(found.maxima, view.rank_S)
        if self.correct_lengths is not None and found.correct_S is not None:
            own_S = found.correct_S & (view.counted_S > 0)
            for rank, length in zip(view.rank_S[own_S].tolist(), view.response_length_S[own_S].tolist(), strict=True):
                self.correct_lengths[rank].append(length)

    def of_ranks(self) -> dict[Rank, Partials]:
        """Each rank's own."""
        found, end = {}, 0
        for at, (rank, micro_batches) in enumerate(self.ranks.items()):
            start, end = end, end + micro_batches
            sums = self.sums.in_cells(start, end)
            sums[("micro_batches",)] = float(micro_batches if rank.cp_rank == 0 else 0)
            lengths = None if self.correct_lengths is None else sorted(self.correct_lengths[at])
            found[rank] = Partials(sums, self.sizes.in_cells(at, at + 1), self.maxima.in_cells(at, at + 1), lengths)
        return found


@dataclass(frozen=True)
class _Cells:
    """A number of each key in each cell, float64 [K, cells]; one tensor, since a step of a small run has many keys of few
    samples, and each operation costs more than what it adds."""

    keys: tuple[Key, ...]
    values_KM: Tensor

    @classmethod
    def of(cls, columns: Mapping[Key, Tensor], cells: int, first: float) -> _Cells:
        return cls(tuple(columns), torch.full((len(columns), cells), first, dtype=torch.float64))

    def add(self, columns: Mapping[Key, Tensor], cell_S: Tensor) -> None:
        """Add the columns of another piece, in the order of its samples; keys are the same in every piece."""
        if columns:
            self.values_KM.index_add_(1, cell_S, torch.stack(list(columns.values())))

    def raise_to(self, columns: Mapping[Key, Tensor], cell_S: Tensor) -> None:
        """The larger of what is there and the columns of another piece."""
        if columns:
            columns_KS = torch.stack(list(columns.values()))
            self.values_KM.scatter_reduce_(1, cell_S.expand_as(columns_KS), columns_KS, "amax")

    def in_cells(self, start: int, end: int) -> dict[Key, float]:
        """What these cells give together."""
        return dict(zip(self.keys, map(math.fsum, self.values_KM[:, start:end].tolist()), strict=True))


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
    """Sum (or maximum) over each sample's tokens here, float64 [S]."""
    if not value_T.numel():
        return torch.full(view.rank_S.shape, 0.0 if reduce == "sum" else float("-inf"), dtype=torch.float64)
    return torch.segment_reduce(value_T.double(), reduce, lengths=view.token_count_S, unsafe=True)


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
    length_S, counted_S = view.response_length_S.double(), view.counted_S
    found: dict[Key, Tensor] = {
        HELD: counted_S * marks(view.sample_S),
        ("samples",): counted_S,
        ("tokens",): _per_sample(view, mask_T),
        ("response_tokens",): view.token_count_S.double(),
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
        found[(f"{name}/count",)] = found[(f"{name}/response_length", "count")] = chosen_S = counted_S * chosen_S
        found[(f"{name}/response_length", "sum")] = chosen_S * length_S
    bins_S = length_bins(view.response_length_S, config.max_response_length)
    in_bin_BS = found[("correct/count",)] * (bins_S == torch.arange(len(LENGTH_BINS))[:, None])
    for label, in_bin_S in zip(LENGTH_BINS, in_bin_BS, strict=True):
        found[(f"correct_length/{label}", "sum")] = in_bin_S
        found[(f"correct_length/{label}", "count")] = found[("correct/count",)]
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
    trained_S = view.counted_S * (view.mask_sum_S > 0)
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
    mixed_S = (sample_S.numpy() + 1) * 2654435761 % 2**32
    mixed_S = (mixed_S ^ (mixed_S >> 15)) * 2246822519 % 2**32
    return torch.from_numpy((mixed_S ^ (mixed_S >> 13)) % 2**31).double()


def is_correct(reward: Tensor, threshold: float) -> Tensor:
    """True where the raw reward reaches the threshold; an unscored (NaN) reward is not correct."""
    return reward >= threshold - TOLERANCE


def length_bins(length_S: Tensor, max_response_length: int) -> Tensor:
    """The quarter (0 to 3) of the maximum response length that each response length lies in; int64 [S].

    A length on a boundary belongs to the lower quarter; one beyond the maximum to the last.
    """
    return ((4 * length_S + max_response_length - 1) // max_response_length - 1).clamp(0, 3)
