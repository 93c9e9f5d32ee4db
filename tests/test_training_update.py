"""An update is the gradient of the formula written flat, then torch's own optimizer; the loss is TRL's and slime's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from aggcli import grid
from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout
from aggcli.policy import stacked
from aggcli.policy.protocol import Policy, Shards
from aggcli.policy.transformer import Parameters, logits
from aggcli.policy.weights import Optimizer
from aggcli.training.report import Reporter
from aggcli.training.rollout import SampledRollouts
from aggcli.training.stack import RunSpec
from aggcli.training.step import apart, has_gradient, step_gradient, step_tokens
from aggcli.world import ALONE, World
from tests import closed_form
from tests.fixtures import MODES, batch_of
from tests.speed import few
from tests.train_worker import runs_of, setup_of, small, train

DATA = Path(__file__).parent / "data"
UPDATES = {"steps": 1, "num_iterations": 3, "lr": 3e-3, "layout_records": False}


@pytest.fixture(autouse=True)
def _rows_without_a_gradient_go_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "FEWEST_APART", 1)


def _rollouts(setup: grid.Setup, run: RunSpec) -> SampledRollouts:
    return grid.trainer_of(setup, [run], ALONE).sampler.step([run], setup.start.stack([run.lr], ALONE), 0)


def _all_log_probs(setup: grid.Setup, parameters: Parameters, tokens_SL: Tensor) -> Tensor:
    """Log-probability of every vocabulary entry at every response place of padded rows, [S, C, V]."""
    assert setup.task is not None
    first = small(setup).prompt_length
    assert first is not None
    return torch.log_softmax(logits(parameters, small(setup).shape, tokens_SL[None])[0, :, first - 1 : -1], -1)


def _flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def _by_hand(setup: grid.Setup, run: RunSpec, make: Any, warm_up: int = 0, clip: Any = None) -> Tensor:
    """The parameters after the updates of one rollout step: the formula flat, autograd, and an optimizer of torch's."""
    assert setup.task is not None
    rollouts, objective = _rollouts(setup, run), run.objective
    length_S = rollouts.batch.response_length_S
    real_SC = torch.arange(int(length_S.max())) < length_S[:, None]
    samples = [{"response_length": n, "group_index": at // 4} for at, n in enumerate(length_S.tolist())]
    weight_T = _flat(closed_form.weights(samples, run.mode, objective.loss_aggregation_divisor or 0.0))
    metric = "token_mean" if run.mode == "token_mean" else "sample_mean"
    metric_T = _flat(closed_form.weights(samples, metric))
    advantage_T = rollouts.batch.advantages_T
    assert advantage_T is not None
    target_SC1 = rollouts.tokens_SL[:, small(setup).prompt_length :, None]
    leaves = {name: value.clone().requires_grad_() for name, value in small(setup).initial.items()}
    optimizer = make(list(leaves.values()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min((k + 1) / warm_up, 1.0) if warm_up else 1.0)
    start_T = _all_log_probs(setup, small(setup).initial, rollouts.tokens_SL).gather(2, target_SC1)[..., 0][real_SC]
    for _ in range(setup.config.training.num_iterations):
        log_probs_SCV = _all_log_probs(setup, leaves, rollouts.tokens_SL)
        new_T = log_probs_SCV.gather(2, target_SC1)[..., 0][real_SC]
        ratio_T = (new_T - start_T).exp()
        low, high = objective.clip_range
        pg_T = -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
        gap_T = start_T - new_T  # the reference is the initial policy, and so is the old one in a first rollout step
        entropy_T = -(log_probs_SCV.exp() * log_probs_SCV).sum(-1)[real_SC]
        kl_T = (gap_T.exp() - 1 - gap_T) * (ratio_T if objective.kl_unbiased else 1)
        penalty_T = objective.kl_coef * kl_T - objective.entropy_coef * entropy_T
        optimizer.zero_grad()
        ((weight_T * pg_T).sum() + (metric_T * penalty_T).sum()).backward()
        if clip is not None:
            clip(list(leaves.values()))
        optimizer.step()
        schedule.step()
    return torch.cat([value.detach().flatten() for value in leaves.values()])


def _trained(setup: grid.Setup, run: RunSpec) -> Tensor:
    return train(setup, [run]).flat_RQ[0]


def _moved(setup: grid.Setup, flat_P: Tensor) -> float:
    return float((flat_P - torch.cat([value.flatten() for value in small(setup).initial.values()])).abs().max())


def _sgd(**options: Any) -> Any:
    return lambda leaves: torch.optim.SGD(leaves, **options)


def _adamw(**options: Any) -> Any:
    return lambda leaves: torch.optim.AdamW(leaves, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_iterations": 1},
        {"micro_batch_size": 3},
        {"kl_coef": 0.3, "entropy_coef": 0.05},
        {"kl_coef": 0.3, "kl_unbiased": True},
    ],
    ids=["plain", "one alone", "micro-batches", "KL and entropy", "unbiased KL"],
)
@pytest.mark.parametrize("mode", few(MODES, fast=2))
def test_three_sgd_updates_are_those_of_autograd_on_the_flat_formula(mode: str, changes: dict[str, Any]) -> None:
    setup = setup_of(**UPDATES | {"lr": 0.3} | changes, optimizer="sgd", clip_grad=0.0, eps_clip=0.05, eps_clip_high=0.1)
    (run,) = runs_of(setup, (mode,))
    found_P, expected_P = _trained(setup, run), _by_hand(setup, run, _sgd(lr=0.3))
    assert (found_P - expected_P).abs().max() < 1e-10
    assert _moved(setup, expected_P) > 1e-3


@pytest.mark.parametrize("mode", few(MODES, fast=2))
def test_three_adamw_updates_with_weight_decay_and_warm_up_are_torchs(mode: str) -> None:
    setup = setup_of(**UPDATES, weight_decay=0.1, lr_warmup_steps=2, clip_grad=0.0, adam_beta1=0.8, adam_beta2=0.95)
    (run,) = runs_of(setup, (mode,))
    make = _adamw(lr=3e-3, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    found_P, expected_P = _trained(setup, run), _by_hand(setup, run, make, warm_up=2)
    assert (found_P - expected_P).abs().max() < 1e-10
    assert _moved(setup, expected_P) > 1e-3
    assert (found_P - _by_hand(setup, run, make)).abs().max() > 1e-5, "warm-up must show"


def test_sgd_with_weight_decay_is_torchs() -> None:
    setup = setup_of(**UPDATES, optimizer="sgd", weight_decay=2.0, clip_grad=0.0)
    (run,) = runs_of(setup, ("sample_mean",))
    found_P = _trained(setup, run)
    assert (found_P - _by_hand(setup, run, _sgd(lr=3e-3, weight_decay=2.0))).abs().max() < 1e-10
    assert (found_P - _by_hand(setup, run, _sgd(lr=3e-3))).abs().max() > 1e-3


def _shrink(leaves: list[Tensor], most: float) -> None:
    """Scale gradients to the 2-norm `most` where they exceed it, without an epsilon."""
    norm = torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]).norm()
    for leaf in leaves:
        assert leaf.grad is not None
        leaf.grad *= min(1.0, most / float(norm))


@pytest.mark.parametrize("most", [0.05, 1e3], ids=["binds", "does not bind"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clipping_is_by_the_norm_of_the_runs_whole_gradient_as_torchs_but_for_its_epsilon(optimizer: str, most: float) -> None:
    setup = setup_of(**UPDATES, optimizer=optimizer, clip_grad=most)
    (run,) = runs_of(setup, ("prompt_mean",))
    make = _sgd(lr=3e-3) if optimizer == "sgd" else _adamw(lr=3e-3, weight_decay=0.0)
    found_P = _trained(setup, run)
    exact_P = _by_hand(setup, run, make, clip=lambda leaves: _shrink(leaves, most))
    torchs_P = _by_hand(setup, run, make, clip=lambda leaves: torch.nn.utils.clip_grad_norm_(leaves, most))
    moved = _moved(setup, exact_P)
    assert (found_P - exact_P).abs().max() < 1e-10
    assert (found_P - torchs_P).abs().max() < 3e-5 * moved
    free = (found_P - _by_hand(setup, run, make)).abs().max()
    assert free < 1e-10 if most > 1 else free > 1e-5 * moved


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_a_run_does_not_take_leaves_no_trace_in_it(optimizer: str) -> None:
    """Two runs take the same two steps, and one of them another between: moments, step count and warm-up are untouched."""
    settings = {"optimizer": optimizer, "weight_decay": 0.1, "lr_warmup_steps": 3, "clip_grad": 0.0}
    start_P, first_P, second_P = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.2, -0.1], [-0.4, 0.1, 0.7]], dtype=torch.float64)
    flat_RQ, junk_P = torch.stack([start_P, start_P]), torch.full((3,), torch.nan, dtype=torch.float64)
    taught = Optimizer(flat_RQ, [0.01, 0.01], settings_from(settings).training)
    for gradients, stepping in (
        ((first_P, first_P), (True, True)),
        ((second_P, junk_P), (True, False)),
        ((junk_P, second_P), (False, True)),
    ):
        gradient_RQ = torch.stack(gradients)
        taught.step(flat_RQ, gradient_RQ, gradient_RQ.norm(dim=1), stepping)
    assert torch.equal(flat_RQ[0], flat_RQ[1])
    leaf = start_P.clone().requires_grad_()
    made = (_sgd if optimizer == "sgd" else _adamw)(lr=0.01, weight_decay=0.0)([leaf])
    for number, gradient_P in enumerate((first_P, second_P), 1):
        rate = 0.01 * number / 3
        made.param_groups[0]["lr"] = rate
        with torch.no_grad():
            leaf.mul_(1 - rate * 0.1)
        leaf.grad = gradient_P
        made.step()
    assert (flat_RQ[0] - leaf).abs().max() < 1e-15


# -- rows without a gradient ------------------------------------------------------------------------------------------


def test_rows_without_a_gradient_fill_the_first_pass_and_go_apart_where_they_are_enough() -> None:
    row_RB = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])
    learns_S = torch.tensor([False, True, False, True, False, True, False])
    first, second = [[1, 3], [5, 4]], [[0, 2], [6, -1]]
    assert [(rows.tolist(), learns) for rows, learns in apart(row_RB, learns_S, 3)] == [(first, True), (second, False)]
    none_S = torch.zeros(7, dtype=torch.bool)
    assert [(rows.tolist(), learns) for rows, learns in apart(row_RB, none_S, 7)] == [(row_RB.tolist(), False)]
    last_S = torch.tensor([True, False, False, False, False, True, False])  # sample 0 is none of what pads
    assert [rows.tolist() for rows, _ in apart(row_RB, last_S, 5)] == [[[0], [5]], [[1, 2, 3], [4, 6, -1]]]
    for fewest, learning_S in ((4, learns_S), (None, learns_S), (8, none_S), (1, ~none_S)):
        ((rows, learns),) = apart(row_RB, learning_S, fewest)
        assert (rows.tolist(), learns) == (row_RB.tolist(), True)


@pytest.mark.parametrize(
    ("settings", "advantage", "mask", "expected"),
    [
        ({}, [1.0, 0.0, -1.0], [1, 1, 1], [True, False, True]),
        ({}, [1.0, 1.0, 1.0], [1, 0, 1], [True, False, True]),
        ({"kl_coef": 0.1}, [0.0, 0.0, 0.0], [1, 1, 0], [True, True, False]),
        ({"entropy_coef": 0.1}, [0.0, 0.0, 0.0], [0, 1, 1], [False, True, True]),
    ],
)
def test_a_row_has_a_gradient_by_its_advantage_its_weight_or_a_penalty(
    settings: dict[str, float], advantage: list[float], mask: list[int], expected: list[bool]
) -> None:
    samples = [
        {"response_length": 2, "total_length": 3, "group_index": 0, "reward": 0.0, "advantage": a, "loss_mask": [m, m]}
        | {"log_probs": [-1.0, -1.0], "old_log_probs": [-1.0, -1.0]}
        for a, m in zip(advantage, mask, strict=True)
    ]
    step, objective = batch_of(samples), settings_from({"loss_aggregation": "token_mean", **settings}).objective
    given = step_tokens(step, [RunSpec("token_mean", 0, objective, 1.0)], parse_layout("dp1"), torch.float64)
    reference_T = torch.zeros(6, dtype=torch.float64) if "kl_coef" in settings else None
    assert has_gradient(step, given.beside(None, reference_T), objective).tolist() == expected


@pytest.mark.parametrize(
    "settings",
    [{}, {"policy_loss": "gspo"}, {"policy_loss": "gmpo", "micro_batch_size": 5}, {"kl_coef": 0.3}, {"entropy_coef": 0.1}],
)
def test_a_stack_learns_the_same_whether_rows_without_a_gradient_go_apart_or_not(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(**UPDATES | {"steps": 2, "lr": 0.03, "num_iterations": 1} | settings)
    runs = runs_of(setup, ("sample_mean", "token_mean"), (0, 1))
    taken: list[bool] = []
    log_probs = stacked._SomeRuns.log_probs

    def seen(self: stacked._SomeRuns, *given: Tensor) -> Any:
        taken.append(torch.is_grad_enabled())
        return log_probs(self, *given)

    def passes(fewest: int) -> tuple[Tensor, int, int]:
        taken.clear()
        monkeypatch.setattr(stacked, "FEWEST_APART", fewest)
        return train(setup, runs).flat_RQ, taken.count(True), taken.count(False)

    monkeypatch.setattr(stacked._SomeRuns, "log_probs", seen)
    (apart_RQ, with_1, without_1), (whole_RQ, with_2, without_2) = passes(1), passes(10**6)
    assert (without_1 > without_2) == settings.keys().isdisjoint({"kl_coef", "entropy_coef"})
    assert with_1 <= with_2
    assert (apart_RQ - whole_RQ).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("settings", "fewest"),
    [
        ({"num_iterations": 1}, {1}),
        ({"num_iterations": 2}, {None}),
        ({"num_iterations": 1, "kl_coef": 0.1, "kl_estimator": "k2", "mask_truncated": True}, {None}),
    ],
    ids=["neither", "old policy", "reference"],
)
def test_rows_are_read_as_other_policies_read_them_so_that_what_has_not_moved_is_not_apart(
    settings: dict[str, Any], fewest: set[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, asked = setup_of(**UPDATES | settings), set[int | None]()

    def seen(row_RB: Tensor, learns_S: Tensor, fewest: int | None) -> list[tuple[Tensor, bool]]:
        asked.add(fewest)
        return apart(row_RB, learns_S, fewest)

    monkeypatch.setattr("aggcli.training.step.apart", seen)
    (run,) = runs_of(setup, ("sample_mean",))
    first, *_ = train(setup, [run]).reports[run.name]
    assert asked == fewest
    assert (first.values["ratio_max"], first.values["ratio_deviation"]) == (1.0, 0.0)
    assert first.values.get("kl_loss", 0.0) == 0.0
    assert first.values["zero_variance_groups"], "some rows have no gradient"


# -- TRL and slime --------------------------------------------------------------------------------------------------

GOLDEN = json.loads((DATA / "slime_reducer.json").read_text())[0]
PRESETS = [
    entry
    for entry in json.loads((DATA / "framework_presets.json").read_text())
    if entry["preset"] in ("trl:grpo", "trl:dr_grpo", "trl:dapo")
]
OF_PRESET = {"trl:grpo": "sample_mean", "trl:dr_grpo": "constant", "trl:dapo": "token_mean"}


class Table:
    """A policy of one run whose parameters are the log-probabilities themselves; a row's first token is its number."""

    device, runs, shards, fewest_apart = torch.device("cpu"), slice(0, 1), Shards(), 1

    def __init__(self, table_1SC: Tensor) -> None:
        self.table_1SC = table_1SC

    def passes(self) -> list[Table]:
        return [self]

    def no_gradient(self) -> Tensor:
        return torch.zeros(1, self.table_1SC.numel(), dtype=torch.float64)

    def summed(self, gradient_RQ: Tensor, world: World) -> Tensor:
        return gradient_RQ

    def log_probs(self, tokens_RBL: Tensor, prompt_RB: Tensor, length_RB: Tensor) -> Any:
        found_1BC = self.table_1SC[:, tokens_RBL[0, :, 0], : max(int(length_RB.max()), 1)]
        return found_1BC, torch.zeros_like(found_1BC), None

    def add_gradient(self, loss: Tensor, gradient_RQ: Tensor, *, is_first: bool = False, is_last: bool = True) -> None:
        gradient_RQ += torch.autograd.grad(loss, self.table_1SC)[0].flatten(1)


def _step(mode: str, divisor: float | None, scale: str, split: list[list[list[int]]]) -> tuple[float, list[list[float]]]:
    """pg_loss and d pg_loss / d log_probs of the golden fixture by the training step; the "policy" is a table of numbers."""
    fixture = GOLDEN["fixture"]
    samples, step = fixture["samples"], batch_of(fixture["samples"])
    given = {
        "loss_aggregation": mode,
        "loss_aggregation_divisor": divisor,
        "prompt_mean_scale": scale,
        "eps_clip": fixture["eps_clip"],
        "eps_clip_high": fixture["eps_clip_high"],
        "max_response_length": 64,
    }
    config = settings_from(given)
    run = RunSpec(mode, 0, config.objective, 1.0)
    longest = int(step.response_length_S.max())
    table_1SC = torch.zeros(1, len(samples), longest, dtype=torch.float64)
    for at, sample in enumerate(samples):
        table_1SC[0, at, : sample["response_length"]] = torch.tensor(sample["log_probs"], dtype=torch.float64)
    leaf = table_1SC.requires_grad_()

    tokens = step_tokens(step, [run], parse_layout("dp1"), torch.float64)
    assert step.old_log_probs_T is not None
    tokens = type(tokens)(**{**vars(tokens), "old_log_probs_T": step.old_log_probs_T.double()})
    rows = [torch.tensor([part]) for rank in split for part in rank]
    number_SL = torch.arange(len(samples))[:, None].expand(-1, int(step.total_length_S.max()))
    found = step_gradient(cast(Policy, Table(leaf)), rows, step, number_SL, tokens, config.objective, ALONE)
    reporter = Reporter(config, parse_layout("dp1"), (), 64, ALONE)
    (report,) = reporter.step([0], {0: run}, step, tokens, found, [{}], [{}], is_checked=False)
    gradient_SC = found.gradient_RQ.view(len(samples), longest)
    pg_loss = report.values["pg_loss"]
    assert pg_loss is not None
    return pg_loss, [gradient_SC[at, : s["response_length"]].tolist() for at, s in enumerate(samples)]


@pytest.mark.parametrize("entry", PRESETS, ids=lambda entry: f"{entry['preset']}-{entry['layout']}")
def test_the_training_step_has_trls_own_loss(entry: dict[str, Any]) -> None:
    pg_loss, gradient = _step(OF_PRESET[entry["preset"]], entry["divisor"], "rollouts", entry["split"])
    assert pg_loss == pytest.approx(entry["pg_loss"], abs=1e-10)
    assert any(value for row in gradient for value in row)


@pytest.mark.parametrize("split", [PRESETS[0]["split"], PRESETS[-1]["split"]], ids=["one micro-batch", "four ranks"])
@pytest.mark.parametrize(
    "case", [case for case in GOLDEN["cases"] if "grads" in case], ids=lambda case: f"{case['mode']}-{case['prompt_norm']}"
)
def test_the_training_step_has_slimes_gradient_by_log_probs(case: dict[str, Any], split: list[list[list[int]]]) -> None:
    pg_loss, gradient = _step(case["mode"], case["divisor"], case["prompt_norm"] or "rollouts", split)
    assert pg_loss == pytest.approx(case["pg_loss"], abs=1e-10)
    expected = [value for row in case["grads"] for value in row]
    assert [value for row in gradient for value in row] == pytest.approx(expected, abs=1e-10)


def test_a_rank_without_rows_adds_nothing_to_the_gradient() -> None:
    """More ranks than samples leave ranks idle; what memory held before must not cross to the others."""
    setup = setup_of()
    trainer = grid.trainer_of(setup, runs_of(setup), ALONE)
    rollouts = trainer.sampler.step(trainer.runs, trainer.policy, 0)
    given = step_tokens(rollouts.batch, trainer.runs, trainer.layout, torch.float64)
    used = torch.full_like(trainer.policy.state()["parameters"], 7.0)
    del used  # an empty tensor of this size would now hold sevens
    found = step_gradient(
        trainer.policy,
        [],
        rollouts.batch,
        rollouts.tokens_SL,
        given,
        setup.config.objective,
        ALONE,
    )
    assert found.gradient_RQ.shape == trainer.policy.state()["parameters"].shape
    assert not found.gradient_RQ.any()
