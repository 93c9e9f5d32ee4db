"""Rollouts drawn from a seed: the lengths, groups, fan-out and masks of real steps, without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from numpy.random import Generator
from scipy.special import ndtr, ndtri

from aggcli.config import SyntheticConfig
from aggcli.errors import SettingError
from aggcli.rollouts.batch import Labels, RolloutBatch

TAIL_EXPONENT = 1.5  # Pareto
DIFFICULTY_SHARE = 0.5  # of the variance of being right that the prompt decides; makes all-right and all-wrong groups
PROMPT_LENGTHS = (8, 32)  # tokens, both included
REF_NOISE = 0.05  # standard deviation of ref_log_probs - old_log_probs, in nats


class SyntheticSource:
    """`config.synthetic_steps` batches; step i is drawn from (seed, i) alone."""

    name = "synthetic"
    format = "synthetic"

    def __init__(self, config: SyntheticConfig, seed: int) -> None:
        """Raises `SettingError` for a group size that is no number or range, and for a negative seed."""
        if seed < 0:
            raise SettingError(f"--seed {seed}: must be at least 0")
        self._config, self._seed = config, seed
        self._group_sizes = parse_group_size(config.synthetic_group_size)

    def __len__(self) -> int:
        return self._config.synthetic_steps

    def __iter__(self) -> Iterator[RolloutBatch]:
        return (self.step(i) for i in range(len(self)))

    def step(self, i: int) -> RolloutBatch:
        """The batch of step i."""
        rng = np.random.default_rng([self._seed, i])
        return draw(self._config, self._group_sizes, rng, f"step {i} ({self.name})")


def parse_group_size(text: str) -> tuple[int, int]:
    """`8` -> (8, 8), `4-12` -> (4, 12)."""
    match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise SettingError(f"--synthetic-group-size '{text}': must be a number of at least 1, or a range such as 4-12")
    return low, high


def draw(config: SyntheticConfig, group_sizes: tuple[int, int], rng: Generator, name: str) -> RolloutBatch:
    """One step. Lengths and rewards first, then numbers per token, then the cut of rollouts into samples."""
    prompts = config.synthetic_prompts
    group_G = np.repeat(np.arange(prompts), rng.integers(group_sizes[0], group_sizes[1] + 1, prompts))
    prompt_length_P = rng.integers(PROMPT_LENGTHS[0], PROMPT_LENGTHS[1] + 1, prompts)
    length_G, right_G = _lengths_and_rewards(config, group_G, rng)

    tokens = int(length_G.sum())
    old_K = -1e-6 - rng.exponential(0.4, tokens)
    new_K = old_K
    if config.synthetic_off_policy:
        new_K = np.minimum(old_K + rng.normal(0.0, config.synthetic_off_policy, tokens), 0.0)
    ref_K = np.minimum(old_K + rng.normal(0.0, REF_NOISE, tokens), 0.0)
    entropy_K = rng.exponential(0.4, tokens)
    mask_K = ~_spans(length_G, config.synthetic_masked, rng)

    pieces_G, edges_GE = _cuts(length_G, config.synthetic_fanout, rng)
    rollout_S = np.repeat(np.arange(length_G.size), pieces_G)
    piece_S = _within(pieces_G)
    end_S = edges_GE[rollout_S, piece_S + 1]
    within_T = _within(end_S)
    # A later sample holds the tokens of the earlier ones too, masked out: each token trains once.
    own_T = within_T >= np.repeat(edges_GE[rollout_S, piece_S], end_S)
    at_T = np.repeat((length_G.cumsum() - length_G)[rollout_S], end_S) + within_T
    cut_S = (end_S == length_G[rollout_S]) & (end_S == config.synthetic_max_length)
    old_T = torch.from_numpy(old_K[at_T])
    return RolloutBatch(
        response_length_S=torch.from_numpy(end_S),
        total_length_S=torch.from_numpy(end_S + prompt_length_P[group_G[rollout_S]]),
        loss_mask_T=torch.from_numpy(mask_K[at_T] & own_T),
        rollout_S=torch.from_numpy(rollout_S),
        group_S=torch.from_numpy(group_G[rollout_S]),
        run_S=torch.zeros(end_S.size, dtype=torch.int64),
        position_S=torch.arange(end_S.size),
        reward_S=torch.from_numpy(right_G[rollout_S].astype(np.float64)),
        log_probs_T=torch.from_numpy(new_K[at_T]),
        old_log_probs_T=old_T,
        ref_log_probs_T=torch.from_numpy(ref_K[at_T]),
        rollout_log_probs_T=old_T.clone(),
        entropy_T=torch.from_numpy(entropy_K[at_T]),
        status_S=tuple(np.where(cut_S, "truncated", "completed").tolist()),
        labels=Labels(rollouts=tuple(range(length_G.size)), groups=tuple(range(prompts))),
        name=name,
    )


def _lengths_and_rewards(config: SyntheticConfig, group_G: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Response length (int64) and being right (bool) of each rollout, linked by a Gaussian copula.

    A standard normal `right` per rollout, partly shared by its prompt, decides correctness by a threshold; a second
    one, correlated with it, is the quantile of the length.
    """
    rollouts, rho = group_G.size, config.synthetic_length_correctness
    shared_G = rng.standard_normal(config.synthetic_prompts)[group_G]
    right_G = np.sqrt(DIFFICULTY_SHARE) * shared_G + np.sqrt(1 - DIFFICULTY_SHARE) * rng.standard_normal(rollouts)
    long_G = rho * right_G + np.sqrt(1 - rho**2) * rng.standard_normal(rollouts)
    with np.errstate(over="ignore", divide="ignore"):  # infinite lengths are cut below
        body_G = np.exp(config.synthetic_length_sigma * long_G)
        tail_G = ndtr(-long_G) ** (-1 / TAIL_EXPONENT)
    in_tail_G = rng.random(rollouts) < config.synthetic_tail
    length_G = config.synthetic_length * np.where(in_tail_G, tail_G, body_G) if config.synthetic_length else np.ones(rollouts)
    length_G = np.rint(np.clip(length_G, 1, config.synthetic_max_length)).astype(np.int64)
    return length_G, right_G > ndtri(1 - config.synthetic_accuracy)


def _spans(length_G: np.ndarray, share: float, rng: Generator) -> np.ndarray:
    """`masked_K`, bool: one contiguous span of each rollout, at a random place, `share` of its tokens on average."""
    span_G = np.floor(share * length_G + rng.random(length_G.size)).astype(np.int64).clip(max=length_G)
    start_G = rng.integers(0, length_G - span_G + 1)
    within_K = _within(length_G)
    start_K, span_K = np.repeat(start_G, length_G), np.repeat(span_G, length_G)
    return (within_K >= start_K) & (within_K < start_K + span_K)


def _cuts(length_G: np.ndarray, share: float, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Samples of each rollout (1, 2 or 3) and their edges, (rollouts, 4): sample j trains tokens [edge j, edge j+1).

    `share` of the rollouts are split, as far as they have a token for each sample.
    """
    rollouts = length_G.size
    pieces_G = np.ones(rollouts, dtype=np.int64)
    chosen = rng.permutation(rollouts)[: round(share * rollouts)]
    pieces_G[chosen] = rng.integers(2, 4, chosen.size)
    pieces_G = np.minimum(pieces_G, length_G)
    # The first cut leaves a token to each later sample, the second lies between the first and the end.
    first_G = rng.integers(1, np.maximum(length_G - pieces_G + 2, 2))
    second_G = rng.integers(np.minimum(first_G + 1, length_G), np.maximum(length_G, first_G + 2))
    end_G = length_G
    edges_GE = np.stack([np.zeros_like(end_G), first_G, second_G, end_G], axis=1)
    edges_GE[pieces_G <= 2, 2] = end_G[pieces_G <= 2]
    edges_GE[pieces_G == 1, 1] = end_G[pieces_G == 1]
    return pieces_G, edges_GE


def _within(length_N: np.ndarray) -> np.ndarray:
    """0, 1, ... within each row of a ragged array with these row lengths."""
    start_N = length_N.cumsum() - length_N
    return np.arange(length_N.sum()) - np.repeat(start_N, length_N)
