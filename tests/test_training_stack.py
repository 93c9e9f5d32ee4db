"""A run in a stack is the same run alone; runs of one seed share prompts and noise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aggcli.layout import views
from aggcli.policy import stacked
from aggcli.policy.protocol import Noise
from aggcli.training.rollout import SampledRollouts, Sampler
from aggcli.training.stack import RunSpec
from aggcli.world import ALONE
from tests.fixtures import MODES
from tests.speed import few
from tests.train_worker import Trained, largest_difference, runs_of, setup_of, train

SETUP = setup_of(num_iterations=2, global_batch_size=8)


def _eight() -> list[RunSpec]:
    """4 modes x 2 seeds; learning rate, clip range, KL coefficient, divisor and metric weights differ from run to run."""
    found = []
    for at, run in enumerate(runs_of(SETUP, MODES, (0, 7))):
        objective = dataclasses.replace(
            run.objective,
            eps_clip=0.1 + 0.02 * at,
            eps_clip_high=None if at % 2 else 0.3,
            kl_coef=0.0 if at % 3 == 0 else 0.01 * at,
            loss_aggregation_divisor=None if run.mode != "constant" else 10.0 + at,
            metric_aggregation="matched" if at in (2, 3) else "sample_mean",
        )
        found.append(dataclasses.replace(run, lr=1e-4 * (at + 1), objective=objective))
    return found


@pytest.fixture(scope="module")
def together() -> Trained:
    return train(SETUP, _eight())


@pytest.mark.parametrize("run", few(_eight(), fast=2), ids=lambda run: run.name)
def test_a_run_in_a_stack_of_eight_is_the_same_run_alone(together: Trained, run: RunSpec) -> None:
    alone = train(SETUP, [run])
    at = [other.name for other in together.trainer.runs].index(run.name)
    assert (alone.flat_RQ[0] - together.flat_RQ[at]).abs().max() < 1e-10
    assert largest_difference(alone.values(run.name), together.values(run.name)) < 1e-10
    assert len(alone.values(run.name)) == 5 * 2 * 2


def test_groups_of_runs_without_a_row_in_a_micro_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic sampling leaves the runs different numbers of groups, and so of micro-batches."""
    setup = setup_of(dynamic_sampling=True, dynamic_sampling_rounds=1, micro_batch_size=1, steps=3, kl_coef=0.01)
    runs = runs_of(setup, ("sample_mean", "token_mean"), (0, 1))
    whole = train(setup, runs)
    kept = {report.values["groups_kept"] for reports in whole.reports.values() for report in reports}
    assert len(kept) > 1
    monkeypatch.setattr(stacked, "RUNS_AT_ONCE", 1)
    assert (train(setup, runs).flat_RQ - whole.flat_RQ).abs().max() < 1e-12


def test_runs_of_different_numbers_of_optimizer_steps_take_and_number_them_as_alone() -> None:
    """Dynamic sampling keeps more groups of one run than of another, and each of them is an optimizer step."""
    setup = setup_of(dynamic_sampling=True, dynamic_sampling_rounds=1, global_batch_size=4, num_iterations=2, steps=4)
    runs = runs_of(setup, ("sample_mean",), (0, 1, 2))
    together = train(setup, runs)
    counts = {}
    for run in runs:
        alone = train(setup, [run])
        numbers = [report.step.step for report in alone.reports[run.name]]
        assert numbers == list(range(len(numbers)))
        assert [report.step.step for report in together.reports[run.name]] == numbers
        assert largest_difference(alone.values(run.name), together.values(run.name)) < 1e-10
        counts[run.name] = len(numbers)
    assert len(set(counts.values())) > 1
    assert together.trainer.checkpoint().optimizer_steps == list(counts.values())


def test_the_runs_of_the_stack_end_in_eight_different_places(together: Trained) -> None:
    for at in range(8):
        others = torch.cat([together.flat_RQ[:at], together.flat_RQ[at + 1 :]])
        assert (others - together.flat_RQ[at]).abs().amax(1).min() > 1e-5


@pytest.mark.slow
def test_groups_of_runs_compute_what_one_group_computes(together: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack of eight is one group; here it is two of four, and then groups of three, three and two."""
    for most in (4, 3):
        monkeypatch.setattr(stacked, "RUNS_AT_ONCE", most)
        other = train(SETUP, _eight())
        assert (other.flat_RQ - together.flat_RQ).abs().max() < 1e-10
        for run in other.trainer.runs:
            assert largest_difference(other.values(run.name), together.values(run.name)) < 1e-10


def test_a_run_that_is_measured_by_the_samples_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = views._shares
    monkeypatch.setattr(
        views, "_shares", lambda *given: (dataclasses.replace(share, start=0) for share in shares(*given))
    )  # every run is measured by the tokens of the first
    setup = setup_of(steps=1)
    first, second = train(setup, runs_of(setup, ("sample_mean",), (0, 1))).reports.values()
    assert first[0].step.layouts[0].misplaced == []
    assert second[0].step.layouts[0].misplaced == ["rank 0 does not hold the samples that the layout gives it"]


def _rollouts(runs: list[RunSpec], step: int = 0, **settings: object) -> SampledRollouts:
    setup = setup_of(**settings)
    sampler = Sampler(setup.task, setup.config, setup.response_limit, ALONE)  # pyright: ignore[reportArgumentType]
    return sampler.step(runs, setup.start.stack([run.lr for run in runs], ALONE), step)


def test_the_first_step_of_a_seed_has_the_same_rollouts_in_every_mode_and_other_ones_in_another_seed() -> None:
    found = _rollouts(runs_of(SETUP, MODES, (0, 7)))
    tokens_RSL = found.tokens_SL.view(8, 16, -1)
    assert all(torch.equal(tokens_RSL[2 * at], tokens_RSL[0]) for at in range(4))
    assert all(torch.equal(tokens_RSL[2 * at + 1], tokens_RSL[1]) for at in range(4))
    assert not torch.equal(tokens_RSL[0, :, :7], tokens_RSL[1, :, :7])


def test_noise_belongs_to_the_sample_not_to_the_number_of_samples_drawn_beside_it() -> None:
    few, many = Noise((3,), 5, 0, 4).uniforms(8)[0], Noise((3,), 5, 0, 9).uniforms(20)[0]
    assert torch.equal(many[:4, :8], few)
    assert torch.equal(Noise((3,), 5, 6, 3).uniforms(20)[0], many[6:])
    assert not torch.equal(Noise((3,), 6, 0, 4).uniforms(8)[0], few)
    assert not torch.equal(Noise((4,), 5, 0, 4).uniforms(8)[0], few)


def test_a_refill_goes_on_where_the_round_before_stopped() -> None:
    run = runs_of(SETUP, ("sample_mean",))
    wide = _rollouts(run, rollout_batch_size=12)
    mixed = _mixed_groups(wide)
    refilled = _rollouts(run, dynamic_sampling=True)
    kept = int(refilled.kept_R[0])
    width = min(wide.tokens_SL.shape[1], refilled.tokens_SL.shape[1])
    expected = torch.cat([wide.tokens_SL[4 * group : 4 * group + 4, :width] for group in mixed[:kept]])
    assert refilled.generated_R[0] > 4, "this seed needs a refill, or the test shows nothing"
    assert torch.equal(refilled.tokens_SL[:, :width], expected)


def _mixed_groups(rollouts: SampledRollouts) -> list[int]:
    reward_S = rollouts.batch.reward_S
    assert reward_S is not None
    return [group for group, rewards in enumerate(reward_S.view(-1, 4).tolist()) if len(set(rewards)) > 1]


def test_training_alone_and_in_a_stack_differs_if_the_noise_does(together: Trained) -> None:
    run = dataclasses.replace(_eight()[0], seed=1)
    alone = train(SETUP, [run])
    assert (alone.flat_RQ[0] - together.flat_RQ[0]).abs().max() > 1e-5
