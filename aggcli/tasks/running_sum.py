"""Sum k digits modulo 10: answer at once, pad with filler first, or write the running sums.

`616517=` has the running sums 6, 7, 3, 8, 9, 6 and the answer 6. The policy may write `6$` (hard: all in one step), `...6$`,
or `673896$` (longer and far more accurate), so that length and correctness are linked, which is what aggregation modes
differ on.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from aggcli.errors import SettingError
from aggcli.tasks import protocol
from aggcli.tasks.chance import PROMPTS, uniform
from aggcli.tasks.protocol import END, EQUALS, FILLER, PAD, VOCABULARY, Prompts, Verdict, draw_digits, even_prompts

STYLES = (0.45, 0.45, 0.10)
"""Shares of the warm start: a direct answer after filler, running sums, running sums then filler and the answer again."""
MOST_FILLER = 20
"""Filler tokens are the whole part of 21 u^2, u uniform: from 0 to 20, few more often than many."""
CORRUPTED = 0.04
"""Share of wrong digits among the running sums that the warm start shows; later sums go on from a wrong one."""


class RunningSum:
    """`digits` digits; their sum modulo 10 is the answer."""

    name = "running-sum"
    vocabulary = VOCABULARY
    end_id, pad_id = END, PAD
    can_fail = False
    most_fresh_prompts: int | None = None
    default_max_response_length = 32

    def __init__(self, digits: int = 6) -> None:
        if not 1 <= digits <= 100:
            raise SettingError(f"task running-sum: digits {digits}: must be from 1 to 100")
        self.digits = digits
        self.prompt_length = digits + 1

    @property
    def settings(self) -> dict[str, object]:
        return {"digits": self.digits}

    def prompts(self, seed: int, step: int, count: int, first: int = 0) -> Prompts:
        """See `Task.prompts`."""
        index_S = torch.arange(first, first + count)
        digits_SK = (uniform(seed, PROMPTS, step, index_S, self.digits) * 10).long()
        return even_prompts(_with_equals(digits_SK), digits_SK.sum(-1) % 10)

    def verify(self, answer: Tensor, response: Tensor, length: Tensor) -> Verdict:
        """See `Task.verify`."""
        return protocol.verify_last_digit(answer, response, length)

    def text(self, tokens: Tensor) -> str:
        """See `SmallTask.text`."""
        return protocol.as_text(tokens)

    def demonstrations(self, generator: Generator, count: int) -> tuple[Tensor, int, Tensor]:
        """The mixture of styles; see `SmallTask.demonstrations`."""
        digits_BK = draw_digits(generator, count, self.digits)
        style_B = torch.rand(count, generator=generator)
        direct_B, long_B = style_B < STYLES[0], style_B >= STYLES[0] + STYLES[1]
        sums_BK = self._corrupted_sums(generator, digits_BK)
        answer_B = torch.where(direct_B, digits_BK.sum(-1) % 10, sums_BK[:, -1])  # the long style repeats its own result
        filler_B = ((MOST_FILLER + 1) * torch.rand(count, generator=generator).square()).long()
        sums_B = torch.where(direct_B, 0, self.digits)  # tokens of each part of the response, in order
        filler_B = torch.where(direct_B | long_B, filler_B, 0)
        again_B = (direct_B | long_B).long()
        at_L = torch.arange(self.digits + MOST_FILLER + 2)
        ends = [part[:, None] for part in torch.stack([sums_B, filler_B, again_B, torch.ones_like(sums_B)]).cumsum(0)]
        padded_BL = torch.nn.functional.pad(sums_BK, (0, MOST_FILLER + 2))
        response_BL = torch.where(at_L < ends[3], END, PAD)
        response_BL = torch.where(at_L < ends[2], answer_B[:, None], response_BL)
        response_BL = torch.where(at_L < ends[1], FILLER, response_BL)
        response_BL = torch.where(at_L < ends[0], padded_BL, response_BL)
        tokens_BL = torch.cat([_with_equals(digits_BK), response_BL], -1)
        return tokens_BL, self.prompt_length, self.prompt_length + ends[3][:, 0]

    def _corrupted_sums(self, generator: Generator, digits_BK: Tensor) -> Tensor:
        wrong_BK = torch.rand(digits_BK.shape, generator=generator) < CORRUPTED
        error_BK = torch.where(wrong_BK, torch.randint(1, 10, digits_BK.shape, generator=generator), 0)
        return (digits_BK + error_BK).cumsum(-1) % 10


def _with_equals(digits_SK: Tensor) -> Tensor:
    return torch.nn.functional.pad(digits_SK, (0, 1), value=EQUALS)
