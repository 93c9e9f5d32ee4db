"""What a task is: prompts from a seed, a verifier, and demonstrations to warm-start a policy on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

VOCABULARY: tuple[str, ...] = (*"0123456789", "=", ".", "$", "_")
"""Digits (each its own id), the prompt's end, filler, the response's end, padding: the ids of the dumps of this task."""

EQUALS, FILLER, END, PAD = 10, 11, 12, 13


@dataclass(frozen=True, eq=False)
class Prompts:
    """`tokens_SL` int64 ids, `answer_S` int64 the right digit of each."""

    tokens_SL: Tensor
    answer_S: Tensor


class Task(Protocol):
    """A checkable task; token ids are positions in `vocabulary`."""

    name: str
    vocabulary: tuple[str, ...]
    end_id: int
    pad_id: int
    prompt_length: int
    """Tokens of every prompt."""
    default_max_response_length: int

    @property
    def settings(self) -> dict[str, object]:
        """What `make_task` needs besides the name to build this task again."""
        ...

    def prompts(self, seed: int, step: int, count: int, first: int = 0) -> Prompts:
        """Prompts `first` to `first + count - 1` of a step; prompt i depends on (seed, step, i) alone."""
        ...

    def verify(self, answer: Tensor, response: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Reward (float64) and correctness (bool), each [...], of responses [..., L] of `length` tokens [...]."""
        ...

    def demonstrations(self, generator: Generator, count: int) -> tuple[Tensor, int, Tensor]:
        """`tokens_BL` (padded), the prompt length, and `length_B` (prompt and response together) to learn from."""
        ...

    def text(self, tokens: Tensor) -> str:
        """Token ids [...] as text, padding left out."""
        ...


def verify_last_digit(answer: Tensor, response: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """A response is right when it ends with the end token and its last digit before that is `answer`.

    `response` [..., L] ids, `length` [...] tokens with the end token, `answer` [...] digits. Returns reward (1 or 0,
    float64) and correctness (bool). A response without an end token was cut off, and is wrong.
    """
    L = response.shape[-1]
    at_L = torch.arange(L, device=response.device)
    last = (length - 1).clamp(min=0)
    ended = (length > 0) & (response.gather(-1, last.unsqueeze(-1)).squeeze(-1) == END)
    digit_before_end = (response < 10) & (at_L < last.unsqueeze(-1))
    place = torch.where(digit_before_end, at_L, -1).amax(-1)
    digit = response.gather(-1, place.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    correct = ended & (place >= 0) & (digit == answer)
    return correct.double(), correct


def as_text(tokens: Tensor) -> str:
    """Token ids [...] as text, padding left out."""
    return "".join(VOCABULARY[i] for i in tokens.flatten().tolist() if i != PAD)


def draw_digits(generator: Generator, *shape: int) -> Tensor:
    """Uniform digits, int64."""
    return torch.randint(10, shape, generator=generator)
