"""Auditing: frozen batches under many layouts and every framework's rule, or anybody's reducer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aggcli.config import RunConfig
from aggcli.errors import SettingError
from aggcli.jobs.listening import say
from aggcli.report.audits import BUILT_IN
from aggcli.report.notebook import Shown
from aggcli.rules import MODES, RULES, Rule, check_divisor, remark_on

if TYPE_CHECKING:
    import pandas as pd

    from aggcli.analysis.answer import Answer
    from aggcli.auditing import Audit, AuditRule, Finding, FrozenBatch
    from aggcli.rollouts.batch import RolloutBatch


@dataclass(frozen=True)
class AuditRequest:
    """What to audit. `rules`: none for all, or with `reducers` (pkg.mod:fn) for the reducers alone; `divisor`: constant and
    padded width, default the longest response; `limit`: relative change of a weight that is a failure; `search`: find the
    smallest case of each rule that varies."""

    config: RunConfig
    rules: tuple[Rule, ...] = ()
    reducers: tuple[str, ...] = ()
    reducer_signature: str | None = None
    reducer_ranks: str | None = None
    divisor: float | None = None
    limit: float | None = None
    search: bool = True


@dataclass(frozen=True)
class AuditResult(Shown):
    """What an audit found. `head`: the facts that hold for all steps; `audits`: one an optimizer step; `findings`: what is to
    be known of each reducer; `failure`: what moved beyond the limit asked for; blank where nothing did, or none was."""

    head: dict[str, Any]
    audits: tuple[Audit, ...]
    findings: dict[str, tuple[Finding, ...]]
    failure: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Each optimizer step as `--json` prints it."""
        return [{"step": at, **audit.as_json()} for at, audit in enumerate(self.audits)]

    @property
    def rules(self) -> pd.DataFrame:
        """A row an optimizer step and rule: verdict, loss, total weight, effective learning rate, and the largest change."""
        import pandas as pd

        names = ("verdict", "pg_loss", "total_weight", "effective_lr", "gradient_cosine", "deviation", "worst_layout", "reason")
        return pd.DataFrame(
            {"step": step["step"], "rule": rule, **{name: found[name] for name in names}}
            for step in self.steps
            for rule, found in step["rules"].items()
        )

    @property
    def answer(self) -> Answer:
        """Which rules vary with the layout and by how much, in three sentences at most."""
        from aggcli.report.audits import audit_answer

        return audit_answer(self.head, self.steps)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {"schema": 1, "answer": list(self.answer.sentences), **self.head, "steps": self.steps}

    def tables(self) -> list[Any]:
        """What the terminal shows."""
        from aggcli.report.audits import audit_tables

        return audit_tables(self.head, self.steps)


def audit(request: AuditRequest, batches: Sequence[RolloutBatch] | None = None) -> AuditResult:
    """Every rule under every layout, on the rollouts of the settings, on these batches, or on the built-in batch.

    Raises `SettingError` and `RolloutError`. A rule that moved beyond the limit is a `failure` of the result.
    """
    settings = request.config
    check_divisor(request.divisor, "--divisor")
    if request.limit is not None and not 0 < request.limit < math.inf:
        raise SettingError(f"--fail-on-variance {request.limit:g}: must be a finite number above 0, such as 1e-6")
    frozen = _frozen(request, batches)
    longest = max(float(max(int(batch.step.response_length_S.max()), 1)) for batch in frozen)
    divisor = request.divisor or longest
    custom, findings = _reducers(request)
    chosen = [*custom, *_rules(request, divisor)]
    audits = tuple(_audited(batch, chosen, settings, request.search) for batch in frozen)
    head = {
        "command": "audit",
        "rollouts": ", ".join(settings.source.rollouts) or ("batches given in memory" if batches else BUILT_IN),
        "layouts": list(dict.fromkeys(layout for batch in frozen for layout in _layout_texts(batch, settings))),
        "baseline": audits[0].baseline,
        "divisor": divisor,
        "length_unit": ", ".join(dict.fromkeys(batch.step.length_unit for batch in frozen)),
        "divisor_origin": "--divisor" if request.divisor else "the longest response",
        "reducers": {name: [vars(finding) for finding in found] for name, found in findings.items()},
    }
    return AuditResult(head, audits, findings, _failure(audits, findings, request.limit))


def _frozen(request: AuditRequest, batches: Sequence[RolloutBatch] | None) -> list[FrozenBatch]:
    """Every optimizer step of the source, or the built-in batch."""
    from aggcli.auditing import built_in_batch, freeze
    from aggcli.layout.steps import need_whole_groups, optimizer_steps
    from aggcli.rollouts.sources import open_source

    settings = request.config
    if batches is None and not settings.source.rollouts:
        return [freeze(built_in_batch(), settings.objective)]
    found = []
    for batch in open_source(settings.source, settings.seed) if batches is None else batches:
        for note in batch.notes:
            say(f"{batch.name}: {note}")
        parts = optimizer_steps(batch, settings.layout.global_batch_size)
        for rule in (
            [rule for rule in request.rules or MODES if rule.needs_groups][:1] if bool((batch.group_S >= 0).all()) else ()
        ):
            need_whole_groups(batch, parts, rule)
        found += [freeze(batch, settings.objective, part) for part in parts]
    return found


def _rules(request: AuditRequest, divisor: float) -> list[AuditRule]:
    """The rules asked for; where none is named all of them, or with a reducer none beside it."""
    from aggcli.auditing import NamedRule

    chosen = request.rules or (() if request.reducers else tuple(RULES.values()))
    settled = [request.config.objective.in_force(rule).with_divisor(divisor) for rule in chosen]
    return [NamedRule(rule, remark_on(rule.name)) for rule in dict.fromkeys(settled)]


def _reducers(request: AuditRequest) -> tuple[list[AuditRule], dict[str, tuple[Finding, ...]]]:
    from aggcli.auditing import CustomRule, diagnose, reducer_rule
    from aggcli.objective.reducer import load_reducer

    signature, ranks, divisor = request.reducer_signature, request.reducer_ranks, request.divisor
    if ranks not in (None, "mean", "sum"):
        raise SettingError(f"--reducer-ranks {ranks}: must be mean or sum")
    rules: list[AuditRule] = []
    findings: dict[str, tuple[Finding, ...]] = {}
    for path in request.reducers:
        try:
            function = load_reducer(path)
        except SettingError as error:
            raise SettingError(str(error).replace("--custom-pg-loss-reducer-function-path", "--reducer")) from error
        rule = reducer_rule(function, signature, ranks=ranks, divisor=divisor, name=path)  # pyright: ignore[reportArgumentType]  # checked there
        found = diagnose(rule)
        reason = "; ".join(str(finding) for finding in found if finding.fault)
        fails = next((finding.text for finding in found if finding.kind == "fails"), "")
        rules.append(CustomRule(rule, reason, any(f.kind == "needs equal micro-batches" for f in found), fails))
        findings[path] = found
    return rules, findings


def _audited(frozen: FrozenBatch, rules: Sequence[AuditRule], settings: RunConfig, search: bool) -> Audit:
    from aggcli.auditing import audit as compare
    from aggcli.auditing import scheduled_layouts

    layout = settings.layout
    budget = {"max_tokens": layout.max_tokens_per_gpu, "micro_batch_size": layout.micro_batch_size}
    return compare(frozen, rules, scheduled_layouts(frozen, _layout_texts(frozen, settings), **budget), search=search)


def _layout_texts(frozen: FrozenBatch, settings: RunConfig) -> tuple[str, ...]:
    """The layouts asked for, else the recorded one and the default ones."""
    from aggcli.auditing import DEFAULT_LAYOUTS
    from aggcli.layout.schedule import RECORDED

    if settings.layout.layouts:
        return settings.layout.layouts
    return DEFAULT_LAYOUTS if frozen.recorded is None else (RECORDED, *DEFAULT_LAYOUTS)


def _failure(audits: Sequence[Audit], findings: dict[str, tuple[Finding, ...]], limit: float | None) -> str:
    """What a check that was asked for has found."""
    if limit is None:
        return ""
    moved = {r.rule for audit in audits for r in audit.reports if r.deviation > limit}
    faulty = {name for name, found in findings.items() if any(finding.fault for finding in found)}
    parts = [f"{', '.join(sorted(moved))} vary with the layout by more than {limit:g}"] if moved else []
    parts += [f"{', '.join(sorted(faulty - moved))}: faults in the reducer"] if faulty - moved else []
    return "; ".join(parts)
