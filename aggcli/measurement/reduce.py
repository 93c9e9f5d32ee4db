"""From partial sums to reported numbers: everything is divided once, here, at the end."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from aggcli.measurement.catalogue import METRICS, checked
from aggcli.measurement.local import Key, Partials
from aggcli.measurement.report import Values


def combine(parts: Sequence[Partials]) -> Partials:
    """Add up partial sums and take the largest of the maxima; every part has the same keys."""
    if len(parts) == 1:
        return parts[0]
    sums = {key: math.fsum(part.sums[key] for part in parts) for key in parts[0].sums}
    sizes = {key: math.fsum(part.sizes[key] for part in parts) for key in parts[0].sizes}
    maxima = {key: max(part.maxima[key] for part in parts) for key in parts[0].maxima}
    lengths = [part.correct_lengths for part in parts if part.correct_lengths is not None]
    return Partials(sums, sizes, maxima, sorted(n for some in lengths for n in some) if lengths else None)


def reduced_values(total: Partials, rule: str) -> Values:
    """The step's numbers under one rule. A step without a trained token has no weighted numbers: they are None, as is a number
    that overflows."""
    return _values(total, rule, weighted=total.sums[("tokens",)] > 0)


def sizes(total: Partials, rule: str) -> dict[str, float]:
    """The sum of the absolute terms of each number of the step whose terms may have either sign, divided as the number is;
    without those that overflow."""
    found: dict[str, float] = {}
    for name, reduction, key, count in _numbers_in(tuple(total.sums), tuple(total.maxima), rule):
        if math.isfinite(total.sizes.get(key, math.nan)) and (reduction != "mean" or total.sums[count]):
            found[name] = total.sizes[key] / (total.sums[count] if reduction == "mean" else 1.0)
    return found


def rank_values(part: Partials, rule: str, *, empty: bool = False) -> Values:
    """A rank's own numbers: its share of weighted ones, its own means, counts, maxima and norms.

    `empty`: the whole step has no trained token, so there is nothing to have a share of.
    """
    return _values(part, rule, weighted=not empty)


def _values(part: Partials, rule: str, *, weighted: bool) -> Values:
    values: Values = {}
    for name, reduction, key, count in _numbers_in(tuple(part.sums), tuple(part.maxima), rule):
        if reduction == "mean":
            values[name] = _mean(part.sums[key], part.sums[count])
        elif reduction == "effective":
            values[name] = _mean(part.sums[key] ** 2, part.sums[count])
        elif reduction == "count":
            values[name] = _whole(part.sums[key])
        elif reduction == "max":
            value = part.maxima[key]
            values[name] = value if math.isfinite(value) else None
        elif not weighted or not math.isfinite(part.sums[key]):
            values[name] = None
        else:
            values[name] = part.sums[key] + 0.0 if reduction == "weighted" else math.sqrt(max(part.sums[key], 0.0))
    return values


@functools.lru_cache(maxsize=64)
def _numbers_in(sums: tuple[Key, ...], maxima: tuple[Key, ...], rule: str) -> list[tuple[str, str, Key, Key]]:
    """Which numbers of the catalogue these sums and maxima give: (name, reduction, key, key of what it is divided by)."""
    found: list[tuple[str, str, Key, Key]] = []
    for name, metric in METRICS.items():
        kind = metric.reduction
        key: Key = {
            "weighted": (name, rule),
            "norm": ("gradient", rule, rule),
            "mean": (name, "sum"),
            "effective": (name, "sum"),
        }.get(kind, (name,))
        if key in (maxima if kind == "max" else sums) and kind != "global":
            found.append((name, kind, key, (name, "squares" if kind == "effective" else "count")))
    return found


def _mean(total: float, count: float) -> float | None:
    return total / count if count and math.isfinite(total) else None


def _whole(count: float) -> int:
    """A count as an integer; sums of counts are exact in float64."""
    return round(count)


def gradient_comparison(total: Partials, rules: Sequence[str], baseline: str) -> dict[str, Values]:
    """Each rule's gradient against the baseline's: ratio of norms (of effective learning rates) and cosine.

    None where a norm is 0 or overflows, and nothing at all without gradients.
    """
    found: dict[str, Values] = {}
    for rule in rules:
        if ("gradient", rule, rule) not in total.sums:
            return {}
        own, base = (math.sqrt(max(total.sums[("gradient", r, r)], 0.0)) for r in (rule, baseline))
        inner = total.sums[("gradient", rule, baseline)]
        if not all(map(math.isfinite, (own, base, inner))):
            own = base = inner = 0.0
        found[rule] = checked(
            {
                "gradient_ratio": own / base if base else None,
                "gradient_cosine": max(-1.0, min(1.0, inner / (own * base))) if own and base else None,
            }
        )
    return found


def overflowed(total: Partials) -> list[str]:
    """The names of the numbers that overflowed."""
    sums = [key[0] for key, value in total.sums.items() if not math.isfinite(value)]
    maxima = [key[0] for key, value in total.maxima.items() if value == math.inf]
    return list(dict.fromkeys("grad_norm_log_probs" if name == "gradient" else name for name in (*sums, *maxima)))


# -- vectors that cross ranks ---------------------------------------------------------------------------------------


def to_vectors(part: Partials) -> tuple[list[float], list[float]]:
    """Sums (and their sizes) and maxima as two plain vectors, in the order of their keys, which is the same on every rank."""
    return [*part.sums.values(), *part.sizes.values()], list(part.maxima.values())


def from_vectors(like: Partials, sums: Sequence[float], maxima: Sequence[float], lengths: list[int] | None) -> Partials:
    """The inverse of `to_vectors`, with the keys of `like`."""
    split = len(like.sums)
    return Partials(
        _keyed(like.sums, sums[:split]),
        _keyed(like.sizes, sums[split:]),
        _keyed(like.maxima, maxima),
        lengths if like.correct_lengths is not None else None,
    )


def _keyed(like: Mapping[Key, float], values: Sequence[float]) -> dict[Key, float]:
    return dict(zip(like, values, strict=True))
