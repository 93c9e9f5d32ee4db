"""The audit of the built-in batch and of dumps: which rules vary, why, the smallest case, and the exit codes."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from pathlib import Path

import pytest
import torch

from aggcli.auditing import (
    DEFAULT_LAYOUTS,
    Audit,
    Counterexample,
    FrozenBatch,
    audit,
    built_in_batch,
    freeze,
    rule_named,
    schedule_of,
    scheduled_layouts,
    smallest_counterexample,
)
from aggcli.auditing.search import Toy
from aggcli.config import settings_from
from aggcli.layout.steps import optimizer_steps
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.sources import open_source
from aggcli.rules import RULES
from tests.cli import aggcli, refused, strict_json, write_jsonl
from tests.fixtures import MODES, batch_of, fx_a, fx_b, replayed

DATA = Path(__file__).parent / "data"
BNPO = {
    *("trl:bnpo", "ms-swift:bnpo", "unsloth:bnpo", "axolotl:bnpo", "trl-sdpo:dapo", "torchforge:reinforce", "rlinf:token-mean"),
    *("cosmos-rl:token-mean", "skyrl:token_mean_legacy"),
}
"""A token mean of each micro-batch, under nine names."""
MICRO_BATCH_TOKENS = {"verl-legacy:token-mean", "torchrl:token_mean"} | BNPO
MICRO_BATCH_ROWS = {"verl-legacy:seq-mean-token-sum", "verl-legacy:seq-mean-token-mean"}
NOT_COUNTED = {"verl-legacy:seq-mean-token-sum-norm"}
OVER_ACCUMULATION = {"ms-swift:dapo"}
ROWS_BY_TOKENS = {"easyr1:seq"}
VARY = ROWS_BY_TOKENS | MICRO_BATCH_TOKENS | MICRO_BATCH_ROWS | NOT_COUNTED | OVER_ACCUMULATION
"""The rules known to vary (reference, invariance table)."""
NOT_FINITE = {"oat:grpo", "rlinf:seq-mean-token-mean"}
"""Those that are 0/0 on a fully masked row in every layout."""


def _frozen(batch: RolloutBatch | None = None) -> FrozenBatch:
    return freeze(built_in_batch() if batch is None else batch, settings_from({}).objective)


@pytest.fixture(scope="module")
def report() -> Audit:
    frozen = _frozen()
    rules = [rule_named(name, divisor=10.0) for name in RULES]
    return audit(frozen, rules, scheduled_layouts(frozen, DEFAULT_LAYOUTS))


def test_exactly_the_rules_known_to_vary_do_so_on_the_built_in_batch(report: Audit) -> None:
    found: dict[str, set[str]] = {}
    for rule in report.reports:
        found.setdefault(rule.verdict, set()).add(rule.rule)
    assert found["varies"] == VARY
    assert found["not finite"] == NOT_FINITE
    assert found["invariant"] == set(RULES) - VARY - NOT_FINITE


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (MICRO_BATCH_TOKENS, "the trained tokens are counted in each micro-batch"),
        (MICRO_BATCH_ROWS, "the samples that are not fully masked are counted in each micro-batch"),
        (NOT_COUNTED, "nothing is counted in a micro-batch, yet micro-batches are averaged"),
        (ROWS_BY_TOKENS, "micro-batches are averaged by their share of the step's trained tokens"),
        (OVER_ACCUMULATION, "divided by the number of accumulation steps again"),
    ],
)
def test_the_reason_says_which_denominator_was_counted_where(report: Audit, rules: set[str], words: str) -> None:
    for rule in report.reports:
        assert (words in rule.reason) == (rule.rule in rules)


def test_an_invariant_rule_has_one_loss_and_one_gradient_in_every_layout(report: Audit) -> None:
    for rule in report.reports:
        if rule.verdict != "invariant":
            continue
        assert len(rule.under) + len(rule.skipped) == len(DEFAULT_LAYOUTS)
        for outcome in rule.under:
            assert outcome.pg_loss == pytest.approx(rule.under[0].pg_loss, rel=1e-12)
            assert outcome.gradient_ratio == pytest.approx(1.0, rel=1e-12)
            assert outcome.gradient_cosine == pytest.approx(1.0, rel=1e-12)
            assert outcome.deviation < 1e-12


SAME = (
    {"verl:token-mean", "trl:dapo", "openrlhf:token", "nemo-rl:token", "skyrl:token_mean", "open-instruct:token", "areal"}
    | {"token_mean", "roll:token-mean", "trl:cispo", "trl:vespo", "tunix:token-mean", "unsloth:dapo", "axolotl:dapo"}
    | {"easyr1:token"},
    {"slime:sample_mean", "miles:sample_mean", "sample_mean", "agent-lightning:per_rollout_mean"},
    {"slime:per_token", "miles:per_token"},
    {"verl:seq-mean-token-mean", "skyrl:sequence_mean", "trl:grpo", "ms-swift:grpo", "torchforge:simple-grpo", "trl:sapo"}
    | {"torchrl:prompt_mean", "unsloth:grpo", "axolotl:grpo"},
    {"openrlhf:sequence", "nemo-rl:sequence", "roll:seq-mean-token-mean", "tunix:sequence-mean-token-mean"},
    {"verl:seq-mean-token-sum", "trl:luspo", "rlinf:seq-mean-token-sum", "tunix:sequence-mean-token-sum-norm"},
    {"roll:seq-mean-token-sum", "tunix:seq-mean-token-sum"},
    {"verl:seq-mean-token-sum-norm", "skyrl:seq_mean_token_sum_norm", "trl:dr_grpo", "ms-swift:dr_grpo", "oat:drgrpo"}
    | {"unsloth:dr_grpo", "axolotl:dr_grpo"},
    {"open-instruct:constant", "roll:seq-mean-token-sum-norm"},
    {"tinker", "verl:token-sum"},
    BNPO,
    {"proposal:turn-denominator", "proposal:per-trajectory"},
    {"constant", "tunix:sequence-mean-token-scale"},  # 7 rollouts, and 7 rows that are not empty: elsewhere they differ
)
"""Names of one rule: equal but for what keeps a count from 0 (verl-legacy:token-mean is 0/0 where bnpo is not)."""


def test_no_two_different_rules_coincide_on_the_built_in_batch(report: Audit) -> None:
    """Two rules are the same here if the losses agree in every layout that both can run under."""
    losses = {r.rule: {o.layout: o.pg_loss for o in r.under} for r in report.reports if r.verdict != "not finite"}
    same = {frozenset(pair) for names in SAME for pair in itertools.combinations(sorted(names), 2)}
    for a, b in itertools.combinations(losses, 2):
        shared = [(losses[a][at], losses[b][at]) for at in losses[a] if at in losses[b]]
        gap = max(
            abs((x or 0) - (y or 0)) / abs(x or 1) if x == x and y == y else math.inf for x, y in shared if x != y or x == x
        )
        if frozenset((a, b)) in same:
            assert gap < 1e-7, (a, b)
        else:
            assert gap > 1e-3, (a, b)


def test_the_built_in_numbers_are_those_of_plain_arithmetic(report: Audit) -> None:
    """With one sample a micro-batch, a mean of micro-batch token means is the mean over the eight rows' own means."""
    step, frozen = built_in_batch(), _frozen()
    assert frozen.loss_T is not None
    rows = [
        (float(loss_T[mask_T].sum()), int(mask_T.sum()))
        for loss_T, mask_T in zip(
            frozen.loss_T.split(step.response_length_S.tolist()),
            step.loss_mask_T.split(step.response_length_S.tolist()),
            strict=True,
        )
    ]
    expected = sum(s / max(n, 1) for s, n in rows) / 8
    (bnpo,) = (rule for rule in report.reports if rule.rule == "trl:bnpo")
    outcome = next(o for o in bnpo.under if o.layout == "dp1:contiguous:mb1")
    assert outcome.pg_loss == pytest.approx(expected, rel=1e-12)
    # rows of 2, 5, 6, 4, 10, 0, 2, 9 tokens: a token of a 2-token row weighs 1/16 instead of 1/38
    assert outcome.deviation == pytest.approx(38 / 16 - 1, rel=1e-12)


# -- counterexamples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(VARY) + [f"{mode}@{scope}" for mode in MODES for scope in ("rank", "micro-batch")])
def test_the_smallest_case_has_at_most_three_samples_and_is_found_in_ten_seconds(name: str) -> None:
    rule = rule_named(name, divisor=10.0)
    start = time.perf_counter()
    found = smallest_counterexample(rule)
    assert time.perf_counter() - start < 10
    assert found is not None
    assert len(found.toy.samples) <= 3
    pieces = sum(len(rank) for rank in found.toy.split)
    assert pieces == 2
    step = batch_of(
        {"response_length": n + m, "total_length": n + m, "loss_mask": [1] * n + [0] * m, "group_index": g}
        for n, m, g in found.toy.samples
    )
    samples = len(found.toy.samples)
    whole_T = rule.weights(step, schedule_of([[list(range(samples))]], samples), 1)
    cut_T = rule.weights(step, schedule_of(found.toy.split, samples), found.toy.cp)
    assert not torch.allclose(whole_T, cut_T, rtol=1e-6)


def test_the_smallest_case_of_a_token_mean_of_micro_batches_is_two_samples_of_1_and_2_tokens() -> None:
    found = smallest_counterexample(rule_named("trl:bnpo"))
    assert found is not None
    assert found.toy.samples == ((1, 0, 0), (2, 0, 0))
    assert found.toy.split == (((0,), (1,)),)
    assert found.reference == pytest.approx((1 / 3, 1 / 3))
    assert found.weights == pytest.approx((1 / 2, 1 / 4))  # 1/2 * 1/1 and 1/2 * 1/2
    assert str(found) == (
        "samples of 1, 2 tokens; in one micro-batch a token weighs 0.333333, 0.333333; as micro-batches (0) (1) it weighs"
        " 0.5, 0.25"
    )


@pytest.mark.parametrize("name", ["token_mean", "slime:sample_mean", "trl:grpo", "skyrl:prompt_mean"])
def test_an_exact_rule_has_no_counterexample(name: str) -> None:
    assert smallest_counterexample(rule_named(name)) is None


# -- the command -----------------------------------------------------------------------------------------------------


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    told = aggcli(capsys, "audit", *arguments, "--json")
    assert told.code == 0, told.err
    return strict_json(told.out)


@pytest.mark.parametrize(
    ("arguments", "failing"),
    [
        ((), None),
        (("--fail-on-variance", "1e-6", "--rules", "token_mean,trl:dapo,slime:per_token"), None),
        (("--fail-on-variance", "1e-6", "--rules", "token_mean,trl:bnpo"), "trl:bnpo"),
        (("--fail-on-variance", "10", "--rules", "trl:bnpo"), None),
        (("--fail-on-variance", "1e-6", "--rules", "oat:grpo"), "oat:grpo"),
        (("--fail-on-variance", "1e-6", "--rules", "token_mean", "--normalizer", "rank"), "token_mean@rank"),
    ],
)
def test_the_exit_code_is_1_only_where_a_check_was_asked_for_and_failed(
    arguments: tuple[str, ...], failing: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    told = aggcli(capsys, "audit", "--no-search", *arguments)
    assert told.code == (0 if failing is None else 1)
    last = (told.err.splitlines() or [""])[-1]
    assert last.startswith(f"aggcli: {failing} ") if failing else not last.startswith("aggcli: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rules", "nope"), "unknown loss aggregation 'nope'"),
        (("--divisor", "0"), "divisor 0: must be a positive finite number"),
        (("--fail-on-variance", "-1"), "--fail-on-variance -1: must be a finite number above 0"),
        (("--fail-on-variance", "inf"), "--fail-on-variance inf: must be a finite number above 0"),
        (("--divisor", "nan"), "--divisor nan: must be a positive finite number of tokens"),
        (("--normalizer", "epoch"), "--normalizer 'epoch' is not one of its values"),
        (("--layouts", "dp2:sideways"), "unknown partition rule 'sideways'"),
        (("--layouts", "recorded"), "layout 'recorded': the file records none"),
        (("no/such/file",), "no/such/file: no such file or folder"),
    ],
)
def test_what_an_audit_cannot_use_is_refused_by_name(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(aggcli(capsys, "audit", "--no-search", *arguments))


def test_the_table_fits_80_columns_and_names_every_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = aggcli(capsys, "audit").out.splitlines()
    assert max(map(len, lines)) <= 80
    parts = [part.splitlines() for part in "\n".join(lines).split("\n\n")]
    rows = {line.split()[0]: line for line in parts[1] if line.strip()}
    assert rows["trl:bnpo"].split()[-1] == "varies"
    assert "token_mean" not in rows, "of many rules only those that vary have a row"
    (kept,) = [" ".join(map(str.strip, part)) for part in parts if part[0].startswith("invariant under each of the layouts")]
    assert set(kept.partition("): ")[2].split(", ")) == {name for name in RULES if name not in rows}
    assert "openrlhf:sequence: unverified: ring attention was read, not run" in lines
    assert not [line for line in lines if "unverified:" in line and line.startswith(tuple(MODES))]


def test_a_train_dump_is_audited_under_its_recorded_layout_first(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(DATA / "slime_train" / "2.pt")
    found = _json(capsys, path, "--rules", "slime:sample_mean,trl:bnpo,prompt_mean")
    assert found["layouts"][0] == "recorded"
    (step,) = found["steps"]
    rules = step["rules"]
    assert rules["slime:sample_mean"]["verdict"] == "invariant"
    assert rules["slime:sample_mean"]["effective_lr"] == pytest.approx(1.0)
    assert rules["trl:bnpo"]["verdict"] == "varies"
    assert "group_index is missing" in rules["prompt_mean"]["reason"]
    # the replay of the same dump has the same loss
    (batch,) = open_source(settings_from({"rollouts": [path]}).source, 0)
    (report,) = replayed(batch, ("sample_mean", "token_mean"))
    assert rules["slime:sample_mean"]["pg_loss"] == pytest.approx(report.values["sample_mean"]["pg_loss"], rel=1e-12)


def test_the_answer_for_a_dump_is_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(DATA / "slime_train" / "2.pt")
    arguments = (path, "--rules", "slime:sample_mean,verl:token-sum,trl:bnpo", "--no-search")
    words = " ".join(aggcli(capsys, "audit", *arguments).out.split())
    (step,) = _json(capsys, *arguments)["steps"]
    low, high = (step["rules"][rule]["effective_lr"] for rule in ("trl:bnpo", "verl:token-sum"))
    assert words.startswith("1 of the 3 rules compared varies with the layout: trl:bnpo, under ")
    assert low < 1 < high
    norms = f"{low:.3g}x (trl:bnpo) to {high:.0f}x (verl:token-sum) slime:sample_mean's"
    assert f"Another rule would have made the gradient norm {norms}, each under its reference layout." in words


def test_the_answer_says_what_varies_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FX-A: all 16 tokens weigh 1/16; in micro-batches of two samples the first 4 tokens weigh 1/8, twice as much."""
    path = write_jsonl(tmp_path / "a.jsonl", fx_a())
    layouts = ("--layouts", "dp1:contiguous,dp1:contiguous:mb2", "--no-search")
    said = strict_json(aggcli(capsys, "audit", path, "--rules", "token_mean,trl:bnpo", *layouts, "--json").out)["answer"]
    assert said[0] == (
        "1 of the 2 rules compared varies with the layout: trl:bnpo, under dp1:contiguous:mb2 a token's weight changes by 100 %"
        " and the step loss is 0.208 instead of 0.188 under dp1:contiguous."
    )
    said = strict_json(aggcli(capsys, "audit", path, "--rules", "token_mean", *layouts, "--json").out)["answer"]
    assert said == ["No layout that was evaluated changes the weight of a token under token_mean."]
    one = ("--layouts", "dp1", "--no-search", "--json")
    said = strict_json(aggcli(capsys, "audit", path, "--rules", "token_mean", *one).out)["answer"]
    assert said == ["No rule was compared between two layouts; token_mean was evaluated under one layout only."]


def test_a_framework_is_audited_by_its_rules_and_one_that_varies_not_is_said_to_have_none(capsys) -> None:
    found = _json(capsys, "--framework", "trl", "--framework", "oat", "--framework", "slime", "--no-search")
    named = [name for name in RULES if name.split(":")[0] in ("trl", "oat", "slime")]
    assert sorted(found["steps"][0]["rules"]) == sorted(named)
    assert found["answer"][0].endswith("; oat:grpo is not finite on this batch.")
    assert found["answer"][1] == "By framework, rules that vary: trl 1 of 8; of slime none.", "oat:grpo was not judged"
    line = refused(aggcli(capsys, "audit", "--framework", "trll"))
    assert line == "aggcli: --framework trll: no rule of it is known here; did you mean 'trl'?"


def test_the_effective_learning_rate_is_the_ratio_of_gradient_norms_of_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(DATA / "slime_train" / "1.pt")
    (batch,) = open_source(settings_from({"rollouts": [path]}).source, 0)
    (report,) = replayed(batch, ("sample_mean", "token_mean", "constant"))
    rules = _json(capsys, path, "--rules", "sample_mean,token_mean,constant", "--divisor", "10")["steps"][0]["rules"]
    for mode in ("token_mean", "constant"):
        assert rules[mode]["effective_lr"] == pytest.approx(report.values[mode]["gradient_ratio"], rel=1e-9)
        assert rules[mode]["gradient_cosine"] == pytest.approx(report.values[mode]["gradient_cosine"], rel=1e-9)


def test_a_rule_that_cannot_be_dealt_the_reference_takes_the_first_layout_that_it_can() -> None:
    frozen = _frozen(batch_of(fx_b()))
    layouts = scheduled_layouts(frozen, ("dp1:contiguous:mb3", "dp2:contiguous", "dp1:contiguous:mb1"))
    uneven, even = audit(frozen, [rule_named("trl:bnpo"), rule_named("verl-legacy:token-mean")], layouts).reports
    assert uneven.skipped == ("dp1:contiguous:mb3",)
    assert [outcome.layout for outcome in uneven.under] == ["dp2:contiguous", "dp1:contiguous:mb1"]
    assert even.skipped == ()
    (report,) = audit(frozen, [rule_named("trl:grpo")], layouts[:1]).reports
    assert report.verdict == "not computed"
    assert "equal micro-batches" in report.reason


def test_a_file_without_advantages_still_has_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(json.dumps({"response_length": n}) + "\n" for n in (1, 3, 4, 8)))
    rules = _json(capsys, str(path), "--rules", "token_mean,trl:bnpo")["steps"][0]["rules"]
    assert rules["trl:bnpo"]["verdict"] == "varies"
    assert rules["trl:bnpo"]["pg_loss"] is None
    assert rules["trl:bnpo"]["effective_lr"] is None
    assert rules["token_mean"]["total_weight"] == pytest.approx(1.0)


def test_every_optimizer_step_of_a_file_is_audited(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(DATA / "slime_train" / "0.pt")
    found = _json(capsys, path, "--rules", "token_mean", "--global-batch-size", "16")
    (batch,) = open_source(settings_from({"rollouts": [path]}).source, 0)
    assert len(found["steps"]) == len(optimizer_steps(batch, 16)) == 4


def test_what_moves_a_rule_most_is_said_to_be_of_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FX-A as the second step: its first micro-batch of two samples has 4 of the 16 tokens, a change of 100 %. In the first
    step both micro-batches have as many tokens, and nothing changes."""
    even = [{"response_length": 2, "advantage": 1.0, "group_index": 0} for _ in range(4)]
    write_jsonl(tmp_path / "0.jsonl", even)
    write_jsonl(tmp_path / "1.jsonl", fx_a())
    layouts = ("--layouts", "dp1:contiguous,dp1:contiguous:mb2", "--no-search")
    words = " ".join(aggcli(capsys, "audit", tmp_path, "--rules", "token_mean,trl:bnpo", *layouts).out.split())
    assert "most under dp1:contiguous:mb2, step 1: a weight changes by 100 %" in words


def test_the_table_says_whose_step_loss_is_not_what_the_framework_logs(capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's code has a per-token loss of its own for these three loss types, and the clipped surrogate for the others."""
    words = " ".join(aggcli(capsys, "audit", "--framework", "trl", "--no-search").out.split())
    assert (
        "step loss, gradient norm and cosine of trl:cispo, trl:vespo, trl:sapo: of the clipped surrogate under their weights,"
        " not of the loss that the framework logs" in words
    )
    words = " ".join(aggcli(capsys, "audit", "--rules", "trl:grpo,trl:luspo", "--no-search").out.split())
    assert "clipped surrogate" not in words


def test_an_audit_says_which_loss_its_numbers_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--rules", "trl:cispo,trl:grpo", "--no-search")
    words = " ".join(aggcli(capsys, "audit", *flags, "--policy-loss", "gspo", "--eps-clip-high", "0.3").out.split())
    assert "policy loss: gspo clip: 0.2 below, 0.3 above" in words
    assert "of policy loss gspo under their weights, whatever loss the framework logs" in words
    assert "clipped surrogate" not in words
    assert _json(capsys, *flags, "--policy-loss", "cispo")["settings"] == {
        "policy_loss": "cispo",
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "eps_clip_c": None,
    }


def test_nan_that_is_not_known_to_be_of_an_empty_piece_is_not_called_0_over_0() -> None:
    """A reducer's weights are NaN all over the step: nothing says where."""
    toy = Toy(((1, 0, 0), (0, 1, 0)), (((0,), (1,)),))
    assert str(Counterexample(toy, (1.0, 0.0), (math.nan, math.nan), math.inf)).endswith("it weighs NaN, NaN")
    assert str(Counterexample(toy, (1.0, 0.0), (0.5, math.nan), math.inf)).endswith("0.5, 0/0, so the loss is NaN")


# -- what was evaluated ------------------------------------------------------------------------------------------------


def test_a_rule_is_evaluated_on_the_recorded_micro_batches_even_where_its_framework_would_not_deal_them(capsys) -> None:
    """The replay of the same dump gives the same two numbers; leaving the recorded layout out would call the rule invariant."""
    path, layouts = str(DATA / "slime_train" / "2.pt"), ("--layouts", "recorded,dp1:contiguous")
    (step,) = _json(capsys, path, "--rules", "token_mean,trl:bnpo,trl:grpo", *layouts)["steps"]
    bnpo = step["rules"]["trl:bnpo"]
    told = aggcli(capsys, "compare", "--rollouts", path, "--modes", "trl:bnpo", *layouts, "--json", "--no-samples")
    replayed_layouts = told.steps[0]["modes"]["trl:bnpo"]["layouts"]
    for layout in ("recorded", "dp1:contiguous"):
        assert bnpo["layouts"][layout]["pg_loss"] == pytest.approx(replayed_layouts[layout]["pg_loss"], rel=1e-12)
    assert bnpo["verdict"] == step["rules"]["trl:grpo"]["verdict"] == "varies"
    assert bnpo["skipped"] == []
    assert bnpo["reference_layout"] == "recorded"


def test_what_varies_only_on_a_recorded_layout_of_another_framework_is_set_apart(capsys) -> None:
    """Recorded are micro-batches of unequal numbers of samples. In equal ones 1/(GA B n) is 1/(N n) everywhere, so trl:grpo has
    the same weights in dp1 and dp2; trl:bnpo counts tokens in each half, and verl's token-mean in all."""
    path, layouts = str(DATA / "slime_train" / "2.pt"), ("--layouts", "recorded,dp1:contiguous,dp2:contiguous", "--no-search")
    told = _json(capsys, path, "--rules", "trl:grpo,trl:bnpo,verl:token-mean", *layouts)
    (rules,) = (step["rules"] for step in told["steps"])
    verdicts = {name: found["verdict"] for name, found in rules.items()}
    assert verdicts == {"trl:grpo": "varies as recorded", "trl:bnpo": "varies", "verl:token-mean": "invariant"}
    assert told["answer"][0].startswith("1 of the 3 rules compared varies with the layout: trl:bnpo, under dp")
    assert told["answer"][1] == "By framework, rules that vary: trl 1 of 2; of verl none."
    only = "only between the recorded layout, which its framework cannot represent, and the others"
    by = rf" \(trl:grpo\) {only}, by up to ([\d.]+) %\."
    said = re.fullmatch(f"1 more varies{by}", told["answer"][2])
    assert said is not None
    largest = 100 * rules["trl:grpo"]["deviation"]
    assert largest <= float(said[1]) < largest * 1.01
    alone = _json(capsys, path, "--rules", "trl:grpo,verl:token-mean", *layouts)["answer"]
    first = (
        "No evaluated layout that its framework can represent changes the weight of a token under any of the 2 rules compared."
    )
    assert alone[0] == first
    assert re.fullmatch("trl:grpo varies" + by.removeprefix(r" \(trl:grpo\)"), alone[1])
    assert not any("trl none" in one for one in alone)
    for rules, code in (("trl:grpo,verl:token-mean", 0), ("trl:grpo,trl:bnpo", 1)):
        checked = aggcli(capsys, "audit", path, "--rules", rules, *layouts, "--fail-on-variance", 1e-6)
        assert (checked.code, "trl:bnpo vary" in checked.err) == (code, code == 1)


def test_a_rule_that_cannot_be_dealt_the_recorded_layout_is_measured_under_those_that_it_can(capsys) -> None:
    """The replay of the same dump under dp1 and dp2 alone, which TRL can represent, gives the same loss and gradient norms."""
    path, own = str(DATA / "slime_train" / "2.pt"), ("dp1:contiguous", "dp2:contiguous")
    names, layouts = "trl:grpo,trl:bnpo,trl:luspo,verl:token-mean", ("--layouts", ",".join(("recorded", *own)), "--no-search")
    told = aggcli(capsys, "compare", "--rollouts", path, "--modes", names, "--layouts", ",".join(own), "--json", "--no-samples")
    replayed_modes = told.steps[0]["modes"]
    rules = _json(capsys, path, "--rules", names, *layouts)["steps"][0]["rules"]
    assert [found["reference_layout"] for found in rules.values()] == [own[0], own[0], own[0], "recorded"]
    for name, found in rules.items():
        assert found["effective_lr"] == pytest.approx(replayed_modes[name]["gradient_ratio"], rel=1e-9)
        for layout in own:
            expected = replayed_modes[name]["layouts"][layout]["pg_loss"]
            assert found["layouts"][layout]["pg_loss"] == pytest.approx(expected, rel=1e-12)
    (alone,) = (
        step["rules"]["trl:bnpo"] for step in _json(capsys, path, "--rules", names, "--layouts", ",".join(own))["steps"]
    )
    assert rules["trl:bnpo"]["layouts"]["recorded"]["deviation"] > alone["deviation"], "else this proves nothing of the worst"
    assert rules["trl:bnpo"]["deviation"] == pytest.approx(alone["deviation"], rel=1e-12)
    assert rules["trl:bnpo"]["worst_layout"] == own[1] == alone["worst_layout"]
    words = " ".join(aggcli(capsys, "audit", path, "--rules", names, *layouts).out.split())
    by = f"{100 * alone['deviation']:.3g} %"
    assert f"trl:bnpo, under dp2:contiguous a token's weight changes by {by} and" in words
    assert re.search(rf"trl:bnpo [^%]* {by} varies", words), "the table says no other change"
    assert "under recorded, which its framework cannot represent: a weight changes by" in words
    whose = "of trl:grpo, trl:bnpo, trl:luspo it is dp1:contiguous, the first that the framework can represent"
    assert f"the first is the reference; {whose}" in words
    assert "against trl:grpo's, each under its reference layout" in words


def test_a_rule_left_out_of_a_layout_is_not_called_invariant_there(capsys) -> None:
    """Micro-batches of 3, 3 and 2 samples are nothing that TRL deals: of two layouts it has one, and nothing to compare."""
    uneven = ("--rules", "token_mean,trl:grpo", "--no-search", "--layouts", "dp1:contiguous,dp1:contiguous:mb3")
    told = aggcli(capsys, "audit", *uneven)
    assert told.code == 0, told.err
    rows = {line.split()[0]: line for line in reversed(told.out.splitlines()) if line.strip()}
    assert rows["trl:grpo"].split() == ["trl:grpo", "-0.201", "1.05x", "0.959", "not", "compared"], "no change is claimed"
    assert rows["token_mean"].rstrip().endswith("invariant")
    words = " ".join(told.out.split())
    assert "not evaluated under dp1:contiguous:mb3, which the framework cannot represent: trl:grpo" in words
    (step,) = _json(capsys, *uneven)["steps"]
    assert step["rules"]["trl:grpo"]["verdict"] == "not compared"
    assert step["rules"]["trl:grpo"]["skipped"] == ["dp1:contiguous:mb3"]


def test_the_help_of_an_audit_names_its_own_default_layouts(capsys) -> None:
    words = " ".join(aggcli(capsys, "audit", "--help-all").out.split())
    for layout in DEFAULT_LAYOUTS[1:4]:
        assert layout.rpartition("mb")[2] in words
    assert "dp2cp2:contiguous, dp4:interleaved:mb1, dp4:balanced" in words
    assert "dp1:first-fit" not in words


def test_layouts_that_are_named_are_the_only_ones_evaluated(capsys) -> None:
    """A train dump's recorded layout is among the default ones, and nowhere else unless it is named."""
    path = str(DATA / "slime_train" / "2.pt")
    assert _json(capsys, path, "--rules", "token_mean", "--layouts", "dp1:contiguous")["layouts"] == ["dp1:contiguous"]
    assert _json(capsys, path, "--rules", "token_mean")["layouts"] == ["recorded", *DEFAULT_LAYOUTS]
