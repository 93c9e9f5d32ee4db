"""A step is measured some samples at a time, of many ranks and runs together: which ones together shows in no number, and
nothing of a whole step is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from aggcli.config import settings_from
from aggcli.errors import RolloutError
from aggcli.layout.schedule import Schedule, parse_layout, schedule_step
from aggcli.layout.views import Rank, cut, cut_in_pieces
from aggcli.measurement.local import MeasureConfig, Partials, measure
from aggcli.objective.step import OWN, OWN_WEIGHTS, step_inputs
from aggcli.rollouts import batch as batches
from aggcli.rollouts.batch import SAMPLE_FIELDS, TOKEN_FIELDS, Labels, RolloutBatch, Spread
from tests.fixtures import MODES, batch_of, random_fanout, rules_named, sample

LAYOUTS = ("dp1", "dp2:balanced:mb3", "dp3cp2@40", "dp2cp4:interleaved", "dp64")


@pytest.mark.parametrize("tokens", [1, 30, 2**18])
@pytest.mark.parametrize("layout", [*LAYOUTS, "backwards"])
def test_a_rank_measured_in_pieces_or_beside_others_gives_bit_for_bit_what_it_gives_alone(layout: str, tokens: int) -> None:
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
    alone: dict[Rank, Partials] = {}
    for view in cut(inputs.whole, [schedule], cp):
        alone |= measure([view], config)
    pieces, joined = 0, dict[Rank, Partials]()
    for of_ranks in cut_in_pieces(inputs.whole, [schedule], cp, tokens_of_piece=tokens):
        views = list(of_ranks)
        pieces += len(views)
        joined |= measure(views, config)
    assert joined == alone
    assert len(joined) == len(schedule.partitions) * cp
    longest, total = int(inputs.step.response_length_S.max()), int(inputs.step.response_length_S.sum())
    assert pieces >= min(samples, total // (tokens + longest))
    assert tokens < 2**18 or pieces == 1


@pytest.mark.parametrize("tokens", [1, 100, 2**18])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_that_are_measured_together_each_give_bit_for_bit_what_they_give_alone(layout: str, tokens: int) -> None:
    """Three runs of other samples, the second without any, each under its own weights and its own schedule."""
    objective, asked = settings_from({"kl_coef": 0.5}).objective, parse_layout(layout)
    rules = rules_named(("sample_mean", "sample_mean", "token_mean"), objective)
    steps = [batch_of(random_fanout(seed)) for seed in (1, 2, 3)]
    steps[1] = steps[1].select(torch.arange(0))
    alone = [step_inputs(step, objective, (rule,), torch.float64) for step, rule in zip(steps, rules, strict=True)]
    inputs = step_inputs(_stacked(steps), objective, (), torch.float64)
    of_kinds = zip(*([one.weight_T(name) for name in one.weighing[one.names[0]].names] for one in alone), strict=True)
    weights = {name: torch.cat(of_runs) for name, of_runs in zip(OWN_WEIGHTS, of_kinds, strict=True)}
    schedules = [schedule_step(asked, one.step.total_length_S.tolist()) for one in alone]
    config = MeasureConfig((OWN,), {OWN: OWN_WEIGHTS}, objective, inputs.has_ratio, 1.0, 8, log_correct_samples=True)
    joined: dict[Rank, Partials] = {}
    for of_ranks in cut_in_pieces(inputs.whole.under(weights), schedules, asked.cp, tokens_of_piece=tokens):
        joined |= measure(of_ranks, config)
    for run, (one, schedule) in enumerate(zip(alone, schedules, strict=True)):
        own = replace(config, rules=one.names, weighing=one.weight_names)
        for view in cut(one.whole, [schedule], asked.cp):
            ((rank, part),) = measure([view], own).items()
            assert joined.pop(rank._replace(run=run)).under(one.names[0]) == part
    assert not joined


def _stacked(steps: Sequence[RolloutBatch]) -> RolloutBatch:
    """The samples of these steps as the runs of one, without an id in common."""
    present = [name for name in (*SAMPLE_FIELDS, "loss_mask_T", *TOKEN_FIELDS) if getattr(steps[0], name) is not None]
    joined = {name: torch.cat([getattr(step, name) for step in steps]) for name in present}
    run_S = torch.arange(len(steps)).repeat_interleave(torch.tensor([step.num_samples for step in steps]))
    ids = {name: joined[name] + 100 * run_S for name in ("rollout_S", "group_S")}
    return replace(steps[0], **joined | ids | {"run_S": run_S}, labels=Labels())


def test_all_samples_of_a_batch_in_their_order_are_its_own_memory() -> None:
    batch = batch_of(random_fanout())
    everything = batch.select(torch.arange(batch.num_samples), name="all")
    assert everything.name == "all"
    assert everything.loss_mask_T.data_ptr() == batch.loss_mask_T.data_ptr()
    turned = batch.select(torch.arange(batch.num_samples).flip(0))
    assert turned.response_length_S.tolist() == batch.response_length_S.tolist()[::-1]
    assert turned.loss_mask_T.data_ptr() != batch.loss_mask_T.data_ptr()


MASKS = ([1, 0, 1], [], [0, 1, 1, 1], [1])
"""Loss masks of four samples, of 8 tokens together."""


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 100])
def test_tokens_are_counted_and_told_apart_the_same_some_at_a_time(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "TOKENS_OF_CHUNK", tokens)
    batch = batch_of(sample(len(mask), loss_mask=mask) for mask in MASKS)
    assert batch.mask_sum_S.tolist() == [2, 0, 3, 1]
    assert batch.derived(loss_mask_T=~batch.loss_mask_T).mask_sum_S.tolist() == [1, 0, 1, 0]
    assert batch.select(torch.tensor([3, 2])).mask_sum_S.tolist() == [1, 3]
    assert [part.mask_sum_S.tolist() for part in batch.split([1, 3])] == [[2], [0, 3, 1]]
    chunked = [(chunk.start, chunk.stop, sample_C.tolist()) for chunk, sample_C in batch.token_chunks()]
    assert [at for *_, of_chunk in chunked for at in of_chunk] == [0, 0, 0, 2, 2, 2, 2, 3]
    assert [stop - start for start, stop, _ in chunked] == [len(of_chunk) for *_, of_chunk in chunked]
    assert max(len(of_chunk) for *_, of_chunk in chunked) == min(tokens, 8)


@pytest.mark.parametrize("tokens", [1, 3, 100])
def test_a_number_that_is_not_finite_is_named_wherever_the_look_at_it_begins(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The NaN under the mask of sample 0 is none of anybody's business; the one of sample 2 is at its own token 3."""
    monkeypatch.setattr(batches, "TOKENS_OF_CHUNK", tokens)
    numbers = ([-1.0, float("nan"), -1.0], [], [-1.0, -1.0, -1.0, float("nan")], [-1.0])
    rows = [sample(len(mask), loss_mask=mask, log_probs=own) for mask, own in zip(MASKS, numbers, strict=True)]
    with pytest.raises(RolloutError, match="sample 2, token 3: log_probs is nan where loss_mask is 1"):
        batch_of(rows)


def test_a_weight_of_samples_is_the_same_array_whole_and_in_part() -> None:
    """2, 3, 5, 7 at the tokens of the four samples that their masks leave; the sample of no tokens shows nowhere."""
    batch = batch_of(sample(len(mask), loss_mask=mask) for mask in MASKS)
    value_S = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64)
    spread = Spread(value_S, batch.response_length_S, batch.loss_mask_T)
    assert spread.whole().tolist() == [2, 0, 2, 0, 5, 5, 5, 7]
    at_N = torch.tensor([7, 4, 1, 0])
    assert spread.at(at_N, batch.sample_of_token()[at_N]).tolist() == [7, 5, 0, 2]
    everywhere = Spread(value_S, batch.response_length_S, None)
    assert everywhere.whole().tolist() == [2, 2, 2, 5, 5, 5, 5, 7]
    assert everywhere.at(at_N, batch.sample_of_token()[at_N]).tolist() == [7, 5, 2, 2]
