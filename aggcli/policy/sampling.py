"""Sampling from a stack of policies with a key-value cache, where rows share what they have in common.

One uniform number per (sample, position) decides each token through the inverse of the cumulative distribution, so the
noise of a sample does not depend on its place in a batch, a stack or a rank, nor on which other samples have finished.

The policy is asked once for each *prefix* that unfinished rows stand at: a prompt, and the tokens drawn so far. Rows of a
prompt begin at one prefix and part where their noise makes them draw different tokens; rows that have ended need none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from aggcli.policy.groups import groups_of, threads_for
from aggcli.policy.kernels import FEWEST_PLACES, SMALLEST_NORM, attended
from aggcli.policy.protocol import Sampled, joined_runs
from aggcli.policy.transformer import (
    BLOCK_WEIGHTS,
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
RUNS_LEAVE_AT = 0.5
"""Runs of which no row goes on leave where at most this share of the runs is left: the weights of these are copied."""
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
    check_every = CHECK_EVERY.get(decoder.prefix_M.device.type, OTHER_DEVICES)
    for t in range(decoder.length):
        token_M = decoder.draw(t)
        if t + 1 == decoder.length:
            break
        if (t + 1) % check_every == 0:
            if not decoder.look(end_id, t, check_every):
                break
        elif t == 0:
            decoder.part(token_M)
        else:
            decoder.stay(token_M)
        decoder.read(t)
    return decoder.finished(end_id, pad_id)


class _Decoder:
    """The rows that are drawn, flat as M, of the `rows` of each of `all_runs`, and the prefixes that they stand at: `prefixes`
    of each of the `runs` that are read, flat as N.

    `row_M`: which rows those are; `prefix_M`: the prefix of each; `can_part`: whether two rows may stand at one prefix;
    `token_N`: what each prefix reads next; `first_token_R1`: the first token of each run that is read, in the embeddings of one
    place; `drawn`: of each position, which rows drew what, and which row of its `logits` from.

    Caches are place-first, [2, P + L, N, H, d], so that a new token is one write and attention reads one block.
    """

    def __init__(
        self, parameters: Parameters, config: PolicyConfig, prompts_RPL: Tensor, uniforms_RBL: Tensor, temperature: float
    ) -> None:
        self.all_runs, self.rows, self.length = uniforms_RBL.shape
        self.runs = self.all_runs
        self.prefixes, self.prompt_length = prompts_RPL.shape[1:]
        check_length(config, self.prompt_length + self.length)
        device, dtype = parameters["head"].device, parameters["head"].dtype
        self.config, self.weights = config, _Weights.of(parameters, config, temperature)
        self.first_token_R1 = torch.arange(self.runs, device=device)[:, None] * config.vocabulary_size
        below_1 = 1 - torch.finfo(dtype).eps / 2  # rounding must not make a number 1
        self.noise_ML = uniforms_RBL.to(device, dtype).clamp(max=below_1).flatten(0, 1)
        self.row_M = torch.arange(self.all_runs * self.rows, device=device)
        self.prefix_M = self.row_M // (self.rows // self.prefixes)
        self.drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        self.logits: list[Tensor] = []
        self.token_N = self.prefix_M[:0]
        self.can_part = True
        self._prefill(prompts_RPL)

    def _prefill(self, prompts_RPL: Tensor) -> None:
        """Read each prompt once."""
        R, G, P = prompts_RPL.shape
        self.caches: list[Tensor] = []

        def attend(layer: int, qkv_RTX: Tensor) -> Tensor:
            part = qkv_RTX.view(R * G, P, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
            cache = part.new_empty(2, P + self.length, R * G, *part.shape[2::2])
            cache[:, :P] = part[1:].permute(0, 3, 1, 2, 4)
            self.caches.append(cache)
            pieces = qkv_RTX.view(-1, filled, 3, self.config.heads, self.config.head_width).permute(2, 0, 3, 1, 4)
            mixed_NLD, *_ = attended(pad(pieces, (0, 0, 0, len(seen) - filled)), seen, scale=self.weights.score)
            return mixed_NLD[:, :filled].reshape(R, G * P, -1)

        filled = P * max((several for several in range(1, FEWEST_PLACES // P + 1) if G % several == 0), default=1)
        place = torch.arange(max(filled, FEWEST_PLACES), device=prompts_RPL.device)
        sees = (place[:, None] // P == place // P) & (place[:, None] >= place)  # one prompt of a piece no other, nor what pads
        seen = torch.where(sees, 0.0, float("-inf")).to(self.noise_ML.dtype)
        places, rows, _ = self.weights.embedding_LVD.shape
        at_RGP = prompts_RPL + self.first_token_R1[:, None]
        at_RGP += torch.arange(P, device=at_RGP.device) * rows
        x_RTD = self.weights.embedding_LVD.view(places * rows, -1).index_select(0, at_RGP.flatten()).view(R, G * P, -1)
        self._predict(self._through(x_RTD, attend, slice(P - 1, None, P)))

    def draw(self, t: int) -> Tensor:
        """The token of response position t of each row [M], by inverse CDF; one that has ended since the last look draws one
        that is cut off."""
        below_MV = self.logits_NV.softmax(-1).cumsum(-1).index_select(0, self.prefix_M)
        last = below_MV.shape[1] - 1
        threshold_M1 = self.noise_ML[:, t : t + 1] * below_MV.narrow(1, last, 1)  # the sum is 1 up to rounding
        token_M = torch.searchsorted(below_MV, threshold_M1, right=True).clamp_(max=last).flatten()
        self.drawn.append((self.row_M, token_M, self.prefix_M))
        self.logits.append(self.logits_NV)
        return token_M

    def part(self, token_M: Tensor) -> None:
        """A prefix of its own for each row, before any is read."""
        self._move(self.prefix_M, token_M, filled=self.prompt_length)
        self.prefix_M = self.row_M

    def stay(self, token_M: Tensor) -> None:
        """Every prefix grows by the token that its rows have drawn, in its place, also where these have ended."""
        self.token_N = token_M.new_zeros(self.runs * self.prefixes).scatter_(0, self.prefix_M, token_M)

    def look(self, end_id: int, t: int, tokens: int) -> bool:
        """Go on with the rows that have not ended in the last `tokens` tokens, up to response position t, from one prefix for
        each that one of them stands at; False where no row goes on. The prefixes before stay where they are, each with its
        token, if none of them parts and few can be saved. On the host, whose small operations are quicker than torch's."""
        *before, drawn_M = (token_M.cpu().numpy() for _, token_M, _ in self.drawn[-tokens:])
        goes_on_M, prefix_M = drawn_M != end_id, self.prefix_M.cpu().numpy()
        for earlier_M in before:
            goes_on_M &= earlier_M != end_id
        going_M = goes_on_M.nonzero()[0]
        if not going_M.size:
            return False
        have_ended = going_M.size < drawn_M.size
        if have_ended:
            drawn_M, prefix_M, kept_M = drawn_M[going_M], prefix_M[going_M], self._there(going_M)
            self.row_M, self.noise_ML = self.row_M.index_select(0, kept_M), self.noise_ML.index_select(0, kept_M)
            self.prefix_M = self._there(prefix_M)
        if not (self.can_part or (have_ended and self._some_leave(self._rows_in_runs(prefix_M)))):
            self.stay(self._there(drawn_M))  # as many prefixes are wanted as rows go on
            return True
        V = self.config.vocabulary_size
        key_M = prefix_M * V + drawn_M
        is_wanted_RK = np.zeros((self.runs, self.prefixes * V), bool)
        is_wanted_RK.ravel()[key_M] = True
        wanted_R = is_wanted_RK.sum(-1)
        self.can_part = drawn_M.size > wanted_R.sum()
        has_parted = is_wanted_RK.reshape(-1, V).sum(-1).max() > 1
        if not (has_parted or self._some_leave(wanted_R)):
            self.stay(self._there(drawn_M))
            return True
        going_R = wanted_R.nonzero()[0] if self._runs_leave(wanted_R) else np.arange(self.runs)
        wanted_R, wanted = wanted_R[going_R], int(wanted_R.max())
        key_W = is_wanted_RK.ravel().nonzero()[0]
        run_W = np.repeat(np.arange(going_R.size), wanted_R)
        new_W = np.arange(key_W.size) + (run_W * wanted - (wanted_R.cumsum() - wanted_R)[run_W])
        key_N = np.repeat(going_R * self.prefixes * V, wanted)  # what pads goes on from the first
        key_N[new_W] = key_W
        new_K = np.zeros(is_wanted_RK.size, np.int64)
        new_K[key_W] = new_W
        if going_R.size < self.runs:
            kept_R, self.runs = self._there(going_R), going_R.size
            self.weights, self.first_token_R1 = self.weights.of_runs(kept_R), self.first_token_R1.index_select(0, kept_R)
        parent_N, token_N = divmod(key_N, V)
        self._move(self._there(parent_N), self._there(token_N), self.prompt_length + t)
        self.prefix_M = self._there(new_K[key_M])
        return True

    def _rows_in_runs(self, prefix_M: np.ndarray) -> np.ndarray:
        """How many rows are drawn of each run [R]."""
        return np.bincount(prefix_M // self.prefixes, minlength=self.runs)

    def _there(self, value: np.ndarray) -> Tensor:
        """An array of the host on the decoder's device."""
        return torch.from_numpy(value).to(self.row_M.device)

    def _runs_leave(self, wanted_R: np.ndarray) -> bool:
        """Whether runs leave of which no prefix is wanted."""
        return bool(np.count_nonzero(wanted_R) <= RUNS_LEAVE_AT * self.runs)

    def _some_leave(self, wanted_R: np.ndarray) -> bool:
        """Whether prefixes or runs leave where so many prefixes of each run are wanted."""
        there, kept = self.prefixes, int(wanted_R.max())
        return self._runs_leave(wanted_R) or (kept <= COMPACT_AT * there and (there - kept) * self.runs >= FEWEST_SAVED)

    def _move(self, parent_N: Tensor, token_N: Tensor, filled: int) -> None:
        """Go on from the prefixes `parent_N`, each with its token; the first `filled` places of the caches are read."""
        self.caches = [_kept(cache, parent_N, filled) for cache in self.caches]
        self.token_N, self.prefixes = token_N, len(token_N) // self.runs

    def read(self, t: int) -> None:
        """Feed the tokens just drawn, at response position t, and compute the next logits."""
        place = self.prompt_length + t
        at_RN = self.token_N.view(self.runs, -1) + self.first_token_R1
        x_RND = self.weights.embedding_LVD[place].index_select(0, at_RN.flatten()).view(self.runs, self.prefixes, -1)
        self._predict(self._through(x_RND, lambda layer, qkv_RNX: self._attend(qkv_RNX, self.caches[layer], place)))

    def _through(self, x_RTD: Tensor, attend: Callable[[int, Tensor], Tensor], wanted: slice = slice(None)) -> Tensor:
        """All blocks: embeddings [R, T, D] -> the direction of the hidden states [R, T, D] of the tokens that are wanted."""
        for layer, (qkv, attention_out, mlp_in, mlp_out) in enumerate(self.weights.layers):
            mixed_RTD = attend(layer, torch.bmm(_direction(x_RTD), qkv))
            if layer + 1 == self.config.layers:
                x_RTD, mixed_RTD = x_RTD[:, wanted], mixed_RTD[:, wanted]
            x_RTD = torch.baddbmm(x_RTD, mixed_RTD, attention_out, alpha=self.weights.root)
            x_RTD = torch.baddbmm(x_RTD, torch.bmm(_direction(x_RTD), mlp_in).relu_(), mlp_out, alpha=self.weights.root)
        return _direction(x_RTD)

    def _predict(self, direction_RND: Tensor) -> None:
        """The logits of every prefix's next token."""
        self.logits_NV = torch.bmm(direction_RND, self.weights.head).flatten(0, 1)

    def _attend(self, qkv_RNX: Tensor, cache: Tensor, place: int) -> Tensor:
        """One query a prefix over the cache; products and sums, since the matrix products would be tiny."""
        heads, width = self.config.heads, self.config.head_width
        parts_3NHd = qkv_RNX.view(-1, 3, heads, width).transpose(0, 1)
        cache.select(1, place).copy_(parts_3NHd.narrow(0, 1, 2))
        key_LNHd, value_LNHd = cache.narrow(1, 0, place + 1).unbind(0)
        product = (key_LNHd * parts_3NHd.select(0, 0)).view(-1, width)
        weight_LNH1 = torch.mv(product, self.weights.scores).view(place + 1, -1, heads, 1).softmax(0)
        return (value_LNHd * weight_LNH1).sum(0).view(self.runs, self.prefixes, -1)

    def finished(self, end_id: int, pad_id: int) -> Sampled:
        """Everything drawn, cut at each row's first end token."""
        rows, length, counts = self.all_runs * self.rows, len(self.drawn), [len(row_M) for row_M, _, _ in self.drawn]
        before = list(accumulate((len(logits_NV) for logits_NV in self.logits), initial=0))[:-1]
        row_D, token_D, at_D = (torch.cat(parts) for parts in zip(*self.drawn, strict=True))
        place_D = row_D * length + self._there(np.repeat(np.arange(length), counts))
        log_probs_NV = torch.log_softmax(torch.cat(self.logits), -1)
        at_D = (at_D + self._there(np.repeat(before, counts))) * log_probs_NV.shape[1] + token_D
        tokens_SL = token_D.new_zeros(rows * length).index_copy_(0, place_D, token_D).view(rows, length)
        log_probs_D = log_probs_NV.flatten().take(at_D)
        log_probs_SL = log_probs_D.new_zeros(rows * length).index_copy_(0, place_D, log_probs_D).view(rows, length)
        is_end_SL = tokens_SL == end_id
        after_end_SL = is_end_SL.cumsum(-1) - is_end_SL.long() > 0
        of_rows = (self.all_runs, self.rows)
        return Sampled(
            tokens_RBL=tokens_SL.masked_fill(after_end_SL, pad_id).view(*of_rows, -1),
            length_RB=(~after_end_SL).sum(-1).view(of_rows),
            log_probs_RBL=log_probs_SL.masked_fill(after_end_SL, 0.0).view(*of_rows, -1),
            truncated_RB=~is_end_SL.any(-1).view(of_rows),
        )


def _kept(cache: Tensor, kept_N: Tensor, filled: int) -> Tensor:
    """The prefixes `kept_N` of a cache; places not written yet stay unwritten."""
    kept = cache.new_empty(*cache.shape[:2], kept_N.numel(), *cache.shape[3:])
    for old, new in zip(*(both.narrow(1, 0, filled).unbind() for both in (cache, kept)), strict=True):
        torch.index_select(old, 1, kept_N, out=new)
    return kept


def _direction(x: Tensor) -> Tensor:
    """`x / |x|`: the norm of a block without its factor sqrt(D), which every product behind it is linear in."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SMALLEST_NORM)


@dataclass(frozen=True, eq=False)
class _Weights:
    """A policy as decoding reads it. `embedding_LVD` [places, R * V, D]: token and place in one table; `layers`: those of each
    block; `head`: with the factors sqrt(D), see `_direction`, and 1 / temperature. Queries, keys and values have no sqrt(D):
    `score` is what a product of two is multiplied by, `scores` [D/H] sums products times that, and `root` is sqrt(D)."""

    embedding_LVD: Tensor
    layers: list[tuple[Tensor, ...]]
    head: Tensor
    scores: Tensor
    score: float
    root: float

    @classmethod
    def of(cls, parameters: Parameters, config: PolicyConfig, temperature: float) -> _Weights:
        root, score = config.width**0.5, config.width * config.head_width**-0.5
        token_RVD, place_LR1D = parameters["embedding"], parameters["position"].transpose(0, 1).unsqueeze(2)
        embedding_LRVD = token_RVD.new_empty(len(place_LR1D), *token_RVD.shape)  # else torch lays the sum out run by run
        torch.add(token_RVD, place_LR1D, out=embedding_LRVD)
        layers = [tuple(parameters[f"layers.{layer}.{name}"] for name in BLOCK_WEIGHTS) for layer in range(config.layers)]
        head = parameters["head"] * (root / temperature)
        return cls(embedding_LRVD.flatten(1, 2), layers, head, head.new_full((config.head_width,), score), score, root)

    def of_runs(self, kept_R: Tensor) -> _Weights:
        """Those of some of the runs; the embeddings stay those of all."""
        layers = [tuple(weight.index_select(0, kept_R) for weight in of_block) for of_block in self.layers]
        return dataclasses.replace(self, layers=layers, head=self.head.index_select(0, kept_R))
