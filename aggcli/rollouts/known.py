"""The keys of the plain format: which are read, which may stand there unread, and what is said of any other.

The rule. A key that nobody reads is named once, with the nearest key that is read. It is refused where it is a misspelling
or another trainer's name of a field that changes numbers and the sample has not that field itself: what is then computed
would be another number, without a word. Null values say nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from aggcli.errors import RolloutError

TOKEN_LISTS = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy")
"""Fields that hold one number per response token."""
COUNTED = (
    "group_index",
    "rollout_id",
    "response_length",
    "loss_mask",
    "reward",
    "advantage",
    "remove_sample",
    *TOKEN_LISTS,
)
"""Fields from which numbers are made."""
FIELDS = (*COUNTED, "tokens", "total_length", "prompt", "status", "length_unit")
"""Every field that is read."""
COMPANIONS = ("index", "response", "label", "metadata", "id")
"""Keys that say nothing about the numbers: texts and what a trainer keeps beside them."""
ELSEWHERE = {
    "logprobs": "log_probs",
    "response_mask": "loss_mask",
    "completion_mask": "loss_mask",
    "action_mask": "loss_mask",
    "old_per_token_logps": "old_log_probs",
    "ref_per_token_logps": "ref_log_probs",
    "sampling_per_token_logps": "rollout_log_probs",
    "inference_logprobs": "rollout_log_probs",
    "generation_logprobs": "rollout_log_probs",
    "old_log_prob": "old_log_probs",
    "ref_log_prob": "ref_log_probs",
    "score": "reward",
    "completion_length": "response_length",
}
"""Other trainers' names of fields from which numbers are made."""
RELATED = {
    "completion_ids": "tokens",
    "response_ids": "tokens",
    "input_ids": "tokens",
    "token_ids": "tokens",
    "prompt_ids": "tokens",
    "prompt_id": "group_index",
    "prompt_index": "group_index",
    "group_id": "group_index",
    "uid": "group_index",
    "truncated": "status",
    "finish_reason": "status",
    "completion": "response",
}
"""Other names that may, or may not, mean what the field does."""
STEP = ("step", "global_step", "iteration")


class Unread:
    """The keys of a file's samples that nobody reads. `name` is the batch's, for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known = frozenset((*FIELDS, *COMPANIONS))
        self._found: dict[str, str | None] = {}

    def look(self, rows: Sequence[tuple[int | None, Mapping[str, object]]], first: int) -> None:
        """Look at further samples, each with its line's number, the first being sample `first`. Raises `RolloutError`."""
        unknown = set().union(*(row for _, row in rows)) - self._known - self._found.keys()
        for key in sorted(unknown, key=str):
            for at, (line, row) in enumerate(rows):
                if row.get(key) is None:
                    continue
                field, changes_numbers = meant(str(key))
                if changes_numbers and field is not None and row.get(field) is None:
                    where = f"sample {first + at}" + (f" (line {line})" if line is not None else "")
                    raise RolloutError(
                        f"{self._name}, {where}: key '{key}' is not read, and {field} is missing; did you mean '{field}'?"
                        " rename the key, or drop it"
                    )
                self._found[key] = field
                break

    def notes(self) -> list[str]:
        """One line on all keys that were not read."""
        if not self._found:
            return []
        said = [f"{key} (nearest: {field})" if field else key for key, field in self._found.items()]
        each = "; each file is one step" if any(key in STEP for key in self._found) else ""
        return [f"keys that are not read: {', '.join(said[:8])}{' ...' if len(said) > 8 else ''}{each}"]


def meant(key: str) -> tuple[str | None, bool]:
    """The field that a key may mean, and whether the two are one, so that without the key the numbers would be others."""
    bare = _bare(key)
    for field in COUNTED:
        if bare == _bare(field) or ELSEWHERE.get(key.lower()) == field:
            return field, True
    if key.lower() in RELATED:
        return RELATED[key.lower()], False
    bares = {_bare(field): field for field in FIELDS}
    close = difflib.get_close_matches(bare, bares, n=1, cutoff=0.8)
    if not close:
        return None, False
    return bares[close[0]], bares[close[0]] in COUNTED


def _bare(key: str) -> str:
    return "".join(letter for letter in key.lower() if letter.isalnum())
