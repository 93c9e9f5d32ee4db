"""Sampling one rollout step for every run of a stack, and judging it: prompts, responses, rewards, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.objective.advantages import are_equal, group_advantages
from aggcli.policy.protocol import Noise, Policy, Sampled
from aggcli.rollouts.batch import Labels, RolloutBatch
from aggcli.rollouts.fields import TRUNCATED
from aggcli.tasks import Prompts, Task
from aggcli.training.stack import RunSpec
from aggcli.world import World


@dataclass(frozen=True, eq=False)
class SampledRollouts:
    """One rollout step of a stack.

    `batch`: the samples, run after run, with their advantages; `tokens_SL`: prompt and response ids, right-padded;
    `generated_R`, `kept_R`: prompt groups sampled and used by each run; `failed_R`: sampled responses of each run whose checker
    raised an exception, None where no checker can.
    """

    batch: RolloutBatch
    tokens_SL: Tensor
    generated_R: list[int]
    kept_R: list[int]
    failed_R: list[int] | None = None


@dataclass(frozen=True, eq=False)
class _Round:
    """One round of sampling: rows [R, B, ...] with their rewards; `first`: the index of the round's first prompt."""

    prompts_RBL: Tensor
    prompt_length_RB: Tensor
    tokens_RBL: Tensor
    length_RB: Tensor
    log_probs_RBL: Tensor
    truncated_RB: Tensor
    reward_RB: Tensor
    failed_R: Tensor


class StepSource(Protocol):
    """Where a trainer's rollouts come from: sampled, or recorded by somebody else."""

    def step(self, runs: Sequence[RunSpec], policy: Policy, step: int) -> SampledRollouts:
        """The rollouts of a step, for every run of the stack."""
        ...


@dataclass(frozen=True)
class Sampler:
    """Draws rollout steps. Noise and prompts belong to (seed, step, index), so modes of one seed are paired, and neither
    the stack nor the ranks matter."""

    task: Task
    config: RunConfig
    response_limit: int
    world: World

    def step(self, runs: Sequence[RunSpec], policy: Policy, step: int) -> SampledRollouts:
        """Sample, judge and, with dynamic sampling, refill until every run has its groups or the bound is reached."""
        training = self.config.training
        wanted = training.rollout_batch_size
        kept: list[list[tuple[int, int]]] = [[] for _ in runs]  # (round, group in it) of each run
        generated = [0] * len(runs)
        rounds: list[_Round] = []
        most = training.dynamic_sampling_rounds if training.dynamic_sampling else 1
        while len(rounds) < most and any(len(groups) < wanted for groups in kept):
            done = self._round(runs, policy, step, len(rounds))
            usable_RP = self._usable(done.reward_RB)
            for run, groups in enumerate(kept):
                if len(groups) < wanted:
                    generated[run] += wanted
                    new = usable_RP[run].nonzero().flatten().tolist()
                    groups += [(len(rounds), group) for group in new[: wanted - len(groups)]]
            rounds.append(done)
        return self._assembled(rounds, kept, generated)

    def _usable(self, reward_RB: Tensor) -> Tensor:
        """Groups [R, G] to train on: all, or with dynamic sampling those of unequal rewards."""
        reward_RPN = reward_RB.view(reward_RB.shape[0], -1, self.config.training.n_samples_per_prompt)
        if not self.config.training.dynamic_sampling:
            return torch.ones(reward_RPN.shape[:2], dtype=torch.bool)
        return ~are_equal(reward_RPN.amin(-1), reward_RPN.amax(-1))

    def _round(self, runs: Sequence[RunSpec], policy: Policy, step: int, number: int) -> _Round:
        training = self.config.training
        G, n = training.rollout_batch_size, training.n_samples_per_prompt
        seeds = list(dict.fromkeys(run.seed for run in runs))
        row_of_run = torch.tensor([seeds.index(run.seed) for run in runs])
        drawn = [self.task.prompts(seed, step, G, first=number * G) for seed in seeds]
        asked = stacked_prompts(drawn, self.task.pad_id)
        prompts_RPL, length_RP, answer_RP = (value[row_of_run] for value in (asked.tokens_SL, asked.length_S, asked.answer_S))
        noise = Noise(tuple(run.seed for run in runs), step, number * G * n, G * n)
        sampled = self._sampled(policy, prompts_RPL, length_RP, noise)
        found = self.task.verify(answer_RP.repeat_interleave(n, 1), sampled.tokens_RBL, sampled.length_RB)
        return _Round(
            prompts_RPL.repeat_interleave(n, 1),
            length_RP.repeat_interleave(n, 1),
            sampled.tokens_RBL,
            sampled.length_RB,
            sampled.log_probs_RBL,
            sampled.truncated_RB,
            found.reward,
            found.failed.sum(-1),
        )

    def _sampled(self, policy: Policy, prompts_RPL: Tensor, prompt_length_RP: Tensor, noise: Noise) -> Sampled:
        """Each rank samples its own prompts; everyone receives all responses, on the CPU."""
        n = self.config.training.n_samples_per_prompt
        bounds = [rank * prompts_RPL.shape[1] // self.world.size for rank in range(self.world.size + 1)]
        start, end = bounds[self.world.rank], bounds[self.world.rank + 1]
        drawn = policy.sample(
            prompts_RPL[:, start:end],
            prompt_length_RP[:, start:end],
            noise.rows(start * n, end * n),
            self.response_limit,
            end_id=self.task.end_id,
            pad_id=self.task.pad_id,
        )
        mine = [drawn.tokens_RBL, drawn.length_RB, drawn.log_probs_RBL, drawn.truncated_RB]
        parts = [part for part in self.world.everyone(mine) if part[0].shape[1]]
        longest = max(part[0].shape[-1] for part in parts)
        tokens, lengths, log_probs, truncated = zip(*parts, strict=True)  # a run that has diverged samples NaN: shown as 0
        log_probs = [value.nan_to_num(0.0, 0.0, 0.0) for value in log_probs]
        return Sampled(
            torch.cat([_padded(value, longest, self.task.pad_id) for value in tokens], 1),
            torch.cat(lengths, 1),
            torch.cat([_padded(value, longest, 0.0) for value in log_probs], 1),
            torch.cat(truncated, 1),
        )

    # -- assembling -------------------------------------------------------------------------------------------------

    def _assembled(self, rounds: list[_Round], kept: list[list[tuple[int, int]]], generated: list[int]) -> SampledRollouts:
        n, B = self.config.training.n_samples_per_prompt, rounds[0].length_RB.shape[1]
        longest = max(done.tokens_RBL.shape[-1] for done in rounds)
        rows = [run * B * len(rounds) + round_ * B + group * n for run, groups in enumerate(kept) for round_, group in groups]
        at_S = (torch.tensor(rows, dtype=torch.int64)[:, None] + torch.arange(n)).flatten()
        is_everything = len(at_S) == len(kept) * B * len(rounds)  # in its order

        def joined(values: list[Tensor]) -> Tensor:
            together_S = torch.cat(values, 1).flatten(0, 1) if len(values) > 1 else values[0].flatten(0, 1)
            return together_S if is_everything else together_S[at_S]

        response_SL = joined([_padded(done.tokens_RBL, longest, self.task.pad_id) for done in rounds])
        log_probs_SL = joined([_padded(done.log_probs_RBL, longest, 0.0) for done in rounds])
        widest = max(done.prompts_RBL.shape[-1] for done in rounds)
        prompts_SL = joined([_padded(done.prompts_RBL, widest, self.task.pad_id) for done in rounds])
        prompt_length_S = joined([done.prompt_length_RB for done in rounds])
        length_S = joined([done.length_RB for done in rounds])
        run_S = torch.repeat_interleave(torch.arange(len(kept)), torch.tensor([len(groups) * n for groups in kept]))
        batch = self._batch(
            run_S,
            length_S,
            prompt_length_S,
            joined([done.reward_RB for done in rounds]),
            log_probs_SL[torch.arange(longest) < length_S[:, None]],
            joined([done.truncated_RB for done in rounds]),
        )
        tokens_SL = _joined_rows(prompts_SL, prompt_length_S, response_SL, self.task.pad_id)
        failed = torch.stack([done.failed_R for done in rounds]).sum(0).tolist() if self.task.can_fail else None
        return SampledRollouts(batch, tokens_SL, generated, [len(groups) for groups in kept], failed)

    def _batch(
        self,
        run_S: Tensor,
        length_S: Tensor,
        prompt_length_S: Tensor,
        reward_S: Tensor,
        log_probs_T: Tensor,
        truncated_S: Tensor,
    ) -> RolloutBatch:
        samples = run_S.numel()
        trained_S = ~truncated_S if self.config.objective.mask_truncated else torch.ones_like(truncated_S)
        group_S = torch.arange(samples) // self.config.training.n_samples_per_prompt
        advantage_S = group_advantages(
            reward_S.double() + self._overlong(length_S),
            torch.arange(samples),
            group_S,
            divide_by_std=self.config.objective.advantages != "mean_only",
        )
        return RolloutBatch(
            response_length_S=length_S,
            total_length_S=length_S + prompt_length_S,
            loss_mask_T=torch.repeat_interleave(trained_S, length_S),
            rollout_S=torch.arange(samples),
            group_S=group_S,
            run_S=run_S,
            position_S=torch.arange(samples),
            reward_S=reward_S.double(),
            rollout_log_probs_T=log_probs_T,
            advantages_T=torch.repeat_interleave(advantage_S, length_S),
            status_S=tuple(TRUNCATED if cut else "completed" for cut in truncated_S.tolist()),
            labels=Labels(),
            name="the rollout step",
        )

    def _overlong(self, length_S: Tensor) -> Tensor:
        """DAPO eq. 13: 0 up to limit - buffer, then linear down to -1 at the limit; 0 without a buffer."""
        buffer = self.config.training.overlong_buffer
        if not buffer:
            return torch.zeros(length_S.shape, dtype=torch.float64)
        return ((self.response_limit - buffer - length_S).double() / buffer).clamp(-1.0, 0.0)


def stacked_prompts(drawn: Sequence[Prompts], pad_id: int) -> Prompts:
    """The prompts of several seeds, as many of each: every field with a leading axis of seeds."""
    longest = max(prompts.tokens_SL.shape[1] for prompts in drawn)
    return Prompts(
        torch.stack([_padded(prompts.tokens_SL, longest, pad_id) for prompts in drawn]),
        torch.stack([prompts.length_S for prompts in drawn]),
        torch.stack([prompts.answer_S for prompts in drawn]),
    )


def _padded(value_RBL: Tensor, length: int, fill: float) -> Tensor:
    missing = length - value_RBL.shape[-1]
    return torch.nn.functional.pad(value_RBL, (0, missing), value=fill) if missing else value_RBL


def _joined_rows(prompts_SL: Tensor, prompt_length_S: Tensor, response_SL: Tensor, pad_id: int) -> Tensor:
    """Each response right after its prompt, right-padded, [S, L]."""
    joined_SL = torch.cat([prompts_SL, response_SL], 1)
    if not prompt_length_S.numel() or int(prompt_length_S.min()) == prompts_SL.shape[1]:
        return joined_SL
    prompt_S1, P = prompt_length_S[:, None], prompts_SL.shape[1]
    place_L = torch.arange(joined_SL.shape[1])
    from_SL = torch.where(place_L < prompt_S1, place_L, place_L + P - prompt_S1)
    exists_SL = from_SL < joined_SL.shape[1]
    return torch.where(exists_SL, joined_SL.gather(1, from_SL.clamp(max=joined_SL.shape[1] - 1)), pad_id)
