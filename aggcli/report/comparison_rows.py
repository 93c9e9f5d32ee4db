"""Compared results as rows: one outcome of one mode each, whatever the format that they are printed in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aggcli.analysis.statistics import Interval, is_shown, standard_deviation
from aggcli.errors import SettingError, nearest
from aggcli.measurement import words
from aggcli.measurement.words import number, plural

if TYPE_CHECKING:
    from aggcli.analysis.comparison import Comparison, Estimate
    from aggcli.analysis.outcomes import Common
    from aggcli.analysis.study import Curves

TO_READ = 3
"""Significant digits of a number that is there to be read."""
NO_DIFFERENCE = "~"
"""Stands where no difference is shown."""


@dataclass(frozen=True)
class Row:
    """One outcome of one mode. Numbers are as they were computed; None where there is nothing, or a single seed.

    `mean` is of all of the arm's seeds, `where` its own runs are equal; `difference` is `pair_mean` - `baseline_pair_mean`, of
    the `pairs` seeds that both arms have, `compared_where` the pair's runs are equal. `std`: of the seeds' numbers, with n-1,
    also where mean and interval are those of their logarithms. `shown`: whether a difference is, None where none was tested;
    `smallest_difference` and `seeds_for_half`: what could have been, where it is not, at `level` (`aggcli.analysis.power`);
    of B the one is a factor and the other for its root; `seeds_for_half` is None too where it would take more than
    `power.MOST_SEEDS`. `no_...`: why there is none; empty where there is one, and for the baseline's difference to itself.
    """

    outcome: str
    head: str
    unit: str
    better: str | None
    where: str
    mode: str
    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None
    interquartile_mean: float | None
    baseline: str | None = None
    pairs: int | None = None
    pair_mean: float | None = None
    baseline_pair_mean: float | None = None
    compared_from: float | None = None
    compared_until: float | None = None
    compared_where: str = ""
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    sign_flip_p: float | None = None
    sign_flip_floor: float | None = None
    sign_flip_exact: bool | None = None
    sign_flip_p_holm: float | None = None
    shown: bool | None = None
    level: float | None = None
    smallest_difference: float | None = None
    seeds_for_half: int | None = None
    no_interval: str = ""
    no_difference: str = ""
    no_difference_interval: str = ""
    no_smallest_difference: str = ""


def rows_of(
    comparison: Comparison, precision: int = TO_READ, sort_by: str | None = None, *, only_changed: bool = False
) -> list[Row]:
    """The comparison, a row per outcome and mode, the baseline first or the best by outcome `sort_by` first.

    `only_changed` keeps the outcomes whose means differ between modes at this precision. Raises `SettingError` for an unknown
    outcome.
    """
    order = _order(comparison, sort_by)
    rows = []
    for name, outcomes in comparison.outcomes.items():
        shown = [outcomes[label] for label in order if label in outcomes]
        if not only_changed or len({number(outcome.mean, precision) for outcome in shown}) > 1:
            rows += [_row(comparison, name, outcome) for outcome in shown]
    return rows


def curve_rows(curves: Curves, each: str = "seed") -> list[Row]:
    """The fitted curves: A, B and C_mid of each mode over the seeds that have bent, and B under the pair's common A. `each`:
    what a curve is of (`Comparison.each`)."""
    rows = []
    axis_unit, share = curves.unit, curves.measure == "accuracy"
    heads = (
        ("curve/asymptote", "asymptote A of the fitted curve", "share" if share else "reward", "higher"),
        ("curve/exponent", "efficiency exponent B", "", "higher"),
        ("curve/midpoint", f"{axis_unit} to half of the gain, C_mid", axis_unit, "lower"),
    )
    for name, head, unit, better in heads:
        for label, curve in curves.of_modes.items():
            found: Interval | None = getattr(curve, name.removeprefix("curve/"))
            std = standard_deviation(curve.values.get(name.removeprefix("curve/"), ()))
            if found is not None:
                beyond = sum(value > 1 for value in curve.values["asymptote"]) if share and name == "curve/asymptote" else 0
                seeds = found.n + len(curve.refused)
                said = [f"bent in {found.n} of {plural(seeds, each)}"] if curve.refused else []
                said += [f"fitted above 1 in {plural(beyond, each)}"] if beyond else []
                where = ", ".join(said)
                own = (label, found.n, found.mean, std, found.low, found.high, None)
                rows.append(Row(name, head, unit, better, where, *own, no_interval=found.without(each)))
    for pair in curves.ratios:
        found, flip = pair.ratio, pair.test.sign_flip
        power = None if is_shown(pair.p_holm) else pair.power
        mine, theirs = (pair.exponents[label] for label in (pair.label, pair.baseline))
        rows.append(
            Row(
                "curve/exponent_ratio",
                f"B over {pair.baseline}'s under a common A",
                "",
                "higher",
                f"A = {pair.asymptote:.4g}",
                pair.label,
                found.n,
                found.mean,
                standard_deviation([mine[seed] / theirs[seed] for seed in mine]) if pair.test.runs is None else None,
                found.low,
                found.high,
                None,
                p=pair.test.p,
                p_holm=pair.p_holm,
                sign_flip_p=flip and flip.p,
                sign_flip_floor=flip and flip.floor,
                sign_flip_exact=flip and flip.exact,
                shown=None if pair.p_holm is None else is_shown(pair.p_holm),
                level=pair.level,
                smallest_difference=power and math.exp(min(power.smallest, 700.0)),
                seeds_for_half=power and power.seeds_for_half,
                no_interval=found.without(each),
            )
        )
    return rows


def with_half_width(
    mean: float, low: float | None, high: float | None, *, signed: bool = False, precision: int = TO_READ
) -> str:
    """`0.957 ± 0.010` where the interval is symmetric about the mean (see `half_width`); otherwise the mean and `[low, high]`
    below it, to `precision` significant digits; without an interval the mean alone."""
    if (both := half_width(mean, low, high, signed=signed, precision=precision)) is not None:
        return " ".join(both)
    shown = _to_read(mean, precision, signed=signed)
    if low is None or high is None:
        return shown
    return f"{shown}\n[{_to_read(low, precision, signed=signed)}, {_to_read(high, precision, signed=signed)}]"


def half_width(
    mean: float, low: float | None, high: float | None, *, signed: bool = False, precision: int = TO_READ
) -> tuple[str, str] | None:
    """`0.957` and `± 0.010`: the half width in a digit less than `precision` (one at least), and the mean to the last of them;
    None where there is no interval, or one that is not symmetric about the mean."""
    if low is None or high is None:
        return None
    half = (high - low) / 2
    if not 0 < half < math.inf or abs((high - mean) - (mean - low)) > 1e-6 * half:
        return None
    sign, digits = "+" if signed else "", max(1, precision - 1)
    places = max(0, digits - 1 - math.floor(math.log10(half)))
    if places > digits + 4 or max(abs(mean), half) >= 1e15:
        return f"{mean:{sign}.{precision}g}", f"± {half:.{digits}g}"
    return f"{mean:{sign}.{places}f}", f"± {half:.{places}f}"


def _to_read(value: float, precision: int, *, signed: bool) -> str:
    return words.signed(value, precision) if signed else number(value, precision)


# -- parts ----------------------------------------------------------------------------------------------------------


def _row(comparison: Comparison, name: str, outcome: Estimate) -> Row:
    defined = comparison.defined[name]
    base = Row(
        name,
        comparison.named(name),
        defined.unit,
        defined.better,
        _where(name, outcome.common),
        outcome.label,
        len(outcome.values),
        outcome.mean,
        outcome.std,
        outcome.low,
        outcome.high,
        outcome.interquartile_mean,
        no_interval="of these rollouts alone"
        if comparison.recorded and len(outcome.values) == 1
        else outcome.without(comparison.each),
        no_difference=outcome.unpaired,
    )
    if outcome.pair is None:
        return base
    test = outcome.pair.test
    flip, power = test.sign_flip, None if outcome.pair.shown else outcome.pair.power
    beyond = power is not None and not power.possible
    power = None if beyond else power
    return Row(
        **{
            **vars(base),
            "baseline": outcome.pair.baseline,
            "pairs": test.difference.n if test.runs is None else None,
            "pair_mean": outcome.pair.mean,
            "baseline_pair_mean": outcome.pair.baseline_mean,
            "compared_from": outcome.pair.common and outcome.pair.common.start,
            "compared_until": outcome.pair.common and outcome.pair.common.end,
            "compared_where": _where(name, outcome.pair.common),
            "difference": test.difference.mean,
            "difference_low": test.difference.low,
            "difference_high": test.difference.high,
            "p": test.p,
            "p_holm": outcome.pair.p_holm,
            "sign_flip_p": flip and flip.p,
            "sign_flip_floor": flip and flip.floor,
            "sign_flip_exact": flip and flip.exact,
            "sign_flip_p_holm": outcome.pair.sign_flip_holm,
            "shown": None if test.p is None else outcome.pair.shown,
            "level": outcome.pair.level,
            "smallest_difference": power and power.smallest,
            "seeds_for_half": power and power.seeds_for_half,
            "no_difference_interval": test.difference.without(comparison.each),
            "no_smallest_difference": "no possible difference" if beyond else "",
        }
    )


def _where(outcome: str, common: Common | None) -> str:
    if common is None:
        return ""
    if common.axis == "tokens":
        between = f"mean from {common.start:,.0f} to {common.end:,.0f} tokens"
        return between if common.start < common.end else f"at {common.end:,.0f} tokens"
    if outcome == "tokens":
        return f"step {common.end:g}"
    if common.axis == "end":
        return f"after step {common.end:g}"
    return f"mean of steps {common.start:g} to {common.end:g}" if common.start < common.end else f"step {common.end:g}"


def _order(comparison: Comparison, sort_by: str | None) -> list[str]:
    if sort_by is None:
        return list(comparison.labels)
    if sort_by not in comparison.outcomes:
        raise SettingError(f"--sort-by {sort_by}: is not in the table{nearest(sort_by, comparison.outcomes)}")
    outcomes = comparison.outcomes[sort_by]
    sign = 1 if comparison.defined[sort_by].better == "lower" else -1
    return sorted(comparison.labels, key=lambda label: sign * outcomes[label].mean if label in outcomes else math.inf)
