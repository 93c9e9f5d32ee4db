"""The training loop of a stack of runs. `Trainer.steps` is the sentence; the rest are its words."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.config import RunConfig
from aggcli.layout.schedule import Layout
from aggcli.layout.steps import Part, need_whole_groups
from aggcli.measurement.report import Values
from aggcli.policy.protocol import Policy
from aggcli.rollouts.batch import RolloutBatch
from aggcli.training.checkpoint import Checkpoint
from aggcli.training.memory import begin_peak, peak_bytes
from aggcli.training.report import Reporter, RunReport, by_run, not_reportable
from aggcli.training.rollout import SampledRollouts, StepSource
from aggcli.training.rows import optimizer_step_positions, rows_of_rank
from aggcli.training.stack import RunSpec
from aggcli.training.step import Gradient, StepTokens, all_log_probs, step_gradient, step_tokens
from aggcli.world import ALONE, World


@dataclass(frozen=True)
class BrokenRun:
    """A run whose numbers stopped being finite: it trains no further, and the others go on."""

    run: RunSpec
    step: int
    what: str


@dataclass(frozen=True)
class TrainedStep:
    """One rollout step of the stack: a list of run reports for each optimizer step in it, of the runs that took it, and what
    happened to runs."""

    step: int
    optimizer_steps: list[list[RunReport]]
    diverged: list[BrokenRun]
    seconds: float
    tokens: int
    peak_bytes: int
    """See `aggcli.training.memory`."""
    rollouts: dict[str, RolloutBatch]
    """What each run sampled, with token ids and the policy's own log-probabilities, where --save-rollouts asks for it."""


class Trainer:
    """Trains a stack. Every rank of the world takes the same steps."""

    def __init__(
        self,
        runs: Sequence[RunSpec],
        policy: Policy,
        config: RunConfig,
        sampler: StepSource,
        layout: Layout,
        reporter: Reporter,
        world: World,
    ) -> None:
        self.runs, self.config, self.world = list(runs), config, world
        self.policy, self.sampler, self.layout, self.reporter = policy, sampler, layout, reporter
        self.sharing = world.split(layout.cp) if layout.cp > 1 else ALONE
        self.step = 0
        self.taken = [0] * len(self.runs)  # optimizer steps of each
        self.broken: dict[str, str] = {}
        self.gone: list[BrokenRun] = []

    def steps(self) -> Iterator[TrainedStep]:
        """Train to the end, one rollout step at a time."""
        while self.step < self.config.training.steps and self.runs:
            began = time.perf_counter()
            begin_peak(self.policy.device)
            with self.policy.threads():
                rollouts = self.sampler.step(self.runs, self.policy, self.step)
                saved = self._saved(rollouts) if self.config.training.save_rollouts else {}
                done = list(self._optimizer_steps(rollouts))
                diverged = self._drop_diverged()
            self.step += 1
            tokens = int(rollouts.batch.response_length_S.sum())
            seconds = time.perf_counter() - began
            yield TrainedStep(self.step - 1, done, diverged, seconds, tokens, peak_bytes(self.policy.device), saved)

    def first_update(self) -> Tensor:
        """Take the first optimizer step, and give the 2-norm of each run's change of parameters, float64 [R]."""
        before_RQ = self.policy.flat_RQ.clone()
        rollouts = self.sampler.step(self.runs, self.policy, self.step)
        next(self._optimizer_steps(rollouts))
        return self.policy.shards.norm(self.policy.flat_RQ - before_RQ)

    def parts(self, step: int) -> Iterator[tuple[RolloutBatch, Tensor, Tensor | None, Tensor | None]]:
        """The optimizer steps of a rollout step, taken by nobody: rollouts, token ids [S, L], and the log-probabilities [T] of
        the old policy (None: those of the policy itself) and of the reference where there is a KL term."""
        rollouts = self.sampler.step(self.runs, self.policy, step)
        reference_T = self._log_probs(rollouts, reference=True) if self._uses_reference() else None
        for positions in optimizer_step_positions(rollouts.batch, len(self.runs), self.config.layout.global_batch_size):
            old_T, ref_T = (
                _at(rollouts.batch, positions, value_T) for value_T in (rollouts.batch.old_log_probs_T, reference_T)
            )
            yield rollouts.batch.select(positions), rollouts.tokens_SL[positions], old_T, ref_T

    def _optimizer_steps(self, rollouts: SampledRollouts) -> Iterator[list[RunReport]]:
        """Every optimizer step of a rollout batch: its parts, as often as --num-iterations says. A run takes those that it has
        samples in, or one that is empty, as it would alone."""
        parts = optimizer_step_positions(rollouts.batch, len(self.runs), self.config.layout.global_batch_size)
        for rule in [run.rule for run in self.runs if run.rule.needs_groups][:1]:
            need_whole_groups(rollouts.batch, [Part("", positions.tolist()) for positions in parts], rule)
        groups = self.reporter.groups(rollouts.batch, len(self.runs))
        several = len(parts) * self.config.training.num_iterations > 1
        old_T = rollouts.batch.old_log_probs_T  # of recorded rollouts
        if old_T is None and several:
            old_T = self._log_probs(rollouts)
        reference_T = self._log_probs(rollouts, reference=True) if self._uses_reference() else None
        has_samples_R = torch.bincount(rollouts.batch.run_S, minlength=len(self.runs)) > 0
        for _ in range(self.config.training.num_iterations):
            for part, positions in enumerate(parts):
                step = rollouts.batch.select(positions)
                takes_R = torch.bincount(step.run_S, minlength=len(self.runs)) > 0
                if part == 0:
                    takes_R |= ~has_samples_R
                takers = takes_R.nonzero().flatten().tolist()
                given = step_tokens(step, self.runs, self.layout, torch.float64).beside(
                    _at(rollouts.batch, positions, old_T), _at(rollouts.batch, positions, reference_T)
                )
                yield self._update(takers, step, rollouts.tokens_SL[positions], given, groups, self._sampled(rollouts))
                for taker in takers:
                    self.taken[taker] += 1

    def _update(
        self,
        takers: Sequence[int],
        step: RolloutBatch,
        tokens_SL: Tensor,
        given: StepTokens,
        groups: Sequence[Values],
        sampled: Sequence[Values],
    ) -> list[RunReport]:
        """Gradient, update and report of one optimizer step. A run without a trained token, or whose gradient is not
        finite, does not step."""
        rows = rows_of_rank(step, len(self.runs), self.layout, self.world)
        objective = self.config.objective
        found = step_gradient(
            self.policy, rows, step, tokens_SL, _as(given, self.policy.dtype), objective, self.world, self.sharing
        )
        self.policy.step(found.gradient_RQ, found.norm_R, self._stepping(step, found))
        for name, what in not_reportable(step, self.runs, given, found).items():
            self.broken.setdefault(name, what)
        extra = [{"grad_norm": norm, **values} for norm, values in zip(found.norm_R.tolist(), sampled, strict=True)]
        return self.reporter.step(
            self.taken,
            {at: self.runs[at] for at in takers if self.runs[at].name not in self.broken},
            step,
            given,
            found,
            groups,
            extra,
            is_checked=self._is_checked(),
        )

    def _is_checked(self) -> bool:
        """Whether this rollout step is evaluated under every layout: the first, the last, and each before a checkpoint."""
        training, done = self.config.training, self.step + 1
        due = self.step == 0 or done == training.steps or done % training.checkpoint_every == 0
        return training.layout_records and due

    def _stepping(self, step: RolloutBatch, found: Gradient) -> Tensor:
        finite_R = self.policy.shards.finite(found.gradient_RQ, found.norm_R)
        for run, finite in zip(self.runs, finite_R.tolist(), strict=True):
            if not finite:
                self.broken.setdefault(run.name, "its gradient is not finite")
        tokens_R = torch.zeros(len(self.runs), dtype=torch.int64).index_add_(0, step.run_S, step.mask_sum_S)
        return finite_R & (tokens_R > 0)

    def _sampled(self, rollouts: SampledRollouts) -> list[Values]:
        found: list[Values] = [
            {"groups_generated": generated, "groups_kept": kept}
            for generated, kept in zip(rollouts.generated_R, rollouts.kept_R, strict=True)
        ]
        if rollouts.failed_R is None:
            return found
        return [{**one, "checker_errors": failed} for one, failed in zip(found, rollouts.failed_R, strict=True)]

    # -- other policies ---------------------------------------------------------------------------------------------

    def _log_probs(self, rollouts: SampledRollouts, *, reference: bool = False) -> Tensor:
        rows = rows_of_rank(rollouts.batch, len(self.runs), self.layout, self.world)
        return all_log_probs(self.policy, rows, rollouts.batch, rollouts.tokens_SL, self.world, reference=reference)

    def _saved(self, rollouts: SampledRollouts) -> dict[str, RolloutBatch]:
        batch, tokens_SL = rollouts.batch, rollouts.tokens_SL
        real_SL = torch.arange(tokens_SL.shape[1]) < batch.total_length_S[:, None]
        whole = batch.derived(token_ids_U=tokens_SL[real_SL], old_log_probs_T=self._log_probs(rollouts))
        own = zip(self.runs, by_run(whole, len(self.runs)), strict=True)
        return {run.name: batch for run, batch in own if batch.num_samples}

    def _uses_reference(self) -> bool:
        return any(run.objective.kl_coef for run in self.runs)

    # -- runs that end early ----------------------------------------------------------------------------------------

    def _drop_diverged(self) -> list[BrokenRun]:
        """Drop the runs whose gradient or parameters are not finite, before they are sampled from again."""
        finite_R = self.policy.shards.finite(self.policy.flat_RQ)
        for run, finite in zip(self.runs, finite_R.tolist(), strict=True):
            if not finite:
                self.broken.setdefault(run.name, "its parameters are not finite")
        fine = torch.tensor([run.name not in self.broken for run in self.runs])
        gone = [BrokenRun(run, self.step, self.broken[run.name]) for run in self.runs if run.name in self.broken]
        if gone:
            self.keep(fine.nonzero().flatten())
            self.gone += gone
        return gone

    def keep(self, runs_R: Tensor) -> None:
        """Go on with these runs (positions) only."""
        self.runs = [self.runs[at] for at in runs_R.tolist()]
        self.taken = [self.taken[at] for at in runs_R.tolist()]
        self.policy.keep(runs_R)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Everything needed to go on bit for bit."""
        names = [run.name for run in self.runs]
        gone = {one.run.name: (one.step, one.what) for one in self.gone}
        return Checkpoint(self.step, list(self.taken), names, gone, self.policy.state())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of the same settings."""
        names = [run.name for run in self.runs]
        self.gone = [BrokenRun(self.runs[names.index(name)], *when) for name, when in checkpoint.gone.items()]
        self.keep(torch.tensor([names.index(name) for name in checkpoint.runs], dtype=torch.int64))
        self.policy.load(checkpoint.tensors)
        self.step, self.taken = checkpoint.step, list(checkpoint.optimizer_steps)


def _at(batch: RolloutBatch, positions: Tensor, value_T: Tensor | None) -> Tensor | None:
    """A per-token array of the batch at the tokens of the samples at `positions`."""
    from aggcli.rollouts.batch import ragged_positions

    return None if value_T is None else value_T[ragged_positions(batch.response_length_S, positions)]


def _as(given: StepTokens, dtype: torch.dtype) -> StepTokens:
    """The same numbers in the arithmetic of the policy."""
    present = {item.name: getattr(given, item.name) for item in dataclasses.fields(given)}
    return dataclasses.replace(given, **{name: value.to(dtype) for name, value in present.items() if value is not None})
