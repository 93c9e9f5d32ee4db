"""A small causal transformer with a leading run axis: R independent parameter sets, one batched forward.

Pre-norm blocks, learned positions, ReLU. The norms (RMS) have no gain: each is followed by a matrix that can hold it.
Every matrix product is one batched product over [R, tokens, width] x [R, width, width'], and every layout of the tokens
(padded rows, packed rows, one token of decoding, a context-parallel shard) is only another `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from aggcli.errors import SettingError
from aggcli.policy.kernels import Attention, through_blocks

Parameters = dict[str, Tensor]
"""Names to tensors, each with a leading run axis [R, ...]."""

Attend = Callable[[Tensor], Tensor]
"""Attention: queries, keys and values of a layer [R, T, 3 * D] -> [R, T, D]."""

Gather = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(keys [R, B, H, L, D/H], values, positions [R, B, L]) of this rank -> the same three of the whole sequence."""

BLOCK_WEIGHTS = ("qkv", "attention_out", "mlp_in", "mlp_out")
MLP_RATIO = 4


@dataclass(frozen=True)
class PolicyConfig:
    """The shape of a policy, fixed for all runs of a stack."""

    vocabulary_size: int
    max_length: int
    """Most tokens of prompt and response together."""
    layers: int = 2
    width: int = 64
    heads: int = 4

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "max_length", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise SettingError(f"policy {name} {getattr(self, name)}: must be at least 1")
        if self.width % self.heads:
            raise SettingError(f"policy width {self.width}: must be a multiple of its {self.heads} heads")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, without the run axis."""
    width, hidden = config.width, MLP_RATIO * config.width
    found = {"embedding": (config.vocabulary_size, width), "position": (config.max_length, width)}
    for layer in range(config.layers):
        found |= {
            f"layers.{layer}.qkv": (width, 3 * width),
            f"layers.{layer}.attention_out": (width, width),
            f"layers.{layer}.mlp_in": (width, hidden),
            f"layers.{layer}.mlp_out": (hidden, width),
        }
    return found | {"head": (width, config.vocabulary_size)}


def initial_parameters(
    config: PolicyConfig, generator: Generator, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Parameters:
    """Random parameters of one run (R = 1): Gaussian, of variance 1 / inputs, smaller for embeddings and where a block ends.

    `generator` is a CPU generator. The numbers are drawn in float32 whatever `dtype` is, so that every precision and
    device starts at the same point.
    """
    parameters = {}
    for name, shape in shapes(config).items():
        scale = 0.3 if name in ("embedding", "position") else shape[0] ** -0.5
        if name.endswith("_out"):
            scale *= (2 * config.layers) ** -0.5
        parameters[name] = (torch.randn((1, *shape), generator=generator) * scale).to(device, dtype)
    return parameters


def stacked(parameters: Parameters, runs: int) -> Parameters:
    """`runs` copies of the parameters of one run, each of its own: [1, ...] -> [runs, ...], contiguous."""
    return {name: value.repeat(runs, *[1] * (value.dim() - 1)) for name, value in parameters.items()}


def run_of(parameters: Parameters, run: int | slice) -> Parameters:
    """The parameters of one run or of a slice of runs, as views, keeping the run axis."""
    chosen = run if isinstance(run, slice) else slice(run, run + 1)
    return {name: value[chosen] for name, value in parameters.items()}


def hidden(
    parameters: Parameters,
    config: PolicyConfig,
    tokens_RBL: Tensor,
    positions: Tensor | None = None,
    gather: Gather | None = None,
) -> Tensor:
    """The final hidden states [R, B, L, D] of right-padded rows, causal.

    `positions` ([L] or [R, B, L], default 0, 1, 2, ...) tell where in its sequence each token stands, so that a rank can
    hold any shard of it; `gather` then turns this rank's keys, values and positions into those of the whole sequence. A
    token sees every key whose position is at most its own: padding must stand after every real token, at
    `config.max_length` or more. Without `gather` rows must be whole and in order.
    """
    R, B, L = tokens_RBL.shape
    if positions is None:
        check_length(config, L)
        positions = torch.arange(L, device=tokens_RBL.device)
    positions_RBL = positions.expand(R, B, L)
    attend = attend_rows(config, B) if gather is None else attend_gathered(config, positions_RBL, gather)
    x_RTD = embedded(parameters, tokens_RBL.reshape(R, B * L), positions_RBL.reshape(R, B * L))
    return body(parameters, config, x_RTD, ByAutograd(attend)).view(R, B, L, config.width)


def logits(parameters: Parameters, config: PolicyConfig, tokens_RBL: Tensor) -> Tensor:
    """Next-token logits [R, B, L, V] of right-padded rows, causal."""
    return project(parameters, hidden(parameters, config, tokens_RBL))


def project(parameters: Parameters, hidden: Tensor) -> Tensor:
    """Hidden states [R, ..., D] -> logits [R, ..., V]."""
    R, D, V = parameters["head"].shape
    return torch.bmm(hidden.reshape(R, -1, D), parameters["head"]).view(*hidden.shape[:-1], V)


def embedded(parameters: Parameters, tokens_RT: Tensor, positions_RT: Tensor) -> Tensor:
    """Token plus position embeddings [R, T, D]; positions past the table (padding) take its last row."""
    R, V, D = parameters["embedding"].shape
    N = parameters["position"].shape[1]
    run_R1 = torch.arange(R, device=tokens_RT.device)[:, None]
    token_RTD = embedding(tokens_RT + run_R1 * V, parameters["embedding"].reshape(R * V, D))
    place_RTD = embedding(positions_RT.clamp(max=N - 1) + run_R1 * N, parameters["position"].reshape(R * N, D))
    return token_RTD + place_RTD


def body(
    parameters: Parameters, config: PolicyConfig, x_RTD: Tensor, attention: Attention, wanted: Tensor | None = None
) -> Tensor:
    """All blocks and the final norm: embeddings [R, T, D] -> hidden states [R, T, D] of the tokens that are `wanted`."""
    weights = [[parameters[f"layers.{layer}.{name}"] for name in BLOCK_WEIGHTS] for layer in range(config.layers)]
    return through_blocks(x_RTD, weights, attention, wanted)


@dataclass(frozen=True)
class ByAutograd:
    """See `Attention`: one whose gradient is taken by torch."""

    attend: Attend

    def forward(self, qkv_RTX: Tensor, wanted: Tensor | None, *, keeps: bool) -> tuple[Tensor, Sequence[Tensor]]:
        with torch.set_grad_enabled(keeps):
            own_RTX = qkv_RTX.requires_grad_(keeps)
            mixed_RTD = self.attend(own_RTX)
            mixed_RKD = mixed_RTD if wanted is None else mixed_RTD.index_select(1, wanted)
        return mixed_RKD.detach(), [own_RTX, mixed_RKD]

    def backward(self, grad_RKD: Tensor, wanted: Tensor | None, kept: Sequence[Tensor]) -> Tensor:
        own_RTX, mixed_RKD = kept
        return torch.autograd.grad(mixed_RKD, own_RTX, grad_RKD, retain_graph=True)[0]  # it goes with what is kept


def attend_rows(config: PolicyConfig, rows: int) -> Attend:
    """Causal attention within each of `rows` whole rows of equal (padded) length a run."""

    def attend(qkv_RTX: Tensor) -> Tensor:
        R, T, _ = qkv_RTX.shape
        query, key, value = heads(config, qkv_RTX.reshape(R * rows, T // rows, -1))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(R, T, config.width)

    return attend


def heads(config: PolicyConfig, qkv_BLX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [B, H, L, D/H], as views."""
    B, L, _ = qkv_BLX.shape
    query, key, value = qkv_BLX.view(B, L, 3, config.heads, config.head_width).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def attend_gathered(config: PolicyConfig, positions_RBL: Tensor, gather: Gather) -> Attend:
    def attend(qkv_RTX: Tensor) -> Tensor:
        R, B, L = positions_RBL.shape
        query, key, value = heads(config, qkv_RTX.view(R * B, L, -1))
        split = (R, B, *key.shape[1:])
        key, value, key_positions = gather(key.reshape(split), value.reshape(split), positions_RBL)
        seen = key_positions[:, :, None, :] <= positions_RBL[:, :, :, None]
        dtype = query.dtype  # ranks may exchange keys and values in another
        key, value = (of_all.flatten(0, 1).to(dtype) for of_all in (key, value))
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=seen.flatten(0, 1)[:, None])
        return mixed.transpose(1, 2).reshape(R, B * L, config.width)

    return attend


def check_length(config: PolicyConfig, length: int) -> None:
    if length > config.max_length:
        raise SettingError(f"rows of {length} tokens: the policy holds at most {config.max_length}; raise its max_length")
