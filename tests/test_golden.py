"""The engine against numbers that slime's own reducer, policy loss and schedule gave (commit 624b824a)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.layout.views import cut
from aggcli.measurement.local import MeasureConfig, gradients
from aggcli.objective.step import step_inputs
from tests.fixtures import batch_of, replayed, with_places

GOLDEN = json.loads((Path(__file__).parent / "data" / "slime_reducer.json").read_text())
CASES = [(entry["fixture"], case) for entry in GOLDEN for case in entry["cases"]]
IDS = [f"{f['name']}-{c['mode']}-{c['prompt_norm']}-dp{c['dp']}cp{c['cp']}@{c['max_tokens_per_gpu']}" for f, c in CASES]


def _settings(fixture: dict, case: dict) -> dict:
    return {
        "loss_aggregation_divisor": case["divisor"],
        "prompt_mean_scale": case["prompt_norm"] or "rollouts",
        "eps_clip": fixture["eps_clip"],
        "eps_clip_high": fixture["eps_clip_high"],
        "layouts": [f"dp{case['dp']}cp{case['cp']}:first-fit@{case['max_tokens_per_gpu']}"],
    }


@pytest.mark.parametrize(("fixture", "case"), CASES, ids=IDS)
def test_a_slime_case_has_slimes_loss_metrics_ranks_and_schedule(fixture: dict, case: dict) -> None:
    mode = case["mode"]
    (report,) = replayed(batch_of(fixture["samples"]), (mode,), **_settings(fixture, case))
    values = report.values[mode]
    for name in ("pg_loss", "pg_clipfrac", "ppo_kl"):
        assert values[name] == pytest.approx(case[name], abs=1e-10)
    (layout,) = report.layouts
    assert [rank.partition for rank in layout.ranks] == case["partitions"]
    undivided = {"token_mean": values["tokens"], "prompt_mean": values[case["prompt_norm"] or "rollouts"]}
    outer = undivided.get(mode, values["rollouts"])
    assert outer is not None
    sums = [rank.values[mode]["pg_loss"] for rank in layout.ranks]
    assert [share * outer for share in sums if share is not None] == pytest.approx(case["rank_sums"], abs=1e-10)


@pytest.mark.parametrize(("fixture", "case"), CASES, ids=IDS)
def test_first_fit_reproduces_slimes_partitions_and_micro_batches(fixture: dict, case: dict) -> None:
    lengths = [sample["total_length"] for sample in fixture["samples"]]
    schedule = schedule_step(parse_layout(_settings(fixture, case)["layouts"][0]), lengths)
    assert [list(partition) for partition in schedule.partitions] == case["partitions"]
    assert [[list(mb) for mb in rank] for rank in schedule.micro_batches] == case["micro_batch_indices"]


WITH_GRADS = [(f, c) for f, c in CASES if "grads" in c]


def test_golden_gradients_cover_every_mode_and_both_prompt_scales() -> None:
    assert {(c["mode"], c["prompt_norm"]) for _, c in WITH_GRADS} == {
        ("sample_mean", None),
        ("prompt_mean", "rollouts"),
        ("prompt_mean", "prompts"),
        ("token_mean", None),
        ("constant", None),
    }


@pytest.mark.parametrize(("fixture", "case"), WITH_GRADS)
def test_the_gradient_by_log_probs_is_slimes(fixture: dict, case: dict) -> None:
    mode = case["mode"]
    objective = settings_from({"loss_aggregation": mode, **_settings(fixture, case)}).objective
    step = batch_of(fixture["samples"])
    inputs = step_inputs(step, objective, (objective.loss_aggregation,), torch.float64)
    (layout,) = (parse_layout(text) for text in _settings(fixture, case)["layouts"])
    found_T = torch.zeros(step.loss_mask_T.numel(), dtype=torch.float64)
    measuring = MeasureConfig(inputs.names, inputs.weight_names, objective, True, 1.0, 20)
    for view in cut(with_places(inputs.whole), [schedule_step(layout, step.total_length_S.tolist())], layout.cp):
        found_T[view.tokens["place"]] += gradients(view, measuring)[mode]
    expected = [value for row in case["grads"] for value in row]
    assert found_T.tolist() == pytest.approx(expected, abs=1e-10)
