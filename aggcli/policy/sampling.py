"""Sampling from a stack of policies with a key-value cache that stops working on finished rows.

One uniform number per (sample, position) decides each token through the inverse of the cumulative distribution, so the
noise of a sample does not depend on its place in a batch, a stack or a rank, nor on which other samples have finished.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from aggcli.policy.groups import groups_of, threads_for
from aggcli.policy.kernels import SMALLEST_NORM
from aggcli.policy.transformer import (
    BLOCK_WEIGHTS,
    Parameters,
    PolicyConfig,
    attend_rows,
    body,
    check_length,
    embedded,
    run_of,
)
from aggcli.tasks.chance import SAMPLING, uniform

RUNS_AT_ONCE = 8
"""Runs of one decoding loop: enough that the work outweighs the calls, few enough for a core's cache."""
COMPACT_AT = 0.7
"""Finished rows leave once at most this share of the rows is still wanted."""
CHECK_EVERY = {"cpu": 2, "cuda": 8}
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


def sample(
    parameters: Parameters,
    config: PolicyConfig,
    prompts_RPL: Tensor,
    uniforms_RBL: Tensor,
    *,
    end_id: int,
    pad_id: int,
    temperature: float = 1.0,
) -> Sampled:
    """Draw one response of at most L tokens for each row; row b continues prompt `b // (B // G)` of its run.

    Rows of one group thus stand together, and their prompt is read once. Give G = B for a prompt per row.
    """
    parts = []
    with torch.inference_mode(), threads_for(config.width):
        for group in groups_of(len(uniforms_RBL), RUNS_AT_ONCE, parameters["head"].device):
            decoder = _Decoder(run_of(parameters, group), config, prompts_RPL[group], uniforms_RBL[group], temperature)
            parts.append(_decoded(decoder, end_id, pad_id))
    return _joined(parts, pad_id)  # outside of inference mode: a gradient may be taken through what was drawn


def _decoded(decoder: _Decoder, end_id: int, pad_id: int) -> Sampled:
    check_every = CHECK_EVERY.get(decoder.slot_N.device.type, 8)
    for t in range(decoder.length):
        token_N = decoder.draw(t)
        if t + 1 == decoder.length:
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


def _joined(parts: list[Sampled], pad_id: int) -> Sampled:
    """The runs of all parts, padded to the longest."""
    width = max(part.tokens_RBL.shape[-1] for part in parts)

    def together(name: str, padding: float) -> Tensor:
        values = [getattr(part, name) for part in parts]
        return torch.cat([pad(value, (0, width - value.shape[-1]), value=padding) for value in values])

    return Sampled(
        together("tokens_RBL", pad_id),
        torch.cat([part.length_RB for part in parts]),
        together("log_probs_RBL", 0.0),
        torch.cat([part.truncated_RB for part in parts]),
    )


class _Decoder:
    """The rows still in the batch: `rows` of each run, the same number in every run, flat as N = R * rows.

    Caches are place-first, [2, P + L, N, H, d], so that a new token is one write and attention reads one block. Drawn tokens
    are kept in lists until a compaction, or the end, moves them to their place.
    """

    def __init__(
        self, parameters: Parameters, config: PolicyConfig, prompts_RPL: Tensor, uniforms_RBL: Tensor, temperature: float
    ) -> None:
        self.runs, self.rows, self.length = uniforms_RBL.shape
        self.prompt_length = prompts_RPL.shape[-1]
        check_length(config, self.prompt_length + self.length)
        device, dtype = parameters["head"].device, parameters["head"].dtype
        self.config, self.weights = config, _Weights.of(parameters, config, temperature)
        self.run_offset_R1 = torch.arange(self.runs, device=device)[:, None]
        below_1 = 1 - torch.finfo(dtype).eps / 2  # rounding must not make a number 1
        self.noise_LN = uniforms_RBL.flatten(0, 1).to(device, dtype).clamp(max=below_1).t().contiguous()
        self.slot_N = torch.arange(self.runs * self.rows, device=device)
        self.ended_N = torch.zeros_like(self.slot_N, dtype=torch.bool)
        self.drawn: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.moved = 0  # tokens already at their place in the outputs
        self.tokens_LS = torch.zeros(self.length, self.runs * self.rows, dtype=torch.int64, device=device)
        self.log_probs_LS = torch.zeros(self.tokens_LS.shape, dtype=dtype, device=device)
        self._prefill(parameters, prompts_RPL)

    def _prefill(self, parameters: Parameters, prompts_RPL: Tensor) -> None:
        """Read each prompt once; its keys, values and next-token logits go to all rows of its group."""
        R, G, P = prompts_RPL.shape
        repeats = self.rows // G
        within_group = attend_rows(self.config, G)
        self.caches: list[Tensor] = []

        def attend(layer: int, qkv_RTX: Tensor) -> Tensor:
            kv = qkv_RTX.view(R * G, P, 3, self.config.heads, -1)[:, :, 1:].permute(2, 1, 0, 3, 4)
            cache = kv.new_empty(2, P + self.length, R * G, repeats, *kv.shape[3:])
            cache[:, :P] = kv.unsqueeze(3)
            self.caches.append(cache.flatten(2, 3))
            return within_group(layer, qkv_RTX)

        positions_RT = torch.arange(P, device=prompts_RPL.device).repeat(R, G)
        x_RTD = embedded(parameters, prompts_RPL.reshape(R, G * P), positions_RT)
        last_RPD = body(parameters, self.config, x_RTD, attend).view(R, G, P, -1)[:, :, -1]
        self.logits_RVB = torch.bmm(self.weights.head.mT, _direction(last_RPD).mT).repeat_interleave(repeats, -1)

    def draw(self, t: int) -> Tensor:
        """The token of response position t of each row, by inverse CDF."""
        log_probs_RVB = torch.log_softmax(self.logits_RVB, 1)
        below_RVB = log_probs_RVB.exp().cumsum(1)
        threshold_R1B = self.noise_LN[t].view(self.runs, 1, self.rows) * below_RVB[:, -1:]  # the sum is 1 up to rounding
        token_R1B = (below_RVB <= threshold_R1B).sum(1, keepdim=True).clamp_(max=below_RVB.shape[1] - 1)
        token_N = token_R1B.flatten()
        self.drawn.append(token_N)
        self.log_probs.append(log_probs_RVB.gather(1, token_R1B).flatten())
        return token_N

    def read(self, t: int) -> None:
        """Feed the tokens just drawn, at response position t, and compute the next logits."""
        place, weights = self.prompt_length + t, self.weights
        token_RB = self.drawn[-1].view(self.runs, self.rows) + self.run_offset_R1 * self.config.vocabulary_size
        x_RBD = weights.embedding_LVD[place].index_select(0, token_RB.flatten()).view(self.runs, self.rows, -1)
        for cache, (qkv, attention_out, mlp_in, mlp_out) in zip(self.caches, weights.layers, strict=True):
            mixed_RBD = self._attend(torch.bmm(_direction(x_RBD), qkv), cache, place)
            x_RBD = torch.baddbmm(x_RBD, mixed_RBD, attention_out)
            x_RBD = torch.baddbmm(x_RBD, torch.bmm(_direction(x_RBD), mlp_in).relu_(), mlp_out)
        self.logits_RVB = torch.bmm(weights.head.mT, _direction(x_RBD).mT)

    def _attend(self, qkv_RBX: Tensor, cache: Tensor, place: int) -> Tensor:
        """One query a row over the cache; products and sums, since the matrix products would be tiny."""
        heads, width = self.config.heads, self.config.head_width
        parts = qkv_RBX.view(-1, 3, heads, width)
        cache[:, place] = parts[:, 1:].transpose(0, 1)
        key_LNHd, value_LNHd = cache[:, : place + 1].unbind(0)
        product = (key_LNHd * parts[:, 0]).view(-1, width)
        weight_LNH1 = torch.mv(product, self.weights.ones).view(place + 1, -1, heads, 1).softmax(0)
        return (value_LNHd * weight_LNH1).sum(0).view(self.runs, self.rows, -1)

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
        self.caches = [_kept(cache, kept_N, filled) for cache in self.caches]
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


def _kept(cache: Tensor, kept_N: Tensor, filled: int) -> Tensor:
    """The rows `kept_N` of a cache; places not written yet stay unwritten."""
    kept = cache.new_empty(*cache.shape[:2], kept_N.numel(), *cache.shape[3:])
    for part in range(2):
        torch.index_select(cache[part, :filled], 1, kept_N, out=kept[part, :filled])
    return kept


def _direction(x: Tensor) -> Tensor:
    """`x / |x|`: the norm of a block without its factor sqrt(D), which is in the decoding weights."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SMALLEST_NORM)


@dataclass(frozen=True, eq=False)
class _Weights:
    """A policy prepared for decoding, with every factor that would else be multiplied for each token: sqrt(D) of the norms,
    1 / sqrt(D/H) of attention, 1 / temperature. `embedding_LVD` [places, R * V, D]: token and place in one table."""

    embedding_LVD: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    head: Tensor
    ones: Tensor

    @classmethod
    def of(cls, parameters: Parameters, config: PolicyConfig, temperature: float) -> _Weights:
        root = config.width**0.5
        embedding_LRVD = parameters["embedding"] + parameters["position"].transpose(0, 1).unsqueeze(2)
        layers = []
        for layer in range(config.layers):
            weight = {name: parameters[f"layers.{layer}.{name}"] for name in BLOCK_WEIGHTS}
            qkv = weight["qkv"] * root
            qkv[..., : config.width] *= config.head_width**-0.5
            layers.append((qkv, weight["attention_out"], weight["mlp_in"] * root, weight["mlp_out"]))
        head = parameters["head"] * (root / temperature)
        return cls(embedding_LRVD.flatten(1, 2), layers, head, head.new_ones(config.head_width))
