"""Replaying recorded rollouts: every step measured under every rule and layout, and recorded as it comes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from aggcli.analysis.tolerance import TOLERANCE
from aggcli.config import RunConfig, to_flat, to_toml, with_divisor
from aggcli.errors import RolloutError, SettingError, some
from aggcli.jobs.listening import listener, say
from aggcli.measurement.words import plural
from aggcli.report.notebook import Shown
from aggcli.rules import CUSTOM, Rule, names_of

if TYPE_CHECKING:
    import pandas as pd

    from aggcli.analysis.answer import Answer
    from aggcli.jobs.steps import Replay
    from aggcli.measurement.comparison import LayoutComparison
    from aggcli.measurement.report import StepReport
    from aggcli.rollouts.batch import RolloutBatch
    from aggcli.rollouts.sources import Source
    from aggcli.run_writer import RunWriter
    from aggcli.sinks import Sinks
    from aggcli.world import World

MOST_NOTES = 12
KEPT = 2**28
"""Bytes of arrays up to which the steps of a source stay in memory from the first look at them to their replay."""
_NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class ReplayRequest:
    """What to replay: under one rule (`run`) or under several (`compare`), which is what records call it too.

    `lenient`: leave rules out where the data lack the prompt groups that they need, instead of refusing; `output`: the results
    directory, default a new one under results/; `record`: whether there is one at all; `samples`: record the weight of every
    sample; `arguments`: how it was asked for, for the record.
    """

    command: Literal["run", "compare"]
    config: RunConfig
    lenient: bool = False
    output: Path | None = None
    overwrite: bool = False
    samples: bool = True
    record: bool = True
    arguments: tuple[str, ...] = ()

    def rules(self, config: RunConfig) -> tuple[Rule, ...]:
        """The rules to replay, as these settings have them."""
        return config.compared if self.command == "compare" else (config.objective.loss_aggregation,)


@dataclass(frozen=True)
class ReplayResult(Shown):
    """What a replay found. `head`: the facts that hold for all steps; `steps`: each optimizer step as `--json` prints it;
    `between_layouts`: what was compared between layouts, in words; `failure`: which layout changed a number, blank where none
    did; `notes`: note -> the steps that it is about; `directory`: where it is recorded, None where it is not."""

    head: dict[str, Any]
    steps: list[dict[str, Any]]
    between_layouts: list[str]
    failure: str
    notes: dict[str, list[int]]
    directory: Path | None

    @property
    def metrics(self) -> pd.DataFrame:
        """A row an optimizer step and rule: every number under the layout in force."""
        import pandas as pd

        return pd.DataFrame(
            {"step": step["step"], "mode": mode, **{k: v for k, v in found.items() if k != "layouts"}}
            for step in self.steps
            for mode, found in step["modes"].items()
        )

    @property
    def answer(self) -> Answer:
        """What the modes and the layouts do to these rollouts, in three sentences at most."""
        from aggcli.analysis.replay_answer import replay_answer

        return replay_answer(self.head, self.steps)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        results = {"results": None if self.directory is None else str(self.directory), "between_layouts": self.between_layouts}
        return {"schema": 1, "answer": list(self.answer.sentences), **self.head, **results, "steps": self.steps}

    def tables(self) -> list[Any]:
        """What the terminal shows: rich tables and texts."""
        from aggcli.report.tables import replay_tables

        return replay_tables(self.head, self.steps, self.between_layouts, self.answer)


def replay(request: ReplayRequest, batches: Sequence[RolloutBatch] | None = None, world: World | None = None) -> ReplayResult:
    """Replay the rollouts of the settings, or these batches, at the root of a world (default: this process alone).

    Raises `RolloutError`, `SettingError` and `RecordError`. A layout that changed a number is a `failure` of the result.
    """
    from aggcli import world as worlds
    from aggcli.jobs.parts import Parts
    from aggcli.measurement.comparison import between_layouts, beyond_rounding
    from aggcli.policy.groups import one_thread

    steps: list[dict[str, Any]] = []
    comparisons: list[tuple[int, LayoutComparison]] = []
    notes: dict[str, list[int]] = {}
    with ExitStack() as place:
        job, source, head = _prepare(request, batches, worlds.ALONE if world is None else world, place)
        reports = source.measured(job) if isinstance(source, Parts) else job.steps(source)
        with one_thread(), closing(reports), Recorder(request, job, head) as recorder:
            for report in listener().follow(reports, len(source), "replaying"):
                recorder.write(report)
                steps.append(report.as_json())
                comparisons.append((report.step, report.comparison))
                for note in dict.fromkeys(report.notes):
                    notes.setdefault(note, []).append(report.step)
    head["modes"] = [rule for rule in head["modes"] if any(rule in step["modes"] for step in steps)]
    _say_notes(notes, {step["step"]: step["source"] for step in steps})
    failure = beyond_rounding(comparisons, TOLERANCE[request.config.dtype or "float64"])
    said = between_layouts([comparison for _, comparison in comparisons])
    return ReplayResult(head, steps, said, failure or "", notes, recorder.directory)


def _prepare(
    request: ReplayRequest, given: Sequence[RolloutBatch] | None, world: World, place: ExitStack
) -> tuple[Replay, Sequence[RolloutBatch] | Any, dict[str, Any]]:
    """The replay, its batches, and the facts that head every table and record. `place` is left when the replay has ended."""
    from aggcli.jobs.parts import in_parts
    from aggcli.jobs.steps import Replay
    from aggcli.objective.reducer import load_reducer
    from aggcli.objective.weighing import weighing_of
    from aggcli.rollouts.sources import open_source

    config = request.config
    if given is None:
        source = open_source(config.source, config.seed)
        parts = place.enter_context(in_parts(source, config.launch))
        batches, seen = _looked_through(source, len(source) == 1) if parts is None else (parts, parts.looked_at())
        origin = {"rollouts": source.name, "format": source.format}
    else:
        batches, seen = _looked_through(given, is_kept=True)
        origin = {"rollouts": "batches given in memory", "format": "batches"}
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
        **origin,
        "modes": [*names_of(modes), *([CUSTOM.name] if path else [])],
        "metric_rules": {
            rule.name: weighing_of(rule, config.objective).names.as_json() for rule in (*modes, *([CUSTOM] if path else []))
        },
        "divisor": config.objective.loss_aggregation_divisor,
        "max_response_length": longest,
        "length_unit": unit,
        "settings": to_flat(config),
    }
    return Replay(config, modes, request.lenient, max(longest, 1), reducer, world), batches, head


def _looked_through(
    batches: Sequence[RolloutBatch] | Source, is_kept: bool
) -> tuple[Sequence[RolloutBatch] | Source, list[tuple[str, int]]]:
    """The batches to replay, and the unit and the longest response of each, which settings need before the first is measured.

    Batches `is_kept`, or that take no more than `KEPT` bytes together, are read once; of others one is in memory at a time, and
    each is read again.
    """
    kept: list[RolloutBatch] = []
    held, seen = 0, []
    for batch in batches:
        seen.append((batch.length_unit, int(batch.response_length_S.max())))
        kept.append(batch.derived(token_ids_U=None))  # nothing in a replay reads the ids
        held += kept[-1].nbytes
        del batch  # which would be in memory while the next is made
        if not is_kept and held > KEPT:
            kept.clear()
    return kept or batches, seen


def _one_length_unit(units: Sequence[str]) -> str:
    """The unit of all steps. Raises `RolloutError` where they differ: no mean could be of both."""
    if len(set(units)) > 1:
        told = "; ".join(f"{unit}: {plural(units.count(unit), 'step')}" for unit in dict.fromkeys(units))
        raise RolloutError(f"--rollouts: lengths are in different units ({told}); give those of one unit, or --tokenizer")
    return units[0]


def _with_divisor(config: RunConfig, request: ReplayRequest, longest: int) -> RunConfig:
    """The settings with the divisor in force: the user's, the recipe's, or in `compare` the longest response."""
    rules = request.rules(config)
    given = config.objective.loss_aggregation_divisor
    lacking = [rule for rule in rules if rule.needs_divisor]
    if given is not None and not any(rule.takes_divisor for rule in rules):
        say(f"--loss-aggregation-divisor {given:g} is unused: no rule here divides by it")
    if not lacking:
        return config
    need_divisor(request.command, config)
    divisor = float(max(longest, 1))
    divide = "divides" if len(lacking) == 1 else "divide"
    say(f"{some(names_of(lacking))} {divide} by {divisor:g}, the {_origin(config)}; --loss-aggregation-divisor sets another")
    return with_divisor(config, divisor)


def need_divisor(command: str, config: RunConfig) -> None:
    """`run` needs the divisor of its rule from the user or the recipe."""
    if command == "run" and config.recipe != "dr_grpo":
        raise SettingError(
            f"--loss-aggregation {config.objective.loss_aggregation.name} needs --loss-aggregation-divisor L, a positive number"
            " of tokens such as the response limit (or --recipe dr_grpo, which takes the maximum response length)"
        )


def _origin(config: RunConfig) -> str:
    return "--max-response-length" if config.max_response_length else "longest response in the rollouts"


# -- records --------------------------------------------------------------------------------------------------------


class Recorder:
    """The results directory of a replay, made when the first step has been computed, so that a refused run leaves nothing."""

    def __init__(self, request: ReplayRequest, replay: Replay, head: dict[str, Any]) -> None:
        from aggcli.ownership import check_output

        if request.record:
            check_output(request.output, overwrite=request.overwrite)
        self.request, self.replay, self.head = request, replay, head
        self.directory: Path | None = None
        self.recorded: list[str] = []
        self.writers: dict[str, RunWriter] = {}
        self.sinks: Sinks | None = None

    def write(self, report: StepReport) -> None:
        """Record one optimizer step under every rule that it has."""
        if not self.request.record:
            return
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
        facts = {"kind": "run", "mode": rule, **self._facts(rule)}
        self.recorded.append(rule)
        if compares:  # before its folder is there, which would not be known as aggcli's own if the program ended here
            write_manifest(self.directory, {**self._comparison(), "status": "running"})
        self.writers[rule] = RunWriter(self.directory, rule if compares else ".", facts, open_sinks=self.sinks.of_run)
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
            "arguments": list(self.request.arguments),
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
        if self.directory is not None and self.recorded and self.request.command == "compare":
            endings.append(functools.partial(say_status, self.directory, self._comparison(), error))
        end_all(endings, error)


# -- what is said ---------------------------------------------------------------------------------------------------


def _say_notes(notes: dict[str, list[int]], sources: Mapping[int, str]) -> None:
    """Each note once, with the steps it is about where it is not about all of them, of one with what it was read from
    (`sources`). Notes that differ in their numbers alone are one note: the first of them is said."""
    alike: dict[str, list[tuple[str, int]]] = {}
    for note, about in notes.items():
        alike.setdefault(_NUMBER.sub("0", note), []).extend((note, step) for step in about)
    for found in list(alike.values())[:MOST_NOTES]:
        (note, first), about = found[0], sorted({step for _, step in found})
        one_of = _step(about[0], sources[about[0]]) if len(about) == 1 else f"steps {some(about)}"
        where = "" if len(about) == len(sources) else f"{one_of}: "
        say(
            where + note + ("" if len({text for text, _ in found}) == 1 else f" (step {first}; other steps have other numbers)")
        )
    if len(alike) > MOST_NOTES:
        left_out = plural(len(alike) - MOST_NOTES, "more note is", "more notes are")
        say(f"{left_out} left out here; metrics.jsonl and --json hold them all")


def _step(number: int, source: str) -> str:
    """`step 1 (rollout-1.jsonl)`, `step 3, of step 1 (rollout-1.jsonl), optimizer step 1`."""
    return source if source.startswith(f"step {number} ") else f"step {number}, of {source}"
