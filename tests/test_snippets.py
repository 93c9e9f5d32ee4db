"""The lines for each framework, run on that framework's shapes, and then through its own arithmetic on cut batches."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aggcli.objective.reducer import reducer_weights
from aggcli.rules import MODES, RULES, Rule, find_rule
from aggcli.rules.snippets import SNIPPETS, native
from tests import closed_form
from tests.cli import aggcli, strict_json
from tests.closed_form import token_numbers
from tests.fixtures import Sample, batch_of, sample
from tests.framework_loops import rows_of, step_loss

LENGTHS, GROUPS, REWARDS = (3, 6, 2, 7, 1, 5), (0, 0, 1, 1, 1, 2), (1.0, 0.0, 1.0, 0.0, 0.0, 1.0)
DIVISOR = 9.0
SPLITS = ([[[0, 1, 2, 3, 4, 5]]], [[[5, 0, 3]], [[1, 4, 2]]], [[[0, 4], [2]], [[1], [5, 3]]])
WIDTH = max(LENGTHS)


def _samples() -> list[Sample]:
    """Six samples of three groups, off-policy beyond the clip, the second token of the long ones masked."""
    made = []
    for at, (length, group, reward) in enumerate(zip(LENGTHS, GROUPS, REWARDS, strict=True)):
        own = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        old = [-1.0 - 0.25 * t for t in range(length)]
        new = [value + 0.15 * (at - 2) for value in old]
        mask = [0 if t == 1 and length > 2 else 1 for t in range(length)]
        fields = {"reward": reward, "advantage": reward - sum(own) / len(own), "loss_mask": mask, "ref_log_probs": old}
        made.append(sample(length, group_index=group, old_log_probs=old, log_probs=new, **fields))
    return made


def _padded(values: list[list[int]]) -> torch.Tensor:
    return torch.tensor([row + [0] * (WIDTH - len(row)) for row in values])


MASK = _padded([one["loss_mask"] for one in _samples()])
ADVANTAGE = torch.tensor([one["advantage"] for one in _samples()], dtype=torch.float64)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a module of these names in place of a framework's, with its parents."""

    def put(name: str, **attributes: Any) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(attributes)

    return put


def _run(framework: str, mode: Rule) -> dict[str, Any]:
    """The names that the snippet defines."""
    found: dict[str, Any] = {"L": DIVISOR}
    exec(SNIPPETS[framework].code(mode), found)
    return found


# -- each framework's shapes: the snippet's factors, as the advantages [S] that the framework then trains on ----------------


def _verl(mode: Rule, put: Callable[..., None]) -> torch.Tensor:
    registered: dict[str, Any] = {}

    def register_adv_est(name: str) -> Callable[[Any], Any]:
        return lambda function: registered.setdefault(name, function)

    def compute_grpo_outcome_advantage(rewards: Any, mask: Any, index: Any, norm_adv_by_std_in_grpo: bool = True) -> Any:
        assert not norm_adv_by_std_in_grpo
        made = ADVANTAGE.unsqueeze(1) * mask
        return made, made

    put("verl.trainer.ppo.core_algos", **{f.__name__: f for f in (register_adv_est, compute_grpo_outcome_advantage)})
    _run("verl", mode)
    uids = np.array([f"uid-{group}" for group in GROUPS], dtype=object)
    config = {"norm_adv_by_std_in_grpo": False}
    advantages, _ = registered["grpo_aggregated"](token_level_rewards=None, response_mask=MASK, index=uids, config=config)
    return advantages.sum(1) / MASK.sum(1)


def _openrlhf(mode: Rule, put: Callable[..., None]) -> torch.Tensor:
    class RemoteExperienceMaker:
        args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=2))

        def compute_advantages_and_returns(self, experiences: Any) -> Any:
            return experiences

    put("openrlhf.trainer.ppo_utils.experience_maker", RemoteExperienceMaker=RemoteExperienceMaker)
    _run("openrlhf", mode)
    rows = [[4, 0], [2, 5, 1, 3]]  # experiences of a dynamic batch; position // 2 is the group
    advantages = [(ADVANTAGE[own].unsqueeze(1) * MASK[own]) for own in rows]
    made = [SimpleNamespace(index=own, action_mask=MASK[own], advantages=a) for own, a in zip(rows, advantages, strict=True)]
    found = torch.zeros(6, dtype=torch.float64)
    for one in RemoteExperienceMaker().compute_advantages_and_returns(made):
        found[one.index] = one.advantages.sum(1) / one.action_mask.sum(1)
    return found


def _slime(mode: Rule, put: Callable[..., None]) -> torch.Tensor:
    made = [
        SimpleNamespace(
            get_reward_value=lambda args, reward=one["reward"]: reward,
            group_index=one["group_index"],
            response_length=one["response_length"],
            loss_mask=one["loss_mask"] if 0 in one["loss_mask"] else None,
            remove_sample=False,
        )
        for one in _samples()
    ]
    raw, advantages = _run("slime", mode)["aggregated"](SimpleNamespace(grpo_std_normalization=False), made)
    assert raw == list(REWARDS)
    return torch.tensor(advantages, dtype=torch.float64)


def _nemo_rl(mode: Rule, put: Callable[..., None]) -> torch.Tensor:
    class GRPOAdvantageEstimator:
        def compute_advantage(self, prompt_ids: Any, rewards: Any, mask: Any, **_: Any) -> Any:
            return ADVANTAGE.unsqueeze(1).expand(mask.shape)

    put("nemo_rl.algorithms.advantage_estimator", GRPOAdvantageEstimator=GRPOAdvantageEstimator)
    _run("nemo-rl", mode)
    prompts = torch.tensor([[7, 1, 1], [7, 1, 2], [3, 0, 0]])[list(GROUPS)]
    return GRPOAdvantageEstimator().compute_advantage(prompts, None, MASK.float(), repeated_batch=None)[:, 0]


def _tinker(mode: Rule, put: Callable[..., None]) -> torch.Tensor:
    class TensorData:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

        @staticmethod
        def from_torch(values: torch.Tensor) -> TensorData:
            return TensorData(values)

        def to_torch(self) -> torch.Tensor:
            return self.values

    put("tinker", TensorData=TensorData)
    data = [
        SimpleNamespace(loss_fn_inputs={"mask": TensorData(mask.float()), "advantages": TensorData(a * mask)})
        for mask, a in zip(MASK, ADVANTAGE, strict=True)
    ]
    metadata = [{"group_idx": group, "traj_idx": at} for at, group in enumerate(GROUPS)]
    _run("tinker", mode)["aggregate"](data, metadata)
    return torch.stack([one.loss_fn_inputs["advantages"].to_torch().sum() for one in data]) / MASK.sum(1)


SHAPES = {"verl": _verl, "openrlhf": _openrlhf, "slime": _slime, "nemo-rl": _nemo_rl, "tinker": _tinker}


def _wanted(mode: Rule, groups: tuple[int, ...] = GROUPS) -> float:
    """The mode's loss, by weights and losses token by token."""
    samples = [{**one, "group_index": group} for one, group in zip(_samples(), groups, strict=True)]
    losses = token_numbers(samples, ADVANTAGE.tolist(), 0.2, 0.28)["pg_loss"]
    weights = closed_form.weights(samples, mode.name, DIVISOR)
    return sum(w * x for ws, xs in zip(weights, losses, strict=True) for w, x in zip(ws, xs, strict=True))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("framework", SHAPES)
def test_the_snippet_makes_the_framework_compute_the_mode_under_any_split(
    framework: str, mode: Rule, modules: Callable[..., None]
) -> None:
    advantages = SHAPES[framework](mode, modules).tolist()
    losses = token_numbers(_samples(), advantages, 0.2, 0.28)["pg_loss"]
    groups = (0, 0, 1, 1, 2, 2) if framework == "openrlhf" else GROUPS
    rows = rows_of(_samples(), losses)
    for split in SPLITS:
        found = step_loss(SNIPPETS[framework].under, rows, split, DIVISOR)
        assert found == pytest.approx(_wanted(mode, groups), rel=1e-6)
    assert len({round(_wanted(other), 9) for other in MODES}) == len(MODES)


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "constant"])
def test_it_does_in_verls_own_advantages_and_agg_loss(mode: str) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    core.ADV_ESTIMATOR_REGISTRY.pop("grpo_aggregated", None)
    _run("verl", find_rule(mode))
    rewards = torch.zeros(MASK.shape, dtype=torch.float64)
    rewards[:, 0] = torch.tensor(REWARDS, dtype=torch.float64)
    uids = np.array([f"uid-{group}" for group in GROUPS], dtype=object)
    estimator = core.get_adv_estimator_fn("grpo_aggregated")
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=MASK, index=uids, config={})
    plain, _ = core.compute_grpo_outcome_advantage(rewards, MASK, uids)
    plain_S = plain.sum(1) / MASK.sum(1)
    weights = closed_form.weights(_samples(), mode, DIVISOR)
    wanted = sum(-float(plain_S[at]) * sum(weights[at]) for at in range(6))  # on-policy: l_t = -A
    for split in SPLITS:
        found = 0.0
        for rank in split:
            for held in rank:
                options = {"dp_size": len(split), "global_batch_size": 6, "batch_num_tokens": int(MASK.sum())}
                found += float(core.agg_loss(-advantages[held], MASK[held], "seq-mean-token-sum", **options))
        assert found / len(split) == pytest.approx(wanted, rel=1e-6)


def test_slimes_reducer_for_a_constant_is_the_sum_over_it_in_any_micro_batch() -> None:
    code = SNIPPETS["slime"].reducer_code(find_rule("constant"))
    found: dict[str, Any] = {}
    exec(code.replace("4096.0", "9.0"), found)
    step = batch_of(_samples())
    for held in ([0, 1, 2, 3, 4, 5], [3, 1]):
        part = step.select(torch.tensor(held))
        weight_T = reducer_weights(found["constant"], part, calculate_per_token_loss=False)
        assert weight_T.tolist() == [m / 9 for at in held for m in _samples()[at]["loss_mask"]]  # slime divides by N itself
    assert not any(SNIPPETS["slime"].reducer_code(mode) for mode in MODES if mode.name != "constant")


def test_every_snippet_is_written_for_its_rule_and_takes_every_mode() -> None:
    for one in SNIPPETS.values():
        if one.framework in ("trl", "skyrl"):
            continue
        assert RULES[one.under].framework == one.framework
        for mode in MODES:
            assert f'mode="{mode.name}"' in one.code(mode)
            assert f'under="{one.under}"' in one.code(mode)
    for mode in MODES:
        assert f'loss_aggregation="{mode.name}"' in SNIPPETS["trl"].code(mode)
        compile(SNIPPETS["trl"].code(mode), "trl", "exec")
        assert native("skyrl", mode), "SkyRL has each of the four itself"
    folder = Path(__file__).parent.parent / "aggcli" / "data" / "snippets"
    assert {path.name for path in folder.iterdir()} == {f for one in SNIPPETS.values() for f in (one.file, one.reducer[1]) if f}


def test_modes_prints_the_lines_ready_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    shown = aggcli(capsys, "modes", "constant", "--in", "slime")
    assert shown.code == 0
    for code in (SNIPPETS["slime"].code(find_rule("constant")), SNIPPETS["slime"].reducer_code(find_rule("constant"))):
        assert code in shown.out
    assert 'mode="constant", divisor=L, under="slime:sample_mean"' in shown.out
    told = strict_json(aggcli(capsys, "modes", "prompt_mean", "--in", "verl", "--json").out)
    assert told["own"] == []
    assert "P/N times the strict mean over prompts" in told["notes"][0]
    assert (
        aggcli(capsys, "modes", "prompt_mean", "--in", "skyrl").out.count("trainer.algorithm.loss_reduction=prompt_mean") == 1
    )
    for arguments, message in (
        (("modes", "constant", "--in", "verk"), "--in verk: no snippet for it; did you mean 'verl'?"),
        (("modes", "--in", "verl"), "--in verl: give the mode, as in `aggcli modes prompt_mean --in verl`"),
    ):
        refused = aggcli(capsys, *arguments)
        assert refused.code == 2
        assert message in refused.err
