"""Drawing: figures, and one page to send, from results directories."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aggcli.errors import RecordError, SettingError, nearest
from aggcli.files import whole_file
from aggcli.jobs.listening import say
from aggcli.measurement.words import listed
from aggcli.ownership import FIGURE_FORMATS, REPORT, figure_file
from aggcli.records import SCHEMA, refuse_links
from aggcli.report.sizes import SIZES


@dataclass(frozen=True)
class PlotResult:
    """What was drawn: (name, file) of each figure, and the page where one was asked for."""

    figures: tuple[tuple[str, Path], ...]
    report: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        written = [{"name": name, "path": str(path)} for name, path in self.figures]
        return {"schema": SCHEMA, "figures": written, **({} if self.report is None else {"report": str(self.report)})}

    def _repr_html_(self) -> str:
        from html import escape

        paths = [*(path for _, path in self.figures), *([self.report] if self.report else [])]
        return "<ul>" + "".join(f"<li>{escape(str(path))}</li>" for path in paths) + "</ul>"


def plot(
    directories: Sequence[Path],
    output: Path | None = None,
    formats: Sequence[str] = ("png",),
    step: int | None = None,
    *,
    html: bool = False,
    size: str = "screen",
    titles: bool = True,
) -> PlotResult:
    """Draw every figure that the records hold something for, into `output` (default: figures/ in the first directory).

    `step`: that of the figures that show a single one, default each run's last; `html`: also write report.html; `size`: column
    or page, for one or both columns of a paper, or screen; `titles`: whether a figure has its title in it. Those of the
    page are for a screen. Raises `SettingError` and `RecordError`.
    """
    endings = _checked_formats(formats)
    if size not in SIZES:
        raise SettingError(f"--size {size}: is none of {listed(list(SIZES), 'or')}{nearest(size, SIZES)}")
    folder = output if output is not None else directories[0] / "figures"
    if output is None:
        refuse_links([folder])
    _need_folder(folder, "--output " if output is not None else "")
    os.environ["MPLBACKEND"] = "agg"  # a backend that matplotlib does not know stops its import, needed or not
    from aggcli.analysis.frames import read_frames
    from aggcli.report import style
    from aggcli.report.figures import all_figures, picture
    from aggcli.report.findings import find
    from aggcli.report.page import page

    frames = read_frames(directories)
    findings = find(frames) if html else None
    with style.drawn_at(replace(SIZES[size], titled=titles)):
        figures, notes = all_figures(frames, step, findings)
    for note in notes:
        say(note)
    if not figures and not html:
        raise RecordError("nothing to draw: the records hold none of what the figures show")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"--output {folder}: cannot be made ({error.strerror})") from error
    written = tuple((name, folder / figure_file(name, ending)) for name in figures for ending in endings)
    for name, path in written:
        style.save(figures[name], path)
    if findings is None:
        return PlotResult(written)
    report = folder / REPORT
    with style.drawn_at(replace(SIZES["screen"], titled=False)):  # the page has the titles as headings
        shown, _ = all_figures(frames, step, findings)
    with style.drawn_at(replace(SIZES["column"], titled=False)):
        narrow = picture(frames, findings)
    _write(report, page(directories, frames, findings, shown, notes, narrow))
    return PlotResult(written, report)


def _write(path: Path, text: str) -> None:
    try:
        with whole_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordError(f"--output {path.parent}: {path.name} cannot be written ({error.strerror})") from error


def _checked_formats(given: Sequence[str]) -> tuple[str, ...]:
    """The formats, without repetitions. Raises `SettingError` for one that cannot be written."""
    endings = tuple(dict.fromkeys(item.lower().removeprefix(".") for item in given))
    for ending in endings:
        if ending not in FIGURE_FORMATS:
            raise SettingError(f"--format {ending}: cannot be written{nearest(ending, FIGURE_FORMATS)}")
    if not endings:
        raise SettingError("--format: names no format; known: pdf, png, svg")
    return endings


def _need_folder(folder: Path, flag: str) -> None:
    """Raises `RecordError` when the folder, or one that it would be made in, is a file."""
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise RecordError(f"{flag}{path}: is a file; the figures need a folder")
            return
