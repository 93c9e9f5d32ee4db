"""Frameworks' rules and `--normalizer` in a replay: their numbers under each layout, and what is said of those that move."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import aggcli as package
from aggcli.auditing import rule_loss, schedule_of
from aggcli.config import settings_from
from aggcli.errors import RolloutError, SettingError
from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.rules import ELSEWHERE, Rule
from tests.cli import aggcli, refused, replay, strict_json
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
            expected = rule_loss(rule, fx_b(), _split(layout.layout), divisor=10)
            assert layout.values[rule]["pg_loss"] == pytest.approx(expected, rel=1e-12), (rule, layout.layout)
    assert report.layouts[1].values["trl:bnpo"]["pg_loss"] == pytest.approx(-0.025, rel=1e-12)  # ranks (0,2) and (1,3)
    largest = report.comparison.largest
    assert largest is not None
    assert largest.share < 1e-12
    moving = [note for note in report.notes if "varies with the layout" in note]
    assert [note.split(" ")[0] for note in moving] == ["trl:bnpo", "verl-legacy:token-mean", "skyrl:prompt_mean"]
    assert "of its KL or entropy term: the trained tokens are counted in each micro-batch" in moving[2]
    assert "the trained tokens are counted in each micro-batch" in moving[0]


def test_metrics_keep_the_sample_mean_and_do_not_move_with_a_rule_that_does() -> None:
    (report,) = replayed(batch_of(fx_b()), ("sample_mean", "trl:bnpo", "token_mean@micro-batch"), layouts=LAYOUTS)
    for layout in report.layouts:
        for rule in report.rules:
            for metric in ("ppo_kl", "pg_clipfrac"):
                assert layout.values[rule][metric] == pytest.approx(report.values["sample_mean"][metric], rel=1e-12)


def test_a_rule_that_divides_0_by_0_in_a_layout_is_refused_by_name() -> None:
    with pytest.raises(RolloutError, match="verl-legacy:token-mean divides 0 by 0"):
        replayed(batch_of(fx_c()), ("verl-legacy:token-mean",), layouts=("dp1:contiguous", "dp4:contiguous"))


def test_a_name_that_nobody_uses_is_refused_where_settings_are_made() -> None:
    with pytest.raises(SettingError, match="unknown loss aggregation 'verl:mean'; verl has"):
        settings_from({"loss_aggregation": "verl:mean"})
    with pytest.raises(SettingError, match="unknown loss aggregation 'token_meen'; did you mean 'token_mean'"):
        settings_from({"modes": ("sample_mean", "token_meen")})


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


# -- the KL and entropy terms of a rule --------------------------------------------------------------------------------

KL = {"token_mean": 0.0297844383, "sample_mean": 0.0476550899}
"""kl_loss of FX-B with a reference of -1 everywhere, k1: d is ln 1.1 on samples 0 and 2, of 1 and 4 tokens: 5 ln 1.1 / 16, and
(ln 1.1 + ln 1.1) / 4."""


def _fx_b_with_reference() -> list[dict]:
    made = []
    for at, sample in enumerate(fx_b()):
        streams = {name: [-1.0] * sample["response_length"] for name in ("old_log_probs", "ref_log_probs")}
        new = [-1.0 + (math.log(1.1) if at in (0, 2) else 0.0)] * sample["response_length"]
        made.append(sample | streams | {"log_probs": new})
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("rule", "kl", "loss"),
    [
        ("token_mean", "token_mean", 0.2314439),
        ("sample_mean", "sample_mean", 0.0703102),
        ("trl:dapo", "token_mean", 0.2314439),
        ("trl:grpo", "sample_mean", 0.0703102),
        # OpenRLHF's KL loss is per token whatever the policy loss is: -.025 + 2 * 0.0297844
        ("openrlhf:sequence", "token_mean", 0.0345689),
        # the mode keeps the sample mean for its metrics, the framework's rule does not
        ("constant", "sample_mean", 0.06875 + 2 * KL["sample_mean"]),
    ],
)
def test_the_kl_term_is_aggregated_as_the_rule_says(rule: str, kl: str, loss: float, size: int) -> None:
    """TRL adds `beta * kl` to a token's loss before it aggregates (huggingface/trl issue #7011, PR #7042)."""
    given = {"kl_coef": 2.0, "kl_estimator": "k1", "advantages": "mean_only"}
    (report,) = replayed(batch_of(_fx_b_with_reference()), (rule,), **given, layouts=(f"dp1:contiguous:mb{size}",))
    assert report.values[rule]["kl_loss"] == pytest.approx(KL[kl], abs=1e-8)
    assert report.values[rule]["loss"] == pytest.approx(loss, abs=1e-6)


def test_every_framework_says_how_its_other_terms_are_known() -> None:
    for rule in ELSEWHERE:
        assert rule.kl_term != "the metrics' weights"
        assert rule.entropy_term != "the metrics' weights"
        if isinstance(rule.kl_term, Rule) or isinstance(rule.entropy_term, Rule):
            assert rule.terms_evidence != "unverified"


@pytest.mark.parametrize("rule", ["prompt_mean", "skyrl:prompt_mean", "prompt_mean@rank", "balanced"])
def test_a_rule_that_counts_prompts_is_refused_a_straddling_group_in_a_replay_and_in_training(rule, capsys, tmp_path) -> None:
    told = refused(replay(capsys, tmp_path, fx_b(), "--loss-aggregation", rule, "--global-batch-size", 3, command="run"))
    assert f"straddles optimizer steps 0 and 1, and {rule} needs whole groups" in told
    small = ("--steps", 1, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--global-batch-size", 6)
    told = refused(aggcli(capsys, "run", "--loss-aggregation", rule, *small, "--output", tmp_path / "o"))
    assert f"--global-batch-size 6: {rule} needs whole prompt groups in an optimizer step" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss-aggregation", "verl:nope"), "unknown loss aggregation 'verl:nope'; verl has"),
        (("--loss-aggregation", "trl:dr_grpo"), "--loss-aggregation trl:dr_grpo needs --loss-aggregation-divisor L"),
        (("--loss-aggregation", "trll:dapo"), "did you mean 'trl:dapo'?"),
        (("--normalizer", "epoch"), "--normalizer 'epoch' is not one of its values"),
    ],
)
def test_what_a_replay_cannot_use_is_refused(arguments: tuple[str, ...], message: str, capsys, tmp_path: Path) -> None:
    assert message in refused(replay(capsys, tmp_path, fx_b(), *arguments, command="run"))


def test_rewards_off_the_scale_of_the_threshold_are_said_where_correct_answers_are_counted(capsys, tmp_path: Path) -> None:
    samples = [{**sample, "reward": 11.4 + at / 10} for at, sample in enumerate(fx_b())]
    told = replay(capsys, tmp_path, samples, command="run")
    assert (
        "rewards run from 11.4 to 11.7 (mean 11.6), off the scale of --correct-threshold 1: 4 of 4 count as correct" in told.err
    )
    assert "off the scale" not in replay(capsys, tmp_path, fx_b(), command="run").err


def test_the_mismatch_without_tokens_that_were_never_drawn_stands_beside_it(capsys, tmp_path: Path) -> None:
    """Sampler log-probs -1 but for one 0, trainer -1: 1/4 of one sample of two is 0.125, and 0 without it."""
    rows = [{"group_index": 0, "response_length": 4, "total_length": 6, "reward": r, "log_probs": [-1.0] * 4} for r in (0, 1)]
    drawn = ([-1.0, -1.0, -1.0, 0.0], [-1.0] * 4)
    told = replay(
        capsys, tmp_path, [{**row, "rollout_log_probs": of} for row, of in zip(rows, drawn, strict=True)], command="run"
    )
    assert "1 trained token has a sampler log-prob of exactly 0" in told.err
    assert "sampler_mismatch is 0.125; without 1 trained token whose sampler log-prob is exactly 0 it is 0" in told.err
    masked = [{**row, "rollout_log_probs": of, "loss_mask": [1, 1, 1, 0]} for row, of in zip(rows, drawn, strict=True)]
    assert "exactly 0" not in replay(capsys, tmp_path, masked, command="run").err


def test_a_layout_that_the_framework_of_a_rule_cannot_represent_is_named() -> None:
    """Recorded are micro-batches of unequal numbers of samples, and TRL's are equal, which trl:dapo does not need."""
    rules, layouts = ["trl:grpo", "trl:bnpo", "trl:dapo", "token_mean"], ["recorded", "dp1:contiguous", "dp2:contiguous"]
    found = package.replay(str(DATA / "slime_train" / "2.pt"), rules, layouts)
    assert [note for note in found.notes if "cannot represent" in note] == [
        "trl:grpo, trl:bnpo: their framework cannot represent recorded; the numbers there are the formula's, and no run's;"
        " aggcli audit --rules trl:grpo,trl:bnpo compares the layouts that it can"
    ]
    own = package.replay(str(DATA / "slime_train" / "2.pt"), rules, layouts[1:])
    assert not any("cannot represent" in note for note in own.notes)
