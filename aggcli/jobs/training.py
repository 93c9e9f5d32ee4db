"""Training: modes x seeds, cut into shares; each is a stack with records and a checkpoint, run wherever a launcher puts it."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aggcli import ownership
from aggcli.config import RunConfig
from aggcli.errors import RecordError, SettingError, some, told
from aggcli.jobs import recording
from aggcli.jobs.listening import Listener, Progress, listener, say
from aggcli.jobs.preparation import IMPORTED, begun, is_prepared_apart, packed, prepared, warm_up
from aggcli.jobs.recording import Files, Sent
from aggcli.jobs.training_words import summary_of
from aggcli.launch.here import Here
from aggcli.measurement.words import plural
from aggcli.records import MANIFEST
from aggcli.report.notebook import Shown

if TYPE_CHECKING:
    import pandas as pd

    from aggcli.analysis.answer import Answer
    from aggcli.analysis.study import Study
    from aggcli.grid import Setup
    from aggcli.jobs.preparation import Prepared
    from aggcli.launch import Launcher, Link, Outcome
    from aggcli.measurement.comparison import LayoutComparison
    from aggcli.rules import Rule
    from aggcli.run_writer import RunWriter
    from aggcli.training.checkpoint import Saver
    from aggcli.training.loop import BrokenRun, TrainedStep, Trainer
    from aggcli.training.stack import RunSpec
    from aggcli.world import World


@dataclass(frozen=True)
class TrainingRequest:
    """What to train: one run (`run`), or modes x seeds (`compare`), which is what records call it too.

    `output`: the results directory, default a new one under results/; `resume`: go on with the one that is there; `arguments`:
    how it was asked for, for the record.
    """

    command: Literal["run", "compare"]
    config: RunConfig
    modes: tuple[Rule, ...]
    seeds: tuple[int, ...]
    output: Path | None = None
    overwrite: bool = False
    resume: bool = False
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingResult(Shown):
    """What training ended with. `summary`: each finished run on fresh prompts, or the last step's numbers on recorded rollouts;
    `response_limit` in tokens; `shares`: how each share went; `directory`: where it is recorded; `accuracy_before`: of the
    policy before training, on the first seed's fresh prompts, None where there are none."""

    request: TrainingRequest
    response_limit: int
    runs: Sequence[RunSpec]
    summary: Mapping[str, Any]
    shares: Sequence[Trained]
    directory: Path
    accuracy_before: float | None = None

    @cached_property
    def study(self) -> Study | None:
        """What `aggcli compare DIR` finds in what was recorded; None for a single run, and where no step was recorded."""
        if self.request.command != "compare":
            return None
        from aggcli.analysis.histories import read_histories, without_steps
        from aggcli.analysis.study import study

        try:
            read, _ = read_histories([self.directory])
            return study(read, silent=without_steps([self.directory], read))
        except RecordError:
            return None

    @property
    def answer(self) -> Answer:
        """The answer that `aggcli compare DIR` gives of what was recorded; of a single run, where it got to."""
        from aggcli.jobs.training_words import answer_of_a_run

        return answer_of_a_run(self) if self.study is None else self.study.verdict.answer

    @property
    def metrics(self) -> pd.DataFrame:
        """A row an optimizer step and run, as recorded."""
        from aggcli.analysis.frames import read_frames

        return read_frames([self.directory], only_metrics=True).metrics

    @property
    def failure(self) -> str:
        """What went wrong: a layout that changed a number, or runs that diverged; blank where nothing did."""
        from aggcli.jobs.training_words import layouts_apart

        if apart := layouts_apart(self.request, self.shares):
            return apart
        diverged = [text for share in self.shares for text in share.diverged]
        return f"{len(diverged)} of {len(self.runs)} runs diverged: {diverged[0]}" if diverged else ""

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        from aggcli.jobs.training_words import steps_json

        head = {"schema": 1, "answer": list(self.answer.sentences), "results": str(self.directory)}
        return {**head, **self.summary, **steps_json(self.request, self.directory)}

    def tables(self) -> list[Any]:
        """What the terminal shows."""
        from aggcli.jobs.training_words import settings_in_words
        from aggcli.report.tables import answer_text, lines
        from aggcli.report.training_tables import last_step_table, training_table

        if self.request.config.source.rollouts:
            table = last_step_table(self.summary)
        else:
            table = training_table(self.summary, None if self.study is None else self.study.comparison)
        return [answer_text(self.answer), table, lines(settings_in_words(self))]


DEFAULT_SEEDS = 3
"""Seeds of a comparison that says nothing of them."""


def seeds_of(config: RunConfig) -> tuple[int, ...]:
    """The seeds of a comparison: --seed, --seed + 1, ...; recorded rollouts are the same for every seed, so they have one."""
    count = config.training.seeds or (1 if config.training.train else DEFAULT_SEEDS)
    return tuple(range(config.seed, config.seed + count))


def refuse(request: TrainingRequest) -> None:
    """Refuse settings that training cannot use, before anything is started; a device and a task, which only torch knows, where
    the job is prepared if that is not in this process."""
    from aggcli import sinks
    from aggcli.layout.chosen import layouts_of

    config, objective, training = request.config, request.config.objective, request.config.training
    sinks.need(config.log_to)
    if objective.custom_pg_loss_reducer_function_path:
        raise SettingError(
            "--custom-pg-loss-reducer-function-path: training weighs tokens by --loss-aggregation; a reducer of your own can be"
            " replayed (--rollouts without --train) and audited"
        )
    if any(layout.is_recorded for layout in layouts_of(config.layout, has_recorded=False)):
        raise SettingError("--layouts recorded: training makes its own schedules; name a layout such as dp2:balanced")
    if objective.advantages == "recorded" and not config.source.rollouts:
        raise SettingError("--advantages recorded: sampled rollouts have none recorded; choose grpo or mean_only")
    if config.launch.launcher == "ray" and request.command == "run":
        raise SettingError("--launcher ray: is for several runs; give one as `aggcli train --modes MODE --seeds 1`")
    part, group = config.layout.global_batch_size, training.n_samples_per_prompt
    grouped = [mode.name for mode in request.modes if mode.needs_groups]
    uneven = part is not None and part % group and part < training.rollout_batch_size * group
    if uneven and grouped and not config.source.rollouts:
        raise SettingError(
            f"--global-batch-size {part}: {some(grouped)} needs whole prompt groups in an optimizer step; give a multiple of"
            f" --n-samples-per-prompt {group}"
        )
    if is_prepared_apart(request):
        return
    from aggcli import grid

    if config.launch.launcher != "ray":  # where other machines have other devices
        grid.device_of(config)
    if not config.source.rollouts and training.model is None:
        grid.task_of(training)


@dataclass(frozen=True)
class TrainingShare:
    """What is to be done of a training job at one place: number `number` of the `shares` that its `runs` are cut into.

    `setup`: packed (`grid.movable`) for another process, None where that reads a language model anew; `is_shown`: whether
    somebody looks at the numbers of the runs while they train; `world`: the ranks that share every run; `sent`: what goes with
    it to a machine that may not see the directory.
    """

    request: TrainingRequest
    setup: Setup | bytes | None
    runs: Sequence[RunSpec]
    directory: Path
    number: int
    shares: int
    is_shown: bool
    world: World
    sent: Sent | None = None

    @property
    def own_runs(self) -> Sequence[RunSpec]:
        return self.runs[self.number :: self.shares]


@dataclass
class Trained:
    """How a share went: how far layouts were apart in checked steps (run, number, comparison), which runs diverged, steps
    without a signal, without a trained token, and in which wrong answers are told apart, and each finished run on fresh
    prompts."""

    layouts: list[tuple[str, int, LayoutComparison]] = dataclasses.field(default_factory=list)
    diverged: list[str] = dataclasses.field(default_factory=list)
    silent_steps: int = 0
    empty_steps: int = 0
    told_apart: int = 0
    final: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    files: Files | None = None
    """What it has recorded, where that is not in the results directory yet."""
    is_interrupted: bool = False
    """Whether it was told to stop, where that could not be raised since `files` had to come along."""


def train(
    request: TrainingRequest, world: World | None = None, meanwhile: Callable[[threading.Event], object] | None = None
) -> TrainingResult | None:
    """Train at a rank of a world (default: this process, and wherever its shares are launched). None where this is not the
    root of the world. `meanwhile`: what this process does in a thread while shares are at work elsewhere, until an event that
    it is given is set. Raises `SettingError`, `RolloutError`, `RecordError`, `ShareFailed`, and `KeyboardInterrupt` once it
    was told to stop.
    """
    if world is None:
        warm_up(request)
    refuse(request)
    from aggcli import world as worlds

    with _beside(meanwhile) as beside:
        return _train(request, worlds.ALONE if world is None else world, beside)


@contextmanager
def _beside(work: Callable[[threading.Event], object] | None) -> Iterator[threading.Thread]:
    """A thread for this work, not yet started. It has ended when this is left: the program would else wait for it at its very
    end, where a second Ctrl-C shows a traceback."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    try:
        yield thread
    finally:
        if thread.is_alive():
            stop.set()
            with _taking_signals(signal.SIG_IGN, [signal.SIGINT, signal.SIGTERM]):
                thread.join()


def _train(request: TrainingRequest, world: World, beside: threading.Thread) -> TrainingResult | None:
    if is_prepared_apart(request):
        beside.start()
    job = prepared(request, world)
    request, limit = job.request, job.response_limit
    was_there = request.output is not None and request.output.exists()
    directory = recording.directory_of(request, world)
    with ownership.not_left_empty(None if was_there else directory):
        launcher, count = _place(job, world, recording.shares_before(directory) if request.resume else None)
        begin = begun(job, directory, count, world)
        stack = recording.Stack(request, limit, job.device, job.threads, begin.runs, directory, count)
        with stack.recorded(world) as manifest:
            given = job.setup if isinstance(launcher, Here) else packed(job.setup)
            share = TrainingShare(request, given, begin.runs, directory, 0, count, listener().wants_numbers, world)
            shares = [dataclasses.replace(share, number=number) for number in range(count)]
            if launcher.is_elsewhere:
                shares = [_sent(share) for share in shares]
            done = _launched(launcher, shares, beside)
            summary = summary_of(request, limit, begin.runs, done, directory) if world.is_root else {}
            manifest["final"] = summary
    return TrainingResult(request, limit, begin.runs, summary, done, directory, begin.accuracy) if world.is_root else None


def _place(job: Prepared, world: World, before: int | None) -> tuple[Launcher, int]:
    """Where the settings mean a job to run, and into how many shares its runs are cut. `before`: the shares of a job that is
    resumed, which goes on to the bit only in as many. Raises `SettingError`."""
    from aggcli.launch import launcher_of
    from aggcli.launch.processes import can_fork_from_server

    launch, runs = job.request.config.launch, len(job.runs)
    if world.group is not None:
        return launcher_of(launch, "here", 1, IMPORTED), 1
    if launch.launcher == "ray":
        launcher = launcher_of(launch, "ray", 1, IMPORTED)
        return launcher, min(launch.shares or before or launcher.slots, runs)
    workers = launch.workers or job.cores
    spreads = job.is_small and launch.launcher != "here"
    is_model = job.request.config.training.model is not None
    alone = runs if is_model else 1  # a language model's runs only cost memory side by side
    shares = min(launch.shares or before or (workers if spreads else alone), runs)
    spreads = spreads and can_fork_from_server() and min(workers, shares) > 1
    if launch.workers is not None and shares < min(workers, runs):
        say(f"--workers {workers}: the runs are cut into {plural(shares, 'share')}, so no more are at work; --shares cuts more")
    if min(workers, shares) > 2 * (os.cpu_count() or 1):
        say(f"{workers} workers on {os.cpu_count()} cores: more than one a core only costs time and memory")
    name = launch.launcher or ("processes" if spreads else "here")
    return launcher_of(launch, name, min(workers, shares), IMPORTED), shares


def _launched(launcher: Launcher, shares: Sequence[TrainingShare], beside: threading.Thread | None = None) -> list[Trained]:
    """Every share, run at its place; the thread `beside` is at work too where that is not this process. Once all have ended,
    raises `KeyboardInterrupt` where one was told to stop, else the error of the first that failed."""
    share, steps = shares[0], dict[int, int]()
    speaks = share.world.is_root
    with (
        closing(launcher),
        _stop_requested(launcher, share.world) as asked,
        (listener() if speaks else Listener()).training(share.request.config.training.steps, len(shares)) as show,
    ):

        def hear(number: int, message: Progress | str | Exception) -> None:
            if isinstance(message, Progress):
                steps[number] = message.step
                show(number, message)
            elif isinstance(message, Exception):
                say(f"{told(message)[1]}; the other shares go on")
            elif speaks:
                say(message)

        if beside is not None and beside.ident is None and not isinstance(launcher, Here):
            beside.start()
        outcomes = [_arrived(outcome, share.directory) for outcome in launcher.run(trained, shares, hear)]
        if beside is not None and beside.is_alive():
            beside.join()
    if any(outcome.is_interrupted for outcome in outcomes):
        if speaks and len(asked) == 1 and steps:
            number = (
                f"{min(steps.values())}" if len({*steps.values()}) == 1 else f"{min(steps.values())} to {max(steps.values())}"
            )
            say(f"stopped after {number} steps; go on with --resume --output {share.directory}")
        raise KeyboardInterrupt
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.result for outcome in outcomes]


def _sent(share: TrainingShare) -> TrainingShare:
    """A share for another machine; what it goes on from goes along."""
    directory = share.directory.resolve()
    files = recording.packed(directory, _own(share)) if share.request.resume else {}
    return dataclasses.replace(share, directory=directory, sent=Sent((directory / MANIFEST).stat().st_mtime_ns, files))


def _own(share: TrainingShare) -> list[Path]:
    """What a share writes, in the results directory."""
    from aggcli.training.checkpoint import checkpoint_of

    checkpoint = checkpoint_of(share.directory, share.number, share.shares)
    return [checkpoint, *(share.directory / run.name for run in share.own_runs)]


def _arrived(outcome: Outcome, directory: Path) -> Outcome:
    """The outcome of a share, what it has recorded elsewhere being in the results directory now."""
    result = outcome.result
    if result is None or result.files is None:
        return outcome
    recording.unpack(result.files, directory)
    return dataclasses.replace(outcome, error=KeyboardInterrupt() if result.is_interrupted else None)


def trained(share: TrainingShare, link: Link) -> Trained:
    """Train and evaluate the runs of a share, or go on with them: its records and its checkpoint say how far they are.

    Where the results directory is not to be seen it is done in a folder of this machine, and the files go back with the result.
    """
    if share.sent is None or share.sent.is_seen_in(share.directory):
        return _trained(share, link)
    with tempfile.TemporaryDirectory(prefix="aggcli-") as scratch:
        directory = Path(scratch)
        recording.unpack(share.sent.files, directory)
        near = dataclasses.replace(share, directory=directory, sent=None)
        try:
            done = _trained(near, link)
        except KeyboardInterrupt:
            done = Trained(is_interrupted=True)
        done.files = recording.packed(directory, _own(near))
        return done


def _trained(share: TrainingShare, link: Link) -> Trained:
    import torch

    from aggcli import grid
    from aggcli.training.checkpoint import Saver, checkpoint_of, filled, load, need_fit

    request, world, runs = share.request, share.world, share.own_runs
    setup, path = grid.arrived(share.setup or request.config), checkpoint_of(share.directory, share.number, share.shares)
    with setup.start.threads():
        trainer = grid.trainer_of(setup, runs, world)
        goes_on = world.broadcast(request.resume or any((share.directory / run.name / MANIFEST).exists() for run in runs))
        checkpoint = load(path) if goes_on else None
        if checkpoint is not None:
            like = trainer.checkpoint().tensors
            need_fit(path, checkpoint, [run.name for run in runs], like)
            trainer.restore(filled(checkpoint, like, world))
        stack = recording.Stack(
            request, setup.response_limit, str(setup.device), torch.get_num_threads(), share.runs, share.directory, share.shares
        )
        with stack.writers(runs, world, trainer.step if goes_on else None) as writers, Saver(path, world) as saver:
            if (held := _held(trainer, world)) and world.is_root:
                link.tell(held)
            done = _loop(trainer, writers, share, link, saver)
            if setup.task is not None and trainer.runs:
                final = grid.evaluate(setup, trainer.policy, [run.seed for run in trainer.runs])
                done.final = {run.name: dataclasses.asdict(found) for run, found in zip(trainer.runs, final, strict=True)}
            for name in done.final.keys() & writers.keys():
                writers[name].manifest["evaluation"] = done.final[name]
    return done


def _loop(trainer: Trainer, writers: dict[str, RunWriter], share: TrainingShare, link: Link, saver: Saver) -> Trained:
    """Train a share's runs to the end. Raises `KeyboardInterrupt` when told to stop, with their checkpoint on disk."""
    training, world = share.request.config.training, share.world
    result = Trained()
    if world.is_root:
        result.diverged += _diverged(trainer.gone, writers)
    for text in result.diverged:
        link.tell(text)
    for done in trainer.steps():
        for text in _record(trainer, done, writers, result) if world.is_root else ():
            link.tell(text)
        is_stopping = any(world.everyone(link.is_stopping))
        link.tell(Progress(trainer.step, done.tokens / done.seconds, _numbers(done) if share.is_shown else ()))
        if is_stopping or trainer.step % training.checkpoint_every == 0 or trainer.step == training.steps:
            saver.save(trainer.checkpoint())
        if is_stopping:
            saver.wait()
            raise KeyboardInterrupt
    return result


def _held(trainer: Trainer, world: World) -> str:
    """How much of a model each rank holds, where it is cut; blank where every rank holds all. Every rank must call it."""
    shards, own_RQ = trainer.policy.shards.world, trainer.policy.flat_RQ
    if shards.size == 1:
        return ""
    sizes = [int(size) for size in shards.everyone(own_RQ.shape[1])]
    each = f"{min(sizes):,}" if len(set(sizes)) == 1 else f"{min(sizes):,} to {max(sizes):,}"
    return (
        f"the model is cut over {shards.size} ranks: each holds {each} of {sum(sizes):,} trained parameters, their gradient and"
        " moments; all of it while it samples"
    )


def _numbers(done: TrainedStep) -> list[tuple[str, Mapping[str, float | None]]]:
    """(mode, numbers) of each run of a share in its last optimizer step."""
    last = {report.run.name: report for reports in done.optimizer_steps for report in reports}
    return [(report.run.mode, report.values) for report in last.values()]


def _record(trainer: Trainer, done: TrainedStep, writers: dict[str, RunWriter], result: Trained) -> list[str]:
    """Write a step of a share's runs; returns what is to be said of runs that diverged in it."""
    for reports in done.optimizer_steps:
        for report in reports:
            recording.write(writers[report.run.name], done.step, report)
            if report.checked:
                result.layouts.append((report.run.name, report.step.step, report.step.comparison))
            result.silent_steps += _is_silent(report.values)
            result.empty_steps += not report.values.get("tokens")
            result.told_apart += bool(report.values.get("all_wrong_groups_with_advantage"))
    recording.write_rollouts(writers, done)
    recording.write_timing(writers, trainer, done)
    new = _diverged(done.diverged, writers)
    result.diverged += new
    return new


def _is_silent(values: Mapping[str, float | None]) -> bool:
    """Trained tokens, and every advantage of them 0: no group of unequal rewards to learn from."""
    groups = values.get("groups") if values.get("tokens") else None
    return bool(groups) and values.get("zero_variance_groups") == groups and values.get("pg_loss") == 0


@contextmanager
def _stop_requested(launcher: Launcher, world: World) -> Iterator[list[int]]:
    """A list that fills on Ctrl-C or SIGTERM: the step in hand is finished first; a second one stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        launcher.stop()
        if world.is_root:
            say("interrupted: finishing the step in hand; press again to stop at once")

    numbers = [signal.SIGINT] if world.size > 1 else [signal.SIGINT, signal.SIGTERM]  # a launcher ends ranks by SIGTERM
    with _taking_signals(note, numbers):
        yield asked


@contextmanager
def _taking_signals(handler: Any, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """These signals go to this handler; only the main thread may have them do so."""
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


def _diverged(ended: Sequence[BrokenRun], writers: dict[str, RunWriter]) -> list[str]:
    """What is to be said of runs that diverged; their manifests keep it."""
    texts = []
    for gone in ended:
        text = f"run {gone.run.mode}, seed {gone.run.seed} diverged in step {gone.step}: {gone.what}; its records are kept"
        writers[gone.run.name].manifest |= {"diverged": text, "diverged_step": gone.step}
        texts.append(text)
    return texts
