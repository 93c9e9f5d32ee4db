"""`aggcli compare DIR [DIR...]`: results directories that exist already, side by side.

Reads the records, compares the runs by mode (`aggcli.analysis.study`) and prints the verdict and the table. Data goes to
stdout, notes to stderr; nothing is run, and nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.cli.console import out, say
from aggcli.errors import ExitCode, SettingError, nearest

if TYPE_CHECKING:
    from aggcli.analysis.study import Study
    from aggcli.report.comparison_rows import Row

FORMATS = ("table", "json", "csv", "md", "latex")


def compare_results(
    directories: Sequence[Path],
    *,
    baseline: str | None = None,
    format: str = "table",
    precision: int = 4,
    sort_by: str | None = None,
    only_changed: bool = False,
    reach: float | None = None,
    window: float = 0.1,
    fit: bool | None = None,
    axis: str = "tokens",
) -> int:
    """Print table, verdict and notes of the runs in these results directories; returns the exit code.

    baseline: mode that the others are paired with, default the first. format: one of `FORMATS`; data goes to stdout, notes (and
    for csv the verdict) to stderr. precision: significant digits of tables (json and csv are in full). sort_by: outcome by
    which the modes are sorted, best first. only_changed: only outcomes whose means differ. reach: accuracy of the row "tokens
    to accuracy"; default nine tenths of the baseline's own way. window: share of the common range, at its end, that outcomes
    are means of; 0 is the last step alone. fit: fit compute-performance curves against `axis` (tokens, steps or seconds);
    default for up to `efficiency.MOST_FITS` runs. Raises `SettingError` and `RecordError`.
    """
    _check(format, precision, reach, window, axis)
    from aggcli.analysis.histories import read_histories, without_steps
    from aggcli.analysis.study import study
    from aggcli.report.comparison_rows import curve_rows, rows_of

    read, notes = read_histories(directories)
    silent = without_steps(directories, read)
    found = study(read, baseline, silent=silent, window=window, reach=reach, fit=fit, axis=axis)
    rows = rows_of(found.comparison, precision, sort_by, only_changed=only_changed)
    rows += curve_rows(found.curves)
    _print(format, precision, rows, found, [*notes, *found.notes], reach)
    return ExitCode.DONE


def _check(format: str, precision: int, reach: float | None, window: float, axis: str) -> None:
    if format not in FORMATS:
        raise SettingError(f"--format {format}: is not known{nearest(format, FORMATS)}")
    if not 1 <= precision <= 17:
        raise SettingError(f"--precision {precision}: must lie between 1 and 17 significant digits")
    if reach is not None and not 0 < reach <= 1:
        raise SettingError(f"--reach {reach:g}: must be an accuracy above 0 and at most 1")
    if not 0 <= window <= 1:
        raise SettingError(f"--window {window:g}: must be a share of the common range, 0 to 1")
    if axis not in ("tokens", "steps", "seconds"):
        raise SettingError(f"--axis {axis}: is not known{nearest(axis, ('tokens', 'steps', 'seconds'))}")


def _print(
    format: str,
    precision: int,
    rows: Sequence[Row],
    found: Study,
    notes: Sequence[str],
    reach: float | None,
) -> None:
    from aggcli.records import SCHEMA, to_json
    from aggcli.report import comparison_tables as tables
    from aggcli.report import verdict_formats as verdicts

    if format == "json":
        print(to_json({"schema": SCHEMA, **_json(rows, found, notes)}))
        return
    below = tables.recorded_caption(rows)
    if not found.recorded:
        below = tables.caption(rows, precision, verdict_pairs=found.verdict.pairs, iqm=format == "table", reach=reach)
    if format == "csv":
        print(tables.csv_text(rows), end="")
        notes = [*verdicts.verdict_lines(found.verdict), *notes]
    elif format == "md":
        print(f"{verdicts.verdict_markdown(found.verdict)}\n\n{tables.markdown_table(rows, precision, below)}")
    elif format == "latex":
        print(f"{verdicts.verdict_comments(found.verdict)}\n{tables.latex_table(rows, precision, below)}")
    else:
        console = out()
        console.print(verdicts.verdict_text(found.verdict, tables.WIDTH), soft_wrap=True)
        console.print()
        if found.recorded and tables.fit_side_by_side(rows, precision):
            console.print(tables.side_by_side(rows, precision, below), width=tables.WIDTH)
        else:
            console.print(tables.text_table(rows, precision, below), soft_wrap=True, end="")
    for note in notes:
        say(note)


def _json(rows: Sequence[Row], found: Study, notes: Sequence[str]) -> dict[str, Any]:
    from aggcli.report.comparison_tables import json_rows
    from aggcli.report.verdict_formats import verdict_json

    return {
        "baseline": found.comparison.baseline,
        "modes": list(found.comparison.labels),
        "verdict": verdict_json(found.verdict),
        "outcomes": json_rows(rows),
        "length_unit": found.comparison.length_unit,
        "reach": found.comparison.reach,
        "diverged": [{"mode": one.label, "seed": one.seed, "step": one.step, "text": one.text} for one in found.diverged],
        "differing_settings": [{**asdict(one), "values": dict(one.values)} for one in found.differing],
        "notes": list(notes),
    }
