"""The differences of a comparison, one a mode and outcome, the largest first.

Outcomes have different units, so what is largest is told by the standardised difference: the mean paired difference over its
standard deviation over seeds (Cohen's d of paired differences, d_z); of runs that are not paired, over the root of the mean of
the two arms' variances. It says how far a difference stands out of what seeds
alone make, not how much it matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aggcli.analysis.comparison import Comparison
from aggcli.analysis.statistics import DifferenceTest, Interval, is_shown
from aggcli.measurement.words import number, signed

RATIO = "curve/exponent_ratio"
"""The one effect that is a quotient: of the exponents B of fitted curves."""


@dataclass(frozen=True)
class Effect:
    """What a mode (`label`) does to an outcome against the baseline. `head`: the outcome as the table names it; `difference`:
    the paired difference in `unit` with its 95 % interval, of B the quotient; `mean` and `baseline_mean`: the two that it is
    of, None of B; `p_holm`: corrected over all tests of the comparison.
    """

    label: str
    outcome: str
    head: str
    unit: str
    difference: Interval
    test: DifferenceTest
    p_holm: float | None
    mean: float | None = None
    baseline_mean: float | None = None

    @property
    def shown(self) -> bool:
        """Whether the difference is."""
        return is_shown(self.p_holm)

    @property
    def standardised(self) -> float:
        """The absolute difference over its standard deviation over seeds; infinite for one that is the same in all of them."""
        size = abs(self.test.difference.mean)
        return size / self.test.std if self.test.std else math.inf if size else 0.0

    @property
    def text(self) -> str:
        """`length of wrong responses +2.02 tokens [+1.57, +2.48] (8.51 against 6.49)`."""
        found, sign = self.difference, number if self.outcome == RATIO else signed
        unit = "" if self.unit in ("", "share") else f" {self.unit}"
        bounds = "" if found.low is None or found.high is None else f" [{sign(found.low, 3)}, {sign(found.high, 3)}]"
        means = ""
        if self.mean is not None and self.baseline_mean is not None:
            means = f" ({number(self.mean, 4)} against {number(self.baseline_mean, 4)})"
        return f"{self.head} {sign(found.mean, 3)}{unit}{bounds}{means}"


def effects_of(comparison: Comparison) -> list[Effect]:
    """Every paired difference of the comparison, the largest first."""
    found = []
    for name, of_arm in comparison.outcomes.items():
        unit = comparison.defined[name].unit
        for label, one in of_arm.items():
            if (pair := one.pair) is not None:
                about = (label, name, comparison.named(name), unit)
                found.append(Effect(*about, pair.test.difference, pair.test, pair.p_holm, pair.mean, pair.baseline_mean))
    for ratio in comparison.ratios:
        head = f"exponent B of the fitted curves, with one A for both, over {ratio.baseline}'s"
        found.append(Effect(ratio.label, RATIO, head, "", ratio.ratio, ratio.test, ratio.p_holm))
    return largest_first(found)


def largest_first(effects: Sequence[Effect]) -> list[Effect]:
    """By standardised difference."""
    return sorted(effects, key=lambda one: -one.standardised)
