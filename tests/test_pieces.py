"""A step is measured some samples at a time: which ones together shows in no number, and nothing of a whole step is copied."""

from __future__ import annotations

import pytest
import torch

from aggcli.config import settings_from
from aggcli.layout.schedule import Schedule, parse_layout, schedule_step
from aggcli.layout.views import cut, cut_in_pieces
from aggcli.measurement.local import Adding, MeasureConfig, measure
from aggcli.objective.step import step_inputs
from tests.fixtures import MODES, batch_of, random_fanout, rules_named

LAYOUTS = ("dp1", "dp2:balanced:mb3", "dp3cp2@40", "dp2cp4:interleaved", "dp64")


@pytest.mark.parametrize("tokens", [1, 30, 2**18])
@pytest.mark.parametrize("layout", [*LAYOUTS, "backwards"])
def test_a_rank_measured_in_pieces_gives_bit_for_bit_what_it_gives_as_a_whole(layout: str, tokens: int) -> None:
    """Fan-out, masks, and micro-batches that run against the order of the partition ("backwards")."""
    objective = settings_from({"loss_aggregation_divisor": 10.0, "prompt_mean_scale": "prompts"}).objective
    inputs = step_inputs(batch_of(random_fanout()), objective, rules_named(MODES, objective), torch.float64)
    samples = inputs.step.num_samples
    if layout == "backwards":
        cp, backwards = 2, tuple(reversed(range(samples)))
        schedule = Schedule((tuple(range(samples)),), ((backwards[:5], backwards[5:]),))
    else:
        cp, schedule = parse_layout(layout).cp, schedule_step(parse_layout(layout), inputs.step.total_length_S.tolist())
    config = MeasureConfig(inputs.names, inputs.weight_names, objective, inputs.has_ratio, 1.0, 8, log_correct_samples=True)
    whole = [measure(view, config) for view in cut(inputs.step, schedule, cp, tokens=inputs.tokens, weights=inputs.weights)]
    pieces, in_pieces = 0, []
    given = {"tokens": inputs.tokens, "weights": inputs.weights, "tokens_of_piece": tokens}
    for of_rank in cut_in_pieces(inputs.step, schedule, cp, **given):
        ranks = [Adding(config) for _ in range(cp)]
        for piece in of_rank:
            pieces += 1
            for rank, view in zip(ranks, piece, strict=True):
                rank.add(view)
        in_pieces += [rank.added() for rank in ranks]
    assert in_pieces == whole
    assert pieces >= min(
        samples, int(inputs.step.response_length_S.sum()) // (tokens + int(inputs.step.response_length_S.max()))
    )
    assert tokens < 2**18 or pieces == len(schedule.partitions)


def test_all_samples_of_a_batch_in_their_order_are_its_own_memory() -> None:
    batch = batch_of(random_fanout())
    everything = batch.select(torch.arange(batch.num_samples), name="all")
    assert everything.name == "all"
    assert everything.loss_mask_T.data_ptr() == batch.loss_mask_T.data_ptr()
    turned = batch.select(torch.arange(batch.num_samples).flip(0))
    assert turned.response_length_S.tolist() == batch.response_length_S.tolist()[::-1]
    assert turned.loss_mask_T.data_ptr() != batch.loss_mask_T.data_ptr()
