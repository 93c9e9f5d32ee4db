"""The fast way into a batch for samples whose every field is of the plainest kind, many at a time.

A field of all samples is looked at with a few calls instead of a few per sample, which is what reading a million of them
takes. What this path does not take, the builder adds one by one; that accepts more and says what is wrong. The two give
the same numbers.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from aggcli.rollouts.fields import LONGEST

if TYPE_CHECKING:
    from aggcli.rollouts.columns import DenseIds

Rows = Sequence[Mapping[str, Any]]

NONE = type(None)
UNCHECKED = 2**20
"""Tokens of a response for which memory is taken without a look at what the file holds of it."""
RARE = ("remove_sample", "length_unit")
"""Fields that only the slower way knows."""


class NotPlainError(Exception):
    """Some sample has a field that is not of the plainest kind."""


@dataclass(frozen=True)
class PlainPath:
    """The builder's own growing arrays, and which optional fields its samples have.

    `given` fields must be on every further sample, `absent` ones on none. `token_ids_U` is None where samples lack ids.
    """

    given: dict[str, array[float]]
    absent: list[str]
    response_length_S: array[int]
    total_length_S: array[int]
    loss_mask_T: bytearray
    reward_S: array[float]
    token_ids_U: array[int] | None
    rollouts: DenseIds
    groups: DenseIds
    status_S: list[str | None]
    statuses: dict[str, str]

    def add(self, rows: Rows) -> bool:
        """Add the samples; False, and nothing added, where one of them is not plain."""
        try:
            lengths = _typed(rows, "response_length", {int})
            ids, totals = self._ids(rows)
            if min(lengths) < 0 or max(totals) > LONGEST or not all(map(operator.le, lengths, totals)):
                return False
            if max(lengths) > UNCHECKED and ids is None and not self.given:
                return False  # whether the file backs so long a response is looked at before memory is taken for it
            if not set().union(*rows).isdisjoint((*self.absent, *RARE)) and self._has_unexpected(rows):
                return False
            bits, rewards = _bits(rows, lengths), _rewards(rows)
            rollouts, groups = (_typed(rows, field, {int, str, NONE}) for field in ("rollout_id", "group_index"))
            statuses = _typed(rows, "status", {str, NONE})
            for field, values_T in self.given.items():
                values_T.fromlist(_flat(rows, field, lengths))  # adds all of a list, or raises and adds nothing
            if self.token_ids_U is not None and ids is not None:
                self.token_ids_U.fromlist(list(chain.from_iterable(ids)))
        except (NotPlainError, TypeError, ValueError, OverflowError):  # of the arrays: something that is no number
            self._drop_begun()
            return False
        self.loss_mask_T.extend(bits)
        self.response_length_S.fromlist(lengths)
        self.total_length_S.fromlist(totals)
        self.reward_S.fromlist(rewards)
        self.rollouts.add_all(rollouts)
        self.groups.add_all(groups)
        self.status_S.extend([status and self.statuses.setdefault(status, status) for status in statuses])
        return True

    def _drop_begun(self) -> None:
        """Take back what was added of samples that are not plain after all."""
        for values_T in self.given.values():
            del values_T[len(self.loss_mask_T) :]

    def _ids(self, rows: Rows) -> tuple[list[list[int]] | None, list[int]]:
        """Token ids, None where samples lack them, and total lengths."""
        totals = _column(rows, "total_length")
        if self.token_ids_U is None:
            _typed(rows, "tokens", {NONE})
            return None, _typed(rows, "total_length", {int})
        ids = _typed(rows, "tokens", {list})
        counts = list(map(len, ids))
        if totals.count(None) < len(rows) and (totals != counts or set(map(type, totals)) != {int}):
            raise NotPlainError
        return ids, counts

    def _has_unexpected(self, rows: Rows) -> bool:
        return any(row.get(field) is not None for field in (*self.absent, *RARE) for row in rows)


def _column(rows: Rows, field: str) -> list[Any]:
    return [row.get(field) for row in rows]


def _typed(rows: Rows, field: str, kinds: set[type]) -> list[Any]:
    """The field of each sample, which must be of one of these very types: True is no int."""
    values = [row.get(field) for row in rows]
    if not kinds.issuperset(map(type, values)):
        raise NotPlainError
    return values


def _flat(rows: Rows, field: str, lengths: list[int]) -> list[Any]:
    """The elements of a list field, sample after sample; each list must have one per response token."""
    lists = _typed(rows, field, {list})
    if list(map(len, lists)) != lengths:
        raise NotPlainError
    return list(chain.from_iterable(lists))


def _bits(rows: Rows, lengths: list[int]) -> bytes:
    """Loss masks, one byte per token; a missing one is all ones."""
    masks = _typed(rows, "loss_mask", {list, NONE})
    if None in masks:
        masks = [[1] * length if mask is None else mask for mask, length in zip(masks, lengths, strict=True)]
    if list(map(len, masks)) != lengths:
        raise NotPlainError
    bits = bytes(list(chain.from_iterable(masks)))
    if bits.count(0) + bits.count(1) != len(bits):
        raise NotPlainError
    return bits


def _rewards(rows: Rows) -> list[float]:
    """Rewards that are finite numbers; NaN for null."""
    scores = _typed(rows, "reward", {float, int, NONE})
    if None not in scores:
        if not all(map(math.isfinite, scores)):
            raise NotPlainError
        return scores
    if not all(score is None or math.isfinite(score) for score in scores):
        raise NotPlainError
    return [math.nan if score is None else score for score in scores]
