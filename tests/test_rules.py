"""Every framework's rule: the values its own code gave, values worked out by hand, and how rules are named."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from aggcli.auditing import rule_loss, rule_named
from aggcli.errors import RolloutError, SettingError
from aggcli.rules import ALIASES, ELSEWHERE, EVIDENCE, RULES, find_rule, remark_on
from aggcli.rules.releases import RELEASES, newest_release
from tests.fixtures import fx_a, fx_b, fx_c

DATA = Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "slime_reducer.json").read_text())[0]["fixture"]
CASES = json.loads((DATA / "framework_presets.json").read_text())
WHOLE = [[[0, 1, 2, 3]]]
CUT = [[[0, 3], [1, 2]]]
"""A split that cuts through prompt groups: none of its means coincides with another mode (unlike (0,1)|(2,3), (0,2)|(1,3))."""


@pytest.mark.parametrize("case", CASES, ids=[f"{case['preset']}-{case['layout']}" for case in CASES])
def test_a_rule_gives_what_the_frameworks_own_code_gave(case: dict) -> None:
    found = rule_loss(
        case["preset"],
        FIXTURE["samples"],
        case["split"],
        divisor=case["divisor"],
        eps_clip=FIXTURE["eps_clip"],
        eps_clip_high=FIXTURE["eps_clip_high"],
    )
    assert found == pytest.approx(case["pg_loss"], abs=1e-9)


def test_the_golden_cases_are_all_there() -> None:
    assert len(CASES) == 84
    assert {case["preset"] for case in CASES} <= set(RULES)


# -- by hand ---------------------------------------------------------------------------------------------------------
# FX-B: token losses of the four samples are -.55 (1 token), +.5 (3), -.55 (4), +.5 (8), so the sample sums are
# -.55, 1.5, -2.2, 4 and add up to 2.75 over 16 tokens. Clipping at 1.2 does not bind (ratio 1.1).

TOKEN = 2.75 / 16
SAMPLE = (-0.55 + 0.5 - 0.55 + 0.5) / 4
CONSTANT = 2.75 / 4 / 10
PROMPT = (0.95 / 4 + 1.8 / 12) / 2
INVARIANT = {
    **dict.fromkeys(
        (
            *(
                "trl:cispo",
                "trl:vespo",
                "verl:token-mean",
                "trl:dapo",
                "openrlhf:token",
                "nemo-rl:token",
                "skyrl:token_mean",
                "areal",
                "prime-rl",
            ),
            *("open-instruct:token", "slime:per_token", "miles:per_token", "roll:token-mean", "token_mean", "per_token"),
        ),
        TOKEN,
    ),
    **dict.fromkeys(
        (
            *("slime:sample_mean", "miles:sample_mean", "verl:seq-mean-token-mean", "openrlhf:sequence", "nemo-rl:sequence"),
            *("skyrl:sequence_mean", "roll:seq-mean-token-mean", "sample_mean", "grpo", "seq-mean-token-mean"),
            *("trl:grpo", "trl:sapo", "ms-swift:grpo", "oat:grpo", "torchforge:simple-grpo", "verl-legacy:seq-mean-token-mean"),
        ),
        SAMPLE,
    ),
    **dict.fromkeys(
        (
            *("verl:seq-mean-token-sum-norm", "skyrl:seq_mean_token_sum_norm", "constant", "dr_grpo"),
            *("trl:dr_grpo", "ms-swift:dr_grpo", "oat:drgrpo", "delta-l:0"),
        ),
        CONSTANT,
    ),
    **dict.fromkeys(
        ("verl:seq-mean-token-sum", "roll:seq-mean-token-sum", "trl:luspo", "verl-legacy:seq-mean-token-sum"), 0.6875
    ),
    **dict.fromkeys(("roll:seq-mean-token-sum-norm", "open-instruct:constant", "open-instruct:10"), 0.275),
    **dict.fromkeys(("verl:token-sum", "tinker"), 2.75),
    "skyrl:prompt_mean": PROMPT,
    # default scale: P/N times the strict mean over prompts
    **dict.fromkeys(("prompt_mean", "dapo"), PROMPT * 2 / 4),
    # n ** -1 over the four lengths adds up to 41/24; the sum of n ** -1 * (sample sum) is that of the token losses, -.1
    "delta-l:1": -0.1 * 24 / 41 / 10,
    # in each group half the samples are positive: (-.55 + .5) / 2
    "balanced": -0.025,
}


@pytest.mark.parametrize("split", [WHOLE, CUT, [[[3], [2], [1], [0]]], [[[0, 3]], [[1, 2]]], [[[1], [2]], [[3], [0]]]])
@pytest.mark.parametrize("name", INVARIANT)
def test_an_exact_rule_gives_its_value_on_fx_b_under_every_split(name: str, split: list) -> None:
    assert rule_loss(name, fx_b(), split, divisor=10) == pytest.approx(INVARIANT[name], abs=1e-8)


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        # (-.55 + 4)/9 and (1.5 - 2.2)/7, averaged
        *((name, CUT, (3.45 / 9 - 0.7 / 7) / 2) for name in ("trl:bnpo", "ms-swift:bnpo", "verl-legacy:token-mean")),
        *((name, CUT, (3.45 / 9 - 0.7 / 7) / 2) for name in ("skyrl:token_mean_legacy", "torchforge:reinforce")),
        ("token_mean@micro-batch", CUT, (3.45 / 9 - 0.7 / 7) / 2),
        ("trl:bnpo", [[[0, 3]], [[1, 2]]], (3.45 / 9 - 0.7 / 7) / 2),
        # each micro-batch's token mean by its share of samples: 3/4 * (-1.25/8) + 1/4 * .5
        ("verl-legacy:token-mean", [[[0, 1, 2], [3]]], 0.0078125),
        # the second, smaller micro-batch gets nothing
        ("skyrl:token_mean_legacy", [[[0, 1, 2], [3]]], -1.25 / 8),
        # one division too many by 1, 2 and 4 accumulation steps
        ("ms-swift:dapo", WHOLE, TOKEN),
        ("ms-swift:dapo", CUT, TOKEN / 2),
        ("ms-swift:dapo", [[[3], [2], [1], [0]]], TOKEN / 4),
        # sum over the width alone, averaged over 1 and 2 micro-batches and over 2 ranks
        ("verl-legacy:seq-mean-token-sum-norm", WHOLE, 0.275),
        ("verl-legacy:seq-mean-token-sum-norm", CUT, 0.275 / 2),
        ("verl-legacy:seq-mean-token-sum-norm", [[[0, 3]], [[1, 2]]], 0.275 / 2),
        # rank means of samples: (-.55 + .5 - .55)/3 and .5
        ("sample_mean@rank", [[[0, 1], [2]], [[3]]], (-0.2 + 0.5) / 2),
        ("token_mean@rank", [[[0, 1], [2]], [[3]]], (-1.25 / 8 + 0.5) / 2),
        ("constant@rank", [[[0, 1], [2]], [[3]]], (-1.25 / 30 + 4 / 10) / 2),
        # each group counted within the micro-batch: 1/2 (-.55/1 - 2.2/4) and 1/2 (1.5/3 + 4/8)
        ("prompt_mean@micro-batch", [[[0, 2], [1, 3]]], (-0.55 + 0.5) / 2),
    ],
)
def test_a_rule_that_counts_locally_gives_the_value_of_its_split_on_fx_b(name: str, split: list, expected: float) -> None:
    assert rule_loss(name, fx_b(), split, divisor=10) == pytest.approx(expected, abs=1e-12)


def test_without_a_divisor_the_padded_width_is_that_of_the_longest_response() -> None:
    assert rule_loss("verl:seq-mean-token-sum-norm", fx_b(), CUT) == pytest.approx(2.75 / 4 / 8, abs=1e-12)
    # FX-C: the width is 6, masked tokens included
    assert rule_loss("roll:seq-mean-token-sum-norm", fx_c(), CUT) == pytest.approx(-1.5 / 6, abs=1e-12)


# FX-C: sums -1, 2.5, -3 over 2, 5, 6 tokens, and a fourth sample that is masked out whole.
@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("slime:per_token", WHOLE, -1.5 / 14),  # 13 tokens and a phantom one
        *((name, WHOLE, -1.5 / 13) for name in ("verl:token-mean", "trl:dapo", "openrlhf:token", "skyrl:token_mean")),
        *(
            (name, CUT, -0.5 / 4)
            for name in ("slime:sample_mean", "verl:seq-mean-token-mean", "trl:grpo", "skyrl:sequence_mean")
        ),
        *((name, CUT, -0.5 / 3) for name in ("openrlhf:sequence", "nemo-rl:sequence", "roll:seq-mean-token-mean")),
        *((name, CUT, -1.5 / 40) for name in ("trl:dr_grpo", "oat:drgrpo", "skyrl:seq_mean_token_sum_norm", "constant")),
        ("roll:seq-mean-token-sum", CUT, -1.5 / 3),
        ("skyrl:prompt_mean", CUT, (1.5 / 7 - 3 / 6) / 2),
        # 3 of 4 rows are not empty; the row sums are -1, 2.5, -3
        ("tunix:sequence-mean-token-mean", CUT, -0.5 / 3),
        ("tunix:seq-mean-token-sum", CUT, -1.5 / 3),
        ("tunix:sequence-mean-token-sum-norm", CUT, -1.5 / 4),
        ("tunix:sequence-mean-token-scale", CUT, -1.5 / 3 / 10),
        ("rlinf:token-mean", CUT, (-1 / 2 + (2.5 - 3) / 11) / 2),
        # rows with a token left are counted in the micro-batch: 1/2 * (-.5) + 1/2 * (.5 - .5)/2
        ("verl-legacy:seq-mean-token-mean", CUT, -0.25),
        ("verl-legacy:seq-mean-token-mean", WHOLE, -0.5 / 3),
    ],
)
def test_a_fully_masked_row_counts_as_each_framework_says_on_fx_c(name: str, split: list, expected: float) -> None:
    assert rule_loss(name, fx_c(), split, divisor=10) == pytest.approx(expected, abs=2e-9)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("oat:grpo", WHOLE),
        ("verl-legacy:token-mean", [[[0, 1], [2], [3]]]),
        ("verl-legacy:seq-mean-token-sum", [[[3], [0, 1, 2]]]),
    ],
)
def test_a_framework_without_epsilon_divides_0_by_0_where_a_piece_is_masked_out(name: str, split: list) -> None:
    assert math.isnan(rule_loss(name, fx_c(), split))


def test_zero_advantage_tokens_leave_prime_rls_denominator() -> None:
    samples = fx_a()
    samples[3]["advantage"] = 0.0  # its 8 tokens go: (-.5 + 1.5 - 2) over the other 8
    assert rule_loss("prime-rl", samples, CUT) == pytest.approx(-1 / 8, abs=1e-12)
    assert rule_loss("token_mean", samples, CUT) == pytest.approx(-1 / 16, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # rollouts of 1 + 3, 4 and 8 tokens; FX-B's row means are -.55, .5, -.55, .5 and row sums -.55, 1.5, -2.2, 4
        ("proposal:session-balanced", ((-0.55 + 0.5) / 2 - 0.55 + 0.5) / 3),
        # 4 tokens a sample in the mean: 2 * 4 in the first rollout, 4 in the others
        ("proposal:turn-denominator", (0.95 / 8 - 2.2 / 4 + 4 / 4) / 3),
        # factors 1/2, 1/2, 1, 1 over their mean of 3/4, on top of 1/16
        ("proposal:per-trajectory", (0.95 / 2 - 2.2 + 4) / 0.75 / 16),
        ("agent-lightning:per_rollout_mean", (0.95 / 4 - 0.55 + 0.5) / 3),
    ],
)
def test_a_rollout_of_several_samples_weighs_as_each_rule_says_on_fx_b(name: str, expected: float) -> None:
    samples = fx_b()
    for sample, rollout in zip(samples, (0, 0, 1, 2), strict=True):
        sample["rollout_id"], sample["reward"] = rollout, None
    for split in (WHOLE, CUT):
        assert rule_loss(name, samples, split) == pytest.approx(expected, abs=1e-12)


def test_trls_luspo_sums_each_row_at_token_level_too() -> None:
    """TRL's own line, `(per_token_loss * mask).sum(-1).mean()`, on a loss a token, and on one a row, which it broadcasts."""
    length_B, mask_BT = torch.tensor([1, 3, 4, 8]), torch.arange(8) < torch.tensor([[1], [3], [4], [8]])
    row_B = torch.tensor([-0.55, 0.5, -0.55, 0.5], dtype=torch.float64)
    for loss in (row_B[:, None], row_B[:, None].expand(4, 8)):
        expected = float((loss * mask_BT).sum(-1).mean())
        assert expected == pytest.approx(float((row_B * length_B).mean()), abs=1e-12)
        assert rule_loss("trl:luspo", fx_b(), WHOLE) == pytest.approx(expected, abs=1e-12)
    (told,) = (trap for trap in RULES["trl:luspo"].traps if "importance_sampling_level" in trap)
    assert "needs" not in told
    assert "at token level, the default, TRL warns, and sums" in told


def test_easyr1_weighs_the_row_means_of_a_micro_batch_by_its_tokens() -> None:
    # 8 of 16 tokens each: 1/2 * mean(-.55, .5, -.55) + 1/2 * .5, where the mean over all four rows is -.025
    assert rule_loss("easyr1:seq", fx_b(), [[[0, 1, 2], [3]]]) == pytest.approx(0.15, abs=1e-12)
    assert rule_loss("easyr1:seq", fx_b(), [[[0, 1, 2]], [[3]]]) == pytest.approx(0.15, abs=1e-12)
    assert rule_loss("easyr1:seq", fx_b(), WHOLE) == pytest.approx(-0.025, abs=1e-12)


def test_rows_and_rollouts_differ_where_a_rollout_is_split_into_samples() -> None:
    # one rollout of 1 + 3 tokens, one of 4, one of 8; token losses -.5, .5, -.5, .5 on-policy
    samples = fx_a()
    for sample, rollout in zip(samples, (0, 0, 1, 2), strict=True):
        sample["rollout_id"] = rollout
        sample["reward"] = None
    assert rule_loss("slime:sample_mean", samples, CUT) == pytest.approx((1.0 / 4 - 0.5 + 0.5) / 3, abs=1e-12)
    assert rule_loss("verl:seq-mean-token-mean", samples, CUT) == pytest.approx(0.0, abs=1e-9)


# -- names -----------------------------------------------------------------------------------------------------------


def test_every_alias_leads_to_a_rule_and_says_what_it_maps_to() -> None:
    for alias, (target, note) in ALIASES.items():
        found = find_rule(alias)
        assert found == find_rule(target)
        assert remark_on(alias).startswith(f"{alias} is taken as {target}: {note}")
        assert len(note) > 5


def test_dapo_names_its_three_meanings() -> None:
    note = remark_on("dapo")
    assert all(part in note for part in ("prompt_mean", "token_mean", "micro-batch token means", "verl-legacy:token-mean"))


def test_every_rule_of_a_framework_says_how_it_is_known_and_names_what_it_divides_by() -> None:
    for rule in ELSEWHERE:
        assert rule.evidence in EVIDENCE
        assert rule.version
        assert rule.option
        assert bool(rule.divisor_is) == any(d.counted in ("divisor", "padded width") for d in rule.divides_by)
        if rule.evidence == "second-hand":
            assert rule.unverified
        if rule.unverified:
            assert rule.unverified in remark_on(rule.name)


def test_each_framework_has_one_default_at_most() -> None:
    for framework in {rule.framework for rule in ELSEWHERE}:
        assert sum(rule.is_default for rule in ELSEWHERE if rule.framework == framework) <= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("verl:token_mean", "unknown loss aggregation 'verl:token_mean'; verl has verl:token-mean, verl:token-sum"),
        ("token-maen", "did you mean 'token-mean'?"),
        ("open-instruct:-5", "open-instruct has open-instruct:token, open-instruct:constant"),
        ("delta-l:2", "delta-l has delta-l"),
        ("trl:grpo@rank", "only this project's modes have a scope to choose"),
    ],
)
def test_a_name_that_nobody_uses_is_refused_with_those_that_exist(name: str, message: str) -> None:
    with pytest.raises(SettingError) as error:
        rule_named(name)
    assert message in str(error.value)


def test_a_missing_divisor_is_refused_by_the_name_it_has_there() -> None:
    with pytest.raises(SettingError, match="trl:dr_grpo divides by max_completion_length"):
        rule_loss("trl:dr_grpo", fx_b(), WHOLE)
    for divisor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(SettingError, match="must be a positive finite number"):
            rule_loss("trl:dr_grpo", fx_b(), WHOLE, divisor=divisor)


@pytest.mark.parametrize("split", [[[[0, 1, 2]]], [[[0, 1, 2, 3, 3]]], [[[0, 1, 2, 4]]], []])
def test_a_split_that_does_not_hold_each_sample_once_is_refused(split: list) -> None:
    with pytest.raises(RolloutError, match="each of the 4 samples exactly once"):
        rule_loss("token_mean", fx_b(), split)


def test_a_prompt_rule_without_group_index_is_refused_by_sample() -> None:
    samples = [{**sample, "group_index": None} for sample in fx_b()]
    with pytest.raises(RolloutError, match="sample 0: group_index is missing"):
        rule_loss("skyrl:prompt_mean", samples, WHOLE)


def test_rules_are_values_that_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RULES["areal"].name = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rule_says_what_the_newest_release_that_was_read_does_and_nothing_where_none_was() -> None:
    assert newest_release(RULES["trl:bnpo"]) == "trl 1.16.0 on 2026-12-01, which is the version named"
    same = "skyrl 0.4.0 on 2026-12-01 (read, not run): the policy loss is aggregated the same"
    assert newest_release(RULES["skyrl:prompt_mean"]) == same
    mended = "ms-swift 4.6.0 on 2026-12-01 (read, not run): the policy loss is aggregated otherwise: sum_t l_t / T,"
    assert newest_release(RULES["ms-swift:dapo"]).startswith(mended)
    rows = "agentlightning 1.0.2 on 2026-12-01 (read, not run): the policy loss is aggregated otherwise: 1/B sum_r ["
    assert newest_release(RULES["agent-lightning:per_rollout_mean"]).startswith(rows)
    for name in ("grpo", "dapo"):
        assert newest_release(RULES[f"axolotl:{name}"]).startswith("axolotl 0.21.0 on 2026-12-01")
    longer = dataclasses.replace(RULES["trl:bnpo"], version="1.16.01; f2cd5771")
    assert newest_release(longer).endswith("(read, not run): the policy loss is aggregated the same"), "another version"
    assert [newest_release(RULES[name]) for name in ("slime:sample_mean", "token_mean", "balanced")] == ["", "", ""]


def test_every_release_is_of_a_rule_or_framework_that_is_here() -> None:
    assert not RELEASES.keys() - RULES.keys() - {rule.framework for rule in RULES.values()}
