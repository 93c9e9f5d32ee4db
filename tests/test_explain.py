"""The text for an issue tracker: its numbers are those of the framework's own loop; and what does not vary is not reported."""

from __future__ import annotations

import math
import re

import pytest

from aggcli.jobs.explain import DIVISOR, explained, named
from aggcli.rules import RULES
from tests.cli import aggcli, refused, strict_json
from tests.framework_loops import Row, step_loss
from tests.test_audit import VARY


@pytest.mark.parametrize("name", sorted(VARY))
def test_the_two_step_losses_are_those_of_the_frameworks_loop(name: str) -> None:
    found = explained(RULES[name])
    example, text = found["counterexample"], found["text"]
    cells = [line.split("|") for line in re.findall(r"^\| \d.*$", text, re.M)]
    rows = [
        Row(float(cell[3]) * one["trained_tokens"], one["trained_tokens"], _width(one), one["group_index"], at, 1.0)
        for at, (cell, one) in enumerate(zip(cells, example["samples"], strict=True))
    ]
    length = DIVISOR if RULES[name].needs_divisor else float(max(row.w for row in rows))
    told = [float(value) for value in re.findall(r"^Step loss .* = (\S+) \(weight", text, re.M)]
    assert len(told) == 2
    for value, split in zip(told, ([[list(range(len(rows)))]], example["split"]), strict=True):
        try:
            expected = step_loss(name, rows, split, length)
        except ZeroDivisionError:
            expected = math.nan
        assert value == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert told[0] != pytest.approx(told[1], rel=1e-3)


def _width(sample: dict) -> int:
    return sample["trained_tokens"] + sample["masked_tokens"]


def test_the_text_for_trls_bnpo_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    text = aggcli(capsys, "audit", "--framework", "trl", "--explain", "bnpo").out
    assert text.startswith("# loss_type=bnpo: the gradient of one optimizer step depends on how the step is cut\n")
    # samples of 1 and 2 tokens of loss 1 and 2: (1 + 2 + 2)/3 in one piece, 1/2 * 1 + 1/2 * 2 as two
    assert "| 0 | 1 | 1 | 0.333333 | 0.5 | x 1.5 |\n| 1 | 2 | 2 | 0.333333 | 0.25 | x 0.75 |" in text
    assert "Step loss in one piece: 0.333333 x 1 x 1 + 0.333333 x 2 x 2 = 1.66667" in text
    assert "Step loss as micro-batches (0) (1): 0.5 x 1 x 1 + 0.25 x 2 x 2 = 1.5" in text
    assert "In trl `loss_type=dapo` (`sum_t l_t / T, T over the optimizer step`) gives that" in text
    assert "cispo" not in text, "its loss is another one"
    assert "trl 1.16.0" in text
    assert "Newest release on PyPI: trl 1.16.0 on 2026-12-01, which is the version named." in text


def test_the_text_says_where_the_newest_release_has_mended_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = aggcli(capsys, "audit", "--framework", "ms-swift", "--explain", "dapo").out
    assert (
        "Newest release on PyPI: ms-swift 4.6.0 on 2026-12-01 (read, not run): the policy loss is aggregated otherwise: "
        in text
    )
    mapped = aggcli(capsys, "modes", "--map", "ms-swift:dapo", "--json").out
    assert "the policy loss is aggregated otherwise" in strict_json(mapped)["rules"]["ms-swift:dapo"]["release"]


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_piece_that_is_0_over_0_is_named_and_the_others_keep_their_weights(mode: str) -> None:
    """One sample of one token and one fully masked: alone in a micro-batch of one of the two rows, 1/2 x 1/1."""
    found = explained(named(mode, "verl-legacy"))
    text = found["text"]
    assert "| 0 | 1 | 1 | 1 | 0.5 | x 0.5 |\n| 1 | 0 and 1 masked | 2 | 0 | 0/0 | not a number |" in text
    assert "Step loss as micro-batches (0) (1): 0.5 x 1 x 1 + 0/0 = NaN (weight x tokens x loss)." in text
    assert "The 0/0 is of micro-batch (1), which has no trained token, and makes the sum NaN." in text
    assert found["counterexample"]["text"].endswith("as micro-batches (0) (1) it weighs 0.5, 0/0, so the loss is NaN")
    assert "0/0" not in explained(named("trl:bnpo", None))["text"]


@pytest.mark.parametrize("name", ["torchforge:reinforce", "torchrl:token_mean", "cosmos-rl:token-mean", "rlinf:token-mean"])
def test_an_average_that_nobody_checked_is_not_told_as_a_fact(name: str) -> None:
    text = explained(named(name, None))["text"]
    assert "and micro-batches, then ranks, are taken here to be averaged." in text
    assert "are averaged" not in text
    assert "micro-batches are averaged, then ranks are averaged" in explained(named("trl:bnpo", None))["text"]


def test_a_rule_whose_default_is_unverified_is_not_called_the_default() -> None:
    text = explained(named("rlinf:token-mean", None))["text"]
    assert "Unverified: which of the three is the default" in text
    assert "(the default)" not in text
    assert "(the default)" in explained(named("verl-legacy:token-mean", None))["text"]
    assert not [rule.name for rule in RULES.values() if rule.is_default and "is the default" in rule.unverified]


def test_what_would_mend_it_is_what_is_wrong() -> None:
    assert "not divided by the accumulation steps a second time" in explained(named("dapo", "ms-swift"))["text"]
    assert "if micro-batches were added up" in explained(named("seq-mean-token-sum-norm", "verl-legacy"))["text"]
    assert "taken over the whole optimizer step" in explained(named("easyr1:seq", None))["text"]


def test_a_rule_that_does_not_vary_has_nothing_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    told = strict_json(aggcli(capsys, "audit", "--explain", "trl:grpo", "--json").out)
    assert (told["varies"], told["counterexample"]) == (False, None)
    assert told["text"].startswith(
        "trl:grpo: nothing to report. No layout (of equal micro-batches, the only ones its framework"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--framework", "trl", "--explain", "bnop"), "unknown loss aggregation 'trl:bnop'; trl has trl:grpo, trl:bnpo"),
        (("--framework", "trll", "--explain", "bnpo"), "--framework trll: no rule of it is known here; did you mean 'trl'?"),
        (("--explain", "trl:bnpo", "--rules", "trl:dapo"), "--explain trl:bnpo makes its own example"),
        (("--explain", "bnpo", "--framework", "trl", "--framework", "verl"), "--explain bnpo: give one --framework, not 2"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments: tuple[str, ...], message: str, capsys) -> None:
    assert message in refused(aggcli(capsys, "audit", *arguments))
