"""Numbers that a dtype cannot hold are blank with the reason, unless the loss needs them; and metrics over trained rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli import compared, exactly, records, refused, replay
from tests.fixtures import MODES, sample

ON = [-1.0, -1.0]


def two(advantages: tuple[float, float] = (0.6, -0.2), **second: list[float]) -> list[dict[str, Any]]:
    """Two rollouts of a group with two tokens each; what is given is the second's."""
    made = []
    for at, advantage in enumerate(advantages):
        fields = {"log_probs": ON, "old_log_probs": ON, "ref_log_probs": ON} | (second if at else {})
        made.append(sample(2, group_index=0, reward=1 - at, advantage=advantage, **fields))
    return made


# -- overflow ---------------------------------------------------------------------------------------------------------


def test_a_kl_that_float32_cannot_hold_is_blank_with_sample_token_and_dtype_and_the_loss_is_right(tmp_path, capsys) -> None:
    """ref - current = 100 on the second sample's last token: exp(100) is 2.7e43. pg_loss: -(0.6 - 0.2)/2 = -0.2."""
    samples = two(ref_log_probs=[-1.0, 99.0])
    told = compared(capsys, tmp_path, samples, "--dtype", "float32", "--layouts", "dp1,dp2")
    for mode in ("sample_mean", "token_mean", "prompt_mean"):
        values = told.modes[mode]
        assert values["pg_loss"] == pytest.approx(-0.2, abs=1e-7)
        for numbers in (values, *values["layouts"].values()):
            assert numbers["kl_loss"] is None
            assert numbers["pg_loss"] is not None
        assert values["layouts"]["dp2"]["ranks"][0]["kl_loss"] == 0.0, "this rank's own share holds"
        (line,) = records(told.output / mode / "metrics.jsonl")
        assert line["kl_loss"] is None
    assert told.step["skipped"]["kl_loss"].startswith("overflows float32 at step 0 (")
    assert told.step["skipped"]["kl_loss"].endswith("), sample 1, token 1")
    printed = replay(capsys, tmp_path, samples, "--dtype", "float32", "--layouts", "dp1,dp2")
    assert printed.code == 0
    assert "skipped: kl_loss: overflows float32 at step 0" in " ".join(printed.out.split())
    exact = compared(capsys, tmp_path, samples).modes["token_mean"]["kl_loss"]
    assert exact == pytest.approx(2.718281828459045**100 / 4, rel=1e-12)


def test_a_kl_that_overflows_is_refused_where_the_loss_holds_it(tmp_path, capsys) -> None:
    samples = two(ref_log_probs=[-1.0, 99.0])
    line = refused(replay(capsys, tmp_path, samples, "--dtype", "float32", "--kl-coef", 0.1))
    assert "sample 1, token 1: loss overflows float32" in line


@pytest.mark.parametrize(
    ("advantage", "flags", "loss"),
    [
        (0.4, (), -(0.6 + (0.4 + 1.2 * 0.4) / 2) / 2),  # the clip binds: 1.2 times the advantage
        (0.0, (), -0.3),
        (-0.2, ("--eps-clip-c", 3), -(0.6 + (-0.2 - 3 * 0.2) / 2) / 2),  # the dual clip binds
    ],
    ids=["clipped", "no advantage", "dual clip"],
)
def test_a_ratio_that_overflows_is_blank_where_the_loss_does_not_need_it(tmp_path, capsys, advantage, flags, loss) -> None:
    samples = two((0.6, advantage), log_probs=[-1.0, 999.0])
    told = compared(capsys, tmp_path, samples, *flags, "--layouts", "dp1,dp2cp2")
    for mode in ("sample_mean", "token_mean"):
        values = told.modes[mode]
        assert values["pg_loss"] == exactly(loss)
        assert values["ppo_kl"] == exactly(-250.0)
        assert (values["ratio_max"], values["ratio_deviation"]) == (None, None)
        assert values["grad_norm_log_probs"] == pytest.approx((2 * 0.15**2 + (advantage / 4) ** 2) ** 0.5, rel=1e-12)
    for name in ("ratio_max", "ratio_deviation"):
        assert told.step["skipped"][name].endswith("sample 1, token 1")
        assert told.step["skipped"][name].startswith("overflows float64 at ")


def test_a_ratio_that_overflows_without_any_advantage_refuses_nothing_and_one_that_the_loss_needs_is_refused(
    tmp_path, capsys
) -> None:
    samples = two(log_probs=[-1.0, 999.0])
    bare = [{name: value for name, value in s.items() if name not in ("advantage", "reward")} for s in samples]
    told = compared(capsys, tmp_path, bare, "--modes", "token_mean")
    assert told.modes["token_mean"]["ppo_kl"] == exactly(-250.0)
    assert told.modes["token_mean"]["ratio_max"] is None
    assert "sample 1, token 1: log_probs - old_log_probs is 1000 nats" in refused(replay(capsys, tmp_path, samples))
    unbiased = ("--kl-coef", 0.1, "--kl-unbiased", "--eps-clip-c", 3)
    assert "sample 1, token 1: log_probs - old_log_probs" in refused(replay(capsys, tmp_path, samples, *unbiased))


# -- fully masked rollouts --------------------------------------------------------------------------------------------


def of_three(**fields: Any) -> list[dict[str, Any]]:
    """Two trained rollouts and a third, fully masked: KL (k1) 2, entropy 1.5, mismatch 0.25, one ratio of two clipped."""
    made = []
    for at in range(3):
        streams = {
            "log_probs": [0.0, -1.0],
            "old_log_probs": [-1.0, -1.0],
            "ref_log_probs": [-2.0, -3.0],
            "rollout_log_probs": [-1.25, -0.75],
            "entropy": [1.0, 2.0],
        }
        mask = {"loss_mask": [0, 0]} if at == 2 else {}
        made.append(sample(2, group_index=0, reward=1 - at % 2, advantage=0.5, **streams, **mask, **fields))
    return made


TRAINED = {"kl_loss": 2.0, "entropy_loss": 1.5, "sampler_mismatch": 0.25, "pg_clipfrac": 0.5, "ppo_kl": -0.5}


def test_beside_a_metric_that_counts_fully_masked_rollouts_stands_the_one_over_the_trained(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, of_three(), "--kl-estimator", "k1", "--layouts", "dp1,dp2cp2")
    for mode in ("sample_mean", "prompt_mean", "constant"):
        for name, value in TRAINED.items():
            assert told.modes[mode][name] == exactly(value * 2 / 3), (mode, name)
            assert told.modes[mode][f"{name}/trained_rollouts"] == exactly(value), (mode, name)
    for name, value in TRAINED.items():
        assert told.modes["token_mean"][name] == exactly(value)
        assert f"{name}/trained_rollouts" not in told.modes["token_mean"], "a mean over tokens counts no rollout"
    said = "fully masked rollouts count as 0 in these metrics under sample_mean, prompt_mean and constant; over the trained"
    assert said in told.err
    assert "kl_loss 2 (counted: 1.3333)" in told.err
    table = replay(capsys, tmp_path, of_three(), "--kl-estimator", "k1").out.splitlines()
    kl = next(at for at, line in enumerate(table) if line.split()[:1] == ["kl_loss"])
    assert table[kl + 1].split() == ["over", "trained", "rollouts", "only", "2"]


def test_matched_metrics_over_the_trained_rollouts_are_those_of_a_step_without_the_others(tmp_path, capsys) -> None:
    flags = ("--kl-estimator", "k1", "--metric-aggregation", "matched")
    told = compared(capsys, tmp_path, of_three(), *flags)
    without = compared(capsys, tmp_path, of_three()[:2], *flags)
    for mode in MODES:
        for name in TRAINED:
            beside = told.modes[mode].get(f"{name}/trained_rollouts", told.modes[mode][name])
            assert beside == exactly(without.modes[mode][name]), (mode, name)


def test_a_fully_masked_sibling_of_a_trained_rollout_and_a_step_without_any_have_nothing_beside(tmp_path, capsys) -> None:
    siblings = [s | {"rollout_id": at // 2, "reward": 1} for at, s in enumerate(of_three()[1:])]
    for samples in (siblings, of_three()[:2], of_three()[2:]):
        told = compared(capsys, tmp_path, samples)
        assert not [name for mode in MODES for name in told.modes[mode] if name.endswith("/trained_rollouts")]
        assert "over the trained rollouts alone" not in told.err
