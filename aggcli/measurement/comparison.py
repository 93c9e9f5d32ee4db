"""How far the layouts of a step are apart, number by number, and that in words.

A sum whose terms have either sign can cancel to 0 and keep its rounding, so a difference between layouts is measured against
the size of what was summed: the sum of the absolute terms. Numbers of one sign are their own size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aggcli.measurement.report import LayoutReport, RankReport
from aggcli.measurement.words import apart, at_most, listed, plural

ROUNDING = 1e-9
"""Share of what was summed that rounding cannot explain, where a rule is made to move."""
_NOT_COMPARED = "micro_batches"
"""A layout may choose its micro-batches."""


class Difference(NamedTuple):
    """A number under two layouts. `size`: the sum of its absolute terms, the larger of the two layouts'."""

    rule: str
    metric: str
    layouts: tuple[str, str]
    values: tuple[float | None, float | None]
    size: float

    @property
    def share(self) -> float:
        """The difference over the size; infinity where only one of the layouts has the number."""
        a, b = self.values
        if a is None or b is None:
            return math.inf
        return abs(a - b) / self.size if self.size else 0.0

    def __str__(self) -> str:
        a, b = self.values
        if a is None or b is None:
            has, lacks = self.layouts if b is None else self.layouts[::-1]
            return f"{self.metric} is there under {has} and not under {lacks}"
        return f"{self.metric} is {a:.6g} under {self.layouts[0]} and {b:.6g} under {self.layouts[1]}{apart(a, b, self.size)}"


@dataclass(frozen=True)
class LayoutComparison:
    """The layouts of one step, each against the first.

    `exact`: the rules that no layout may move; `largest`: the largest difference under one of those, by its share of what was
    summed, None where nothing was compared; `moving`: for each rule that is made to move with the layout, its own largest
    difference, that of pg_loss where it has one; `misplaced`: in words, samples that are not where a layout says, or not once.
    """

    layouts: tuple[str, ...]
    exact: tuple[str, ...]
    largest: Difference | None
    moving: dict[str, Difference | None]
    misplaced: tuple[str, ...] = ()

    @property
    def deviation(self) -> float | None:
        """The largest difference of a rule that no layout may move, as a share of what was summed; infinity where a sample is
        misplaced; None: not compared."""
        if self.misplaced:
            return math.inf
        return None if self.largest is None else self.largest.share


def compare_layouts(layouts: Sequence[LayoutReport], exact: Sequence[str], moving: Sequence[str]) -> LayoutComparison:
    """Every number of every rule under each layout against the first."""
    return LayoutComparison(
        tuple(report.name for report in layouts),
        tuple(exact),
        _largest(found for rule in exact for found in _differences(layouts, rule)),
        {rule: _most_telling(list(_differences(layouts, rule))) for rule in moving},
        tuple(f"layout {report.name}: {what}" for report in layouts for what in report.misplaced),
    )


def together(comparisons: Sequence[LayoutComparison]) -> LayoutComparison:
    """One comparison of several of the same step: those of the runs of a stack."""
    moving: dict[str, list[Difference]] = {}
    for comparison in comparisons:
        for rule, difference in comparison.moving.items():
            moving.setdefault(rule, []).extend([difference] if difference is not None else [])
    return LayoutComparison(
        tuple(dict.fromkeys(layout for one in comparisons for layout in one.layouts)),
        tuple(dict.fromkeys(rule for one in comparisons for rule in one.exact)),
        _largest(one.largest for one in comparisons if one.largest is not None),
        {rule: _most_telling(found) for rule, found in moving.items()},
        tuple(dict.fromkeys(what for one in comparisons for what in one.misplaced)),
    )


def _differences(layouts: Sequence[LayoutReport], rule: str) -> Iterator[Difference]:
    """Every number under the first layout and under each other; where those are one layout, its ranks' numbers too."""
    first = layouts[0]
    for other in layouts[1:]:
        names = (first.name, other.name)
        yield from _between(rule, names, "", first, other)
        if first.layout == other.layout:
            for mine, theirs in zip(first.ranks, other.ranks, strict=True):
                yield from _between(rule, names, f" of rank {mine.rank}", mine, theirs)


def _between(
    rule: str, names: tuple[str, str], of: str, first: LayoutReport | RankReport, other: LayoutReport | RankReport
) -> Iterator[Difference]:
    for metric, value in first.values[rule].items():
        theirs = other.values[rule][metric]
        if metric == _NOT_COMPARED or (value is None and theirs is None):
            continue
        numbers = (value, theirs, *(report.sizes[rule].get(metric) for report in (first, other)))
        size = max(abs(number) for number in numbers if number is not None)
        yield Difference(rule, metric + of, names, (value, theirs), size)


def _largest(found: Iterable[Difference]) -> Difference | None:
    return max(found, key=lambda difference: difference.share, default=None)


def _most_telling(found: Sequence[Difference]) -> Difference | None:
    losses = _largest(difference for difference in found if difference.metric == "pg_loss")
    return losses if losses is not None and losses.share > ROUNDING else _largest(found)


# -- in words -------------------------------------------------------------------------------------------------------


def moved(difference: Difference, why: str) -> str:
    """The note on a rule whose numbers move with the layout, as it is made to."""
    return f"{difference.rule} varies with the layout, as it is made to ({why}): {difference}"


def between_layouts(steps: Sequence[LayoutComparison]) -> list[str]:
    """The closing sentences on the layouts of these steps: what was compared, how far it is apart, and what was left out."""
    layouts = list(dict.fromkeys(layout for step in steps for layout in step.layouts))
    if all(len(step.layouts) < 2 for step in steps):
        return (
            [f"one layout, {layouts[0]}: nothing was compared"] if len(layouts) == 1 else ["no step has two layouts to compare"]
        )
    return [*_on_exact(steps, layouts), *_on_moving(steps)]


def _on_exact(steps: Sequence[LayoutComparison], layouts: Sequence[str]) -> list[str]:
    largest = _largest(step.largest for step in steps if step.largest is not None)
    if largest is None:
        return []
    under = listed([_counted(rule, [rule in step.exact for step in steps]) for rule in _rules(step.exact for step in steps)])
    where = listed([_counted(layout, [layout in step.layouts for step in steps]) for layout in layouts])
    if largest.share == 0:
        far = "equal to the last bit"
    elif math.isinf(largest.share):
        far = f"different: {largest}"
    else:
        far = (
            f"apart by at most {at_most(largest.share, 2):g} of the sum of their absolute terms"
            f" ({largest.metric} under {largest.rule}, {largest.layouts[1]} against {largest.layouts[0]})"
        )
    return [
        f"between the layouts {where}, under {under}: all numbers that ranks add up are {far}; not compared: micro_batches, and"
        " what the whole step gives once for all layouts (pass@k, groups, shares of weight and gradient)"
    ]


def _on_moving(steps: Sequence[LayoutComparison]) -> list[str]:
    said = []
    for rule in _rules(step.moving for step in steps):
        found = [step.moving[rule] for step in steps if rule in step.moving]
        differences = [difference for difference in found if difference is not None]
        where = _counted(rule, [rule in step.moving for step in steps])
        if not differences:
            said.append(f"{where} may vary with the layout: no number of it was compared")
            continue
        most = max(differences, key=lambda difference: difference.share)
        if most.share > ROUNDING:
            said.append(f"left out there: {where} varies with the layout, as it is made to: {most}")
        else:
            said.append(
                f"left out there: {where} may vary with the layout; between these its numbers are apart by at most"
                f" {at_most(most.share, 2):g} of the sum of their absolute terms"
            )
    return said


def _rules(of_steps: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(rule for rules in of_steps for rule in rules))


def _counted(name: str, there: Sequence[bool]) -> str:
    """A rule or layout, with how many of the steps have it where not all do."""
    return name if all(there) else f"{name} ({plural(sum(there), 'step')} of {len(there)})"


def beyond_rounding(steps: Sequence[tuple[int, LayoutComparison]], limit: float) -> str | None:
    """What to say where a layout changed a number of a rule that none may move, or real ranks one of their layout's; None where
    none did. `steps`: with their numbers."""
    for number, step in steps:
        if step.misplaced:
            return f"step {number}: {step.misplaced[0]}, so its numbers are not those of the step"
    found = [(number, step.largest) for number, step in steps if step.largest is not None]
    beyond = [(number, largest) for number, largest in found if largest.share > limit]
    if not beyond:
        return None
    number, worst = max(beyond, key=lambda found: found[1].share)
    others = plural(len(beyond) - 1, "other step has such a number too", "other steps have such numbers too")
    return (
        f"step {number}: a layout changed a number: under {worst.rule}, {worst}: {worst.share:.3g} of the sum of its absolute"
        f" terms, where {limit:g} is what rounding explains" + (f"; {others}" if len(beyond) > 1 else "")
    )
