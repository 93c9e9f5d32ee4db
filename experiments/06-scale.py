"""What part of the difference that two modes make under SGD is gone when their first updates are matched in size?

    python experiments/06-scale.py results/06-scale        seconds; the command in 06-scale-sgd.toml makes the runs it reads

Reads the three arms sgd, sgd-matched and adamw, and prints for every pair of modes and three figures the difference in each arm
(95 % Student-t intervals, paired by seed; p corrected by Holm over the six pairs of a figure and arm), and the share that
matching removes, 1 - matched / unmatched: 1 where nothing is left, above 1 where the sign turns. The share is a ratio of two
means over the same seeds; its interval is Fieller's (1954), exact for normal differences. None is given where the unmatched
difference is not shown to be other than 0 (p >= 0.05). A last table shows how large the updates were, over all steps too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggcli.analysis.comparison import compare
from aggcli.analysis.histories import Floats, History, read_histories
from aggcli.analysis.statistics import Interval, holm, paired_test, student_t
from aggcli.records import METRICS, read_lines, read_manifest

ARMS, SEEDS = ("sgd", "sgd-matched", "adamw"), 8
REACH = 0.75
"""Accuracy that every run of the pilot reached within 60 steps, also the slowest mode's under SGD."""


@dataclass(frozen=True)
class Asked:
    """A figure of `compare`, over the last `window` of a run, and how its numbers are printed."""

    title: str
    figure: str
    window: float
    form: str


ASKED = (
    Asked("mean accuracy over all steps (area under the learning curve)", "accuracy", 1.0, "+.4f"),
    Asked("accuracy at the end (last tenth of the steps)", "accuracy", 0.1, "+.4f"),
    Asked(f"tokens to an accuracy of {REACH:g}", "tokens_to_accuracy", 0.1, "+.0f"),
)


@dataclass(frozen=True)
class Difference:
    """`mode` minus `other`: by seed, its mean with the interval, and p (before or after Holm)."""

    by_seed: dict[int, float]
    interval: Interval
    p: float | None


def differences(runs: Sequence[History], asked: Asked) -> dict[tuple[str, str], Difference]:
    """Every pair of modes, (mode, other), in the order of the runs; p corrected over them."""
    found = {}
    labelled = [dataclasses.replace(run, label=run.mode) for run in runs]
    for other, mode in itertools.combinations(dict.fromkeys(run.mode for run in runs), 2):
        both = [run for run in labelled if run.mode in (mode, other)]
        outcomes = compare(both, other, window=asked.window, reach=REACH).outcomes[asked.figure]
        mine, theirs = outcomes[mode].values, outcomes[other].values
        test = paired_test(mine, theirs)
        assert test is not None
        by_seed = {seed: mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())}
        found[mode, other] = Difference(by_seed, test.difference, test.p)
    corrected = holm([one.p for one in found.values()])
    return {pair: dataclasses.replace(one, p=p) for (pair, one), p in zip(found.items(), corrected, strict=True)}


def share_gone(unmatched: Difference, matched: Difference) -> Interval | None:
    """1 - mean(matched) / mean(unmatched) over the seeds of both, with Fieller's interval; None where it is unbounded.

    The ratios r that it holds are those at which a paired t-test does not refuse mean(matched - r * unmatched) = 0: the r
    between the roots of a r^2 - 2 b r + c, where a > 0 says that the unmatched mean itself is refused as 0.
    """
    seeds = sorted(unmatched.by_seed.keys() & matched.by_seed.keys())
    x, y = (np.array([one.by_seed[seed] for seed in seeds]) for one in (unmatched, matched))
    n = len(seeds)
    covariance = np.cov(x, y) * student_t(n - 1) ** 2 / n
    a = x.mean() ** 2 - covariance[0, 0]
    b = x.mean() * y.mean() - covariance[0, 1]
    c = y.mean() ** 2 - covariance[1, 1]
    if a <= 0:
        return None
    root = math.sqrt(max(b * b - a * c, 0.0))
    return Interval(1 - float(y.mean() / x.mean()), 1 - float(b + root) / a, 1 - float(b - root) / a, n)


def shown(found: Interval, form: str) -> str:
    """`mean [low, high]`."""
    bounds = "" if found.low is None or found.high is None else f" [{found.low:{form}}, {found.high:{form}}]"
    return f"{found.mean:{form}}{bounds}"


def cell(found: Difference, form: str) -> str:
    """A difference, its p, and its seeds where it has not all of them."""
    p = "" if found.p is None else f"; p {'< 0.0001' if found.p < 1e-4 else f'= {found.p:.2g}'}"
    seeds = "" if found.interval.n == SEEDS else f"; {found.interval.n} seeds"
    return f"{shown(found.interval, form)}{p}{seeds}"


def report(arms: dict[str, list[History]]) -> Iterator[str]:
    """Markdown: a table for each figure."""
    for asked in ASKED:
        found = {arm: differences(runs, asked) for arm, runs in arms.items()}
        yield f"{asked.title}\n"
        yield "| difference | SGD | SGD, first update matched | AdamW | share of SGD's that matching removes |"
        yield "|---|---:|---:|---:|---:|"
        for pair, unmatched in found["sgd"].items():
            is_there = unmatched.p is not None and unmatched.p < 0.05
            gone = share_gone(unmatched, found["sgd-matched"][pair]) if is_there else None
            cells = [cell(found[arm][pair], asked.form) for arm in ARMS]
            share = "no difference shown to begin with" if gone is None else shown(gone, ".3f")
            yield f"| {pair[0]} - {pair[1]} | {' | '.join(cells)} | {share} |"
        yield ""
    yield "Size of an SGD update (learning rate x gradient norm) over sample_mean's of the same seed, mean of the seeds\n"
    yield "| mode | lr, matched over unmatched | SGD: first update | SGD: all | matched: first update | matched: all |"
    yield "|---|---:|---:|---:|---:|---:|"
    sizes = [updates(arms[arm]) for arm in ("sgd", "sgd-matched")]
    for mode, factors in rates(arms["sgd-matched"]).items():
        cells = [f"{np.mean(factors):.3g} ({min(factors):.3g} to {max(factors):.3g})"]
        for size_by_mode in sizes:
            size_SE, baseline_SE = size_by_mode[mode], size_by_mode["sample_mean"]
            cells += [
                f"{(size_SE[:, 0] / baseline_SE[:, 0]).mean():.3g}",
                f"{(size_SE.mean(1) / baseline_SE.mean(1)).mean():.3g}",
            ]
        yield f"| {mode} | {' | '.join(cells)} |"


def rates(runs: Sequence[History]) -> dict[str, list[float]]:
    """Mode -> its learning rate over the one that was asked for, seed by seed."""
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.mode, []).append(read_manifest(run.directory)["lr_factor"])
    return found


def updates(runs: Sequence[History]) -> dict[str, Floats]:
    """Mode -> size of every update [S seeds, E steps]: the 2-norm of the change, lr times the gradient's without clipping."""
    found: dict[str, list[list[float]]] = {}
    for run in runs:
        lr = read_manifest(run.directory)["lr"]
        found.setdefault(run.mode, []).append([lr * line["grad_norm"] for line in read_lines(run.directory / METRICS)])
    return {mode: np.array(sizes) for mode, sizes in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for line in report({arm: read_histories([folder / arm])[0] for arm in ARMS}):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
