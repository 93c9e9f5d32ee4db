"""Words for bash, which breaks them at colons and equals signs: `verl:to` reaches a completion as three, and it keeps two."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence

_BREAKS = (":", "=")


@contextlib.contextmanager
def whole_words() -> Iterator[None]:
    """Inside, what bash asks for is in whole words; of the answers printed there, what bash keeps is left out."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    if os.environ.get("_AGGCLI_COMPLETE") != "complete_bash" or len(words) < 2:
        yield
        return
    joined, at, kept = _joined(words, int(os.environ["COMP_CWORD"]))
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(at)}
    answers = io.StringIO()
    try:
        with contextlib.redirect_stdout(answers):
            yield
    finally:
        print("\n".join(line.removeprefix(kept) for line in answers.getvalue().splitlines()))


def _joined(words: Sequence[str], at: int) -> tuple[list[str], int, str]:
    """The words put together again, the place of the one that is completed, and what comes before its last colon."""
    joined: list[str] = []
    broken = False
    for number, word in enumerate(words[: at + 1]):
        sign = word in _BREAKS
        if number > 1 and (sign or broken):
            joined[-1] += word
        else:
            joined.append(word)
        broken = sign
    value = joined[-1].partition("=")[2] if joined[-1].startswith("--") else joined[-1]
    kept, colon, _ = value.rpartition(":")
    return joined, len(joined) - 1, kept + colon if words[at] != value else ""
