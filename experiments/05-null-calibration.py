"""Does `compare DIR` hold its error rates? Real runs that differ in nothing but their seed, compared as if they were two modes.

    OMP_NUM_THREADS=1 python experiments/05-null-calibration.py        ten minutes on one core

Trains 4,000 runs of token_mean (10 steps of 8 prompts x 4 rollouts, response limit 16, AdamW at 1e-3: accuracy rises from 0.44
to 0.85), records them as training does and reads them back as `aggcli compare DIR` does. Every comparison takes 2n runs that no
other comparison of that n has, labels n of them A (the baseline) and n of them B, and pairs them by position. So within one n
the comparisons are independent and the binomial law holds for their counts; from one n to another the runs are the same, and
the figures of a run are related. There is no difference to find, so:

- p < 0.05 in 5 % of comparisons, and the interval of the paired difference covers 0 in the others;
- the sign-flip test below 0.05 in at most 5 %, where its floor of 2/2^n permits that at all;
- the interval of one arm's mean covers the mean of the law, for which the mean of all runs stands, in 95 %. That mean is known
  to sd/sqrt(runs) and holds the arm itself, so the arm's distance to it has the variance 1 - n/runs times the true one: at
  n = 10 of 4,000 runs a coverage of 95 % appears 0.02 points too high. Left out for figures that depend on the other arm.

The p-values are those of one pair, where Holm corrects nothing. Comparisons with a difference in accuracy at equal steps or at
equal tokens are counted too, and the verdicts that say so: a verdict makes both rankings and corrects them together. A further
table lines up four arms, so that Holm corrects three pairs a figure.

A figure of one step's 32 rollouts (the default window of a run of 10 steps) is coarse, and some are skewed: Student's t is not
exact for them. What it gives when values are drawn from the 4,000 by numpy alone stands in the last table, a second route to
the first one's rates; and the tables are made again for a window of half a run (160 rollouts; a usual run of 60 steps has 768).
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
from aggcli.analysis.histories import History, read_histories
from aggcli.analysis.outcomes import OUTCOMES, WINDOW
from aggcli.analysis.training_answer import verdict

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
OF_ONE_ARM = ("accuracy", "response_length", "correct/response_length", "incorrect/response_length", "entropy_loss", "tokens")
"""Figures whose value for a run does not depend on the runs it is compared with, once all have recorded the same steps."""


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
                    RunWriter(folder / run.name, {"kind": "run", "mode": run.mode, "seed": run.seed, **shared})
                )
                for run in stack
            }
            trainer = grid.trainer_of(setup, stack, ALONE)
            for done in trainer.steps():
                for number, reports in done.optimizer_steps:
                    for report in reports:
                        head = {"step": number, "rollout_step": done.step, "mode": report.run.mode, "seed": report.run.seed}
                        writers[report.run.name].step({**head, **report.values}, [])
            ends = grid.evaluate(setup, trainer.weights.parameters, [run.seed for run in stack])
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
    return [compare(runs, labels[0], window=window) for runs in arms(pool, n, labels)]


def values_of_all(pool: Sequence[History], window: float = WINDOW) -> dict[str, list[float]]:
    """Figure of one arm -> its value in every run of the pool that has one."""
    found = compare([dataclasses.replace(run, label="all") for run in pool], window=window).outcomes
    return {name: list(found[name]["all"].values.values()) for name in OF_ONE_ARM}


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
    """Differences called so at 5 %."""
    p = [pair.p_holm for pair in pairs(found, figure)]
    return Count(sum(one is not None and one < LEVEL for one in p), len(p), LEVEL)


def flips(found: Sequence[Comparison], figure: str, n: int) -> Count | None:
    """The same by the sign-flip test, whose p-values are multiples of its floor; None where the floor is above 5 %."""
    floor = 2 / 2**n
    p = [None if pair.test.sign_flip is None else pair.test.sign_flip.p for pair in pairs(found, figure)]
    reachable = floor * int((LEVEL - 1e-9) / floor)
    return Count(sum(one is not None and one < LEVEL for one in p), len(p), reachable) if reachable else None


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


def any_called(found: Sequence[Comparison], figures: Sequence[str]) -> Count:
    """Comparisons in which any pair of these figures is below 5 %, each figure corrected by Holm for itself."""
    called = 0
    for one in found:
        outcomes = [outcome for figure in figures for outcome in one.outcomes.get(figure, {}).values()]
        p = [outcome.pair.p_holm for outcome in outcomes if outcome.pair is not None]
        called += any(value is not None and value < LEVEL for value in p)
    return Count(called, len(found), LEVEL)


def said(found: Sequence[Comparison]) -> Count:
    """Comparisons whose verdict says that a mode is ahead or behind, at equal steps or at equal tokens."""
    return Count(sum(any(ranking.shown for ranking in verdict(one).rankings) for one in found), len(found), LEVEL)


@dataclass(frozen=True)
class Drawn:
    """Shares of `DRAWS` trials, when the values of an arm are drawn from the pool: what Student's t gives for this law."""

    called: float
    covered: float
    without_width: float


def drawn(values: Sequence[float], n: int) -> Drawn:
    """Two arms of `n` values each, with replacement, by numpy alone."""
    pool, rng = np.asarray(values), np.random.default_rng(n)
    a, b = rng.choice(pool, (DRAWS, n)), rng.choice(pool, (DRAWS, n))
    reach, root = stats.t.ppf(1 - LEVEL / 2, n - 1), np.sqrt(n)
    error = a.std(1, ddof=1) / root
    equal = np.ptp(a, 1) == 0
    covered = np.where(equal, False, np.abs(a.mean(1) - pool.mean()) <= reach * error)
    called = (np.ptp(a - b, 1) > 1e-12) & (np.abs((a - b).mean(1)) > reach * (a - b).std(1, ddof=1) / root)
    return Drawn(float(called.mean()), float(covered.mean()), float(equal.mean()))


# -- what is printed ------------------------------------------------------------------------------------------------

HEAD = f"{'figure':47}{'n':>3}{'compared':>9}  {'p < 0.05':18}{'sign-flip':18}{'holds 0':20}mean holds truth"


def report(pool: Sequence[History]) -> Iterator[str]:
    """The tables, in words and lines."""
    yield "In percent, in brackets the band that a right tool stays within in 95 of 100 tables (binomial); ! is outside of it."
    for window in (WINDOW, 0.5):
        yield f"\nWindow: the last {window:g} of a run\n\n{HEAD}"
        truth = {name: float(np.mean(values)) for name, values in values_of_all(pool, window).items()}
        for n in SIZES:
            yield from rows(compared(pool, n, window=window), n, truth)
    yield "\nFour arms, three pairs a figure, corrected by Holm: comparisons with any pair below 0.05, at most 5 %\n"
    for n in SIZES:
        found = compared(pool, n, "ABCD")
        called = ", ".join(f"{OUTCOMES[name].head} {any_called(found, [name])}" for name in ("accuracy", "response_length"))
        yield f"n = {n:2}, {len(found)} comparisons: {called}"
    yield f"\nStudent's t on values drawn from the {len(pool)} (window {WINDOW:g}, {DRAWS} trials), in percent\n"
    yield f"{'figure':47}{'n':>3}{'p < 0.05':>10}{'mean holds truth':>18}{'all n values equal':>20}{'skewness':>10}"
    for name, values in values_of_all(pool).items():
        for n in SIZES:
            one = drawn(values, n)
            shares = f"{100 * one.called:>10.1f}{100 * one.covered:>18.1f}{100 * one.without_width:>20.1f}"
            yield f"{OUTCOMES[name].head:47}{n:>3}{shares}{stats.skew(values):>10.2f}"


def rows(found: Sequence[Comparison], n: int, truth: Mapping[str, float]) -> Iterator[str]:
    """A line for every figure of the comparisons of one n, and one for the verdict."""
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
        yield f"{figure.head:47}{n:>3}{len(pairs(found, name)):>9}  {''.join(cells)}".rstrip()
    both = ("accuracy", "accuracy_at_equal_tokens")
    yield f"{'either of the two accuracies, each for itself':47}{n:>3}{len(found):>9}  {any_called(found, both)}"
    yield f"{'the verdict, which corrects both together':47}{n:>3}{len(found):>9}  {said(found)}"
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
