"""`aggcli audit`: one frozen batch under many layouts and every framework's rule, or anybody's reducer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aggcli.cli.console import say, show
from aggcli.cli.live import notes_after
from aggcli.cli.options import ConfigOption, JsonOption, comma_list, offered, resolve, with_paths, with_settings
from aggcli.config import FIELDS, LAUNCH_SETTINGS, SOURCE_SETTINGS
from aggcli.errors import CheckFailed, ExitCode, SettingError
from aggcli.rules import RULES, find_rule, remark_on
from aggcli.rules.reference import FRAMEWORKS, rules_of

_TAKEN = (
    *SOURCE_SETTINGS,
    *("prompt_mean_scale", "normalizer", "advantages", "policy_loss", "eps_clip", "eps_clip_high", "eps_clip_c"),
    *("layouts", "max_tokens_per_gpu", "micro_batch_size", "global_batch_size", "seed"),
    *(name for name in FIELDS if name.startswith("synthetic_")),
    *(name for name in LAUNCH_SETTINGS if name != "shares"),
)
"""The settings that are options of an audit too."""

_PATHS = "Files, folders, globs, example or synthetic. Default: a built-in batch, made to tell rules apart."
PathsArgument = Annotated[list[str] | None, typer.Argument(metavar="ROLLOUTS", help=_PATHS)]
RulesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rules",
        metavar="RULE,...",
        help="Modes, or rules such as verl:token-mean. Or aliases of either. Default: all.",
        autocompletion=offered(RULES, listed=True),
    ),
]
FrameworkOption = Annotated[
    list[str] | None,
    typer.Option(
        "--framework",
        metavar="NAME",
        help="All rules of a framework, such as trl. Beside those of --rules; repeat it for several.",
        autocompletion=offered(FRAMEWORKS),
    ),
]
ReducerOption = Annotated[
    list[str] | None,
    typer.Option("--reducer", metavar="PKG.MOD:FN", help="A reducer of your own, audited too. Repeat it for several."),
]
SignatureOption = Annotated[
    str | None,
    typer.Option(
        "--reducer-signature",
        metavar="KIND",
        help="How it is called: slime, matrix or flat. Default: by its parameters.",
        autocompletion=offered(("slime", "matrix", "flat")),
    ),
]
RanksOption = Annotated[
    str | None,
    typer.Option(
        "--reducer-ranks",
        metavar="mean|sum",
        help="How its framework combines ranks. Default: mean for matrix.",
        autocompletion=offered(("mean", "sum")),
    ),
]
DivisorOption = Annotated[
    float | None,
    typer.Option(
        "--divisor", metavar="L", help="Divisor of constants, and padded width. In tokens. Default: the longest response."
    ),
]
FailOption = Annotated[
    float | None,
    typer.Option(
        "--fail-on-variance",
        metavar="X",
        help="Exit 1 if a weight changes by more than X of itself, under layouts of its framework; or a reducer is at fault.",
    ),
]
SearchOption = Annotated[
    bool, typer.Option("--search/--no-search", help="Find the smallest example of each rule that varies (default: yes).")
]
ExplainOption = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="RULE",
        help="The smallest failing example of a rule, as a text for its framework's issue tracker. Such as trl:bnpo.",
        autocompletion=offered(RULES),
    ),
]


_ABOUT_LAYOUTS = (
    "Layouts to evaluate, the reference first. Each is dp<N>[cp<M>][:rule][@tokens|:mb<K>] or `recorded`."
    " Default: the recorded layout of a train dump, then dp1:contiguous with one micro-batch and with 1, 2 and 4 samples a"
    " micro-batch, dp2:interleaved:mb2, dp2:contiguous:mb2, dp2cp2:contiguous, dp4:interleaved:mb1, dp4:balanced."
)


@with_settings(without=[name for name in FIELDS if name not in _TAKEN], about={"layouts": _ABOUT_LAYOUTS})
def audit(
    given: dict[str, Any],
    paths: PathsArgument = None,
    rules: RulesOption = None,
    framework: FrameworkOption = None,
    reducer: ReducerOption = None,
    reducer_signature: SignatureOption = None,
    reducer_ranks: RanksOption = None,
    divisor: DivisorOption = None,
    fail_on_variance: FailOption = None,
    search: SearchOption = True,
    explain: ExplainOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Would a different layout have changed the gradient? Which rules give the same one under every layout, and which do not.

    The first layout is the reference. A rule is called invariant over the layouts that it was evaluated under; those that its
    framework cannot represent are named. Exit code 1 only with --fail-on-variance.
    """
    if explain is not None:
        if paths or rules or reducer:
            raise SettingError(f"--explain {explain} makes its own example: leave rollouts, --rules and --reducer out")
        return _explain(explain, framework or [], json=json)
    from aggcli.jobs.audit import AuditRequest
    from aggcli.jobs.audit import audit as audited

    named = comma_list(rules or ())
    for remark in filter(None, map(remark_on, named)):
        say(remark)
    request = AuditRequest(
        resolve(with_paths(given, paths), config),
        (*map(find_rule, named), *(rule for name in framework or () for rule in rules_of(name))),
        tuple(reducer or ()),
        reducer_signature,
        reducer_ranks,
        divisor,
        fail_on_variance,
        search,
    )
    with notes_after():
        result = audited(request)
        if json:
            from aggcli.records import to_json

            print(to_json(result.as_json()))
        else:
            show(result.tables())
    if result.failure:
        raise CheckFailed(result.failure)
    return ExitCode.DONE


def _explain(name: str, frameworks: list[str], *, json: bool) -> int:
    """Print the text, which is not wrapped, so that it can be pasted."""
    from aggcli.jobs.explain import explained, named

    if len(frameworks) > 1:
        raise SettingError(f"--explain {name}: give one --framework, not {len(frameworks)}")
    for framework in frameworks:
        rules_of(framework)  # the nearest name of one that is not known
    found = explained(named(name, frameworks[0] if frameworks else None))
    if json:
        from aggcli.records import to_json

        print(to_json({"schema": 1, **found}))
    else:
        print(found["text"])
    return ExitCode.DONE
