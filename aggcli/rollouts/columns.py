"""The growing columns of a batch under construction: per-token numbers and dense ids, in flat arrays."""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from aggcli.errors import RolloutError
from aggcli.rollouts.batch import NO_GROUP
from aggcli.rollouts.fields import counted, identifier


class TokenColumn:
    """One optional per-token field; NaN stands where a fully masked sample lacks it."""

    def __init__(self, name: str, field: str) -> None:
        self._name, self._field = name, field
        self.values_T = array("d")
        self._skipped = 0  # tokens of the samples before the first that has the field
        self._given: str | None = None
        self._lacking: str | None = None

    def add(self, values: array[float], label: str) -> None:
        if self._given is None:
            self._given = label
            self._check()
            self.values_T = array("d", [math.nan]) * self._skipped
        self.values_T += values

    def lack(self, length: int, may_lack: bool, label: str) -> None:
        if not may_lack and self._lacking is None:
            self._lacking = label
            self._check()
        if self._given is None:
            self._skipped += length
        else:
            self.values_T += array("d", [math.nan]) * length

    def _check(self) -> None:
        if self._given is not None and self._lacking is not None:
            raise RolloutError(
                f"{self._name}, {self._lacking}: {self._field} is missing but {self._given} has it; give it on every"
                " sample (only fully masked ones may lack it), or on none"
            )

    @property
    def settled(self) -> bool | None:
        """True: further samples must have the field; False: none may; None: not known yet."""
        if self._given is not None:
            return True
        return None if self._lacking is None else False

    def tensor(self) -> Tensor | None:
        return None if self._given is None else tensor(self.values_T, torch.float64)


class DenseIds:
    """Ids numbered in order of first appearance; null is -1."""

    def __init__(self, field: str) -> None:
        self._field = field
        self.dense: dict[int | str, int] = {}
        self.ids_S = array("q")

    def add(self, value: object) -> None:
        if value is None:
            self.ids_S.append(NO_GROUP)
            return
        key = value if type(value) is int and -(2**63) <= value < 2**63 else identifier(value, self._field)
        self.ids_S.append(self.dense.setdefault(key, len(self.dense)))

    def add_all(self, keys: list[int | str | None]) -> None:
        """Add ids of exactly these types, many at a time."""
        dense = self.dense
        for key in dict.fromkeys(keys):
            if key is not None and key not in dense:
                dense[key] = len(dense)
        if None in keys:
            self.ids_S.extend(NO_GROUP if key is None else dense[key] for key in keys)
        else:
            self.ids_S.extend(map(dense.__getitem__, keys))  # pyright: ignore[reportArgumentType]  # none is None


def tensor(values: array | bytearray, dtype: torch.dtype) -> Tensor:
    """The array's memory as a tensor, not copied."""
    return torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)


def sampler_note(drawn: TokenColumn, loss_mask_T: bytearray, length_S: array[int]) -> list[str]:
    """One line where a trained token was drawn with a log-probability of exactly 0, which means certainty.

    Among others it is a token that was added after sampling; where all are 0, they were drawn at temperature 0.
    """
    drawn_T = drawn.tensor()
    if drawn_T is None:
        return []
    trained_T = tensor(loss_mask_T, torch.bool)
    zero_T = trained_T & (drawn_T == 0)
    zeros = int(zero_T.sum())
    if not zeros or zeros == int(trained_T.sum()):
        return []
    token, sample = int(zero_T.nonzero()[0]), 0
    while token >= length_S[sample]:
        token, sample = token - length_S[sample], sample + 1
    return [
        f"{counted(zeros, 'trained token has', 'trained tokens have')} a sampler log-prob of exactly 0 (the first: sample"
        f" {sample}, token {token}), as a token has that was added after sampling; if so, mask it out: sampler_mismatch counts"
        " it"
    ]
