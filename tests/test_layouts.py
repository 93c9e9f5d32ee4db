"""Data- and context-parallel layouts: no factor of a parallel size enters, and every cell of the grid is a number."""

from __future__ import annotations

import itertools

import pytest
import torch

from aggcli.config import settings_from
from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.layout.views import cut
from aggcli.measurement.local import MeasureConfig, measure
from aggcli.measurement.reduce import combine, reduced_values
from aggcli.objective.step import step_inputs
from tests.cli import compared, exactly, per_layout, records, refused, replay, write_jsonl
from tests.fixtures import FX_B, LAYOUTS, MODES, Sample, batch_of, fx_b, fx_c, random_fanout, rules_named, sample
from tests.speed import few


def by_rank(samples: list[Sample], layout: str, micro_batch_size: int | None = None) -> dict[str, dict[str, float | None]]:
    """Each mode's numbers added up from what every context-parallel rank computes of its own view, as a real rank does."""
    objective = settings_from({"loss_aggregation_divisor": 10.0, "prompt_mean_scale": "prompts"}).objective
    inputs = step_inputs(batch_of(samples), objective, rules_named(MODES, objective), torch.float64)
    asked = parse_layout(layout, micro_batch_size=micro_batch_size)
    schedule = schedule_step(asked, inputs.step.total_length_S.tolist())
    views = cut(inputs.whole, [schedule], asked.cp)
    measuring = MeasureConfig(inputs.names, inputs.weight_names, objective, inputs.has_ratio, 1.0, 8)
    total = combine([part for view in views for part in measure([view], measuring).values()])
    return {mode: reduced_values(total, mode) for mode in MODES}


@pytest.mark.parametrize("mode", few(MODES))
def test_counts_do_not_grow_with_the_number_of_ranks(tmp_path, capsys, mode) -> None:
    """FX-B has 16 tokens and 4 samples at any layout, as exact integers on disk, and the ranks' own add up to them."""
    flags = ("--prompt-mean-scale", "prompts", "--loss-aggregation", mode, "--layouts", LAYOUTS)
    divisor = ("--loss-aggregation-divisor", 10) if mode == "constant" else ()
    told = replay(capsys, tmp_path, fx_b(), *flags, *divisor, command="run")
    assert told.code == 0, told.err
    lines = records(told.output / "layouts.jsonl")
    assert [line["layout"] for line in lines] == LAYOUTS.split(",")
    for line in [*lines, *records(told.output / "metrics.jsonl")]:
        assert (line["tokens"], line["samples"], line["response_tokens"]) == (16, 4, 16)
        assert type(line["tokens"]) is type(line["samples"]) is int
        assert line["pg_loss"] == exactly(FX_B[mode])
    for line in lines:
        for name in ("tokens", "samples", "micro_batches"):
            assert sum(rank[name] for rank in line["ranks"]) == line[name]
        assert sum(rank["pg_loss"] for rank in line["ranks"]) == exactly(line["pg_loss"])


def test_a_rank_of_few_tokens_weighs_no_more_than_its_tokens(tmp_path, capsys) -> None:
    """Ranks {0} and {1,2,3}: sample 0, of 1 token and a long prompt, is alone. Its share of token_mean is -0.55/16."""
    samples = fx_b()
    samples[0]["total_length"] = 100
    told = compared(capsys, tmp_path, samples, "--layouts", "dp2:balanced")
    layout = told.modes["token_mean"]["layouts"]["dp2:balanced"]
    assert [rank["partition"] for rank in layout["ranks"]] == [[0], [1, 2, 3]]
    assert [rank["tokens"] for rank in layout["ranks"]] == [1, 15]
    # -0.55*1; 0.5*3 - 0.55*4 + 0.5*8 = 3.3
    assert [rank["pg_loss"] for rank in layout["ranks"]] == [exactly(-0.55 / 16), exactly(3.3 / 16)]
    assert (layout["pg_loss"], layout["tokens"]) == (exactly(0.171875), 16)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_do_not_each_count_the_whole_mask(tmp_path, capsys, cp) -> None:
    """The fault: 0.0859375 and 32 tokens at CP2."""
    told = compared(capsys, tmp_path, fx_b(), "--layouts", f"dp1cp{cp},dp2cp{cp}")
    assert per_layout(told, "token_mean", "pg_loss") == [exactly(0.171875)] * 3
    assert per_layout(told, "token_mean", "tokens") == [16] * 3
    for layout in told.modes["token_mean"]["layouts"].values():
        assert sum(sum(rank["cp_tokens"]) for rank in layout["ranks"]) == 16
        assert all(len(rank["cp_tokens"]) == cp for rank in layout["ranks"])


def test_no_mode_takes_a_factor_of_the_parallel_sizes(tmp_path, capsys) -> None:
    grid = ",".join(f"dp{dp}cp{cp}" for dp, cp in itertools.product((1, 2, 4), (1, 2, 4)))
    told = compared(capsys, tmp_path, fx_b(), "--layouts", grid)
    for mode in MODES:
        assert per_layout(told, mode, "pg_loss") == [exactly(FX_B[mode])] * 10
        norms = per_layout(told, mode, "grad_norm_log_probs")
        assert norms == [exactly(norms[0])] * 10
        assert norms[0] > 0


def test_a_sample_with_one_trained_token_gives_the_same_loss_wherever_that_token_lies(tmp_path, capsys) -> None:
    """One trained token of loss 1, at each of 12 places: mean 1 (fault at CP2: half), constant 1/10."""
    folder = tmp_path / "places"
    folder.mkdir()
    for at in range(12):
        mask = [int(t == at) for t in range(12)]
        write_jsonl(tmp_path / f"places/{at}.jsonl", [sample(12, advantage=-1, group_index=0, loss_mask=mask)])
    told = compared(capsys, tmp_path, folder, "--layouts", "dp1,dp1cp2,dp1cp4,dp2cp2")
    assert len(told.steps) == 12
    for step, (mode, loss) in itertools.product(told.steps, zip(MODES, (1.0, 1.0, 1.0, 0.1), strict=True)):
        values = step["modes"][mode]
        assert [layout["pg_loss"] for layout in values["layouts"].values()] == [exactly(loss)] * 4
        assert [layout["tokens"] for layout in values["layouts"].values()] == [1] * 4


@pytest.mark.parametrize("size", [1, 2, 3, None])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dp", few([2, 1, 4, 8]))
def test_the_ranks_own_sums_add_up_to_the_closed_form(dp, cp, size) -> None:
    """FX-B and FX-C; one trained token of loss 1 among 12."""
    single = [sample(12, advantage=-1, group_index=0, loss_mask=[int(t == 7) for t in range(12)])]
    fx_c_values = dict(zip(MODES, (-0.125, -1 / 7, -1.5 / 13, -0.0375), strict=True))
    alone = dict(zip(MODES, (1.0, 1.0, 1.0, 0.1), strict=True))
    for samples, losses, tokens in ((fx_b(), FX_B, 16), (fx_c(), fx_c_values, 13), (single, alone, 1)):
        found = by_rank(samples, f"dp{dp}cp{cp}:balanced", size)
        for mode in MODES:
            assert found[mode]["pg_loss"] == exactly(losses[mode]), mode
            assert (found[mode]["tokens"], found[mode]["samples"]) == (tokens, len(samples))


@pytest.mark.slow
def test_every_cell_of_mode_and_layout_is_a_number(tmp_path, capsys) -> None:
    """Nothing valid is refused: 4 modes, DP 1,2,3,8, CP 1,2,4, four partition rules, on a batch with fan-out and masks."""
    rules = ("first-fit", "interleaved", "contiguous", "balanced")
    cells = [f"dp{dp}cp{cp}:{rule}" for dp, cp, rule in itertools.product((1, 2, 3, 8), (1, 2, 4), rules)]
    told = compared(capsys, tmp_path, random_fanout(), "--layouts", ",".join(cells), "--no-samples")
    for mode in MODES:
        layouts = told.modes[mode]["layouts"]
        assert list(layouts) == cells
        for name in ("pg_loss", "grad_norm_log_probs", "ppo_kl", "kl_loss", "entropy_loss", "correct/entropy", "raw_reward"):
            assert [layouts[cell][name] for cell in cells] == [exactly(layouts["dp1cp1:first-fit"][name])] * len(cells), name
    assert told.step["layout_deviation"] < 1e-11


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--layouts", "dp0"), "layout 'dp0': ranks, token budget and samples of a micro-batch must be at least 1"),
        (("--layouts", "dp2:fist-fit"), "layout 'dp2:fist-fit': unknown partition rule 'fist-fit'; did you mean 'first-fit'?"),
        (("--layouts", "cp2"), "layout 'cp2': must be dp<N>[cp<M>][:rule][@tokens|:mb<K>]"),
        (("--layouts", "recorded"), "layout 'recorded': the file records none"),
        (
            ("--micro-batch-size", "2", "--max-tokens-per-gpu", "8"),
            "--max-tokens-per-gpu and --micro-batch-size are two ways to cut micro-batches; give one",
        ),
        (("--cp", "0"), "--cp 0: must be at least 1"),
    ],
)
def test_a_refused_cell_names_what_is_not_supported(tmp_path, capsys, flags, named) -> None:
    assert named in refused(replay(capsys, tmp_path, fx_b(), *flags))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token_mean"])
def test_the_one_pair_of_modes_that_excludes_itself_is_named(tmp_path, capsys, mode) -> None:
    told = replay(
        capsys,
        tmp_path,
        fx_b(),
        "--loss-aggregation",
        mode,
        "--loss-aggregation-divisor",
        10,
        "--calculate-per-token-loss",
        command="run",
    )
    assert f"--calculate-per-token-loss is token_mean and cannot go with --loss-aggregation {mode}" in refused(told)
