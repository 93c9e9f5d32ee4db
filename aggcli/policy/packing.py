"""Rows without what they share and without their padding: how a stack is laid out for one forward pass.

The linear layers of a transformer do not care which row a token stands in, so a pass works on one flat list of tokens a run:

    [ each distinct prompt | each distinct beginning of a response, by its last token ]

It is padded to that of the run that has most.

Nothing is read twice: a hidden state depends on what stands before it alone, so rows that begin alike share the tokens they
begin with, and what their losses say about them is added up there. A prompt and its responses are thus a tree, in which a token
sees what it goes on from. Only attention looks at trees: it gathers them in *pieces*, a prompt with some of its responses in
each, and the pieces of all runs in bins of similar length, padded to the longest of each. What a long prompt sees itself is
found in one of its pieces alone.

The last token of a response is never read, since nothing is predicted from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from aggcli.policy.kernels import FEWEST_PLACES

TOKEN_COST = 64
"""What a token of a piece costs beside its products with the piece's tokens, counted in those."""
BIN_COST = 10_000
"""What one more bin costs, counted in the same."""
LONG_PROMPT = 32
"""Prompts of at least so many tokens see themselves in one piece of theirs alone; in the others they are only seen."""


@dataclass(frozen=True, eq=False)
class Bin:
    """N pieces of L tokens each, of all runs: `token_NL`, where in the flat lists of the stack each token is. A token sees
    another where that one's number in `number_NL` is not greater than its own and its own is below that one's `end_NL`; the
    first `only_seen` of a piece see nothing here."""

    token_NL: Tensor
    number_NL: Tensor
    end_NL: Tensor
    only_seen: int

    @cached_property
    def mask_N1QL(self) -> Tensor:
        """What to add to scores [N, heads, Q, L] of queries, which are the last Q tokens, and keys: 0 where the query sees the
        key, else minus infinity."""
        query_NQ1, key_N1L = self.number_NL[:, self.only_seen :, None], self.number_NL[:, None]
        seen_NQL = (key_N1L <= query_NQ1) & (query_NQ1 < self.end_NL[:, None])
        return torch.full(seen_NQL.shape, float("-inf"), device=seen_NQL.device).masked_fill_(seen_NQL, 0.0)[:, None]


@dataclass(frozen=True, eq=False)
class Packing:
    """`tokens_RT` and `positions_RT` are the flat list of each run, padded to the longest; `prompts` distinct prompts of
    `prompt_length` come first. `bins`: the pieces of attention; `taken_RT`: for each token of the flat lists, which query of
    which piece of the bins, one after the other, gives its attention; for what pads, one of the same run.

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
    values = {item.name: getattr(held, item.name) for item in dataclasses.fields(held)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
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
    T = G * P + int(tree.read_R.max(initial=0))
    tokens_RT, positions_RT = np.zeros((2, R, T), np.int64)
    tokens_RT[:, : G * P], positions_RT[:, : G * P] = prompts_RGP.reshape(R, -1), np.tile(np.arange(P), G)
    new_N, new_L = tree.new_at
    new = (tree.run_N[new_N], G * P + tree.in_run(tree.number_NL[tree.new_at], tree.run_N[new_N]))
    tokens_RT[new], positions_RT[new] = tree.response_NL[tree.new_at], P + new_L
    bins, taken_RT = _bins(_Pieces.of(tree, G, P), tree, G, P, T)
    read_at_NL = np.empty_like(tree.number_NL)
    read_at_NL[tree.order_N] = G + tree.in_run(tree.number_NL, tree.run_N[:, None])
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


def _bins(pieces: _Pieces, tree: _Tree, G: int, P: int, T: int) -> tuple[tuple[Bin, ...], np.ndarray]:
    """See `Packing`: its bins, and where each token of the flat lists is taken from."""
    R, Q = tree.read_R.size, pieces.size_Q.size
    widest = max(int(pieces.size_Q.max()), FEWEST_PLACES)
    run_Q, number_M = pieces.prompt_Q // G, pieces.number_M
    after = tree.end_M.size  # all numbers of responses, and what pads has this
    number_QL, end_QL = np.full((Q, widest), after), np.zeros((Q, widest), np.int64)
    number_QL[:, :P], end_QL[:, :P] = np.arange(-P, 0), after + 1  # everything in a piece sees the prompt
    token_QL = np.repeat((run_Q * T + pieces.prompt_Q % G * P)[:, None], widest, 1)  # what pads is the first of the prompt
    token_QL[:, :P] += np.arange(P)
    at_M = (pieces.piece_M, pieces.place_M)
    number_QL[at_M], end_QL[at_M] = number_M, tree.end_M[number_M]
    run_M = run_Q[pieces.piece_M]
    token_QL[at_M] = run_M * T + G * P + tree.in_run(number_M, run_M)
    bins, filled, start_Q = [], 0, np.zeros(Q, np.int64)  # where the attention of a piece would begin, if all of it had one
    for only_seen in np.unique(pieces.only_seen_Q).tolist():
        these_Q = (pieces.only_seen_Q == only_seen).nonzero()[0]
        these_Q = these_Q[pieces.size_Q[these_Q].argsort(kind="stable")]
        for start, end in cuts(pieces.size_Q[these_Q], BIN_COST, partial(cost_of_piece, only_seen=only_seen)):
            some = these_Q[start:end]
            L = max(int(pieces.size_Q[some[-1]]), FEWEST_PLACES)
            token_NL, number_NL, end_NL = (_tensor(value_QL[some, :L]) for value_QL in (token_QL, number_QL, end_QL))
            bins.append(Bin(token_NL, number_NL, end_NL, only_seen))
            start_Q[some] = filled + (L - only_seen) * np.arange(some.size) - only_seen
            filled += (L - only_seen) * some.size
    piece_RG = np.full((R, G), -1)
    piece_RG.ravel()[pieces.prompt_Q[::-1]] = np.arange(Q)[::-1]  # the first piece of each prompt
    piece_RG = np.where(piece_RG < 0, piece_RG[:, :1], piece_RG)  # a prompt that pads is the first
    taken_RT = np.repeat(start_Q[piece_RG[:, :1]], T, 1)
    taken_RT[:, : G * P] = (start_Q[piece_RG][:, :, None] + np.arange(P)).reshape(R, -1)
    taken_RT.ravel()[token_QL[at_M]] = start_Q[pieces.piece_M] + pieces.place_M
    return tuple(bins), taken_RT


@dataclass(frozen=True, eq=False)
class _Pieces:
    """What attention reads together: a prompt of a run (`prompt_Q`, counted through the stack) with what is read of some
    responses of it, `size_Q` tokens in all, of which the first `only_seen_Q` see nothing in it. The M tokens of responses in
    them, piece after piece: `piece_M`, `place_M` in it and `number_M` in the tree. A token is in more than one piece where the
    responses that begin with it are.
    """

    prompt_Q: np.ndarray
    size_Q: np.ndarray
    only_seen_Q: np.ndarray
    piece_M: np.ndarray
    place_M: np.ndarray
    number_M: np.ndarray

    @classmethod
    def of(cls, tree: _Tree, G: int, P: int) -> _Pieces:
        leaves_K = tree.leaves_N
        prompt_K, length_K = tree.run_N[leaves_K] * G + tree.prompt_N[leaves_K], tree.length_N[leaves_K]
        is_first_K = np.append(True, prompt_K[1:] != prompt_K[:-1])
        shared_K = np.append(0, tree.shared_N[leaves_K[:-1] + 1])  # the next row that is no beginning of a leaf
        begins_K = _begins(is_first_K, length_K, shared_K, P)
        piece_K, from_K = begins_K.cumsum() - 1, np.where(begins_K, 0, shared_K)
        count_K = length_K - from_K
        leaf_M = np.repeat(np.arange(leaves_K.size), count_K)
        column_M = np.arange(leaf_M.size) - np.repeat(count_K.cumsum() - count_K - from_K, count_K)
        piece_M = piece_K[leaf_M]
        read_Q = np.bincount(piece_M, minlength=int(piece_K[-1]) + 1)
        place_M = P + np.arange(leaf_M.size) - (read_Q.cumsum() - read_Q)[piece_M]
        only_seen_Q = np.where(is_first_K[begins_K], 0, _only_seen(P))
        return cls(prompt_K[begins_K], P + read_Q, only_seen_Q, piece_M, place_M, tree.number_NL[leaves_K[leaf_M], column_M])


def _begins(is_first_K: np.ndarray, length_K: np.ndarray, shared_K: np.ndarray, P: int) -> np.ndarray:
    """Which leaves begin a piece: the first of each prompt, and others that would add more to the piece before than they cost
    alone, or than its leaves cost by the mean, so that pieces do not go on growing where prompts are long."""
    begins, size, leaves, only_seen, later = [], 0, 0, 0, _only_seen(P)
    for is_first, length, shared in zip(is_first_K.tolist(), length_K.tolist(), shared_K.tolist(), strict=True):
        alone, joined = P + length, size + length - shared
        cost = cost_of_piece(size, only_seen)
        added = cost_of_piece(joined, only_seen) - cost
        begins.append(is_first or added > min(cost_of_piece(alone, later), cost / leaves))
        if begins[-1]:
            size, leaves, only_seen = alone, 1, 0 if is_first else later
        else:
            size, leaves = joined, leaves + 1
    return np.array(begins)


def _only_seen(P: int) -> int:
    """How many tokens of a prompt see nothing in its pieces but the first."""
    return P if P >= LONG_PROMPT else 0


def cost_of_piece(size: int, only_seen: int) -> int:
    """What attention over a piece of so many tokens costs, counted in products of a token with another."""
    return size * (size - only_seen + TOKEN_COST)


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

    `order_N`: where each row was; `run_N`, `prompt_N`, `length_N`: its run, its prompt there and how many tokens it reads,
    `response_NL`: those; `shared_N`: how many of them the row before has too. Distinct beginnings have numbers in this order,
    through the stack: `number_NL`, that of the one which ends at each column; `new_at`: rows and columns that are the first to
    have theirs; `read_R`: how many each run has. What goes on from a beginning has the numbers from its own to below
    `end_M`, and no other has. `leaves_N`: the rows that no other of their prompt goes on from.
    """

    order_N: np.ndarray
    run_N: np.ndarray
    prompt_N: np.ndarray
    length_N: np.ndarray
    response_NL: np.ndarray
    shared_N: np.ndarray
    number_NL: np.ndarray
    new_at: tuple[np.ndarray, np.ndarray]
    read_R: np.ndarray
    end_M: np.ndarray
    leaves_N: np.ndarray

    @classmethod
    def of(cls, response_RBL: np.ndarray, prompt_RB: np.ndarray, read_RB: np.ndarray) -> _Tree:
        R, B, L = response_RBL.shape
        words = np.zeros((R, B, L + 2), ">u4")  # sorted as texts: 0, which no token is, stands after the last and comes first
        words[:, :, 0] = np.arange(R)[:, None]
        words[:, :, 1] = prompt_RB
        words[:, :, 2:] = np.where(np.arange(L) < read_RB[:, :, None], response_RBL + 1, 0)
        words = words.reshape(R * B, L + 2)
        order_N = words.view(f"S{words.itemsize * words.shape[1]}").ravel().argsort(kind="stable")
        words, length_N = words[order_N], read_RB.ravel()[order_N]
        alike = np.logical_and.accumulate(words[1:] == words[:-1], 1)
        shared_N = np.minimum(np.append(0, alike[:, 2:].sum(1)), length_N)
        is_shared_NL = np.arange(L) < shared_N[:, None]
        is_new_NL = ~is_shared_NL & (np.arange(L) < length_N[:, None])
        new_N, M = is_new_NL.sum(1), int(is_new_NL.sum())
        counted_NL = is_new_NL.cumsum().reshape(R * B, L) - 1
        new_at = is_new_NL.nonzero()
        parts_NL = np.where(is_shared_NL, M, (new_N.cumsum() - new_N)[:, None])  # where a row leaves the beginnings before it
        end_NL = np.minimum.accumulate(np.append(parts_NL[1:], np.full((1, L), M), 0)[::-1], 0)[::-1]
        is_leaf_N = np.append(~alike[:, 1] | (shared_N[1:] < length_N[:-1]), True)
        return cls(
            order_N=order_N,
            run_N=order_N // B,
            prompt_N=prompt_RB.ravel()[order_N],
            length_N=length_N,
            response_NL=response_RBL.reshape(R * B, L)[order_N],
            shared_N=shared_N,
            number_NL=np.maximum.accumulate(np.where(is_new_NL, counted_NL, 0), 0),
            new_at=new_at,
            read_R=new_N.reshape(R, B).sum(1),
            end_M=end_NL[new_at],
            leaves_N=is_leaf_N.nonzero()[0],
        )

    def in_run(self, number: np.ndarray, run: np.ndarray) -> np.ndarray:
        """Numbers counted from the first of their run."""
        return number - (self.read_R.cumsum() - self.read_R)[run]


def cuts(size_N: np.ndarray, bin_cost: int, cost: Callable[[int], int] = int) -> list[tuple[int, int]]:
    """Where to cut rows, sorted by `size_N`, into bins whose rows are padded to the longest: the least of what the rows cost by
    `cost` of that size (default: its tokens) plus `bin_cost` a bin. No bin for 0 tokens."""
    value, first = np.unique(size_N, return_index=True)
    ends = [*first[1:].tolist(), len(size_N)]
    starts = [start for start, length in zip(first.tolist(), value.tolist(), strict=True) if length]
    ends, costs = ends[len(ends) - len(starts) :], [cost(length) for length in value.tolist() if length]
    best: list[tuple[float, int]] = [(0.0, 0)]  # (cost of the rows of the first j lengths, first length of their last bin)
    for j in range(len(starts)):
        best.append(min((best[i][0] + (ends[j] - starts[i]) * costs[j] + bin_cost, i) for i in range(j + 1)))
    cuts, j = [], len(starts)
    while j:
        i = best[j][1]
        cuts.append((starts[i], ends[j - 1]))
        j = i
    return cuts[::-1]
