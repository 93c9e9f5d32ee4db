"""What trainers print of a step, in a saved terminal: numbers with the digits that they were printed with.

verl     `step:12 - critic/score/mean:0.5 - response_length/mean:130.25`, also with numpy's `np.float64(0.5)`
slime    `rollout 12: {'rollout/raw_reward': 0.5, ...}`; its lines `step 12: {...}` count optimizer steps and are not read
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VERL = re.compile(r"(?:^|\s)step:(\d+) - (\S.*)$")
_SLIME = re.compile(r"(?:^|\s)rollout (\d+): (\{.*\})\s*$")
_PAIR = re.compile(r"(\S+):(?:np\.\w+\()?([-+\d.einfa]+)\)?", re.IGNORECASE)


def printed_numbers(text: str) -> Iterator[tuple[str, int, float]]:
    """(name, step, number) of every line that is one of these, NaN and infinity among them."""
    for line in _COLOUR.sub("", text).splitlines():
        if found := _VERL.search(line):
            pairs = (_PAIR.fullmatch(part.strip()) for part in found[2].split(" - "))
            numbers = [(pair[1], pair[2]) for pair in pairs if pair is not None]
        elif found := _SLIME.search(line):
            numbers = list(_of_object(found[2]).items())
        else:
            continue
        for name, value in numbers:
            try:
                yield name, int(found[1]), float(value)
            except (ValueError, TypeError, OverflowError):
                continue


def _of_object(text: str) -> dict[str, float]:
    """A printed dictionary's numbers; none where it is cut or holds what is no literal."""
    try:
        found = ast.literal_eval(re.sub(r"\bnan\b", "'nan'", re.sub(r"\binf\b", "'inf'", text)))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(name): value for name, value in found.items() if not isinstance(value, bool)}
