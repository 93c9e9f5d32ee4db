"""One self-contained HTML page of a report: no network, no other file, the same bytes for the same records.

The answer, one picture and one small table; then the other figures; everything else is folded. The template says how it looks
(`data/report/page.html`); here is what it is given. Every text from the records is escaped there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from aggcli.analysis.frames import Frames
from aggcli.report import page_tables as tables
from aggcli.report import style, verdicts
from aggcli.report.figures import PICTURES
from aggcli.report.findings import Findings
from aggcli.report.markup import Picture, Table, environment, inline_svg
from aggcli.report.origin import Origin
from aggcli.report.page_numbers import small_table
from aggcli.version import __version__

_PARTS = Path(__file__).parent.parent / "data" / "report"
CAPTIONS = {
    "effects": "How far each {arm} is from the baseline: success first, then outcomes with a difference that is"
    " shown, then lengths.",
    "accuracy_by_tokens": "Which {arm} gets further for the same number of tokens: a higher line is better, a line further left"
    " gets there sooner. The scatter of the dots is the noise of single steps.",
    "reward_by_tokens": "Which {arm} gets further for the same number of tokens: a higher line is better, a line further left"
    " gets there sooner. The scatter of the dots is the noise of single steps.",
    "learning_curves": "What changes over training. Whether {arm}s differ is for the answer above to say, not for the eye.",
    "weight_by_length": "How much one token counts by the length of its response; 1 is the average token of the step.",
    "weight_shares": "Where each mode puts its weight: on long or short, right or wrong responses.",
    "mode_gradients": "Gradients of the same rollouts: their length, which acts as a learning rate does, and their direction.",
    "modes_over_steps": "The recorded steps side by side.",
    "correct_by_rank": "Each rank counts its own correct samples; the line is what all ranks of a layout have together.",
    "pg_loss_by_rank": "What each rank adds to the loss, and whether the sum is the same in every layout.",
    "layout_deviation": "How far layouts are apart where that is more than rounding, on a log axis.",
}
"""How to read a figure, in the order of the page; `arm`: what is compared."""


@dataclass(frozen=True)
class Page:
    """What the template is given, in the order of the page. `lists`: headings, each with its lines."""

    question: str
    warnings: Sequence[str]
    answer: Sequence[str]
    picture: Picture | None
    small: Table | None
    same: Sequence[str]
    figures: Sequence[Picture]
    lists: Sequence[tuple[str, Sequence[str]]]
    uncertainty: Sequence[str]
    tables: Sequence[Table]
    differing: Table | None
    notes: Sequence[tuple[str, Sequence[str]]]
    origin: Origin


def page(
    origin: Origin,
    frames: Frames,
    findings: Findings,
    figures: Mapping[str, Figure],
    notes: Sequence[str],
    narrow: Mapping[str, Figure] | None = None,
) -> str:
    """The page of these runs. `figures`: by name; `notes`: why others are missing, and what was left out; `narrow`: figures
    once more, for a narrow screen.
    """
    small, same = small_table(frames, findings)
    arm = "mode" if findings.comparison is None else findings.comparison.arm
    drawn = [_picture(name, figures[name], (narrow or {}).get(name), arm) for name in CAPTIONS if name in figures]
    first = next((name for name in PICTURES if name in figures), None)
    made = Page(
        question=verdicts.question(frames, findings),
        warnings=findings.verdict.warnings,
        answer=findings.answer.sentences,
        picture=next((one for one in drawn if one.name == first), None),
        small=small,
        same=same,
        figures=[one for one in drawn if one.name != first],
        lists=[(f"{heading[:1].upper()}{heading[1:]}", lines) for heading, lines in findings.verdict.lists],
        uncertainty=[line for line in (*verdicts.uncertainty(findings), verdicts.layouts(frames, findings)) if line],
        tables=_tables(frames, findings, origin),
        differing=tables.settings_table(findings),
        notes=_notes(frames, findings, notes),
        origin=origin,
    )
    style_, script = (Markup((_PARTS / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    template = environment().from_string((_PARTS / "page.html").read_text(encoding="utf-8"))
    return template.render(
        page=made,
        style=style_,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),  # no other script may run
        version=__version__,
    )


# -- the parts ----------------------------------------------------------------------------------------------------------


def _picture(name: str, figure: Figure, narrow: Figure | None, arm: str) -> Picture:
    """A figure with its title and how to read it, which together are what a screen reader says."""
    title, caption = str(figure.get_label()), CAPTIONS[name].format(arm=arm)
    said = f"{title}. {caption} {style.words_in(figure)}".strip()
    small = None if narrow is None else inline_svg(style.svg_text(narrow), f"{name}-narrow", said)
    return Picture(name, title, caption, inline_svg(style.svg_text(figure), name, said), small)


def _tables(frames: Frames, findings: Findings, origin: Origin) -> list[Table]:
    every = [tables.comparison_table(findings), *origin.finals]
    if not findings.of_others:  # of which the catalogue of metrics knows nothing
        every += [*tables.metric_tables(frames), tables.last_step_table(frames), *tables.layout_tables(frames)]
    return [one for one in every if one is not None]


def _notes(frames: Frames, findings: Findings, notes: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    lists: tuple[tuple[str, Sequence[str]], ...] = (
        ("", list(dict.fromkeys([*findings.notes, *notes]))),
        ("Skipped", tables.skipped(frames)),
        ("Noted by the steps", tables.step_notes(frames)),
    )
    return [(heading, lines) for heading, lines in lists if lines]
