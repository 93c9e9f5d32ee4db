"""HTML as values: whatever is not markup is escaped, so no text of a user's can become a tag.

`element("td", "a < b", class_="text")` gives `<td class="text">a &lt; b</td>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

_SHORT = 44
"""Texts of table cells up to this many characters are not broken into lines."""
_VOID = frozenset({"br", "hr", "meta", "link", "wbr"})
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_BREAK = re.compile(r"(?<=[_/:])(?=.)")
"""Where a name may go on in the next line; no character reference holds one of these."""
_ID = re.compile(r'(\sid="|url\(#|(?:xlink:)?href="#)')
_SIZE = re.compile(r'<svg [^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', re.DOTALL)


def text(value: str) -> Markup:
    """Escaped text; characters that no HTML document may hold become U+FFFD."""
    return escape(_CONTROL.sub("\ufffd", value))


def join(parts: Iterable[str], between: str = "\n") -> Markup:
    """The parts in a row; those that are no markup are escaped."""
    return Markup(between.join(part if isinstance(part, Markup) else text(part) for part in parts))


def element(tag: str, *children: str, **attributes: str | bool | None) -> Markup:
    """A tag with its children. `class_` is written `class`, other underscores as hyphens; None and False leave one out."""
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(children, '')}</{tag}>")


SWIPE = element("span", " (Swipe sideways to see all of it.)", class_="swipe")
"""Shown on narrow screens; `page.js` hides it again where the box beside it is not cut."""


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number and how it is shown; None is a blank cell, and `small` the lines under it."""

    value: float | None
    shown: str
    small: str = ""


Cell = str | Number


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]], groups: Sequence[str] | None = None) -> Markup:
    """A table that scrolls inside itself and sorts by a click; a column of numbers is right-aligned, `data-value` in full.

    `groups`: of each row, where sorting by a column keeps the rows of a group together, since only they have one unit.
    """
    body = [list(row) for row in rows]
    own = groups if groups is not None else [None] * len(body)
    numeric = [any(isinstance(row[at], Number) for row in body) for at in range(len(heads))]
    top = (
        element("th", head, scope="col", class_="num" if number else None) for head, number in zip(heads, numeric, strict=True)
    )
    drawn_rows = [
        join([element("tr", *map(_cell, row), data_group=group), Markup("\n")], "")
        for row, group in zip(body, own, strict=True)
    ]
    drawn = element(
        "table",
        element("thead", element("tr", *top)),
        Markup("\n"),
        element("tbody", Markup("\n"), *drawn_rows),
        class_="sortable",
        aria_label=caption,
    )
    said = element("p", caption, SWIPE, class_="caption")
    return join([said, element("div", drawn, class_="scroll", tabindex="0", role="region", aria_label=caption)])


def _cell(cell: Cell) -> Markup:
    if isinstance(cell, str):
        return element("td", Markup(_BREAK.sub("<wbr>", text(cell))), class_="text" if len(cell) > _SHORT else None)
    small = [element("small", line) for line in cell.small.splitlines()]
    return element("td", cell.shown, *small, class_="num", data_value=None if cell.value is None else repr(cell.value))


# -- figures ----------------------------------------------------------------------------------------------------------


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
    head = f'<svg viewBox="0 0 {width} {height}" width="{pixels:.0f}" role="img" aria-label="{text(label)}">'
    return Markup(head + content)
