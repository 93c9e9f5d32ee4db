"""The verdict: by accuracy at equal steps and equal tokens, never by pg_loss, and calibrated on synthetic curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from aggcli.analysis.histories import MEASURES, History
from aggcli.analysis.outcomes import Comparison, compare, mean_between, tokens_to_reach
from aggcli.analysis.settings import labelled
from aggcli.analysis.verdict import verdict
from aggcli.errors import SettingError


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
    assert "a: 1 of 2 runs count no tokens behind a missing step" in found.notes


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
    assert "one seed: no interval and no test, so no difference can be shown; give more seeds" in found.notes
    said = verdict(found)
    assert not said.rankings[0].shown
    assert "no difference in accuracy is shown for b (-0.7; one seed, so no interval)" in said.sentence


def test_the_sentence_names_size_interval_seeds_and_p():
    runs = [run("a", s, [0.1, 0.5 + s / 100]) for s in range(3)] + [run("b", s, [0.1, 0.6 + s * s / 100]) for s in range(3)]
    shown = "accuracy is higher under b (+0.107 [+0.078, +0.135], 3 seeds, p = 0.0039)"  # 0.1, 0.1, 0.12: t = 16
    assert verdict(compare(runs, window=0)).sentence == (
        f"At equal steps (at step 1), against a: {shown}; at equal tokens (at 10), against a: {shown}."
    )


def test_modes_without_a_common_seed_are_not_paired():
    found = compare([run("a", 0, [0.1, 0.5]), run("b", 1, [0.1, 0.9])])
    assert "b and a have no seed in common, so they are not paired" in found.notes
    assert "b cannot be paired" in verdict(found).sentence


def test_without_accuracy_or_reward_there_is_no_verdict():
    blank = run("a", 0, [math.nan, math.nan])
    assert verdict(compare([blank])).sentence.startswith("No verdict: neither accuracy nor reward was recorded")
    alone = verdict(compare([run("a", 0, [0.5, 0.6])]))
    assert alone.sentence == "No verdict: a is the only mode here; there is nothing to compare it with."


def test_an_unknown_baseline_is_refused_and_named():
    with pytest.raises(SettingError, match="--baseline sampl_mean: is not among the compared runs; did you mean 'sample_mean'"):
        compare([run("sample_mean", 0, [0.5])], "sampl_mean")


# -- calibration on synthetic curves ----------------------------------------------------------------------------------


def trained(mode: str, seed: int, rng: np.random.Generator, gain: float = 0.0) -> History:
    """A learning curve from 0.3 to 0.8 with a level of its own and the noise of 128 rollouts a step; lengths differ too."""
    chance = 0.3 + (0.5 + gain) * np.linspace(0, 1, 40) ** 0.5 + rng.normal(0, 0.02)
    return run(mode, seed, rng.binomial(128, np.clip(chance, 0, 1)) / 128, per_step=float(rng.normal(1000, 30)))


@pytest.mark.parametrize("n", [3, 5, 10])
def test_runs_that_differ_only_in_seed_are_called_different_in_5_percent_of_comparisons(n: int):
    """300 comparisons at equal steps and as many at equal tokens: 5 % within 3.5 binomial standard errors (1.26 %).

    The interval of the difference covers 0 in all the others."""
    rng = np.random.default_rng([n, 99])
    called = []
    for _ in range(300):
        runs = [trained(mode, seed, rng) for mode in ("a", "b") for seed in range(n)]
        rankings = verdict(compare(runs)).rankings
        called.append([ranking.shown for ranking in rankings])
        for ranking in rankings:
            (other,) = (one for one in ranking.standings if one.label == "b")
            assert other.difference is not None
            assert other.difference.low is not None
            assert other.difference.high is not None
            assert ranking.shown == (not other.difference.low <= 0 <= other.difference.high)
    shares = np.mean(called, axis=0)
    assert (np.abs(shares - 0.05) < 3.5 * math.sqrt(0.05 * 0.95 / 300)).all(), shares


def test_three_null_modes_beside_the_baseline_give_a_false_positive_in_at_most_5_percent():
    rng = np.random.default_rng(6)
    shown = []
    for _ in range(150):
        runs = [trained(mode, seed, rng) for mode in "abcd" for seed in range(4)]
        shown.append(verdict(compare(runs)).rankings[0].shown)
    assert np.mean(shown) < 0.05 + 3.5 * math.sqrt(0.05 * 0.95 / 150)


def test_a_planted_gain_is_found_and_named():
    rng = np.random.default_rng(1)
    runs = [trained(mode, seed, rng, gain) for mode, gain in (("a", 0), ("b", 0.15)) for seed in range(6)]
    found = verdict(compare(labelled(runs)))
    assert all(ranking.standings[0].label == "b" and ranking.standings[0].word == "higher" for ranking in found.rankings)
