"""Sampling from a stack of policies with a key-value cache that stops working on finished rows.

One uniform number per (sample, position) decides each token through the inverse of the cumulative distribution, so the
noise of a sample does not depend on its place in a batch, a stack or a rank, nor on which other samples have finished.

Axis letters: R runs, G prompts, B rows (B is a multiple of G), P prompt positions, L response positions, V vocabulary,
D width, H heads, N = R * rows still in the batch, flat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.policy.transformer import (
    Attend,
    Parameters,
    PolicyConfig,
    attend_rows,
    body,
    check_length,
    embedded,
    heads,
    project,
)
from aggcli.tasks.chance import SAMPLING, uniform

COMPACT_AT = 0.7
"""Finished rows leave once at most this share of the rows is still wanted."""
CHECK_EVERY = {"cpu": 1, "cuda": 8}
"""Tokens between two looks at how many rows are unfinished; a look waits for the device."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """Responses, right-padded to the longest: `tokens_RBL` ids (`pad_id` after the end), `length_RB` with the end token,
    `log_probs_RBL` in nats at the sampling temperature (0 after the end), `truncated_RB` true where no end token came."""

    tokens_RBL: Tensor
    length_RB: Tensor
    log_probs_RBL: Tensor
    truncated_RB: Tensor


def uniforms(seed: int, step: int, first: int, count: int, length: int) -> Tensor:
    """The noise of samples `first` to `first + count - 1` of a step: float64 [count, length], in [0, 1), on the CPU.

    Sample i's row depends on (seed, step, i) alone, and a longer `length` only appends.
    """
    return uniform(seed, SAMPLING, step, torch.arange(first, first + count), length)


@torch.no_grad()
def sample(
    parameters: Parameters,
    config: PolicyConfig,
    prompts_RGP: Tensor,
    uniforms_RBL: Tensor,
    *,
    end_id: int,
    pad_id: int,
    temperature: float = 1.0,
) -> Sampled:
    """Draw one response of at most L tokens for each row; row b continues prompt `b // (B // G)` of its run.

    Rows of one group thus stand together, and their prompt is read once. Give G = B for a prompt per row.
    """
    decoder = _Decoder(parameters, config, prompts_RGP, uniforms_RBL, temperature)
    limit = uniforms_RBL.shape[-1]
    check_every = CHECK_EVERY.get(uniforms_RBL.device.type, 8)
    for t in range(limit):
        token_N = decoder.draw(t)
        if t + 1 == limit:
            break
        decoder.note_ended(token_N == end_id)
        if (t + 1) % check_every == 0:
            widest = decoder.most_unfinished()
            if not widest:
                break
            if widest <= COMPACT_AT * decoder.rows:
                decoder.compact(widest)
        decoder.read(t)
    return decoder.finished(end_id, pad_id)


class _Decoder:
    """The rows still in the batch: `rows` of each run, the same number in every run, flat as N = R * rows.

    Caches are time-first, [P + L, N, H, D/H], so that a new token is one contiguous write. Drawn tokens are kept in lists
    until a compaction, or the end, moves them to their place.
    """

    def __init__(
        self, parameters: Parameters, config: PolicyConfig, prompts_RGP: Tensor, uniforms_RBL: Tensor, temperature: float
    ) -> None:
        weights = parameters["head"]
        self.runs, self.rows, self.length = uniforms_RBL.shape
        self.prompt_length = prompts_RGP.shape[-1]
        check_length(config, self.prompt_length + self.length)
        self.config, self.parameters = config, _decoding(parameters, config, temperature)
        self.run_offset_R1 = torch.arange(self.runs, device=weights.device)[:, None]
        noise_NL = (
            uniforms_RBL.flatten(0, 1).to(weights.device, weights.dtype).clamp(max=1 - torch.finfo(weights.dtype).eps / 2)
        )
        self.noise_LN = noise_NL.t().contiguous()
        self.slot_N = torch.arange(self.runs * self.rows, device=weights.device)
        self.ended_N = torch.zeros_like(self.slot_N, dtype=torch.bool)
        self.drawn: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.moved = 0  # tokens already at their place in the outputs
        self.tokens_LS = torch.zeros(self.length, self.runs * self.rows, dtype=torch.int64, device=weights.device)
        self.log_probs_LS = weights.new_zeros(self.tokens_LS.shape)
        self._prefill(parameters, prompts_RGP)

    def _prefill(self, parameters: Parameters, prompts_RGP: Tensor) -> None:
        """Read each prompt once; its keys, values and next-token logits go to all rows of its group."""
        R, G, P = prompts_RGP.shape
        repeats = self.rows // G
        within_group, caches = attend_rows(self.config, G), []

        def attend(layer: int, qkv_RTX: Tensor) -> Tensor:
            _, key, value = heads(self.config, qkv_RTX.view(R * G, P, -1))
            for part in (key, value):
                cache = part.new_empty(P + self.length, R * G, repeats, self.config.heads, self.config.head_width)
                cache[:P] = part.permute(2, 0, 1, 3)[:, :, None]
                caches.append(cache.flatten(1, 2))
            return within_group(layer, qkv_RTX)

        positions_RT = torch.arange(P, device=prompts_RGP.device).repeat(R, G)
        x_RTD = embedded(parameters, prompts_RGP.reshape(R, G * P), positions_RT)
        last_RGD = body(parameters, self.config, x_RTD, attend).view(R, G, P, -1)[:, :, -1]
        self.caches = list(zip(caches[::2], caches[1::2], strict=True))
        self.logits_RVB = self._logits(last_RGD).repeat_interleave(repeats, -1)

    def _logits(self, last_RBD: Tensor) -> Tensor:
        """Next-token logits [R, V, B]: with rows innermost, sums over a small vocabulary run at full vector width."""
        return torch.bmm(self.parameters["head"].mT, last_RBD.mT)

    def draw(self, t: int) -> Tensor:
        """The token of response position t of each row, by inverse CDF."""
        log_probs_RVB = torch.log_softmax(self.logits_RVB, 1)
        below_RVB = log_probs_RVB.exp().cumsum(1)
        threshold_R1B = self.noise_LN[t].view(self.runs, 1, self.rows) * below_RVB[:, -1:]  # the sum is 1 up to rounding
        token_R1B = (below_RVB <= threshold_R1B).sum(1, keepdim=True)
        token_N = token_R1B.flatten()
        self.drawn.append(token_N)
        self.log_probs.append(log_probs_RVB.gather(1, token_R1B).flatten())
        return token_N

    def read(self, t: int) -> None:
        """Feed the tokens just drawn, at response position t, and compute the next logits."""
        place = self.prompt_length + t
        weights, config = self.parameters, self.config
        R, V, D = weights["embedding"].shape
        token_N = (self.drawn[-1].view(R, self.rows) + self.run_offset_R1 * V).flatten()
        x_RBD = weights["embedding"].view(R * V, D).index_select(0, token_N).view(R, self.rows, D)
        x_RBD += weights["position"][:, place : place + 1]
        last_RBD = body(weights, config, x_RBD, self._attend(place))
        self.logits_RVB = self._logits(last_RBD)

    def _attend(self, place: int) -> Attend:
        """One query a row over the cache; products and sums, since the matrix products would be tiny."""
        config = self.config
        ones = self.noise_LN.new_ones(config.head_width)

        def attend(layer: int, qkv_RBX: Tensor) -> Tensor:
            query_NHd, new_key, new_value = qkv_RBX.view(-1, 3, config.heads, config.head_width).unbind(1)
            key_LNHd, value_LNHd = self.caches[layer]
            key_LNHd[place], value_LNHd[place] = new_key, new_value
            product = (key_LNHd[: place + 1] * query_NHd).view(-1, config.head_width)
            weight_LNH = torch.mv(product, ones).view(place + 1, -1, config.heads).softmax(0)
            mixed = (value_LNHd[: place + 1] * weight_LNH.unsqueeze(-1)).sum(0)
            return mixed.view(self.runs, self.rows, config.width)

        return attend

    def note_ended(self, ended_N: Tensor) -> None:
        self.ended_N |= ended_N

    def most_unfinished(self) -> int:
        """Unfinished rows of the run that has most."""
        return self.rows - int(self.ended_N.view(self.runs, self.rows).sum(-1).min())

    def compact(self, rows: int) -> None:
        """Keep `rows` rows of each run, the unfinished ones first."""
        order_RB = self.ended_N.view(self.runs, self.rows).to(torch.uint8).argsort(dim=-1, stable=True)[:, :rows]
        kept_N = (order_RB + self.run_offset_R1 * self.rows).flatten()
        self._move()
        filled = self.prompt_length + self.moved - 1  # the last drawn token is not read yet
        self.caches = [(_kept(key, kept_N, filled), _kept(value, kept_N, filled)) for key, value in self.caches]
        self.drawn = [self.tokens_LS[self.moved - 1, self.slot_N[kept_N]]]
        self.log_probs = [self.log_probs_LS[self.moved - 1, self.slot_N[kept_N]]]
        self.moved -= 1
        self.slot_N, self.ended_N = self.slot_N[kept_N], self.ended_N[kept_N]
        self.noise_LN, self.rows = self.noise_LN[:, kept_N], rows

    def _move(self) -> None:
        """Bring the drawn tokens to their place."""
        steps = slice(self.moved, self.moved + len(self.drawn))
        self.tokens_LS[steps].index_copy_(1, self.slot_N, torch.stack(self.drawn))
        self.log_probs_LS[steps].index_copy_(1, self.slot_N, torch.stack(self.log_probs))
        self.moved += len(self.drawn)
        self.drawn, self.log_probs = [], []

    def finished(self, end_id: int, pad_id: int) -> Sampled:
        """Everything drawn, cut at each row's first end token."""
        self._move()
        tokens_SL = self.tokens_LS[: self.moved].t().contiguous()
        is_end_SL = tokens_SL == end_id
        after_end_SL = is_end_SL.cumsum(-1) - is_end_SL.long() > 0
        shape = (self.runs, -1, self.moved)
        return Sampled(
            tokens_RBL=tokens_SL.masked_fill(after_end_SL, pad_id).view(shape),
            length_RB=(~after_end_SL).sum(-1).view(self.runs, -1),
            log_probs_RBL=self.log_probs_LS[: self.moved].t().masked_fill(after_end_SL, 0.0).reshape(shape),
            truncated_RB=~is_end_SL.any(-1).view(self.runs, -1),
        )


def _kept(cache_LNHd: Tensor, kept_N: Tensor, filled: int) -> Tensor:
    """The rows `kept_N` of a cache; positions not written yet stay unwritten."""
    kept = cache_LNHd.new_empty(cache_LNHd.shape[0], kept_N.numel(), *cache_LNHd.shape[2:])
    torch.index_select(cache_LNHd[:filled], 1, kept_N, out=kept[:filled])
    return kept


def _decoding(parameters: Parameters, config: PolicyConfig, temperature: float) -> Parameters:
    """The same policy with 1 / sqrt(D/H) in its queries and 1 / temperature in its head: nothing to scale for each token."""
    scaled = dict(parameters)
    for layer in range(config.layers):
        weight = parameters[f"layers.{layer}.qkv"].clone()
        weight[..., : config.width] *= config.head_width**-0.5
        scaled[f"layers.{layer}.qkv"] = weight
    return scaled if temperature == 1.0 else scaled | {"head": parameters["head"] / temperature}
