"""Tables for the terminal, from the same dictionaries that `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import ConsoleRenderable
from rich.table import Table

from aggcli.analysis.answer import Answer
from aggcli.analysis.replay_answer import is_beyond_rounding, largest_between_layouts, length_bin
from aggcli.analysis.units import LENGTH_UNITS, in_length_unit
from aggcli.measurement.catalogue import BESIDE, LENGTH_BINS, OVER_TRAINED, describe, names
from aggcli.measurement.words import percent, plural, short
from aggcli.report.blocks import BlockTable
from aggcli.report.folding import Folding, folded
from aggcli.rules import recorded_rule

Step = Mapping[str, Any]
_NEGLIGIBLE = 1e-12
"""A loss below this is 0 but for rounding, and is shown as 0."""

_LOSS = ("pg_loss", "loss", "grad_norm_log_probs", "gradient_ratio", "total_weight")
_SHARES = {"weight_share/": "share of the weight on", "gradient_share/": "share of the sum of |gradient| on"}
"""How the names of shares begin, and the line above their rows."""
_DIRECTION = ("gradient_cosine", "effective_tokens", *(name for name in names(["global"]) if name.startswith("weight_share/")))
_GRADIENT = tuple(name for name in names(["global"]) if name.startswith("gradient_share/"))
_METRICS = tuple(name for metric in BESIDE for name in (metric, metric + OVER_TRAINED))
_ONLY_WHEN_ANY = {
    "fully_masked_samples",
    "unscored_samples",
    "zero_variance_groups",
    "all_right_groups",
    "all_wrong_groups",
    "all_wrong_groups_with_advantage",
    "weight_share/zero_advantage",
    *(f"{kind}{part}_groups" for kind in _SHARES for part in ("all_right", "all_wrong")),
    "gradient_share/clipped",
}
"""Rows that are only worth a line when they are not 0."""
_LABELS = {
    "loss": "loss with its other terms",
    "total_weight": "total weight",
    "effective_tokens": "effective sample size ({unit})",
    "grad_norm_log_probs": "gradient norm",
    "gradient_ratio": "  over {baseline}'s",
    "gradient_cosine": "gradient cosine",
    **{metric + OVER_TRAINED: "  over trained rollouts only" for metric in BESIDE},
    **{
        kind + part: label
        for kind in _SHARES
        for part, label in {
            "correct": "  correct rollouts",
            "incorrect": "  wrong rollouts",
            "positive_advantage": "  advantage > 0",
            "negative_advantage": "  advantage < 0",
            "zero_advantage": "  advantage = 0",
            "all_right_groups": "  groups without a wrong rollout",
            "all_wrong_groups": "  groups without a right rollout",
            "clipped": "  tokens whose clip binds",
        }.items()
    },
}
OF_LOG_PROBS = "gradient norm, cosine: of the gradient by the trained tokens' log-probabilities"
"""Said where a gradient is shown, which is not the one by the parameters."""
_OF_THE_BATCH = {
    "samples": "training samples",
    "rollouts": "rollouts (N)",
    "prompts": "prompt groups (P)",
    "tokens": "trained {unit}",
    "response_tokens": "response {unit}",
    "raw_reward": "reward",
    "raw_reward_batch_std": "  standard deviation over the batch",
    "response_length": "response length ({unit})",
    "truncated": "truncated responses",
    "fully_masked_samples": "fully masked samples",
    "unscored_samples": "samples without a reward",
    "correct/count": "correct samples",
    "correct/response_length": "  their length ({unit})",
    **dict.fromkeys((f"correct_length/{bin_}" for bin_ in LENGTH_BINS), ""),
    "correct/entropy": "  their entropy (nats)",
    "incorrect/count": "wrong samples",
    "incorrect/response_length": "  their length ({unit})",
    "sequence_ratio/log_sum": "log ratio of a response: its sum (nats)",
    "sequence_ratio/log_mean": "  its mean over the tokens (nats)",
    "sequence_ratio/clipfrac": "  responses whose GSPO ratio is clipped",
    "importance_ess/tokens": "effective sample size of the ratios ({unit})",
    "importance_ess/samples": "  of whole responses (training samples)",
    "sampler_mismatch/sequence_sum": "sampler mismatch of a response: size of its sum (nats)",
    "sampler_mismatch/sequence_mean": "  size of its mean over the tokens (nats)",
    "groups": "prompt groups with a reward",
    "zero_variance_groups": "  every advantage is 0",
    "all_right_groups": "  every rollout correct",
    "all_wrong_groups": "  no rollout correct",
    "all_wrong_groups_with_advantage": "  none correct, advantages not 0",
    "groups_generated": "prompt groups before --drop-zero-variance",
    "groups_kept": "prompt groups left by it",
}
"""Numbers that no mode changes, in the order of their rows; what is not here comes after, under its own name."""
_NOT_OF_THE_BATCH = {"gradient_ratio", "gradient_cosine", "effective_tokens", "micro_batches"}


def replay_tables(
    head: Mapping[str, Any], steps: Sequence[Step], between_layouts: Sequence[str], answer: Answer
) -> list[ConsoleRenderable]:
    """What `run` and `compare` print: the answer, modes side by side, the layouts with what is said of their differences, the
    batch, the settings in force, and what was not computed."""
    rules = [rule for rule in head["modes"] if any(rule in step["modes"] for step in steps)]
    found: list[ConsoleRenderable | None] = [
        answer_text(answer),
        *_mode_tables(head, steps, rules),
        _layout_table(head, steps, rules),
    ]
    if any("correct/count" in step["modes"][rules[0]] for step in steps if rules[0] in step["modes"]):
        found.append(_correct_table(head, steps, rules[0]))
    found += [
        _batch_table(head, steps, rules[0]),
        lines(_settings(head, steps)),
        lines(between_layouts),
        lines(_skipped(steps)),
    ]
    return [part for part in found if part is not None]


def answer_text(answer: Answer) -> Folding:
    """The answer as the first paragraph of a screen, a sentence a line."""
    return Folding(lambda width: "\n".join(folded(sentence, width) for sentence in answer.sentences))


def lines(texts: Sequence[str], *, indented: bool = False) -> Folding | None:
    """Texts, each from the start of a line (`indented`: all but the first from behind two spaces); what of one has no room on
    it stands below, behind two more. None without any."""
    starts = ["", *("  " if indented else "" for _ in texts[1:])]
    pairs = list(zip(texts, starts, strict=False))
    return (
        Folding(lambda width: "\n".join(folded(text, width, start, start + "  ") for text, start in pairs)) if texts else None
    )


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Two columns: a name and its value."""
    table = _table("", "")
    for name, value in facts.items():
        table.add_row(name, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return table


# -- parts ----------------------------------------------------------------------------------------------------------


def policy_loss_in_words(settings: Mapping[str, Any]) -> list[str]:
    """What the policy loss is where it is not PPO's, and its clip where it has one."""
    name, low, high = settings.get("policy_loss", "ppo"), settings["eps_clip"], settings["eps_clip_high"]
    high = low if high is None else high
    clip = {
        "cispo": f"ratio cut {high:g} above",
        "sapo": "",
        "dppo": f"masked where a probability rose by more than {high:g} or fell by more than {low:g}",
    }.get(name, f"clip: {low:g} below, {high:g} above")
    return [*([] if name == "ppo" else [f"policy loss: {name}"]), *([clip] if clip else [])]


def _settings(head: Mapping[str, Any], steps: Sequence[Step]) -> list[str]:
    settings = head["settings"]
    parts = [
        f"{head['rollouts']} ({head['format']}), {plural(len(steps), 'optimizer step')}",
        f"mode: {', '.join(head['modes'])}",
        f"advantages: {_one_of(step['advantages'] for step in steps)}",
        *policy_loss_in_words(settings),
    ]
    rules = [rule for rule in map(recorded_rule, head["modes"]) if rule is not None]
    parts += [
        f"{rule.name} divides by: {head['divisor']:g} {_length_unit(head)}"
        for rule in rules
        if rule.takes_divisor and head["divisor"]
    ]
    parts += [f"{rule.name} scale: {settings['prompt_mean_scale']}" for rule in rules if rule.reads("prompt_mean_scale")]
    if settings["kl_coef"]:
        parts.append(f"kl_coef: {settings['kl_coef']:g} ({settings['kl_estimator']})")
    if settings["metric_aggregation"] == "matched":
        parts.append("metrics: by each mode's own weights")
    parts += [f"--{name.replace('_', '-')}: on" for name in ("drop_zero_variance", "mask_truncated") if settings.get(name)]
    return parts


def _length_unit(head: Mapping[str, Any]) -> str:
    return LENGTH_UNITS[head["length_unit"]]


def _one_of(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _mode_tables(head: Mapping[str, Any], steps: Sequence[Step], rules: Sequence[str]) -> list[ConsoleRenderable | None]:
    """How large each mode's loss is, where its weight and its gradient go, what that is by, and the metrics beside the loss. In
    each, modes whose numbers are all equal in every step share a column."""
    scale = [name for name in _LOSS if name != "loss" or head["settings"]["kl_coef"] or head["settings"]["entropy_coef"]]
    whose = {rule: head["metric_rules"][rule] for rule in rules}
    metrics = _of_modes("metrics", head, steps, rules, _METRICS, {rule: tuple(names.values()) for rule, names in whose.items()})
    if metrics is not None:
        table, columns = metrics
        table.add_row("weighted by", *(whose[column[0]]["metrics"] for column in columns))
        terms = [dict.fromkeys((whose[column[0]]["kl_loss"], whose[column[0]]["entropy_loss"])) for column in columns]
        table.add_row("KL and entropy by", *(" / ".join(names) for names in terms))
    loss = _of_modes(_over(steps), head, steps, rules, scale)
    direction = _of_modes("where the weight goes", head, steps, rules, _DIRECTION)
    gradient = _of_modes("where the gradient goes", head, steps, rules, _GRADIENT)
    by = [OF_LOG_PROBS] if _is_shown(head, steps, rules, "grad_norm_log_probs") else []
    return [loss and loss[0], direction and direction[0], gradient and gradient[0], lines(by), metrics and metrics[0]]


def _of_modes(
    title: str,
    head: Mapping[str, Any],
    steps: Sequence[Step],
    rules: Sequence[str],
    named: Sequence[str],
    also: Mapping[str, Any] | None = None,
) -> tuple[BlockTable, list[list[str]]] | None:
    """A table of these numbers and the modes of each of its columns; None without a number. `also`: what must be the same too
    for two modes to share a column."""
    rows = [name for name in named if _is_shown(head, steps, rules, name)]
    if not rows:
        return None
    columns = _alike(steps, rules, rows, also or {})
    every = len(columns) == 1 and len(rules) > 1
    table = _table(title, *(["every mode"] if every else ["\n= ".join(column) for column in columns]))
    begun = ""
    for name in rows:
        kind = next((kind for kind in _SHARES if name.startswith(kind)), "")
        if kind and kind != begun:
            table.add_row(_SHARES[kind], *("" for _ in columns))
            begun = kind
        text = _percent if kind else _text
        label = _label(name, head).format(baseline=rules[0], unit=_length_unit(head))
        table.add_row(label, *(_mean(steps, column[0], name, text) for column in columns))
    return table, columns


def _alike(steps: Sequence[Step], rules: Sequence[str], rows: Sequence[str], also: Mapping[str, Any]) -> list[list[str]]:
    """The modes in columns: those whose numbers in these rows are equal in every step, but for rounding, in one; what depends
    on the layout never with what does not."""
    columns: list[list[str]] = []
    for rule in rules:
        kind = (also.get(rule), _depends_on_layout(rule))
        alike = (one for one in columns if (also.get(one[0]), _depends_on_layout(one[0])) == kind)
        mine = next((one for one in alike if _equal(steps, one[0], rule, rows)), None)
        columns.append([rule]) if mine is None else mine.append(rule)
    return columns


def _depends_on_layout(name: str) -> bool:
    rule = recorded_rule(name)
    return rule is not None and rule.depends_on_layout


def _equal(steps: Sequence[Step], one: str, other: str, rows: Sequence[str]) -> bool:
    for step in steps:
        sides = [step["modes"].get(rule) for rule in (one, other)]
        if None in sides:
            return False
        for a, b in ([side.get(name) for side in sides if side is not None] for name in rows):
            if (a is None) != (b is None) or (a is not None and abs(a - b) > _NEGLIGIBLE * max(abs(a), abs(b), 1e-300)):
                return False
    return True


def _label(name: str, head: Mapping[str, Any]) -> str:
    if name in _LABELS:
        return _LABELS[name]
    kind, _, bin_ = name.partition("length_")
    if kind in _SHARES:
        return f"  {length_bin(bin_, head)}"
    return _with_unit(name, head)


def _is_shown(head: Mapping[str, Any], steps: Sequence[Step], rules: Sequence[str], name: str) -> bool:
    numbers = [number for rule in rules for number in _numbers(steps, rule, name)]
    return bool(numbers) and (any(numbers) or not _only_when_any(name, head))


def _only_when_any(name: str, head: Mapping[str, Any]) -> bool:
    """Whether a row is only worth a line when it is not 0: so is a quarter of the lengths that no length lies in."""
    bin_ = name.rpartition("length_")[2] if name.startswith((*_SHARES,)) else name.removeprefix("correct_length/")
    return name in _ONLY_WHEN_ANY or (bin_ in LENGTH_BINS and not length_bin(bin_, head))


def _with_unit(name: str, head: Mapping[str, Any]) -> str:
    unit = in_length_unit(describe(name).unit, _length_unit(head))
    if name == "kl_loss":
        unit = f"{unit}, {head['settings']['kl_estimator']}"
    return f"{name} ({unit})" if unit not in ("", "share") else name


def _batch_table(head: Mapping[str, Any], steps: Sequence[Step], rule: str) -> Table:
    """Numbers that no mode changes."""
    table = _table("the batch", _over(steps))
    there = dict.fromkeys(name for step in steps if rule in step["modes"] for name in step["modes"][rule] if name != "layouts")
    found = [*(name for name in _OF_THE_BATCH if name in there), *(name for name in there if name not in _OF_THE_BATCH)]
    masked = head["settings"].get("mask_truncated")
    for name in found:
        metric = describe(name)
        wanted = metric.reduction in ("mean", "effective", "count", "max") or (
            metric.reduction == "global" and not name.startswith((*_SHARES,)) and not name.endswith(OVER_TRAINED)
        )
        silent = _only_when_any(name, head) and not any(_numbers(steps, rule, name))
        if wanted and not silent and name not in _NOT_OF_THE_BATCH:
            label = _OF_THE_BATCH.get(name, "").format(unit=_length_unit(head)) or _of_correct(name, head) or name
            label += ", masked by --mask-truncated" if name == "truncated" and masked else ""
            table.add_row(
                label, _mean(steps, rule, name, _percent if metric.unit == "share" and "pass@" not in name else _text)
            )
    return table


def _of_correct(name: str, head: Mapping[str, Any]) -> str:
    """The label of correct samples by length; blank for another number."""
    bin_ = name.removeprefix("correct_length/")
    return "" if bin_ == name else f"  of these, {length_bin(bin_, head) or 'empty'}"


def _layout_table(head: Mapping[str, Any], steps: Sequence[Step], rules: Sequence[str]) -> Table | None:
    """pg_loss under each layout for the modes that a layout changes, with the largest change in a step; None without any."""
    moved = [rule for rule in rules if is_beyond_rounding(largest_between_layouts(steps, rule), head)]
    if not moved:
        return None
    several = len(steps) > 1
    table = _table("pg_loss by layout" + (" (largest change in a step)" if several else " (change)"), *moved)
    for layout in _layouts(steps, moved[0]):
        cells = []
        for rule in moved:
            mean = _mean_of([step["modes"][rule]["layouts"][layout].get("pg_loss") for step in steps if rule in step["modes"]])
            change = largest_between_layouts(steps, rule, layout)
            cells.append(_text(mean) + (f" ({change.far})" if change is not None and is_beyond_rounding(change, head) else ""))
        table.add_row(layout, *cells)
    return table


def _correct_table(head: Mapping[str, Any], steps: Sequence[Step], rule: str) -> Table:
    """Correct samples under each layout: reduced by sum and count, and each rank's own; means over several steps.

    A column that is blank in every layout is left out: lengths are those of a single step, and only a few.
    """
    rows = []
    for layout in _layouts(steps, rule):
        found = [step["modes"][rule]["layouts"][layout] for step in steps if rule in step["modes"]]
        lengths = found[0].get("correct/lengths") if len(found) == 1 else None
        of_ranks = [values["ranks"] for values in found]
        rows.append(
            (
                layout,
                _text(_mean_of([values.get("correct/count") for values in found])),
                _text(_mean_of([values.get("correct/response_length") for values in found])),
                " ".join(map(str, lengths)) if lengths and len(lengths) <= 6 else "",
                _by_rank(of_ranks, "correct/count", " + "),
                _by_rank(of_ranks, "correct/response_length", ", "),
            )
        )
    heads = (
        "correct samples",
        "count",
        "mean length",
        "lengths",
        "count by rank",
        f"mean length by rank ({_length_unit(head)})",
    )
    kept = [at for at in range(len(heads)) if at == 0 or any(row[at] for row in rows)]
    table = BlockTable([heads[at] for at in kept], numbers=("count", "mean length"))
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    return table


def _by_rank(steps: Sequence[Sequence[Mapping[str, Any]]], name: str, between: str) -> str:
    """`17.3 + 18`: what each rank has, `-` where it has none in any step; blank where not every step has as many ranks."""
    if len({len(ranks) for ranks in steps}) != 1:
        return ""
    return between.join(_text(_mean_of([rank.get(name) for rank in of_rank])) or "-" for of_rank in zip(*steps, strict=True))


def _skipped(steps: Sequence[Step]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for step in steps:
        for metric, reason in step["skipped"].items():
            metrics = reasons.setdefault(reason, [])
            if metric not in metrics:
                metrics.append(metric)
    return [f"skipped: {', '.join(metrics)}: {reason}" for reason, metrics in reasons.items()]


# -- cells ----------------------------------------------------------------------------------------------------------


def _table(first: str, *others: str) -> BlockTable:
    return BlockTable([first, *others], numbers=others)


def _over(steps: Sequence[Step]) -> str:
    return f"step {steps[0]['step']}" if len(steps) == 1 else f"mean of {len(steps)} steps"


def _layouts(steps: Sequence[Step], rule: str) -> list[str]:
    found = dict.fromkeys(layout for step in steps if rule in step["modes"] for layout in step["modes"][rule]["layouts"])
    return [
        layout for layout in found if all(layout in step["modes"][rule]["layouts"] for step in steps if rule in step["modes"])
    ]


def _numbers(steps: Sequence[Step], rule: str, name: str) -> list[float]:
    values = [step["modes"][rule].get(name) for step in steps if rule in step["modes"]]
    return [value for value in values if value is not None]


def _mean(steps: Sequence[Step], rule: str, name: str, shown: Callable[[float | None], str]) -> str:
    """The mean over the steps that have the number, blank where none has; says how many where some have not."""
    numbers = _numbers(steps, rule, name)
    text = shown(_mean_of(numbers))
    return f"{text} (n={len(numbers)})" if 0 < len(numbers) < len(steps) else text


def _mean_of(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _text(value: float | None) -> str:
    return "" if value is None else short(0.0 if abs(value) < _NEGLIGIBLE else value)


def _percent(value: float | None) -> str:
    return "" if value is None else percent(value)
