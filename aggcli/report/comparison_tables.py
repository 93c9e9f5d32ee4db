"""The table of compared results, for the terminal (80 columns), Markdown and LaTeX, and as rows for CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from aggcli.analysis.efficiency import EfficiencyPair, ModeCurve
from aggcli.analysis.outcomes import FIGURES, Common, Comparison, Outcome
from aggcli.analysis.statistics import Interval
from aggcli.errors import SettingError, nearest

WIDTH = 80
ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}


@dataclass(frozen=True)
class Row:
    """One figure of one mode. Numbers are as they were computed; None where there is nothing, or a single seed."""

    figure: str
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
    compared_until: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    sign_flip_p: float | None = None
    sign_flip_floor: float | None = None
    sign_flip_p_holm: float | None = None


def rows_of(comparison: Comparison, precision: int = 4, sort_by: str | None = None, *, only_changed: bool = False) -> list[Row]:
    """The comparison, a row per figure and mode, the baseline first or the best by figure `sort_by` first.

    `only_changed` keeps the figures whose means differ between modes at this precision. Raises `SettingError` for an unknown
    figure.
    """
    order = _order(comparison, sort_by)
    rows = []
    for name, outcomes in comparison.outcomes.items():
        shown = [outcomes[label] for label in order if label in outcomes]
        if not only_changed or len({number(outcome.mean, precision) for outcome in shown}) > 1:
            rows += [_row(comparison, name, outcome) for outcome in shown]
    return rows


def curve_rows(curves: Mapping[str, ModeCurve], pairs: Sequence[EfficiencyPair], axis_unit: str) -> list[Row]:
    """The fitted curves: A, B and C_mid of each mode over the seeds that have bent, and B under the pair's common A."""
    rows = []
    heads = (
        ("curve/asymptote", "asymptote A of the fitted curve", "share", "higher"),
        ("curve/exponent", "efficiency exponent B", "", "higher"),
        ("curve/midpoint", f"{axis_unit} to half of the gain, C_mid", axis_unit, "lower"),
    )
    for name, head, unit, better in heads:
        for label, curve in curves.items():
            found: Interval | None = getattr(curve, name.removeprefix("curve/"))
            if found is not None:
                seeds = found.n + len(curve.refused)
                where = f"{found.n} of {seeds} seeds have bent" if curve.refused else ""
                rows.append(Row(name, head, unit, better, where, label, found.n, found.mean, None, found.low, found.high, None))
    for pair in pairs:
        found, flip = pair.ratio, pair.test.sign_flip
        rows.append(
            Row(
                "curve/exponent_ratio",
                f"B over {pair.baseline}'s under a common A",
                "",
                "higher",
                f"A = {pair.asymptote:.4g} for {pair.label}",
                pair.label,
                found.n,
                found.mean,
                None,
                found.low,
                found.high,
                None,
                p=pair.test.p,
                p_holm=pair.p_holm,
                sign_flip_p=flip and flip.p,
                sign_flip_floor=flip and flip.floor,
            )
        )
    return rows


def number(value: float, precision: int) -> str:
    """`value` to this many significant digits, without an exponent for large numbers: 123456.7 is 123500 at 4."""
    if not math.isfinite(value):
        return ""
    digits = precision - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):.0f}" if value and digits <= 0 else f"{value:.{precision}g}"


# -- formats --------------------------------------------------------------------------------------------------------


def text_table(rows: Sequence[Row], precision: int = 4) -> Text:
    """For the terminal: a block a figure, a line a mode, and under it the paired difference with what speaks for it."""
    lines: list[tuple[str, str]] = []
    for at, row in enumerate(rows):
        if at == 0 or rows[at - 1].figure != row.figure:
            lines += [("", ""), *((line, "bold") for line in _folded(_headline(row), WIDTH))]
        lines += [(line, "") for line in _cells(f"  {row.mode}", row, precision)]
    lines += [("", ""), *((line, "") for line in _folded(caption(rows), WIDTH))]
    text = Text()
    for line, style in lines[1:]:
        text.append(line.rstrip() + "\n", style=style)
    return text


def csv_text(rows: Sequence[Row]) -> str:
    """Comma-separated values with a header and every number in full; an empty cell where there is none."""
    buffer = io.StringIO()
    names = [name for name in Row.__dataclass_fields__ if name not in ("head", "where")]
    writer = csv.DictWriter(buffer, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(vars(row) for row in rows)
    return buffer.getvalue()


def json_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as they stand in `--format json`, every number in full."""
    return [dict(vars(row)) for row in rows]


def markdown_table(rows: Sequence[Row], precision: int = 4) -> str:
    """A Markdown table and its caption."""
    lines = ["| " + " | ".join(_HEADS) + " |", "|" + "|".join(["---"] * 2 + ["---:"] * (len(_HEADS) - 2)) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _flat(row, precision)) + " |" for row in rows]
    return "\n".join([*lines, "", caption(rows)])


def latex_table(rows: Sequence[Row], precision: int = 4) -> str:
    """A LaTeX tabular, without packages, and its caption as a comment."""
    lines = [r"\begin{tabular}{ll" + "r" * (len(_HEADS) - 2) + "}", r"\hline"]
    lines += [" & ".join(map(_latex, _HEADS)) + r" \\", r"\hline"]
    lines += [" & ".join(_latex(cell) for cell in _flat(row, precision)) + r" \\" for row in rows]
    return "\n".join([*lines, r"\hline", r"\end{tabular}", f"% {caption(rows)}"])


def caption(rows: Sequence[Row]) -> str:
    """How to read the numbers."""
    if all(row.n == 1 for row in rows):
        return "One seed: no interval."
    said = ["Mean [95 % Student-t interval over seeds]; differences are paired by seed."]
    if any(row.p_holm is not None for row in rows):
        families = [sum(row.figure == name and row.p_holm is not None for row in rows) for name in {row.figure for row in rows}]
        pairs = max(families)
        by = f"corrected by Holm over the {pairs} pairs of a figure" if pairs > 1 else "one pair a figure, nothing to correct"
        said.append(f"p: paired t-test, {by}.")
        floors = sorted({row.sign_flip_floor for row in rows if row.sign_flip_floor is not None})
        said.append(
            f"Sign-flip: exact permutation p, uncorrected; it cannot fall below {', '.join(f'{f:.2g}' for f in floors)}."
        )
    if any(row.interquartile_mean is not None for row in rows):
        said.append("IQM: mean of the middle half of the seeds.")
    return " ".join(said)


# -- parts ----------------------------------------------------------------------------------------------------------

_HEADS = ("figure", "mode", "n", "mean", "95 % interval", "difference", "95 % interval", "p (Holm)", "sign-flip p (floor)")


def _flat(row: Row, precision: int) -> list[str]:
    unit = f", {row.unit}" if row.unit else ""
    return [
        f"{row.head}{ARROWS[row.better]}{unit}",
        row.mode,
        str(row.n),
        number(row.mean, precision),
        _bounds(row.low, row.high, precision),
        "" if row.difference is None else _signed(row.difference, precision),
        _bounds(row.difference_low, row.difference_high, precision, signed=True),
        _p(row.p_holm),
        "" if row.sign_flip_floor is None else f"{_p(row.sign_flip_p)} ({row.sign_flip_floor:.2g})",
    ]


def _latex(text: str) -> str:
    for plain, escaped in (
        ("\\", r"\textbackslash "),
        *((c, "\\" + c) for c in "&%$#_{}"),
        ("↑", r"$\uparrow$"),
        ("↓", r"$\downarrow$"),
    ):
        text = text.replace(plain, escaped)
    return text.replace("<", "$<$").replace("≥", r"$\geq$")


def _cells(label: str, row: Row, precision: int) -> list[str]:
    """The mode's line, and the pair's under it; a label or number that is too long gets a line of its own."""
    count = f"n = {row.n}"
    middle = row.interquartile_mean
    if middle is not None:
        count += f", IQM {number(middle, precision)}"
    evidence = count if row.difference is not None or row.p is None else f"{count}, {_evidence(row)}"
    lines = _line(label, number(row.mean, precision), _bounds(row.low, row.high, precision), evidence)
    if row.difference is not None:
        bounds = _bounds(row.difference_low, row.difference_high, precision, signed=True)
        lines += _line(f"    minus {row.baseline}", _signed(row.difference, precision), bounds, _evidence(row))
    return lines


def _line(label: str, mean: str, bounds: str, rest: str) -> list[str]:
    numbers = f"{mean:>9}  {bounds:<20}  {rest}"
    if len(label) <= 22 and 22 + len(numbers.rstrip()) <= WIDTH:
        return [f"{label:<22}{numbers}"]
    under = _folded(numbers.strip(), WIDTH - 8)
    return [*_folded(label, WIDTH), *("        " + line for line in under)]


def _evidence(row: Row) -> str:
    if row.p_holm is None:
        return "one seed: no test"
    flip = "" if row.sign_flip_floor is None else f", sign-flip {_p(row.sign_flip_p)}"
    return f"p {_p(row.p_holm)}{flip}"


def _headline(row: Row) -> str:
    unit = ", ".join(part for part in (row.unit, row.where) if part)
    return f"{row.head}{ARROWS[row.better]}" + (f" ({unit})" if unit else "")


def _folded(text: str, width: int) -> list[str]:
    import textwrap

    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _bounds(low: float | None, high: float | None, precision: int, *, signed: bool = False) -> str:
    if low is None or high is None:
        return ""
    shown = _signed if signed else number
    return f"[{shown(low, precision)}, {shown(high, precision)}]"


def _signed(value: float, precision: int) -> str:
    precision = max(1, precision - 1)  # a difference is not known to more digits than its parts
    return ("+" if value >= 0 else "") + number(value, precision)


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "<0.0001" if value < 1e-4 else f"{value:.2g}"


def _row(comparison: Comparison, name: str, outcome: Outcome) -> Row:
    figure = FIGURES[name]
    head = figure.head if name != "tokens_to_accuracy" else f"tokens to accuracy {comparison.reach:g}"
    base = Row(
        name,
        head,
        figure.unit,
        figure.better,
        f"step {outcome.common.end:g}" if outcome.common and name == "tokens" else _where(outcome.common),
        outcome.label,
        len(outcome.values),
        outcome.mean,
        outcome.std,
        outcome.low,
        outcome.high,
        outcome.interquartile_mean,
    )
    if outcome.pair is None:
        return base
    test = outcome.pair.test
    flip = test.sign_flip
    return Row(
        **{
            **vars(base),
            "baseline": outcome.pair.baseline,
            "pairs": test.difference.n,
            "compared_until": outcome.pair.common and outcome.pair.common.end,
            "difference": test.difference.mean,
            "difference_low": test.difference.low,
            "difference_high": test.difference.high,
            "p": test.p,
            "p_holm": outcome.pair.p_holm,
            "sign_flip_p": flip and flip.p,
            "sign_flip_floor": flip and flip.floor,
            "sign_flip_p_holm": outcome.pair.sign_flip_holm,
        }
    )


def _where(common: Common | None) -> str:
    if common is None:
        return ""
    if common.axis == "tokens":
        return f"mean from {common.start:,.0f} to {common.end:,.0f} tokens"
    return f"mean of steps {common.start:g} to {common.end:g}" if common.start < common.end else f"step {common.end:g}"


def _order(comparison: Comparison, sort_by: str | None) -> list[str]:
    if sort_by is None:
        return list(comparison.labels)
    if sort_by not in comparison.outcomes:
        raise SettingError(f"--sort-by {sort_by}: is not in the table{nearest(sort_by, comparison.outcomes)}")
    outcomes = comparison.outcomes[sort_by]
    sign = 1 if FIGURES[sort_by].better == "lower" else -1
    return sorted(comparison.labels, key=lambda label: sign * outcomes[label].mean if label in outcomes else math.inf)
