"""Zig-zag context parallelism: which rank computes which token of a sequence.

A sequence of `total_length` tokens is cut into `2 * cp` chunks of `ceil(total_length / (2 * cp))`, and rank c owns chunks c
and `2 * cp - 1 - c` (as in Megatron-LM and slime). A response token's log-probability is computed where the position *before*
it lives, so that position decides who owns it; a response without a prompt has its first token where position 0 lives.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def owner_of_tokens(total_length_S: NDArray[np.int64], response_length_S: NDArray[np.int64], cp: int) -> NDArray[np.int64]:
    """The context-parallel rank (0 to cp-1) that computes each response token, flat over samples.

    `total_length_S`, `response_length_S`: tokens of each sample.
    """
    tokens = int(response_length_S.sum())
    if cp == 1:
        return np.zeros(tokens, dtype=np.int64)
    first_S = total_length_S - response_length_S  # position of the first response token in its sequence
    start_S = np.cumsum(response_length_S) - response_length_S
    within_T = np.arange(tokens) - np.repeat(start_S, response_length_S)
    before_T = np.maximum(np.repeat(first_S, response_length_S) + within_T - 1, 0)
    chunk_S = -(-total_length_S // (2 * cp))
    chunk_T = before_T // np.repeat(np.maximum(chunk_S, 1), response_length_S)
    return np.minimum(chunk_T, 2 * cp - 1 - chunk_T)
