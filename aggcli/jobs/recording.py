"""Where training is recorded: the results directory, and what its manifests say before the first step and after the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggcli import ownership, records
from aggcli.config import LAUNCH_SETTINGS, to_flat, to_toml
from aggcli.errors import RecordError
from aggcli.files import DRAFT, whole_file
from aggcli.jobs.listening import say
from aggcli.run_writer import RunWriter, end_all, say_status

if TYPE_CHECKING:
    from aggcli.jobs.training import TrainingRequest
    from aggcli.training.loop import TrainedStep, Trainer
    from aggcli.training.report import RunReport
    from aggcli.training.stack import RunSpec
    from aggcli.world import World

FREE_ON_RESUME = ("steps", "log_to", *(name for name in LAUNCH_SETTINGS if name != "shares"))
"""Settings that a resumed run may change."""
RANKS = ("dp", "cp")
"""Settings that it may change too where no rule depends on the layout: its numbers go on up to rounding."""


def directory_of(request: TrainingRequest, world: World) -> Path:
    """The results directory: a fresh one, or the one to resume in; the same on every rank. Raises `RecordError`."""
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
    return found


def _chosen_directory(request: TrainingRequest) -> Path:
    if not request.resume:
        name = f"{request.command}-{request.modes[0].name}" if request.command == "run" else request.command
        return ownership.fresh_directory(request.output, name, overwrite=request.overwrite)
    if request.output is None:
        raise RecordError("--resume needs --output DIR, the results directory to go on with")
    if ownership.is_blank(request.output):
        return request.output
    manifest = records.read_manifest(request.output)
    if lacking := [name for name in ("command", "settings") if name not in manifest]:
        raise RecordError(
            f"--resume: {request.output / records.MANIFEST} has no {', '.join(lacking)}, so it is not known what to go on with;"
            " start anew with --overwrite or in another folder"
        )
    if manifest["command"] != request.command:
        made = "`aggcli run`" if manifest["command"] == "run" else "`aggcli train` or `aggcli compare`"
        raise RecordError(f"--resume: {request.output} was made by {made}; resume it by that command")
    now = to_flat(request.config)
    free = (*FREE_ON_RESUME, *(() if any(mode.depends_on_layout for mode in request.modes) else RANKS))
    for name, value in manifest["settings"].items():
        mine = list(v) if isinstance(v := now.get(name), tuple) else v
        if mine != value and name in RANKS and name in free:
            say(f"--resume: {name} is {mine} now and was {value}, so the numbers go on up to rounding, not to the bit")
        if mine != value and name not in free:
            raise RecordError(
                f"--resume: {name} is {mine} now and was {value} in {request.output}; a resumed run keeps its settings"
            )
    return request.output


def shares_before(directory: Path) -> int | None:
    """Into how many shares the runs in a results directory were cut; None where none was begun."""
    return None if ownership.is_blank(directory) else records.read_manifest(directory).get("shares", 1)


Files = dict[str, bytes]
"""Files of a results directory, by their place in it, whole."""


@dataclass(frozen=True)
class Sent:
    """What goes to another machine with a share. `mark`: when the manifest of the results directory was written, in ns, by
    which a machine that sees the directory knows it; `files`: those to go on from where it does not."""

    mark: int
    files: Files

    def is_seen_in(self, directory: Path) -> bool:
        """Whether this machine sees the results directory itself."""
        try:
            return (directory / records.MANIFEST).stat().st_mtime_ns == self.mark
        except OSError:
            return False


def packed(directory: Path, paths: Iterable[Path]) -> Files:
    """These files of a directory, and those in these folders of it; drafts and what is not there stay out."""
    found = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    return {str(file.relative_to(directory)): file.read_bytes() for file in found if file.is_file() and file.suffix != DRAFT}


def unpack(files: Files, directory: Path) -> None:
    """Put packed files into a directory, each as a whole or not at all. Raises `RecordError` for a place outside it."""
    for name, content in files.items():
        if not records.is_inside(directory, name):
            raise RecordError(f"{directory / name}: leads out of the results directory")
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(directory / name) as draft:
            draft.write_bytes(content)


@dataclass(frozen=True)
class Stack:
    """What is the same for all runs of a job, wherever they are trained. `response_limit` in tokens; `threads`: those of an
    operation; `shares`: the stacks that the runs are cut into."""

    request: TrainingRequest
    response_limit: int
    device: str
    threads: int
    runs: Sequence[RunSpec]
    directory: Path
    shares: int

    @contextmanager
    def recorded(self, world: World) -> Iterator[dict[str, Any]]:
        """The manifest of a comparison, from its start to how it ended; what is put into it meanwhile is written at the end.

        A single run has a manifest of its own, which is added to.
        """
        if not world.is_root:
            yield {}
            return
        found: dict[str, Any] = {}
        if self.request.command != "compare":
            yield found
            records.update_manifest(self.directory, **found)
            return
        names = [run.name for run in self.runs]
        manifest = {"schema": records.SCHEMA, "kind": "comparison", "runs": names, **self._shared(world)}
        records.write_manifest(self.directory, {**manifest, "status": "running"})
        try:
            yield found
        except BaseException as error:
            end_all([partial(say_status, self.directory, manifest | found, error)], error)
            raise
        say_status(self.directory, manifest | found, None)

    @contextmanager
    def writers(self, runs: Sequence[RunSpec], world: World, resume_at: int | None) -> Iterator[dict[str, RunWriter]]:
        """One writer for each of these runs at the root of the world; none elsewhere. `resume_at`: the rollout step that they
        go on from, None where they begin."""
        from aggcli import sinks

        if not world.is_root:
            yield {}
            return
        shared = self._shared(world)
        open_sinks = sinks.Sinks(self.request.config.log_to, self.directory).of_run
        with ExitStack() as stack:

            def opened(run: RunSpec) -> RunWriter:
                folder = self.directory / run.name
                if folder != self.directory and not records.is_inside(self.directory, run.name):
                    raise RecordError(f"{folder}: leads out of the results directory; replace the link by what it stands for")
                return RunWriter(self.directory, run.name, _manifest(run, shared), resume_at, open_sinks, timed=True)

            yield {run.name: stack.enter_context(opened(run)) for run in runs}

    def _shared(self, world: World) -> dict[str, Any]:
        from aggcli.objective.weighing import weighing_of

        config = self.request.config
        return {
            "command": self.request.command,
            "arguments": list(self.request.arguments),
            "settings": to_flat(config),
            "config": to_toml(config),
            "metric_rules": {run.mode: weighing_of(run.rule, run.objective).names.as_json() for run in self.runs},
            "response_limit": self.response_limit,
            "length_unit": "tokens",
            "environment": records.environment(self.device, self.threads),
            "ranks": world.size,
            "shares": self.shares,
        }


def _manifest(run: RunSpec, shared: dict[str, Any]) -> dict[str, Any]:
    factor = run.lr / shared["settings"]["lr"]
    divisor = run.objective.loss_aggregation_divisor
    own = {"mode": run.mode, "seed": run.seed, "lr": run.lr, "lr_factor": factor, "divisor": divisor}
    return {"kind": "run", **own, **shared}


def write(writer: RunWriter, rollout_step: int, report: RunReport) -> None:
    """One optimizer step of a run."""
    head = {"step": report.step.step, "rollout_step": rollout_step, "mode": report.run.mode, "seed": report.run.seed}
    writer.step({**head, **report.metrics_line()}, [{**head, **line} for line in report.layout_lines()])


def write_rollouts(writers: Mapping[str, RunWriter], done: TrainedStep) -> None:
    """The sampled rollouts of a step, one plain file for each run, where they are kept."""
    from aggcli.files import whole_file
    from aggcli.rollouts.writers import write_jsonl

    for name, batch in done.rollouts.items():
        folder = writers[name].directory / records.ROLLOUTS
        records.refuse_links([folder])
        folder.mkdir(exist_ok=True)
        with whole_file(folder / f"{done.step:05d}.jsonl") as draft:
            write_jsonl(batch, draft)


def write_timing(writers: Mapping[str, RunWriter], trainer: Trainer, done: TrainedStep) -> None:
    """One line for every run that was in the stack during the step, also for those that diverged in it."""
    runs = [*trainer.runs, *(gone.run for gone in done.diverged)]
    for run in runs:
        writers[run.name].timing(done.step, done.seconds, len(runs), done.tokens, done.peak_bytes)
