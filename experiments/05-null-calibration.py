"""Does `compare DIR` hold its error rates? Real runs that differ in nothing but their seed, compared as if they were two modes.

    OMP_NUM_THREADS=1 python experiments/05-null-calibration.py        a quarter of an hour on one free core

Trains 4,000 runs of token_mean (10 steps of 8 prompts x 4 rollouts, response limit 16, AdamW at 1e-3: accuracy rises from 0.44
to 0.85), evaluates each on 512 fresh prompts, records them as training does and reads them back as `aggcli compare DIR` does.
Every comparison takes 2n runs that no other comparison of that n has, labels n of them A (the baseline) and n of them B, and
pairs them by position. So within one n the comparisons are independent and the binomial law holds for their counts; from one n
to another the runs are the same, and the figures of a run are related. There is no difference to find, so:

- p < 0.05 in 5 % of comparisons, before any correction, and the interval of the paired difference covers 0 in the others;
- the sign-flip test below 0.05 in at most 5 %, where its floor of 2/2^n permits that at all;
- the interval of one arm's mean covers the mean of the law, for which the mean of all runs stands, in 95 %. That mean is known
  to sd/sqrt(runs) and holds the arm itself, so the arm's distance to it has the variance 1 - n/runs times the true one: at
  n = 10 of 4,000 runs a coverage of 95 % appears 0.02 points too high. Left out for figures that depend on the other arm;
- an answer says a difference, in any outcome of any mode, in 5 % at most, since Holm's correction is over all of them. It
  knows nothing of how the outcomes are related, so fewer than 5 % is right too; more is not.

Then a difference is planted: 500 comparisons, drawn from all runs, each moved by the smallest difference that it states for
itself at 80 % power. What the same comparison then shows must be 80 %.

A figure of one step's 32 rollouts (the default window of a run of 10 steps) is coarse, and some are skewed: Student's t is not
exact for them. What the intervals give when values are drawn from the runs by numpy alone stands in the last table, a second
route to the first one's rates with a hundred times its trials; and the tables are made again for a window of half a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from aggcli.analysis.comparison import Comparison, Pair, compare
from aggcli.analysis.effects import effects_of
from aggcli.analysis.evaluations import evaluations_of
from aggcli.analysis.histories import History, read_histories
from aggcli.analysis.outcomes import OUTCOMES, WINDOW
from aggcli.analysis.power import POWER, smallest_difference
from aggcli.analysis.statistics import SHARE

MODE, STACK = "token_mean", 50
SETTINGS: dict[str, Any] = {
    "modes": [MODE],
    "steps": 10,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "max_response_length": 16,
    "lr": 1e-3,
    "layout_records": False,
    "device": "cpu",
}
SIZES = (3, 5, 10)
LEVEL = 0.05
DRAWS = 100_000
REACH = 0.8
"""The accuracy of `tokens to accuracy`, so that it does not depend on the baseline."""
PLANTED = 500
PLANTED_IN = {
    "accuracy_on_fresh_prompts": "fresh/accuracy",
}
"""Outcome that a difference is planted in, and the number of an evaluation that it is."""
OF_ANOTHER_ARM = ("accuracy_at_equal_tokens", "raw_reward_at_equal_tokens")
"""Figures whose value for a run depends on the runs it is compared with, though all have recorded the same steps."""
Ends = Mapping[str, Mapping[Path, float]]


# -- the runs -------------------------------------------------------------------------------------------------------


def record(folder: Path, runs: int, settings: Mapping[str, Any], say: Any = lambda text: None) -> None:
    """Train `runs` runs, seeds 0, 1, ..., in stacks of `STACK`, and record them as one comparison."""
    from aggcli import grid
    from aggcli.config import settings_from, to_flat
    from aggcli.records import SCHEMA, environment, write_manifest
    from aggcli.rules import find_rule
    from aggcli.run_writer import RunWriter
    from aggcli.world import ALONE

    setup = grid.set_up(settings_from(settings))
    specs = grid.runs_of(setup.config, [find_rule(MODE)], range(runs), setup.response_limit)
    flat = {name: list(value) if isinstance(value, tuple) else value for name, value in to_flat(setup.config).items()}
    shared = {"settings": flat, "response_limit": setup.response_limit, "environment": environment("cpu", 1), "ranks": 1}
    names = [run.name for run in specs]
    write_manifest(folder, {"schema": SCHEMA, "kind": "comparison", "runs": names, **shared, "status": "done"})
    for at in range(0, runs, STACK):
        stack = specs[at : at + STACK]
        with ExitStack() as open_files:
            writers = {
                run.name: open_files.enter_context(
                    RunWriter(folder, run.name, {"kind": "run", "mode": run.mode, "seed": run.seed, **shared})
                )
                for run in stack
            }
            trainer = grid.trainer_of(setup, stack, ALONE)
            for done in trainer.steps():
                for reports in done.optimizer_steps:
                    for report in reports:
                        own = {
                            "step": report.step.step,
                            "rollout_step": done.step,
                            "mode": report.run.mode,
                            "seed": report.run.seed,
                        }
                        writers[report.run.name].step({**own, **report.values}, [])
            ends = grid.evaluate(setup, trainer.policy, [run.seed for run in stack])
            for run, found in zip(stack, ends, strict=True):
                writers[run.name].manifest["evaluation"] = dataclasses.asdict(found)
        say(f"{at + len(stack)} of {runs} runs")


# -- comparisons of them --------------------------------------------------------------------------------------------


def arms(pool: Sequence[History], n: int, labels: str) -> Iterator[list[History]]:
    """Comparisons of disjoint runs: `n` runs for each label, numbered by position, so that position is what pairs them."""
    size = n * len(labels)
    for start in range(0, len(pool) - size + 1, size):
        yield [
            dataclasses.replace(run, label=labels[at // n], seed=at % n) for at, run in enumerate(pool[start : start + size])
        ]


def compared(pool: Sequence[History], n: int, labels: str = "AB", window: float = WINDOW) -> list[Comparison]:
    """Every comparison that the pool affords."""
    ends, _ = evaluations_of(pool)
    return [compare(runs, labels[0], window=window, reach=REACH, ends=ends) for runs in arms(pool, n, labels)]


def values_of_all(pool: Sequence[History], window: float = WINDOW) -> dict[str, list[float]]:
    """Figure of one arm -> its value in every run of the pool that has one."""
    ends, _ = evaluations_of(pool)
    numbered = [dataclasses.replace(run, label="all", seed=at) for at, run in enumerate(pool)]
    found = compare(numbered, window=window, reach=REACH, ends=ends).outcomes
    return {name: list(of_arm["all"].values.values()) for name, of_arm in found.items() if name not in OF_ANOTHER_ARM}


def pairs(found: Sequence[Comparison], figure: str) -> list[Pair]:
    """B against A in every comparison that has this figure for both."""
    outcomes = [one.outcomes[figure]["B"] for one in found if "B" in one.outcomes.get(figure, {})]
    return [outcome.pair for outcome in outcomes if outcome.pair is not None]


@dataclass(frozen=True)
class Count:
    """`hits` of `trials`, against the chance that each has if the tool is right."""

    hits: int
    trials: int
    chance: float

    def band(self, confidence: float = 0.95) -> tuple[int, int]:
        """The hits that a right tool stays within: at most (1 - confidence)/2 of the binomial law lies on either side."""
        low, high = stats.binom.interval(confidence, self.trials, self.chance)
        return int(low), int(high)

    def __str__(self) -> str:
        low, high = (100 * bound / self.trials for bound in self.band())
        outside = "" if self.band()[0] <= self.hits <= self.band()[1] else " !"
        return f"{100 * self.hits / self.trials:.1f} ({low:.1f}-{high:.1f}){outside}"


def false_positives(found: Sequence[Comparison], figure: str) -> Count:
    """Differences with p below 5 %, each tested by itself."""
    p = [pair.test.p for pair in pairs(found, figure) if pair.test.p is not None]
    return Count(sum(one < LEVEL for one in p), len(p), LEVEL)


def flips(found: Sequence[Comparison], figure: str, n: int) -> Count | None:
    """The same by the sign-flip test, whose p-values are multiples of its floor; None where the floor is above 5 %."""
    floor = 2 / 2**n
    p = [pair.test.sign_flip.p for pair in pairs(found, figure) if pair.test.sign_flip is not None]
    reachable = floor * int((LEVEL - 1e-9) / floor)
    return Count(sum(one < LEVEL for one in p), len(p), reachable) if reachable else None


def coverage_of_zero(found: Sequence[Comparison], figure: str) -> Count:
    """Intervals of the paired difference that hold 0; a difference without an interval (equal in all seeds) is not counted."""
    bounds = [(pair.test.difference.low, pair.test.difference.high) for pair in pairs(found, figure)]
    held = [low <= 0 <= high for low, high in bounds if low is not None and high is not None]
    return Count(sum(held), len(held), 1 - LEVEL)


def coverage_of_the_mean(found: Sequence[Comparison], figure: str, truth: float) -> Count:
    """Intervals of one arm's mean that hold `truth`, both arms of every comparison."""
    outcomes = [outcome for one in found for outcome in one.outcomes.get(figure, {}).values()]
    held = [one.low <= truth <= one.high for one in outcomes if one.low is not None and one.high is not None]
    return Count(sum(held), len(held), 1 - LEVEL)


def said(found: Sequence[Comparison]) -> Count:
    """Comparisons whose answer says a difference, whatever the outcome."""
    return Count(sum(any(one.shown for one in effects_of(comparison)) for comparison in found), len(found), LEVEL)


def each_for_itself(found: Sequence[Comparison]) -> Count:
    """What `said` would be if nothing were corrected."""
    p = [[one.test.p for one in effects_of(comparison)] for comparison in found]
    return Count(sum(any(one is not None and one < LEVEL for one in own) for own in p), len(found), LEVEL)


# -- planted differences ----------------------------------------------------------------------------------------------


def planted(pool: Sequence[History], n: int, outcome: str, trials: int = PLANTED) -> Count:
    """Comparisons of `n` runs against `n` others, drawn from the pool, that show a difference of the size that each states."""
    measure, rng, hits, made = PLANTED_IN[outcome], np.random.default_rng([n, *map(ord, outcome)]), 0, 0
    ends, _ = evaluations_of(pool)
    for _ in range(trials):
        chosen = rng.choice(len(pool), 2 * n, replace=False)
        (runs,) = arms([pool[at] for at in chosen], n, "AB")
        pair = compare(runs, "A", reach=REACH, ends=ends).outcomes[outcome]["B"].pair
        if pair is None or pair.level is None or not pair.test.std:
            continue  # nothing is stated
        size = smallest_difference(pair.test.std, pair.test.difference.n, pair.level)
        moved = {run.directory: ends[measure][run.directory] + size for run in runs if run.label == "B"}
        again = compare(runs, "A", reach=REACH, ends={**ends, measure: {**ends[measure], **moved}})
        after = again.outcomes[outcome]["B"].pair
        hits, made = hits + (after is not None and after.shown), made + 1
    return Count(hits, made, POWER)


# -- by numpy alone -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Shares of `DRAWS` trials, when the values of an arm are drawn from the pool. `covered` and `student`: of the arms whose
    values are not all equal, those whose interval, and whose plain Student interval, holds the mean of the pool.
    """

    called: float
    covered: float
    student: float
    without_width: float


def drawn(figure: str, values: Sequence[float], n: int) -> Drawn:
    """Two arms of `n` values each, with replacement, by numpy alone."""
    pool, rng = np.asarray(values), np.random.default_rng(n)
    a, b = rng.choice(pool, (DRAWS, n)), rng.choice(pool, (DRAWS, n))
    reach, root = stats.t.ppf(1 - LEVEL / 2, n - 1), np.sqrt(n)
    known = np.ptp(a, 1) > 0
    mean, error = a.mean(1)[known], a.std(1, ddof=1)[known] / root
    student = np.abs(mean - pool.mean()) <= reach * error
    low, high = by_hand(figure, mean, error, n)
    covered = (low <= pool.mean()) & (pool.mean() <= high)
    called = (np.ptp(a - b, 1) > 1e-12) & (np.abs((a - b).mean(1)) > reach * (a - b).std(1, ddof=1) / root)
    return Drawn(float(called.mean()), float(covered.mean()), float(student.mean()), float((~known).mean()))


def by_hand(figure: str, mean: Any, error: Any, n: int) -> tuple[Any, Any]:
    """The interval of a figure, of means and their standard errors: logit for shares, log for the rest, longer where skewed."""
    outcome, reach = OUTCOMES[figure], stats.t.ppf(1 - LEVEL / 2, n - 1)
    if outcome.bounds == SHARE:
        centre, step = np.log(mean / (1 - mean)), reach * error / (mean * (1 - mean))
        return 1 / (1 + np.exp(step - centre)), 1 / (1 + np.exp(-step - centre))
    up = stats.t.ppf(outcome.up_to, n - 1)
    return mean * np.exp(-reach * error / mean), mean * np.exp(up * error / mean)


# -- what is printed ------------------------------------------------------------------------------------------------

HEAD = f"{'figure':49}{'n':>3}{'compared':>9}  {'p < 0.05':18}{'sign-flip':18}{'holds 0':20}mean holds truth"


def report(pool: Sequence[History], planted_trials: int = PLANTED) -> Iterator[str]:
    """The tables, in words and lines."""
    yield "In percent, in brackets the band that a right tool stays within in 95 of 100 tables (binomial); ! is outside of it."
    for window in (WINDOW, 0.5):
        yield f"\nWindow: the last {window:g} of a run\n\n{HEAD}"
        truth = {name: float(np.mean(values)) for name, values in values_of_all(pool, window).items()}
        for n in SIZES:
            yield from rows(compared(pool, n, window=window), n, truth)
    yield "\nFour arms, three pairs an outcome, all corrected together: answers that say any difference, at most 5 %\n"
    for n in SIZES:
        found = compared(pool, n, "ABCD")
        yield f"n = {n:2}, {len(found)} comparisons of {found[0].tests} tests: {said(found)}"
    yield "\nA difference planted at the size that each comparison states at 80 % power, shown in 80 %\n"
    for name in PLANTED_IN:
        for n in SIZES:
            yield f"{OUTCOMES[name].head:49}{n:>3}  {planted(pool, n, name, planted_trials)}"
    yield f"\nIntervals of values drawn from the {len(pool)} (window {WINDOW:g}, {DRAWS} trials), in percent\n"
    heads = f"{'mean holds truth':>18}{'Student alone':>15}{'all n values equal':>20}{'skewness':>10}"
    yield f"{'figure':49}{'n':>3}{'p < 0.05':>10}{heads}"
    for name, values in values_of_all(pool).items():
        for n in SIZES:
            one = drawn(name, values, n)
            shares = (
                f"{100 * one.called:>10.1f}{100 * one.covered:>18.1f}{100 * one.student:>15.1f}{100 * one.without_width:>20.1f}"
            )
            yield f"{OUTCOMES[name].head:49}{n:>3}{shares}{stats.skew(values):>10.2f}"


def rows(found: Sequence[Comparison], n: int, truth: Mapping[str, float]) -> Iterator[str]:
    """A line for every figure of the comparisons of one n, and two for their answers."""
    for name, figure in OUTCOMES.items():
        if not pairs(found, name):
            continue
        flip = flips(found, name, n)
        cells = [
            f"{false_positives(found, name)!s:18}",
            f"{str(flip) if flip else f'floor {2 / 2**n:.3g}':18}",
            f"{coverage_of_zero(found, name)!s:20}",
            str(coverage_of_the_mean(found, name, truth[name])) if name in truth else "",
        ]
        yield f"{figure.head:49}{n:>3}{len(pairs(found, name)):>9}  {''.join(cells)}".rstrip()
    yield f"{'any outcome, each for itself':49}{n:>3}{len(found):>9}  {each_for_itself(found)}"
    yield f"{'the answer, which corrects all together':49}{n:>3}{len(found):>9}  {said(found)}"
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--folder", type=Path, help="Where the runs are recorded, and kept; one that exists is used as it is.")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="null-calibration-") as own:
        folder = given.folder or Path(own)
        if not (folder / "manifest.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            record(folder, given.runs, SETTINGS, lambda text: print(text, file=sys.stderr))
        trained = time.perf_counter()
        pool, _ = read_histories([folder])
    accuracy = [sum(run.measures["accuracy"][at] for run in pool) / len(pool) for at in (0, -1)]
    print(f"{len(pool)} runs of {MODE}: accuracy {accuracy[0]:.3f} in the first step, {accuracy[1]:.3f} in the last\n")
    for line in report(pool):
        print(line)
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes, {(trained - began) / 60:.1f} of them training", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
