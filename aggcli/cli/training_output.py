"""What `run` and `compare` say before they train, and what they record, print and draw at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.analysis.tolerance import TOLERANCE
from aggcli.cli.console import out, say
from aggcli.errors import CheckFailed, ExitCode, RecordError, some
from aggcli.measurement.words import plural

if TYPE_CHECKING:
    from aggcli.cli.training import Outcome, TrainingRequest
    from aggcli.grid import Setup
    from aggcli.measurement.comparison import LayoutComparison
    from aggcli.rules import Rule
    from aggcli.training.stack import RunSpec


def say_before(
    request: TrainingRequest, setup: Setup, runs: Sequence[RunSpec], directory: Path, resumed_at: int | None
) -> None:
    """What is about to be trained, and whether the modes can differ on it at all."""
    from aggcli.grid import predicted_gap

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
    if resumed_at is not None:
        say(f"resuming {directory} at step {resumed_at}")
    if setup.task is None:
        return
    gap = predicted_gap(setup, request.modes, request.seeds[0])
    say(
        f"before training: accuracy {gap.start.accuracy:.3f}, response length {gap.start.response_length:.1f} tokens"
        f" (standard deviation {gap.start.response_length_std:.1f}){_on_the_longest(gap.shares)}"
    )
    if gap.start.response_length_std == 0:
        say("every response has the same length, so the modes cannot differ on this task")


def _on_the_longest(shares: Mapping[str, float]) -> str:
    """Empty where no mode has a share that can be foretold, as frameworks' rules have none."""
    told = ", ".join(f"{mode} {share:.2f}" for mode, share in shares.items())
    return f"; weight on the longest quarter of responses: {told}" if told else ""


def _varying(rules: Sequence[Rule]) -> dict[str, list[str]]:
    """Why some of these rules depend on the layout -> the rules of which that is the reason."""
    found: dict[str, list[str]] = {}
    for rule in rules:
        if rule.depends_on_layout:
            found.setdefault(rule.why_it_depends(), []).append(rule.name)
    return found


def summary_of(setup: Setup, runs: Sequence[RunSpec], outcomes: Sequence[Outcome], directory: Path) -> dict[str, Any]:
    """Final figures on fresh prompts; on recorded rollouts, which have no fresh prompts, the numbers of the last step."""
    from aggcli import records
    from aggcli.analysis.final import final_summary, last_step_summary

    names = [(run.name, run.mode, run.seed) for run in runs]
    if setup.task is not None:
        return final_summary(names, {name: found for outcome in outcomes for name, found in outcome.final.items()})
    lines = {run.name: list(records.read_lines(directory / run.name / records.METRICS)) for run in runs}
    return last_step_summary(names, {name: found[-1] for name, found in lines.items() if found})


def finish(
    request: TrainingRequest,
    setup: Setup,
    runs: Sequence[RunSpec],
    summary: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    directory: Path,
) -> int:
    """Print and draw the final figures. Raises `CheckFailed` where a layout changed a number or a run diverged."""
    from aggcli.analysis.divergence import is_collapsed
    from aggcli.records import to_json
    from aggcli.report.training_tables import last_step_table, training_table

    if request.json:
        print(to_json({"schema": 1, "results": str(directory), **summary, **_steps_json(request, directory)}))
    else:
        out().print(last_step_table(summary) if setup.task is None else training_table(summary))
    if request.command == "compare":
        _draw(directory)
    silent_steps = sum(outcome.silent_steps for outcome in outcomes)
    if silent_steps:
        one = "step of a run had only groups of equal rewards: it carries no signal and changes nothing"
        several = "steps of runs had only groups of equal rewards: they carry no signal and change nothing"
        say(plural(silent_steps, one, several))
    if told_apart := sum(outcome.told_apart for outcome in outcomes):
        one = "step of a run was trained on a group without a right answer whose advantages are not 0"
        several = "steps of runs were trained on groups without a right answer whose advantages are not 0"
        say(f"warning: {plural(told_apart, one, several)}: a penalty tells wrong answers apart")
    final = {name: found for outcome in outcomes for name, found in outcome.final.items()}
    for run in (run for run in runs if run.name in final):
        if is_collapsed(final[run.name]["accuracy"], final[run.name]["response_length"], setup.response_limit):
            say(
                f"{run.mode}, seed {run.seed}: accuracy 0 and every response at the limit of {setup.response_limit} tokens on"
                " fresh prompts: collapsed, or nothing was ever learned"
            )
    say(f"recorded in {directory}")
    _check_layouts(request, outcomes)
    diverged = [text for outcome in outcomes for text in outcome.diverged]
    if diverged:
        raise CheckFailed(f"{len(diverged)} of {len(runs)} runs diverged: {diverged[0]}")
    return ExitCode.DONE


def _check_layouts(request: TrainingRequest, outcomes: Sequence[Outcome]) -> None:
    """Say how far layouts were apart in the steps that were checked. Raises `CheckFailed` where one changed a number."""
    from aggcli.measurement.comparison import between_layouts, beyond_rounding, together

    found = [one for outcome in outcomes for one in outcome.layouts]
    if not found:
        return
    by_step: dict[int, list[LayoutComparison]] = {}
    for _, number, comparison in found:
        by_step.setdefault(number, []).append(comparison)
    steps = plural(len(by_step), "optimizer step was evaluated", "optimizer steps were evaluated")
    said = between_layouts([together(by_step[number]) for number in sorted(by_step)])
    say("; ".join([f"{steps} under several layouts ({some(sorted(by_step))})", *said]))
    for run, number, comparison in found:
        if said := beyond_rounding([(number, comparison)], TOLERANCE[request.config.dtype or "float64"]):
            where = "" if run == "." else f"{run}, "
            raise CheckFailed(f"{where}{said}; layouts.jsonl holds them")


def _steps_json(request: TrainingRequest, directory: Path) -> dict[str, Any]:
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


def _draw(directory: Path) -> None:
    """The learning curves of a comparison, beside its records."""
    os.environ["MPLBACKEND"] = "agg"
    from aggcli.analysis.frames import read_frames
    from aggcli.analysis.histories import read_histories
    from aggcli.analysis.study import compared_runs
    from aggcli.records import refuse_links
    from aggcli.report.curves import learning_curves
    from aggcli.report.style import save

    folder = directory / "figures"
    try:
        refuse_links([folder])
        folder.mkdir(exist_ok=True)
        frames = read_frames([directory], only_metrics=True)
        runs, _, _ = compared_runs(read_histories([run.directory for run in frames.runs])[0])
        save(learning_curves(frames, runs), folder / "learning_curves.png")
    except RecordError as error:
        say(str(error))
    else:
        say(f"figure: {folder / 'learning_curves.png'}")
