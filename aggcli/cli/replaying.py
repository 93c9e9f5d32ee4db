"""What `run` and `compare` share: replay the rollouts, record every step as it comes, and print at the end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aggcli.analysis.tolerance import TOLERANCE
from aggcli.cli.console import invocation, out, progress, say
from aggcli.config import RunConfig, to_flat, to_toml, with_divisor
from aggcli.errors import CheckFailed, ExitCode, RolloutError, SettingError, some
from aggcli.measurement.words import plural
from aggcli.rules import CUSTOM, Rule, names_of

if TYPE_CHECKING:
    from aggcli.measurement.comparison import LayoutComparison
    from aggcli.measurement.report import StepReport
    from aggcli.replay import Replay
    from aggcli.rollouts.batch import RolloutBatch
    from aggcli.run_writer import RunWriter
    from aggcli.sinks import Sinks
    from aggcli.world import World

MOST_NOTES = 12


@dataclass(frozen=True)
class Request:
    """One invocation of `run` or `compare`.

    `lenient`: leave rules out where the data lack the prompt groups that they need, instead of refusing.
    """

    command: str
    config: RunConfig
    lenient: bool
    output: Path | None
    overwrite: bool
    json: bool
    samples: bool

    def rules(self, config: RunConfig) -> tuple[Rule, ...]:
        """The rules to replay, as these settings have them."""
        return config.compared if self.command == "compare" else (config.objective.loss_aggregation,)


def replay_command(request: Request) -> int:
    """Start or join ranks where there is more than one, and replay at the root. Returns the exit code."""
    from aggcli import sinks
    from aggcli import world as worlds
    from aggcli.measurement.ranks import dismiss, serve

    sinks.need(request.config.log_to)
    layout = request.config.layout
    ranks = layout.dp * layout.cp
    if not worlds.was_started_by_torchrun():
        if ranks > 1:
            worlds.start_ranks(ranks, invocation())
            return ExitCode.DONE
        return _replay_at_root(request, worlds.ALONE)
    world = worlds.join()
    if not world.is_root:
        serve(world)
        worlds.leave(world)
        return ExitCode.DONE
    try:
        config = fitted_to_launcher(request.config, world.size)
        return _replay_at_root(dataclasses.replace(request, config=config), world)
    finally:
        dismiss(world)
        worlds.leave(world)


def fitted_to_launcher(config: RunConfig, size: int) -> RunConfig:
    """The settings with --dp taken from the launcher where it was left at 1; refused where the two contradict."""
    layout = config.layout
    if layout.dp == 1 and size % layout.cp == 0:
        layout = dataclasses.replace(layout, dp=size // layout.cp)
    if layout.dp * layout.cp != size:
        raise SettingError(
            f"--dp {layout.dp} --cp {layout.cp} needs {layout.dp * layout.cp} ranks, but the launcher started {size};"
            f" start {layout.dp * layout.cp} or change --dp and --cp"
        )
    return dataclasses.replace(config, layout=layout)


def _replay_at_root(request: Request, world: World) -> int:
    from aggcli.measurement.comparison import between_layouts
    from aggcli.report.tables import replay_tables

    replay, batches, head = _prepare(request, world)
    steps: list[dict[str, Any]] = []
    comparisons: list[tuple[int, LayoutComparison]] = []
    notes: dict[str, list[int]] = {}
    with Recorder(request, replay, head) as recorder:
        for report in progress(replay.steps(batches), len(batches), "replaying"):
            recorder.write(report)
            steps.append(report.as_json())
            comparisons.append((report.step, report.comparison))
            for note in dict.fromkeys(report.notes):
                notes.setdefault(note, []).append(report.step)
    head["modes"] = [rule for rule in head["modes"] if rule in recorder.writers]
    _say_notes(notes, len(steps))
    closing = between_layouts([comparison for _, comparison in comparisons])
    if request.json:
        from aggcli.records import to_json

        results = {"results": str(recorder.directory), "between_layouts": closing}
        print(to_json({"schema": 1, **head, **results, "steps": steps}))
    else:
        for table in replay_tables(head, steps, closing):
            out().print(table)
    say(f"recorded in {recorder.directory}")
    _check(request, comparisons)
    return ExitCode.DONE


def _prepare(request: Request, world: World) -> tuple[Replay, Sequence[RolloutBatch] | Any, dict[str, Any]]:
    """The replay, its batches, and the facts that head every table and record."""
    from aggcli.objective.reducer import load_reducer
    from aggcli.replay import Replay
    from aggcli.rollouts.sources import open_source

    config = request.config
    source = open_source(config.source, config.seed)
    batches = list(source) if len(source) == 1 else source
    seen = [(batch.length_unit, int(batch.response_length_S.max())) for batch in batches]
    unit = _one_length_unit([unit for unit, _ in seen])
    longest = config.max_response_length or max(length for _, length in seen)
    config = _with_divisor(config, request, longest)
    path = config.objective.custom_pg_loss_reducer_function_path
    reducer = load_reducer(path) if path else None
    modes = request.rules(config)
    if path and request.command == "run":
        say(f"the custom reducer {path} takes precedence over --loss-aggregation {modes[0].name}")
        modes = ()
    head = {
        "command": request.command,
        "rollouts": source.name,
        "format": source.format,
        "modes": [*names_of(modes), *([CUSTOM.name] if path else [])],
        "divisor": config.objective.loss_aggregation_divisor,
        "max_response_length": longest,
        "length_unit": unit,
        "settings": to_flat(config),
    }
    return Replay(config, modes, request.lenient, max(longest, 1), reducer, world), batches, head


def _one_length_unit(units: Sequence[str]) -> str:
    """The unit of all steps. Raises `RolloutError` where they differ: no mean could be of both."""
    if len(set(units)) > 1:
        told = "; ".join(f"{unit}: {plural(units.count(unit), 'step')}" for unit in dict.fromkeys(units))
        raise RolloutError(f"--rollouts: lengths are in different units ({told}); give those of one unit, or --tokenizer")
    return units[0]


def _with_divisor(config: RunConfig, request: Request, longest: int) -> RunConfig:
    """The settings with the divisor in force: the user's, the recipe's, or in `compare` the longest response."""
    rules = request.rules(config)
    given = config.objective.loss_aggregation_divisor
    lacking = [rule for rule in rules if rule.needs_divisor]
    if given is not None and not any(rule.takes_divisor for rule in rules):
        say(f"--loss-aggregation-divisor {given:g} is unused: no rule here divides by it")
    if not lacking:
        return config
    need_divisor(config, request)
    divisor = float(max(longest, 1))
    divide = "divides" if len(lacking) == 1 else "divide"
    say(f"{some(names_of(lacking))} {divide} by {divisor:g}, the {_origin(config)}; --loss-aggregation-divisor sets another")
    return with_divisor(config, divisor)


def need_divisor(config: RunConfig, request: Request) -> None:
    """`run` needs the divisor of its rule from the user or the recipe."""
    if request.command == "run" and config.recipe != "dr_grpo":
        raise SettingError(
            f"--loss-aggregation {config.objective.loss_aggregation.name} needs --loss-aggregation-divisor L, a positive number"
            " of tokens such as the response limit (or --recipe dr_grpo, which takes the maximum response length)"
        )


def _origin(config: RunConfig) -> str:
    return "--max-response-length" if config.max_response_length else "longest response in the rollouts"


# -- records --------------------------------------------------------------------------------------------------------


class Recorder:
    """The results directory of a replay, made when the first step has been computed, so that a refused run leaves nothing."""

    def __init__(self, request: Request, replay: Replay, head: dict[str, Any]) -> None:
        from aggcli.ownership import check_output

        check_output(request.output, overwrite=request.overwrite)
        self.request, self.replay, self.head = request, replay, head
        self.directory: Path | None = None
        self.recorded: list[str] = []
        self.writers: dict[str, RunWriter] = {}
        self.sinks: Sinks | None = None

    def write(self, report: StepReport) -> None:
        """Record one optimizer step under every rule that it has."""
        for rule in report.rules:
            writer = self.writers.get(rule) or self._opened(rule)
            writer.step(report.metrics_line(rule), report.layout_lines(rule))
            if self.request.samples:
                writer.samples(report.step, report.sample_columns(rule))

    def _opened(self, rule: str) -> RunWriter:
        """The writer of a rule: of the directory itself for `run`, of one inside it for `compare`."""
        from aggcli import ownership
        from aggcli.records import write_manifest
        from aggcli.run_writer import RunWriter
        from aggcli.sinks import Sinks

        if self.directory is None or self.sinks is None:
            name = f"{self.request.command}-{rule}" if self.request.command == "run" else self.request.command
            self.directory = ownership.fresh_directory(self.request.output, name, overwrite=self.request.overwrite)
            self.sinks = Sinks(self.request.config.log_to, self.directory)
        compares = self.request.command == "compare"
        place = self.directory / rule if compares else self.directory
        facts = {"kind": "run", "mode": rule, **self._facts(rule)}
        self.recorded.append(rule)
        if compares:  # before its folder is there, which would not be known as aggcli's own if the program ended here
            write_manifest(self.directory, {**self._comparison(), "status": "running"})
        self.writers[rule] = RunWriter(place, facts, open_sinks=self.sinks.of_run)
        return self.writers[rule]

    def _facts(self, rule: str | None) -> dict[str, Any]:
        import torch

        from aggcli import records

        config = self.replay.config
        for mode in self.replay.modes:
            if mode.name == rule:
                config = dataclasses.replace(config, objective=config.objective.under(mode))
        return {
            **self.head,
            "settings": to_flat(config),
            "arguments": invocation(),
            "config": to_toml(config),
            "seed": config.seed,
            "environment": records.environment("cpu", torch.get_num_threads()),
            "ranks": self.replay.world.size,
        }

    def _comparison(self) -> dict[str, Any]:
        from aggcli.records import SCHEMA

        return {"schema": SCHEMA, "kind": "comparison", "runs": self.recorded, **self._facts(None)}

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        from aggcli.run_writer import end_all, say_status

        endings = [functools.partial(writer.__exit__, kind, error, trace) for writer in self.writers.values()]
        if self.directory is not None and self.request.command == "compare":
            endings.append(functools.partial(say_status, self.directory, self._comparison(), error))
        end_all(endings, error)


# -- what is said ---------------------------------------------------------------------------------------------------


def _say_notes(notes: dict[str, list[int]], steps: int) -> None:
    """Each note once, with the steps it is about where it is not about all of them."""
    for note, about in list(notes.items())[:MOST_NOTES]:
        where = "" if len(about) == steps else f"step {about[0]}: " if len(about) == 1 else f"steps {some(about)}: "
        say(where + note)
    if len(notes) > MOST_NOTES:
        left_out = plural(len(notes) - MOST_NOTES, "more note is", "more notes are")
        say(f"{left_out} left out here; metrics.jsonl and --json hold them all")


def _check(request: Request, comparisons: Sequence[tuple[int, LayoutComparison]]) -> None:
    """The exit code 1 of a layout that changed a number."""
    from aggcli.measurement.comparison import beyond_rounding

    if said := beyond_rounding(comparisons, TOLERANCE[request.config.dtype or "float64"]):
        raise CheckFailed(f"{said}; layouts.jsonl holds them")


def refuse_resume(resume: bool) -> None:
    """A replay has nothing to go on with: it is over in seconds and is simply run again."""
    if resume:
        raise SettingError("--resume goes on with training; a replay is run again (--overwrite replaces its records)")


def print_dry_run(config: RunConfig) -> int:
    """Print the resolved settings as TOML that `--config` reads back."""
    print(to_toml(config), end="")
    return ExitCode.DONE
