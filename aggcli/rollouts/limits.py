"""How much a file may make a reader hold, against the file's own size; a few bytes can otherwise ask for all memory.

What a file spells out is never refused for its size. What it only names is: a length without tokens, a list held once and
used a million times, a range, a tensor that repeats its storage, compressed bytes. The environment variable
`AGGCLI_READ_LIMIT` (a number, default 1) multiplies every limit but the depth of nesting.
"""

from __future__ import annotations

import os

from aggcli.errors import SettingError

VARIABLE = "AGGCLI_READ_LIMIT"

ENTRIES = 2**25
"""Entries of lists, tensors and ranges that a file may stand for beyond one a byte."""
UNPACKED = 2**29
"""Bytes that compressed content may unpack to beyond ten times its own size."""
BARE_LENGTH = 10**7
"""Tokens of a sample of which the file holds the length and no per-token list."""
BARE_TOKENS = 2**27
"""The same, of all samples of a step together, beyond one a byte of texts; each takes nine bytes or more."""
NESTED = 32
"""How deep lists and objects of a dump may be nested."""


def limit(value: int) -> int:
    """The limit in force; raises `SettingError` for a multiplier that is no positive number."""
    text = os.environ.get(VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 2**30:
        raise SettingError(f"{VARIABLE}='{text}': must be a positive number, which multiplies the limits of reading")
    return int(value * factor)


def raised() -> str:
    """How a message says what to do about a limit."""
    return f"if that is meant, raise the limits with {VARIABLE}=10"
