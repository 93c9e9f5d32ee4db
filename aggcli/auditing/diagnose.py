"""What is wrong with a reducer: probes that change one thing each, and a finding for each thing that should not matter.

Every probe is a few samples whose weights are compared one by one with those of the same samples in one micro-batch on one
rank. Only what the earlier probes do not explain is looked at by the later ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aggcli.auditing.frozen import batch_of, schedule_of
from aggcli.auditing.reducers import Extraction, ReducerRule, extract
from aggcli.rollouts.batch import RolloutBatch

_CLOSE = 1e-6

_ROWS = ("11", "11011", "111", "1111111")
"""Masks of the probes' samples: all lengths differ, and one has a masked token inside."""
_WHOLE = [[[0, 1, 2, 3]]]
_DIVISOR = 16.0


@dataclass(frozen=True)
class Finding:
    """One thing about a reducer: `kind` names it, `text` gives the numbers; a `fault` fails an audit, the rest is to know."""

    kind: str
    text: str
    fault: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def diagnose(rule: ReducerRule) -> tuple[Finding, ...]:
    """All findings about a reducer, faults first."""
    found = list(_findings(dataclasses.replace(rule, divisor=rule.divisor or _DIVISOR)))
    return tuple(dict.fromkeys(sorted(found, key=lambda finding: not finding.fault)))


def _findings(rule: ReducerRule) -> Iterator[Finding]:
    step = _batch(_ROWS)
    whole = _probe(rule, step, _WHOLE)
    for kind, text in whole.problems.items():
        yield Finding(kind, text)
    if {"fails", "not linear", "not finite"} & set(whole.problems):
        return
    base_S = _of_samples(step, whole.weight_T)
    width = _padding(rule, step, base_S)
    order = _order(rule, step, base_S)
    yield from (finding for finding in (width, order) if finding is not None)
    if width is None:
        yield from _masked_tokens(rule, base_S)
    yield from _masked_rows(rule, base_S)
    if order is None:
        yield from _splits(_fixed_width(rule), step)


# -- one probe ------------------------------------------------------------------------------------------------------


def _batch(masks: Sequence[str]) -> RolloutBatch:
    """Samples with these masks, two prompt groups, each its own rollout."""
    return batch_of(
        {
            "response_length": len(mask),
            "total_length": len(mask) + 3,
            "loss_mask": [int(bit) for bit in mask],
            "group_index": at * 2 // len(masks),
        }
        for at, mask in enumerate(masks)
    )


def _probe(rule: ReducerRule, step: RolloutBatch, split: Sequence, cp: int = 1) -> Extraction:
    return extract(rule, step, schedule_of(split, step.num_samples), cp)


def _of_samples(step: RolloutBatch, weight_T: Tensor) -> Tensor:
    """The total weight of each sample's trained tokens, [S]."""
    kept_T = torch.where(step.loss_mask_T, weight_T, 0.0)
    return torch.zeros(step.num_samples, dtype=torch.float64).index_add_(0, step.sample_of_token(), kept_T)


def _ratios(base_S: Tensor, other_S: Tensor) -> Tensor | None:
    """What each sample's weight was multiplied by; None where nothing changed."""
    scale = float(base_S.abs().max())
    if torch.allclose(base_S, other_S, rtol=_CLOSE, atol=_CLOSE * scale):
        return None
    return other_S / base_S


def _numbers(ratio_S: Tensor) -> str:
    return ", ".join(f"{ratio:.4g}" for ratio in ratio_S.tolist())


def _is(ratio_S: Tensor, factor: float) -> bool:
    return bool(torch.allclose(ratio_S, torch.full_like(ratio_S, factor), rtol=1e-5))


# -- probes ---------------------------------------------------------------------------------------------------------


def _padding(rule: ReducerRule, step: RolloutBatch, base_S: Tensor) -> Finding | None:
    if rule.signature != "matrix":
        return None
    wider = _probe(dataclasses.replace(rule, width=max(map(len, _ROWS)) + 5), step, _WHOLE)
    ratio_S = _ratios(base_S, _of_samples(step, wider.weight_T))
    if ratio_S is None:
        return None
    return Finding("depends on the padding width", f"5 more columns of padding multiply the weights by {_numbers(ratio_S)}")


def _order(rule: ReducerRule, step: RolloutBatch, base_S: Tensor) -> Finding | None:
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        ratio_S = _ratios(base_S, _of_samples(step, _probe(rule, step, [[order]]).weight_T))
        if ratio_S is not None:
            return Finding("depends on the order", f"samples in the order {order} weigh {_numbers(ratio_S)} times as much")
    return None


def _masked_tokens(rule: ReducerRule, base_S: Tensor) -> Iterator[Finding]:
    longer = _batch([mask + "000" for mask in _ROWS])
    ratio_S = _ratios(base_S, _of_samples(longer, _probe(rule, longer, _WHOLE).weight_T))
    if ratio_S is not None:
        text = f"3 masked tokens more in each sample multiply the weights by {_numbers(ratio_S)}"
        yield Finding("counts masked tokens", text)


def _masked_rows(rule: ReducerRule, base_S: Tensor) -> Iterator[Finding]:
    """A fully masked sample in the same micro-batch: a phantom token, a counted row, or 0/0."""
    step = _batch((*_ROWS, "000"))
    found = _probe(rule, step, [[[0, 1, 2, 3, 4]]])
    bad = {kind: text for kind, text in found.problems.items() if kind in ("fails", "not finite")}
    for kind, text in bad.items():
        yield Finding(f"{kind} on a fully masked sample", text)
    if bad:
        return
    ratio_S = _ratios(base_S, _of_samples(step, found.weight_T)[:4])
    if ratio_S is None:
        return
    trained = sum(mask.count("1") for mask in _ROWS)
    if _is(ratio_S, trained / (trained + 1)):
        text = f"a fully masked sample counts as one token: the weights shrink to {trained}/{trained + 1}"
        yield Finding("phantom token for masked rows", text)
    elif _is(ratio_S, 4 / 5):
        yield Finding("fully masked rows are counted", "a fully masked sample counts in the mean over samples", fault=False)
    elif not _is(ratio_S, trained / (trained + 3)):
        yield Finding("changes with a fully masked row", f"the other weights are multiplied by {_numbers(ratio_S)}")


def _fixed_width(rule: ReducerRule) -> ReducerRule:
    """One width for every micro-batch, so that a dependence on it is not taken for something else."""
    return dataclasses.replace(rule, width=max(rule.width, *map(len, _ROWS)))


def _splits(rule: ReducerRule, step: RolloutBatch) -> Iterator[Finding]:
    """Micro-batches first; then ranks, then context parallelism, each with what was found exact before."""
    base_S = _of_samples(step, _probe(rule, step, _WHOLE).weight_T)
    for split in ([[[0, 1], [2, 3]]], [[[0], [1], [2], [3]]], [[[0, 2], [1, 3]]]):
        ratio_S = _ratios(base_S, _of_samples(step, _probe(rule, step, split).weight_T))
        if ratio_S is not None:
            text = f"as micro-batches {split[0]} the samples weigh {_numbers(ratio_S)} times as much as in one"
            yield Finding("counts in the micro-batch", f"{text}; a denominator is counted locally")
            return
    ratio_S = _ratios(base_S, _of_samples(step, _probe(rule, step, [[[0, 1, 2], [3]]]).weight_T))
    if ratio_S is not None:
        text = f"micro-batches of 3 and 1 samples multiply the weights by {_numbers(ratio_S)}; equal ones leave them"
        yield Finding("needs equal micro-batches", text, fault=False)
    yield from _ranks(rule, step, base_S)
    yield from _context_parallel(rule, step, base_S)


def _ranks(rule: ReducerRule, step: RolloutBatch, base_S: Tensor) -> Iterator[Finding]:
    ratio_S = _ratios(base_S, _of_samples(step, _probe(rule, step, [[[0, 1]], [[2, 3]]]).weight_T))
    if ratio_S is None:
        return
    if _is(ratio_S, 0.5) or _is(ratio_S, 0.25):
        averaged = "ranks are averaged already" if rule.ranks == "mean" else "ranks are summed"
        text = f"2 ranks multiply every weight by {float(ratio_S[0]):.4g} ({averaged})"
        yield Finding("divided by the ranks twice", text)
    elif _is(ratio_S, 2.0) or _is(ratio_S, 4.0):
        yield Finding("multiplied by the ranks", f"2 ranks multiply every weight by {float(ratio_S[0]):.4g}")
    else:
        text = f"on ranks (0,1) and (2,3) the samples weigh {_numbers(ratio_S)} times as much; a denominator is the rank's own"
        yield Finding("mean of rank means", text)


def _context_parallel(rule: ReducerRule, step: RolloutBatch, base_S: Tensor) -> Iterator[Finding]:
    found = _probe(rule, step, _WHOLE, cp=2)
    for kind, text in found.problems.items():
        yield Finding(kind, text, fault=kind != "cannot run under context parallelism")
    ratio_S = _ratios(base_S, _of_samples(step, found.weight_T))
    if ratio_S is not None:
        text = f"2 context-parallel ranks multiply the weights by {_numbers(ratio_S)}"
        yield Finding("context-parallel inflation" if _is(ratio_S, 0.5) else "counts on the context-parallel rank", text)
