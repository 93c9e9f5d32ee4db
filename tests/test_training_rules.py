"""Training under another framework's rule, and under denominators counted in less than the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout
from aggcli.training.stack import RunSpec
from aggcli.training.step import stack_weights
from tests.cli import aggcli, records
from tests.fixtures import batch_of, fx_b


def _run(mode: str) -> RunSpec:
    objective = settings_from({"loss_aggregation": mode, "loss_aggregation_divisor": 10.0}).objective
    return RunSpec(mode, 0, objective, 1e-3)


def test_the_mean_of_micro_batch_means_weighs_fx_b_as_worked_out_by_hand() -> None:
    """FX-B has 1, 3, 4, 8 tokens. Micro-batches of two samples hold 4 and 12 tokens; their means count half each."""
    step = batch_of(fx_b())
    weight_T = stack_weights(step, [_run("trl:bnpo")], parse_layout("dp1:contiguous", micro_batch_size=2))[0]
    assert weight_T.tolist() == pytest.approx([1 / 8] * 4 + [1 / 24] * 12, abs=1e-12)
    whole_T = stack_weights(step, [_run("trl:bnpo")], parse_layout("dp1"))[0]
    assert whole_T.tolist() == pytest.approx([1 / 16] * 16, abs=1e-12)


def test_each_run_of_a_stack_is_weighed_by_its_own_rule() -> None:
    """A mode beside a framework's rule: each gets the weights that it has alone."""
    import dataclasses

    one = batch_of(fx_b())
    both = one.select(torch.arange(4).repeat(2))
    second = torch.arange(8) // 4
    both = dataclasses.replace(
        both, run_S=second, rollout_S=both.rollout_S + 4 * second, group_S=both.group_S + 2 * second, labels=type(one.labels)()
    )
    layout = parse_layout("dp1:contiguous", micro_batch_size=2)
    rules = ["sample_mean", "token_mean@micro-batch"]
    together_T = stack_weights(both, [_run(rule) for rule in rules], layout)[0]
    alone = [stack_weights(one, [_run(rule)], layout)[0] for rule in rules]
    torch.testing.assert_close(together_T, torch.cat(alone), rtol=1e-12, atol=0)
    assert alone[0][0] == pytest.approx(1 / 4)  # sample_mean: 1 / (4 rollouts * 1 token)


@pytest.mark.parametrize("arguments", [("--loss-aggregation", "trl:bnpo"), ("--normalizer", "micro-batch")])
def test_a_rule_that_depends_on_the_layout_trains_and_is_recorded_as_moving(arguments, tmp_path: Path, capsys) -> None:
    small = ["--steps", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--micro-batch-size", "4"]
    token_mean = ["--loss-aggregation", "token_mean"] if "--normalizer" in arguments else []
    told = aggcli(capsys, "run", *arguments, *token_mean, *small, "--dtype", "float64", "--output", tmp_path / "o")
    assert told.code == 0, told.err
    rule = "trl:bnpo" if "trl:bnpo" in arguments else "token_mean@micro-batch"
    assert f"note: {rule} varies with the layout: the trained tokens are counted in each micro-batch" in told.err
    losses = [line["pg_loss"] for line in records(tmp_path / "o" / "layouts.jsonl")]
    assert max(losses) - min(losses) > 1e-6
