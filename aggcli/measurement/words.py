"""Numbers and verdicts in words, for notes, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

AS_RECORDED = "varies as recorded"
"""Of a rule under audit: it varies with the recorded layout alone, which its framework cannot represent."""
VARIES = ("varies", AS_RECORDED)
"""What is said of a rule that varies with the layout."""


def plural(number: int, one: str, several: str | None = None) -> str:
    """`1 run`, `2 runs`; with a verb that follows the number, `plural(n, "rank holds", "ranks hold")`: `1 rank holds`."""
    return f"{number} {one}" if number == 1 else f"{number} {several if several is not None else one + 's'}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def short(value: float) -> str:
    """A number to read: three significant digits, or all that stand before the point: 0.0526, 12.3, 465, 12345; 0 for -0.

    It is first rounded to 12 digits, so that numbers that are equal but for rounding read alike: 31.25 as 31.2, one just above
    it too.
    """
    value = float(f"{value:.12g}")
    return f"{value + 0:.0f}" if 99.95 <= abs(value) < 1e15 else f"{value + 0:.3g}"


def percent(share: float) -> str:
    """A share in per cent, as `short` has it: `9.38 %`, `17 %`."""
    return f"{short(100 * share)} %"


def in_bytes(count: int) -> str:
    """Bytes as text, in powers of 1000: `999 B`, `1.2 MB`."""
    if count < 1000:
        return f"{count} B"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"


def at_most(value: float, digits: int) -> float:
    """A number of so many significant digits that `value`, not below 0, is at most: the next one up, or itself where it has no
    more."""
    return _to_digits(value, digits, ROUND_CEILING)


def at_least(value: float, digits: int) -> float:
    """A number of so many significant digits that `value`, not below 0, is at least: the next one down, or itself."""
    return _to_digits(value, digits, ROUND_FLOOR)


def _to_digits(value: float, digits: int, rounding: str) -> float:
    exact = Decimal(repr(float(value)))
    if not exact or not exact.is_finite():
        return float(value)
    return float(exact.quantize(Decimal((0, (1,), exact.adjusted() + 1 - digits)), rounding))


def apart(a: float, b: float, size: float) -> str:
    """` (0.013 apart, 11.4 % of -0.114)`: how far two numbers are apart, also relative to the first, which is left out where
    the first is near 0: less than a thousandth of `size`, what it was summed from."""
    relative = f", {100 * abs(a - b) / abs(a):.3g} % of {a:.6g}" if abs(a) > size / 1000 else ""
    return f" ({abs(a - b):.3g} apart{relative})"


def number(value: float, precision: int) -> str:
    """`value` to this many significant digits, without an exponent for numbers below 1e15: 123456.7 is 123500 at 4."""
    if not math.isfinite(value):
        return ""
    if abs(value) >= 1e15:
        return f"{value:.{precision}g}"
    digits = precision - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):.0f}" if value and digits <= 0 else f"{value:.{precision}g}"


def signed(value: float, precision: int) -> str:
    """`number` with its sign: a difference."""
    return ("+" if value >= 0 else "") + number(value, precision)
