"""How many seeds show a difference of a given size, from the spread that a comparison found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aggcli.analysis.comparison import Comparison
from aggcli.analysis.power import MOST_SEEDS, POWER, runs_needed, seeds_needed
from aggcli.analysis.statistics import ALPHA, DifferenceTest
from aggcli.errors import SettingError, nearest
from aggcli.measurement.words import number, plural


@dataclass(frozen=True)
class PlannedPair:
    """A mode against the baseline. `std`: of the paired differences of its `n` seeds, with n-1, None where they have no spread
    to plan by; `seeds`: that the difference takes at Holm's first step over as many tests as here; `seeds_alone`: as the only
    test, at 5 %. Both None beyond `power.MOST_SEEDS`, and without a spread.

    Where runs are not paired, `runs` and `variances` are those of `DifferenceTest`, and `seeds` counts runs of each arm.
    """

    mode: str
    n: int
    std: float | None
    seeds: int | None
    seeds_alone: int | None
    runs: tuple[int, int] | None = None
    variances: tuple[float, float] | None = None


@dataclass(frozen=True)
class Plan:
    """Seeds of each mode that show a true `difference` of `outcome`, in its unit, with 80 % power. `level`: 5 % over the tests
    of this comparison.
    """

    outcome: str
    head: str
    unit: str
    difference: float
    tests: int
    level: float
    pairs: tuple[PlannedPair, ...]
    baseline: str
    paired: bool = True

    @property
    def heading(self) -> str:
        """What is planned."""
        unit = "" if self.unit in ("", "share") else f" {self.unit}"
        what, of = ("seeds", "differences") if self.paired else ("runs of each arm", "runs")
        return (
            f"{what} that show a difference of {number(self.difference, 3)}{unit} in {self.head} with {100 * POWER:g} % power,"
            f" if the spread of the {of} is what it was here"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """`b: 14 seeds among 26 tests, 9 as the only one (differences spread by 0.0083 over 3 seeds)`."""
        return tuple(self._line(one) for one in self.pairs)

    def _count(self, count: int | None) -> str:
        each = "seed" if self.paired else "run"
        return f"more than {MOST_SEEDS} {each}s" if count is None else plural(count, each)

    def _line(self, one: PlannedPair) -> str:
        if one.std is None and one.runs is None:
            return f"{one.mode}: not known, its differences have no spread over {plural(one.n, 'seed')}"
        if one.std is None or (one.runs is not None and one.variances is None):
            return f"{one.mode}: not known, an arm has one run, or neither has a spread"
        among = self._count(one.seeds)
        if self.tests > 1:
            among += f" among {self.tests} tests corrected by Holm, {self._count(one.seeds_alone)} as the only test"
        if one.runs is not None and one.variances is not None:
            whose = ("its", f"{self.baseline}'s")
            of = (
                f"{own} {plural(n, 'run')} {number(math.sqrt(v), 3)}"
                for own, n, v in zip(whose, one.runs, one.variances, strict=True)
            )
            return f"{one.mode}: {among} (standard deviation over {', over '.join(of)})"
        return f"{one.mode}: {among} (standard deviation of its differences {number(one.std, 3)}, from {one.n} seeds)"


def plan_of(comparison: Comparison, difference: float, outcome: str) -> Plan:
    """Raises `SettingError` for an outcome that is not in the comparison, in which nothing is paired, or that cannot differ by
    as much."""
    if outcome not in comparison.outcomes:
        raise SettingError(f"--plan-outcome {outcome}: is not in the comparison{nearest(outcome, comparison.outcomes)}")
    most = max((one.pair.most for one in comparison.outcomes[outcome].values() if one.pair is not None), default=math.inf)
    if difference > most:
        raise SettingError(f"--plan {difference:g}: {comparison.named(outcome)} cannot differ by more than {most:g}")
    level = ALPHA / max(comparison.tests, 1)
    found = []
    for label, one in comparison.outcomes[outcome].items():
        if one.pair is not None:
            test = one.pair.test
            among, alone = (_needed(test, difference, at) for at in (level, ALPHA))
            about = (label, test.difference.n, test.std or None)
            found.append(PlannedPair(*about, among, alone, test.runs, test.variances))
    if not found:
        how = "paired" if comparison.paired else "compared"
        raise SettingError(
            f"--plan: no {comparison.arm} is {how} with {comparison.baseline} in {outcome}, so nothing tells the spread"
        )
    unit = comparison.defined[outcome].unit
    about = (outcome, comparison.named(outcome), unit, difference, comparison.tests, level)
    return Plan(*about, tuple(found), comparison.baseline, comparison.paired)


def _needed(test: DifferenceTest, difference: float, level: float) -> int | None:
    if not test.std:
        return None
    if test.variances is not None:
        return runs_needed(difference, test.variances, level)
    return seeds_needed(difference, test.std, level)
