"""What `run` and `compare` share when they train: ranks, records, progress, checkpoints, and the figures at the end."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli.cli.console import invocation, out, say
from aggcli.cli.replaying import TOLERANCE, counted_in, fitted_to_launcher
from aggcli.config import RunConfig, to_flat, to_toml
from aggcli.errors import AggcliError, CheckFailed, ExitCode, RecordError, SettingError

if TYPE_CHECKING:
    from aggcli.grid import Evaluation, Setup
    from aggcli.records import RunWriter
    from aggcli.training.loop import Diverged, Trainer
    from aggcli.training.stack import RunSpec
    from aggcli.world import World


@dataclass(frozen=True)
class TrainingRequest:
    """One invocation of `run` or `compare` that trains."""

    command: str
    config: RunConfig
    modes: tuple[str, ...]
    seeds: tuple[int, ...]
    output: Path | None
    overwrite: bool
    resume: bool
    json: bool


def training_command(request: TrainingRequest) -> int:
    """Start or join ranks where there is more than one, and train. Returns the exit code."""
    from aggcli import world as worlds

    _refuse(request)
    request = dataclasses.replace(request, modes=counted_in(request.config.objective.normalizer, request.modes))
    layout = request.config.layout
    if not worlds.was_started_by_torchrun():
        if layout.dp * layout.cp > 1:
            if layout.dp * layout.cp > 2 * (os.cpu_count() or 1):
                say(f"starting {layout.dp * layout.cp} ranks on {os.cpu_count()} cores, which takes a while")
            worlds.start_ranks(layout.dp * layout.cp, invocation())
            return ExitCode.DONE
        return _train(request, worlds.ALONE)
    world = worlds.join()
    try:
        config = fitted_to_launcher(request.config, world.size)
        return _train(dataclasses.replace(request, config=config), world)
    except (AggcliError, KeyboardInterrupt) as error:
        if world.is_root or isinstance(error, worlds.PeerLost):
            raise
        raise worlds.RankFailed("", getattr(error, "exit_code", ExitCode.INTERRUPTED)) from None  # the root says it once
    finally:
        worlds.leave(world)


def _refuse(request: TrainingRequest) -> None:
    """Refuse settings that training cannot use, before anything is started."""
    from aggcli import grid
    from aggcli.layout.steps import layouts_of

    config, objective, training = request.config, request.config.objective, request.config.training
    if objective.custom_pg_loss_reducer_function_path:
        raise SettingError(
            "--custom-pg-loss-reducer-function-path: training weighs tokens by --loss-aggregation; a reducer of your own can be"
            " replayed (--rollouts without --train) and audited"
        )
    if any(layout.is_recorded for layout in layouts_of(config.layout, has_recorded=False)):
        raise SettingError("--layouts recorded: training makes its own schedules; name a layout such as dp2:balanced")
    if objective.advantages == "recorded" and not config.source.rollouts:
        raise SettingError("--advantages recorded: sampled rollouts have none recorded; choose grpo or mean_only")
    grid.device_of(config)
    if not config.source.rollouts:
        grid.task_of(training)
    part, group = config.layout.global_batch_size, training.n_samples_per_prompt
    if part is None or config.source.rollouts or "prompt_mean" not in request.modes:
        return
    if part % group and part < training.rollout_batch_size * group:
        raise SettingError(
            f"--global-batch-size {part}: prompt_mean needs whole prompt groups in an optimizer step; give a multiple of"
            f" --n-samples-per-prompt {group}"
        )


def _train(request: TrainingRequest, world: World) -> int:
    from aggcli import grid
    from aggcli.training.checkpoint import load

    setup = grid.set_up(request.config)
    request = dataclasses.replace(request, config=setup.config)
    runs = grid.runs_of(request.config, request.modes, request.seeds, setup.response_limit)
    if request.command == "run":
        runs = [dataclasses.replace(run, name=".") for run in runs]
    directory = _directory(request, world)
    checkpoint = load(directory) if request.resume else None
    if request.config.training.match == "grad-norm":
        runs = grid.matched_rates(setup, runs, world)
    trainer = grid.trainer_of(setup, runs, world)
    if checkpoint is not None:
        trainer.restore(checkpoint)
        if trainer.step > request.config.training.steps:
            steps = request.config.training.steps
            raise RecordError(f"--steps {steps}: the run in {directory} has done {trainer.step} already")
    if world.is_root:
        _say_before(request, setup, runs, directory, resumed_at=trainer.step if request.resume else None)
    with _records(request, setup, runs, directory, world, trainer.step) as writers:
        status = _loop(trainer, writers, directory, request, world)
        if status.interrupted:
            raise KeyboardInterrupt
    final: Sequence[Evaluation] = []
    if setup.task is not None and trainer.runs:
        final = grid.evaluate(setup, trainer.weights.parameters, [run.seed for run in trainer.runs])
    return _finish(request, setup, runs, trainer, final, directory, status) if world.is_root else ExitCode.DONE


@dataclass
class _Status:
    """How the loop went: the worst layout deviation, runs that diverged, and steps without a signal."""

    deviation: float = 0.0
    diverged: list[str] = dataclasses.field(default_factory=list)
    silent_steps: int = 0
    interrupted: bool = False


def _loop(trainer: Trainer, writers: dict[str, RunWriter], directory: Path, request: TrainingRequest, world: World) -> _Status:
    from aggcli.cli.live import progress_of
    from aggcli.training.report import deviation

    status = _Status()
    if world.is_root:
        _note_diverged(trainer.gone, status, writers)
    every = request.config.training.checkpoint_every
    with _stop_requested(world) as stop, progress_of(request.config.training.steps, trainer.step) as show:
        for done in trainer.steps():
            if world.is_root:
                for number, reports in done.optimizer_steps:
                    for report in reports:
                        _write(writers[report.run.name], number, done.step, report)
                        status.deviation = max(status.deviation, deviation(report))
                        status.silent_steps += _is_silent(report.values)
                _note_diverged(done.diverged, status, writers)
                show(done)
            stopping = any(world.everyone(bool(stop)))
            if stopping or trainer.step % every == 0 or trainer.step == request.config.training.steps:
                _save(trainer, directory, world)
            if stopping:
                status.interrupted = True
                if world.is_root:
                    say(f"stopped after {trainer.step} steps; go on with --resume --output {directory}")
                break
    return status


def _is_silent(values: Mapping[str, float | None]) -> bool:
    """No group of unequal rewards to learn from: none was left, or every advantage is 0."""
    if not values.get("tokens"):
        return True
    groups = values.get("groups")
    return bool(groups) and values.get("zero_variance_groups") == groups and values.get("pg_loss") == 0


def _save(trainer: Trainer, directory: Path, world: World) -> None:
    from aggcli.training.checkpoint import save

    if world.is_root:
        save(directory, trainer.checkpoint())


@contextmanager
def _stop_requested(world: World) -> Iterator[list[int]]:
    """A list that fills when the user presses Ctrl-C: the step in hand is finished first; a second Ctrl-C stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        if world.is_root:
            say("interrupted: finishing the step in hand; press again to stop at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _note_diverged(ended: Sequence[Diverged], status: _Status, writers: dict[str, RunWriter]) -> None:
    for gone in ended:
        text = f"run {gone.run.mode}, seed {gone.run.seed} diverged in step {gone.step}: {gone.what}; its records are kept"
        status.diverged.append(text)
        writers[gone.run.name].manifest["diverged"] = text
        say(text)


# -- records --------------------------------------------------------------------------------------------------------


def _directory(request: TrainingRequest, world: World) -> Path:
    """The results directory: a fresh one, or the one to resume in; the same on every rank."""
    from aggcli import records

    found: Path | str | None = None
    if world.is_root:
        try:
            found = _chosen_directory(request)
        except RecordError as error:
            found = str(error)
    found = world.broadcast(found)
    if isinstance(found, str):
        raise RecordError(found if world.is_root else "")
    assert found is not None
    del records
    return found


def _chosen_directory(request: TrainingRequest) -> Path:
    from aggcli import records

    if not request.resume:
        name = f"{request.command}-{request.modes[0]}" if request.command == "run" else request.command
        return records.fresh_directory(request.output, name, overwrite=request.overwrite)
    if request.output is None:
        raise RecordError("--resume needs --output DIR, the results directory to go on with")
    if _is_blank(request.output):
        return request.output
    manifest = records.read_manifest(request.output)
    if manifest["command"] != request.command:
        raise RecordError(f"--resume: {request.output} was made by `aggcli {manifest['command']}`; resume it by that command")
    now = to_flat(request.config)
    for name, value in manifest["settings"].items():
        mine = list(v) if isinstance(v := now.get(name), tuple) else v
        if mine != value and name != "steps":
            raise RecordError(
                f"--resume: {name} is {mine} now and was {value} in {request.output}; a resumed run keeps its settings"
            )
    return request.output


def _is_blank(directory: Path) -> bool:
    """A directory that a run has made and was killed before it wrote what it is."""
    from aggcli import records

    return directory.is_dir() and all(path.name == records.MANIFEST + ".tmp" for path in directory.iterdir())


@contextmanager
def _records(
    request: TrainingRequest, setup: Setup, runs: Sequence[RunSpec], directory: Path, world: World, step: int
) -> Iterator[dict[str, RunWriter]]:
    """One writer per run at the root; none elsewhere."""
    import torch

    from aggcli import records

    if not world.is_root:
        yield {}
        return
    shared = {
        "command": request.command,
        "arguments": invocation(),
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in to_flat(request.config).items()},
        "config": to_toml(request.config),
        "response_limit": setup.response_limit,
        "environment": records.environment(str(setup.device), torch.get_num_threads()),
        "ranks": world.size,
    }
    resume_at = step if request.resume else None
    with ExitStack() as stack:
        if request.command == "compare":
            manifest = {"schema": records.SCHEMA, "kind": "comparison", "runs": [run.name for run in runs], **shared}
            records.write_manifest(directory, {**manifest, "status": "running"})
            stack.push(lambda kind, error, trace: _close(directory, manifest, error))
        yield {
            run.name: stack.enter_context(records.RunWriter(directory / run.name, _manifest(run, shared), resume_at))
            for run in runs
        }


def _close(directory: Path, manifest: dict[str, Any], error: BaseException | None) -> None:
    from aggcli import records

    records.write_manifest(directory, {**manifest, "status": records.ended(error)})


def _manifest(run: RunSpec, shared: dict[str, Any]) -> dict[str, Any]:
    factor = run.lr / shared["settings"]["lr"]
    divisor = run.objective.loss_aggregation_divisor
    own = {"mode": run.mode, "seed": run.seed, "lr": run.lr, "lr_factor": factor, "divisor": divisor}
    return {"kind": "run", **own, **shared}


def _write(writer: RunWriter, number: int, rollout_step: int, report: Any) -> None:
    head = {"step": number, "rollout_step": rollout_step, "mode": report.run.mode, "seed": report.run.seed}
    writer.step({**head, **report.values}, [{**head, **line} for line in report.layouts])


# -- what is said ---------------------------------------------------------------------------------------------------


def _say_before(
    request: TrainingRequest, setup: Setup, runs: Sequence[RunSpec], directory: Path, resumed_at: int | None
) -> None:
    """What is about to be trained, and whether the modes can differ on it at all."""
    from aggcli.grid import predicted_gap

    training = request.config.training
    if request.command == "run":
        say(f"mode: {request.modes[0]}")
    if "constant" in request.modes:
        divisor = next(run.objective.loss_aggregation_divisor for run in runs if run.mode == "constant")
        say(f"constant divides by {divisor:g} tokens")
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
        f" (standard deviation {gap.start.response_length_std:.1f}); weight on the longest quarter of responses: "
        + ", ".join(f"{mode} {share:.2f}" for mode, share in gap.shares.items())
    )
    if gap.start.response_length_std == 0:
        say("every response has the same length, so the modes cannot differ on this task")


def _finish(
    request: TrainingRequest,
    setup: Setup,
    runs: Sequence[RunSpec],
    trainer: Trainer,
    final: Sequence[Evaluation],
    directory: Path,
    status: _Status,
) -> int:
    from aggcli.records import to_json, update_manifest
    from aggcli.report.training_tables import last_step_table, training_table

    for run, evaluation in zip(trainer.runs, final, strict=False):
        update_manifest(directory / run.name, evaluation=dataclasses.asdict(evaluation))
    summary = _summary(setup, runs, trainer, final, directory)
    update_manifest(directory, final=summary)
    if request.json:
        print(to_json({"schema": 1, "results": str(directory), **summary, **_steps_json(request, directory)}))
    else:
        out().print(last_step_table(summary) if setup.task is None else training_table(summary))
    if request.command == "compare":
        _draw(directory)
    if status.silent_steps:
        say(f"{status.silent_steps} steps of runs had only groups of equal rewards: they carry no signal and change nothing")
    say(f"recorded in {directory}")
    limit = TOLERANCE[request.config.dtype or "float64"]
    if status.deviation > limit:
        raise CheckFailed(f"a layout changed pg_loss by {status.deviation:.3g}, relative; layouts.jsonl tells which")
    if status.diverged:
        raise CheckFailed(f"{len(status.diverged)} of {len(runs)} runs diverged: {status.diverged[0]}")
    return ExitCode.DONE


def _summary(
    setup: Setup, runs: Sequence[RunSpec], trainer: Trainer, final: Sequence[Evaluation], directory: Path
) -> dict[str, Any]:
    """Final figures on fresh prompts; on recorded rollouts, which have no fresh prompts, the numbers of the last step."""
    from aggcli import records
    from aggcli.analysis.comparison import final_summary, last_step_summary

    names = [(run.name, run.mode, run.seed) for run in runs]
    if setup.task is not None:
        by_run = {run.name: dataclasses.asdict(e) for run, e in zip(trainer.runs, final, strict=True)}
        return final_summary(names, by_run)
    lines = {run.name: list(records.read_lines(directory / run.name / records.METRICS)) for run in runs}
    return last_step_summary(names, {name: found[-1] for name, found in lines.items() if found})


def _steps_json(request: TrainingRequest, directory: Path) -> dict[str, Any]:
    """For `run`: every optimizer step in the shape that replay prints."""
    if request.command != "run":
        return {}
    from aggcli import records

    layouts: dict[int, dict[str, Any]] = {}
    for line in records.read_lines(directory / records.LAYOUTS):
        layouts.setdefault(line["step"], {})[line["layout"]] = line
    mode = request.modes[0]
    return {
        "steps": [
            {"step": line["step"], "modes": {mode: {**line, "layouts": layouts[line["step"]]}}}
            for line in records.read_lines(directory / records.METRICS)
        ]
    }


def _draw(directory: Path) -> None:
    """The learning curves of a comparison, beside its records."""
    os.environ["MPLBACKEND"] = "agg"
    from aggcli.analysis.frames import read_frames
    from aggcli.report.curves import learning_curves
    from aggcli.report.style import save

    folder = directory / "figures"
    folder.mkdir(exist_ok=True)
    try:
        save(learning_curves(read_frames([directory], only_metrics=True)), folder / "learning_curves.png")
    except RecordError as error:
        say(str(error))
    else:
        say(f"figure: {folder / 'learning_curves.png'}")
