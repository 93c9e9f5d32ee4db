"""Factors of advantages: a framework's own rule, given the scaled advantages, has the weights of the mode asked for."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import aggcli
from aggcli.auditing import rule_loss
from aggcli.errors import RolloutError, SettingError
from aggcli.layout.schedule import parse_layout, schedule_step
from aggcli.objective.factors import advantage_factors
from aggcli.objective.weights import can_represent, masked_weights
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rules import ELSEWHERE, MODES, Rule, settled
from aggcli.rules.reference import varies
from tests.fixtures import batch_of, fx_a, fx_b, fx_c, fx_d, fx_e, fx_f, random_fanout

FIXTURES = (fx_a, fx_b, fx_c, fx_d, fx_e, fx_f, random_fanout)
SPLITS = ("dp1", "dp2:interleaved", "dp2:interleaved:mb2", "dp1:contiguous:mb2")
WANTED = [*MODES, settled(MODES[1], prompt_mean_scale="prompts")]
CORRECTABLE = [rule for rule in ELSEWHERE if not varies(rule) and rule.numerator == "masked"]


def test_strict_prompt_means_on_top_of_dr_grpo_by_hand() -> None:
    # 4 rows of 3, 1, 1, 1 trained tokens in 2 groups: wanted 1/(P T_p) = 1/8, 1/8, 1/4, 1/4; given 1/(4 * 8) = 1/32
    factors = aggcli.advantage_factors(
        [3, 1, 1, 1],
        ["a", "a", "b", "b"],
        mode="prompt_mean",
        under="trl:dr_grpo",
        prompt_mean_scale="prompts",
        under_divisor=8,
    )
    assert factors == [4, 4, 8, 8]


def test_sample_means_on_top_of_a_token_mean_by_hand_from_masks_of_every_kind() -> None:
    # 2, 1 and 0 trained tokens: wanted 1/(3 n), given 1/3, and what has no weight is left as it is
    masks = [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    kinds = (masks, np.array(masks), torch.tensor(masks), torch.tensor(masks).bool(), [2, 1, 0], np.array([2, 1, 0]))
    for trained in kinds:
        found = aggcli.advantage_factors(trained, mode="sample_mean", under="trl:dapo")
        assert type(found) is type(trained)
        assert np.asarray(found).tolist() == [0.5, 1, 1]
        assert np.asarray(found).dtype == np.float64
    with_ragged = aggcli.advantage_factors([[1, 1], [1], [0]], mode="sample_mean", under="trl:dapo")
    assert with_ragged == [0.5, 1, 1]


def test_a_padded_width_is_that_of_the_masks() -> None:
    # given 1/(2 rows * width 4), wanted 1/2 for one token and 1/4 for two
    found = aggcli.advantage_factors(
        np.array([[1, 0, 0, 0], [1, 1, 0, 0]]), mode="sample_mean", under="verl:seq-mean-token-sum-norm"
    )
    assert found.tolist() == [4, 2]


def test_a_rule_that_leaves_out_zero_advantages_needs_to_know_them() -> None:
    # given 1/2, of the two tokens whose advantage is not 0; wanted 1/4
    given: dict[str, Any] = {"mode": "token_mean", "under": "prime-rl"}
    assert aggcli.advantage_factors([2, 2], advantages=[1.5, 0.0], **given)[0] == 0.5
    assert np.isfinite(aggcli.advantage_factors([2, 2], advantages=[0.0, 0.0], **given)).all()  # nothing has a loss
    with pytest.raises(RolloutError, match="prime-rl leaves out tokens of zero advantage, so it needs the advantages"):
        aggcli.advantage_factors([2, 2], **given)


def _why_not(step: RolloutBatch, rules: Sequence[Rule]) -> str:
    """Why there are no weights of these rules here, worked out from the step alone; blank where there are."""
    if any(rule.needs_groups for rule in rules) and bool((step.group_S < 0).any()):
        return "group_index is missing"
    if any(rule.name in ("balanced", "prime-rl") for rule in rules) and step.advantages_T is None:
        return "needs (the )?advantages"
    masked_S = step.mask_sum_S == 0
    of_rows = rules[1].name in ("oat:grpo", "rlinf:seq-mean-token-mean")
    return "divides 0 by 0" if of_rows and bool(masked_S.any()) else ""


@pytest.mark.parametrize("under", CORRECTABLE, ids=lambda rule: rule.name)
def test_every_rule_that_no_layout_changes_becomes_every_mode(under: Rule) -> None:
    under, compared = under.with_divisor(7), 0
    for make, mode in itertools.product(FIXTURES, WANTED):
        step, wanted = batch_of(make()), mode.with_divisor(11)
        if why := _why_not(step, (wanted, under)):
            with pytest.raises(RolloutError, match=why):
                advantage_factors(step, wanted, under)
            continue
        factor_T = torch.repeat_interleave(advantage_factors(step, wanted, under), step.response_length_S)
        expected_T = masked_weights(wanted, step).whole()
        for split in SPLITS:
            schedule = schedule_step(parse_layout(split), step.total_length_S.tolist())
            if can_represent(under, schedule):
                weight_T = masked_weights(under, step, [schedule]).whole()
                torch.testing.assert_close(weight_T * factor_T, expected_T, rtol=0, atol=1e-12)
                compared += split != "dp1"
    assert compared >= 4


def test_the_loss_that_a_framework_then_computes_is_the_modes() -> None:
    samples = fx_a(log_ratio=0.25)  # beyond the clip at 0.2, where a wrong factor would show
    lengths, groups = [one["response_length"] for one in samples], [one["group_index"] for one in samples]
    for under in ("trl:dapo", "openrlhf:sequence", "verl:seq-mean-token-sum"):
        factors = aggcli.advantage_factors(lengths, groups, mode="prompt_mean", under=under)
        scaled = [{**one, "advantage": one["advantage"] * factor} for one, factor in zip(samples, factors, strict=True)]
        wanted = rule_loss("prompt_mean", samples, [[[0, 1, 2, 3]]])
        assert rule_loss(under, scaled, [[[0, 1, 2, 3]]]) == pytest.approx(wanted, abs=1e-9)
        assert rule_loss(under, samples, [[[0, 1, 2, 3]]]) != pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("under", [rule.name for rule in ELSEWHERE if varies(rule)])
def test_a_rule_that_a_layout_changes_is_refused_by_name(under: str) -> None:
    with pytest.raises(SettingError, match=f"^{under}: its weights change with the layout"):
        aggcli.advantage_factors([3, 1], [0, 0], mode="sample_mean", under=under, under_divisor=5)


@pytest.mark.parametrize(
    ("trained", "options", "message"),
    [
        (
            [3, 1],
            {"mode": "prompt_mean"},
            r"sample 0: its prompt group is missing, and prompt_mean counts prompts: give groups=",
        ),
        ([3, 1], {"mode": "sample_mean", "groups": [0]}, "groups of 1 samples, where 2 are trained"),
        ([3, -1], {"mode": "sample_mean"}, "sample 1: response_length is -1"),
        ([3, 1], {"mode": "constant"}, "constant divides by .*: give divisor=L, a positive"),
        ([3, 1], {"mode": "constant", "divisor": -1}, "^divisor -1: must be a positive"),
        ([3, 1], {"mode": "sample_mean", "under": "trl:dr_grpo"}, "divides by max_completion_length: give under_divisor=L, a"),
        ([3, 1], {"mode": "sample_mean", "under": "trl:dr_grpo", "under_divisor": 0}, "^under_divisor 0: must be a positive"),
        ([3, 1], {"mode": "prompt_mean", "prompt_mean_scale": "foo"}, "'foo': must be 'rollouts' or 'prompts'"),
        (5, {"mode": "sample_mean"}, "^trained: must be a list, an array or a tensor with an entry for each sample, not 5$"),
        (np.array(5), {"mode": "sample_mean"}, "^trained: must be a list"),
        ([3, 1], {"mode": "prompt_mean", "groups": 0}, "^groups: must be a list"),
        ([3, 1], {"mode": "prompt_mean", "groups": [0, None]}, "sample 1: its prompt group is missing"),
        ([3, 1], {"mode": "prompt_mean", "groups": [0, float("nan")]}, "sample 1: "),
        ([3, 1], {"mode": "prompt_mean", "groups": [0, {"prompt": 1}]}, "sample 1: "),
        ([3, 1], {"mode": "prompt_mean", "groups": [0, [1]]}, "sample 1: "),
        ([3, 1], {"mode": "sampel_mean"}, "unknown loss aggregation 'sampel_mean'; did you mean 'sample_mean'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(trained: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((SettingError, RolloutError), match=message) as refused:
        aggcli.advantage_factors(trained, **{"under": "trl:dapo", **options})
    assert "\n" not in str(refused.value)
    assert "--" not in str(refused.value), "arguments, and not flags, are given here"


def test_a_group_without_a_trained_token_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="aggcli"):
        found = aggcli.advantage_factors([2, 2, 0, 0], [5, 5, 9, 9], mode="prompt_mean", under="trl:dapo")
    # wanted 1/(N T_p) = 1/(4 * 4), given 1/4
    assert found == [0.25, 0.25, 1, 1]
    assert [record.message for record in caplog.records] == ["prompt group 9 has no trained token, and counts all the same"]


def test_all_groups_and_samples_without_a_trained_token_are_told_of_in_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="aggcli"):
        found = aggcli.advantage_factors([2, 0, 0, 0], ["a", "a", "b", "c"], mode="prompt_mean", under="trl:dapo")
        aggcli.advantage_factors([2, 0, 0], mode="sample_mean", under="trl:dapo")
    # wanted 1/(N T_p) = 1/(4 * 2), given 1/2
    assert found == [0.25, 1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "prompt groups 'b', 'c' have no trained token, and count all the same",
        "sample 1 has no trained token: it counts all the same, and its factor is 1",
        "samples 1, 2 have no trained token: they count all the same, and their factors are 1",
    ]


def test_samples_of_one_rollout_count_once_by_hand() -> None:
    # rollouts of 2 + 2 and 4 tokens: wanted 1/(2 * 4) everywhere, given 1/8; each by itself 1/(3 * 2) and 1/(3 * 4)
    given: dict[str, Any] = {"mode": "sample_mean", "under": "trl:dapo"}
    assert aggcli.advantage_factors([2, 2, 4], rollouts=["a", "a", "b"], **given) == [1, 1, 1]
    assert aggcli.advantage_factors([2, 2, 4], **given) == pytest.approx([8 / 6, 8 / 6, 8 / 12], abs=1e-15)
