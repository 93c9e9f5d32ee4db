"""Comparing results directories that exist already: the runs by mode, the verdict, and the rows of its table.

Nothing is run, and nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.errors import SettingError, nearest
from aggcli.report.notebook import Shown

if TYPE_CHECKING:
    import pandas as pd

    from aggcli.analysis.answer import Answer
    from aggcli.analysis.arms import Arms
    from aggcli.analysis.histories import History
    from aggcli.analysis.plan import Plan
    from aggcli.analysis.study import Study
    from aggcli.report.comparison_rows import Row

AXES = ("tokens", "steps", "seconds")


@dataclass(frozen=True)
class ComparisonOptions:
    """`baseline`: mode that the others are paired with, default the first; `precision`: significant digits of tables;
    `sort_by`: outcome by which the modes are sorted, best first; `only_changed`: only outcomes whose means differ; `reach`:
    accuracy of the row "tokens to accuracy", default nine tenths of the baseline's own way; `window`: share of the common
    range, at its end, that outcomes are means of, 0 for the last step alone; `fit`: fit compute-performance curves against
    `axis`, default for up to `efficiency.MOST_FITS` runs; `plan`: also how many seeds a difference of this size takes, in
    `plan_outcome`, default success at equal steps. Raises `SettingError` for a value that cannot be.
    """

    baseline: str | None = None
    precision: int = 3
    sort_by: str | None = None
    only_changed: bool = False
    reach: float | None = None
    window: float = 0.1
    fit: bool | None = None
    axis: str = "tokens"
    plan: float | None = None
    plan_outcome: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.precision <= 17:
            raise SettingError(f"--precision {self.precision}: must lie between 1 and 17 significant digits")
        if self.reach is not None and not 0 < self.reach <= 1:
            raise SettingError(f"--reach {self.reach:g}: must be an accuracy above 0 and at most 1")
        if not 0 <= self.window <= 1:
            raise SettingError(f"--window {self.window:g}: must be a share of the common range, 0 to 1")
        if self.plan is not None and not 0 < self.plan < math.inf:
            raise SettingError(f"--plan {self.plan:g}: must be a difference above 0, in the unit of the outcome")
        if self.plan_outcome is not None and self.plan is None:
            raise SettingError(
                "--plan-outcome: names the outcome of --plan; give the difference to plan for, such as --plan 0.01"
            )
        if self.axis not in AXES:
            raise SettingError(f"--axis {self.axis}: is not known{nearest(self.axis, AXES)}")


@dataclass(frozen=True)
class ComparisonResult(Shown):
    """What a comparison of recorded runs found. `rows`: those of its table; `notes`: what is to be known of the runs; `plan`:
    the seeds that a difference takes, where it was asked for; `page`: that which was written of it.
    """

    options: ComparisonOptions
    study: Study
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    plan: Plan | None = None
    page: Path | None = None

    @property
    def answer(self) -> Answer:
        """The answer: what differs and by how much, how sure that is, and what to do about it."""
        return self.study.verdict.answer

    @property
    def verdict(self) -> list[str]:
        """The verdict in words: the answer, and what it rests on."""
        from aggcli.report.verdict_formats import verdict_lines

        return list(verdict_lines(self.study.verdict))

    @property
    def outcomes(self) -> pd.DataFrame:
        """A row an outcome and mode: mean, interval, and the paired difference from the baseline."""
        import io

        import pandas as pd

        from aggcli.report.comparison_tables import csv_text

        return pd.read_csv(io.StringIO(csv_text(self.rows)))

    @property
    def caption(self) -> str:
        """What stands below the table of the terminal."""
        return self.caption_for("table")

    def caption_for(self, kind: str) -> str:
        """What stands below the table in a format: table, md or latex."""
        from aggcli.analysis.recorded import what_no_mode_changes
        from aggcli.report import comparison_tables as tables

        if self.study.recorded:
            return f"{tables.recorded_caption(self.rows)} {what_no_mode_changes(self.study.runs)}"
        tests, reach = self.study.comparison.tests, self.options.reach
        terminal = kind == "table"
        comparison = self.study.comparison
        own = {"tests": tests, "paired": comparison.paired, "arm": comparison.arm, "reach": reach}
        own |= {"iqm": terminal, "half_widths": terminal}
        return tables.caption(self.rows, self.options.precision, **own)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        from aggcli.records import SCHEMA
        from aggcli.report.comparison_tables import json_rows
        from aggcli.report.verdict_formats import verdict_json

        comparison, study = self.study.comparison, self.study
        return {
            "schema": SCHEMA,
            "baseline": comparison.baseline,
            "modes": list(comparison.labels),
            "paired": comparison.paired,
            "answer": list(self.answer.sentences),
            "verdict": verdict_json(study.verdict),
            **({} if self.plan is None else {"plan": asdict(self.plan)}),
            "outcomes": json_rows(self.rows),
            "length_unit": comparison.length_unit,
            "reach": comparison.reach,
            "diverged": [{"mode": one.label, "seed": one.seed, "step": one.step, "text": one.text} for one in study.diverged],
            "differing_settings": [{**asdict(one), "values": dict(one.values)} for one in study.differing],
            "notes": list(self.notes),
            **({} if self.page is None else {"report": str(self.page)}),
        }

    def tables(self) -> list[Any]:
        """What the terminal shows: the verdict, and the table of the outcomes."""
        from aggcli.report import comparison_tables as tables
        from aggcli.report import verdict_formats as verdicts
        from aggcli.report.folding import Folding

        verdict = Folding(lambda width: verdicts.verdict_text(self.study.verdict, width))
        precision, below = self.options.precision, self.caption
        if self.study.recorded:
            return [verdict, tables.side_by_side(self.rows, precision, below)]
        return [verdict, Folding(lambda width: tables.text_table(self.rows, precision, below, width))]


def compare(directories: Sequence[Path], options: ComparisonOptions | None = None) -> ComparisonResult:
    """Compare the runs in these results directories, by mode. Raises `SettingError` and `RecordError`."""
    from aggcli.analysis.histories import read_histories, without_steps

    read, notes = read_histories(directories)
    return _compared(read, notes, options or ComparisonOptions(), silent=without_steps(directories, read))


def compared_runs(arms: Arms, options: ComparisonOptions) -> ComparisonResult:
    """The comparison of runs that were read already. Raises `SettingError` and `RecordError`."""
    return _compared(arms.runs, arms.notes, options, paired=arms.paired)


def _compared(
    read: Sequence[History], notes: Sequence[str], asked: ComparisonOptions, *, silent: Sequence[Path] = (), paired: bool = True
) -> ComparisonResult:
    from aggcli.analysis.study import study
    from aggcli.report.comparison_rows import curve_rows, rows_of

    terms = {"window": asked.window, "reach": asked.reach, "fit": asked.fit, "axis": asked.axis}
    found = study(read, asked.baseline, silent=silent, paired=paired, **terms)
    rows = rows_of(found.comparison, asked.precision, asked.sort_by, only_changed=asked.only_changed)
    plan = None if asked.plan is None else _planned(found, asked.plan, asked.plan_outcome)
    if plan is not None:
        found = replace(found, verdict=replace(found.verdict, plan=(plan.heading, plan.lines)))
    return ComparisonResult(
        asked, found, (*rows, *curve_rows(found.curves, found.comparison.each)), (*notes, *found.notes), plan
    )


def _planned(found: Study, difference: float, outcome: str | None) -> Plan:
    from aggcli.analysis.plan import plan_of

    if found.recorded:
        raise SettingError(
            "--plan: recorded rollouts are not left to chance, so no seeds show more of them; compare trained runs"
        )
    rankings = found.verdict.rankings
    if outcome is None and not rankings:
        raise SettingError("--plan: no success of two modes was recorded here; name another outcome with --plan-outcome")
    return plan_of(found.comparison, difference, outcome or rankings[0].outcome)
