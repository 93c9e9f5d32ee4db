"""What a task is: prompts from a seed, and a verifier; for the small policy also demonstrations to start it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

VOCABULARY: tuple[str, ...] = (*"0123456789", "=", ".", "$", "_")
"""Digits (each its own id), the prompt's end, filler, the response's end, padding: the ids of the dumps of this task."""

EQUALS, FILLER, END, PAD = 10, 11, 12, 13


EVALUATION_STEP = 2**31 - 1
"""The step whose prompts and noise evaluate a policy: no training step draws them."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """`tokens_SL` int64 ids, right-padded, of which `length_S` are each prompt's; `answer_S` int64 what the task knows each
    prompt by when it judges a response: the right answer, or the number of the question."""

    tokens_SL: Tensor
    length_S: Tensor
    answer_S: Tensor


class Verdict(NamedTuple):
    """What a task says of responses, each [...]: `reward` float64, `correct` bool, and `failed` bool where its checker raised
    an exception, which counts as a reward of 0."""

    reward: Tensor
    correct: Tensor
    failed: Tensor


class Task(Protocol):
    """A checkable task, in the token ids of the policy that it is given to."""

    name: str
    end_id: int
    pad_id: int
    default_max_response_length: int
    can_fail: bool
    """Whether its checker can raise an exception."""
    most_fresh_prompts: int | None
    """How many prompts there are that are never trained on; None: as many as are asked for."""

    def prompts(self, seed: int, step: int, count: int, first: int = 0) -> Prompts:
        """Prompts `first` to `first + count - 1` of a step; prompt i depends on (seed, step, i) alone."""
        ...

    def verify(self, answer: Tensor, response: Tensor, length: Tensor) -> Verdict:
        """The verdict on responses [..., L] of `length` tokens [...] to prompts of these `answer`s [...]."""
        ...


class SmallTask(Task, Protocol):
    """A task for the small policy: token ids are positions in `vocabulary`."""

    vocabulary: tuple[str, ...]
    prompt_length: int
    """Tokens of every prompt."""

    @property
    def settings(self) -> dict[str, object]:
        """What `make_task` needs besides the name to build this task again."""
        ...

    def demonstrations(self, generator: Generator, count: int) -> tuple[Tensor, int, Tensor]:
        """`tokens_BL` (padded), the prompt length, and `length_B` (prompt and response together) to learn from."""
        ...

    def text(self, tokens: Tensor) -> str:
        """Token ids [...] as text, padding left out."""
        ...


def verify_last_digit(answer: Tensor, response: Tensor, length: Tensor) -> Verdict:
    """A response is right when it ends with the end token and its last digit before that is `answer`.

    `response` [..., L] ids, `length` [...] tokens with the end token, `answer` [...] digits. The reward is 1
    or 0. A response without an end token was cut off, and is wrong.
    """
    L = response.shape[-1]
    at_L = torch.arange(L, device=response.device)
    last = (length - 1).clamp(min=0)
    ended = (length > 0) & (response.gather(-1, last.unsqueeze(-1)).squeeze(-1) == END)
    digit_before_end = (response < 10) & (at_L < last.unsqueeze(-1))
    place = torch.where(digit_before_end, at_L, -1).amax(-1)
    digit = response.gather(-1, place.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    correct = ended & (place >= 0) & (digit == answer)
    return Verdict(correct.double(), correct, torch.zeros_like(correct))


def even_prompts(tokens_SL: Tensor, answer_S: Tensor) -> Prompts:
    """Prompts as long as their rows."""
    return Prompts(tokens_SL, torch.full((len(tokens_SL),), tokens_SL.shape[1]), answer_S)


def as_text(tokens: Tensor) -> str:
    """Token ids [...] as text, padding left out."""
    return "".join(VOCABULARY[i] for i in tokens.flatten().tolist() if i != PAD)


def draw_digits(generator: Generator, *shape: int) -> Tensor:
    """Uniform digits, int64."""
    return torch.randint(10, shape, generator=generator)
