"""Log-probabilities and entropies of tokens from hidden states, without all logits in memory at once.

The vocabulary projection is made for some places at a time, and made again for the backward pass, so that the peak of memory
does not grow with tokens times vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**24
"""Logits of one chunk, about: 64 MiB in float32."""

Project = Callable[[Tensor], Tensor]
"""Hidden states [T, D] -> logits [T, V]."""


def chunked_log_probs(
    project: Project,
    hidden_TD: Tensor,
    target_T: Tensor,
    vocabulary_size: int,
    dtype: torch.dtype,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target after its hidden state, and the entropy there, both [T] in nats and of `dtype`.

    `entropy_gradient`: whether a gradient will be taken through the entropies; else they are constants to autograd.
    """
    places = max(LOGITS_AT_ONCE // vocabulary_size, 1)

    def of_chunk(hidden_CD: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = project(hidden_CD)
        scaled_CV = logits_CV if temperature == 1.0 else logits_CV / temperature
        log_probs_CV = torch.log_softmax(scaled_CV, -1, dtype=dtype)  # autocast ends here
        log_prob_C = log_probs_CV.gather(1, target_C[:, None])[:, 0]
        spread_CV = log_probs_CV if entropy_gradient else log_probs_CV.detach()
        return log_prob_C, -(spread_CV.exp() * spread_CV).sum(-1)

    found = []
    for hidden_CD, target_C in zip(hidden_TD.split(places), target_T.split(places), strict=True):
        if torch.is_grad_enabled():
            found.append(checkpoint(of_chunk, hidden_CD, target_C, use_reentrant=False))
        else:
            found.append(of_chunk(hidden_CD, target_C))
    log_prob, entropy = zip(*found, strict=True)
    return torch.cat(log_prob), torch.cat(entropy)
