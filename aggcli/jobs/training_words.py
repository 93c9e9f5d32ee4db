"""What a training job has to say before it begins and once it has ended, and the curves that it draws."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from aggcli.analysis.answer import Answer
from aggcli.analysis.tolerance import TOLERANCE
from aggcli.errors import RecordError, some
from aggcli.jobs.listening import say
from aggcli.measurement.words import listed, plural, short

if TYPE_CHECKING:
    from aggcli.analysis.study import Study
    from aggcli.grid import Setup
    from aggcli.jobs.training import Trained, TrainingRequest, TrainingResult
    from aggcli.measurement.comparison import LayoutComparison
    from aggcli.rules import Rule
    from aggcli.training.stack import RunSpec
    from aggcli.world import World


def foretell(request: TrainingRequest, runs: Sequence[RunSpec], directory: Path, resumed: str) -> None:
    """Say what is about to be trained. `resumed`: where it is gone on from, blank where it begins."""
    training = request.config.training
    if request.command == "run":
        say(f"mode: {request.modes[0].name}")
    for rule in dict.fromkeys(run.rule for run in runs if run.rule.divisor is not None and run.rule.takes_divisor):
        say(f"{rule.name} divides by {rule.divisor:g} tokens")
    for reason, rules in _varying(request.modes).items():
        say(f"{some(rules, 4)} {'varies' if len(rules) == 1 else 'vary'} with the layout: {reason}")
    if training.match == "grad-norm":
        rates = ", ".join(f"{run.mode}/{run.seed} {run.lr:.4g}" for run in runs)
        say(f"learning rates, matched by the size of the first update: {rates}")
    if training.n_samples_per_prompt == 1:
        say("one rollout per prompt: every advantage is 0, so there is no signal; raise --n-samples-per-prompt")
    if resumed:
        say(f"resuming {directory} at {resumed}")


def accuracy_before(request: TrainingRequest, setup: Setup, world: World) -> float:
    """The accuracy before training; the root says it, and whether the modes can differ at all. Every rank must call it."""
    from aggcli.grid import predicted_gap

    gap = predicted_gap(setup, request.modes, request.seeds[0], world)
    if not world.is_root:
        return gap.start.accuracy
    say(
        f"before training: accuracy {gap.start.accuracy:.3f}, response length {gap.start.response_length:.1f} tokens"
        f" (standard deviation {gap.start.response_length_std:.1f}){_on_the_longest(gap.shares)}"
    )
    if gap.start.response_length_std == 0:
        say("every response has the same length, so the modes cannot differ on this task")
    return gap.start.accuracy


def _on_the_longest(shares: Mapping[str, float]) -> str:
    """Empty where no mode has a share that can be foretold, as frameworks' rules have none."""
    told = ", ".join(f"{mode} {share:.2f}" for mode, share in shares.items())
    return f"; weight on responses longer than 3/4 of the maximum: {told}" if told else ""


def _varying(rules: Sequence[Rule]) -> dict[str, list[str]]:
    """Why some of these rules depend on the layout -> the rules of which that is the reason."""
    found: dict[str, list[str]] = {}
    for rule in rules:
        if rule.depends_on_layout:
            found.setdefault(rule.why_it_depends(), []).append(rule.name)
    return found


def summary_of(
    request: TrainingRequest, response_limit: int, runs: Sequence[RunSpec], shares: Sequence[Trained], directory: Path
) -> dict[str, Any]:
    """Final figures on fresh prompts; on recorded rollouts, which have no fresh prompts, the numbers of the last step."""
    from aggcli import records
    from aggcli.analysis.final import final_summary, last_step_summary

    names = [(run.name, run.mode, run.seed) for run in runs]
    if not request.config.source.rollouts:
        final = {name: found for share in shares for name, found in share.final.items()}
        return final_summary(names, final, response_limit)
    lines = {run.name: list(records.read_lines(directory / run.name / records.METRICS)) for run in runs}
    return last_step_summary(names, {name: found[-1] for name, found in lines.items() if found})


def answer_of_a_run(result: TrainingResult) -> Answer:
    """What went wrong, and where each run got to on fresh prompts; on recorded rollouts, that none could be evaluated."""
    said = [f"{result.failure}."] if result.failure else []
    steps = plural(result.request.config.training.steps, "step")
    final = {name: found for share in result.shares for name, found in share.final.items()}
    if result.request.config.source.rollouts:
        runs = plural(len(result.runs), "run was", "runs were")
        said.append(
            f"{runs} trained for {steps} on recorded rollouts, whose accuracy and lengths no mode can change; the table has the"
            " numbers of the last optimizer step."
        )
    gone = collapsed(result)
    said += gone.values()
    for run in (run for run in result.runs if run.name in final and run.name not in gone):
        found = final[run.name]
        before = "" if result.accuracy_before is None else f" ({short(result.accuracy_before)} before)"
        lengths = [f"responses of {_tokens(found['response_length'])}"]
        lengths += [
            f"{which} ones of {_tokens(length)}"
            for which, length in (("right", found["correct_response_length"]), ("wrong", found["incorrect_response_length"]))
            if length is not None
        ]
        said.append(
            f"{run.mode}, seed {run.seed}, after {steps}: accuracy {_of(found['accuracy'])}{before} on"
            f" {found['prompts']} fresh prompts; {', '.join(lengths)}."
        )
    return Answer(tuple(said))


def collapsed(result: TrainingResult) -> dict[str, str]:
    """Run -> a sentence, of each that ended without a right answer and with every response at the limit: what it came from,
    by the accuracy before training."""
    from aggcli.analysis.divergence import is_collapsed

    final = {name: found for share in result.shares for name, found in share.final.items()}
    limit = result.response_limit
    before, steps = result.accuracy_before, plural(result.request.config.training.steps, "step")
    what = "collapsed" if before else "never learned anything" if before == 0 else "collapsed or never learned anything"
    start = "" if before is None else f" ({short(before)} before)"
    return {
        run.name: f"{run.mode}, seed {run.seed}, {what}: after {steps}, accuracy 0{start} and every response at the limit of"
        f" {limit} tokens, on {final[run.name]['prompts']} fresh prompts."
        for run in result.runs
        if run.name in final and is_collapsed(final[run.name]["accuracy"], final[run.name]["response_length"], limit)
    }


def _tokens(length: float | None) -> str:
    return f"{_of(length)} tokens"


def _of(value: float | None) -> str:
    return "unknown" if value is None else short(value)


def settings_in_words(result: TrainingResult) -> list[str]:
    """What was trained and how, with what dynamic sampling and the overlong penalty did, a line each."""
    from aggcli.report.tables import policy_loss_in_words

    config = result.request.config
    training, objective = config.training, config.objective
    seeds = list(dict.fromkeys(run.seed for run in result.runs))
    names = ", ".join(dict.fromkeys(run.mode for run in result.runs))
    recorded = bool(config.source.rollouts)
    of = (
        "recorded rollouts" if recorded else f"{training.rollout_batch_size} prompts x {training.n_samples_per_prompt} rollouts"
    )
    said = [
        f"{plural(len(result.runs), 'run')}: {names}; {'seed' if len(seeds) == 1 else 'seeds'} {some(seeds)}",
        f"{plural(training.steps, 'step')} of {of}, learning rate {training.lr:g}, "
        + ", ".join(policy_loss_in_words(vars(objective))),
    ]
    if training.dynamic_sampling and "groups_kept" in (metrics := result.metrics):
        generated, kept = (
            float(metrics[name].to_numpy(dtype="float64").mean()) for name in ("groups_generated", "groups_kept")
        )
        said.append(
            f"dynamic sampling: {short(generated)} prompt groups sampled a step, {short(kept)} trained on (means over runs and"
            " steps)"
        )
    if training.overlong_buffer:
        said.append(f"overlong penalty: down to -1 over the last {training.overlong_buffer} tokens of {result.response_limit}")
    if objective.mask_truncated:
        said.append("--mask-truncated: truncated responses have a loss mask of 0 and count in N")
    return said


def closing_notes(result: TrainingResult) -> list[str]:
    """What is to be known once training has ended: steps without a signal or a token, and how far layouts were
    apart."""
    shares, notes = result.shares, []
    since = "since it was resumed: " if result.request.resume else ""
    if silent_steps := sum(share.silent_steps for share in shares):
        one, several = (f"{who} had only groups of equal rewards" for who in ("step of a run", "steps of runs"))
        notes.append(f"{since}{plural(silent_steps, one, several)}: the policy loss has no gradient there; {_moving(result)}")
    if empty_steps := sum(share.empty_steps for share in shares):
        one = "step of a run had no trained token: it took no optimizer step and changed nothing"
        several = "steps of runs had no trained token: they took no optimizer step and changed nothing"
        notes.append(since + plural(empty_steps, one, several))
    if told_apart := sum(share.told_apart for share in shares):
        one = "step of a run was trained on a group without a right answer whose advantages are not 0"
        several = "steps of runs were trained on groups without a right answer whose advantages are not 0"
        notes.append(f"warning: {since}{plural(told_apart, one, several)}: a penalty tells wrong answers apart")
    return [*notes, f"recorded in {result.directory}", *(since + note for note in _between_layouts(shares))]


def _moving(result: TrainingResult) -> str:
    """What can move parameters in a step whose policy loss has no gradient."""
    training, objectives = result.request.config.training, [run.objective for run in result.runs]
    others = {
        "AdamW's moments of earlier steps": training.optimizer == "adamw",
        "weight decay": training.weight_decay,
        "the KL term": any(objective.kl_coef for objective in objectives),
        "the entropy term": any(objective.entropy_coef for objective in objectives),
    }
    found = [what for what, moves in others.items() if moves]
    return f"{listed(found)} can still move the parameters" if found else "no parameter moves"


def _between_layouts(shares: Sequence[Trained]) -> list[str]:
    """How far layouts were apart in the steps that were checked."""
    from aggcli.measurement.comparison import between_layouts, together

    by_step: dict[int, list[LayoutComparison]] = {}
    for _, number, comparison in (one for share in shares for one in share.layouts):
        by_step.setdefault(number, []).append(comparison)
    if not by_step:
        return []
    steps = plural(len(by_step), "optimizer step was evaluated", "optimizer steps were evaluated")
    compared = [together(by_step[number]) for number in sorted(by_step)]
    said = between_layouts(compared)
    if all(len(one.layouts) < 2 for one in compared):
        return said
    return ["; ".join([f"{steps} under several layouts ({some(sorted(by_step))})", *said])]


def layouts_apart(request: TrainingRequest, shares: Sequence[Trained]) -> str:
    """Which layout changed a number of which run, blank where none did."""
    from aggcli.measurement.comparison import beyond_rounding

    for run, number, comparison in (one for share in shares for one in share.layouts):
        if said := beyond_rounding([(number, comparison)], TOLERANCE[request.config.dtype or "float64"]):
            where = "" if run == "." else f"{run}, "
            return f"{where}{said}; layouts.jsonl holds them"
    return ""


def steps_json(request: TrainingRequest, directory: Path) -> dict[str, Any]:
    """For `run`: every optimizer step in the shape that replay prints."""
    if request.command != "run":
        return {}
    from aggcli import records

    layouts: dict[int, dict[str, Any]] = {}
    for line in records.read_lines(directory / records.LAYOUTS):
        layouts.setdefault(line["step"], {})[line["layout"]] = line
    mode = request.modes[0].name
    return {
        "steps": [
            {"step": line["step"], "modes": {mode: {**line, "layouts": layouts.get(line["step"], {})}}}
            for line in records.read_lines(directory / records.METRICS)
        ]
    }


_FOLLOWING = (
    "pydantic.type_adapter",
    "scipy.optimize",
    "aggcli.analysis.study",
    "aggcli.report.training_tables",
    "aggcli.report.curves",
)
"""Modules that the answer and the curves of a comparison need."""


def import_what_follows(stop: Event) -> None:
    """Import `_FOLLOWING` while the shares of a comparison are at work elsewhere; no more of it once `stop` is set. For a
    command: it settles how this process draws."""
    _settle_drawing()
    with suppress(Exception):  # what cannot be imported is told of where it is needed
        for name in _FOLLOWING:
            if stop.is_set():
                return
            import_module(name)


def _settle_drawing() -> None:
    os.environ["MPLBACKEND"] = "agg"  # a backend that matplotlib does not know stops its import


def draw_curves(directory: Path, study: Study | None) -> str:
    """Draw the learning curves of a comparison beside its records; what is to be said of it. `study`: that of these records,
    None where there is none."""
    _settle_drawing()
    from aggcli.analysis.frames import read_frames
    from aggcli.records import refuse_links
    from aggcli.report.curves import learning_curves
    from aggcli.report.style import save

    folder = directory / "figures"
    try:
        refuse_links([folder])
        folder.mkdir(exist_ok=True)
        frames = read_frames([directory], only_metrics=True)
        if study is None:
            return f"{directory}: its runs cannot be compared, so no learning curve is drawn"
        save(learning_curves(frames, study.runs), folder / "learning_curves.png")
    except RecordError as error:
        return str(error)
    return f"figure: {folder / 'learning_curves.png'}"
