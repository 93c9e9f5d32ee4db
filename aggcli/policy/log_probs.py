"""Log-probabilities of responses: the forward pass that training differentiates."""

from __future__ import annotations

import torch
from torch import Tensor

from aggcli.policy.packed_attention import PackedAttention
from aggcli.policy.packing import Packing, pack
from aggcli.policy.transformer import Parameters, PolicyConfig, body, check_length, embedded, hidden


def response_log_probs(
    parameters: Parameters,
    config: PolicyConfig,
    tokens_RBL: Tensor,
    prompt_length: int | Tensor,
    length_RB: Tensor | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each response token, and the entropy of the distribution it came from, [R, B, C], in nats.

    Rows are prompt then response, right-padded: `prompt_length` tokens of prompt (one number, or one a row [R, B]), then
    `length_RB` tokens of response (default: up to the end of the row). Column c belongs to response token c; columns past
    a row's response are 0. C is the longest response, L minus the shortest prompt where lengths are not given.

    With one prompt length and with `length_RB`, what rows begin with alike is read once, and none of their padding is; a run
    reads as many tokens as the one that has most. The vocabulary projection is computed only where a response token is
    predicted.
    """
    check_length(config, tokens_RBL.shape[-1])
    R, B, L = tokens_RBL.shape
    if isinstance(prompt_length, int) and length_RB is not None:
        packing = pack(tokens_RBL.cpu(), prompt_length, length_RB.cpu()).to(parameters["head"].device)
        return packed_log_probs(parameters, config, packing, temperature=temperature, entropy=entropy)
    prompt_RB = torch.as_tensor(prompt_length, device=tokens_RBL.device).expand(R, B)
    if length_RB is None:
        length_RB = L - prompt_RB
    longest = L - prompt_length if isinstance(prompt_length, int) else int(length_RB.max())
    column_C = torch.arange(longest, device=tokens_RBL.device)
    valid_RBC = column_C < length_RB[:, :, None]
    place_RBC = (prompt_RB[:, :, None] + column_C).clamp(max=L - 1)
    hidden_RBLD = hidden(parameters, config, tokens_RBL)
    index = (place_RBC - 1)[..., None].expand(-1, -1, -1, config.width)
    log_prob, spread = log_probs_of(
        parameters, hidden_RBLD.gather(2, index), tokens_RBL.gather(2, place_RBC), temperature=temperature, entropy=entropy
    )
    return _where(valid_RBC, log_prob), None if spread is None else _where(valid_RBC, spread)


def log_probs_of(
    parameters: Parameters, hidden: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of `targets` [R, ...] after the hidden states [R, ..., D], and the entropy there, both [R, ...]."""
    log_probs_RVT = _log_softmax(parameters, hidden.flatten(1, -2), temperature)
    log_prob_RT = log_probs_RVT.gather(1, targets.flatten(1).unsqueeze(1)).squeeze(1)
    return log_prob_RT.view(targets.shape), _entropy(log_probs_RVT).view(targets.shape) if entropy else None


def packed_log_probs(
    parameters: Parameters, config: PolicyConfig, packing: Packing, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`response_log_probs` of rows that `pack` has laid out; several passes over the same rows can share a packing."""
    G, P = packing.prompts, packing.prompt_length
    x_RTD = embedded(parameters, packing.tokens_RT, packing.positions_RT)
    token_T = torch.arange(x_RTD.shape[1], device=x_RTD.device)
    predicting = torch.cat([token_T[P - 1 : G * P : P], token_T[G * P :]])
    hidden_RTD = body(parameters, config, x_RTD, PackedAttention(packing, config.heads), predicting)
    log_probs_RVT = _log_softmax(parameters, hidden_RTD, temperature)
    shape, at_RBC, places = packing.target_RBC.shape, packing.predicted_at_RBC, log_probs_RVT.shape[-1]
    index_RN = (packing.target_RBC * places + at_RBC).flatten(1)
    log_prob_RBC = log_probs_RVT.flatten(1).gather(1, index_RN).view(shape)
    if not entropy:
        return _where(packing.valid_RBC, log_prob_RBC), None
    entropy_RBC = _entropy(log_probs_RVT).gather(1, at_RBC.flatten(1)).view(shape)
    return _where(packing.valid_RBC, log_prob_RBC), _where(packing.valid_RBC, entropy_RBC)


def _log_softmax(parameters: Parameters, hidden_RTD: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [R, V, T]: with tokens innermost, sums over a small vocabulary run at full vector width."""
    logits_RVT = torch.bmm(parameters["head"].mT, hidden_RTD.mT)
    scaled_RVT = logits_RVT if temperature == 1.0 else logits_RVT / temperature
    return torch.log_softmax(scaled_RVT, 1, dtype=parameters["head"].dtype)  # autocast ends here


def _entropy(log_probs_RVT: Tensor) -> Tensor:
    return -(log_probs_RVT.exp() * log_probs_RVT).sum(1)


def _where(valid: Tensor, value: Tensor) -> Tensor:
    return torch.where(valid, value, 0.0)
