"""Frameworks' rules and `--normalizer` in a replay: their numbers under each layout, and what is said of those that move."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggcli.audit import preset_loss, schedule_of
from aggcli.config import RULES_ELSEWHERE
from aggcli.errors import RolloutError, SettingError
from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.objective.presets.registry import PRESETS
from tests.cli import refused, replay, strict_json
from tests.fixtures import batch_of, fx_b, fx_c, replayed

LAYOUTS = ("dp1:contiguous", "dp2:interleaved", "dp2cp2:contiguous", "dp4:balanced")
RULES = ("token_mean", "trl:bnpo", "verl-legacy:token-mean", "skyrl:prompt_mean", "verl:seq-mean-token-sum-norm")
DATA = Path(__file__).parent / "data"


def _split(layout: str) -> list[list[list[int]]]:
    schedule = schedule_step(parse_layout(layout), [sample["total_length"] for sample in fx_b()])
    return [
        [[partition[at] for at in micro_batch] for micro_batch in rank]
        for partition, rank in zip(schedule.partitions, schedule.micro_batches, strict=True)
    ]


def test_every_rule_has_its_own_loss_under_every_layout_and_only_the_exact_ones_are_held_to_it() -> None:
    (report,) = replayed(batch_of(fx_b()), RULES, layouts=LAYOUTS, eps_clip_high=0.28)
    for layout in report.layouts:
        for rule in RULES:
            expected = preset_loss(rule, fx_b(), _split(layout.layout), divisor=10)
            assert layout.values[rule]["pg_loss"] == pytest.approx(expected, rel=1e-12), (rule, layout.layout)
    assert report.layouts[1].values["trl:bnpo"]["pg_loss"] == pytest.approx(-0.025, rel=1e-12)  # ranks (0,2) and (1,3)
    largest = report.comparison.largest
    assert largest is not None
    assert largest.share < 1e-12
    moving = [note for note in report.notes if "varies with the layout" in note]
    assert [note.split(" ")[0] for note in moving] == ["trl:bnpo", "verl-legacy:token-mean"]
    assert "the trained tokens are counted in each micro-batch" in moving[0]


def test_metrics_keep_the_sample_mean_and_do_not_move_with_a_rule_that_does() -> None:
    (report,) = replayed(batch_of(fx_b()), ("sample_mean", "trl:bnpo", "token_mean@micro-batch"), layouts=LAYOUTS)
    for layout in report.layouts:
        for rule in report.rules:
            for metric in ("ppo_kl", "pg_clipfrac", "kl_loss"):
                assert layout.values[rule][metric] == pytest.approx(report.values["sample_mean"][metric], rel=1e-12)


def test_a_rule_that_divides_0_by_0_in_a_layout_is_refused_by_name() -> None:
    with pytest.raises(RolloutError, match="verl-legacy:token-mean divides 0 by 0"):
        replayed(batch_of(fx_c()), ("verl-legacy:token-mean",), layouts=("dp1:contiguous", "dp4:contiguous"))


def test_the_names_that_settings_let_through_are_looked_up_before_a_number_is_made() -> None:
    assert set(RULES_ELSEWHERE) == {name for name in PRESETS if ":" not in name}
    with pytest.raises(SettingError, match="unknown loss aggregation 'verl:mean'"):
        replayed(batch_of(fx_b()), ("verl:mean",))


def test_an_idle_rank_is_a_rank() -> None:
    assert schedule_of([[[0]], []], 1).idle_ranks == [1]


# -- the command -----------------------------------------------------------------------------------------------------


def test_run_takes_a_framework_rule_and_says_that_it_varies(capsys, tmp_path: Path) -> None:
    flags = ("--loss-aggregation", "trl:bnpo", "--layouts", "dp1,dp2:interleaved")
    told = replay(capsys, tmp_path, fx_b(), *flags, "--json", command="run")
    layouts = told.modes["trl:bnpo"]["layouts"]
    assert layouts["dp1"]["pg_loss"] == pytest.approx(0.171875)
    assert layouts["dp2:interleaved"]["pg_loss"] == pytest.approx(-0.025)
    assert "trl:bnpo varies with the layout" in told.err


def test_normalizer_counts_the_modes_denominators_in_that_scope(capsys, tmp_path: Path) -> None:
    flags = ("--modes", "token_mean,sample_mean", "--layouts", "dp2:interleaved", "--normalizer", "rank")
    modes = replay(capsys, tmp_path, fx_b(), *flags, "--json").modes
    # ranks (0,2) and (1,3): (-2.75/5 + 5.5/11)/2, and the mean of (-.55, .5)
    assert modes["token_mean@rank"]["pg_loss"] == pytest.approx(-0.025)
    assert modes["sample_mean@rank"]["pg_loss"] == pytest.approx(-0.025)
    assert modes["token_mean@rank"]["layouts"]["dp2:interleaved"]["ranks"][1]["pg_loss"] == pytest.approx(0.25)


def test_an_alias_runs_as_what_it_stands_for_and_says_so(capsys, tmp_path: Path) -> None:
    told = replay(capsys, tmp_path, fx_b(), "--loss-aggregation", "dapo", "--json", command="run")
    assert told.modes["prompt_mean"]["pg_loss"] == pytest.approx(0.19375 * 2 / 4)
    assert "note: dapo is taken as prompt_mean" in told.err
    manifest = strict_json((told.output / "manifest.json").read_text())
    assert manifest["settings"]["loss_aggregation"] == "prompt_mean"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss-aggregation", "verl:nope"), "unknown loss aggregation 'verl:nope'; verl has"),
        (("--loss-aggregation", "trl:dr_grpo"), "--loss-aggregation trl:dr_grpo needs --loss-aggregation-divisor L"),
        (("--normalizer", "epoch"), "--normalizer 'epoch' is not one of its values"),
    ],
)
def test_what_a_replay_cannot_use_is_refused(arguments: tuple[str, ...], message: str, capsys, tmp_path: Path) -> None:
    assert message in refused(replay(capsys, tmp_path, fx_b(), *arguments, command="run"))
