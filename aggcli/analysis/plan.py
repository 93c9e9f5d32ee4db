"""How many seeds show a difference of a given size, from the spread of the paired differences that a comparison found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aggcli.analysis.comparison import Comparison
from aggcli.analysis.power import MOST_SEEDS, POWER, seeds_needed
from aggcli.analysis.statistics import ALPHA
from aggcli.errors import SettingError, nearest
from aggcli.measurement.words import number, plural


@dataclass(frozen=True)
class PlannedPair:
    """A mode against the baseline. `std`: of the paired differences of its `n` seeds, with n-1, None where they have no spread
    to plan by; `seeds`: that the difference takes at Holm's first step over as many tests as here; `seeds_alone`: as the only
    test, at 5 %. Both None beyond `power.MOST_SEEDS`, and without a spread.
    """

    mode: str
    n: int
    std: float | None
    seeds: int | None
    seeds_alone: int | None


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

    @property
    def heading(self) -> str:
        """What is planned."""
        unit = "" if self.unit in ("", "share") else f" {self.unit}"
        return (
            f"seeds that show a difference of {number(self.difference, 3)}{unit} in {self.head} with {100 * POWER:g} % power,"
            " if the spread of the differences is what it was here"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """`b: 14 seeds among 26 tests, 9 as the only one (differences spread by 0.0083 over 3 seeds)`."""
        return tuple(self._line(one) for one in self.pairs)

    def _line(self, one: PlannedPair) -> str:
        if one.std is None:
            return f"{one.mode}: not known, its differences have no spread over {plural(one.n, 'seed')}"
        among = _seeds(one.seeds)
        if self.tests > 1:
            among += f" among {self.tests} tests corrected by Holm, {_seeds(one.seeds_alone)} as the only test"
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
            std = one.pair.test.std
            seeds = (None, None) if not std else (seeds_needed(difference, std, at) for at in (level, ALPHA))
            found.append(PlannedPair(label, one.pair.test.difference.n, std or None, *seeds))
    if not found:
        raise SettingError(f"--plan: no mode is paired with {comparison.baseline} in {outcome}, so nothing tells the spread")
    unit = comparison.defined[outcome].unit
    return Plan(outcome, comparison.named(outcome), unit, difference, comparison.tests, level, tuple(found))


def _seeds(count: int | None) -> str:
    return f"more than {MOST_SEEDS} seeds" if count is None else plural(count, "seed")
