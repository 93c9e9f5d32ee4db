"""`aggcli audit`: one frozen batch under many layouts and every framework's rule, or anybody's reducer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aggcli.cli.console import out, say
from aggcli.cli.options import ConfigOption, JsonOption, comma_list, resolve, with_paths, with_settings
from aggcli.config import FIELDS, SOURCE_SETTINGS
from aggcli.errors import CheckFailed, ExitCode
from aggcli.rules import find_rule, remark_on

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
    from aggcli.jobs.audit import AuditRequest
    from aggcli.jobs.audit import audit as audited

    named = comma_list(rules or ())
    for remark in filter(None, map(remark_on, named)):
        say(remark)
    request = AuditRequest(
        resolve(with_paths(given, paths), config),
        tuple(map(find_rule, named)),
        tuple(reducer or ()),
        reducer_signature,
        reducer_ranks,
        divisor,
        fail_on_variance,
        search,
    )
    result = audited(request)
    if json:
        from aggcli.records import to_json

        print(to_json(result.as_json()))
    else:
        for part in result.tables():
            out().print(part)
    if result.failure:
        raise CheckFailed(result.failure)
    return ExitCode.DONE
