"""What a page's template is given: tables and figures as values, and text that can hold no tag.

The template escapes whatever is not `Markup`; here are the characters that no HTML document may hold, and where names break.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_BREAK = re.compile(r"(?<=[_/:])(?=.)")
"""Where a name may go on in the next line; no character reference holds one of these."""
_ID = re.compile(r'(\sid="|url\(#|(?:xlink:)?href="#)')
_SIZE = re.compile(r'<svg [^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', re.DOTALL)


def environment() -> Environment:
    """jinja2 with everything escaped, no control characters, no undefined names, and the filter `breakable`."""
    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: _clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    made.filters["breakable"] = lambda value: Markup(_BREAK.sub("<wbr>", escape(_clean(value))))
    return made


def _clean(text: str) -> str:
    """The text with U+FFFD for characters that no HTML document may hold."""
    return _CONTROL.sub("\ufffd", text)


@dataclass(frozen=True)
class Number:
    """A number and how it is shown; None is a blank cell, and `small` the lines under it."""

    value: float | None
    shown: str
    small: str = ""


Cell = str | Number


@dataclass(frozen=True)
class Table:
    """`groups`: of each row, where sorting by a column keeps the rows of a group together, since only they have one unit;
    `numeric`: of each column, whether it holds numbers, which are right-aligned.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[str] = ()
    numeric: Sequence[bool] = field(init=False)

    def __post_init__(self) -> None:
        columns: Iterable[Any] = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.heads)
        numeric = [any(isinstance(cell, Number) for cell in column) for column in columns]
        object.__setattr__(self, "numeric", numeric)


@dataclass(frozen=True)
class Picture:
    """A figure of the page. `narrow`: the same for a narrow screen, where it has one."""

    name: str
    title: str
    caption: str
    svg: Markup
    narrow: Markup | None = None


def inline_svg(svg: str, name: str, label: str) -> Markup:
    """matplotlib's SVG as a part of a page: no prologue, metadata, namespaces or style sheet, and ids that no other figure has.

    `label`: what a screen reader says instead.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    found = _SIZE.match(body)
    if found is None:
        raise ValueError(f"figure {name}: matplotlib wrote an <svg> without a viewBox")
    width, height = found.groups()
    content = _ID.sub(rf"\g<1>{name}-", body[found.end() :]).replace("xlink:href", "href").rstrip()
    pixels = float(width) * 96 / 72
    head = f'<svg viewBox="0 0 {width} {height}" width="{pixels:.0f}" role="img" aria-label="{escape(_clean(label))}">'
    return Markup(head + content)
