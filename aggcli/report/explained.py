"""A rule's fault as a text for its framework's issue tracker, in Markdown, from the smallest example of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aggcli.rules import EVIDENCE, Rule
from aggcli.rules.releases import newest_release


def nothing_to_report(rule: Rule) -> str:
    """The sentence for a rule of which no example was found."""
    only = "" if rule.layouts == "any" else f" (of {rule.layouts}, the only ones its framework makes)"
    return (
        f"{rule.name}: nothing to report. No layout{only} that was searched, of up to 6 samples on up to 3 ranks, changes the"
        " weight of a token."
    )


def issue_text(rule: Rule, example: Mapping[str, Any], invariant: Sequence[Rule]) -> str:
    """`example`: a counterexample as `--json` prints it; `invariant`: rules of the framework that come closest to the same mode
    and do not vary."""
    samples = example["samples"]
    whole, cut = example["reference_weights"], example["weights"]
    losses = _losses([one["trained_tokens"] for one in samples], whole, cut)
    rows = [
        f"| {at} | {one['trained_tokens']}{_masked(one)} | {_number(loss)} | {_weight(w, one)}"
        f" | {_weight(c, one)} | {_ratio(w, c)} |"
        for at, (one, loss, w, c) in enumerate(zip(samples, losses, whole, cut, strict=True))
    ]
    where = example["where"]
    parts = [
        f"# {rule.option}: the gradient of one optimizer step depends on how the step is cut",
        f"Where: {rule.framework} {rule.version}, `{rule.option}`{' (the default)' if rule.is_default else ''}."
        f" Known from: {EVIDENCE[rule.evidence]}.{f' Unverified: {rule.unverified}.' if rule.unverified else ''}"
        f"{f' Newest release on PyPI: {newest}.' if (newest := newest_release(rule)) else ''}",
        f"What happens: {rule.why_it_depends()}. The step loss is `{rule.formula}`.",
        f"Smallest example: one optimizer step of {len(samples)} samples, first in one micro-batch on one rank, then {where}.",
        "\n".join(
            [
                "| sample | trained tokens | loss of each | weight of a token, in one piece | weight, cut | change |",
                "|---|---|---|---|---|---|",
                *rows,
            ]
        ),
        f"Step loss in one piece: {_sum(samples, losses, whole)}.\nStep loss {where}: {_sum(samples, losses, cut)}."
        f"{_undefined(example)}",
        "The gradient is the same sum over the gradients of the token losses, so it changes by the same weights. Model, data"
        " and optimizer step are the same in both.",
        f"Expected: the same loss and gradient however the step is cut. {_way_out(rule, invariant)}",
        f"To see it again: `aggcli audit --rules {rule.name}`.",
    ]
    return "\n\n".join(parts)


def _losses(trained: Sequence[int], whole: Sequence[float], cut: Sequence[float]) -> list[float]:
    """A loss of each sample's tokens under which the step losses differ: 1, 2, 3, ..., or 1 on the sample that changes most."""
    rising = [float(at + 1) for at in range(len(trained))]
    apart = sum(loss * n * (c - w) for loss, n, w, c in zip(rising, trained, whole, cut, strict=True))
    if math.isnan(apart) or abs(apart) > 1e-6:
        return rising
    most = max(range(len(trained)), key=lambda at: abs(cut[at] - whole[at]) * trained[at])
    return [float(at == most) for at in range(len(trained))]


def _sum(samples: Sequence[Mapping[str, Any]], losses: Sequence[float], weights: Sequence[float]) -> str:
    """`0.5 x 1 x 1 + 0.25 x 2 x 2 = 1.5`: weight x trained tokens x loss of each."""
    trained = [one["trained_tokens"] for one in samples]
    kept = [part for part in zip(weights, trained, losses, strict=True) if part[1] or math.isnan(part[0])]
    terms = [f"{_number(w)} x {n} x {_number(loss)}" if n else "0/0" for w, n, loss in kept]
    total = sum(w * n * loss for w, n, loss in kept)
    return f"{' + '.join(terms)} = {_number(total)} (weight x tokens x loss)"


def _undefined(example: Mapping[str, Any]) -> str:
    """Which micro-batches of the cut are 0/0; blank where none is."""
    empty = {at for at, (one, w) in enumerate(zip(example["samples"], example["weights"], strict=True)) if _is_empty(w, one)}
    found = [f"({','.join(map(str, held))})" for rank in example["split"] for held in rank if empty.intersection(held)]
    which = f"micro-batch {found[0]}, which has" if len(found) == 1 else f"micro-batches {' '.join(found)}, which have"
    return f"\nThe 0/0 is of {which} no trained token, and makes the sum NaN." if found else ""


def _way_out(rule: Rule, invariant: Sequence[Rule]) -> str:
    if invariant:
        options = ", ".join(f"`{other.option}` (`{other.formula}`)" for other in invariant)
        give, whose = ("gives", "its") if len(invariant) == 1 else ("give", "their")
        return f"In {rule.framework} {options} {give} that, since {whose} counts are the optimizer step's."
    if rule.divides_by_accumulation_again:
        return "It would be, if the loss were not divided by the accumulation steps a second time."
    if not rule.local_counts:
        return (
            "It would be, if micro-batches were added up, and what is averaged over were counted over the whole optimizer step."
        )
    return "It would be, if every count that the loss divides by were taken over the whole optimizer step, on all ranks."


def _weight(value: float, sample: Mapping[str, Any]) -> str:
    return "0/0" if _is_empty(value, sample) else _number(value)


def _is_empty(value: float, sample: Mapping[str, Any]) -> bool:
    """Whether a weight that is no number is 0/0, since the sample has no trained token."""
    return math.isnan(value) and not sample["trained_tokens"]


def _masked(sample: Mapping[str, Any]) -> str:
    return f" and {sample['masked_tokens']} masked" if sample["masked_tokens"] else ""


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.6g}"


def _ratio(whole: float, cut: float) -> str:
    if math.isnan(whole) or math.isnan(cut):
        return "not a number"
    return f"x {_number(cut / whole)}" if whole else ("none" if cut == whole else "from 0")
