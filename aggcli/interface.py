"""What `import aggcli` offers: the jobs of the command line as functions, for notebooks and scripts.

Settings are the command line's, by their flat names (`eps_clip_high=0.28` for `--eps-clip-high 0.28`). Results show themselves
in a notebook, and have `as_json()` and pandas frames. What a job has to say goes to the logger `aggcli`, level INFO.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aggcli.config import RunConfig, settings_from
from aggcli.errors import SettingError
from aggcli.jobs.listening import Listener, heard_by
from aggcli.rules import check_divisor, find_rule, settled

if TYPE_CHECKING:
    from aggcli.analysis.frames import Frames
    from aggcli.jobs.audit import AuditResult
    from aggcli.jobs.compare import ComparisonOptions, ComparisonResult
    from aggcli.jobs.gradients import GradientsResult
    from aggcli.jobs.plot import PlotResult
    from aggcli.jobs.replay import ReplayResult
    from aggcli.jobs.training import TrainingResult
    from aggcli.rollouts.batch import RolloutBatch
    from aggcli.rollouts.sources import Source

Paths = str | Path | Sequence[str | Path]

_LOG = logging.getLogger("aggcli")


class _Logged(Listener):
    def note(self, text: str) -> None:
        _LOG.info(text)


def read_rollouts(paths: Paths, **settings: Any) -> Source:
    """Recorded rollouts, read as they are iterated over: one `RolloutBatch` a step.

    `paths`: files, folders or globs, `example` (the rollouts that ship with aggcli) or `synthetic`.

        batches = list(aggcli.read_rollouts("dumps/*.pt"))
        batches[0].response_length_S, batches[0].reward_S

    Raises `RolloutError` for what cannot be read, `SettingError` for a setting that is unknown or out of range.
    """
    from aggcli.rollouts.sources import open_source

    config = settings_from({**settings, "rollouts": _texts(paths)})
    return open_source(config.source, config.seed)


def replay(
    rollouts: Paths | RolloutBatch | Iterable[RolloutBatch],
    modes: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> ReplayResult:
    """The same rollouts under several aggregation modes and parallel layouts, without a model.

    `modes`: modes and frameworks' rules, the first being the baseline; default: all modes (one that needs prompt groups is left
    out, with a note, where the rollouts have none). `output`: a results directory to record in; default: none.

        found = aggcli.replay("dumps/*.pt", modes=["sample_mean", "prompt_mean", "trl:bnpo"])
        found.metrics[["step", "mode", "pg_loss", "gradient_ratio"]]

    A layout that changed a number, which no mode allows, is `found.failure`. Raises `RolloutError` and `SettingError`.
    """
    from aggcli.jobs.replay import ReplayRequest
    from aggcli.jobs.replay import replay as replayed

    config, batches = _with_rollouts(rollouts, {**settings, "modes": modes, "layouts": layouts})
    _need_one_rank(config)
    where = None if output is None else Path(output)
    with heard_by(_Logged()):
        return replayed(ReplayRequest("compare", config, modes is None, where, overwrite, record=output is not None), batches)


def advantage_factors(
    trained: Any,
    groups: Sequence[Any] | None = None,
    *,
    mode: str,
    under: str,
    rollouts: Sequence[Any] | None = None,
    advantages: Any = None,
    divisor: float | None = None,
    prompt_mean_scale: Literal["rollouts", "prompts"] = "rollouts",
    under_divisor: float | None = None,
) -> Any:
    """What to multiply each sample's advantage by, so that a trainer whose loss is aggregated by `under` computes `mode`.

    `trained`: of every sample of the optimizer step, over all ranks and micro-batches, its trained tokens: a count each [S],
    masks padded to one width [S, L] (the width counts for rules that divide by it), or a mask each. `groups`, `rollouts`: the
    prompt group and the rollout of each sample, any ids; without rollouts each sample is its own. `advantages` [S]: only for
    rules that look at them. `divisor`: L of `mode="constant"`; `under_divisor`: the constant of `under`, such as TRL's
    max_completion_length.

        factors = aggcli.advantage_factors([3, 1, 1, 1], [0, 0, 1, 1], mode="prompt_mean", under="trl:dapo")

    Returns float64 [S], as `trained` comes: a tensor (on its device), an array, or a list. Exact for the policy loss, with any
    clip. KL and entropy terms are not scaled; statistics of advantages that the trainer logs after this are of the
    scaled ones. A rule that is exact for equal micro-batches only (`aggcli modes` says which) needs those. Prompt groups and
    samples without a trained token are told of, since P and N count them all the same.

    Raises `SettingError` for a rule that the layout changes; `RolloutError` for a sample without a group under a mode that
    counts prompts, for a rule that looks at advantages without any, and for shapes that do not fit.
    """
    from aggcli.objective import factors

    check_divisor(divisor, "divisor")
    check_divisor(under_divisor, "under_divisor")
    wanted = settled(find_rule(mode), prompt_mean_scale=prompt_mean_scale, divisor=divisor)
    given = find_rule(under).with_divisor(under_divisor)
    factors.need_correctable(given)
    for rule, argument in ((wanted, "divisor"), (given, "under_divisor")):
        if rule.needs_divisor:
            constant = "a constant" if rule.is_mode else rule.divisor_is or "a constant"
            raise SettingError(f"{rule.name} divides by {constant}: give {argument}=L, a positive number of tokens")
    step = factors.as_step(trained, groups, rollouts, advantages)
    factors.need_groups_of(step, wanted, given)
    found_S = factors.advantage_factors(step, wanted, given)
    for said in factors.without_tokens(step):
        _LOG.info(said)
    return factors.as_given(found_S, trained)


def audit(
    rollouts: Paths | RolloutBatch | Iterable[RolloutBatch] | None = None,
    rules: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    *,
    reducers: Sequence[str] = (),
    divisor: float | None = None,
    limit: float | None = None,
    search: bool = True,
    **settings: Any,
) -> AuditResult:
    """Which rules give the same gradient under every layout, which do not, and why, on a frozen batch.

    `rollouts`: default a built-in batch that is made to tell rules apart. `rules`: default all. `reducers`: your own, each
    `pkg.mod:fn`. `limit`: the relative change of a weight from which `failure` says so.

        aggcli.audit(rules=["token_mean", "trl:bnpo"]).rules[["rule", "verdict", "deviation"]]

    Raises `RolloutError` and `SettingError`.
    """
    from aggcli.jobs.audit import AuditRequest
    from aggcli.jobs.audit import audit as audited

    config, batches = _with_rollouts(rollouts, {**settings, "layouts": layouts})
    named = tuple(map(find_rule, rules or ()))
    with heard_by(_Logged()):
        return audited(AuditRequest(config, named, tuple(reducers), divisor=divisor, limit=limit, search=search), batches)


def train(
    modes: Sequence[str] | None = None,
    seeds: int | None = None,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    **settings: Any,
) -> TrainingResult:
    """Train small loops, modes x seeds as one stack, everything but the mode and the seed the same.

    `modes`: default all modes; `seeds`: how many, default 3; `output`: the results directory, default a new one under results/.

        trained = aggcli.train(modes=["sample_mean", "prompt_mean"], seeds=3, steps=50)
        aggcli.compare(trained.directory)

    A run that diverged, or a layout that changed a number, is `trained.failure`. Raises `SettingError` and `RecordError`.
    """
    from aggcli.jobs.training import TrainingRequest, seeds_of
    from aggcli.jobs.training import train as trained

    config = settings_from({**settings, "modes": modes, "seeds": seeds})
    _need_one_rank(config)
    where = None if output is None else Path(output)
    with heard_by(_Logged()):
        found = trained(TrainingRequest("compare", config, config.compared, seeds_of(config), where, overwrite, resume))
    assert found is not None, "this process is the root of its world"
    return found


def gradients(
    rollouts: Paths | None = None, modes: Sequence[str] | None = None, *, model: str | Path | None = None, **settings: Any
) -> GradientsResult:
    """What modes do to the parameters: each mode's gradient on the same rollouts, by group of parameters; nothing is trained.

    `rollouts`: recorded ones with token ids, each file a step; default: the first that the policy samples. `model`: a folder or
    a Hugging Face id; default: the small policy. `modes`: the first is the baseline; default all modes.

        found = aggcli.gradients("dumps/*.jsonl", model="path/of/a/model")
        found.gradients[["step", "parameters", "mode", "norm_ratio", "cosine"]]

    Raises `RolloutError` and `SettingError`.
    """
    from aggcli.jobs.gradients import gradients as measured

    given = {} if rollouts is None else {"rollouts": _texts(rollouts), "train": True}
    named = {} if model is None else {"model": str(model)}
    with heard_by(_Logged()):
        return measured(settings_from({**settings, **given, **named, "modes": modes}))


def compare(
    directories: Paths | None = None,
    *,
    curves: Mapping[str, str | Path] | None = None,
    metrics: Mapping[str, str] | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,
) -> ComparisonResult:
    """The runs in these results directories by mode: a verdict, paired differences from the baseline with 95 % intervals. Or,
    of `curves`, runs that other trainers made, by arm.

    `curves`: arm -> the pattern of its runs: event files, `trainer_state.json`, CSV, JSON lines, or results directories;
    `metrics`: key -> the column that it is in these logs; `output`: a folder in which their numbers are kept and drawn, with a
    page (`found.page`); default: none. `options`: those of `aggcli.jobs.compare.ComparisonOptions`, such as `baseline`,
    `reach`, `window`.

        found = aggcli.compare("results/compare")
        found.verdict, found.outcomes
        aggcli.compare(curves={"grpo": "runs/grpo-*", "dapo": "runs/dapo-*"}, metrics={"reward": "critic/rewards/mean"})

    Raises `RecordError` for a folder that holds no results and a log that cannot be read, `SettingError` for an option.
    """
    from aggcli.jobs.compare import ComparisonOptions
    from aggcli.jobs.compare import compare as compared

    given = None if not options else _options(ComparisonOptions, options)
    if curves is not None:
        from aggcli.jobs.curves import compare_curves

        if directories is not None:
            raise SettingError("compare: give directories or curves; a results directory beside other runs is an arm too")
        arms, columns = _words("curves", curves, _PATTERN), _words("metrics", metrics or {}, _COLUMN)
        if not arms:
            raise SettingError(f"compare: curves: names no arm; give {_PATTERN}")
        with heard_by(_Logged()):
            return compare_curves(arms, columns, given, None if output is None else Path(output), overwrite=overwrite)
    if metrics is not None or output is not None or overwrite:
        raise SettingError("compare: metrics, output and overwrite are of curves; results directories need none")
    if directories is None:
        raise SettingError("compare: give results directories, or curves")
    from aggcli.analysis.kept_curves import holds_curves
    from aggcli.jobs.curves import compare_kept

    paths = _paths(directories)
    return compare_kept(paths[0], given) if len(paths) == 1 and holds_curves(paths[0]) else compared(paths, given)


_PATTERN, _COLUMN = '{"grpo": "runs/grpo-*"}', '{"reward": "critic/rewards/mean"}'


def _words(name: str, given: Any, example: str) -> list[str]:
    """`KEY=VALUE` of each; `name`: the argument. Raises `SettingError` for what is no mapping of texts or paths."""
    if not isinstance(given, Mapping):
        raise SettingError(f"compare: {name}: must be a dict, such as {example}, not a {type(given).__name__}")
    for key, value in given.items():
        if not isinstance(value, str | Path):
            raise SettingError(f"compare: {name}: {key} is a {type(value).__name__}; it must be one text, as in {example}")
    return [f"{key}={value}" for key, value in given.items()]


def _options(kind: Callable[..., ComparisonOptions], options: Mapping[str, Any]) -> ComparisonOptions:
    try:
        return kind(**options)
    except TypeError as error:
        raise SettingError(f"compare: {error}".replace("ComparisonOptions.__init__() ", "")) from error


def load_results(directories: Paths) -> Frames:
    """What results directories hold, as pandas frames: `metrics`, `layouts`, `ranks` and `samples`.

        frames = aggcli.load_results("results/compare")
        frames.metrics.groupby("mode")["pg_loss"].mean()

    Raises `RecordError` for a folder that holds no results.
    """
    from aggcli.analysis.frames import read_frames

    return read_frames(_paths(directories))


def plot(
    directories: Paths,
    output: str | Path | None = None,
    *,
    formats: Sequence[Literal["png", "svg", "pdf"]] = ("png",),
    step: int | None = None,
    html: bool = False,
    size: Literal["column", "page", "screen"] = "screen",
    titles: bool = True,
) -> PlotResult:
    """Draw every figure that the records hold something for; with `html` also one self-contained page. `size`: for one or both
    columns of a paper, or a screen. A folder that `compare(curves=..., output=...)` wrote is drawn again without the logs.

        drawn = aggcli.plot("results/compare", html=True)
        drawn.report, dict(drawn.figures)

    Raises `RecordError` where nothing can be drawn or written.
    """
    from aggcli.jobs.plot import plot as draw

    with heard_by(_Logged()):
        return draw(
            _paths(directories), None if output is None else Path(output), formats, step, html=html, size=size, titles=titles
        )


# -- arguments --------------------------------------------------------------------------------------------------------


def _texts(paths: Paths) -> tuple[str, ...]:
    return tuple(map(str, _paths(paths)))


def _paths(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]


def _with_rollouts(
    rollouts: Paths | RolloutBatch | Iterable[RolloutBatch] | None, settings: dict[str, Any]
) -> tuple[RunConfig, list[RolloutBatch] | None]:
    """The settings, and the batches where they were given as such."""
    if rollouts is None:
        return settings_from(settings), None
    if isinstance(rollouts, (str, Path)):
        return settings_from({**settings, "rollouts": _texts(rollouts)}), None
    from aggcli.rollouts.batch import RolloutBatch

    listed = [rollouts] if isinstance(rollouts, RolloutBatch) else list(rollouts)
    if listed and all(isinstance(item, (str, Path)) for item in listed):
        return settings_from({**settings, "rollouts": tuple(map(str, listed))}), None
    if not listed or not all(isinstance(item, RolloutBatch) for item in listed):
        raise SettingError("rollouts: must be paths, or batches such as `aggcli.read_rollouts` gives, and at least one")
    return settings_from(settings), [item for item in listed if isinstance(item, RolloutBatch)]


def _need_one_rank(config: RunConfig) -> None:
    """Real ranks are processes of the program, which a function cannot start. Raises `SettingError`."""
    if config.layout.dp * config.layout.cp > 1:
        raise SettingError(
            f"dp={config.layout.dp}, cp={config.layout.cp}: real ranks are started by the command line (`aggcli run --dp"
            f" {config.layout.dp}`); give layouts=[...] to evaluate layouts in this process"
        )
