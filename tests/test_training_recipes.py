"""The ingredients of the recipes: dynamic sampling, the overlong penalty, advantages, matched learning rates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from aggcli import grid
from aggcli.training.rollout import SampledRollouts, Sampler
from aggcli.world import ALONE
from tests.cli import aggcli
from tests.fixtures import MODES
from tests.speed import few
from tests.train_worker import flags, runs_of, setup_of, train


def _sampler(**settings: Any) -> tuple[Sampler, grid.Setup]:
    setup = setup_of(**settings)
    assert setup.task is not None
    return Sampler(setup.task, setup.config, setup.response_limit, ALONE), setup


def _rollouts(seeds: tuple[int, ...] = (0,), step: int = 0, **settings: Any) -> SampledRollouts:
    sampler, setup = _sampler(**settings)
    runs = runs_of(setup, ("sample_mean",), seeds)
    return sampler.step(runs, setup.start.stack([run.lr for run in runs], ALONE), step)


def _rewards(rollouts: SampledRollouts) -> list[list[float]]:
    assert rollouts.batch.reward_S is not None
    return rollouts.batch.reward_S.view(-1, 4).tolist()


# -- dynamic sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_dynamic_sampling_samples_whole_rounds_until_four_groups_are_mixed(seed: int) -> None:
    mixed = [0 < sum(rewards) < 4 for rewards in _rewards(_rollouts((seed,), rollout_batch_size=40))]
    rounds = next(k for k in range(1, 11) if sum(mixed[: 4 * k]) >= 4)
    found = _rollouts((seed,), dynamic_sampling=True, dynamic_sampling_rounds=10)
    assert found.generated_R == [4 * rounds]
    assert found.kept_R == [4]
    assert all(0 < sum(rewards) < 4 for rewards in _rewards(found))


def test_runs_of_a_stack_refill_each_to_its_own_need_and_count_only_what_they_used() -> None:
    seeds = (0, 1, 2, 3)
    together = _rollouts(seeds, dynamic_sampling=True)
    assert together.generated_R == [_rollouts((seed,), dynamic_sampling=True).generated_R[0] for seed in seeds]
    assert len(set(together.generated_R)) > 1


def test_at_the_bound_the_step_is_trained_on_with_the_groups_there_are() -> None:
    mixed = sum(0 < sum(rewards) < 4 for rewards in _rewards(_rollouts()))
    assert 0 < mixed < 4
    found = _rollouts(dynamic_sampling=True, dynamic_sampling_rounds=1)
    assert (found.generated_R, found.kept_R) == ([4], [mixed])
    setup = setup_of(dynamic_sampling=True, dynamic_sampling_rounds=1, steps=1)
    (values,) = train(setup, runs_of(setup, ("sample_mean",))).values("sample_mean/seed-0")
    assert (values["groups_generated"], values["groups_kept"], values["rollouts"]) == (4, mixed, 4 * mixed)


# -- overlong penalty and advantages --------------------------------------------------------------------------------

PENALTY = {1: 0.0, 8: 0.0, 9: -0.125, 10: -0.25, 12: -0.5, 15: -0.875, 16: -1.0}
"""DAPO eq. 13 with a limit of 16 and a buffer of 8: (16 - 8 - length) / 8 beyond 8 tokens."""


def test_the_soft_overlong_penalty_is_dapos_equation_13() -> None:
    sampler, _ = _sampler(overlong_buffer=8)
    assert sampler._overlong(torch.tensor(list(PENALTY))).tolist() == pytest.approx(list(PENALTY.values()), abs=1e-15)
    without, _ = _sampler()
    assert without._overlong(torch.tensor(list(PENALTY))).tolist() == [0.0] * len(PENALTY)


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "dr_grpo"])
def test_advantages_are_the_recipes_by_hand_and_the_raw_reward_stays_without_penalty(recipe: str) -> None:
    batch = _rollouts((5,), recipe=recipe, dynamic_sampling=False).batch
    lengths = batch.response_length_S.tolist()
    assert batch.reward_S is not None
    assert batch.advantages_T is not None
    assert set(batch.reward_S.tolist()) == {0.0, 1.0}
    punished = [min(0.0, (8 - n) / 8) if recipe == "dapo" else 0.0 for n in lengths]
    shaped = [reward + penalty for reward, penalty in zip(batch.reward_S.tolist(), punished, strict=True)]
    expected = []
    for first in range(0, 16, 4):
        group = shaped[first : first + 4]
        mean = math.fsum(group) / 4
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / 3)
        flat = max(group) == min(group)
        expected += [0.0 if flat else (x - mean) if recipe == "dr_grpo" else (x - mean) / (std + 1e-6) for x in group]
    per_token = [value for value, n in zip(expected, lengths, strict=True) for _ in range(n)]
    assert batch.advantages_T.tolist() == pytest.approx(per_token, abs=1e-12)
    assert max(map(abs, per_token)) > 0.2
    assert any(punished) == (recipe == "dapo")


@pytest.mark.parametrize(
    ("recipe", "mode", "clip"),
    [("grpo", "sample_mean", (0.8, 1.2)), ("dapo", "prompt_mean", (0.8, 1.28)), ("dr_grpo", "constant", (0.8, 1.2))],
)
def test_each_recipe_sets_its_mode_clip_range_and_extras_and_a_flag_wins_over_it(
    recipe: str, mode: str, clip: tuple[float, float]
) -> None:
    config = setup_of(recipe=recipe).config
    assert config.objective.loss_aggregation.name == mode
    assert config.objective.clip_range == pytest.approx(clip)
    assert config.training.dynamic_sampling is (recipe == "dapo")
    assert config.objective.kl_coef == 0
    (run,) = runs_of(setup_of(recipe="dr_grpo"), ("constant",))
    assert run.objective.loss_aggregation_divisor == 16, "dr_grpo divides by the response limit"
    assert setup_of(recipe=recipe, eps_clip_high=0.5).config.objective.clip_range[1] == 1.5


# -- --match grad-norm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_grad", few([0.3, 0.0, 1.0]))
def test_after_one_sgd_step_matched_modes_have_updates_of_one_size(clip_grad: float) -> None:
    setup = setup_of(optimizer="sgd", lr=0.1, clip_grad=clip_grad, match="grad-norm", steps=1, global_batch_size=8)
    runs = runs_of(setup, MODES, (0, 1))
    matched = grid.matched_rates(setup, runs, ALONE)
    free = grid.trainer_of(setup, runs, ALONE).first_update().view(4, 2)
    size = grid.trainer_of(setup, matched, ALONE).first_update().view(4, 2)
    assert (size / free[:1] - 1).abs().max() < 1e-10, "every mode's update is as large as the first mode's of that seed"
    assert (free / free[:1] - 1).abs().max() > 0.05, "without matching they differ, or this shows nothing"
    assert [run.lr for run in matched[:2]] == [0.1, 0.1]


def test_the_rate_that_others_are_matched_to_is_the_one_that_was_set_to_the_bit() -> None:
    setup = setup_of(optimizer="sgd", lr=0.1, match="grad-norm", steps=1)
    matched = grid.matched_rates(setup, runs_of(setup, MODES[:1], range(12)), ALONE)
    assert [run.lr for run in matched] == [0.1] * 12


def test_matched_factors_are_printed_and_stand_in_the_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--optimizer=sgd", "--lr=0.1", "--match=grad-norm", "--seeds=1", "--clip-grad=0", "--no-layout-records"]
    done = aggcli(capsys, "compare", *flags(steps=1), *more, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert "learning rates, matched" in done.err
    sizes = {}
    for mode in MODES:
        manifest = json.loads((tmp_path / "out" / mode / "seed-0" / "manifest.json").read_text())
        metrics = json.loads((tmp_path / "out" / mode / "seed-0" / "metrics.jsonl").read_text())
        assert manifest["lr"] == pytest.approx(0.1 * manifest["lr_factor"], rel=1e-12)
        sizes[mode] = manifest["lr"] * metrics["grad_norm"]
    assert list(sizes.values()) == pytest.approx([sizes["sample_mean"]] * 4, rel=1e-10)
