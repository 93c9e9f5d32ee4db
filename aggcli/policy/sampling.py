"""Sampling from a stack of policies with a key-value cache, where rows share what they have in common.

One uniform number per (sample, position) decides each token through the inverse of the cumulative distribution, so the
noise of a sample does not depend on its place in a batch, a stack or a rank, nor on which other samples have finished.

The policy is asked once for each *prefix* that unfinished rows stand at: a prompt, and the tokens drawn so far. Rows of a
prompt begin at one prefix and part where their noise makes them draw different tokens; rows that have ended need none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aggcli.policy.groups import groups_of, threads_for
from aggcli.policy.kernels import SMALLEST_NORM, attended
from aggcli.policy.protocol import Sampled, joined_runs
from aggcli.policy.transformer import (
    BLOCK_WEIGHTS,
    Attend,
    Parameters,
    PolicyConfig,
    check_length,
    run_of,
)

ROWS_AT_ONCE = 1280
"""Rows of the runs of one decoding loop: enough that the work outweighs the calls, few enough for a core's cache."""
COMPACT_AT = 0.7
"""Prefixes that no row needs any more leave once at most this share of them is still wanted,"""
FEWEST_SAVED = 16
"""and where these are at least so many in the stack: fewer cost less to read than to leave."""
CHECK_EVERY = {"cpu": 1}
"""Tokens between two looks at which prefixes are wanted. A look waits for the device: with one after every token rows share
their prefixes, with fewer each has its own from its first token on."""
OTHER_DEVICES = 8
"""`CHECK_EVERY` on a device that is not in it."""


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
        runs, rows, _ = uniforms_RBL.shape
        for group in groups_of(runs, max(ROWS_AT_ONCE // max(rows, 1), 1), parameters["head"].device):
            decoder = _Decoder(run_of(parameters, group), config, prompts_RPL[group], uniforms_RBL[group], temperature)
            parts.append(_decoded(decoder, end_id, pad_id))
    return joined_runs(parts, pad_id)  # outside of inference mode: a gradient may be taken through what was drawn


def _decoded(decoder: _Decoder, end_id: int, pad_id: int) -> Sampled:
    check_every = CHECK_EVERY.get(decoder.ended_RB.device.type, OTHER_DEVICES)
    for t in range(decoder.length):
        token_RB = decoder.draw(t)
        if t + 1 == decoder.length:
            break
        decoder.note_ended(token_RB == end_id)
        if (t + 1) % check_every == 0:
            if not decoder.look(token_RB, t):
                break
        elif t == 0:
            decoder.part(token_RB)
        else:
            decoder.stay(token_RB)
        decoder.read(t)
    return decoder.finished(end_id, pad_id)


class _Decoder:
    """`rows` rows of each run, and the prefixes that they stand at: `prefixes` of each run, the same number in every run, flat
    as N = R * prefixes. `prefix_RB`: the prefix of each row, and `prefixes` itself, which is none, once the row has ended;
    `can_part`: whether two rows may stand at one prefix.

    Caches are place-first, [2, P + L, N, H, d], so that a new token is one write and attention reads one block.
    """

    def __init__(
        self, parameters: Parameters, config: PolicyConfig, prompts_RPL: Tensor, uniforms_RBL: Tensor, temperature: float
    ) -> None:
        self.runs, self.rows, self.length = uniforms_RBL.shape
        self.prefixes, self.prompt_length = prompts_RPL.shape[1:]
        check_length(config, self.prompt_length + self.length)
        device, dtype = parameters["head"].device, parameters["head"].dtype
        self.config, self.weights = config, _Weights.of(parameters, config, temperature)
        self.run_offset_R1 = torch.arange(self.runs, device=device)[:, None]
        below_1 = 1 - torch.finfo(dtype).eps / 2  # rounding must not make a number 1
        self.noise_LRB = uniforms_RBL.to(device, dtype).clamp(max=below_1).permute(2, 0, 1).contiguous()
        row_B = torch.arange(self.rows, device=device)
        self.prefix_RB = (row_B // (self.rows // self.prefixes)).repeat(self.runs, 1)
        self.ended_RB = torch.zeros_like(self.prefix_RB, dtype=torch.bool)
        self.drawn: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.token_RN = self.prefix_RB[:, :0]
        self.can_part = True
        self._prefill(prompts_RPL)

    def _prefill(self, prompts_RPL: Tensor) -> None:
        """Read each prompt once."""
        R, G, P = prompts_RPL.shape
        self.caches: list[Tensor] = []

        def attend(layer: int, qkv_RTX: Tensor) -> Tensor:
            part = qkv_RTX.view(R * G, P, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
            mixed_BLD, (_, keys, _) = attended(part, scale=1.0)
            cache = keys.new_empty(2, P + self.length, R * G, *part.shape[2::2])
            cache[:, :P] = keys[:, :, :, :P].permute(0, 3, 1, 2, 4)
            self.caches.append(cache)
            return mixed_BLD.view(R, G * P, -1)

        places, rows, _ = self.weights.embedding_LVD.shape
        at_RGP = prompts_RPL + self.run_offset_R1[:, None] * self.config.vocabulary_size
        at_RGP += torch.arange(P, device=at_RGP.device) * rows
        x_RTD = self.weights.embedding_LVD.view(places * rows, -1).index_select(0, at_RGP.flatten()).view(R, G * P, -1)
        self._predict(self._through(x_RTD, attend).view(R, G, P, -1)[:, :, -1])

    def draw(self, t: int) -> Tensor:
        """The token of response position t of each row [R, B], by inverse CDF; ended rows draw one that is cut off."""
        log_probs_RVN = torch.log_softmax(self.logits_RVN, 1)
        below_RVN = log_probs_RVN.exp().cumsum(1)
        at_RB = self.prefix_RB.clamp(max=self.prefixes - 1)
        below_RVB = below_RVN.gather(2, at_RB[:, None].expand(-1, below_RVN.shape[1], -1))
        threshold_R1B = self.noise_LRB[t][:, None] * below_RVB[:, -1:]  # the sum is 1 up to rounding
        token_RB = (below_RVB <= threshold_R1B).sum(1).clamp_(max=below_RVB.shape[1] - 1)
        self.drawn.append(token_RB)
        self.log_probs.append(log_probs_RVN.flatten(1).gather(1, at_RB.add_(token_RB, alpha=self.prefixes)))
        return token_RB

    def note_ended(self, ended_RB: Tensor) -> None:
        self.ended_RB |= ended_RB
        self.prefix_RB = self.prefix_RB.masked_fill(self.ended_RB, self.prefixes)

    def part(self, token_RB: Tensor) -> None:
        """A prefix of its own for each row, before any token is read."""
        self._move(self.prefix_RB.clamp(max=self.prefixes - 1), token_RB, filled=self.prompt_length)
        row_B = torch.arange(self.rows, device=token_RB.device)
        self.prefix_RB = torch.where(self.ended_RB, self.rows, row_B)

    def stay(self, token_RB: Tensor) -> None:
        """Every prefix grows by the token that its rows have drawn, in its place."""
        token_RN = token_RB.new_zeros(self.runs, self.prefixes + 1)  # the last takes what rows draw that have ended
        self.token_RN = token_RN.scatter_(1, self.prefix_RB, token_RB)[:, :-1]

    def look(self, token_RB: Tensor, t: int) -> bool:
        """Go on from one prefix for each that an unfinished row stands at after these tokens, at response position t; False
        where no row goes on. The prefixes before stay where they are, each with its token, if none of them parts and few can
        be saved."""
        if not self.can_part and self.runs * self.prefixes < FEWEST_SAVED:
            self.stay(token_RB)
            return not self.ended_RB.all()
        V, none = self.config.vocabulary_size, self.prefixes * self.config.vocabulary_size
        drawn_RB, prefix_RB = token_RB.cpu().numpy(), self.prefix_RB.cpu().numpy()
        key_RB = np.where(prefix_RB < self.prefixes, prefix_RB * V + drawn_RB, none)
        run_R1 = np.arange(self.runs)[:, None]
        is_wanted_RK = np.zeros((self.runs, none + 1), bool)
        is_wanted_RK[run_R1, key_RB] = True
        is_wanted_RK[:, none] = False
        wanted_R = is_wanted_RK.sum(-1)
        wanted = int(wanted_R.max())
        if not wanted:
            return False
        self.can_part = bool(((key_RB < none).sum(-1) > wanted_R).any())
        has_parted = is_wanted_RK[:, :none].reshape(-1, V).sum(-1).max() > 1
        saved = (self.prefixes - wanted) * self.runs
        if not has_parted and (wanted > COMPACT_AT * self.prefixes or saved < FEWEST_SAVED):
            self.stay(token_RB)
            return True
        new_RK = is_wanted_RK.cumsum(-1) - 1
        run_K, key_K = is_wanted_RK.nonzero()
        key_RN = np.zeros((self.runs, wanted), np.int64)
        key_RN[run_K, new_RK[run_K, key_K]] = key_K
        new_RK[:, none] = wanted
        found = (torch.from_numpy(value).to(self.noise_LRB.device) for value in (*divmod(key_RN, V), new_RK[run_R1, key_RB]))
        parent_RN, token_RN, self.prefix_RB = found
        self._move(parent_RN, token_RN, filled=self.prompt_length + t)
        return True

    def _move(self, parent_RN: Tensor, token_RN: Tensor, filled: int) -> None:
        """Go on from the prefixes `parent_RN`, each with its token; the first `filled` places of the caches are read."""
        kept_N = (parent_RN + self.run_offset_R1 * self.prefixes).flatten()
        self.caches = [_kept(cache, kept_N, filled) for cache in self.caches]
        self.token_RN, self.prefixes = token_RN, token_RN.shape[1]

    def read(self, t: int) -> None:
        """Feed the tokens just drawn, at response position t, and compute the next logits."""
        place = self.prompt_length + t
        token_RN = self.token_RN + self.run_offset_R1 * self.config.vocabulary_size
        x_RND = self.weights.embedding_LVD[place].index_select(0, token_RN.flatten()).view(self.runs, self.prefixes, -1)
        self._predict(self._through(x_RND, lambda layer, qkv_RNX: self._attend(qkv_RNX, self.caches[layer], place)))

    def _through(self, x_RTD: Tensor, attend: Attend) -> Tensor:
        """All blocks: embeddings [R, T, D] -> the direction of the hidden states [R, T, D]."""
        for layer, (qkv, attention_out, mlp_in, mlp_out) in enumerate(self.weights.layers):
            x_RTD = torch.baddbmm(x_RTD, attend(layer, torch.bmm(_direction(x_RTD), qkv)), attention_out)
            x_RTD = torch.baddbmm(x_RTD, torch.bmm(_direction(x_RTD), mlp_in).relu_(), mlp_out)
        return _direction(x_RTD)

    def _predict(self, direction_RND: Tensor) -> None:
        """The logits of every prefix's next token."""
        self.logits_RVN = torch.bmm(self.weights.head.mT, direction_RND.mT)

    def _attend(self, qkv_RNX: Tensor, cache: Tensor, place: int) -> Tensor:
        """One query a prefix over the cache; products and sums, since the matrix products would be tiny."""
        heads, width = self.config.heads, self.config.head_width
        parts_3NHd = qkv_RNX.view(-1, 3, heads, width).transpose(0, 1)
        cache.select(1, place).copy_(parts_3NHd.narrow(0, 1, 2))
        key_LNHd, value_LNHd = cache.narrow(1, 0, place + 1).unbind(0)
        product = (key_LNHd * parts_3NHd.select(0, 0)).view(-1, width)
        weight_LNH1 = torch.mv(product, self.weights.ones).view(place + 1, -1, heads, 1).softmax(0)
        return (value_LNHd * weight_LNH1).sum(0).view(self.runs, self.prefixes, -1)

    def finished(self, end_id: int, pad_id: int) -> Sampled:
        """Everything drawn, cut at each row's first end token."""
        tokens_RBL, log_probs_RBL = torch.stack(self.drawn, -1), torch.stack(self.log_probs, -1)
        is_end_RBL = tokens_RBL == end_id
        after_end_RBL = is_end_RBL.cumsum(-1) - is_end_RBL.long() > 0
        return Sampled(
            tokens_RBL=tokens_RBL.masked_fill(after_end_RBL, pad_id),
            length_RB=(~after_end_RBL).sum(-1),
            log_probs_RBL=log_probs_RBL.masked_fill(after_end_RBL, 0.0),
            truncated_RB=~is_end_RBL.any(-1),
        )


def _kept(cache: Tensor, kept_N: Tensor, filled: int) -> Tensor:
    """The prefixes `kept_N` of a cache; places not written yet stay unwritten."""
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
            qkv[..., : config.width].mul_(config.head_width**-0.5)
            layers.append((qkv, weight["attention_out"], weight["mlp_in"] * root, weight["mlp_out"]))
        head = parameters["head"] * (root / temperature)
        return cls(embedding_LRVD.flatten(1, 2), layers, head, head.new_ones(config.head_width))
