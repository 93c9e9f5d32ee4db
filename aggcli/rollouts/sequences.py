"""Dumps whose per-token lists run over prompt and response together: the response is what follows the prompt.

No such format says where the response begins, but none trains on the prompt, so it begins at the first trained token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError, counted, listed, token_ids
from aggcli.rollouts.texts import PromptGroups


@dataclass(frozen=True)
class Response:
    """The canonical fields of a response, and its prompt: the ids in front of it, None where they are not known."""

    fields: dict[str, object]
    prompt: tuple[int, ...] | None


def response_part(
    row: Mapping[str, object], names: Mapping[str, str], *, mask: str, ids: str, length: int | None = None
) -> Response:
    """The part of the lists of `row` that belongs to the response, under the canonical `names`.

    `mask` and `ids` are the keys of the loss mask and the token ids; `length` is the sequence's length without padding
    behind it, by default that of the mask. A sequence without a trained token has a response of length 0. Raises
    `FieldError` for a list that is missing or shorter than the sequence.
    """
    mask_list = listed(row.get(mask), mask)
    if mask_list is None:
        raise FieldError(f"{mask} is missing: without it nobody knows where the response begins")
    end = len(mask_list) if length is None else length
    lists = {theirs: listed(row.get(theirs), theirs) for theirs in (mask, ids, *names)}
    for theirs, values in lists.items():
        if values is not None and len(values) < end:
            raise FieldError(f"{theirs} has {len(values)} values but the sequence {end} tokens: must have one per token")
    start = next((i for i, bit in enumerate(mask_list[:end]) if bit), end)
    cut = {ours: values[start:end] for theirs, ours in names.items() if (values := lists[theirs]) is not None}
    tokens = lists[ids]
    fields = {
        "response_length": end - start,
        "total_length": end,
        "loss_mask": mask_list[start:end],
        "tokens": None if tokens is None else tokens[:end],
        **{ours: None if values and all(value is None for value in values) else values for ours, values in cut.items()},
    }
    return Response(fields, None if tokens is None or start == end else prompt_of(tokens[:start]))


def prompt_of(ids: list) -> tuple[int, ...]:
    """The ids of a prompt; raises `FieldError` for what is no token id."""
    return tuple(token_ids(ids))


class Sequences:
    """Adds such samples to a builder, grouped by identical prompt."""

    def __init__(self, builder: BatchBuilder, group_size: int | None) -> None:
        self._builder, self._groups, self._empty = builder, PromptGroups(builder, group_size), 0

    def add(self, response: Response, where: str | int | None = None, **fields: object) -> None:
        """Add a sample, with further fields; a group_index among them that is not null is the file's own."""
        group = fields.pop("group_index", None)
        if group is not None or response.prompt is not None:
            group = self._groups.of(response.prompt, group)
        self._empty += response.fields["response_length"] == 0
        self._builder.add({**response.fields, "group_index": group, **fields}, where)

    def close(self) -> None:
        """Note what had to be assumed."""
        self._groups.close()
        if self._empty:
            samples = counted(self._empty, "sample has", "samples have")
            self._builder.notes.append(f"{samples} no trained token: where the response began is not known, length 0")
