"""Training: modes x seeds as one stack, recorded, with checkpoints, shared out to the processes of this machine or the ranks of
a world."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aggcli.config import RunConfig
from aggcli.errors import RecordError, RolloutError, SettingError, some
from aggcli.jobs import recording
from aggcli.jobs.listening import Listener, Show, listener, say
from aggcli.jobs.training_words import foretell, summary_of
from aggcli.report.notebook import Shown

if TYPE_CHECKING:
    import pandas as pd

    from aggcli.analysis.answer import Answer
    from aggcli.analysis.study import Study
    from aggcli.grid import Setup
    from aggcli.measurement.comparison import LayoutComparison
    from aggcli.rules import Rule
    from aggcli.run_writer import RunWriter
    from aggcli.team import Team
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
    `shares`: how each process's share went; `directory`: where it is recorded; `accuracy_before`: of the policy before
    training, on the first seed's fresh prompts, None where there are none."""

    request: TrainingRequest
    setup: Setup
    runs: Sequence[RunSpec]
    summary: Mapping[str, Any]
    shares: Sequence[Share]
    directory: Path
    accuracy_before: float | None = None

    @cached_property
    def study(self) -> Study | None:
        """What `aggcli compare DIR` finds in what was recorded; None for a single run, and where no step was recorded."""
        from aggcli.analysis.histories import read_histories, without_steps
        from aggcli.analysis.study import study

        if self.request.command != "compare":
            return None
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

        if self.setup.task is None:
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
    """Refuse settings that training cannot use, before anything is started."""
    from aggcli import grid, sinks
    from aggcli.layout.steps import layouts_of

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
    grid.device_of(config)
    if not config.source.rollouts:
        grid.task_of(training)
    part, group = config.layout.global_batch_size, training.n_samples_per_prompt
    grouped = [mode.name for mode in request.modes if mode.needs_groups]
    if part is None or config.source.rollouts or not grouped:
        return
    if part % group and part < training.rollout_batch_size * group:
        raise SettingError(
            f"--global-batch-size {part}: {some(grouped)} needs whole prompt groups in an optimizer step; give a multiple of"
            f" --n-samples-per-prompt {group}"
        )


@dataclass(frozen=True)
class Place:
    """Where this process stands: a rank of a world that shares every run, or a member of a team that shares the runs out."""

    world: World
    team: Team

    @property
    def speaks(self) -> bool:
        """Whether this is the process that tells the user, and keeps what is the whole stack's."""
        return self.world.is_root and self.team.is_root


@dataclass
class Share:
    """How the share of one process went: how far layouts were apart in checked steps (run, number, comparison), which runs
    diverged, steps without a signal and steps in which wrong answers are told apart, and each finished run on fresh prompts."""

    layouts: list[tuple[str, int, LayoutComparison]] = dataclasses.field(default_factory=list)
    diverged: list[str] = dataclasses.field(default_factory=list)
    silent_steps: int = 0
    told_apart: int = 0
    final: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)


def train(request: TrainingRequest, world: World | None = None) -> TrainingResult | None:
    """Train at a rank of a world (default: this process, and those that it shares the runs out to). None where this is not the
    root of the world. Raises `SettingError`, `RolloutError`, `RecordError`, and `KeyboardInterrupt` once it was told to stop.
    """
    refuse(request)
    from aggcli import world as worlds

    return _train(request, worlds.ALONE if world is None else world)


def _train(request: TrainingRequest, world: World) -> TrainingResult | None:
    from aggcli import grid
    from aggcli.team import together
    from aggcli.training.checkpoint import load, need_fit

    setup = grid.set_up(request.config)
    for note in setup.recorded.notes if setup.recorded is not None else ():
        say(note)
    request = dataclasses.replace(request, config=setup.config, modes=_with_groups(request, setup, world))
    runs = grid.runs_of(request.config, request.modes, request.seeds, setup.response_limit)
    if request.command == "run":
        runs = [dataclasses.replace(run, name=".") for run in runs]
    directory = recording.directory_of(request, world)
    checkpoint = load(directory) if request.resume else None
    done = 0 if checkpoint is None else checkpoint.step
    if done > request.config.training.steps:
        raise RecordError(f"--steps {request.config.training.steps}: the run in {directory} has done {done} already")
    processes = grid.processes_of(setup, len(runs), world, recording.processes_before(directory) if request.resume else None)

    def trained(team: Team) -> Share:
        mine = runs[team.rank :: team.size]
        trainer = grid.trainer_of(setup, mine, world)
        if checkpoint is not None:
            need_fit(directory, checkpoint, [run.name for run in runs], trainer.checkpoint().tensors)
            trainer.restore(checkpoint.of([run.name for run in mine]))
        return _share(request, setup, mine, trainer, stack, Place(world, team))

    before: float | None = None
    with setup.start.threads():
        if request.config.training.match == "grad-norm":
            runs = grid.matched_rates(setup, runs, world)
        if world.is_root:
            _say_processes(request.config.training.processes, processes, len(runs))
            before = foretell(request, setup, runs, directory, resumed_at=done if request.resume else None)
        stack = recording.Stack(request, setup, runs, directory, processes, done if request.resume else None)
        with stack.recorded(world) as manifest:
            shares = together(processes, trained)
            summary = summary_of(setup, runs, shares, directory) if world.is_root else {}
            manifest["final"] = summary
    return TrainingResult(request, setup, runs, summary, shares, directory, before) if world.is_root else None


def _say_processes(asked: int | None, processes: int, runs: int) -> None:
    if asked is not None and processes < min(asked, runs):
        say(
            f"--processes {asked}: the runs stay in one process, since ranks, a GPU or a wide policy use the machine themselves"
        )
    if processes > 2 * (os.cpu_count() or 1):
        say(f"{processes} processes on {os.cpu_count()} cores: more than one a core only costs time and memory")


def _with_groups(request: TrainingRequest, setup: Setup, world: World) -> tuple[Rule, ...]:
    """The modes that recorded rollouts can be trained under: some need their groups. Raises `RolloutError` where one was asked
    for by name."""
    from aggcli import grid

    grouped = [mode for mode in request.modes if mode.needs_groups]
    if setup.recorded is None or not grouped:
        return request.modes
    try:
        grid.need_whole_groups_in(setup.recorded, request.config.layout.global_batch_size, grouped[0])
    except RolloutError as error:
        if request.command != "compare" or request.config.modes is not None:
            raise
        if world.is_root:
            say(f"{some(mode.name for mode in grouped)} is left out: {error}")
        return tuple(mode for mode in request.modes if mode not in grouped)
    return request.modes


def _share(
    request: TrainingRequest,
    setup: Setup,
    runs: Sequence[RunSpec],
    trainer: Trainer,
    stack: recording.Stack,
    place: Place,
) -> Share:
    """Train and evaluate the runs of this process."""
    from aggcli import grid

    with stack.writers(runs, place.world) as writers:
        share = _loop(trainer, writers, stack, request, place)
        if setup.task is not None and trainer.runs:
            final = grid.evaluate(setup, trainer.policy, [run.seed for run in trainer.runs])
            share.final = {run.name: dataclasses.asdict(found) for run, found in zip(trainer.runs, final, strict=True)}
        for name in share.final.keys() & writers.keys():
            writers[name].manifest["evaluation"] = share.final[name]
    return share


@dataclass(frozen=True)
class _News:
    """What a process tells the others after each step: whether it was asked to stop, how far its runs are, and what of them is
    shown: response tokens a second, and their numbers."""

    stop: bool
    step: int
    finished: bool
    rate: float
    shown: list[tuple[str, Mapping[str, float | None]]]
    diverged: list[str]


def _loop(
    trainer: Trainer, writers: dict[str, RunWriter], stack: recording.Stack, request: TrainingRequest, place: Place
) -> Share:
    """Train this process's runs to the end, in step with the other processes. Raises `KeyboardInterrupt` when told to stop."""
    share = Share()
    old = _diverged(trainer.gone, writers) if place.world.is_root else []
    share.diverged += old
    steps, every = trainer.steps(), request.config.training.checkpoint_every
    with _stop_requested(place) as stop, _shown(request, trainer, place) as show:
        while True:
            done = next(steps, None)
            new = _record(trainer, done, writers, share) if done is not None and place.world.is_root else []
            stopping = any(place.world.everyone(bool(stop)))
            rate, shown = (0.0, []) if done is None else (done.tokens / done.seconds, _numbers(done))
            news = place.team.everyone(_News(stopping, trainer.step, done is None, rate, shown, old + new))
            old = []
            if place.speaks:
                for text in [text for one in news for text in one.diverged]:
                    say(text)
            if all(one.finished for one in news):
                return share
            step, stopping = max(one.step for one in news), any(one.stop for one in news)
            show(step, [run for one in news for run in one.shown], sum(one.rate for one in news))
            if stopping or step % every == 0 or step == request.config.training.steps:
                _save(trainer, stack, place)
            if stopping:
                if place.speaks:
                    say(f"stopped after {step} steps; go on with --resume --output {stack.directory}")
                raise KeyboardInterrupt


def _shown(request: TrainingRequest, trainer: Trainer, place: Place) -> AbstractContextManager[Show]:
    """Where finished steps are shown; nowhere but at the process that speaks."""
    who = listener() if place.speaks else Listener()
    return who.training(request.config.training.steps, trainer.step)


def _numbers(done: TrainedStep) -> list[tuple[str, Mapping[str, float | None]]]:
    """(mode, numbers) of each run of this process in its last optimizer step; nothing where nobody looks at them."""
    if not listener().wants_numbers or not done.optimizer_steps:
        return []
    return [(report.run.mode, report.values) for report in done.optimizer_steps[-1][1]]


def _record(trainer: Trainer, done: TrainedStep, writers: dict[str, RunWriter], share: Share) -> list[str]:
    """Write a step of this process's runs; returns what is to be said of runs that diverged in it."""
    for number, reports in done.optimizer_steps:
        for report in reports:
            recording.write(writers[report.run.name], number, done.step, report)
            if report.checked:
                share.layouts.append((report.run.name, number, report.step.comparison))
            share.silent_steps += _is_silent(report.values)
            share.told_apart += bool(report.values.get("all_wrong_groups_with_advantage"))
    recording.write_timing(writers, trainer, done)
    new = _diverged(done.diverged, writers)
    share.diverged += new
    return new


def _is_silent(values: Mapping[str, float | None]) -> bool:
    """No group of unequal rewards to learn from: none was left, or every advantage is 0."""
    if not values.get("tokens"):
        return True
    groups = values.get("groups")
    return bool(groups) and values.get("zero_variance_groups") == groups and values.get("pg_loss") == 0


def _save(trainer: Trainer, stack: recording.Stack, place: Place) -> None:
    from aggcli.training.checkpoint import joined, save

    parts = place.team.gather(trainer.checkpoint())
    if place.speaks:
        save(stack.directory, joined(parts, [run.name for run in stack.runs]))


@contextmanager
def _stop_requested(place: Place) -> Iterator[list[int]]:
    """A list that fills on Ctrl-C or SIGTERM: the step in hand is finished first; a second one stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        if place.speaks:
            say("interrupted: finishing the step in hand; press again to stop at once")

    numbers = [signal.SIGINT] if place.world.size > 1 else [signal.SIGINT, signal.SIGTERM]  # a launcher ends ranks by SIGTERM
    if threading.current_thread() is not threading.main_thread():  # only the main thread may take signals
        numbers = []
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _diverged(ended: Sequence[BrokenRun], writers: dict[str, RunWriter]) -> list[str]:
    """What is to be said of runs that diverged; their manifests keep it."""
    texts = []
    for gone in ended:
        text = f"run {gone.run.mode}, seed {gone.run.seed} diverged in step {gone.step}: {gone.what}; its records are kept"
        writers[gone.run.name].manifest |= {"diverged": text, "diverged_step": gone.step}
        texts.append(text)
    return texts
