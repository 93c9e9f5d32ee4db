"""One self-contained HTML page of a report: no network, no other file, the same bytes for the same records.

The question, the verdict in words with its uncertainty, what was run, tables that sort, figures as SVG, the settings that
differ, notes, and how to reproduce it. Every text from the records is escaped (`aggcli.report.markup`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from aggcli.analysis.frames import Frames
from aggcli.measurement.words import plural
from aggcli.records import read_manifest
from aggcli.report import page_tables as tables
from aggcli.report import style, verdicts
from aggcli.report.findings import Findings
from aggcli.report.markup import SWIPE, Markup, element, inline_svg, join, text
from aggcli.version import __version__

_PARTS = Path(__file__).parent.parent / "data" / "report"
CAPTIONS = {
    "effects": "How far each mode is from the baseline. Where the interval holds 0, either sign is possible.",
    "accuracy_by_tokens": "Which mode gets further for the same number of tokens: a higher line is better, a line further left"
    " gets there sooner. The scatter of the dots is the noise of single steps.",
    "learning_curves": "What changes over training. Whether modes differ is for the verdict to say, not for the eye.",
    "weight_by_length": "How much one token counts by the length of its response; 1 is the average token of the step.",
    "weight_shares": "Where each mode puts its weight: on long or short, right or wrong responses.",
    "mode_gradients": "The same rollouts give gradients of different length (a learning rate in disguise) and direction.",
    "modes_over_steps": "The recorded steps side by side.",
    "correct_by_rank": "Each rank counts its own correct samples; together they come to the same number in every layout.",
    "pg_loss_by_rank": "What each rank adds to the loss, and whether the sum is the same in every layout.",
    "layout_deviation": "How far layouts are apart where that is more than rounding, on a log axis.",
}
"""How to read a figure, in the order of the page."""


def page(
    directories: Sequence[Path], frames: Frames, findings: Findings, figures: Mapping[str, Figure], notes: Sequence[str]
) -> str:
    """The page of these results directories. `figures`: by name; `notes`: why others are missing, and what was left out.

    Raises `RecordError` for a manifest that cannot be read.
    """
    manifests = {str(directory): read_manifest(directory) for directory in directories}
    question = verdicts.question(frames, findings)
    body = [
        _head(question, frames, directories),
        _verdict(frames, findings),
        _section("run", "What was run", _what_was_run(frames, manifests)),
        _section("tables", "Tables", _tables(frames, findings, manifests)),
        _section("figures", "Figures", _figures(figures)),
        _section("settings", "Settings that differ", [tables.settings_table(findings), *_all_settings(manifests)]),
        _section("notes", "Notes, and what was skipped", _notes(frames, findings, notes)),
        _section("reproduce", "How to reproduce it", _reproduce(directories, manifests)),
        element("footer", f"Made by aggcli {__version__}, from the records alone."),
    ]
    style_, script = (Markup((_PARTS / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    drawn = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return drawn.from_string((_PARTS / "page.html").read_text(encoding="utf-8")).render(
        title=text(question),
        style=style_,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),  # no other script may run
        body=join(body),
    )


# -- the top ------------------------------------------------------------------------------------------------------------


def _head(question: str, frames: Frames, directories: Sequence[Path]) -> Markup:
    modes = len({run.mode for run in frames.runs})
    counts = f"{plural(len(frames.runs), 'run')}, {plural(modes, 'mode')}, {plural(len(frames.steps), 'optimizer step')}"
    links = (
        ("run", "what was run"),
        ("tables", "tables"),
        ("figures", "figures"),
        ("settings", "settings"),
        ("notes", "notes"),
    )
    nav = [element("a", name, href=f"#{at}") for at, name in (*links, ("reproduce", "reproduce"))]
    return join(
        [
            element("p", f"aggcli report: {counts}, from {', '.join(map(str, directories))}", class_="kind"),
            element("h1", question),
            element("nav", join(nav, " ")),
        ]
    )


def _verdict(frames: Frames, findings: Findings) -> Markup:
    parts = [element("p", f"Warning: {one}.", class_="warn") for one in findings.verdict.warnings]
    parts.append(element("p", element("strong", findings.answer.text)))
    for heading, lines in findings.verdict.lists:
        parts.append(element("p", f"{heading[:1].upper()}{heading[1:]}:"))
        parts.append(element("ul", *(element("li", line) for line in lines)))
    said = [*verdicts.uncertainty(findings), verdicts.layouts(frames, findings)]
    parts += [element("p", line) for line in said if line]
    return element("div", *parts, class_="verdict", id="verdict")


def _section(at: str, heading: str, parts: Sequence[Markup]) -> Markup:
    shown = [part for part in parts if part]
    return element("section", element("h2", heading, id=at), Markup("\n"), join(shown)) if shown else Markup()


# -- the parts ----------------------------------------------------------------------------------------------------------


def _what_was_run(frames: Frames, manifests: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    parts = [element("pre", _command(manifest)) for manifest in manifests.values() if _command(manifest)]
    own = {run.label: read_manifest(run.directory) for run in frames.runs}
    ended = [label for label, manifest in own.items() if manifest.get("status") != "done"]
    if ended:
        said = f"{plural(len(ended), 'run')} of {len(own)} did not end as done: {', '.join(ended[:6])}"
        parts.append(element("p", said + (" and others" if len(ended) > 6 else ""), class_="warn"))
    return [*parts, tables.run_table(frames, own), *_environments([*manifests.values(), *own.values()])]


def _environments(manifests: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Each environment once: commit, versions, device."""
    told = []
    for manifest in manifests:
        environment = manifest.get("environment")
        if isinstance(environment, Mapping):
            flat = {**environment, **(environment.get("packages") or {})}
            flat.pop("packages", None)
            told.append("\n".join(f"{name}: {value}" for name, value in flat.items() if value is not None))
    return [
        element("details", element("summary", "Commit, versions and device"), element("pre", one))
        for one in dict.fromkeys(told)
    ]


def _tables(frames: Frames, findings: Findings, manifests: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    finals = [
        tables.final_table(name if len(manifests) > 1 else "", final)
        for name, manifest in manifests.items()
        if isinstance(final := manifest.get("final"), Mapping) and final.get("modes")
    ]
    return [
        tables.comparison_table(findings),
        *finals,
        tables.metric_table(frames),
        tables.last_step_table(frames),
        tables.layout_tables(frames),
    ]


def _figures(figures: Mapping[str, Figure]) -> list[Markup]:
    order = [*(name for name in CAPTIONS if name in figures), *(name for name in figures if name not in CAPTIONS)]
    drawn = []
    for name in order:
        caption = CAPTIONS.get(name, "")
        svg = inline_svg(style.svg_text(figures[name]), name, f"{figures[name].get_label()}. {caption}")
        box = element("div", svg, class_="scroll", tabindex="0", role="region", aria_label=name)
        drawn.append(element("figure", box, element("figcaption", caption, SWIPE), id=f"figure-{name}"))
    return drawn


def _all_settings(manifests: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    parts = []
    for name, manifest in manifests.items():
        written = manifest.get("config") or json.dumps(manifest.get("settings") or {}, indent=2, ensure_ascii=False)
        parts.append(element("details", element("summary", f"All settings of {name}"), element("pre", str(written))))
    return parts


def _notes(frames: Frames, findings: Findings, notes: Sequence[str]) -> list[Markup]:
    parts = []
    lists = (
        ("", dict.fromkeys([*findings.notes, *notes])),
        ("Skipped", tables.skipped(frames)),
        ("Noted by the steps", tables.step_notes(frames)),
    )
    for heading, lines in lists:
        if lines:
            parts += [element("h3", heading)] if heading else []
            parts.append(element("ul", *(element("li", line) for line in lines)))
    return parts or [element("p", "Nothing was left out or skipped.")]


def _reproduce(directories: Sequence[Path], manifests: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    commits = dict.fromkeys(
        str(commit) for one in manifests.values() if (commit := (one.get("environment") or {}).get("git_commit"))
    )
    lines = [f"git checkout {shlex.quote(commit)}" for commit in commits]
    lines += dict.fromkeys(filter(None, map(_command, manifests.values())))
    lines.append(shlex.join(["aggcli", "plot", "--html", *map(str, directories)]))
    same = "Same commit, versions, device, threads and processes: the same numbers to the last bit."
    said = f"{same} Everything random comes from the seed."
    return [element("pre", "\n".join(lines)), element("p", said)]


def _command(manifest: Mapping[str, Any]) -> str:
    """The command line that made these records; empty where it was not recorded."""
    arguments = manifest.get("arguments")
    return shlex.join(["aggcli", *map(str, arguments)]) if isinstance(arguments, list) and arguments else ""
