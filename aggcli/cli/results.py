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
    from aggcli.analysis.efficiency import EfficiencyPair, ModeCurve
    from aggcli.analysis.histories import History
    from aggcli.analysis.settings import SettingDifference
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
    for csv the verdict) to stderr. precision: significant digits of tables (json and csv are in full). sort_by: figure by which
    the modes are sorted, best first. only_changed: only figures whose means differ. reach: accuracy of the row "tokens to
    accuracy"; default nine tenths of the baseline's own way. window: share of the common range, at its end, that figures are
    means of; 0 is the last step alone. fit: fit compute-performance curves against `axis` (tokens, steps or seconds); default
    for up to `efficiency.MOST_FITS` runs. Raises `SettingError` and `RecordError`.
    """
    _check(format, precision, reach, window, axis)
    from aggcli.analysis.efficiency import MOST_FITS
    from aggcli.analysis.histories import read_histories, shared_seconds, without_steps
    from aggcli.analysis.settings import differences, warnings
    from aggcli.analysis.study import study
    from aggcli.report.comparison_rows import curve_rows, rows_of

    read, notes = read_histories(directories)
    found = study(read, baseline, silent=without_steps(directories, read), window=window, reach=reach)
    differing = differences(found.runs)
    notes = [*warnings(differing), *notes, *found.notes]
    rows = rows_of(found.comparison, precision, sort_by, only_changed=only_changed)
    if found.recorded:
        notes += ["--fit: the accuracy of recorded rollouts is no learning curve, so none is fitted"] if fit else []
    elif fit or (fit is None and len(found.runs) <= MOST_FITS):
        curves, pairs, unit = _fitted(found.runs, found.comparison.baseline, axis)
        rows += curve_rows(curves, pairs, unit)
        notes += _refusals(curves)
        notes += shared_seconds(found.runs) if axis == "seconds" else []
    elif fit is None:
        notes.append(f"{len(found.runs)} runs: no curves are fitted to more than {MOST_FITS} unless --fit asks for it")
    _print(format, precision, rows, found, differing, notes, reach)
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


def _fitted(runs: Sequence[History], baseline: str, axis: str) -> tuple[dict[str, ModeCurve], list[EfficiencyPair], str]:
    import numpy as np

    from aggcli.analysis.efficiency import efficiency, fit_runs, mode_curves
    from aggcli.analysis.histories import AXES

    measure = "accuracy" if any(np.isfinite(run.measures["accuracy"]).any() for run in runs) else "raw_reward"
    fitted = fit_runs(runs, axis, measure)
    return mode_curves(fitted), efficiency(fitted, baseline, axis, measure), AXES[axis]


def _refusals(curves: dict[str, ModeCurve]) -> list[str]:
    """One note a mode: how many of its curves were refused, and the first reason."""
    return [
        f"{label}: no curve is fitted to {len(curve.refused)} of its runs ({curve.refused[0]})"
        for label, curve in curves.items()
        if curve.refused
    ]


def _print(
    format: str,
    precision: int,
    rows: Sequence[Row],
    found: Study,
    differing: Sequence[SettingDifference],
    notes: Sequence[str],
    reach: float | None,
) -> None:
    from aggcli.records import SCHEMA, to_json
    from aggcli.report import comparison_tables as tables
    from aggcli.report import verdict_formats as verdicts

    if format == "json":
        print(to_json({"schema": SCHEMA, **_json(rows, found, differing, notes)}))
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


def _json(rows: Sequence[Row], found: Study, differing: Sequence[SettingDifference], notes: Sequence[str]) -> dict[str, Any]:
    from aggcli.report.comparison_tables import json_rows
    from aggcli.report.verdict_formats import verdict_json

    return {
        "baseline": found.comparison.baseline,
        "modes": list(found.comparison.labels),
        "verdict": verdict_json(found.verdict),
        "figures": json_rows(rows),
        "reach": found.comparison.reach,
        "diverged": [{"mode": one.label, "seed": one.seed, "step": one.step, "text": one.text} for one in found.diverged],
        "differing_settings": [{**asdict(one), "values": dict(one.values)} for one in differing],
        "notes": list(notes),
    }
