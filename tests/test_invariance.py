"""A number may not move when only the layout moves: every layout against the closed form, token by token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.layout.views import cut
from aggcli.measurement.local import MeasureConfig, gradients, measure
from aggcli.measurement.reduce import combine, reduced_values
from aggcli.objective.step import StepInputs, step_inputs
from aggcli.objective.weights import rule_weights
from tests import closed_form
from tests.fixtures import MODES, Sample, batch_of, fx_b, fx_c, fx_d, fx_f, random_fanout, rules_named, with_places

CLIP = {"eps_clip": 0.1, "eps_clip_high": 0.2}
DIVISOR = 10.0
# FX-D has no advantage of its own: these are reward minus group mean, worked out by hand.
FX_D_ADVANTAGES = [0.5, -0.5, 0.5, -0.5, 0.0, 0.0, -1 / 3, -1 / 3, 2 / 3]
FIXTURES: dict[str, Callable[[], list[Sample]]] = {
    "random fan-out": random_fanout,
    "FX-B": fx_b,
    "FX-C": fx_c,
    "FX-D": lambda: [s | {"advantage": a} for s, a in zip(fx_d(), FX_D_ADVANTAGES, strict=True)],
    "FX-F": fx_f,
}
METRICS = ("pg_clipfrac", "ppo_kl", "kl_loss", "ratio_deviation", "entropy_loss", "sampler_mismatch")
GRID = list(
    itertools.product((1, 2, 3, 4, 8), (1, 2, 4), ("first-fit", "interleaved", "contiguous", "balanced"), ("one", "few", "all"))
)


def _layout(dp: int, cp: int, rule: str, budget: str, samples: list[Sample]):
    lengths = [sample["total_length"] for sample in samples]
    tokens = {"one": 1, "few": -(-3 * sum(lengths) // len(lengths) // cp), "all": sum(lengths)}[budget]
    layout = parse_layout(f"dp{dp}cp{cp}:{rule}@{tokens}")
    return layout, schedule_step(layout, lengths)


def _inputs(samples: list[Sample], dtype: torch.dtype) -> tuple[StepInputs, MeasureConfig]:
    objective = settings_from({"loss_aggregation_divisor": DIVISOR, **CLIP}).objective
    inputs = step_inputs(batch_of(samples), objective, rules_named(MODES, objective), dtype)
    longest = max(sample["response_length"] for sample in samples)
    return inputs, MeasureConfig(inputs.names, inputs.weight_names, objective, inputs.has_ratio, 1.0, longest)


def _expected(samples: list[Sample]) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Reported numbers and gradients of each mode by plain arithmetic."""
    tokens = closed_form.token_numbers(samples, [s["advantage"] for s in samples], CLIP["eps_clip"], CLIP["eps_clip_high"])
    numbers, slopes = {}, {}
    for mode in MODES:
        weight = closed_form.weights(samples, mode, DIVISOR)
        metric_weight = closed_form.weights(samples, "token_mean" if mode == "token_mean" else "sample_mean")
        slopes[mode] = closed_form.gradient(weight, tokens["slope"])
        numbers[mode] = {
            "pg_loss": closed_form.weighted(weight, tokens["pg_loss"]),
            "grad_norm_log_probs": sum(g * g for g in slopes[mode]) ** 0.5,
            **{name: closed_form.weighted(metric_weight, tokens[name]) for name in METRICS},
        }
    return numbers, slopes


def _counts(samples: list[Sample]) -> dict[str, float | None]:
    """Numbers of whole samples, by counting."""
    correct = [s for s in samples if s["reward"] >= 1]
    rollouts = {s.get("rollout_id", at): s["reward"] for at, s in enumerate(samples)}
    lengths = [s["response_length"] for s in samples]
    return {
        "samples": len(samples),
        "tokens": sum(map(sum, closed_form.masks(samples))),
        "response_tokens": sum(lengths),
        "response_length": sum(lengths) / len(lengths),
        "raw_reward": sum(rollouts.values()) / len(rollouts),
        "correct/count": len(correct),
        "correct/response_length": sum(s["response_length"] for s in correct) / len(correct) if correct else None,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5)],
    ids=["float64", "float32"],
)
def test_every_layout_gives_the_closed_form(name: str, dtype: torch.dtype, limit: float) -> None:
    samples = FIXTURES[name]()
    inputs, measuring = _inputs(samples, dtype)
    numbers, slopes = _expected(samples)
    counts = _counts(samples)
    worst = 0.0
    for dp, cp, rule, budget in GRID:
        layout, schedule = _layout(dp, cp, rule, budget, samples)
        views = cut(with_places(inputs.whole), [schedule], layout.cp)
        total = combine([part for view in views for part in measure([view], measuring).values()])
        found = {mode: torch.zeros(inputs.step.loss_mask_T.numel(), dtype=torch.float64) for mode in MODES}
        for view in views:
            for mode, gradient_T in gradients(view, measuring).items():
                found[mode][view.tokens["place"]] += gradient_T.double()
        for mode in MODES:
            values = reduced_values(total, mode)
            for metric, expected in numbers[mode].items():
                if metric in values:
                    worst = max(worst, _relative(values[metric], expected))
            exact = torch.tensor(slopes[mode], dtype=torch.float64)
            worst = max(worst, float((found[mode] - exact).norm() / exact.norm()))
            for metric, expected in counts.items():
                assert values[metric] == pytest.approx(expected, rel=1e-12), (metric, layout.text)
    assert worst <= limit


def _relative(value: float | None, expected: float) -> float:
    assert value is not None
    return abs(value - expected) / abs(expected) if expected else abs(value)


def test_a_stack_of_two_runs_weighs_each_run_as_if_it_were_alone() -> None:
    first, second = batch_of(fx_b()), batch_of(random_fanout())
    groups, rollouts = int(first.group_S.max()) + 1, int(first.rollout_S.max()) + 1
    stacked = dataclasses.replace(
        first,
        **{
            name: torch.cat([getattr(first, name), getattr(second, name)])
            for name in ("response_length_S", "total_length_S", "loss_mask_T", "position_S", "reward_S")
        },
        rollout_S=torch.cat([first.rollout_S, second.rollout_S + rollouts]),
        group_S=torch.cat([first.group_S, second.group_S + groups]),
        run_S=torch.cat([first.run_S, second.run_S + 1]),
        log_probs_T=None,
        old_log_probs_T=None,
        ref_log_probs_T=None,
        rollout_log_probs_T=None,
        entropy_T=None,
        advantages_T=None,
    )
    objective = settings_from({"loss_aggregation_divisor": DIVISOR}).objective
    for rule in rules_named(MODES, objective):
        alone = [rule_weights(rule, b) for b in (first, second)]
        together = rule_weights(rule, stacked)
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=0)
