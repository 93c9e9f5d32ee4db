"""Texts of other people's made harmless, whatever they hold: control characters are shown, no text ends a cell or a line."""

from __future__ import annotations

import re
import unicodedata

_ACTS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories whose characters move the cursor, turn the writing direction, end a line or show nothing."""


def visible(text: str, keep: str = "") -> str:
    """The text with what would act shown as its escape: a newline as `\\n`, a terminal's escape as `\\x1b`. `keep`: characters
    that stay.
    """
    return "".join(
        char
        if char in keep or unicodedata.category(char) not in _ACTS
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def in_csv(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    shown = visible(text)
    return f"'{shown}" if shown[:1] in ("=", "+", "-", "@") else shown


def in_markdown(text: str) -> str:
    """Text that Markdown shows as it is, also in a cell of a table."""
    return re.sub(r"[\\|*`<]|(?<=\])\(|(?<!\w)_|_(?!\w)", r"\\\g<0>", visible(text))


def in_latex(text: str) -> str:
    """Text for LaTeX, of packages it needs none."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    signs |= {char: "\\" + char for char in "&%$#_{}"} | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "≥": r"$\geq$"}
    return "".join(signs.get(char, char) for char in visible(text))
