"""The plain rollout format, field by field: what `aggcli convert --schema` prints."""

from __future__ import annotations

from typing import Any

from aggcli.analysis.schema import Field, Schema
from aggcli.analysis.schema_formats import field_rows, object_schema

_ABOUT = (
    "JSON Lines, one training sample a line, one optimizer step a file (Parquet: a row, with columns of the same names)."
    " Null, and a field left out, mean missing. A number per token that one sample has must be on every sample with a trained"
    " token, and may be null, NaN or Infinity (bare) only where loss_mask is 0. Log-probabilities are natural logarithms"
    " (nats). A last line without its end is dropped with a note; any other broken line is refused."
)
_ID: Schema = {"type": ["integer", "string", "null"]}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_NUMBER: Schema = {"type": ["number", "null"]}
_PER_TOKEN: Schema = {"type": ["array", "null"], "items": _NUMBER}

FIELDS: tuple[Field, ...] = (
    Field(
        "response_length",
        _COUNT,
        "Length of the response; the lists over it have this many entries. May be left out where one of them is given.",
        "the sample",
        "tokens",
    ),
    Field(
        "loss_mask",
        {"type": ["array", "null"], "items": {"enum": [0, 1]}},
        "1: the token is trained; 0: it is not (tool output, padding). Missing: all are trained. A mask over prompt and"
        " response is cut to the response.",
        "response tokens",
    ),
    Field(
        "reward",
        {"type": ["number", "string", "boolean", "object", "null"]},
        "Raw reward, before it becomes an advantage. Missing or NaN: not scored. Numeric text and booleans are read as"
        " numbers; of an object, --reward-key names the entry.",
        "the rollout",
    ),
    Field(
        "group_index",
        _ID,
        "The prompt that the sample answers. Its samples are a group: advantages are made in it, prompt_mean averages over it.",
        "the sample",
    ),
    Field(
        "rollout_id",
        _ID,
        "Samples of one rollout share it; the rollout counts once. Missing on all: each is one. Missing on some: refused.",
        "the sample",
    ),
    Field(
        "advantage",
        {"type": ["number", "array", "null"], "items": _NUMBER},
        "Advantage, of the whole response or of each token. Missing: made from rewards (--advantages).",
        "response tokens",
    ),
    Field("log_probs", _PER_TOKEN, "Log-probability under the policy that is trained.", "response tokens", "nats"),
    Field(
        "old_log_probs",
        _PER_TOKEN,
        "The same under the policy that sampled, as the trainer computed it: the ratio is exp(log_probs - old_log_probs)."
        " Missing: rollout_log_probs are taken instead. Without log_probs, or without both of these, the ratio is taken as 1.",
        "response tokens",
        "nats",
    ),
    Field("rollout_log_probs", _PER_TOKEN, "The same, as the inference engine computed it.", "response tokens", "nats"),
    Field("ref_log_probs", _PER_TOKEN, "The same under the reference policy, for kl_loss.", "response tokens", "nats"),
    Field("entropy", _PER_TOKEN, "Entropy of the policy at the token, for entropy_loss.", "response tokens", "nats"),
    Field(
        "status",
        {"type": ["string", "null"]},
        "How the response ended; `truncated`: cut at the response limit (--mask-truncated).",
        "the sample",
    ),
    Field(
        "tokens",
        {"type": ["array", "null"], "items": {"type": "integer"}},
        "Ids of prompt and response. Needed to train on the rollouts (--train), not to replay them.",
        "prompt and response tokens",
    ),
    Field("total_length", _COUNT, "Length of prompt and response, for context parallelism.", "the sample", "tokens"),
    Field(
        "prompt",
        {"type": ["string", "array", "object", "null"]},
        "The prompt. A list of ids gives total_length where that and tokens are missing; a text is not read.",
        "the sample",
    ),
    Field("length_unit", {"enum": ["tokens", "chars", "words", None]}, "What lengths count. Missing: tokens.", "the sample"),
    Field("remove_sample", {"type": ["boolean", "null"]}, "true: no token of the sample is trained.", "the sample"),
)
"""Every field that is read."""


def json_schema() -> dict[str, Any]:
    """The schema of one line. Other keys may stand in it; they are named when it is read, and refused where one is a misspelt
    field that changes numbers."""
    over_tokens = [field.name for field in FIELDS if field.schema is _PER_TOKEN]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "aggcli's plain rollouts, a line",
        "description": _ABOUT,
        **object_schema(FIELDS),
        "additionalProperties": True,
        "anyOf": [{"required": [name]} for name in ("response_length", "loss_mask", "advantage", *over_tokens)],
    }


def markdown() -> str:
    """The same as a Markdown table."""
    rows = "\n".join(field_rows(FIELDS))
    return f"# Plain rollouts\n\n{_ABOUT}\n\n| field | type | unit | over | meaning |\n|---|---|---|---|---|\n{rows}\n"
