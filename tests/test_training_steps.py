"""Several optimizer steps a rollout batch, and what each of them reports."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from aggcli import grid
from aggcli.config import DEFAULT_LAYOUTS
from aggcli.errors import RolloutError
from aggcli.jobs.steps import Replay
from aggcli.measurement.report import StepReport
from aggcli.policy.transformer import logits
from aggcli.rollouts.batch import RolloutBatch
from aggcli.tasks.protocol import END
from aggcli.training.loop import Trainer
from aggcli.training.report import RunReport
from aggcli.world import ALONE
from tests.fixtures import MODES
from tests.train_worker import runs_of, setup_of

SEVERAL: dict[str, Any] = {"global_batch_size": 8, "num_iterations": 2, "steps": 2, "lr": 3e-3}


@dataclasses.dataclass
class Watched:
    """A trainer whose every optimizer step is written down: what went in, what came out, and the parameters before it."""

    trainer: Trainer
    steps: list[tuple[RolloutBatch, Any, Any]] = dataclasses.field(default_factory=list)
    before: list[Tensor] = dataclasses.field(default_factory=list)
    tokens: list[Tensor] = dataclasses.field(default_factory=list)
    reports: list[list[RunReport]] = dataclasses.field(default_factory=list)
    rollout_steps: list[int] = dataclasses.field(default_factory=list)


def _watched(setup: grid.Setup, modes: tuple[str, ...]) -> Watched:
    trainer = grid.trainer_of(setup, runs_of(setup, modes), ALONE)
    watched = Watched(trainer)
    update, measure = trainer._update, trainer.reporter.step

    def noted_update(takers: list[int], step: RolloutBatch, tokens_SL: Tensor, *rest: Any) -> list[RunReport]:
        watched.before.append(trainer.policy.state()["parameters"].clone())
        watched.tokens.append(tokens_SL)
        return update(takers, step, tokens_SL, *rest)

    def noted_report(
        numbers: list[int], runs: Any, step: RolloutBatch, given: Any, found: Any, *rest: Any, **how: Any
    ) -> list[RunReport]:
        watched.steps.append((step, given, found))
        return measure(numbers, runs, step, given, found, *rest, **how)

    object.__setattr__(trainer, "_update", noted_update)
    object.__setattr__(trainer.reporter, "step", noted_report)
    for done in trainer.steps():
        for reports in done.optimizer_steps:
            watched.reports.append(reports)
            watched.rollout_steps.append(done.step)
    return watched


@pytest.fixture(scope="module")
def several() -> Watched:
    return _watched(setup_of(**SEVERAL, kl_coef=0.1, log_correct_samples=True), MODES)


def test_eight_of_sixteen_rollouts_twice_over_are_four_optimizer_steps_a_rollout_step(several: Watched) -> None:
    assert several.rollout_steps == [0] * 4 + [1] * 4
    for reports in several.reports:
        assert [report.run.mode for report in reports] == list(MODES)
        assert all(report.values["rollouts"] == 8 and report.values["prompts"] == 2 for report in reports)
        assert all(report.values["groups"] == 4 for report in reports), "group numbers are over the rollout batch"


def _log_probs(setup_of_trainer: Trainer, flat_RQ: Tensor, step: RolloutBatch, tokens_SL: Tensor) -> Tensor:
    """Log-probabilities of the response tokens under given numbers, run by run, by a naive forward; [T]."""
    sampler: Any = setup_of_trainer.sampler
    policy: Any = setup_of_trainer.policy
    found = []
    for run in range(flat_RQ.shape[0]):
        parameters, start = {}, 0
        for name, value in policy.start.initial.items():
            parameters[name] = flat_RQ[run, start : start + value.numel()].view(value.shape)
            start += value.numel()
        mine_S = step.run_S == run
        length_S, rows_SL = step.response_length_S[mine_S], tokens_SL[mine_S]
        all_SCV = logits(parameters, policy.start.shape, rows_SL[None])[0, :, sampler.task.prompt_length - 1 : -1].log_softmax(
            -1
        )
        real_SC = torch.arange(all_SCV.shape[1]) < length_S[:, None]
        found.append(all_SCV.gather(2, rows_SL[:, sampler.task.prompt_length :, None])[..., 0][real_SC])
    return torch.cat(found)


def test_ratios_are_one_in_the_first_optimizer_step_of_a_batch_and_not_after(several: Watched) -> None:
    for at, reports in enumerate(several.reports):
        for report in reports:
            deviation = report.values["ratio_deviation"]
            assert deviation is not None
            assert deviation < 1e-12 if at % 4 == 0 else deviation > 1e-4
    assert any(report.values["pg_clipfrac"] for reports in several.reports for report in reports)


def test_old_log_probs_are_the_policys_before_its_first_update_on_the_batch(several: Watched) -> None:
    for at, (step, given, _) in enumerate(several.steps):
        first = several.before[at - at % 4]
        assert (given.old_log_probs_T - _log_probs(several.trainer, first, step, several.tokens[at])).abs().max() < 1e-10


def test_reference_log_probs_are_the_initial_policys(several: Watched) -> None:
    for at, (step, given, _) in enumerate(several.steps):
        start = several.before[0]
        assert (given.ref_log_probs_T - _log_probs(several.trainer, start, step, several.tokens[at])).abs().max() < 1e-10


def test_reported_log_probs_are_those_of_the_parameters_before_the_update(several: Watched) -> None:
    for at, (step, _, found) in enumerate(several.steps):
        expected_T = _log_probs(several.trainer, several.before[at], step, several.tokens[at])
        assert (found.log_probs_T - expected_T).abs().max() < 1e-10


def test_prompt_mean_refuses_a_group_that_straddles_two_optimizer_steps_naming_the_flag() -> None:
    setup = setup_of(global_batch_size=6)
    with pytest.raises(RolloutError, match=r"straddles optimizer steps 0 and 1.*change --global-batch-size"):
        next(grid.trainer_of(setup, runs_of(setup, ("sample_mean", "prompt_mean")), ALONE).steps())
    done = next(grid.trainer_of(setup, runs_of(setup, ("sample_mean",)), ALONE).steps())
    assert [reports[0].values["rollouts"] for reports in done.optimizer_steps] == [6, 6, 4]


# -- KL and entropy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_is_the_estimator_by_hand_and_enters_the_loss_with_its_coefficient(estimator: str) -> None:
    setup = setup_of(**SEVERAL, kl_coef=0.3, entropy_coef=0.2, kl_estimator=estimator)
    watched = _watched(setup, ("sample_mean", "token_mean"))
    for at in (1, 7):
        (step, given, found), reports = watched.steps[at], watched.reports[at]
        for run, report in enumerate(reports):
            kl, entropy, per_token = 0.0, 0.0, report.run.mode == "token_mean"
            mine = [s for s in range(step.num_samples) if int(step.run_S[s]) == run]
            lengths, start = step.response_length_S.tolist(), 0
            tokens = sum(lengths[s] for s in mine)
            for sample, length in enumerate(lengths):
                for t in range(start, start + length if sample in mine else start):
                    weight = 1 / tokens if per_token else 1 / (len(mine) * length)
                    d = float(found.log_probs_T[t] - given.ref_log_probs_T[t])
                    kl += weight * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
                    entropy += weight * float(found.entropy_T[t])
                start += length
            assert report.values["kl_loss"] == pytest.approx(kl, abs=1e-12)
            assert report.values["entropy_loss"] == pytest.approx(entropy, abs=1e-12)
            pg_loss = report.values["pg_loss"]
            assert pg_loss is not None
            assert report.values["loss"] == pytest.approx(pg_loss + 0.3 * kl - 0.2 * entropy, abs=1e-12)
            assert abs(kl) > 1e-6


def test_without_a_kl_term_there_is_no_kl_loss() -> None:
    (reports, *_) = _watched(setup_of(steps=1), ("sample_mean",)).reports
    assert "kl_loss" not in reports[0].values


# -- replay ---------------------------------------------------------------------------------------------------------


def _replayed(watched: Watched, rollout_step: int, mode: str) -> list[StepReport]:
    """The optimizer steps of the first iteration of one rollout step, replayed from their own numbers."""
    run, parts = MODES.index(mode), [4 * rollout_step, 4 * rollout_step + 1]
    picked = []
    for at in parts:
        step, given, found = watched.steps[at]
        whole = dataclasses.replace(
            step,
            log_probs_T=found.log_probs_T,
            old_log_probs_T=given.old_log_probs_T,
            ref_log_probs_T=given.ref_log_probs_T,
            entropy_T=found.entropy_T,
        )
        picked.append(whole.select((step.run_S == run).nonzero().flatten()))
    batch = _joined(picked)
    settings = watched.trainer.config
    config = dataclasses.replace(settings, objective=watched.trainer.runs[run].objective, dtype="float64")
    return list(Replay(config, (config.objective.loss_aggregation,), False, 16).steps([batch]))


def _joined(parts: list[RolloutBatch]) -> RolloutBatch:
    """Batches of one run after one another, with ids from 0 and run 0."""
    changed: dict[str, Any] = {}
    for item in dataclasses.fields(RolloutBatch):
        values = [getattr(part, item.name) for part in parts]
        if isinstance(values[0], Tensor):
            changed[item.name] = torch.cat(values)
        elif item.name == "status_S":
            changed[item.name] = tuple(status for value in values for status in value)
    for name in ("rollout_S", "group_S"):
        changed[name] = changed[name] - changed[name].min()
    samples = changed["run_S"].numel()
    changed |= {"run_S": torch.zeros(samples, dtype=torch.int64), "position_S": torch.arange(samples)}
    return dataclasses.replace(parts[0], **changed)


def _same(trained: dict[str, Any], replayed: dict[str, Any], skip: set[str]) -> None:
    for name, value in trained.items():
        if name in skip:
            continue
        if name == "ranks":
            for one, other in zip(value, replayed[name], strict=True):
                _same(one, other, skip)
        elif isinstance(value, dict):
            _same(value, replayed[name], skip)
        elif isinstance(value, float):
            assert value == pytest.approx(replayed[name], rel=1e-12, abs=1e-14), name
        else:
            assert value == replayed[name], name


@pytest.mark.parametrize("rollout_step", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_what_training_records_is_what_a_replay_of_its_rollouts_reports(several: Watched, mode: str, rollout_step: int) -> None:
    replayed = _replayed(several, rollout_step, mode)
    assert len(replayed) == 2
    for part, report in enumerate(replayed):
        trained = next(r for r in several.reports[4 * rollout_step + part] if r.run.mode == mode)
        own = {"grad_norm", "groups_generated", "groups_kept", "evaluated"}
        _same(trained.values, report.values[mode], own)
        shown = {line["layout"]: line for line in report.layout_lines(mode)}
        assert [line["layout"] for line in trained.layout_lines()] == list(DEFAULT_LAYOUTS)
        for line in trained.layout_lines():
            _same(line, shown[line["layout"]], own)
            assert "correct/lengths" in line


def test_a_response_that_reached_the_limit_without_an_end_token_is_truncated(several: Watched) -> None:
    shares = []
    for (step, _, _), tokens_SL, reports in zip(several.steps, several.tokens, several.reports, strict=True):
        for run, report in enumerate(reports):
            ended = [END in row for row, at in zip(tokens_SL.tolist(), step.run_S.tolist(), strict=True) if at == run]
            shares.append(ended.count(False) / len(ended))
            assert report.values["truncated"] == shares[-1]
    assert max(shares) > 0
    assert min(shares) < 1


def test_the_recorded_advantages_are_grpos_of_the_rewards(several: Watched) -> None:
    step, given, _ = several.steps[0]
    reward_S = step.reward_S
    assert reward_S is not None
    by_group: dict[int, list[float]] = {}
    for group, reward in zip(step.group_S.tolist(), reward_S.tolist(), strict=True):
        by_group.setdefault(group, []).append(reward)
    expected = []
    for group, reward, length in zip(step.group_S.tolist(), reward_S.tolist(), step.response_length_S.tolist(), strict=True):
        rewards = by_group[group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        expected += [(reward - mean) / (std + 1e-6) if std else 0.0] * length
    assert given.advantages_T.tolist() == pytest.approx(expected, abs=1e-12)
