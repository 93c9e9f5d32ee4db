"""Where the numbers of a page come from: what was run, under which settings, and how to get the page again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggcli.analysis.frames import Frames
from aggcli.analysis.kept_curves import Kept
from aggcli.measurement.words import plural
from aggcli.records import read_manifest
from aggcli.report import page_tables as tables
from aggcli.report.findings import Findings
from aggcli.report.markup import Table


@dataclass(frozen=True)
class Origin:
    """`sure`: heading of what is said of the verdict; `kind`: what was run, in a line; `commands`: what made the records;
    `unfinished`: which runs did not end; `alike`: what is said where no setting differs; `settings`: (of what, its text) of
    each; `finals`: tables of what trained comparisons ended with; `reproduce`: commands, and `same`: what they give.
    """

    sure: str
    kind: str
    runs: Table
    alike: str
    reproduce: str
    same: str
    commands: Sequence[str] = ()
    unfinished: str = ""
    environments: Sequence[str] = ()
    settings: Sequence[tuple[str, str]] = ()
    finals: Sequence[Table] = ()


def of_records(directories: Sequence[Path], frames: Frames) -> Origin:
    """Of these results directories. Raises `RecordError` for a manifest that cannot be read."""
    manifests = {str(directory): read_manifest(directory) for directory in directories}
    own = {run.label: read_manifest(run.directory) for run in frames.runs}
    modes = len({run.mode for run in frames.runs})
    counts = f"{plural(len(frames.runs), 'run')}, {plural(modes, 'mode')}, {plural(len(frames.steps), 'optimizer step')}"
    return Origin(
        sure="How sure, and what the layouts do",
        kind=f"{counts}, from {', '.join(map(str, directories))}",
        runs=tables.run_table(frames, own),
        alike="No setting, version or device differs between the runs but the mode and the seed.",
        reproduce=_reproduce(directories, manifests),
        same="Same commit, versions, device, threads and processes: the same numbers to the last bit. Everything random comes"
        " from the seed.",
        commands=[command for manifest in manifests.values() if (command := _command(manifest))],
        unfinished=_unfinished(own),
        environments=_environments([*manifests.values(), *own.values()]),
        settings=[(name, _settings(manifest)) for name, manifest in manifests.items()],
        finals=[
            tables.final_table(name if len(manifests) > 1 else "", final)
            for name, manifest in manifests.items()
            if isinstance(final := manifest.get("final"), Mapping) and final.get("modes")
        ],
    )


def of_curves(directory: Path, kept: Kept, findings: Findings) -> Origin:
    """Of runs that other trainers made, kept in this directory."""
    arms = len({run.label for run in findings.compared})
    return Origin(
        sure="How sure",
        kind=f"{plural(len(findings.compared), 'run')} of {plural(arms, 'arm')}, read from their logs and kept in {directory}",
        runs=tables.log_table(findings),
        alike="The settings of other trainers' runs are not known: see to it that the arms differ in one thing only.",
        reproduce="\n".join([kept.command(directory), shlex.join(["aggcli", "plot", "--html", str(directory)])]),
        same="The first command reads the logs again, which may have grown since; the second draws what was kept.",
    )


def _unfinished(own: Mapping[str, Mapping[str, Any]]) -> str:
    """Which runs did not end as done; empty where all did."""
    ended = [label for label, manifest in own.items() if manifest.get("status") != "done"]
    if not ended:
        return ""
    said = f"{plural(len(ended), 'run')} of {len(own)} did not end as done: {', '.join(ended[:6])}"
    return said + (" and others" if len(ended) > 6 else "")


def _environments(manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each environment once: commit, versions, device."""
    told = []
    for manifest in manifests:
        environment = manifest.get("environment")
        if isinstance(environment, Mapping):
            flat = {**environment, **(environment.get("packages") or {})}
            flat.pop("packages", None)
            told.append("\n".join(f"{name}: {value}" for name, value in flat.items() if value is not None))
    return list(dict.fromkeys(told))


def _settings(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("config") or json.dumps(manifest.get("settings") or {}, indent=2, ensure_ascii=False))


def _reproduce(directories: Sequence[Path], manifests: Mapping[str, Mapping[str, Any]]) -> str:
    commits = dict.fromkeys(
        str(commit) for one in manifests.values() if (commit := (one.get("environment") or {}).get("git_commit"))
    )
    lines = [f"git checkout {shlex.quote(commit)}" for commit in commits]
    lines += dict.fromkeys(filter(None, map(_command, manifests.values())))
    lines.append(shlex.join(["aggcli", "plot", "--html", *map(str, directories)]))
    return "\n".join(lines)


def _command(manifest: Mapping[str, Any]) -> str:
    """The command line that made these records; empty where it was not recorded."""
    arguments = manifest.get("arguments")
    return shlex.join(["aggcli", *map(str, arguments)]) if isinstance(arguments, list) and arguments else ""
