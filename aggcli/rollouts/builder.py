"""Samples in, one `RolloutBatch` out: the rules every recorded format shares, whatever it calls its fields.

The builder streams: each sample goes into flat arrays at once and its dict is let go, so a file costs little more
memory than the batch made from it.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from aggcli.errors import RolloutError, some
from aggcli.rollouts.batch import NO_GROUP, Labels, RecordedLayout, RolloutBatch, group_of_rollout
from aggcli.rollouts.columns import DenseIds, TokenColumn, sampler_note, tensor
from aggcli.rollouts.fields import (
    FieldError,
    advantage_of,
    counted,
    floats,
    listed,
    mask_bits,
    response_length_of,
    reward,
    shown,
    token_ids,
    total_length_of,
)
from aggcli.rollouts.known import TOKEN_LISTS
from aggcli.rollouts.limits import BARE_LENGTH, BARE_TOKENS, limit, raised
from aggcli.rollouts.plain import PlainPath

UNITS = ("tokens", "chars", "words")
"""What lengths may count."""


class BatchBuilder:
    """Builds the batch called `name` from samples in the canonical fields, in file order.

    `reward_key` is the entry of a reward that is an object; `group_size` groups that many consecutive rollouts where no
    sample has a group_index. `notes` are the batch's notes; a reader may add its own before `build`, and
    set `length_unit` where lengths are not tokens, `grouping` where groups are assumed, and `text_bytes`, the size of the file,
    where lengths are counted from texts in it.
    """

    def __init__(self, name: str, *, reward_key: str | None = None, group_size: int | None = None) -> None:
        self.name = name
        self.notes: list[str] = []
        self.length_unit = "tokens"
        self.grouping: str | None = None
        self._reward_key, self._group_size = reward_key, group_size
        self._counts: Counter[str] = Counter()
        self._response_length_S, self._total_length_S = array("q"), array("q")
        self._loss_mask_T = bytearray()
        self._reward_S, self._has_reward = array("d"), False
        self._token_ids_U, self._lacking_ids = array("q"), 0
        self._rollouts, self._groups = DenseIds("rollout_id"), DenseIds("group_index")
        self._status_S: list[str | None] = []
        self._statuses: dict[str, str] = {}
        self._columns = {field: TokenColumn(name, field) for field in (*TOKEN_LISTS, "advantage")}
        self._plain: PlainPath | None = None
        self._bare_tokens = 0
        self.text_bytes = 0

    def __len__(self) -> int:
        return len(self._response_length_S)

    # -- one sample -------------------------------------------------------------------------------------------------

    def add(self, sample: Mapping[str, object], where: str | int | None = None) -> None:
        """Add one sample; `where` (a line's number, or a text such as `rank_0.jsonl, line 7`) helps the user find it.

        Raises `RolloutError` naming the sample and the field when a field is of the wrong type, contradicts another, or
        is given on some samples only.
        """
        if isinstance(where, int):
            where = f"line {where}"
        label = f"sample {len(self)}" if where is None else f"sample {len(self)} ({where})"
        try:
            self._add(sample, label)
        except FieldError as error:
            raise RolloutError(f"{self.name}, {label}: {error}") from None
        self._plain = None

    def add_rows(self, rows: Sequence[tuple[int | None, Mapping[str, object]]]) -> None:
        """Add many samples, each with its line's number, as `add` would one by one, but the plain ones much faster.

        Where not all are plain, halves of them are tried, so that one odd sample does not slow down the rest.
        """
        if not rows:
            return
        plain = self._plain = self._plain or self._plain_path()
        if plain is not None and plain.add([row for _, row in rows]):
            self._lacking_ids += len(rows) if plain.token_ids_U is None else 0
            if plain.token_ids_U is None and not plain.given:
                self._add_bare(sum(self._response_length_S[-len(rows) :]))
            return
        if plain is None or len(rows) == 1:
            where, sample = rows[0]
            self.add(sample, where)
            self.add_rows(rows[1:])
            return
        half = len(rows) // 2
        self.add_rows(rows[:half])
        self.add_rows(rows[half:])

    def _add(self, sample: Mapping[str, object], label: str) -> None:
        get = sample.get
        lists = {field: listed(get(field), field) for field in TOKEN_LISTS}
        lists["advantage"], advantage = advantage_of(get("advantage"))
        mask, ids = listed(get("loss_mask"), "loss_mask"), listed(get("tokens"), "tokens")
        length, origin = response_length_of(get("response_length"), lists, mask)
        total = total_length_of(get("total_length"), ids, get("prompt"), length)
        if mask is None and ids is None and not any(lists.values()):
            if length > limit(BARE_LENGTH):
                raise FieldError(f"response_length is {length}, and the file holds nothing of those tokens; {raised()}")
            self._add_bare(length)
        for field, values in lists.items():
            if values is not None and len(values) != length:
                raise FieldError(f"{field} has {len(values)} values but {origin} {length}: must have one per response token")
        bits = self._loss_mask(mask, length, total, origin)
        if get("remove_sample") is True:
            self._counts["removed"] += 1
            bits = bytes(length)
        may_lack = 1 not in bits  # no trained token: nothing of it is ever read

        for field, column in self._columns.items():
            values = lists[field]
            if values is not None:
                if None in values:
                    self._need_no_null(field, values, bits)
                column.add(floats(values, field), label)
            elif field == "advantage" and advantage is not None:
                column.add(array("d", [advantage]) * length, label)
            else:
                column.lack(length, may_lack, label)
        self._add_unit(get("length_unit"))
        self._add_reward(get("reward"))
        self._add_status(get("status"))
        self._add_ids(ids)
        self._rollouts.add(get("rollout_id"))
        self._groups.add(get("group_index"))
        self._loss_mask_T += bits
        self._total_length_S.append(total)
        self._response_length_S.append(length)

    def _add_bare(self, tokens: int) -> None:
        """Count tokens of which the file holds a length only, before memory is taken for them."""
        self._bare_tokens += tokens
        if self._bare_tokens > limit(BARE_TOKENS) + self.text_bytes:
            raise RolloutError(f"{self.name}: holds nothing of its {self._bare_tokens:.3g} tokens but lengths; {raised()}")

    def _need_no_null(self, field: str, values: list, bits: bytes) -> None:
        token = next((i for i, (value, bit) in enumerate(zip(values, bits, strict=True)) if value is None and bit), None)
        if token is not None:
            raise RolloutError(
                f"{self.name}, sample {len(self)}, token {token}: {'advantages' if field == 'advantage' else field} is null"
                " where loss_mask is 1; mask the token out or drop the sample"
            )

    def _plain_path(self) -> PlainPath | None:
        """How further samples can be added fast, once it is known which fields samples have."""
        settled = {field: column.settled for field, column in self._columns.items()}
        if None in settled.values():
            return None
        absent = [field for field, given in settled.items() if not given]
        return PlainPath(
            given={field: column.values_T for field, column in self._columns.items() if settled[field]},
            absent=absent if self._has_reward else [*absent, "reward"],
            response_length_S=self._response_length_S,
            total_length_S=self._total_length_S,
            loss_mask_T=self._loss_mask_T,
            reward_S=self._reward_S,
            token_ids_U=None if self._lacking_ids else self._token_ids_U,
            rollouts=self._rollouts,
            groups=self._groups,
            status_S=self._status_S,
            statuses=self._statuses,
        )

    def _loss_mask(self, mask: list | None, length: int, total: int, origin: str) -> bytes:
        """One byte per response token; a mask over prompt and response loses the prompt's part."""
        if mask is None:
            return b"\1" * length
        if len(mask) == length:
            return mask_bits(mask)
        if len(mask) != total:
            raise FieldError(
                f"loss_mask has {len(mask)} entries but {origin} {length} (total_length {total}): must have one per"
                " response token"
            )
        self._counts["sliced"] += 1
        return mask_bits(mask)[total - length :]

    def _add_reward(self, value: object) -> None:
        self._has_reward |= value is not None
        score, form = reward(value, self._reward_key)
        if form is not None:
            self._counts[form] += 1
        self._reward_S.append(score)

    def _add_unit(self, value: object) -> None:
        """A file converted from texts says on each sample what its lengths count."""
        if value is None:
            return
        if value not in UNITS or (len(self) and value != self.length_unit):
            raise FieldError(f"length_unit is {shown(value)}: must be one of {', '.join(UNITS)}, the same on every sample")
        self.length_unit = str(value)

    def _add_status(self, value: object) -> None:
        if value is not None and not isinstance(value, str):
            raise FieldError(f"status is {shown(value)}: must be a text or null")
        self._status_S.append(value and self._statuses.setdefault(value, value))  # a million samples, a handful of texts

    def _add_ids(self, values: list | None) -> None:
        if values is None:
            self._lacking_ids += 1
            self._token_ids_U = array("q")  # of no use any more
            return
        ids = token_ids(values)
        if not self._lacking_ids:
            self._token_ids_U += ids

    # -- the batch --------------------------------------------------------------------------------------------------

    def build(self, *, recorded: RecordedLayout | None = None) -> RolloutBatch:
        """The batch of all samples added; call once.

        Raises `RolloutError` when there are no samples, when rollout_id is null on some samples only, when the rollouts
        do not divide into groups of `group_size`, and for whatever `RolloutBatch` refuses.
        """
        samples = len(self)
        if not samples:
            why = f" ({'; '.join(self.notes)})" if self.notes else ""
            raise RolloutError(f"{self.name} holds no samples{why}; give a file with at least one")
        rollout_S = self._dense_rollouts()
        group_S, groups = self._dense_groups(rollout_S)
        has_ids = not self._lacking_ids
        return RolloutBatch(
            response_length_S=tensor(self._response_length_S, torch.int64),
            total_length_S=tensor(self._total_length_S, torch.int64),
            loss_mask_T=tensor(self._loss_mask_T, torch.bool),
            rollout_S=rollout_S,
            group_S=group_S,
            run_S=torch.zeros(samples, dtype=torch.int64),
            position_S=torch.arange(samples),
            reward_S=tensor(self._reward_S, torch.float64) if self._has_reward else None,
            log_probs_T=self._columns["log_probs"].tensor(),
            old_log_probs_T=self._columns["old_log_probs"].tensor(),
            ref_log_probs_T=self._columns["ref_log_probs"].tensor(),
            rollout_log_probs_T=self._columns["rollout_log_probs"].tensor(),
            entropy_T=self._columns["entropy"].tensor(),
            advantages_T=self._columns["advantage"].tensor(),
            token_ids_U=tensor(self._token_ids_U, torch.int64) if has_ids else None,
            status_S=tuple(self._status_S) if self._statuses else None,
            labels=Labels(rollouts=tuple(self._rollouts.dense), groups=groups),
            recorded=recorded,
            name=self.name,
            length_unit=self.length_unit,
            grouping=self.grouping,
            notes=(*self._unit_note(), *self.notes, *self._field_notes()),
        )

    def _dense_rollouts(self) -> Tensor:
        rollout_S = np.frombuffer(self._rollouts.ids_S, dtype=np.int64)
        missing = np.flatnonzero(rollout_S < 0)
        if not missing.size:
            return tensor(self._rollouts.ids_S, torch.int64)
        if missing.size < rollout_S.size:
            raise RolloutError(
                f"{self.name}: rollout_id is null on samples {some(missing.tolist())} but given on others; give every"
                " sample the id of its rollout, or none"
            )
        self.notes.append("rollout_id is null on every sample: each sample is its own rollout")
        return torch.arange(len(self))

    def _dense_groups(self, rollout_S: Tensor) -> tuple[Tensor, tuple[object, ...]]:
        group_S, labels = tensor(self._groups.ids_S, torch.int64), tuple(self._groups.dense)
        size = self._group_size
        if labels:
            if size is not None:
                self.notes.append(f"--group-size {size} is ignored: the file has group_index")
            own = int((group_S == NO_GROUP).sum())
            group_S = group_of_rollout(group_S, rollout_S)
            missing = int((group_S == NO_GROUP).sum())
            if own > missing:
                those = counted(own - missing, "sample without group_index takes", "samples without group_index take")
                self.notes.append(f"{those} that of a sibling, which shares the rollout_id")
            if missing:
                self.notes.append(f"{counted(missing, 'sample has', 'samples have')} no group_index")
            return group_S, labels
        if size is None:
            return group_S, labels
        rollouts = int(rollout_S.max()) + 1
        if rollouts % size:
            raise RolloutError(
                f"{self.name}: {rollouts} rollouts cannot be cut into groups of {size}; give a --group-size that"
                f" divides {rollouts}, or a file with group_index"
            )
        self.notes.append(f"no group_index in the file: grouped every {size} consecutive rollouts (--group-size)")
        self.grouping = f"every {size} consecutive rollouts (--group-size)"
        return rollout_S // size, tuple(range(rollouts // size))

    def _unit_note(self) -> list[str]:
        if self.length_unit == "tokens":
            return []
        unit = {"chars": "characters"}.get(self.length_unit, self.length_unit)
        return [f"lengths are in {unit}, not tokens: so is everything called a token here (--tokenizer PATH counts tokens)"]

    def _field_notes(self) -> list[str]:
        counts, notes = self._counts, []
        if counts["text"]:
            notes.append(f"{counted(counts['text'], 'reward was', 'rewards were')} given as text and read as numbers")
        if counts["bool"]:
            notes.append(f"{counted(counts['bool'], 'reward was', 'rewards were')} given as true/false and read as 1/0")
        unscored = sum(map(math.isnan, self._reward_S)) if self._has_reward else 0
        if unscored:
            notes.append(f"{counted(unscored, 'sample is', 'samples are')} unscored (reward null or NaN)")
        if counts["sliced"]:
            masks = counted(counts["sliced"], "loss_mask covers", "loss_masks cover")
            notes.append(f"{masks} prompt and response: the last response_length entries were taken")
        if counts["removed"]:
            notes.append(f"{counted(counts['removed'], 'sample has', 'samples have')} remove_sample: fully masked out")
        notes += sampler_note(self._columns["rollout_log_probs"], self._loss_mask_T, self._response_length_S)
        if 0 < self._lacking_ids < len(self):
            notes.append(f"{counted(self._lacking_ids, 'sample has', 'samples have')} no tokens: token ids are left out")
        return notes
