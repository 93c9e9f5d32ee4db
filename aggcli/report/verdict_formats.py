"""A verdict for the terminal, Markdown, LaTeX, JSON and one line at a time: the answer, and lists under it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aggcli.analysis.verdict import Verdict
from aggcli.report.escapes import in_markdown, visible
from aggcli.report.folding import folded


def verdict_text(found: Verdict, width: int) -> str:
    """For the terminal: paragraphs, of the answer a sentence a line, and lists, whose lines are indented."""
    blocks = [folded(one, width) for one in _warnings(found)]
    blocks.append("\n".join(folded(one, width) for one in found.answer.sentences))
    for heading, lines in found.lists:
        listed = [folded(line, width, "  ", "      ") for line in lines]
        blocks.append("\n".join([folded(f"{_sentence(heading)}:", width), *listed]))
    return "\n\n".join(blocks)


def verdict_markdown(found: Verdict) -> str:
    """Paragraphs and bullet lists."""
    blocks = [*map(in_markdown, (*_warnings(found), found.answer.text))]
    for heading, lines in found.lists:
        blocks += [in_markdown(f"{_sentence(heading)}:"), "\n".join(f"- {in_markdown(line)}" for line in lines)]
    return "\n\n".join(filter(None, blocks))


def verdict_comments(found: Verdict) -> str:
    """LaTeX comments."""
    return "\n".join(f"% {visible(line)}" for line in verdict_lines(found))


def verdict_lines(found: Verdict) -> list[str]:
    """Warnings and answer, then each heading and each line of its list."""
    told = [*_warnings(found), found.answer.text]
    for heading, lines in found.lists:
        told += [f"{_sentence(heading)}:", *(f"- {line}" for line in lines)]
    return told


def verdict_json(found: Verdict) -> dict[str, Any]:
    """`warnings`, and `lines`: what is compared where, mode, word, difference, p-values, what could have been shown, and the
    text as it is printed; a line without a test is its text alone.
    """
    lines: list[dict[str, Any]] = []
    for ranking in found.rankings:
        about = {"axis": ranking.axis, "outcome": ranking.outcome, "heading": ranking.heading, "baseline": ranking.baseline}
        for standing in ranking.standings:
            if standing.word != "baseline":
                numbers = asdict(standing)
                lines.append({**about, "mode": numbers.pop("label"), **numbers})
    if found.remarks is not None:
        heading, texts = found.remarks
        lines += [{"heading": heading, "text": text} for text in texts]
    return {"warnings": list(found.warnings), "lines": lines}


def _warnings(found: Verdict) -> list[str]:
    """What stands before the answer."""
    return [f"Warning: {one}." for one in found.warnings]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
