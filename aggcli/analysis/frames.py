"""Results directories as pandas frames: metrics, layouts, ranks and samples.

Records say null for what was not measured; it is NaN here, and only here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from aggcli.analysis.histories import History
from aggcli.analysis.reading import Lines, read_lines, repeated_in_words, run_directories, run_manifest
from aggcli.analysis.settings import arm_labels
from aggcli.analysis.units import length_unit_of, one_length_unit
from aggcli.errors import RecordError
from aggcli.measurement.catalogue import describe
from aggcli.records import LAYOUTS, METRICS, SAMPLES

SAMPLE_COLUMNS = ("sample", "rollout", "group", "response_length", "trained_tokens", "reward", "correct", "weight")
MORE_SAMPLE_COLUMNS = ("truncated", "group_rollouts", "group_reward", "group_reward_spread", "advantage")
"""Those that not every record has."""
_STEP_FILE = re.compile(r"step-(\d+)\.parquet")


@dataclass(frozen=True)
class Run:
    """A run directory. `label`: the mode where that is enough to tell the runs apart, else `mode (directory)`; `arm`: the mode,
    with the settings that differ where it was run under several.
    """

    label: str
    mode: str
    directory: Path
    arm: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    length_unit: str = "tokens"


@dataclass(frozen=True)
class Frames:
    """What results directories hold. Every frame starts with the columns run (its label), mode and step.

    metrics: one row per (run, step); layouts: per (run, step, layout); ranks: per (run, step, layout, rank), where a
    weighted metric is the rank's share and `idle` says that the rank had no sample; samples: per (run, step, training
    sample). Metrics are float64 columns with the catalogue's units. A step that is recorded again counts once, by its
    last line. `notes`: what was left out, for the reader; `silent`: the directories of runs without a recorded step;
    `length_unit`: what the lengths of all of them are counted in.
    """

    runs: tuple[Run, ...]
    metrics: pd.DataFrame
    layouts: pd.DataFrame
    ranks: pd.DataFrame
    samples: pd.DataFrame
    notes: tuple[str, ...] = field(default=())
    silent: tuple[Path, ...] = ()
    length_unit: str = "tokens"

    @property
    def steps(self) -> list[int]:
        """The recorded steps of all runs together, sorted."""
        return sorted(set(self.metrics["step"].tolist()))

    def need_step(self, step: int) -> None:
        """Raises `RecordError`, naming the range, unless a run recorded this step."""
        steps = self.steps
        if step not in steps:
            holes = "" if len(steps) == steps[-1] - steps[0] + 1 else f", {len(steps)} of them"
            recorded = f"steps {steps[0]} to {steps[-1]}{holes} are" if len(steps) > 1 else f"only step {steps[0]} is"
            raise RecordError(f"--step {step}: is not recorded; {recorded}")


def read_frames(directories: Sequence[Path], *, only_metrics: bool = False) -> Frames:
    """The frames of all runs in these results directories (runs, or comparisons of several), in their order.

    `only_metrics` leaves layouts, ranks and samples empty, which are most of what is on disk.
    A directory that is given twice counts once; a run without a recorded step is left out, with a note. Raises
    `RecordError` for a folder that is no results directory, a record that cannot be read, or when no step is recorded at all.
    """
    found = _labelled(_runs(directories))
    read = {run.label: read_lines(run.directory / METRICS) for run in found}
    metrics = {run.label: _rows(run, read[run.label]) for run in found}
    runs = tuple(run for run in found if metrics[run.label])
    if not runs:
        raise RecordError(f"{', '.join(map(str, directories))}: no steps are recorded")
    silent = tuple(run.directory for run in found if not metrics[run.label])
    detailed = () if only_metrics else runs
    layouts = [row for run in detailed for row in _rows(run, read_lines(run.directory / LAYOUTS))]
    empty = [f"{directory}: no steps are recorded; left out" for directory in silent]
    return Frames(
        runs=runs,
        metrics=_frame([row for run in runs for row in metrics[run.label]]),
        layouts=_frame([{key: value for key, value in row.items() if key != "ranks"} for row in layouts], "layout"),
        ranks=_frame([rank for row in layouts for rank in _ranks_of(row)], "layout", "rank", "idle"),
        samples=_samples(detailed),
        notes=(*empty, *repeated_in_words({run.directory: read[run.label].repeated for run in runs})),
        silent=silent,
        length_unit=one_length_unit({run.directory: run.length_unit for run in runs}),
    )


def frames_of(runs: Sequence[History]) -> Frames:
    """The frames of runs of which only the compared measures are at hand, as of other trainers' logs: `metrics` with a column a
    measure, and nothing else. A run is labelled by the log, or the directory, that it was read from."""
    found = [Run(run.source or str(run.directory), run.mode, run.directory, run.label) for run in runs]
    parts = [
        pd.DataFrame({"run": named.label, "mode": run.label, "step": run.steps, "rollout_step": run.steps, **run.measures})
        for named, run in zip(found, runs, strict=True)
    ]
    return Frames(
        runs=tuple(found),
        metrics=pd.concat(parts, ignore_index=True),
        layouts=_frame([], "layout"),
        ranks=_frame([], "layout", "rank", "idle"),
        samples=_samples([]),
        length_unit=one_length_unit({run.directory: run.length_unit for run in runs}),
    )


def token_weights(samples: pd.DataFrame) -> pd.DataFrame:
    """`samples` with `relative_weight`: the weight of one of a sample's tokens over that of the step's average token.

    relative_weight = (weight / trained_tokens) * (tokens of the step / total weight of the step), so 1 is the average
    token of (run, step), whatever the mode's absolute scale. NaN for fully masked samples and steps of total weight 0.
    """
    step = samples.groupby(["run", "step"], sort=False)
    totals = pd.DataFrame({name: step[name].transform("sum") for name in ("weight", "trained_tokens")})
    with np.errstate(divide="ignore", invalid="ignore"):
        average = numbers(totals, "weight") / numbers(totals, "trained_tokens")
        relative = numbers(samples, "weight") / numbers(samples, "trained_tokens") / average
    return samples.assign(relative_weight=np.where(np.isfinite(relative), relative, np.nan))


# -- looking into a frame -------------------------------------------------------------------------------------------


def rows(frame: pd.DataFrame, keep: NDArray[np.bool_] | None = None, **equal: object) -> pd.DataFrame:
    """The rows of `keep`, and of those the ones whose columns have these values."""
    chosen = np.ones(len(frame), dtype=bool) if keep is None else keep
    for name, value in equal.items():
        chosen = chosen & (frame[name] == value).to_numpy(dtype=bool)
    return pd.DataFrame(frame[chosen])


def numbers(frame: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """A column as float64, [rows]; NaN where it is blank, and everywhere when there is no such column."""
    return frame[name].to_numpy(dtype="float64") if name in frame else np.full(len(frame), np.nan)


def sizes(layouts: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """What a metric of each layout was summed from, [rows]: the recorded sum of its absolute terms, at least the number itself;
    NaN where the number is blank. A difference between layouts is measured against it, since a sum can cancel to 0."""
    own = np.abs(numbers(layouts, name))
    if "sizes" not in layouts:
        return own
    recorded = [of.get(name) if isinstance(of, Mapping) else None for of in layouts["sizes"]]
    return np.fmax(own, np.array(recorded, dtype="float64"))


# -- runs and their labels ------------------------------------------------------------------------------------------


def _runs(directories: Sequence[Path]) -> list[Run]:
    """Each run once; the label is still empty."""
    found = []
    for directory in run_directories(directories):
        manifest = run_manifest(directory)
        unit = length_unit_of(manifest)
        found.append(
            Run("", manifest.get("mode", "custom"), directory, settings=manifest.get("settings", {}), length_unit=unit)
        )
    return found


def _labelled(found: list[Run]) -> list[Run]:
    """Runs with the shortest label that tells those of a mode apart."""
    choices: tuple[Callable[[Run], str], ...] = (
        lambda run: run.mode,
        lambda run: f"{run.mode} ({_own_name(run)})",
        lambda run: f"{run.mode} ({run.directory})",
        lambda run: f"{run.mode} ({run.directory.resolve()})",
    )
    labels: dict[Path, str] = {}
    for mode in dict.fromkeys(run.mode for run in found):
        same = [run for run in found if run.mode == mode]
        named = next(texts for choice in choices if len(set(texts := [choice(run) for run in same])) == len(same))
        labels.update({run.directory: label for run, label in zip(same, named, strict=True)})
    arms = arm_labels([(run.mode, run.settings) for run in found])
    return [replace(run, label=labels[run.directory], arm=arm) for run, arm in zip(found, arms, strict=True)]


def _own_name(run: Run) -> str:
    """The directory's name; in a comparison, where it only repeats the mode, the comparison's."""
    directory = run.directory.resolve()
    return directory.name if directory.name != run.mode else directory.parent.name


# -- rows -----------------------------------------------------------------------------------------------------------


def _rows(run: Run, lines: Lines) -> list[dict[str, Any]]:
    """The lines of a run, named by it, with the columns that every frame starts with."""
    head = {"run": run.label, "mode": run.mode}
    return [
        {**head, "step": row["step"], **{key: value for key, value in row.items() if key not in ("schema", "mode", "step")}}
        for row in lines.rows
    ]


def _ranks_of(layout: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {key: layout.get(key) for key in ("run", "mode", "step", "layout")}
    for rank in layout.get("ranks", ()):
        yield {**place, **rank, "idle": not rank.get("partition", [True])}


def _frame(rows: list[dict[str, Any]], *keys: str) -> pd.DataFrame:
    frame = pd.DataFrame.from_records(rows) if rows else pd.DataFrame(columns=pd.Index(["run", "mode", "step", *keys]))
    for name in frame.columns:
        if _is_metric(name):
            try:
                frame[name] = frame[name].astype("float64")
            except (TypeError, ValueError) as error:
                raise RecordError(
                    f"metric '{name}' of run {frame['run'].iloc[0]} is recorded as something else than numbers"
                ) from error
    return frame


def _is_metric(name: str) -> bool:
    try:
        describe(name)
    except KeyError:
        return False
    return True


def _samples(runs: Sequence[Run]) -> pd.DataFrame:
    parts = []
    for run in runs:
        folder = run.directory / SAMPLES
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if match := _STEP_FILE.fullmatch(path.name):
                part = _read_samples(path)
                part.insert(0, "run", run.label)
                part.insert(1, "mode", run.mode)
                part.insert(2, "step", int(match[1]))
                parts.append(part)
    if not parts:
        return pd.DataFrame(columns=pd.Index(["run", "mode", "step", *SAMPLE_COLUMNS]))
    return pd.concat(parts, ignore_index=True)


def _read_samples(path: Path) -> pd.DataFrame:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise RecordError(f"{path}: cannot be read as Parquet; restore it or delete it") from error
    missing = [name for name in SAMPLE_COLUMNS if name not in table.column_names]
    if missing:
        raise RecordError(f"{path}: has no column {', '.join(missing)}")
    more = [name for name in MORE_SAMPLE_COLUMNS if name in table.column_names]
    frame = pd.DataFrame({name: table.column(name).to_pylist() for name in (*SAMPLE_COLUMNS, *more)}, dtype=object)
    numeric = ("response_length", "trained_tokens", "reward", "weight", *(name for name in more if name != "truncated"))
    try:
        return frame.astype(dict.fromkeys(numeric, "float64"))
    except (TypeError, ValueError) as error:
        raise RecordError(f"{path}: holds something else than numbers where numbers belong ({error})") from error
