"""Reducers of any signature: one fault each is named, correct ones pass, and other projects' test suites can ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aggcli.auditing import batch_of, diagnose, extract, reducer_rule, schedule_of, signature_of
from aggcli.errors import SettingError
from aggcli.objective.weights import rule_weights
from aggcli.rules import RULES
from aggcli.testing import assert_layout_invariant
from tests.cli import aggcli, refused, strict_json
from tests.fixtures import fx_b
from tests.reducers import CORRECT, FAULTY, in_place, local_token_count, numerator_unmasked, trl_style, verl_style
from tests.speed import few


@pytest.mark.parametrize("name", few(FAULTY, fast=2))
def test_a_reducer_with_one_fault_has_that_finding_and_no_other_fault(name: str) -> None:
    reducer, kind = FAULTY[name]
    assert [finding.kind for finding in diagnose(reducer_rule(reducer)) if finding.fault] == [kind]


@pytest.mark.parametrize("name", few(FAULTY, fast=2))
def test_a_faulty_reducer_fails_another_projects_test_with_the_fault_in_the_message(name: str) -> None:
    reducer, kind = FAULTY[name]
    with pytest.raises(AssertionError) as error:
        assert_layout_invariant(reducer)
    assert kind in str(error.value)
    layout_proof = (numerator_unmasked, in_place)  # wrong, but the same in every layout
    assert ("smallest counterexample: samples of" in str(error.value)) == (reducer not in layout_proof)


@pytest.mark.parametrize("name", few(CORRECT))
def test_a_correct_reducer_of_any_style_passes(name: str) -> None:
    assert not [finding for finding in diagnose(reducer_rule(CORRECT[name])) if finding.fault]
    assert_layout_invariant(CORRECT[name])


def test_the_message_shows_the_smallest_counterexample_in_full() -> None:
    with pytest.raises(AssertionError) as error:
        assert_layout_invariant(local_token_count)
    assert str(error.value) == (
        "local_token_count is not layout-invariant\n"
        "  - counts in the micro-batch: as micro-batches [[0, 1], [2, 3]] the samples weigh 2.667, 2.667, 1.6, 1.6"
        " times as much as in one; a denominator is counted locally\n"  # 16 tokens of 6 and 10
        "  smallest counterexample: samples of 1, 1 tokens; in one micro-batch a token weighs 0.5, 0.5;"
        " as micro-batches (0) (1) it weighs 1, 1"
    )


@pytest.mark.slow
def test_a_reducer_that_needs_equal_micro_batches_passes_unless_uneven_ones_are_asked_for() -> None:
    assert_layout_invariant(trl_style)
    with pytest.raises(AssertionError, match="needs equal micro-batches"):
        assert_layout_invariant(trl_style, uneven=True)


# -- other faults ----------------------------------------------------------------------------------------------------


def squared(loss_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (loss_BT * loss_BT * mask_BT).sum()


def shifted(loss_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (loss_BT * mask_BT).sum() + 1.0


def nan(loss_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (loss_BT * mask_BT).sum() / (mask_BT.sum() - mask_BT.sum())


def failing(loss_BT: Tensor, mask_BT: Tensor) -> Tensor:
    raise RuntimeError("no such\nkernel")


def not_scalar(loss_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return loss_BT * mask_BT


def detached(loss: Tensor) -> float:
    return float(loss.detach().sum())


def nan_on_a_masked_row(loss_BT: Tensor, mask_BT: Tensor, gradient_accumulation_steps: int) -> Tensor:
    return ((loss_BT * mask_BT).sum(-1) / mask_BT.sum(-1)).mean() / gradient_accumulation_steps


def raw_lengths(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    def reduce(x: Tensor) -> Tensor:
        parts = zip(x.split(response_lengths), loss_masks, response_lengths, strict=True)
        return sum(((p * m).sum() / n for p, m, n in parts), start=x.new_zeros(()))

    return reduce


def sorts_the_masks(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    mask_T = torch.cat(loss_masks)
    total_lengths.sort(reverse=True)
    return lambda x: (x * mask_T).sum()


def times_dp(loss_BT: Tensor, mask_BT: Tensor, batch_num_tokens: int, dp_size: int) -> Tensor:
    return (loss_BT * mask_BT).sum() / batch_num_tokens * dp_size * dp_size


OTHERS: list[tuple[Callable[..., Any], str]] = [
    (squared, "not linear"),
    (shifted, "not linear"),
    (nan, "not finite"),
    (failing, "fails: RuntimeError: no such kernel"),
    (not_scalar, "fails: TypeError: it returned Tensor"),
    (detached, "fails: TypeError: it returned float"),
    (nan_on_a_masked_row, "not finite on a fully masked sample"),
    (raw_lengths, "counts masked tokens"),
    (sorts_the_masks, "mutates its inputs"),
    (times_dp, "multiplied by the ranks"),
]


@pytest.mark.parametrize(("reducer", "finding"), OTHERS, ids=[reducer.__name__ for reducer, _ in OTHERS])
def test_other_faults_are_named_too(reducer: Callable[..., Any], finding: str) -> None:
    faults = [str(found) for found in diagnose(reducer_rule(reducer)) if found.fault]
    assert len(faults) == 1
    assert faults[0].startswith(finding)


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [[[[0, 1, 2, 3]]], [[[0, 3], [1, 2]]], [[[3], [0]], [[1], [2]]]])
def test_the_weights_by_gradient_are_those_of_the_rule_that_the_reducer_copies(split: list) -> None:
    step, schedule = batch_of(fx_b()), schedule_of(split, 4)
    for reducer, name in ((verl_style, "verl:token-mean"), (trl_style, "trl:dr_grpo")):
        found_T = extract(reducer_rule(reducer, divisor=10.0), step, schedule).weight_T
        assert torch.allclose(found_T, rule_weights(RULES[name].with_divisor(10.0), step, [schedule]), rtol=1e-12)


@pytest.mark.slow
def test_a_reducer_whose_framework_sums_ranks_is_judged_by_that() -> None:
    def sums(loss_BT: Tensor, mask_BT: Tensor, batch_num_tokens: int) -> Tensor:
        return (loss_BT * mask_BT).sum() / batch_num_tokens

    assert [f.kind for f in diagnose(reducer_rule(sums)) if f.fault] == ["divided by the ranks twice"]
    assert_layout_invariant(sums, ranks="sum")


# -- signatures ------------------------------------------------------------------------------------------------------


def test_the_signature_is_recognised_by_the_parameters() -> None:
    def slime(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False): ...
    def short_slime(a, b, c, d): ...
    def counts(loss_mat, loss_mask, **kwargs): ...
    def named(loss, mask, batch_num_tokens, dp_size=1): ...
    def flat(x): ...

    assert [signature_of(f) for f in (slime, short_slime, counts, named, flat)] == [
        "slime",
        "slime",
        "matrix",
        "matrix",
        "flat",
    ]
    assert {name: signature_of(f) for name, f in CORRECT.items()} == {
        "verl style": "matrix",
        "trl style": "matrix",
        "slime style": "slime",
        "flat callable object": "flat",
    }


def test_a_reducer_that_cannot_be_called_is_refused_by_what_it_asks_for() -> None:
    def asks(loss_BT, mask_BT, temperature): ...

    with pytest.raises(SettingError, match="the reducer asks for temperature; known counts: batch_num_tokens"):
        signature_of(asks)
    with pytest.raises(SettingError, match="takes no losses"):
        signature_of(lambda: None)
    with pytest.raises(SettingError, match="must be one of slime, matrix, flat"):
        reducer_rule(asks, "rows")  # pyright: ignore[reportArgumentType]


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "limit", "code"),
    [
        ("tests.reducers:verl_style", True, 0),
        ("tests.reducers:trl_style", True, 0),
        ("tests.reducers:slime_style", True, 0),
        ("tests.reducers:flat_constant", True, 0),
        ("tests.reducers:local_token_count", True, 1),
        ("tests.reducers:phantom_token", True, 1),
        ("tests.reducers:in_place", True, 1),
        ("tests.reducers:local_token_count", False, 0),
        ("tests.reducers:nothing_there", True, 2),
        ("tests.reducers", True, 2),
    ],
)
def test_the_exit_code_of_a_reducers_audit(path: str, limit: bool, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "--reducer", path, "--no-search", *(["--fail-on-variance", "1e-6"] if limit else [])]
    told = aggcli(capsys, *arguments)
    assert told.code == code
    if code == 2:
        assert refused(told).startswith("aggcli: --reducer tests.reducers")
    elif code == 0 and limit:
        assert f"{path}: no fault found" in told.out


def test_the_findings_are_printed_with_the_reducer(capsys: pytest.CaptureFixture[str]) -> None:
    told = aggcli(capsys, "audit", "--reducer", "tests.reducers:mean_of_rank_means", "--rules", "verl:token-mean")
    assert told.code == 0, told.err
    words = " ".join(told.out.split())
    assert "fault: mean of rank means: on ranks (0,1) and (2,3) the samples weigh 1.333, 1.333, 0.8, 0.8" in words


def test_a_reducer_that_raises_is_not_computed_and_nothing_else_is_said_of_its_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    audit = ("audit", "--reducer", "tests.reducers:that_raises", "--no-search")
    told = aggcli(capsys, *audit, "--rules", "token_mean", "--json")
    assert told.code == 0, told.err
    found = strict_json(told.out)
    report = found["steps"][0]["rules"]["tests.reducers:that_raises"]
    assert (report["verdict"], report["reason"]) == ("not computed", "it raises ValueError: boom")
    assert found["steps"][0]["baseline"] == "token_mean"
    assert [(f["kind"], f["text"]) for f in found["reducers"]["tests.reducers:that_raises"]] == [("fails", "ValueError: boom")]
    told = aggcli(capsys, *audit, "--fail-on-variance", "1e-9")
    assert told.code == 1
    assert "it raises ValueError: boom" in " ".join(told.out.split())
    assert "0/0" not in told.out
