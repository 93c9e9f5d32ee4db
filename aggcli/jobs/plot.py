"""Drawing: figures, and one page to send, from results directories, or from the runs of other trainers that were kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.errors import RecordError, SettingError, nearest
from aggcli.files import whole_file
from aggcli.jobs.listening import say
from aggcli.measurement.words import listed
from aggcli.ownership import FIGURE_FORMATS, REPORT, figure_file
from aggcli.records import SCHEMA, refuse_links
from aggcli.report.sizes import SIZES

if TYPE_CHECKING:
    from aggcli.analysis.frames import Frames
    from aggcli.report.findings import Findings
    from aggcli.report.origin import Origin


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
    A directory in which `compare_curves` kept the runs of other trainers is drawn alone.

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
    from aggcli.analysis.kept_curves import holds_curves
    from aggcli.report import style
    from aggcli.report.figures import all_figures, picture
    from aggcli.report.page import page

    kept = next((directory for directory in directories if holds_curves(directory)), None)
    frames, findings, origin = _of_records(directories, html) if kept is None else _of_curves(kept, directories, step)
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
    if findings is None or not html:
        return PlotResult(written)
    report = folder / REPORT
    with style.drawn_at(replace(SIZES["screen"], titled=False)):  # the page has the titles as headings
        shown, _ = all_figures(frames, step, findings)
    with style.drawn_at(replace(SIZES["column"], titled=False)):
        narrow = picture(frames, findings)
    _write(report, page(origin(findings), frames, findings, shown, notes, narrow))
    return PlotResult(written, report)


_Read = tuple["Frames", "Findings | None", Callable[["Findings"], "Origin"]]
"""What is drawn, what is said of it, and of the page where it comes from."""


def _of_records(directories: Sequence[Path], html: bool) -> _Read:
    from aggcli.analysis.frames import read_frames
    from aggcli.report.findings import find
    from aggcli.report.origin import of_records

    frames = read_frames(directories)
    return frames, find(frames) if html else None, lambda _: of_records(directories, frames)


def _of_curves(kept: Path, directories: Sequence[Path], step: int | None) -> _Read:
    from aggcli.analysis.frames import frames_of
    from aggcli.analysis.kept_curves import read_curves
    from aggcli.jobs.curves import compare_kept
    from aggcli.report.findings import findings_of
    from aggcli.report.origin import of_curves

    if len(directories) > 1:
        raise SettingError(
            f"{kept}: holds runs of other trainers, which are drawn alone; give all of their logs to one comparison"
        )
    if step is not None:
        raise SettingError(f"--step {step}: is of figures that show a single step, and {kept} has none; leave it out")
    found = compare_kept(kept)
    findings = replace(findings_of(found.study, ()), notes=found.notes)
    return frames_of(findings.compared), findings, lambda one: of_curves(kept, read_curves(kept), one)


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
