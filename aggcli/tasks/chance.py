"""Chance without state: uniform numbers that depend on named integers and on nothing else.

Each number is a hash of (seed, stream, step, index, position), so that what one sample draws never depends on how many
samples are drawn, in which order, on which rank or in which batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PROMPTS, SAMPLING = 1, 2
"""Streams: numbers of different purposes never share one."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, stream: int, step: int, index_S: Tensor, length: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [S, length] on the CPU: row s belongs to (seed, stream, step, index_S[s]).

    A longer `length` only appends. Chained SplitMix64 finalisers (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014).
    """
    with np.errstate(over="ignore"):
        state_S1 = keys(seed, stream, step, index_S).numpy().view(np.uint64)[:, None]
        bits_SL = _mixed(state_S1 + np.arange(length, dtype=np.uint64))
    return torch.from_numpy((bits_SL >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def keys(seed: int, stream: int, step: int, index_S: Tensor) -> Tensor:
    """The state that the numbers of each index begin with, as the bits of an int64 [S]: for numbers made on a device, by
    `bits_of`."""
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for word in (seed, stream, step):
            state = _mixed(state + np.uint64(word % 2**64))
        return torch.from_numpy(_mixed(state + index_S.cpu().numpy().astype(np.uint64)).view(np.int64))


def bits_of(state: Tensor) -> Tensor:
    """SplitMix64's step and finaliser on int64, whose sums and products wrap around as those of uint64 do."""
    mixed = state + _signed(_GOLDEN)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(np.uint64(0xBF58476D1CE4E5B9))
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(np.uint64(0x94D049BB133111EB))
    return mixed ^ _shifted(mixed, 31)


def _shifted(value: Tensor, places: int) -> Tensor:
    """A shift to the right that fills with zeros."""
    return (value >> places) & (2 ** (64 - places) - 1)


def _signed(word: np.uint64) -> int:
    return int(word.astype(np.int64))


def _mixed(state: np.ndarray) -> np.ndarray:
    """SplitMix64's step and finaliser, elementwise on uint64."""
    mixed = state + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
