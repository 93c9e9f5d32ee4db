"""Auditing: frozen batches under many layouts and every framework's rule, or anybody's reducer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
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
    from aggcli.auditing import Audit, AuditRule, Finding, FrozenBatch, ReducerRule
    from aggcli.jobs.parts import Part
    from aggcli.launch import Link
    from aggcli.rollouts.batch import RolloutBatch


_OF_THE_LOSS = ("policy_loss", "eps_clip", "eps_clip_high", "eps_clip_c")
"""The settings of the policy loss that every number of an audit is of."""


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
    from aggcli.policy.groups import one_thread

    settings = request.config
    check_divisor(request.divisor, "--divisor")
    if request.limit is not None and not 0 < request.limit < math.inf:
        raise SettingError(f"--fail-on-variance {request.limit:g}: must be a finite number above 0, such as 1e-6")
    with ExitStack() as place, one_thread():
        steps, audited = _steps(request, batches, place)
        divisor = request.divisor or float(max(step.longest for step in steps))
        findings = _diagnosed(request)
        chosen = _chosen(request, divisor, findings)
        audits = tuple(audited(divisor, findings))
        if request.search:
            audits = _with_counterexamples(audits, chosen)
    head = {
        "command": "audit",
        "rollouts": ", ".join(settings.source.rollouts) or ("batches given in memory" if batches else BUILT_IN),
        "layouts": list(dict.fromkeys(layout for step in steps for layout in step.layouts)),
        "baseline": audits[0].baseline,
        "divisor": divisor,
        "length_unit": ", ".join(dict.fromkeys(step.unit for step in steps)),
        "divisor_origin": "--divisor" if request.divisor else "the longest response",
        "settings": {name: getattr(settings.objective, name) for name in _OF_THE_LOSS},
        "reducers": {name: [vars(finding) for finding in found] for name, found in findings.items()},
    }
    return AuditResult(head, audits, findings, _failure(audits, findings, request.limit))


@dataclass(frozen=True)
class _Step:
    """What is to be known of an optimizer step before any is audited: the batch that it is of, its unit, its longest response
    (at least 1) and its layouts; `notes`: what is to be said of it."""

    batch: str
    unit: str
    longest: int
    layouts: tuple[str, ...]
    notes: tuple[str, ...]


_Findings = dict[str, tuple["Finding", ...]]
"""What was found of each reducer, by its path."""


def _steps(
    request: AuditRequest, batches: Sequence[RolloutBatch] | None, place: ExitStack
) -> tuple[list[_Step], Callable[[float, _Findings], Iterable[Audit]]]:
    """Every optimizer step of the source, or the built-in batch; and what audits them, given the divisor and the findings.
    `place`: of the parts of the source, where the settings name one."""
    from aggcli.auditing import built_in_batch
    from aggcli.jobs.parts import in_parts, without_paths
    from aggcli.rollouts.sources import need_one_unit, open_source

    settings = request.config
    source = open_source(settings.source, settings.seed) if batches is None and settings.source.rollouts else None
    parts = None if source is None else place.enter_context(in_parts(source, settings.launch))
    if parts is not None:
        asked = dataclasses.replace(request, config=without_paths(settings))
        steps = [step for of_part in parts.results(_look, asked) for step in of_part]
        for step in steps:
            need_one_unit((steps[0].batch, steps[0].unit), (step.batch, step.unit))
        _say_notes(steps)
        return steps, lambda *known: (audit for of_part in parts.results(_audit_part, (asked, *known)) for audit in of_part)
    given = source if batches is None else batches
    if given is None:  # which is one step, whatever the size of others
        given, layout = [built_in_batch()], dataclasses.replace(settings.layout, global_batch_size=None)
        request = dataclasses.replace(request, config=dataclasses.replace(settings, layout=layout))
    frozen = [one for batch in given for one in _frozen(request, batch)]
    _say_notes([step for _, step in frozen])

    def audited(divisor: float, findings: _Findings) -> Iterator[Audit]:
        rules = _chosen(request, divisor, findings)
        yield from (_audited(one, rules, settings) for one, _ in frozen)

    return [step for _, step in frozen], audited


def _frozen(request: AuditRequest, batch: RolloutBatch) -> Iterator[tuple[FrozenBatch, _Step]]:
    """The optimizer steps of a batch. Raises `RolloutError`."""
    from aggcli.auditing import freeze
    from aggcli.layout.steps import need_whole_groups, optimizer_steps

    settings, notes = request.config, tuple(f"{batch.name}: {note}" for note in batch.notes)
    parts = optimizer_steps(batch, settings.layout.global_batch_size)
    if bool((batch.group_S >= 0).all()):
        for rule in [rule for rule in request.rules or MODES if rule.needs_groups][:1]:
            need_whole_groups(batch, parts, rule)
    for part in parts:
        one = freeze(batch, settings.objective, part)
        longest = max(int(one.step.response_length_S.max()), 1)
        yield one, _Step(batch.name, one.step.length_unit, longest, _layout_texts(one, settings), notes)
        notes = ()


def _say_notes(steps: Sequence[_Step]) -> None:
    for step in steps:
        for note in step.notes:
            say(note)


def _look(part: Part, link: Link) -> list[_Step]:
    """The optimizer steps of a part of a source."""
    from aggcli.policy.groups import one_thread

    with one_thread():
        return [step for batch in part.batches() for _, step in _frozen(part.task, batch)]


def _audit_part(part: Part, link: Link) -> list[Audit]:
    """The audit of each optimizer step of a part of a source."""
    from aggcli.policy.groups import one_thread

    request, divisor, findings = part.task
    with one_thread():
        rules = _chosen(request, divisor, findings)
        return [_audited(one, rules, request.config) for batch in part.batches() for one, _ in _frozen(request, batch)]


def _rules(request: AuditRequest, divisor: float) -> list[AuditRule]:
    """The rules asked for; where none is named all of them, or with a reducer none beside it."""
    from aggcli.auditing import NamedRule

    chosen = request.rules or (() if request.reducers else tuple(RULES.values()))
    settled = [request.config.objective.in_force(rule).with_divisor(divisor) for rule in chosen]
    return [NamedRule(rule, remark_on(rule.name)) for rule in dict.fromkeys(settled)]


def _chosen(request: AuditRequest, divisor: float, findings: _Findings) -> list[AuditRule]:
    """The reducers and the rules that are audited, in order."""
    from aggcli.auditing import CustomRule

    rules: list[AuditRule] = []
    for path, found in findings.items():
        reason = "; ".join(str(finding) for finding in found if finding.fault)
        fails = next((finding.text for finding in found if finding.kind == "fails"), "")
        equal_only = any(finding.kind == "needs equal micro-batches" for finding in found)
        rules.append(CustomRule(_reducer(request, path), reason, equal_only, fails))
    return [*rules, *_rules(request, divisor)]


def _diagnosed(request: AuditRequest) -> _Findings:
    """What is to be known of each reducer. Raises `SettingError`."""
    from aggcli.auditing import diagnose

    if request.reducer_ranks not in (None, "mean", "sum"):
        raise SettingError(f"--reducer-ranks {request.reducer_ranks}: must be mean or sum")
    return {path: diagnose(_reducer(request, path)) for path in request.reducers}


def _reducer(request: AuditRequest, path: str) -> ReducerRule:
    """The rule of the reducer at a path (pkg.mod:fn). Raises `SettingError`."""
    from aggcli.auditing import reducer_rule
    from aggcli.objective.reducer import load_reducer

    try:
        function = load_reducer(path)
    except SettingError as error:
        raise SettingError(str(error).replace("--custom-pg-loss-reducer-function-path", "--reducer")) from error
    signature, ranks = request.reducer_signature, request.reducer_ranks
    return reducer_rule(function, signature, ranks=ranks, divisor=request.divisor, name=path)  # pyright: ignore[reportArgumentType]  # checked there


def _with_counterexamples(audits: Sequence[Audit], rules: Sequence[AuditRule]) -> tuple[Audit, ...]:
    """The audits with the smallest case of each rule that varies in them, which is searched once."""
    from aggcli.auditing import smallest_counterexample

    found = {
        rule.name: smallest_counterexample(rule)
        for at, rule in enumerate(rules)
        if any(audit.reports[at].verdict == "varies" for audit in audits)
    }
    return tuple(
        dataclasses.replace(
            audit,
            reports=tuple(
                dataclasses.replace(report, counterexample=found[report.rule]) if report.verdict == "varies" else report
                for report in audit.reports
            ),
        )
        for audit in audits
    )


def _audited(frozen: FrozenBatch, rules: Sequence[AuditRule], settings: RunConfig) -> Audit:
    from aggcli.auditing import audit as compare
    from aggcli.auditing import scheduled_layouts

    layout = settings.layout
    budget = {"max_tokens": layout.max_tokens_per_gpu, "micro_batch_size": layout.micro_batch_size}
    return compare(frozen, rules, scheduled_layouts(frozen, _layout_texts(frozen, settings), **budget), search=False)


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
