"""The verdict: by accuracy at equal steps and equal tokens, never by pg_loss, and calibrated on synthetic curves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from aggcli.analysis.comparison import Comparison, compare
from aggcli.analysis.effects import effects_of
from aggcli.analysis.histories import MEASURES, History
from aggcli.analysis.outcomes import mean_between, tokens_to_reach
from aggcli.analysis.settings import labelled
from aggcli.analysis.training_answer import verdict
from aggcli.errors import SettingError
from aggcli.report.comparison_rows import rows_of
from aggcli.report.comparison_tables import recorded_caption
from aggcli.report.effects import first_outcomes


def run(mode: str, seed: int, accuracy: ArrayLike, per_step: float = 10.0, steps: Sequence[int] | None = None) -> History:
    """A run whose steps each take `per_step` tokens; from the first missing step on they are not known."""
    values = np.asarray(accuracy, dtype=np.float64)
    taken = np.arange(len(values)) if steps is None else np.asarray(steps)
    blank = np.full(len(values), np.nan)
    tokens = np.where(taken == np.arange(len(taken)), per_step * taken, np.nan)
    measures = {name: values if name in ("accuracy", "raw_reward") else blank for name in MEASURES}
    return History(Path(f"{mode}/{seed}"), mode, seed, "done", {}, {}, taken, tokens, blank, measures, label=mode)


def found_of(runs: Sequence[History], figure: str = "accuracy", window: float = 0.0) -> Comparison:
    comparison = compare(runs, window=window)
    assert figure in comparison.outcomes
    return comparison


def test_the_last_tenth_of_the_common_steps_counts():
    rising = [step / 100 for step in range(100)]
    outcome = compare([run("a", 0, rising)]).outcomes["accuracy"]["a"]
    assert outcome.mean == pytest.approx(0.945)  # steps 90 to 99
    assert compare([run("a", 0, rising)], window=0).outcomes["accuracy"]["a"].mean == pytest.approx(0.99)


def test_only_steps_that_all_seeds_recorded_are_used_and_the_rest_is_counted():
    runs = [run("a", 0, [0.1, 0.2, 0.3, 0.4]), run("a", 1, [0.3, 0.5, 0.9], steps=[0, 2, 5])]
    found = found_of(runs)
    outcome = found.outcomes["accuracy"]["a"]
    assert dict(outcome.values) == {0: pytest.approx(0.3), 1: pytest.approx(0.5)}  # step 2
    assert outcome.common is not None
    assert (outcome.common.points, outcome.common.dropped, outcome.common.end) == (2, 3, 2.0)
    assert "a: 2 common steps; 3 are missing in some run, left out" in found.notes
    assert "a: no tokens are counted behind a missing step, in 1 of 2 runs" in found.notes


def test_at_equal_tokens_the_shorter_budget_counts_and_nothing_is_read_beyond_it():
    """b spends 20 tokens a step and a 10: a's last step lies at 40 tokens, where b has done 2 steps."""
    a = run("a", 0, [0.1, 0.2, 0.3, 0.4, 0.5])
    b = run("b", 0, [0.1, 0.4, 0.6, 0.9, 0.99], per_step=20)
    pair = found_of([a, b]).outcomes["accuracy_at_equal_tokens"]["b"].pair
    assert pair is not None
    assert pair.common is not None
    assert pair.common.end == 40.0
    assert pair.test.difference.mean == pytest.approx(0.6 - 0.5)
    values = np.array([0.1, 0.4, 0.6])
    assert mean_between(np.array([0.0, 20.0, 40.0]), values, 30.0, 30.0) == pytest.approx(0.5)
    assert math.isnan(mean_between(np.array([0.0, 20.0, 40.0]), values, 30.0, 41.0))


def test_the_order_at_equal_tokens_can_be_the_other_way_round_than_at_equal_steps():
    runs = [run("a", s, [0.2, 0.4, 0.6 + s / 100, 0.7 + s / 100]) for s in range(4)]
    runs += [run("b", s, [0.2, 0.5, 0.8 + s / 150, 0.9 + s / 150], per_step=40) for s in range(4)]
    found = verdict(compare(runs, window=0))
    by_steps, by_tokens = found.rankings
    assert [one.label for one in by_steps.standings] == ["b", "a"]
    assert [one.label for one in by_tokens.standings] == ["a", "b"]
    assert [one.word for one in by_steps.standings] == ["higher", "baseline"]
    assert [one.word for one in by_tokens.standings] == ["baseline", "lower"]


def test_tokens_to_reach_are_linear_between_steps_and_blank_when_never_reached():
    one = run("a", 0, [0.1, 0.2, 0.4, 0.8])
    assert tokens_to_reach(one, 0.6) == pytest.approx(25.0)
    assert tokens_to_reach(one, 0.15) == pytest.approx(5.0)
    assert tokens_to_reach(one, 0.05) == 0.0
    spiky = run("a", 0, [0.1] * 10 + [0.9] + [0.1] * 5 + [0.6] * 4)  # a running mean of two: 0.5 at the spike, 0.6 at the end
    assert tokens_to_reach(spiky, 0.55) == pytest.approx(168.0)
    assert math.isnan(tokens_to_reach(one, 0.81))


def test_another_mode_beside_them_changes_no_number_of_a_pair():
    """The third mode has fewer steps, other seeds and more tokens a step; only Holm's correction may move."""
    rng = np.random.default_rng(0)
    two = [run(mode, s, rng.normal(0.5, 0.1, 20), 10 + s) for mode in ("a", "b") for s in range(4)]
    third = [run("c", s, rng.normal(0.5, 0.1, 7), 3 + s) for s in range(2, 8)]
    alone, beside = compare(two), compare([*two, *third])
    for figure, outcomes in alone.outcomes.items():
        for label, outcome in outcomes.items():
            other = beside.outcomes[figure][label]
            assert (other.values, other.common) == (outcome.values, outcome.common)
            if outcome.pair is not None:
                assert other.pair is not None
                assert (other.pair.test, other.pair.common) == (outcome.pair.test, outcome.pair.common)


def test_one_seed_is_said_and_shows_no_difference():
    found = compare([run("a", 0, [0.1, 0.9]), run("b", 0, [0.1, 0.2])])
    assert not [note for note in found.notes if "seed" in note], "the answer says it, once"
    said = verdict(found)
    assert not said.rankings[0].shown
    assert said.answer.sentences == (
        "One seed: no interval and no test, so no difference can be shown between a and b.",
        "Untested: b, accuracy in training rollouts, equal steps -0.7 (0.2 against 0.9).",
        "Give more seeds.",
    )
    assert said.lists[0] == (
        "accuracy in training rollouts, equal steps, step 1, against a",
        ("b: no difference shown, -0.7; one seed: no interval and no test",),
    )


def test_a_line_names_the_word_size_interval_both_p_values_the_floor_and_the_seeds():
    """Of four tests (tokens trained on are the same) tokens to accuracy 0.46 comes first: 1.8, 1.7217 and 1.9048 fewer, t = 34,
    p = 0.00043, four times that. Accuracy is second and third: t = 16, p = 1 - 16/sqrt(258) = 0.0039, three times that.
    """
    runs = [run("a", s, [0.1, 0.5 + s / 100]) for s in range(3)] + [run("b", s, [0.1, 0.6 + s * s / 100]) for s in range(3)]
    found = verdict(compare(runs, window=0))
    accuracy = "accuracy in training rollouts, equal {} +0.107 [+0.078, +0.135] (0.6167 against 0.51)"
    assert found.answer.sentences == (
        "3 of 4 differences from a under b are shown; the largest against its spread over seeds: tokens to accuracy 0.46"
        " -1.81 tokens [-2.04, -1.58] (6.975 against 8.784).",
        f"Next: {accuracy.format('steps')}; {accuracy.format('tokens')}.",
        "3 seeds, so few that only large differences can be shown; a difference is shown where the p of its paired t-test,"
        " corrected by Holm over all 4 tests, is below 5 %.",
    )
    line = "b: higher, +0.107 [+0.078, +0.135], Holm p = 0.012, sign-flip p = 0.25 (floor 0.25), 3 seeds"
    both = "(Holm over the 4 tests of this comparison)"
    assert found.lists == [
        (f"accuracy in training rollouts, equal steps, step 1, against a {both}", (line,)),
        (f"accuracy in training rollouts, equal tokens, at 10 tokens, against a {both}", (line,)),
    ]


def test_the_headline_is_short_whatever_is_shown_of_many_modes():
    """b is higher on both axes, d on none; c takes half the tokens a step, so at equal tokens it is a step ahead."""
    rng = np.random.default_rng(3)

    def arm(mode: str, level: float, per_step: float = 10.0) -> list[History]:
        return [run(mode, s, [0.1, 0.3, level + s / 50 + rng.normal(0, 0.001)], per_step) for s in range(4)]

    some = [*arm("a", 0.5), *arm("d", 0.5)]
    first, size, power, _ = verdict(compare(some, window=0)).answer.sentences
    assert first == "No difference from a is shown under d, in any of 4 outcomes that were tested."
    assert size.startswith("Accuracy in training rollouts, equal steps: ")
    assert power.startswith("The smallest difference in accuracy that would have been shown with 80 % power is 0.00")
    comparison = compare([*some, *arm("b", 0.7), *arm("c", 0.4, 5.0)], window=0)
    found = verdict(comparison)
    shown = {
        (name, label) for name, of in comparison.outcomes.items() for label, one in of.items() if one.pair and one.pair.shown
    }
    assert {("accuracy", "b"), ("accuracy", "c"), ("accuracy_at_equal_tokens", "b")} <= shown
    assert not [label for _, label in shown if label == "d"]
    first, following, rest, _ = found.answer.sentences
    assert first.startswith(
        f"{len(shown)} of {comparison.tests} differences from a are shown; the largest against its spread over seeds: "
    )
    assert following.endswith(f"; {len(shown) - 3} more in the table.")
    assert "no difference shown under d: d " in rest
    assert [[line.partition(":")[0] for line in lines] for _, lines in found.lists] == [["b", "d", "c"], ["b", "c", "d"]]
    many = verdict(compare([one for mode in "abcdefgh" for one in arm(mode, 0.5)], window=0)).answer.sentences
    assert many[0].startswith("No difference from a is shown under b, c, d or 4 more, in any of 4 outcomes")
    assert len(many) == 4


def test_an_interval_that_reaches_further_up_says_so_and_by_which_quantile():
    def of(seed: int, **lengths: float) -> History:
        one = run("a", seed, [0.5])
        return dataclasses.replace(
            one, measures={**one.measures, **{name: np.array([value]) for name, value in lengths.items()}}
        )

    skewed = rows_of(compare([of(seed, **{"correct/response_length": 5.0 + seed}) for seed in range(3)], window=0))
    further = "Up to a higher quantile than 97.5 %, as their laws over runs are skewed: length of correct responses in training"
    further += " rollouts: 98.25 %."
    assert further in recorded_caption(skewed)
    plain = rows_of(compare([of(seed, response_length=5.0 + seed) for seed in range(3)], window=0))
    assert "quantile" not in recorded_caption(plain)
    row = next(row for row in skewed if row.outcome == "correct/response_length")
    assert row.high == pytest.approx(6 * math.exp(stdtrit(2, 0.9825) / math.sqrt(3) / 6))


def test_what_is_drawn_first_is_success_and_then_what_differs():
    """Half the tokens a step, by 0.1 more a seed: the tokens trained on differ, the accuracy at equal steps does not."""
    level = (0.5, 0.52, 0.49)
    runs = [run("a", s, [0.1, 0.3, at]) for s, at in enumerate(level)]
    runs += [run("b", s, [0.1, 0.3, at + (0.01, -0.012, 0.003)[s]], 5 + s / 10) for s, at in enumerate(level)]
    found = compare(runs, window=0)
    differ = {name for name, of in found.outcomes.items() if of["b"].pair and of["b"].pair.shown}
    assert "tokens" in differ
    assert "accuracy" not in differ
    drawn = first_outcomes(found)
    assert drawn[0] == "accuracy"
    assert set(drawn[1 : len(differ) + 1]) == differ
    assert len(drawn) == len(set(drawn)) <= 6


def test_modes_without_a_common_seed_are_not_paired():
    found = compare([run("a", 0, [0.1, 0.5]), run("b", 1, [0.1, 0.9])])
    assert "b and a have no seed in common, so they are not paired" in found.notes
    said = verdict(found)
    assert said.answer.text == "No verdict: no other mode can be paired with a."
    assert said.lists[0][1] == ("b: not paired: no seed in common with a",)


def test_without_accuracy_or_reward_there_is_no_verdict():
    blank = run("a", 0, [math.nan, math.nan])
    only = "a is the only mode here: there is nothing to compare it with."
    assert verdict(compare([blank])).answer.text == f"Neither accuracy nor reward was recorded. {only}"
    alone = verdict(compare([run("a", 0, [0.5, 0.6])]))
    assert alone.answer.text == f"a: accuracy in training rollouts, equal steps 0.6 over 1 seed. {only}"


def test_a_difference_beyond_the_range_of_an_outcome_is_no_difference_that_could_have_been_shown() -> None:
    """Two seeds, differences 0.1 and 0.3 on both axes: 0.1 is their standard error, and three tests are made (tokens are the
    same), so the Cauchy law's cot(0.025 pi / 3) and tan(0.3 pi), times that, are 3.82 + 0.14 of an accuracy."""
    runs = [run("a", s, [0.1, 0.5]) for s in range(2)] + [run("b", s, [0.1, 0.6 + s / 5]) for s in range(2)]
    found = verdict(compare(runs, window=0, reach=1.0))
    pair = found.rankings[0].standings[0]
    assert pair.power is not None
    assert pair.power.smallest == pytest.approx(0.1 * (1 / math.tan(math.pi * 0.025 / 3) + math.tan(math.pi * 0.3)), rel=1e-6)
    assert found.answer.sentences[2] == (
        "No possible difference in accuracy would have been shown with 80 % power: 2 seeds at this spread."
    )
    assert found.lists[0][1][0].endswith("; at this spread no possible difference would have been shown with 80 % power")
    rows = [row for row in rows_of(compare(runs, window=0, reach=1.0)) if row.mode == "b" and row.outcome == "accuracy"]
    assert [(row.smallest_difference, row.no_smallest_difference) for row in rows] == [(None, "no possible difference")]


def test_where_all_outcomes_are_the_same_in_all_seeds_it_is_said_that_there_is_nothing_to_test_by() -> None:
    runs = [run(mode, seed, [0.2, 0.0]) for mode in "ab" for seed in range(3)]
    assert verdict(compare(runs, window=0)).answer.sentences == (
        "No difference has a spread to test by: each outcome paired over two seeds or more is the same under b as under a.",
    )


def test_an_interval_of_a_length_ends_at_the_response_limit_where_it_is_known() -> None:
    """Lengths 10 and 30, standard error 10: 20 exp(12.7062 * 10 / 20) is far beyond the limit of 32."""

    def of(length: float, seed: int, limit: int | None) -> History:
        one = run("a", seed, [0.5])
        measures = {**one.measures, "response_length": np.array([length])}
        return dataclasses.replace(one, measures=measures, settings={} if limit is None else {"max_response_length": limit})

    for limit, high in ((32, 32.0), (None, 20 * math.exp(12.7062047 / 2))):
        found = compare([of(10.0, 0, limit), of(30.0, 1, limit)], window=0).outcomes["response_length"]["a"]
        assert (found.mean, found.high) == (pytest.approx(20.0), pytest.approx(high, rel=1e-6))


# -- on fresh prompts, at the end -------------------------------------------------------------------------------------

FRESH = {"a": (0.5, 0.52, 0.54), "b": (0.6, 0.62, 0.65)}


def evaluated(modes: str = "ab", steps: Mapping[str, int] | None = None) -> tuple[list[History], dict[str, dict[Path, float]]]:
    """Runs that differ on fresh prompts and not in their training rollouts; their steps, default 4."""
    lengths = {mode: (steps or {}).get(mode, 4) for mode in modes}
    runs = [run(mode, s, [0.5 + s / 100] * lengths[mode]) for mode in modes for s in range(3)]
    return runs, {"fresh/accuracy": {one.directory: FRESH[one.mode][one.seed] for one in runs if one.mode in FRESH}}


def test_fresh_prompts_decide_at_equal_steps_and_the_rollouts_stand_beside_them():
    runs, ends = evaluated()
    found = compare(runs, ends=ends)
    assert found.outcomes["accuracy"]["b"].pair is not None
    assert found.outcomes["accuracy"]["b"].pair.test.difference.mean == pytest.approx(0)
    by_steps, by_tokens = verdict(found).rankings
    assert by_steps.outcome == "accuracy_on_fresh_prompts"
    both = "(Holm over the 4 tests of this comparison)"
    assert by_steps.heading == f"at equal steps, accuracy on fresh prompts (end), after step 3, against a {both}"
    assert by_steps.standings[0].difference is not None
    assert by_steps.standings[0].difference.mean == pytest.approx(0.31 / 3)  # 0.1, 0.1, 0.11
    assert (by_steps.standings[0].word, by_tokens.standings[0].word) == ("higher", "baseline")
    assert by_tokens.outcome == "accuracy_at_equal_tokens"


def test_the_rollouts_decide_where_an_arm_has_no_evaluation_another_number_of_steps_or_fewer_seeds_with_one():
    def figure(runs: Sequence[History], ends: Mapping[str, Mapping[Path, float]]) -> str:
        return verdict(compare(runs, ends=ends)).rankings[0].outcome

    runs, ends = evaluated("abc")
    assert figure(runs, ends) == "accuracy"
    longer, theirs = evaluated(steps={"b": 6})
    assert figure(longer, theirs) == "accuracy"
    found = compare(longer, ends=theirs)
    assert found.outcomes["accuracy_on_fresh_prompts"]["b"].pair is None
    assert "b was trained for 6 steps and a for 4, so the policies they ended with are not compared" in found.notes
    runs, ends = evaluated()
    ends["fresh/accuracy"].pop(next(one.directory for one in runs if (one.mode, one.seed) == ("b", 2)))
    assert figure(runs, ends) == "accuracy"


def test_the_steps_of_a_run_are_its_setting_where_a_silent_last_step_left_no_line():
    runs, ends = evaluated(steps={"b": 3})
    given = [dataclasses.replace(one, settings={"steps": 4}) for one in runs]
    heading = verdict(compare(given, ends=ends)).rankings[0].heading
    assert heading.startswith("at equal steps, accuracy on fresh prompts (end), after step 3, against a (")


def test_an_unknown_baseline_is_refused_and_named():
    with pytest.raises(SettingError, match="--baseline sampl_mean: is not among the compared runs; did you mean 'sample_mean'"):
        compare([run("sample_mean", 0, [0.5])], "sampl_mean")


# -- calibration on synthetic curves ----------------------------------------------------------------------------------


def trained(mode: str, seed: int, rng: np.random.Generator, gain: float = 0.0) -> History:
    """A learning curve from 0.3 to 0.8 with a level of its own and the noise of 128 rollouts a step; lengths differ too."""
    chance = 0.3 + (0.5 + gain) * np.linspace(0, 1, 40) ** 0.5 + rng.normal(0, 0.02)
    return run(mode, seed, rng.binomial(128, np.clip(chance, 0, 1)) / 128, per_step=float(rng.normal(1000, 30)))


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 10])
def test_runs_that_differ_only_in_seed_are_called_different_in_5_percent_of_comparisons(n: int):
    """300 comparisons: each figure's t-test is below 5 % in 5 % of them, within 3.5 binomial standard errors (1.26 %), and its
    interval covers 0 in all the others; a comparison, which has these and two more, says so in 5 % at most."""
    rng = np.random.default_rng([n, 99])
    called, said = [], []
    for _ in range(300):
        comparison = compare([trained(mode, seed, rng) for mode in ("a", "b") for seed in range(n)])
        found = verdict(comparison)
        said.append(any(effect.shown for effect in effects_of(comparison)))
        pairs = [comparison.outcomes[ranking.outcome]["b"].pair for ranking in found.rankings]
        called.append([pair is not None and pair.test.p is not None and pair.test.p < 0.05 for pair in pairs])
        for pair, is_called in zip(pairs, called[-1], strict=True):
            assert pair is not None
            assert pair.test.difference.low is not None
            assert pair.test.difference.high is not None
            assert is_called == (not pair.test.difference.low <= 0 <= pair.test.difference.high)
    error = 3.5 * math.sqrt(0.05 * 0.95 / 300)
    shares = np.mean(called, axis=0)
    assert shares.shape == (2,)
    assert (np.abs(shares - 0.05) < error).all(), shares
    assert 0 < np.mean(said) < 0.05 + error
    assert np.mean(np.any(called, axis=1)) > np.mean(said), "two tests at 5 % each are more than 5 % together"


def test_all_pairs_of_all_outcomes_are_corrected_together_and_each_p_stands_wherever_the_pair_does():
    """Four outcomes of three pairs: the smallest p counts twelve times, the next at least as much."""
    rng = np.random.default_rng(5)
    runs = [
        run(m, s, [0.1, 0.5 + up + rng.normal(0, 0.02)], 10.0 + s + rng.normal(0, 0.1))
        for m, up in zip("abcd", (0, 0.2, 0, 0), strict=True)
        for s in range(4)
    ]
    comparison = compare(runs, window=0)
    pairs = {(name, label): one.pair for name, of in comparison.outcomes.items() for label, one in of.items() if one.pair}
    raw, corrected = (
        np.asarray(values, dtype=float) for values in zip(*((one.test.p, one.p_holm) for one in pairs.values()), strict=True)
    )
    assert len(raw) == comparison.tests == 12
    order = np.argsort(raw)
    expected = np.minimum(np.maximum.accumulate(raw[order] * np.arange(12, 0, -1)), 1)
    assert corrected[order] == pytest.approx(expected, rel=1e-12)
    for ranking in verdict(comparison).rankings:
        for one in ranking.standings:
            if one.word != "baseline":
                assert one.p_holm == pairs[ranking.outcome, one.label].p_holm


@pytest.mark.slow
def test_evaluations_that_share_their_prompts_by_seed_are_called_different_in_5_percent_of_comparisons():
    """An evaluation is 512 rollouts; how hard a seed's prompts are is common to its modes, and pairing takes it out."""
    rng = np.random.default_rng(8)
    called = []
    for _ in range(300):
        runs = [trained(mode, seed, rng) for mode in ("a", "b") for seed in range(4)]
        hard = rng.normal(0.8, 0.05, 4)
        chance = {one.directory: np.clip(hard[one.seed] + rng.normal(0, 0.01), 0, 1) for one in runs}
        ends = {"fresh/accuracy": {at: rng.binomial(512, chance[at]) / 512 for at in chance}}
        comparison = compare(runs, ends=ends)
        assert verdict(comparison).rankings[0].outcome == "accuracy_on_fresh_prompts"
        pair = comparison.outcomes["accuracy_on_fresh_prompts"]["b"].pair
        called.append(pair is not None and pair.test.p is not None and pair.test.p < 0.05)
    assert abs(np.mean(called) - 0.05) < 3.5 * math.sqrt(0.05 * 0.95 / 300)


@pytest.mark.slow
def test_three_null_modes_beside_the_baseline_give_a_false_positive_in_at_most_5_percent():
    rng = np.random.default_rng(6)
    shown = []
    for _ in range(150):
        runs = [trained(mode, seed, rng) for mode in "abcd" for seed in range(4)]
        shown.append(any(effect.shown for effect in effects_of(compare(runs))))
    assert np.mean(shown) < 0.05 + 3.5 * math.sqrt(0.05 * 0.95 / 150)


def test_a_planted_gain_is_found_and_named():
    rng = np.random.default_rng(1)
    runs = [trained(mode, seed, rng, gain) for mode, gain in (("a", 0), ("b", 0.15)) for seed in range(6)]
    found = verdict(compare(labelled(runs)))
    assert all(ranking.standings[0].label == "b" and ranking.standings[0].word == "higher" for ranking in found.rankings)
