"""OpenRLHF-style JSON lines: a row per sample, fields named as in its `Experience`.

No release writes such a dump; this reads what people write with a few lines of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import FieldError, listed, plain, truncation, whole
from aggcli.rollouts.jsonl import json_rows
from aggcli.rollouts.sequences import Response, Sequences, prompt_of, response_part
from aggcli.rollouts.steps import Step

NAMES = {
    "action_log_probs": "log_probs",
    "base_action_log_probs": "ref_log_probs",
    "base_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "advantages": "advantage",
}
LACKS = "OpenRLHF-style rows hold no entropy, no group ids and no layout"


def read(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of one file: scores are the raw rewards, rewards where there are none."""
    builder = BatchBuilder(name, reward_key=config.reward_key)
    builder.notes.append(LACKS)
    sequences = Sequences(builder, config.group_size)
    for line, row in json_rows(step.path, name, builder.notes):
        try:
            response = _response(row)
        except FieldError as error:
            raise RolloutError(f"{name}, sample {len(builder)} (line {line}): {error}") from None
        score = row.get("scores") if row.get("scores") is not None else row.get("rewards")
        status = truncation(_single(row.get("truncated")))
        sequences.add(response, line, reward=_single(score), status=status, group_index=row.get("uid"))
    sequences.close()
    return builder.build()


def _response(row: Mapping[str, object]) -> Response:
    """The response: from the first action on, for response_length tokens where that is given.

    Masks and log-probabilities may run over the response, or over all tokens but the first, which nothing predicts.
    """
    mask = listed(row.get("action_mask"), "action_mask")
    ids = listed(row.get("sequences"), "sequences")
    names = {theirs: ours for theirs, ours in NAMES.items() if isinstance(plain(row.get(theirs)), list)}
    lists = {**row, "sequences": None}
    end = None
    if mask is not None and _single(row.get("response_length")) is not None:
        length = whole(_single(row["response_length"]), "response_length")
        end = min(next((i for i, bit in enumerate(mask) if bit), len(mask)) + length, len(mask))
    cut = response_part(lists, names, mask="action_mask", ids="sequences", length=end)
    length = int(str(cut.fields["response_length"]))
    total = length if ids is None else len(ids)
    fields = {**cut.fields, "total_length": total, "tokens": ids}
    if "advantages" not in names:
        fields["advantage"] = _single(row.get("advantages"))
    return Response(fields, None if ids is None or not length else prompt_of(ids[: total - length]))


def _single(value: object) -> object:
    """A number out of a list of one."""
    value = plain(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value
