"""What a results directory holds, from its manifests and the last line of each of its runs' metrics.jsonl.

No more is read, so that a thousand of them are listed in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from natsort import natsorted

from aggcli.analysis.reading import last_line, read_manifest
from aggcli.analysis.units import length_unit_of
from aggcli.config import RunConfig, to_flat
from aggcli.errors import RecordError
from aggcli.ownership import contents
from aggcli.records import MANIFEST, METRICS


@dataclass(frozen=True)
class Run:
    """One run. `name`: its folder in the results directory; `last`: its last recorded line, None where no step is recorded."""

    name: str
    manifest: Mapping[str, Any]
    last: Mapping[str, Any] | None

    @property
    def mode(self) -> str:
        return self.manifest.get("mode", "custom")

    @property
    def seed(self) -> int:
        return self.manifest.get("seed", 0)

    @property
    def steps(self) -> int:
        """Rollout steps that are recorded; in a replay, optimizer steps."""
        return 0 if self.last is None else self.last.get("rollout_step", self.last["step"]) + 1


@dataclass(frozen=True)
class Results:
    """A results directory. `when`: when it was last written to, seconds since 1970."""

    directory: Path
    manifest: Mapping[str, Any]
    runs: tuple[Run, ...]
    when: float

    @property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(run.mode for run in self.runs))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.manifest.get("settings", {})

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, commit, device, threads and ranks, as flat names."""
        found = {**self.manifest.get("environment", {}), "ranks": self.manifest.get("ranks")}
        packages = found.pop("packages", {})
        return {**found, **packages}

    @property
    def length_unit(self) -> str:
        """What the lengths of its runs are counted in."""
        return length_unit_of({"settings": self.settings, **self.manifest})

    def facts(self, name: str) -> dict[str, Any]:
        """What `list` says of it. Steps: the fewest that a run which did not diverge has recorded; planned: None in a replay.

        Accuracy: on fresh prompts after training, mean over the mode's runs that were evaluated.
        """
        trains = bool(self.settings.get("train")) or not self.settings.get("rollouts")
        accuracies: dict[str, list[float]] = {}
        for run in self.runs:
            if (value := run.manifest.get("evaluation", {}).get("accuracy")) is not None:
                accuracies.setdefault(run.mode, []).append(value)
        going = [run for run in self.runs if "diverged" not in run.manifest]
        return {
            "name": name,
            "directory": str(self.directory),
            "command": self.manifest.get("command"),
            "modes": self.modes,
            "seeds": self.seeds,
            "steps_done": min(run.steps for run in going or self.runs),
            "steps_planned": self.settings.get("steps") if trains else None,
            "status": self.manifest.get("status"),
            "diverged": len(self.runs) - len(going),
            "when": datetime.fromtimestamp(self.when).astimezone().isoformat(timespec="seconds"),
            "accuracy": {mode: {"mean": sum(found) / len(found), "n": len(found)} for mode, found in accuracies.items()},
        }


def changed_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each recorded setting that is not the default, with both; one that this version does not know has no default."""
    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in to_flat(RunConfig()).items()}
    for name, value in settings.items():
        if name not in defaults or value != defaults[name]:
            yield name, {"value": value, "default": defaults.get(name)}


# -- reading --------------------------------------------------------------------------------------------------------


def results_under(directory: Path, note: Callable[[str], None]) -> Iterator[Results]:
    """Every results directory at or under a folder, in natural order (compare-2 before compare-10); links are not followed, and
    what cannot be read is told to `note`.
    """
    for folder, folders, files in os.walk(
        directory, onerror=lambda error: note(f"{error.filename}: {error.strerror}; skipped")
    ):
        folders[:] = natsorted(folders)
        if MANIFEST in files:
            try:
                found = read_results(Path(folder))
            except RecordError as error:
                note(f"{error}; skipped")
                continue
            folders.clear()
            yield found


def read_results(directory: Path) -> Results:
    """A results directory and those of its runs that have begun. Raises `RecordError` for one that cannot be read."""
    manifest = read_manifest(directory)
    named = manifest.get("runs", ["."])
    names = [name for name in named if (directory / name).exists()] or named
    places = [directory / name for name in names]
    found = [
        Run(name, manifest if name == "." else read_manifest(place), _last_line(place / METRICS))
        for name, place in zip(names, places, strict=True)
    ]
    written = [
        path.stat().st_mtime for place in (directory, *places) for path in (place / MANIFEST, place / METRICS) if path.exists()
    ]
    return Results(directory, manifest, tuple(found), max(written))


def contents_of(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files that aggcli wrote, and whatever else stands there (see `aggcli.ownership.contents`). Raises `RecordError`."""
    try:
        return contents(directory)
    except OSError as error:
        raise RecordError(f"{directory}: cannot be read ({error.strerror or error})") from error


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a record file, read from its end; None when there is none. Raises `RecordError`."""
    try:
        with path.open("rb") as file:
            size, reach, line = file.seek(0, os.SEEK_END), 1 << 14, b""
            while size:
                start = max(0, size - reach)
                file.seek(start)
                tail = file.read(size - start)
                whole = tail[: tail.rfind(b"\n") + 1]  # a killed writer leaves half a line
                at = whole.rfind(b"\n", 0, -1)
                if at >= 0 or start == 0:
                    line = whole[at + 1 :]
                    break
                reach *= 4
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    return last_line(path, line) if line.strip() else None


def holds_results(directory: Path) -> bool:
    """Whether a path is a results directory, or a folder of some, and not rollouts."""
    return directory.is_dir() and ((directory / MANIFEST).is_file() or next(directory.glob(f"*/{MANIFEST}"), None) is not None)
