"""What differs between compared runs, which of them are one arm, and which were recorded twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aggcli.analysis.histories import History
from aggcli.config import LAUNCH_SETTINGS, unread_settings
from aggcli.errors import some
from aggcli.measurement.words import plural
from aggcli.rules import RULE_SETTINGS, recorded_rule

_THE_MODE = frozenset({"loss_aggregation", "calculate_per_token_loss"})
_BOOKKEEPING = frozenset(
    {"seed", "seeds", "modes", "layouts", "layout_records", "checkpoint_every", "log_correct_samples", "log_to"}
    | {*LAUNCH_SETTINGS}
)
"""Settings that change what is recorded and where, or which run of a comparison it is, and no number of the run itself."""
_NOT_IDENTITY = frozenset({"steps", "device", "config"})
"""Settings that say how long or where a run went: runs that differ in them only are still of one arm."""
MOST_SHOWN = 3
"""Differing settings that a label or a note names; the rest are counted."""
_ROOM = 160
"""Characters that the labels of one value may take in a note."""

Kind = Literal["setting", "provenance"]


@dataclass(frozen=True)
class SettingDifference:
    """A setting, or a version or device, that is not the same in all runs. `values`: as text -> labels of the runs with it."""

    name: str
    kind: Kind
    values: Mapping[str, tuple[str, ...]]

    @property
    def text(self) -> str:
        """`lr: 0.001 in sample_mean; 0.0003 in constant`."""
        told = [f"{value} in {some(labels, _most(labels))}" for value, labels in self.values.items()]
        more = f"; and {plural(len(told) - 4, 'other value')}" if len(told) > 4 else ""
        return f"{self.name}: {'; '.join(told[:4])}{more}"


def effective_settings(mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the numbers of a run of this mode depend on, other than its mode and seed; whether it trains stays."""
    rollouts = settings.get("rollouts") or ()
    unread = unread_settings(trains=bool(settings.get("train")) or not rollouts, rollouts=rollouts)
    left_out = _THE_MODE | _BOOKKEEPING | (unread.keys() - {"train"})
    rule = recorded_rule(mode)
    return {name: value for name, value in settings.items() if name not in left_out and (rule is None or rule.reads(name))}


def labelled(runs: Sequence[History]) -> list[History]:
    """The runs with the label of their arm: the mode, and where one mode was run under several settings, those that differ.

    Runs of one arm differ in the seed only (and in `steps`, device and version, which `differences` names).
    """
    labels = arm_labels([(run.mode, run.settings) for run in runs])
    return [dataclasses.replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def arm_labels(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The label of the arm of each run, given as (mode, settings); see `labelled`."""
    identity = [_identity(mode, settings) for mode, settings in runs]
    labels = [mode for mode, _ in runs]
    for mode in dict.fromkeys(labels):
        same = [at for at, (own, _) in enumerate(runs) if own == mode]
        names = sorted(set().union(*(identity[at] for at in same)))
        differing = [name for name in names if len({identity[at].get(name) for at in same}) > 1]
        arms = list(dict.fromkeys(tuple(identity[at].get(name) for name in differing) for at in same))
        of_arm = dict(zip(arms, _arm_names(mode, differing, arms), strict=True))
        for at in same:
            labels[at] = of_arm[tuple(identity[at].get(name) for name in differing)]
    return labels


def _arm_names(mode: str, differing: Sequence[str], arms: Sequence[tuple[Any, ...]]) -> list[str]:
    """A name for each of a mode's arms, given as their values of `differing`: `MOST_SHOWN` settings, those that tell most arms
    apart, and a running number where these do not tell all of them apart.
    """
    if not differing:
        return [mode] * len(arms)
    chosen: list[int] = []
    while len(chosen) < min(MOST_SHOWN, len(differing)):
        left = [at for at in range(len(differing)) if at not in chosen]
        chosen.append(max(left, key=lambda at: len({tuple(_short(arm[i]) for i in (*chosen, at)) for arm in arms})))
    more = _others(len(differing) - len(chosen))
    names = [", ".join(f"{differing[i]}={_short(arm[i])}" for i in sorted(chosen)) + more for arm in arms]
    numbered = [
        f"{name}, no. {names[: at + 1].count(name)}" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]
    return [f"{mode} ({name})" for name in numbered]


def without_duplicates(runs: Sequence[History]) -> tuple[list[History], list[str]]:
    """One run per label and seed, and notes that name the others.

    Of the same arm and seed recorded twice, the one with the most recorded steps counts; of equally long ones, one that ended
    as `done`; of those, the one that is given last.
    """
    best: dict[tuple[str, int], int] = {}
    for at, run in enumerate(runs):
        key = (run.label, run.seed)
        rank = (len(run.steps), run.status == "done", at)
        if key not in best or rank > (len(runs[best[key]].steps), runs[best[key]].status == "done", best[key]):
            best[key] = at
    kept = [run for at, run in enumerate(runs) if best[run.label, run.seed] == at]
    dropped = [run for at, run in enumerate(runs) if best[run.label, run.seed] != at]
    if not dropped:
        return kept, []
    return kept, [
        f"of {len(runs)} runs {plural(len(dropped), 'is', 'are')} left out, since another records the same mode, seed and"
        " settings; the one with the most steps counts, then one that is done, then the last given; left out:"
        f" {some(run.directory for run in dropped)}"
    ]


def differences(runs: Sequence[History]) -> list[SettingDifference]:
    """Every setting, version and device with more than one value among the runs, the mode and the seed aside."""
    return [
        *_differing(runs, [effective_settings(run.mode, run.settings) for run in runs], "setting"),
        *_differing(runs, [run.provenance for run in runs], "provenance"),
    ]


def _differing(runs: Sequence[History], of_run: Sequence[Mapping[str, Any]], kind: Kind) -> Iterator[SettingDifference]:
    for name in sorted(set().union(*of_run)):
        values: dict[str, dict[str, None]] = {}
        for run, own in zip(runs, of_run, strict=True):
            if name in own or name not in RULE_SETTINGS:
                values.setdefault(_short(own.get(name)), {})[run.label] = None
        if len(values) > 1:
            yield SettingDifference(name, kind, {value: tuple(labels) for value, labels in values.items()})


def warnings(found: Sequence[SettingDifference]) -> list[str]:
    """What a reader must know before believing the table: more than the mode differs."""
    settings = [one for one in found if one.kind == "setting"]
    provenance = [one for one in found if one.kind == "provenance"]
    said = []
    if settings:
        said.append("more than the mode differs, so a difference may come from it: " + _told(settings))
    if provenance:
        said.append("recorded by different versions or on different devices: " + _told(provenance))
    return said


def _told(found: Sequence[SettingDifference]) -> str:
    return " | ".join(one.text for one in found[:MOST_SHOWN]) + _others(len(found) - MOST_SHOWN)


def _others(count: int) -> str:
    return f" and {plural(count, 'other')}" if count > 0 else ""


def _most(labels: Sequence[str]) -> int:
    """How many of these labels a note names: up to 4, and only the first of long ones."""
    return 4 if sum(map(len, labels[:4])) <= _ROOM else 1


def _identity(mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    own = effective_settings(mode, settings)
    return {name: _hashable(value) for name, value in own.items() if name not in _NOT_IDENTITY}


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _short(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)[:60]
