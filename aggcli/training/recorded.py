"""Training on rollouts that somebody else recorded: each file is a step, and a policy learns from its tokens.

The vocabulary of the small policy is the dump's own ids, renumbered. Its old log-probabilities are made by the policy before
its update, as trainers do; the gap to the recorded ones is reported as sampler mismatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.errors import RolloutError
from aggcli.measurement.selection import selected
from aggcli.objective.step import with_advantages
from aggcli.policy.log_probs import response_log_probs
from aggcli.policy.protocol import Policy
from aggcli.policy.transformer import Parameters, PolicyConfig
from aggcli.rollouts.batch import RolloutBatch, distinct
from aggcli.training.rollout import SampledRollouts
from aggcli.training.stack import RunSpec


@dataclass(frozen=True, eq=False)
class Recorded:
    """Recorded steps ready to train on: `batches`, for the small policy with token ids renumbered 0, 1, ... by rising id.

    `generated`: the prompt groups of each before --drop-zero-variance; `notes`: what was left out, in words.
    """

    batches: list[RolloutBatch]
    vocabulary_size: int
    longest: int
    generated: list[int]
    notes: tuple[str, ...] = ()


def prepared(batches: Iterable[RolloutBatch], config: RunConfig, vocabulary_size: int | None = None) -> Recorded:
    """Set advantages, and renumber token ids where they are not those of a model, whose `vocabulary_size` is given. For a model
    the recorded log-probabilities of the trainer stay the old policy's; of none, and for the small policy, they are made anew.

    Raises `RolloutError` for a step without token ids or without advantages, and for an id outside of the vocabulary.
    """
    ready, generated = [], []
    asked = "--train" if vocabulary_size is None else "--model"
    notes: dict[str, None] = {}
    left_out: list[str] = []
    for batch in batches:
        if batch.token_ids_U is None:
            raise RolloutError(f"{batch.name}: {asked} needs token ids for every sample (tokens), which the file lacks")
        advantages_T, origin = with_advantages(batch, config.objective)
        if advantages_T is None:
            raise RolloutError(f"{batch.name}: {asked} needs advantages; {origin}")
        if int(batch.total_length_S.sub(batch.response_length_S).min()) < 1:
            raise RolloutError(f"{batch.name}: {asked} needs at least one prompt token before every response")
        streams = (batch.rollout_log_probs_T, batch.old_log_probs_T, batch.log_probs_T)
        sampled_T = next((stream for stream in streams if stream is not None), None)
        found = selected(dataclasses.replace(batch, advantages_T=advantages_T), config)
        if found.batch is None:
            left_out.append(f"{batch.name}: {'; '.join(found.notes)}")
            continue
        groups = distinct(found.batch.group_S[found.batch.group_S >= 0])
        generated.append(groups if found.generated is None else found.generated)
        notes.update(dict.fromkeys(f"{batch.name}: {note}" for note in found.notes))
        ready.append(
            dataclasses.replace(
                found.batch,
                rollout_log_probs_T=sampled_T,
                log_probs_T=None,
                old_log_probs_T=None if vocabulary_size is None else _of_the_trainer(found.batch),
                ref_log_probs_T=None,
                entropy_T=None,
            )
        )
    if not ready:
        raise RolloutError(f"{'; '.join(left_out)}; leave the flag out, or give rollouts whose rewards differ in a group")
    longest = max(int(batch.total_length_S.max()) for batch in ready)
    if vocabulary_size is not None:
        for batch in ready:
            _need_known_ids(batch, vocabulary_size)
        return Recorded(ready, vocabulary_size, longest, generated, (*left_out, *notes))
    known = torch.cat([batch.token_ids_U for batch in ready if batch.token_ids_U is not None]).unique()
    renumbered = [dataclasses.replace(batch, token_ids_U=torch.searchsorted(known, batch.token_ids_U)) for batch in ready]
    return Recorded(renumbered, known.numel(), longest, generated, (*left_out, *notes))


def _of_the_trainer(batch: RolloutBatch) -> Tensor | None:
    return batch.log_probs_T if batch.old_log_probs_T is None else batch.old_log_probs_T


def _need_known_ids(batch: RolloutBatch, vocabulary_size: int) -> None:
    assert batch.token_ids_U is not None
    wrong_U = (batch.token_ids_U < 0) | (batch.token_ids_U >= vocabulary_size)
    if wrong_U.any():
        at = int(wrong_U.nonzero()[0])
        sample = int(torch.searchsorted(batch.total_length_S.cumsum(0), at, right=True))
        raise RolloutError(
            f"{batch.sample_name(sample)}: token id {int(batch.token_ids_U[at])} is outside of the model's vocabulary of"
            f" {vocabulary_size}; give the model that sampled these rollouts"
        )


@dataclass(frozen=True)
class RecordedSampler:
    """In place of sampling: step i is recorded step i, for every run of the stack alike."""

    recorded: Recorded

    def step(self, runs: Sequence[RunSpec], policy: Policy, step: int) -> SampledRollouts:
        """The rollouts of a step, once for each run, run after run."""
        batch = self.recorded.batches[step]
        count, samples = len(runs), batch.num_samples
        copies = batch.select(torch.arange(samples).repeat(count))
        run_S = torch.arange(count).repeat_interleave(samples)
        rollouts, groups = int(batch.rollout_S.max()) + 1, int(batch.group_S.max()) + 1
        stacked = dataclasses.replace(
            copies,
            run_S=run_S,
            rollout_S=copies.rollout_S + run_S * rollouts,
            group_S=torch.where(copies.group_S >= 0, copies.group_S + run_S * groups, copies.group_S),
            labels=dataclasses.replace(copies.labels, rollouts=(), groups=()),
            notes=(),
        )
        kept = distinct(batch.group_S[batch.group_S >= 0])
        return SampledRollouts(stacked, padded_tokens(stacked), [self.recorded.generated[step]] * count, [kept] * count)


def padded_tokens(batch: RolloutBatch) -> Tensor:
    """Prompt and response ids of each sample, right-padded with id 0; [S, L]."""
    assert batch.token_ids_U is not None
    longest = int(batch.total_length_S.max())
    real_SL = torch.arange(longest) < batch.total_length_S[:, None]
    tokens_SL = torch.zeros(batch.num_samples, longest, dtype=torch.int64)
    tokens_SL[real_SL] = batch.token_ids_U
    return tokens_SL


def supervised(initial: Parameters, policy: PolicyConfig, recorded: Recorded, steps: int, lr: float) -> Parameters:
    """A warm start on the dump's own responses: `steps` AdamW steps on the mean negative log-likelihood of trained tokens."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in initial.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        batch = recorded.batches[step % len(recorded.batches)]
        prompt_RB = (batch.total_length_S - batch.response_length_S)[None]
        log_prob_RBC, _ = response_log_probs(
            leaves, policy, padded_tokens(batch)[None], prompt_RB, batch.response_length_S[None]
        )
        real_BC = torch.arange(log_prob_RBC.shape[-1]) < batch.response_length_S[:, None]
        log_prob_T = log_prob_RBC[0][real_BC]
        tokens = int(batch.loss_mask_T.sum())
        loss = -torch.where(batch.loss_mask_T, log_prob_T, 0.0).sum() / max(tokens, 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in leaves.items()}
