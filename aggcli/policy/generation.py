"""Sampling from a Hugging Face causal language model by transformers' own generation, with this project's own noise.

Gumbel noise made from (seed, step, row, position, vocabulary entry) is added to the scaled logits, and the largest sum is
taken: a draw from the softmax (Gumbel-max), that is the same whatever else stands in the batch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from aggcli.policy.protocol import Noise, Sampled
from aggcli.tasks.chance import SAMPLING, bits_of, keys


def generate(
    model: Any,
    prompts_PL: Tensor,
    length_P: Tensor,
    key_B: Tensor,
    limit: int,
    *,
    end_id: int,
    pad_id: int,
    temperature: float = 1.0,
) -> Sampled:
    """One response of at most `limit` tokens for each key, R = 1; row b continues prompt `b // (B // P)`."""
    transformers: Any = import_module("transformers")

    B, device = len(key_B), key_B.device
    width = int(length_P.max())
    repeats = B // len(prompts_PL)
    place_L = torch.arange(width, device=device) - (width - length_P[:, None])  # generation wants the padding on the left
    prompt_PL = torch.where(place_L >= 0, prompts_PL.gather(1, place_L.clamp(min=0)), pad_id)
    drawing = _Draws(key_B, width, temperature)
    settings = transformers.GenerationConfig(
        max_new_tokens=limit, do_sample=False, num_beams=1, eos_token_id=end_id, pad_token_id=pad_id, use_cache=True
    )
    with torch.inference_mode():
        row_BL = model.generate(
            prompt_PL.repeat_interleave(repeats, 0),
            attention_mask=(place_L >= 0).long().repeat_interleave(repeats, 0),
            generation_config=settings,
            logits_processor=transformers.LogitsProcessorList([cast(Any, drawing)]),
        )
    tokens_BL, log_probs_BL = row_BL[:, width:], torch.stack(drawing.log_probs, 1)
    is_end_BL = tokens_BL == end_id
    after_end_BL = is_end_BL.cumsum(-1) - is_end_BL.long() > 0
    length_B = (~after_end_BL).sum(-1)
    most = int(length_B.max())
    return Sampled(
        tokens_RBL=tokens_BL.masked_fill(after_end_BL, pad_id)[None, :, :most].cpu().clone(),
        length_RB=length_B[None].cpu().clone(),
        log_probs_RBL=log_probs_BL.masked_fill(after_end_BL, 0.0)[None, :, :most].cpu().clone(),
        truncated_RB=(~is_end_BL.any(-1))[None].cpu().clone(),
    )


def keys_of(noise: Noise, run: int) -> Tensor:
    """What the noise of each row of a run is made from, int64 [B]."""
    return keys(noise.seeds[run], SAMPLING, noise.step, torch.arange(noise.first, noise.first + noise.count))


def gumbel(key_B: Tensor, position: int, vocabulary_size: int) -> Tensor:
    """Standard Gumbel noise, float64 [B, V], on the device of the keys; the same numbers on every device up to rounding."""
    key_B1 = bits_of(key_B + position)[:, None]
    bits_BV = bits_of(key_B1 + torch.arange(vocabulary_size, device=key_B.device))
    uniform_BV = (((bits_BV >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52  # neither 0 nor 1
    return -torch.log(-torch.log(uniform_BV))


class _Draws:
    """A logits processor that draws: only the token drawn keeps a score that is not -infinity."""

    def __init__(self, key_B: Tensor, prompt_width: int, temperature: float) -> None:
        self.key_B, self.prompt_width, self.temperature = key_B, prompt_width, temperature
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self.prompt_width
        scaled_BV = scores.double() / self.temperature
        token_B1 = (scaled_BV + gumbel(self.key_B, position, scores.shape[-1])).argmax(-1, keepdim=True)
        self.log_probs.append(scaled_BV.log_softmax(-1).gather(1, token_B1)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B1, 0.0)
