"""A control: the length of a response says nothing about whether it is right.

`47=` is answered by the sum of its two digits modulo 10, after any number of filler tokens: `...1$`. How many is drawn apart
from the question and from the answer, and what makes an answer wrong before training is the question alone (its first
digit). Aggregation modes then weigh tokens differently without linking length to correctness.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from aggcli.tasks import protocol
from aggcli.tasks.chance import PROMPTS, uniform
from aggcli.tasks.protocol import END, EQUALS, FILLER, PAD, VOCABULARY, Prompts, Verdict, draw_digits, even_prompts

MOST_FILLER = 20
DIGITS = 2


class Control:
    """The sum of two digits, after filler of any length."""

    name = "control"
    vocabulary = VOCABULARY
    end_id, pad_id = END, PAD
    can_fail = False
    most_fresh_prompts: int | None = None
    prompt_length = DIGITS + 1
    default_max_response_length = 32

    @property
    def settings(self) -> dict[str, object]:
        return {}

    def prompts(self, seed: int, step: int, count: int, first: int = 0) -> Prompts:
        """See `Task.prompts`."""
        index_S = torch.arange(first, first + count)
        digits_SK = (uniform(seed, PROMPTS, step, index_S, DIGITS) * 10).long()
        return even_prompts(_with_equals(digits_SK), digits_SK.sum(-1) % 10)

    def verify(self, answer: Tensor, response: Tensor, length: Tensor) -> Verdict:
        """See `Task.verify`."""
        return protocol.verify_last_digit(answer, response, length)

    def text(self, tokens: Tensor) -> str:
        """See `SmallTask.text`."""
        return protocol.as_text(tokens)

    def demonstrations(self, generator: Generator, count: int) -> tuple[Tensor, int, Tensor]:
        """Answers that are right in 30 % of the questions that start with 0, 37 % with 1, ... 93 % with 9."""
        digits_BK = draw_digits(generator, count, DIGITS)
        wrong_B = torch.rand(count, generator=generator) >= 0.3 + 0.07 * digits_BK[:, 0]
        error_B = torch.where(wrong_B, torch.randint(1, 10, (count,), generator=generator), 0)
        answer_B1 = ((digits_BK.sum(-1) + error_B) % 10)[:, None]
        filler_B1 = torch.randint(MOST_FILLER + 1, (count, 1), generator=generator)
        at_L = torch.arange(MOST_FILLER + 2)
        response_BL = torch.where(at_L == filler_B1, answer_B1, torch.where(at_L == filler_B1 + 1, END, PAD))
        response_BL = torch.where(at_L < filler_B1, FILLER, response_BL)
        return (
            torch.cat([_with_equals(digits_BK), response_BL], -1),
            self.prompt_length,
            self.prompt_length + filler_B1[:, 0] + 2,
        )


def _with_equals(digits_SK: Tensor) -> Tensor:
    return torch.nn.functional.pad(digits_SK, (0, 1), value=EQUALS)
