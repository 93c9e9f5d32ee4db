"""One frozen batch x rules x layouts: what moves, by how much, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from aggcli.auditing.frozen import AuditLayout, FrozenBatch
from aggcli.auditing.rules import AuditRule
from aggcli.auditing.search import TOLERANCE, Counterexample, deviation, smallest_counterexample
from aggcli.errors import AggcliError, SettingError
from aggcli.measurement.words import VARIES

RuleVerdict = Literal["invariant", "varies", "varies as recorded", "not finite", "not compared", "not computed"]
"""What is said of a rule over the layouts that it was evaluated under; `varies as recorded`: between the recorded layout, which
its framework cannot represent, and others, but not between the two or more that it can; `not compared`: under one layout
only."""


@dataclass(frozen=True)
class UnderLayout:
    """A rule under one layout against its reference layout, the first that it was evaluated under and that is not `apart`.

    `pg_loss`: the step loss; `gradient_ratio`, `gradient_cosine`: norm and direction of the gradient by the log-probabilities
    (None without advantages or where a norm is 0); `deviation`: the largest relative change of a token's weight; `apart`: the
    recorded layout, where the framework cannot represent it and can two or more others.
    """

    layout: str
    pg_loss: float | None
    gradient_ratio: float | None
    gradient_cosine: float | None
    deviation: float
    apart: bool = False


@dataclass(frozen=True)
class RuleReport:
    """One rule over all layouts; the first of `under` is its reference layout.

    `effective_lr`: its gradient norm over the baseline rule's, each under its reference layout, which is what a step length is
    multiplied by; `skipped`: layouts that it was not evaluated under, since its framework cannot represent them; `reason`: why
    it varies, or why it was not computed; `notes`: what to know about the rule.
    """

    rule: str
    verdict: RuleVerdict
    total_weight: float | None = None
    effective_lr: float | None = None
    effective_cosine: float | None = None
    under: tuple[UnderLayout, ...] = ()
    skipped: tuple[str, ...] = ()
    reason: str = ""
    counterexample: Counterexample | None = None
    notes: tuple[str, ...] = ()

    @property
    def deviation(self) -> float:
        """The largest over all layouts but the one that is apart; infinite where a loss is not a number."""
        return self._largest([one for one in self.under if not one.apart])

    @property
    def judged(self) -> tuple[UnderLayout, ...]:
        """The layouts that the verdict is of: those of a rule that varies between layouts that its framework can represent are
        these alone."""
        return tuple(one for one in self.under if not (one.apart and self.verdict == "varies"))

    @property
    def worst(self) -> UnderLayout | None:
        """The one of `judged` that moves the rule most, among those with a finite loss where there is one."""
        finite = [one for one in self.judged if math.isfinite(one.deviation)]
        return max(finite or self.judged, key=lambda one: one.deviation, default=None)

    def _largest(self, layouts: Sequence[UnderLayout]) -> float:
        return math.inf if self.verdict == "not finite" else max((one.deviation for one in layouts), default=0.0)

    def as_json(self) -> dict[str, Any]:
        first = self.under[0] if self.under else None
        return {
            "verdict": self.verdict,
            "reference_layout": first.layout if first else None,
            "pg_loss": first.pg_loss if first else None,
            "total_weight": self.total_weight,
            "effective_lr": self.effective_lr,
            "gradient_cosine": self.effective_cosine,
            "deviation": self._largest(self.judged) if self.under or self.verdict == "not finite" else None,
            "layouts": {one.layout: {k: v for k, v in vars(one).items() if k != "layout"} for one in self.under},
            "worst_layout": self.worst.layout if self.worst and self.verdict in VARIES else None,
            "skipped": list(self.skipped),
            "reason": self.reason,
            "counterexample": self.counterexample.as_json() if self.counterexample else None,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Audit:
    """The reports of all rules over one batch; `reference`: the layout that the others are compared with, unless a rule's
    framework cannot represent it."""

    batch: str
    reference: str
    baseline: str
    reports: tuple[RuleReport, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def deviation(self) -> float:
        return max((report.deviation for report in self.reports), default=0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "reference_layout": self.reference,
            "baseline": self.baseline,
            "rules": {report.rule: report.as_json() for report in self.reports},
            "notes": list(self.notes),
        }


def audit(
    frozen: FrozenBatch,
    rules: Sequence[AuditRule],
    layouts: Sequence[AuditLayout],
    *,
    tolerance: float = TOLERANCE,
    search: bool = True,
) -> Audit:
    """Every rule under every layout, against the first layout, or against the first that its framework can represent, where it
    can two or more; the first rule that can be computed is the baseline of effective learning rates.

    `search`: find the smallest counterexample of each rule that varies. A rule that the batch cannot give (no group_index, no
    divisor) is reported as not computed, with the reason.
    """
    base_T = None
    reports = []
    for rule in rules:
        try:
            report, weight_T = _report(frozen, rule, layouts, tolerance)
        except AggcliError as error:
            reports.append(RuleReport(rule.name, "not computed", reason=_without_name(error, frozen), notes=_notes(rule)))
            continue
        base_T = weight_T if base_T is None else base_T
        if report.verdict == "varies" and search:
            found = smallest_counterexample(rule, tolerance)
            report = replace(report, counterexample=found)
        ratio, cosine = _against(frozen.slope_T, weight_T, base_T)
        reports.append(replace(report, effective_lr=ratio, effective_cosine=cosine))
    baseline = next((report.rule for report in reports if report.verdict != "not computed"), "")
    return Audit(frozen.step.name, layouts[0].text, baseline, tuple(reports))


def _report(
    frozen: FrozenBatch, rule: AuditRule, layouts: Sequence[AuditLayout], tolerance: float
) -> tuple[RuleReport, Tensor]:
    possible = [layout for layout in layouts if layout.was_used or rule.can_represent(layout.schedule)]
    if not possible:
        raise SettingError(
            "its framework can represent none of these layouts: it needs equal micro-batches, or ranks of equal size"
        )
    own = [layout for layout in possible if rule.can_represent(layout.schedule)]
    apart = [layout for layout in possible if layout not in own] if len(own) > 1 else []
    under, reference_T = [], None
    for layout in [*own, *apart] if apart else possible:
        weight_T = rule.weights(frozen.step, layout.schedule, layout.cp)
        reference_T = weight_T if reference_T is None else reference_T
        ratio, cosine = _against(frozen.slope_T, weight_T, reference_T)
        moved = deviation(reference_T, weight_T)
        under.append(UnderLayout(layout.text, _loss(frozen, weight_T), ratio, cosine, moved, layout in apart))
    assert reference_T is not None, "some layout is possible"
    broken = bool(torch.isnan(reference_T).any())
    worst = max(one.deviation for one in under)
    moves = not apart or any(one.deviation > tolerance for one in under if not one.apart)  # by a layout that is not apart
    verdict = _verdict(broken, worst > tolerance, moves, len(under))
    varies = verdict in VARIES
    reason = "a fully masked piece of the batch is 0/0" if broken else rule.why() if varies else ""
    if varies and math.isinf(worst):
        reason += "; a fully masked piece is 0/0"
    report = RuleReport(
        rule=rule.name,
        verdict=verdict,
        total_weight=float(reference_T.sum()),
        under=tuple(under),
        skipped=tuple(layout.text for layout in layouts if layout not in possible),
        reason=reason,
        notes=_notes(rule),
    )
    return report, reference_T


def _verdict(broken: bool, moved: bool, moved_own: bool, layouts: int) -> RuleVerdict:
    """`moved_own`: between two layouts that the framework can represent, or where it cannot two of them."""
    if broken:
        return "not finite"
    if moved:
        return "varies" if moved_own else "varies as recorded"
    return "invariant" if layouts > 1 else "not compared"


def _without_name(error: AggcliError, frozen: FrozenBatch) -> str:
    """The reason alone: the step is named where the report stands."""
    return str(error).removeprefix(frozen.step.name).lstrip(",: ")


def _notes(rule: AuditRule) -> tuple[str, ...]:
    note = getattr(rule, "note", "")
    return (note,) if note else ()


def _loss(frozen: FrozenBatch, weight_T: Tensor) -> float | None:
    return None if frozen.loss_T is None else float(weight_T @ frozen.loss_T)


def _against(slope_T: Tensor | None, weight_T: Tensor, base_T: Tensor) -> tuple[float | None, float | None]:
    """(ratio of gradient norms, cosine) of two rules or layouts; None where there is no gradient or a norm is 0 or NaN."""
    if slope_T is None:
        return None, None
    own_T, base_T = weight_T * slope_T, base_T * slope_T
    own, base = float(own_T.norm()), float(base_T.norm())
    if not (base > 0 and math.isfinite(own) and math.isfinite(base)):
        return None, None
    cosine = max(-1.0, min(1.0, float(own_T @ base_T) / (own * base))) if own > 0 else None
    return own / base, cosine
