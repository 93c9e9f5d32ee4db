"""`aggcli audit`: one frozen batch under many layouts and every framework's rule, or anybody's reducer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aggcli.cli.console import out, say
from aggcli.cli.options import ConfigOption, JsonOption, comma_list, resolve, with_paths, with_settings
from aggcli.config import FIELDS, SOURCE_SETTINGS, RunConfig
from aggcli.errors import CheckFailed, ExitCode, SettingError
from aggcli.rules import MODES, RULES, check_divisor, find_rule, remark_on

if TYPE_CHECKING:
    from aggcli.audit import Audit, AuditRule, Finding, FrozenBatch

_TAKEN = (
    *SOURCE_SETTINGS,
    *("prompt_mean_scale", "normalizer", "advantages", "eps_clip", "eps_clip_high", "eps_clip_c"),
    *("layouts", "max_tokens_per_gpu", "micro_batch_size", "global_batch_size", "seed"),
    *(name for name in FIELDS if name.startswith("synthetic_")),
)
"""The settings that are options of an audit too."""

_PATHS = "Rollouts to audit: files, folders, globs, `example` or `synthetic`; default: a built-in batch."
PathsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ROLLOUTS...]", help=_PATHS)]
RulesOption = Annotated[
    list[str] | None,
    typer.Option("--rules", metavar="A,B,...", help="Modes, frameworks' rules such as verl:token-mean, aliases; default: all."),
]
ReducerOption = Annotated[
    list[str] | None, typer.Option("--reducer", metavar="PKG.MOD:FN", help="Audit this function too; repeat it for several.")
]
SignatureOption = Annotated[
    str | None,
    typer.Option("--reducer-signature", metavar="slime|matrix|flat", help="How to call it; default: by its parameters."),
]
RanksOption = Annotated[
    str | None,
    typer.Option("--reducer-ranks", metavar="mean|sum", help="How your framework joins ranks; default: mean for matrix."),
]
DivisorOption = Annotated[
    float | None,
    typer.Option("--divisor", metavar="L", help="Constant and padded width, in tokens; default: the longest response."),
]
FailOption = Annotated[
    float | None,
    typer.Option(
        "--fail-on-variance",
        metavar="X",
        help="Exit 1 if a layout changes a weight by more, relative, or a reducer has a fault.",
    ),
]
SearchOption = Annotated[bool, typer.Option("--search/--no-search", help="Find the smallest case of each rule that varies.")]


_ABOUT_LAYOUTS = (
    "Layouts to evaluate every rule under, the first being the reference: dp<N>[cp<M>][:rule][@tokens|:mb<K>] or `recorded`."
    " Default: the recorded layout of a train dump, then dp1:contiguous with one micro-batch and with 1, 2 and 4 samples a"
    " micro-batch, dp2:interleaved:mb2, dp2:contiguous:mb2, dp2cp2:contiguous, dp4:interleaved:mb1, dp4:balanced."
)


@with_settings(without=[name for name in FIELDS if name not in _TAKEN], about={"layouts": _ABOUT_LAYOUTS})
def audit(
    given: dict[str, Any],
    paths: PathsArgument = None,
    rules: RulesOption = None,
    reducer: ReducerOption = None,
    reducer_signature: SignatureOption = None,
    reducer_ranks: RanksOption = None,
    divisor: DivisorOption = None,
    fail_on_variance: FailOption = None,
    search: SearchOption = True,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Which rules give the same gradient under every layout, which do not, and why.

    The first layout is the reference. A rule is called invariant over the layouts that it was evaluated under; those that its
    framework cannot represent are named. Exit code 1 only with --fail-on-variance.
    """
    settings = resolve(with_paths(given, paths), config)
    check_divisor_and_limit(divisor, fail_on_variance)
    frozen = _frozen(settings, comma_list(rules or ()))
    longest = max(float(max(int(batch.step.response_length_S.max()), 1)) for batch in frozen)
    wanted = _rules(comma_list(rules or ()), bool(reducer), divisor or longest, settings)
    custom, findings = _reducers(reducer or (), reducer_signature, reducer_ranks, divisor)
    chosen = [*custom, *wanted]
    audits = [_audited(batch, chosen, settings, search) for batch in frozen]
    head = {
        "command": "audit",
        "rollouts": ", ".join(settings.source.rollouts) or "the built-in batch",
        "layouts": list(dict.fromkeys(layout for batch in frozen for layout in _layout_texts(batch, settings))),
        "baseline": audits[0].baseline,
        "divisor": divisor or longest,
        "length_unit": ", ".join(dict.fromkeys(batch.step.length_unit for batch in frozen)),
        "divisor_origin": "--divisor" if divisor else "the longest response",
        "reducers": {name: [vars(finding) for finding in found] for name, found in findings.items()},
    }
    _print(head, audits, json)
    return _judge(audits, findings, fail_on_variance)


def check_divisor_and_limit(divisor: float | None, limit: float | None) -> None:
    """Refuse a divisor or a limit that is no positive finite number."""
    check_divisor(divisor, "--divisor")
    if limit is not None and not 0 < limit < math.inf:
        raise SettingError(f"--fail-on-variance {limit:g}: must be a finite number above 0, such as 1e-6")


# -- what is audited ------------------------------------------------------------------------------------------------


def _frozen(settings: RunConfig, names: Sequence[str]) -> list[FrozenBatch]:
    """Every optimizer step of the source, or the built-in batch."""
    from aggcli.audit import built_in_batch, freeze
    from aggcli.layout.steps import need_whole_groups, optimizer_steps
    from aggcli.rollouts.sources import open_source

    if not settings.source.rollouts:
        return [freeze(built_in_batch(), settings.objective)]
    found = []
    for batch in open_source(settings.source, settings.seed):
        for note in batch.notes:
            say(f"{batch.name}: {note}")
        parts = optimizer_steps(batch, settings.layout.global_batch_size)
        rules = [find_rule(name) for name in names] or list(MODES)
        for rule in [rule for rule in rules if rule.needs_groups][:1] if bool((batch.group_S >= 0).all()) else ():
            need_whole_groups(batch, parts, rule)
        found += [freeze(batch, settings.objective, part) for part in parts]
    return found


def _rules(names: Sequence[str], has_reducer: bool, divisor: float, settings: RunConfig) -> list[AuditRule]:
    """The rules asked for; without --rules all of them, or with a reducer only the mode it is measured against."""
    from aggcli.audit import NamedRule

    chosen = names or (() if has_reducer else tuple(RULES))
    for remark in filter(None, map(remark_on, names)):
        say(remark)
    found = {name: settings.objective.in_force(find_rule(name)).with_divisor(divisor) for name in chosen}
    return list(dict.fromkeys(NamedRule(rule, remark_on(name)) for name, rule in found.items()))


def _reducers(
    paths: Sequence[str], signature: str | None, ranks: str | None, divisor: float | None
) -> tuple[list[AuditRule], dict[str, tuple[Finding, ...]]]:
    from aggcli.audit import CustomRule, diagnose, reducer_rule
    from aggcli.objective.reducer import load_reducer

    if ranks not in (None, "mean", "sum"):
        raise SettingError(f"--reducer-ranks {ranks}: must be mean or sum")
    rules: list[AuditRule] = []
    findings: dict[str, tuple[Finding, ...]] = {}
    for path in paths:
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
    from aggcli.audit import audit as compare
    from aggcli.audit import layouts_of

    layout = settings.layout
    budget = {"max_tokens": layout.max_tokens_per_gpu, "micro_batch_size": layout.micro_batch_size}
    return compare(frozen, rules, layouts_of(frozen, _layout_texts(frozen, settings), **budget), search=search)


def _layout_texts(frozen: FrozenBatch, settings: RunConfig) -> tuple[str, ...]:
    """The layouts asked for or the default ones, the recorded one first."""
    from aggcli.audit import DEFAULT_LAYOUTS

    texts = settings.layout.layouts or DEFAULT_LAYOUTS
    return texts if frozen.recorded is None or "recorded" in texts else ("recorded", *texts)


# -- what is said ---------------------------------------------------------------------------------------------------


def _print(head: dict[str, Any], audits: Sequence[Audit], json: bool) -> None:
    steps = [audit.as_json() for audit in audits]
    if json:
        from aggcli.records import to_json

        print(to_json({"schema": 1, **head, "steps": [{"step": at, **step} for at, step in enumerate(steps)]}))
        return
    from aggcli.report.audits import audit_tables

    for part in audit_tables(head, steps):
        out().print(part)


def _judge(audits: Sequence[Audit], findings: dict[str, tuple[Finding, ...]], limit: float | None) -> int:
    """Exit code 1 where a check was asked for and failed."""
    if limit is None:
        return ExitCode.DONE
    moved = {r.rule for audit in audits for r in audit.reports if r.deviation > limit}
    faulty = {name for name, found in findings.items() if any(finding.fault for finding in found)}
    if moved or faulty:
        parts = [f"{', '.join(sorted(moved))} vary with the layout by more than {limit:g}"] if moved else []
        parts += [f"{', '.join(sorted(faulty - moved))}: faults in the reducer"] if faulty - moved else []
        raise CheckFailed("; ".join(parts))
    return ExitCode.DONE
