"""Runs that other trainers made, as arms of a comparison: `NAME=PATTERN` gives an arm, each run that it matches one `History`.

Results directories of ours may be among them. Arms are paired by seed only where every run tells its seed (ours by their
records, others by a name such as `seed1`, `seed-1` or `s1` in their path) and all arms have the same seeds; otherwise runs are
not paired. A number of a step is what the trainer logged at it: a mean over that step, or over the steps since it logged last.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from natsort import natsorted

from aggcli.analysis.directories import holds_results
from aggcli.analysis.histories import MEASURES, Floats, History, read_histories
from aggcli.analysis.log_names import KEYS, KNOWN, column_of, like
from aggcli.analysis.logs import MOST, STATE, STEP_NAMES, Log, read_logs
from aggcli.errors import RecordError, SettingError, nearest, some
from aggcli.measurement.words import listed, plural

_SEED = re.compile(r"(?:^|[^a-z0-9])(?:seed[-_=]?|s)(\d{1,9})(?![0-9a-z])", re.IGNORECASE)
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_COMPARED = ("accuracy", "raw_reward", "response_length")
"""Measures without any of which a run has nothing to compare."""


@dataclass(frozen=True)
class Arms:
    """Runs of several arms, labelled by them in the order given; `paired`: whether their seeds are known and the same in all;
    `notes`: what each number is, and what was not there."""

    runs: tuple[History, ...]
    paired: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Read:
    """A run of an arm; of a trainer's log that too, and which column each key was read from."""

    run: History
    seed: int | None
    log: Log | None = None
    used: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts_tokens(self) -> bool:
        """Whether its log tells of tokens."""
        return "tokens" in self.used or "step_tokens" in self.used


def read_arms(curves: Sequence[str], metrics: Sequence[str] = ()) -> Arms:
    """The arms `NAME=PATTERN`. `metrics`: `KEY=COLUMN`, a column that is to be read for a key of `log_names.KEYS`.

    Raises `SettingError` for arms that cannot be compared, `RecordError` for a log that cannot be read.
    """
    columns, places = _columns(metrics), _places(curves)
    arms = {name: [one for path in paths for one in _read(name, path, columns)] for name, paths in places.items()}
    _need_one_axis(arms)
    paired = _are_paired(arms)
    runs = [replace(one.run, seed=seed) for own in arms.values() for one, seed in zip(own, _seeds(own), strict=True)]
    return Arms(tuple(runs), paired, (*_what_was_read(arms), *_alike(arms), *_pairing(arms, paired)))


# -- what was asked for ---------------------------------------------------------------------------------------------


def _columns(metrics: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for given in metrics:
        key, equals, column = given.partition("=")
        if not equals or not column:
            raise SettingError(f"--metric {given}: must be KEY=COLUMN, such as reward=critic/rewards/mean")
        if key not in KEYS:
            raise SettingError(f"--metric {given}: {key} is not known{nearest(key, KEYS)}")
        if key in found:
            raise SettingError(f"--metric {given}: {key} is given twice")
        found[key] = column
    return found


def _places(curves: Sequence[str]) -> dict[str, list[Path]]:
    """Arm -> the files and folders that its pattern matches."""
    found: dict[str, list[Path]] = {}
    for given in curves:
        name, equals, pattern = given.partition("=")
        if not (name.strip() and equals and pattern):
            raise SettingError(f'--curves {given}: must be NAME=PATTERN, such as "grpo=runs/grpo-*"')
        if name in found:
            raise SettingError(f"--curves {given}: {name} is named twice; give all runs of an arm by one pattern")
        paths = [Path(path) for path in natsorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))]
        if not paths:
            raise SettingError(f"--curves {given}: nothing matches {pattern}")
        found[name] = paths
    _need_each_once([(name, path) for name, paths in found.items() for path in paths])
    return found


def _need_each_once(given: Sequence[tuple[str, Path]]) -> None:
    """Raises `SettingError` for a run that would count twice: under two names, beside its folder, or as two checkpoints."""
    taken: dict[Path, tuple[str, Path]] = {}
    for name, path in given:
        other, there = taken.setdefault(_run_of(path.resolve()), (name, path))
        if other != name:
            raise SettingError(f"--curves {name}: {path} is a run of {other} already; a run is of one arm")
        if there != path:
            raise SettingError(f"--curves {name}: {there} and {path} are of one run, which would count twice; give its folder")
    for name, path in given:
        for folder in path.resolve().parents:
            if folder in taken and taken[folder][1] != path:
                raise SettingError(f"--curves {name}: {path} lies in {taken[folder][1]}, which is given too; a run counts once")


def _run_of(place: Path) -> Path:
    """The folder of the run that a checkpoint is of; any other place itself."""
    folder = place.parent if place.name == STATE else place
    return folder.parent if _CHECKPOINT.fullmatch(folder.name) else place


def _alike(arms: Mapping[str, Sequence[_Read]]) -> list[str]:
    """Runs that hold the same numbers in every column that both have, read or not, as copies of one do: they are no two
    samples. Of our own runs the columns are their measures."""
    reads = [one for own in arms.values() for one in own]
    said = []
    for at, one in enumerate(reads):
        for other in reads[:at]:
            steps, pairs = _in_both(one, other)
            if len(steps) > 1 and pairs and all(np.array_equal(own, base, equal_nan=True) for own, base in pairs):
                named, like_it = (read.run.source or read.run.directory for read in (one, other))
                columns = f"all {len(pairs)} columns" if len(pairs) > 1 else "the one column"
                said.append(
                    f"{named} holds the same numbers as {like_it} in {columns} and at all {len(steps)} steps that both have; if"
                    " it is one run, give it once"
                )
    return said if len(said) < 4 else [*said[:3], f"and so do {plural(len(said) - 3, 'other pair')} of runs"]


def _in_both(one: _Read, other: _Read) -> tuple[np.ndarray, list[tuple[Floats, Floats]]]:
    """The steps [E] that both runs have, and of each column that both have numbers in its own at these [E], NaN where there is
    none. No column where both have no measure of `_COMPARED`."""
    steps, own, base = np.intersect1d(one.run.steps, other.run.steps, assume_unique=True, return_indices=True)
    measures = {name: (one.run.measures[name][own], other.run.measures[name][base]) for name in MEASURES}
    pairs = {name: pair for name, pair in measures.items() if all(np.isfinite(values).any() for values in pair)}
    if not pairs.keys() & set(_COMPARED):
        return steps, []
    if one.log is not None and other.log is not None:
        (mine, steps_of_mine), (theirs, steps_of_theirs) = ((log, _all_steps(log)) for log in (one.log, other.log))
        steps = np.intersect1d(steps_of_mine, steps_of_theirs, assume_unique=True)
        names = sorted(mine.columns.keys() & theirs.columns.keys())
        columns = {name: (_at(mine, name, steps), _at(theirs, name, steps)) for name in names}
        pairs = {name: pair for name, pair in columns.items() if any(np.isfinite(values).any() for values in pair)}
    return steps, list(pairs.values())


def _all_steps(log: Log) -> np.ndarray:
    return np.unique(np.concatenate([own for own, _ in log.columns.values()]))


# -- one run --------------------------------------------------------------------------------------------------------


def _read(arm: str, path: Path, columns: Mapping[str, str]) -> list[_Read]:
    if path.is_dir() and holds_results(path):
        runs, _ = read_histories([path])
        modes = list(dict.fromkeys(run.mode for run in runs))
        if len(modes) > 1:
            raise SettingError(f"--curves {arm}: {path} holds runs of {listed(modes)}, and an arm is of one; name a run of it")
        return [_Read(replace(run, mode=arm), run.seed) for run in runs]
    logs = read_logs(path, columns.get("step"))
    return [_history(arm, log, columns, alone=len(logs) == 1) for log in logs]


def _history(arm: str, log: Log, columns: Mapping[str, str], *, alone: bool) -> _Read:
    used: dict[str, str] = {}
    for key, known in KNOWN.items():
        column = columns.get(key) or column_of(known, log.columns)
        if column is not None and column not in log.columns:
            raise RecordError(f"{log.name}: has no {column} for --metric {key}{nearest(column, log.columns)}")
        if column is not None:
            used[key] = column
    if "tokens" in used:
        used.pop("step_tokens", None)
    if not any(KNOWN[key].measure in _COMPARED for key in used):
        near = like(KNOWN["reward"], log.columns) or sorted(log.columns)
        raise RecordError(
            f"{log.name}: no column is known to be an accuracy, a reward or a response length; nearest: {some(near, 6)}; name"
            " it with --metric reward=COLUMN"
        )
    steps = np.unique(np.concatenate([log.columns[used[key]][0] for key in used if KNOWN[key].measure != "tokens"]))
    if not steps.size:
        raise RecordError(f"{log.name}: {listed(list(used.values()))}: no finite number below {MOST:g} is logged")
    measures = {name: np.full(len(steps), np.nan) for name in MEASURES}
    for key, column in used.items():
        if KNOWN[key].measure != "tokens":
            measures[KNOWN[key].measure] = _at(log, column, steps)
    accuracy = measures["accuracy"]
    if "accuracy" in used and not ((accuracy >= 0) & (accuracy <= 1) | np.isnan(accuracy)).all():
        raise RecordError(f"{log.name}: {used['accuracy']} lies outside 0 and 1, so it is no accuracy; name another column")
    for key in ("length", "correct_length", "incorrect_length"):
        if key in used and (measures[KNOWN[key].measure] < 0).any():
            raise RecordError(f"{log.name}: {used[key]} lies below 0, so it is no {KNOWN[key].word}; name another column")
    run = History(
        directory=Path(log.name),
        mode=arm,
        seed=0,
        status="",
        settings={},
        provenance={},
        steps=steps,
        tokens=_tokens_before(log, used, steps),
        seconds=np.full(len(steps), np.nan),
        measures=measures,
        source=log.name,
    )
    seeds = _SEED.findall(log.name if not alone else str(log.path))
    return _Read(run, int(seeds[-1]) if seeds else None, log, used)


def _at(log: Log, column: str, steps: np.ndarray) -> Floats:
    """A column at these steps [E], NaN where it has no number."""
    own, values = log.columns[column]
    found = np.full(len(steps), np.nan)
    _, at, there = np.intersect1d(steps, own, assume_unique=True, return_indices=True)
    found[at] = values[there]
    return found


def _tokens_before(log: Log, used: Mapping[str, str], steps: np.ndarray) -> Floats:
    """Tokens that were processed before what each step tells of [E]: none before the first, where the run was logged from its
    start, that is where the first step comes no later than the distance to the next. NaN where nothing tells."""
    found = np.full(len(steps), np.nan)
    starts = len(steps) < 2 or steps[0] <= max(steps[1] - steps[0], 1)
    if "tokens" in used:
        so_far = _at(log, used["tokens"], steps)
        found[1:] = so_far[:-1]
        found[0] = 0.0 if starts else np.nan
    elif "step_tokens" in used and starts:
        sums = np.concatenate([[0.0], np.cumsum(_at(log, used["step_tokens"], steps))[:-1]])
        whole = steps == steps[0] + np.arange(len(steps))  # behind a step that is not logged nobody knows
        found = np.where(np.logical_and.accumulate(whole) & (steps[0] <= 1), sums, np.nan)
    return found


# -- all of them ----------------------------------------------------------------------------------------------------


def _need_one_axis(arms: Mapping[str, Sequence[_Read]]) -> None:
    """Raises `SettingError` for arms whose steps count different things, or have none in common."""
    kinds: dict[str, str] = {}
    for name, own in arms.items():
        for one in own:
            axis = "step" if one.log is None or one.log.axis in STEP_NAMES[:-1] else one.log.axis
            kinds.setdefault(axis, name)
    if len(kinds) > 1:
        told = listed([f"{axis} in {name}" for axis, name in kinds.items()])
        raise SettingError(
            f"--curves: arms of different x-axes: {told}; name a column that all logs have with --metric step=COLUMN"
        )
    steps = {one.run.source or str(one.run.directory): one.run.steps for own in arms.values() for one in own}
    (first, common), *rest = steps.items()
    for name, own in rest:
        if not np.intersect1d(common, own).size:
            raise SettingError(
                f"--curves: arms of different x-axes: {first} has {_steps(steps[first])}, {name} has {_steps(own)}, and no step"
                " is in all of them"
            )
        common = np.intersect1d(common, own)


def _steps(steps: np.ndarray) -> str:
    return f"steps {some(steps.tolist(), 3)}"


def _are_paired(arms: Mapping[str, Sequence[_Read]]) -> bool:
    seeds = [[one.seed for one in own] for own in arms.values()]
    told = all(None not in own and len(set(own)) == len(own) for own in seeds)
    return told and len({frozenset(own) for own in seeds}) == 1


def _seeds(own: Sequence[_Read]) -> list[int]:
    """The seeds of an arm's runs, or where these do not tell runs apart their places in it."""
    seeds = [one.seed for one in own if one.seed is not None]
    return seeds if len(set(seeds)) == len(own) else list(range(len(own)))


def _pairing(arms: Mapping[str, Sequence[_Read]], paired: bool) -> list[str]:
    if len(arms) < 2:
        return []
    if paired:
        seeds = plural(len(next(iter(arms.values()))), "seed")
        return [f"runs are paired by the {seeds} that their names (of our own runs the records) tell, the same in all arms"]
    silent = sum(one.seed is None for own in arms.values() for one in own)
    why = (
        f"{plural(silent, 'run tells no seed by its path', 'runs tell no seed by their paths')}"
        if silent
        else "the arms do not have the same seeds"
    )
    return [f"runs are not paired by seed: {why}; pairing needs the same seeds in all arms, as in runs/grpo-seed1"]


def _what_was_read(arms: Mapping[str, Sequence[_Read]]) -> list[str]:
    """Which column each number is, and which were not found."""
    logs = [(name, one) for name, own in arms.items() for one in own if one.log is not None]
    if not logs:
        return []
    read, missing, partly = [], [], []
    for key, known in KNOWN.items():
        of_column: dict[str, dict[str, None]] = {}
        for name, one in logs:
            if key in one.used:
                of_column.setdefault(one.used[key], {})[name] = None
        if len(of_column) == 1:
            read.append(f"{known.word} is {next(iter(of_column))}")
        elif of_column:
            read.append(f"{known.word} is {listed([f'{column} in {listed(list(own))}' for column, own in of_column.items()])}")
        lacking = [(name, one.run.source) for name, one in logs if key not in one.used]
        if of_column and lacking and known.measure != "tokens":
            having = {name for of in of_column.values() for name in of}
            if bare := list(dict.fromkeys(name for name, _ in lacking if name not in having)):
                missing.append(f"{known.word} of {listed(bare)}")
            few = [source for name, source in lacking if name in having]
            if few and (len(having) > 1 or len(arms) == 1):
                partly.append(f"{known.word} is missing in {some(few, 3)}, so compared over the others")
        elif not of_column and key in ("accuracy", "reward", "length", "entropy", "kl"):
            near = like(known, {column for _, one in logs if one.log is not None for column in one.log.columns})
            missing.append(f"{known.word}{f' (nearest: {some(near)})' if near else ''}")
    said = [f"read from the trainers' logs: {'; '.join(read)}"]
    if any(one.counts_tokens for _, one in logs):
        said.append("tokens are counted as the trainers logged them, which may include those of prompts")
    else:
        missing.append("tokens")
    if missing:
        said.append(f"not found, so not compared: {'; '.join(missing)}")
    if printed := [one.run.source for _, one in logs if one.log is not None and one.log.printed]:
        said.append(f"numbers of {some(printed, 3)} have the digits that a terminal was given")
    said += [*partly, *(line for _, one in logs for line in _lost(one))]
    return [*said, "the settings of other trainers' runs are not known here: see to it that the arms differ in one thing only"]


def _lost(one: _Read) -> list[str]:
    """Which of a log's numbers are none to reckon with, and from which step on; which were logged twice; and which end before
    the others do, by more than they ever pause: a NaN is a blank cell in some exports."""
    if one.log is None:
        return []
    said = []
    for key, column in one.used.items():
        if again := one.log.again.get(column):
            said.append(
                f"{KNOWN[key].word} of {one.run.source} is logged again, with another number, at {plural(len(again), 'step')}"
                f" ({some(again, 3)}), as by a run that was resumed; the later number counts"
            )
        known, lost = one.log.columns[column][0], one.log.lost.get(column, ())
        last = known[-1] if known.size else -1
        if not lost:
            if known.size > 1 and one.run.steps[-1] - last > np.diff(known).max():
                said.append(f"{KNOWN[key].word} of {one.run.source} has no number behind step {last}, of {one.run.steps[-1]}")
            continue
        at = f"from step {lost[0]} on" if lost[0] > last else f"at {plural(len(lost), 'step')} ({some(lost, 3)})"
        said.append(f"{KNOWN[key].word} of {one.run.source} is NaN, infinite or beyond {MOST:g} {at}, and left out there")
    return said
