"""The schema of what a run leaves on disk: every field of metrics.jsonl, layouts.jsonl, timings.jsonl, manifest.json
and the files in samples/; and of curves.json, which a comparison of other trainers' runs leaves.

The numbers come from the metric catalogue, the settings from their types; the other fields are described here.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from aggcli.config import FIELDS
from aggcli.measurement.catalogue import METRICS, Metric, describe
from aggcli.records import CURVES, LAYOUTS, MANIFEST, SAMPLES, SCHEMA, TIMINGS
from aggcli.records import METRICS as METRICS_FILE
from aggcli.rules import Rule

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """A field of a record.

    `schema`: its type as JSON Schema; `fields`: those of the object it holds, or of each object in its list; `pattern`: regular
    expression of the keys where `name`, in angle brackets, stands for many; `required`: stands in every record.
    """

    name: str
    schema: Schema
    about: str
    over: str = ""
    unit: str = ""
    required: bool = False
    fields: tuple[Field, ...] = ()
    pattern: str | None = None


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BLANK: Schema = {"type": ["number", "null"]}
"""A number that is null where nothing was measured, or where it is not finite."""
OBJECT: Schema = {"type": "object"}


def list_of(items: Schema) -> Schema:
    """A list of these."""
    return {"type": "array", "items": items}


def _one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


# -- the numbers ----------------------------------------------------------------------------------------------------

_COUNTED = frozenset({"rollouts", "prompt groups"})
"""Units of numbers from the global view that are whole."""
_OF_THE_MODE = frozenset(
    {
        "trained tokens",
        "trained rollouts",
        "the policy's parameters",
        "the mode's total weight",
        METRICS["gradient_share/correct"].over,
        "the rollout step",
    }
)
"""What numbers from the global view are over that only metrics.jsonl has: no layout could change them."""


def _number(metric: Metric) -> Field:
    whole = metric.reduction == "count" or (metric.reduction == "global" and metric.unit in _COUNTED)
    return Field(metric.name, WHOLE if whole else BLANK, metric.about, metric.over, metric.unit)


def _pass_at(ending: str, pattern: str) -> Field:
    found = _number(describe(f"pass@8{ending}"))
    over = f"for k = 8: {found.over}"
    about = f"k = 1, 2, 4 and on by doubling; for k = 8: {found.about}"
    return replace(found, name=f"pass@<k>{ending}", over=over, about=about, pattern=pattern)


_PASS = (_pass_at("", "^pass@[0-9]+$"), _pass_at("/groups_left_out", "^pass@[0-9]+/groups_left_out$"))
_IN_FORCE = (*map(_number, METRICS.values()), *_PASS)
_REDUCED = (
    *(_number(m) for m in METRICS.values() if m.reduction != "global" or m.over not in _OF_THE_MODE),
    *_PASS,
)
_OF_A_RANK = tuple(_number(metric) for metric in METRICS.values() if metric.reduction != "global")

# -- the lines of a step --------------------------------------------------------------------------------------------

_HEAD = (
    Field("step", WHOLE, "number of the optimizer step, from 0", "the run", required=True),
    Field("rollout_step", WHOLE, "training: number of the rollout step that it belongs to, from 0", "the run"),
    Field("source", TEXT, "replay: the recorded step, with its file", "the step"),
    Field("mode", TEXT, "aggregation mode, or another framework's rule, in force", "the run", required=True),
    Field("seed", WHOLE, "training: seed of everything drawn", "the run"),
)
_LAYOUT = Field("layout", TEXT, "layout that the numbers were measured under, as --layouts spells it", "the step")
_LENGTHS = Field(
    "correct/lengths",
    list_of(WHOLE),
    "response lengths of the correct samples, sorted; with --log-correct-samples",
    "correct samples",
    "tokens",
)
_STEP = (
    *_HEAD,
    replace(_LAYOUT, about="replay: the layout in force, as --layouts spells it"),
    *_IN_FORCE,
    Field("advantages", TEXT, "replay: where the advantages come from", "the step"),
    Field("empty", FLAG, "replay: whether the step has no trained token", "the step"),
    Field(
        "layout_deviation",
        BLANK,
        "largest difference of any number between layouts, over the sum of its absolute terms, under rules that no layout may"
        " move; null where no two layouts were evaluated (training: on first and last steps and each before a checkpoint),"
        " or for infinity (a sample misplaced, a number missing)",
        "the step's layouts",
    ),
    Field(
        "skipped",
        {"type": "object", "additionalProperties": TEXT},
        "replay: metric (correct/* and pass@k are several) -> what it would need",
        "the step",
    ),
    Field("notes", list_of(TEXT), "replay: what looks like a fault but is none, in sentences", "the step"),
)
_RANK = (
    Field("rank", WHOLE, "number of the data-parallel rank, from 0", "the layout", required=True),
    *_OF_A_RANK,
    Field("cp_tokens", list_of(WHOLE), "response tokens on each context-parallel rank", "the rank", "tokens"),
    Field("partition", list_of(WHOLE), "positions, among the run's samples of the step, of its own, from 0", "the rank"),
    _LENGTHS,
)
_STEP_IN_LAYOUT = (
    *_HEAD,
    replace(_LAYOUT, required=True),
    Field(
        "evaluated",
        _one_of("in-process", "processes"),
        "processes: each rank was a real one; in-process: its samples were measured here",
        "the layout",
        required=True,
    ),
    *_REDUCED,
    _LENGTHS,
    Field(
        "sizes",
        {"type": "object", "additionalProperties": NUMBER},
        "metric -> sum of its absolute terms, divided as the metric is: what a difference between layouts is measured by;"
        " for metrics whose terms may have either sign",
        "the layout",
    ),
    Field(
        "ranks",
        list_of(OBJECT),
        "each data-parallel rank's own: its share of a weighted number, its own mean, count, maximum or norm",
        "the layout",
        required=True,
        fields=_RANK,
    ),
)
_TIMING = (
    replace(_HEAD[1], about="number of the rollout step, from 0", required=True),
    Field(
        "seconds", NUMBER, "what the step took, sampling included and writing not", "the runs of its process", "seconds", True
    ),
    Field("runs", WHOLE, "runs that the process trained as one stack", "the runs of its process", "runs", True),
    Field("tokens", WHOLE, "response tokens", "the runs of its process", "tokens", True),
    Field(
        "peak_bytes",
        WHOLE,
        "most memory at a time: on a GPU what torch held there during the step, else of the process since its start",
        "the runs of its process",
        "bytes",
    ),
)

# -- the manifest ---------------------------------------------------------------------------------------------------


def _setting(hint: Any) -> Schema:
    """The JSON type of a setting, from its Python type; a tuple is written as a list."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_setting(option) for option in options]}
    if origin is Literal:
        return _one_of(*options)
    if origin is tuple:
        return list_of(TEXT)
    return {bool: FLAG, int: WHOLE, float: NUMBER, str: TEXT, Rule: TEXT, type(None): {"type": "null"}}[hint]


_SETTINGS = {
    "type": "object",
    "properties": {name: _setting(hint) for name, hint in FIELDS.items()},
    "additionalProperties": False,
}
_INTERVAL = (
    Field("mean", BLANK, "mean", "seeds"),
    Field(
        "low",
        BLANK,
        "lower end of its 95 % interval, of shares on the logit and of lengths on the log scale; null for one seed",
        "seeds",
    ),
    Field("high", BLANK, "upper end of it, of lengths on fresh prompts the response limit at most", "seeds"),
    Field("n", WHOLE, "number of seeds", "seeds", "seeds"),
)
_METRIC = Field(
    "<metric>",
    {"type": ["object", "null"]},
    "accuracy, a mean response length, or a number of the last optimizer step on recorded rollouts",
    "runs of the mode",
    fields=(
        *_INTERVAL,
        Field("difference", {"type": ["object", "null"]}, "to the baseline mode, paired by seed", "seeds", fields=_INTERVAL),
    ),
    pattern="^.",
)
_ENVIRONMENT = (
    Field("aggcli", TEXT, "version of aggcli"),
    Field("python", TEXT, "version of Python"),
    Field("platform", TEXT, "operating system"),
    Field("packages", {"type": "object", "additionalProperties": TEXT}, "package -> version"),
    Field("git_commit", {"type": ["string", "null"]}, "commit of aggcli's checkout; null when installed from a package"),
    Field("device", TEXT, "device of the policy; cpu in a replay"),
    Field("cores", {"type": ["integer", "null"]}, "processor cores of the machine", "the machine", "cores"),
    Field("threads", WHOLE, "threads of a torch operation", "the process", "threads"),
)
_PROMPTS = "fresh prompts"
_EVALUATION = (
    Field("prompts", WHOLE, "fresh prompts that the policy was evaluated on, one rollout each", "the run", "prompts"),
    Field("accuracy", NUMBER, "share of right rollouts after training, one rollout a prompt", _PROMPTS, "share"),
    Field("response_length", NUMBER, "mean response length", _PROMPTS, "tokens"),
    Field("correct_response_length", BLANK, "mean response length of the right rollouts", _PROMPTS, "tokens"),
    Field("incorrect_response_length", BLANK, "mean response length of the wrong rollouts", _PROMPTS, "tokens"),
    Field("response_length_std", NUMBER, "standard deviation (n-1) of the response length", _PROMPTS, "tokens"),
)
_FINAL = (
    Field("baseline", TEXT, "mode that the others are compared with"),
    Field(
        "modes",
        OBJECT,
        "mode -> metric -> number",
        fields=(Field("<mode>", OBJECT, "metrics of a mode", fields=(_METRIC,), pattern="^."),),
    ),
    Field("missing", list_of(TEXT), "runs that did not get there"),
)
_MANIFEST = (
    Field("schema", {"const": SCHEMA}, "number of this schema", required=True),
    Field("kind", _one_of("run", "comparison"), "a run, or a folder of several runs", required=True),
    Field("runs", list_of(TEXT), "comparison: folders of its runs, in their order"),
    Field("mode", TEXT, "run: aggregation mode, or another framework's rule"),
    Field("seed", WHOLE, "seed of everything drawn"),
    Field("lr", NUMBER, "training run: learning rate in force"),
    Field("lr_factor", NUMBER, "training run: lr over the setting lr; not 1 under --match grad-norm"),
    Field(
        "metric_rules",
        OBJECT,
        "mode or rule -> whose weights its other metrics take (columns of one loss may differ in them alone)",
        fields=(
            Field(
                "<mode>",
                OBJECT,
                "of a mode or rule",
                fields=(
                    Field("metrics", TEXT, "rule that weighs pg_clipfrac, ppo_kl, ratio_deviation and sampler_mismatch"),
                    Field("kl_loss", TEXT, "rule that weighs kl_loss, as a metric and as a term of the loss"),
                    Field("entropy_loss", TEXT, "rule that weighs entropy_loss, as a metric and as a term of the loss"),
                ),
                pattern="^.",
            ),
        ),
    ),
    Field("divisor", BLANK, "L in force of constant, or of a rule that divides by one", "the run", "tokens"),
    Field("command", _one_of("run", "compare"), "command of aggcli that made it", required=True),
    Field("arguments", list_of(TEXT), "its arguments, as given", required=True),
    Field("rollouts", TEXT, "replay: the rollouts, as named"),
    Field("format", TEXT, "replay: format of the rollouts"),
    Field("modes", list_of(TEXT), "replay: modes and rules asked for"),
    Field("max_response_length", WHOLE, "replay: what quarters of the response length are quarters of", "the run", "tokens"),
    Field("response_limit", WHOLE, "training: most tokens of a response", "the run", "tokens"),
    Field("settings", _SETTINGS, "every setting by name; `aggcli run --help` says what each means", required=True),
    Field("config", TEXT, "the settings as TOML that --config reads", required=True),
    Field("environment", OBJECT, "where it ran", required=True, fields=_ENVIRONMENT),
    Field(
        "length_unit",
        _one_of("tokens", "chars", "words"),
        "what is counted where this schema says tokens: characters or words in dumps that hold text only",
        "all runs",
        required=True,
    ),
    Field("ranks", WHOLE, "ranks that shared each run", "the run", "ranks"),
    Field("shares", WHOLE, "training: stacks that the runs were cut into, each with its own checkpoint", "all runs", "shares"),
    Field("status", _one_of("running", "done", "interrupted", "failed"), "how it ended, if it did", required=True),
    Field("diverged", TEXT, "training run: when and why it trained no further"),
    Field("diverged_step", WHOLE, "training run: the rollout step in which it diverged"),
    Field("evaluation", OBJECT, "training run: the policy after training", fields=_EVALUATION),
    Field("final", OBJECT, "training: the metrics that were printed at the end", fields=_FINAL),
)

_SAMPLE = (
    Field("sample", WHOLE, "position in the recorded step, from 0", "the source"),
    Field("rollout", TEXT, "rollout_id, or a number where the source has none", "the step"),
    Field("group", {"type": ["string", "null"]}, "group_index of its prompt group; null without", "the step"),
    Field("response_length", WHOLE, "response length", "the sample", "tokens"),
    Field("trained_tokens", WHOLE, "response tokens that are trained", "the sample", "tokens"),
    Field("reward", BLANK, "raw reward; null where unscored", "the rollout", "reward"),
    Field(
        "correct", {"type": ["boolean", "null"]}, "whether it reaches --correct-threshold; null where unscored", "the rollout"
    ),
    Field(
        "truncated",
        {"type": ["boolean", "null"]},
        "whether it was cut at the response limit; null where not said",
        "the sample",
    ),
    Field("group_rollouts", {"type": ["integer", "null"]}, "rollouts of its prompt group", "its group in the step", "rollouts"),
    Field("group_reward", BLANK, "mean raw reward of its prompt group", "its group's scored rollouts in the step", "reward"),
    Field(
        "group_reward_spread",
        BLANK,
        "largest less smallest raw reward there",
        "its group's scored rollouts in the step",
        "reward",
    ),
    Field("advantage", BLANK, "mean advantage; null where nothing is trained or nothing gives one", "its trained tokens"),
    Field("weight", NUMBER, "sum of the mode's weights", "its trained tokens"),
)

_POINTS = list_of(BLANK)
_CURVE = (
    Field("mode", TEXT, "arm of the comparison that the run is of", "the run", required=True),
    Field("label", TEXT, "empty: what arms are called is settled when they are compared", "the run", required=True),
    Field(
        "seed",
        WHOLE,
        "its seed; its place in the arm where seeds do not tell the runs of the arm apart",
        "the run",
        required=True,
    ),
    Field("source", TEXT, "log of another trainer that it was read from; empty for our own records", "the run", required=True),
    Field("directory", TEXT, "folder or file that it was read from", "the run", required=True),
    Field("status", TEXT, "our own records: how it ended", "the run", required=True),
    Field("settings", OBJECT, "our own records: every setting by name", "the run", required=True),
    Field("provenance", OBJECT, "our own records: versions, device, threads and ranks", "the run", required=True),
    Field("length_unit", TEXT, "what is counted where this schema says tokens", "the run", required=True),
    Field("modes", list_of(TEXT), "our own records of a replay: modes and rules asked for", "the run", required=True),
    Field("steps", list_of(WHOLE), "numbers of the recorded steps, rising", "the run", "steps", True),
    Field("tokens", _POINTS, "response tokens before each of them (as logged, of another trainer)", "the run", "tokens", True),
    Field("seconds", _POINTS, "time before each of them", "the run", "seconds", True),
    Field(
        "measures",
        {"type": "object", "additionalProperties": _POINTS},
        "accuracy, raw_reward, a response length, entropy_loss, kl -> its value at each of them",
        "the step",
        required=True,
    ),
    Field("repeated", WHOLE, "lines that recorded a step again; the last one counts", "the run", "lines", True),
    Field("stack", {"type": ["array", "null"], "items": NUMBER}, "what tells the stack it was trained in", "the run"),
    Field("evaluation", {"type": ["object", "null"]}, "our own records: the policy after training", fields=_EVALUATION),
    Field(
        "diverged", {"type": ["array", "null"]}, "step in which it diverged, and what is said of it; null where not", "the run"
    ),
)
_CURVES = (
    Field("schema", {"const": SCHEMA}, "number of this schema", required=True),
    Field("kind", {"const": "curves"}, "runs that other trainers made, as they were compared", required=True),
    Field(
        "arguments",
        OBJECT,
        "what was asked for",
        required=True,
        fields=(
            Field("curves", list_of(TEXT), "arms, as NAME=PATTERN", required=True),
            Field("metrics", list_of(TEXT), "columns named, as KEY=COLUMN", required=True),
            Field("options", OBJECT, "options of the comparison by name", required=True),
        ),
    ),
    Field("paired", FLAG, "whether the arms have the same seeds, and each run tells its own", required=True),
    Field("notes", list_of(TEXT), "what each number is, and what was not there, in sentences", required=True),
    Field("runs", list_of(OBJECT), "the runs, arm by arm", required=True, fields=_CURVE),
)

FILES: Mapping[str, tuple[str, tuple[Field, ...]]] = {
    METRICS_FILE: ("One JSON object a line, one line an optimizer step: the numbers under the layout in force.", _STEP),
    LAYOUTS: (
        "One JSON object a line, one line an optimizer step and layout: numbers reduced over its ranks, and each rank's own.",
        _STEP_IN_LAYOUT,
    ),
    TIMINGS: (
        "In training: one JSON object a line, one line a rollout step, on all runs that one process trained together.",
        _TIMING,
    ),
    SAMPLES: (
        "A folder, in a replay: step-<step>.parquet has a row a training sample of that optimizer step.",
        _SAMPLE,
    ),
    MANIFEST: ("One JSON object: what was run, with what and where, and how it ended.", _MANIFEST),
    CURVES: ("One JSON object, alone in its folder: what `aggcli compare --curves` has read of other trainers' logs.", _CURVES),
}
"""File -> what it holds, and its fields."""
SHARED = "A number is null where nothing was measured, and left out where the rollouts or the settings do not give it."
