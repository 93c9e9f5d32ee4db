"""Rows without what they share and without their padding: how a stack is laid out for one forward pass.

The linear layers of a transformer do not care which row a token stands in, so a pass works on one flat list of tokens a run:

    [ each distinct prompt | each distinct beginning of a response, by its last token ]

It is padded to that of the run that has most.

Nothing is read twice: a hidden state depends on what stands before it alone, so rows that begin alike share the tokens they
begin with, and what their losses say about them is added up there. Only attention looks at rows: it gathers those that no
other row goes on from, of all runs, into bins of similar length, padded to the longest of each.

The last token of a response is never read, since nothing is predicted from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

BIN_COST = 200
"""What one more bin of attention costs, counted in tokens of the whole stack."""


@dataclass(frozen=True, eq=False)
class Bin:
    """N rows of L tokens each, of all runs: `token_NL`, where in the flat lists each token is, and `prompt_N`, the distinct
    prompt before each row (None: these are the prompts), both counted through the whole stack."""

    token_NL: Tensor
    prompt_N: Tensor | None


@dataclass(frozen=True, eq=False)
class Packing:
    """`tokens_RT` and `positions_RT` are the flat list of each run, padded to the longest; `prompts` distinct prompts of
    `prompt_length` come first. `bins`: the rows of attention, the prompts first; `taken_RT`: for each token of the flat lists
    which token of which row of the bins, one after the other, has its number; one past the last for what pads.

    Response column c of row b is predicted at place `predicted_at_RBC[r, b, c]` of the *predicting places* (the last
    position of each prompt, then all response tokens); `target_RBC` is the token there; both are 0 outside `valid_RBC`.
    """

    tokens_RT: Tensor
    positions_RT: Tensor
    prompts: int
    prompt_length: int
    bins: tuple[Bin, ...]
    taken_RT: Tensor
    predicted_at_RBC: Tensor
    target_RBC: Tensor
    valid_RBC: Tensor

    def to(self, device: torch.device | str) -> Packing:
        """The same packing on another device."""
        return _moved(dataclasses.replace(self, bins=tuple(_moved(piece, device) for piece in self.bins)), device)


Held = TypeVar("Held", Bin, Packing)


def _moved(held: Held, device: torch.device | str) -> Held:
    moved = {name: value.to(device) for name, value in vars(held).items() if isinstance(value, Tensor)}
    return dataclasses.replace(held, **moved)


def pack(tokens_RBL: Tensor, prompt_length: int, length_RB: Tensor) -> Packing:
    """Lay out right-padded rows of prompt (always `prompt_length` tokens) and response (`length_RB` tokens).

    Done on the host: the result is on the CPU.
    """
    tokens = tokens_RBL.cpu().numpy()
    length = length_RB.cpu().numpy()
    R, B, _ = tokens.shape
    P, C = prompt_length, max(int(length.max(initial=0)), 1)
    prompts_RGP, prompt_RB = _distinct_prompts(tokens[:, :, :P])
    G = prompts_RGP.shape[1]
    tree = _Tree.of(tokens[:, :, P:], prompt_RB, np.maximum(length - 1, 0))
    T = G * P + int(tree.tokens_R.max(initial=0))
    tokens_RT, positions_RT = np.zeros((2, R, T), np.int64)
    tokens_RT[:, : G * P], positions_RT[:, : G * P] = prompts_RGP.reshape(R, -1), np.tile(np.arange(P), G)
    new = (tree.run_N[tree.new_at[0]], G * P + tree.token_NL[tree.new_at])
    tokens_RT[new], positions_RT[new] = tree.response_NL[tree.new_at], P + tree.new_at[1]
    bins, taken_RT = _bins(tree, prompt_RB, G, P, T)
    read_at_NL = np.empty_like(tree.token_NL)
    read_at_NL[tree.order_N] = G + tree.token_NL
    at_RBC = np.concatenate([prompt_RB[:, :, None], read_at_NL.reshape(R, B, -1)[:, :, : C - 1]], -1)
    valid_RBC = np.arange(C) < length[:, :, None]
    response_RBL = tokens[:, :, P : P + C]  # no column at all where the tokens are the prompts alone
    target_RBC = np.zeros((R, B, C), np.int64)
    target_RBC[:, :, : response_RBL.shape[2]] = np.where(valid_RBC[:, :, : response_RBL.shape[2]], response_RBL, 0)
    return Packing(
        tokens_RT=_tensor(tokens_RT),
        positions_RT=_tensor(positions_RT),
        prompts=G,
        prompt_length=P,
        bins=bins,
        taken_RT=_tensor(taken_RT),
        predicted_at_RBC=_tensor(np.where(valid_RBC, at_RBC, 0)),
        target_RBC=_tensor(target_RBC),
        valid_RBC=_tensor(valid_RBC),
    )


def _bins(tree: _Tree, prompt_RB: np.ndarray, G: int, P: int, T: int) -> tuple[tuple[Bin, ...], np.ndarray]:
    """See `Packing`: its bins, and where each token of the flat lists is taken from."""
    R, B = prompt_RB.shape
    prompt_NP = (np.arange(R)[:, None] * T + np.arange(G * P)).reshape(R * G, P)
    bins, filled, start_N = [Bin(_tensor(prompt_NP), None)], R * G * P, np.zeros(R * B, np.int64)
    leaves_N = tree.leaves_N[tree.length_N[tree.leaves_N].argsort(kind="stable")]
    for start, end in cuts(tree.length_N[leaves_N], BIN_COST):
        rows_N = leaves_N[start:end]
        place_L = np.arange(int(tree.length_N[rows_N[-1]]))
        column_NL = np.where(place_L < tree.length_N[rows_N, None], place_L, 0)  # a row is padded with its own first token
        run_N = tree.run_N[rows_N]
        token_NL = run_N[:, None] * T + G * P + tree.token_NL[rows_N[:, None], column_NL]
        bins.append(Bin(_tensor(token_NL), _tensor(run_N * G + prompt_RB.ravel()[tree.order_N[rows_N]])))
        start_N[rows_N] = filled + place_L.size * np.arange(rows_N.size)
        filled += token_NL.size
    taken_RT = np.full((R, T), filled)
    taken_RT[:, : G * P] = np.arange(R * G * P).reshape(R, -1)
    row, column = tree.new_at
    taken_RT[tree.run_N[row], G * P + tree.token_NL[row, column]] = start_N[tree.leaf_N[row]] + column
    return tuple(bins), taken_RT


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _distinct_prompts(prompt_RBL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct prompts of each run, padded to the run that has most by repeating its first, and each row's."""
    R, B, P = prompt_RBL.shape
    words = np.ascontiguousarray(prompt_RBL, ">i8")  # whose bytes compare as they do
    texts_RB = words.view(f"V{words.itemsize * P}").reshape(R, B).tolist()
    distinct_R = [sorted({*texts}) for texts in texts_RB]
    most = max(map(len, distinct_R))
    prompt_RB = []
    for texts, distinct in zip(texts_RB, distinct_R, strict=True):
        at = {text: prompt for prompt, text in enumerate(distinct)}
        prompt_RB.append([at[text] for text in texts])
        distinct += distinct[:1] * (most - len(distinct))
    read = np.frombuffer(b"".join(text for distinct in distinct_R for text in distinct), ">i8")
    return read.astype(np.int64).reshape(R, most, P), np.array(prompt_RB)


@dataclass(frozen=True, eq=False)
class _Tree:
    """What the rows of a stack read, in the order of their texts within each prompt of each run, where rows that begin alike
    stand together: all [N] for the N = R * B rows in that order.

    `order_N`: where each row was, `run_N`, `length_N`: its run and how many tokens it reads, `response_NL`: those. `token_NL`:
    which of its run's distinct beginnings ends at each of its columns; `new_at`: rows and columns that are the first to have
    theirs; `tokens_R`: how many each run has. `leaves_N`: the rows that no other goes on from, `leaf_N`: for each row the one
    that it is the beginning of.
    """

    order_N: np.ndarray
    run_N: np.ndarray
    length_N: np.ndarray
    response_NL: np.ndarray
    token_NL: np.ndarray
    new_at: tuple[np.ndarray, np.ndarray]
    tokens_R: np.ndarray
    leaves_N: np.ndarray
    leaf_N: np.ndarray

    @classmethod
    def of(cls, response_RBL: np.ndarray, prompt_RB: np.ndarray, read_RB: np.ndarray) -> _Tree:
        R, B, L = response_RBL.shape
        words = np.zeros((R, B, L + 2), ">u4")  # sorted as texts: 0, which no token is, stands after the last and comes first
        words[:, :, 0] = np.arange(R)[:, None]
        words[:, :, 1] = prompt_RB
        words[:, :, 2:] = np.where(np.arange(L) < read_RB[:, :, None], response_RBL + 1, 0)
        words = words.reshape(R * B, L + 2)
        order_N = words.view(f"S{words.itemsize * words.shape[1]}").ravel().argsort(kind="stable")
        words, length_N, run_N = words[order_N], read_RB.ravel()[order_N], order_N // B
        alike = np.logical_and.accumulate(words[1:] == words[:-1], 1)[:, 2:].sum(1)  # tokens that a row shares with the last
        shared_N = np.minimum(np.append(0, alike), length_N)
        column_L = np.arange(L)
        is_new_NL = (column_L >= shared_N[:, None]) & (column_L < length_N[:, None])
        counted_NL = is_new_NL.cumsum().reshape(R * B, L) - 1
        tokens_R = is_new_NL.reshape(R, -1).sum(1)
        token_NL = np.maximum.accumulate(np.where(is_new_NL, counted_NL, 0), 0) - (tokens_R.cumsum() - tokens_R)[run_N][:, None]
        ends_N = np.append(shared_N[1:] < length_N[:-1], length_N[-1:] > 0)
        at_N = np.where(ends_N, np.arange(R * B), R * B)
        leaf_N = np.minimum.accumulate(at_N[::-1])[::-1]
        response_NL = response_RBL.reshape(R * B, L)[order_N]
        leaves_N = ends_N.nonzero()[0]
        return cls(order_N, run_N, length_N, response_NL, token_NL, is_new_NL.nonzero(), tokens_R, leaves_N, leaf_N)


def cuts(longest_B: np.ndarray, bin_cost: int) -> list[tuple[int, int]]:
    """Where to cut rows, sorted by `longest_B`, into bins: least padded tokens plus `bin_cost` a bin, so that a cut saves more
    padding than that. No bin for 0 tokens."""
    value, first = np.unique(longest_B, return_index=True)
    ends = [*first[1:].tolist(), len(longest_B)]
    starts = [start for start, length in zip(first.tolist(), value.tolist(), strict=True) if length]
    ends, lengths = ends[len(ends) - len(starts) :], [length for length in value.tolist() if length]
    best: list[tuple[float, int]] = [(0.0, 0)]  # (cost of the rows of the first j lengths, first length of their last bin)
    for j in range(len(starts)):
        best.append(min((best[i][0] + (ends[j] - starts[i]) * lengths[j] + bin_cost, i) for i in range(j + 1)))
    cuts, j = [], len(starts)
    while j:
        i = best[j][1]
        cuts.append((starts[i], ends[j - 1]))
        j = i
    return cuts[::-1]
