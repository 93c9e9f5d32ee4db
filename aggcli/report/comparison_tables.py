"""The table of compared results, for the terminal, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from aggcli.analysis.effects import RATIO
from aggcli.analysis.outcomes import COUNTED, OUTCOMES
from aggcli.analysis.power import MOST_SEEDS
from aggcli.analysis.statistics import CONFIDENCE, RESAMPLES
from aggcli.analysis.units import LENGTH_UNITS
from aggcli.measurement.words import at_least, listed, number, plural, signed
from aggcli.report.blocks import BlockTable
from aggcli.report.comparison_rows import NO_DIFFERENCE, Row, half_width, with_half_width
from aggcli.report.escapes import in_csv, in_latex, in_markdown, visible
from aggcli.report.folding import WIDTH, folded

_SAID_UNITS = (*LENGTH_UNITS.values(), "nats")
"""Units that stand beside the name of an outcome."""
ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}


# -- formats --------------------------------------------------------------------------------------------------------


def text_table(rows: Sequence[Row], precision: int, below: str, width: int = WIDTH) -> Text:
    """For the terminal, in lines of `width` characters: a block an outcome, a line a mode, and under it the paired difference
    with what speaks for it.
    """
    lines: list[tuple[str, int]] = []
    for own in by_outcome(rows).values():
        together, best = len({row.where for row in own}) == 1, best_of(own)
        lines += [("", 0), *((line, width) for line in _folded(_headline(own[0], own[0].where if together else ""), width))]
        for row in own:
            cells = _cells(row, own, precision, "" if together else row.where, width)
            lines += [(line, _NUMBERS if row.mode == best and at == 0 else 0) for at, line in enumerate(cells)]
    lines += [("", 0), *((line, 0) for line in _folded(below, width))]
    text = Text()
    for line, bold in lines[1:]:
        text.append(line[:bold], style="bold").append(line[bold:].rstrip() + "\n")
    return text


def best_of(rows: Sequence[Row]) -> str | None:
    """The mode that is the best of an outcome where that is no matter of chance: it is shown to be better than the baseline, or
    as the baseline every other one is shown to be worse."""
    better = rows[0].better
    if better is None or len(rows) < 2:
        return None
    best = max(rows, key=lambda row: row.mean if better == "higher" else -row.mean)
    others = [row for row in rows if row is not best] if best.difference is None else [best]
    return best.mode if all(row.shown and row.difference is not None for row in others) else None


def side_by_side(rows: Sequence[Row], precision: int, below: str) -> Table:
    """For the terminal: outcomes down, modes across, for rows without pairs; the intervals of several seeds under the means."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    wheres = dict.fromkeys(row.where for row in rows)
    table = BlockTable(["; ".join(wheres), *modes], numbers=modes, caption=below)
    for own in by_outcome(rows).values():
        of_mode = {row.mode: row for row in own}
        unit = f" ({own[0].unit})" if own[0].unit in _SAID_UNITS else ""
        table.add_row(Text(f"{own[0].head}{unit}"), *(_stacked(of_mode.get(mode), precision) for mode in modes))
    return table


def by_outcome(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their outcome, in the order of first appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.outcome, []).append(row)
    return found


def csv_text(rows: Sequence[Row]) -> str:
    """Comma-separated values with a header and every number in full; an empty cell where there is none."""
    import pandas as pd

    names = [name for name in Row.__dataclass_fields__ if name not in ("head", "where", "compared_where")]
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    frame = pd.DataFrame({name: pd.Series(cells, dtype=object) for name, cells in columns.items()})
    return frame.map(lambda cell: in_csv(cell) if isinstance(cell, str) else cell).to_csv(index=False, lineterminator="\n")


def json_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as they stand in `--format json`, every number in full."""
    return [dict(vars(row)) for row in rows]


def markdown_table(rows: Sequence[Row], precision: int, below: str) -> str:
    """A Markdown table, and `below` it a caption."""
    cells = [_heads(rows), ["---"] * 2 + ["---:"] * (len(_HEADS) - 2)]
    cells += [list(map(in_markdown, _flat(row, rows, precision))) for row in rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in cells), "", in_markdown(below)])


def latex_table(rows: Sequence[Row], precision: int, below: str) -> str:
    """A LaTeX tabular, without packages, and `below` it a caption as a comment."""
    import pandas as pd

    flat = [list(map(in_latex, _flat(row, rows, precision))) for row in rows]
    frame = pd.DataFrame(flat, columns=pd.Index(list(map(in_latex, _heads(rows)))))
    drawn = frame.style.hide(axis="index").to_latex(column_format="ll" + "r" * (len(_HEADS) - 2), hrules=True)
    lined = re.sub(r"\\(top|mid|bottom)rule", r"\\hline", drawn)
    return f"{lined}% {visible(below)}"


def recorded_caption(rows: Sequence[Row]) -> str:
    """How to read the numbers of recorded rollouts, which are not left to chance and so not tested."""
    if all(row.n == 1 for row in rows):
        return "Means over the steps; they are of these rollouts, so there is no interval and no test."
    said = "Means over the steps, with the 95 % Student-t interval over seeds; they are of these rollouts, so there is no test."
    return " ".join([said, *_bounded(rows)])


def caption(
    rows: Sequence[Row],
    precision: int,
    *,
    tests: int = 0,
    paired: bool = True,
    arm: str = "mode",
    marked: bool = True,
    iqm: bool = False,
    half_widths: bool = False,
    reach: float | None = None,
) -> str:
    """How to read the numbers. `tests`: how many tests the p-values are corrected over; `paired`: whether differences are, by
    seed; `arm`: what is compared (`Comparison.arm`); `marked`: whether the table marks what is not shown, and says what could
    have been; `iqm`: whether it has interquartile means; `half_widths`: whether symmetric intervals are ± half their width;
    `reach`: the accuracy that was asked for, None where it is the baseline's own.
    """
    own_means = []
    if any(_has_own_means(row, rows, precision) for row in rows):
        whole = f"Where a pair's steps, tokens or {'seeds' if paired else 'runs'} are not the whole of its {arm}s'"
        own_means = [f"{whole}, its own two means stand with the difference."]
    if all(row.n == 1 for row in rows):
        return " ".join([f"One {'seed' if paired else 'run an arm'}: no interval.", *own_means, *_level(rows, reach)])
    over = "seeds" if paired else "runs"
    shape = f" [95 % interval over {over}, by Student's t]"
    if half_widths:
        shape = f" and 95 % interval over {over}, by Student's t: ± half its width where it is symmetric, else [from, to]"
    differences = f"; differences are {'paired by seed' if paired else 'of the means of runs that are not paired'}"
    said = [f"Mean{shape}{differences if any(row.difference is not None for row in rows) else ''}."]
    said += [*_bounded(rows), *_logarithmic(rows), *own_means]
    tested = [row for row in rows if row.p_holm is not None]
    if tested:
        by = f"corrected by Holm over all {tests} tests of the comparison" if tests > 1 else "one test, not corrected"
        test = "paired t-test" if paired else "Welch t-test, as is the interval of a difference"
        mark = f"{NO_DIFFERENCE} where it shows no difference (5 % or more)" if marked else "5 % or more shows no difference"
        said.append(f"p: {test}, {by}; {mark}.")
        said += [_sign_flip(tested)] if paired else []
        said += ["Each interval holds for itself at 95 %, uncorrected."] if tests > 1 else []
        if marked and any(row.smallest_difference is not None or row.no_smallest_difference for row in rows):
            needed = over if paired else "runs of each arm"
            factored = any(row.outcome == RATIO and row.smallest_difference is not None for row in rows)
            of_ratios = " (of B a factor, and its root)" if factored else ""
            said.append(
                f"Could show: the smallest difference that 80 % of such comparisons, each by the spread of its own {over},"
                f" would have shown at the level that it was tested at, and the {needed} that half of it takes if the spread"
                f" stays{of_ratios}; no possible difference: it lies beyond the outcome's range."
            )
        if paired and any(row.difference is not None and row.difference_low is None for row in tested):
            said.append("A difference that is the same in all seeds has no interval, and its p is the sign-flip's.")
    if iqm and any(row.interquartile_mean is not None for row in rows):
        said.append(f"IQM: mean of the middle half of the {over}.")
    return " ".join([*said, *_level(rows, reach)])


# -- parts ----------------------------------------------------------------------------------------------------------

_HEADS = (
    "outcome",
    "mode",
    "n",
    "mean",
    "95 % interval",
    "difference",
    "95 % interval",
    "p (Holm)",
    "sign-flip p (floor)",
    "could show (seeds for half)",
)


def _heads(rows: Sequence[Row]) -> list[str]:
    *first, last = _HEADS
    unpaired = any(row.smallest_difference is not None and _each(row) != "seeds" for row in rows)
    return [*first, "could show (runs an arm for half)" if unpaired else last]


_OF_LOGARITHMS = {"curve/exponent": "B", "curve/midpoint": "C_mid", "curve/exponent_ratio": "the ratio of B"}


def _bounded(rows: Sequence[Row]) -> list[str]:
    """How the intervals of numbers with bounds stay inside them."""
    own = [row for row in rows if row.unit == "share" or row.outcome == "gradient_cosine"]
    said = []
    if any(row.low is not None for row in own):
        said.append("Of shares and cosines: interval on the logit scale of the mean, so that it stays within their bounds.")
    counted = [unit for unit in COUNTED if any(row.low is not None and row.low > 0 and row.unit == unit for row in rows)]
    if counted:
        said.append(f"Of means in {listed(counted)}: on the log scale of the mean, so that it stays above 0.")
    measured = {row.outcome: OUTCOMES[row.outcome] for row in rows if row.outcome in OUTCOMES and row.high is not None}
    skewed = [f"{one.head}: {100 * one.up_to:g} %" for one in measured.values() if one.up_to > (1 + CONFIDENCE) / 2]
    if skewed:
        said.append(f"Up to a higher quantile than 97.5 %, as their laws over runs are skewed: {'; '.join(skewed)}.")
    if any(
        row.high is not None and OUTCOMES[row.outcome].measure.endswith("response_length")
        for row in rows
        if row.outcome in OUTCOMES
    ):
        said.append("Of lengths, intervals are cut at the response limit where it is known.")
    if any(row.outcome == "curve/asymptote" and row.unit == "share" and row.high is not None for row in rows):
        said.append("Of A, a share, they are cut at 1, but for a mean above 1.")
    if any(row.difference_low is not None for row in own):
        said.append("Intervals of differences of shares are cut at -1 and 1.")
    return said


def _logarithmic(rows: Sequence[Row]) -> list[str]:
    """What is averaged as logarithms."""
    shown = [name for outcome, name in _OF_LOGARITHMS.items() if any(row.outcome == outcome for row in rows)]
    if not shown:
        return []
    return [f"Of {listed(shown)}: geometric mean, and interval on the log scale."]


def _level(rows: Sequence[Row], reach: float | None) -> list[str]:
    """Where the accuracy of `tokens to accuracy` comes from."""
    level = next((row.head.split()[-1] for row in rows if row.outcome == "tokens_to_accuracy"), None)
    if level is None:
        return []
    if reach is not None:
        return [f"Accuracy {level}: as given with --reach."]
    return [f"Accuracy {level}: nine tenths of the baseline's own way from its first steps to its last (--reach sets another)."]


def _has_own_means(row: Row, rows: Sequence[Row], precision: int) -> bool:
    """Whether the means of the pair are, as printed, others than those of its two arms."""
    if row.pair_mean is None or row.baseline_pair_mean is None:
        return False
    base = next((one.mean for one in rows if (one.outcome, one.mode) == (row.outcome, row.baseline)), math.nan)
    printed = [(row.pair_mean, row.mean), (row.baseline_pair_mean, base)]
    return any(number(own, precision) != number(arm, precision) for own, arm in printed)


def _own_means(row: Row, precision: int) -> str:
    """`0.912 - 0.929`."""
    assert row.pair_mean is not None
    assert row.baseline_pair_mean is not None
    return f"{number(row.pair_mean, precision)} - {number(row.baseline_pair_mean, precision)}"


def _sign_flip(tested: Sequence[Row]) -> str:
    """What the sign-flip p is, and the smallest it can be, by the number of seeds."""
    seeds = {row.sign_flip_floor: row.pairs or row.n for row in tested if row.sign_flip_floor is not None}
    kinds = {row.sign_flip_exact for row in tested}
    kind = "exact permutation p" if kinds == {True} else f"permutation p of {RESAMPLES} drawn sign patterns"
    if len(kinds) > 1:
        kind = f"permutation p, exact up to {int(math.log2(RESAMPLES))} seeds and of {RESAMPLES} drawn sign patterns above"
    floors = [f"{at_least(floor, 2):g} with {plural(n, 'seed')}" for floor, n in sorted(seeds.items())]
    return f"Sign-flip: {kind}, uncorrected; it cannot fall below {listed(floors, 'or')}."


def _flat(row: Row, rows: Sequence[Row], precision: int) -> list[str]:
    unit = f", {row.unit}" if row.unit else ""
    means = f" ({_own_means(row, precision)})" if _has_own_means(row, rows, precision) else ""
    return [
        f"{row.head}{ARROWS[row.better]}{unit}",
        row.mode,
        str(row.n),
        number(row.mean, precision),
        _bounds(row.low, row.high, precision) or row.no_interval,
        row.no_difference if row.difference is None else _signed(row.difference, precision) + means,
        _difference_bounds(row, precision),
        f"{_mark(row)}{p_value(row.p_holm)}",
        "" if row.sign_flip_floor is None else f"{p_value(row.sign_flip_p)} ({row.sign_flip_floor:.2g})",
        row.no_smallest_difference
        if row.smallest_difference is None
        else f"{number(row.smallest_difference, 2)} ({_seeds_for_half(row)})",
    ]


def _stacked(row: Row | None, precision: int) -> str:
    if row is None:
        return ""
    return with_half_width(row.mean, row.low, row.high, precision=precision)


def _cells(row: Row, rows: Sequence[Row], precision: int, where: str, width: int) -> list[str]:
    """The mode's line, `where` it is taken, and the pair's under it; too long a label or number gets a line of its own."""
    label, middle, rest = f"  {row.mode}", row.interquartile_mean, [f"n = {row.n}"]
    if middle is not None:
        rest.append(f"IQM {number(middle, precision)}")
    if row.difference is None and row.p is not None:
        rest += [_evidence(row), _could_show(row)]
    same = "" if row.n == 1 else row.no_interval  # n = 1 is said beside it
    mean, bounds = half_width(row.mean, row.low, row.high, precision=precision) or (
        number(row.mean, precision),
        _bounds(row.low, row.high, precision) or same,
    )
    lines = _line(label, mean, bounds, [*rest, where], width)
    if row.no_difference:
        lines += _folded(f"    {row.no_difference}", width)
    if row.difference is not None:
        difference, bounds = half_width(
            row.difference, row.difference_low, row.difference_high, signed=True, precision=precision
        ) or (_signed(row.difference, precision), _difference_bounds(row, precision))
        lines += _line(f"    minus {row.baseline}", difference, bounds, [_evidence(row), _could_show(row)], width)
        if _has_own_means(row, rows, precision):
            over = [row.compared_where, plural(row.pairs, "seed") if row.pairs not in (None, row.n) else ""]
            lines += _folded(f"{_UNDER}{', '.join(filter(None, [_own_means(row, precision), *over]))}", width)
    return lines


_LABEL = 22
"""Where the column of the numbers begins."""
_NUMBERS = _LABEL + 9
"""Where that column ends."""
_UNDER = " " * 24
"""Where a line that explains the numbers above it begins."""


def _line(label: str, mean: str, bounds: str, rest: Sequence[str], width: int) -> list[str]:
    """The numbers in their columns, beside the label or below one that is too long; what has no room goes to lines below."""
    lines = [] if len(label) <= _LABEL and len(label) + len(mean) < _LABEL + 9 else _folded(label, width)
    now = f"{'' if lines else label:<{_LABEL}}{mean:>9}"
    if len(now) + 2 + len(bounds) > width:
        lines, now = [*lines, now], f"{_UNDER}{bounds}  "
    else:
        now += f" {bounds:<21}  " if bounds.startswith("±") else f"  {bounds:<20}  "
    for at, part in enumerate(filter(None, rest)):
        comma = ", " if at else ""
        if len(now + comma + part) <= width:
            now += comma + part
        else:
            lines, now = [*lines, (now + comma).rstrip()], _UNDER + part
    return [part for line in [*lines, now] for part in (_folded(line, width) if len(line.rstrip()) > width else [line])]


def _evidence(row: Row) -> str:
    if row.p_holm is None:
        return "no test"
    flip = "" if row.sign_flip_floor is None else f", sign-flip {p_value(row.sign_flip_p)}"
    return f"{_mark(row)}p {p_value(row.p_holm)}{flip}"


def _mark(row: Row) -> str:
    return f"{NO_DIFFERENCE} " if row.shown is False else ""


def _could_show(row: Row) -> str:
    """`could show 0.021, half with 14 seeds`; empty where a difference is shown, or nothing is known of it."""
    if row.no_smallest_difference:
        return f"could show {row.no_smallest_difference}"
    if row.smallest_difference is None:
        return ""
    if row.outcome == RATIO:
        return f"could show a factor of {number(row.smallest_difference, 3)}, its root with {_seeds_for_half(row)} {_each(row)}"
    return f"could show {number(row.smallest_difference, 2)}, half with {_seeds_for_half(row)} {_each(row)}"


def _each(row: Row) -> str:
    """What `seeds_for_half` counts; only a test that is paired by seed has a number of pairs, or a sign-flip p."""
    return "runs an arm" if row.pairs is None and row.sign_flip_p is None else "seeds"


def _seeds_for_half(row: Row) -> str:
    return f"> {MOST_SEEDS}" if row.seeds_for_half is None else str(row.seeds_for_half)


def _headline(row: Row, where: str) -> str:
    unit = ", ".join(part for part in (row.unit, where) if part)
    return f"{row.head}{ARROWS[row.better]}" + (f" ({unit})" if unit else "")


def _folded(text: str, width: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return folded(text, width, "", indent).splitlines() or [""]


def _bounds(low: float | None, high: float | None, precision: int, *, signed: bool = False) -> str:
    if low is None or high is None:
        return ""
    shown = _signed if signed else number
    return f"[{shown(low, precision)}, {shown(high, precision)}]"


def _difference_bounds(row: Row, precision: int) -> str:
    """The interval of the difference, or why it has none."""
    return _bounds(row.difference_low, row.difference_high, precision, signed=True) or row.no_difference_interval


def _signed(value: float, precision: int) -> str:
    return signed(value, precision)


def p_value(value: float | None) -> str:
    if value is None:
        return ""
    return "<0.0001" if value < 1e-4 else f"{value:.2g}"
