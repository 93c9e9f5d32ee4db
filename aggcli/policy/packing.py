"""Rows without their padding: how prompts and responses of a stack are laid out for one forward pass.

The linear layers of a transformer do not care which row a token stands in, so a pass works on one flat list of tokens a run:

    [ each distinct prompt once | rows of bin 0 | rows of bin 1 | ... ]

A bin holds the rows of similar response length, padded to its longest; only attention looks at bins. The last token of a
response is never read, since nothing is predicted from it.

Nothing is read twice: prompts shared by the rows of a group are read once, and so is every response that other rows of its
run begin with. A hidden state depends on what stands before it alone, so those rows have the numbers of the row that was
read, and what their losses say about it is added up there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BIN_COST = 60
"""What one more bin costs, counted in tokens a run: cuts are worth making where they save more padding than this."""


@dataclass(frozen=True, eq=False)
class Bin:
    """`rows` rows of each run of `length` read tokens each; `prompt_N` is the distinct prompt of each row, counted through
    the whole stack, flat."""

    rows: int
    length: int
    prompt_N: Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """`tokens_RT` and `positions_RT` are the flat list; `prompts` distinct prompts of `prompt_length` come first.

    Response column c of row b is predicted at place `predicted_at_RBC[r, b, c]` of the *predicting places* (the last
    position of each prompt, then all response places); `target_RBC` is the token there; both are 0 outside `valid_RBC`.
    """

    tokens_RT: Tensor
    positions_RT: Tensor
    prompts: int
    prompt_length: int
    bins: tuple[Bin, ...]
    predicted_at_RBC: Tensor
    target_RBC: Tensor
    valid_RBC: Tensor

    def to(self, device: torch.device | str) -> Packing:
        """The same packing on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        bins = tuple(dataclasses.replace(piece, prompt_N=piece.prompt_N.to(device)) for piece in self.bins)
        return dataclasses.replace(self, bins=bins, **moved)


def pack(tokens_RBL: Tensor, prompt_length: int, length_RB: Tensor) -> Packing:
    """Lay out right-padded rows of prompt (always `prompt_length` tokens) and response (`length_RB` tokens).

    Done on the host: the result is on the CPU.
    """
    tokens = tokens_RBL.cpu().numpy()
    length = length_RB.cpu().numpy()
    R, B, L = tokens.shape
    prompts_RPL, prompt_RB = _distinct_prompts(tokens[:, :, :prompt_length])
    G = prompts_RPL.shape[1]
    length_read_RB = np.maximum(length - 1, 0)
    reader_RB = _readers(tokens[:, :, prompt_length:], prompt_RB, length_read_RB)
    read_RB = np.where(reader_RB == np.arange(B), length_read_RB, 0)
    order_RB = read_RB.argsort(-1, kind="stable")
    sorted_RB = np.take_along_axis(read_RB, order_RB, -1)
    C = max(int(length.max(initial=0)), 1)
    flat_R1 = np.arange(R)[:, None]
    parts, places, bins = [prompts_RPL.reshape(R, -1)], [np.tile(np.arange(prompt_length), (R, G))], []
    start_RB = np.zeros((R, B), np.int64)
    filled = G
    for start, end in cuts(sorted_RB.max(0)):
        rows_Rb = order_RB[:, start:end]
        width, count = int(sorted_RB[:, end - 1].max()), end - start
        place = np.arange(width)
        column = np.minimum(prompt_length + place, L - 1)
        parts.append(tokens[flat_R1[:, :, None], rows_Rb[:, :, None], column].reshape(R, -1))
        places.append(np.tile(prompt_length + place, (R, count)))
        start_RB[flat_R1, rows_Rb] = filled + width * np.arange(count)
        bins.append(Bin(count, width, _tensor((prompt_RB[flat_R1, rows_Rb] + flat_R1 * G).ravel())))
        filled += count * width
    read_at_RBC = np.take_along_axis(start_RB, reader_RB, -1)[:, :, None] + np.arange(C - 1)
    at_RBC = np.concatenate([prompt_RB[:, :, None], read_at_RBC], -1)
    valid_RBC = np.arange(C) < length[:, :, None]
    target_RBC = np.where(valid_RBC, tokens[:, :, prompt_length : prompt_length + C], 0)
    return Packing(
        tokens_RT=_tensor(np.concatenate(parts, 1)),
        positions_RT=_tensor(np.concatenate(places, 1)),
        prompts=G,
        prompt_length=prompt_length,
        bins=tuple(bins),
        predicted_at_RBC=_tensor(np.where(valid_RBC, at_RBC, 0)),
        target_RBC=_tensor(target_RBC),
        valid_RBC=_tensor(valid_RBC),
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _distinct_prompts(prompt_RBL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct prompts of each run, padded to the run that has most by repeating its first, and each row's."""
    found = [np.unique(prompt_BL, axis=0, return_inverse=True) for prompt_BL in prompt_RBL]
    most = max(len(prompts) for prompts, _ in found)
    prompts_RPL = np.stack([np.concatenate([prompts, prompts[:1].repeat(most - len(prompts), 0)]) for prompts, _ in found])
    return prompts_RPL, np.stack([inverse.reshape(-1) for _, inverse in found])


def _readers(response_RBL: np.ndarray, prompt_RB: np.ndarray, read_RB: np.ndarray) -> np.ndarray:
    """The row [R, B] that each row's read tokens are read in: one of the same run and prompt that begins with all of them."""
    R, B, L = response_RBL.shape
    words = np.zeros((R, B, L + 2), ">u4")  # sorted as texts: 0, which no token is, stands after the last and comes first
    words[:, :, 0] = np.arange(1, R + 1)[:, None]
    words[:, :, 1] = prompt_RB + 1
    words[:, :, 2:] = np.where(np.arange(L) < read_RB[:, :, None], response_RBL + 1, 0)
    words = words.reshape(R * B, L + 2)
    order = words.view(f"S{words.itemsize * words.shape[1]}").ravel().argsort(kind="stable")
    before, after = words[order[:-1]], words[order[1:]]
    goes_on = ((before == after) | (before == 0)).all(1)  # what one row begins with, its successor does, if any does
    at = np.arange(R * B)
    ends = np.append(np.where(goes_on, R * B, at[:-1]), R * B - 1)
    reader = np.empty_like(at)
    reader[order] = order[np.minimum.accumulate(ends[::-1])[::-1]]
    return reader.reshape(R, B) % B


def cuts(longest_B: np.ndarray) -> list[tuple[int, int]]:
    """Where to cut rows, sorted by `longest_B`, into bins: least padded tokens plus `BIN_COST` a bin. No bin for 0 tokens."""
    value, first = np.unique(longest_B, return_index=True)
    ends = [*first[1:].tolist(), len(longest_B)]
    starts = [start for start, length in zip(first.tolist(), value.tolist(), strict=True) if length]
    ends, lengths = ends[len(ends) - len(starts) :], [length for length in value.tolist() if length]
    best: list[tuple[float, int]] = [(0.0, 0)]  # (cost of the rows of the first j lengths, first length of their last bin)
    for j in range(len(starts)):
        best.append(min((best[i][0] + (ends[j] - starts[i]) * lengths[j] + BIN_COST, i) for i in range(j + 1)))
    cuts, j = [], len(starts)
    while j:
        i = best[j][1]
        cuts.append((starts[i], ends[j - 1]))
        j = i
    return cuts[::-1]
