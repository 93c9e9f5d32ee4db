"""`aggcli compare DIR [DIR...]`: results directories that exist already, side by side. Data goes to stdout, notes to stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aggcli.cli.console import say, show
from aggcli.errors import SettingError, nearest

if TYPE_CHECKING:
    from aggcli.jobs.compare import ComparisonResult

FORMATS = ("table", "json", "csv", "md", "latex")


def check_format(format: str) -> None:
    """Refuse a format that is not known. Raises `SettingError`."""
    if format not in FORMATS:
        raise SettingError(f"--format {format}: is not known{nearest(format, FORMATS)}")


def print_comparison(found: ComparisonResult, format: str) -> None:
    """Print table, verdict and notes in a format; json and csv are in full, and csv's verdict is among the notes."""
    from aggcli.report import comparison_tables as tables
    from aggcli.report import verdict_formats as verdicts

    rows, precision, verdict = found.rows, found.options.precision, found.study.verdict
    notes = list(found.notes)
    if format == "json":
        from aggcli.records import to_json

        print(to_json(found.as_json()))
        return
    if format == "csv":
        print(tables.csv_text(rows), end="")
        notes = [*found.verdict, *notes]
    elif format == "md":
        print(f"{verdicts.verdict_markdown(verdict)}\n\n{tables.markdown_table(rows, precision, found.caption_for(format))}")
    elif format == "latex":
        print(f"{verdicts.verdict_comments(verdict)}\n{tables.latex_table(rows, precision, found.caption_for(format))}")
    else:
        show(found.tables())
    for note in [*notes, *([] if found.page is None else [f"page: {found.page}"])]:
        say(note)
