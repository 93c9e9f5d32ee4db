"""Which files a path names: a file, a folder of them as the frameworks lay them out, or a glob; in natural order.

And how they are opened.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from aggcli.errors import RolloutError, some
from aggcli.records import LAYOUTS, MANIFEST, METRICS, TIMINGS

SYNTHETIC = "synthetic"
EXAMPLE = "example"
"""The rollouts that ship with the package: three steps of a small policy on an arithmetic task, each as slime's rollout dump
and train dump, which are joined: groups from the one; log-probabilities, advantages and the recorded layout from the other."""
EXTENSIONS = (".pt", ".jsonl", ".parquet", ".pkl")
"""Files that are taken from a folder."""
FOLDERS = (
    "rollout_data",  # slime and miles, --dump-details
    "train_data",
    "completions",  # TRL
    "token_exports",  # prime-rl
    "dumped_data",  # SkyRL
    "step_*",  # prime-rl, one folder a step
    "iteration_*",  # tinker-cookbook, likewise
)
"""Where the frameworks put their dumps: looked into where a folder itself holds no rollout files."""


def find_files(path: str, include_eval: bool = False) -> list[Path]:
    """The rollout files that a file, a folder or a glob names, in natural order (2 before 10); never an empty list."""
    try:
        place = Path(__file__).parent.parent / "data" / EXAMPLE if path == EXAMPLE else Path(path).expanduser()
    except RuntimeError:  # ~somebody
        raise RolloutError(f"{path}: there is no such user; write the path out, or put ./ in front of it") from None
    try:
        need_rollouts(place)
        if place.is_dir():
            return _files_of(place, include_eval)
        if place.exists():
            return [place]
        matches = [Path(match) for match in glob.glob(str(place), recursive=True)]
    except RolloutError:
        raise
    except (OSError, ValueError, re.error) as error:  # ValueError: a path with a null byte
        raise RolloutError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not matches:
        what = "no file matches it" if glob.has_magic(path) else "no such file or folder"
        raise RolloutError(f"{path}: {what}; give a rollout file, a folder of them, a glob, '{EXAMPLE}' or '{SYNTHETIC}'")
    if not include_eval and not is_eval(place):  # a pattern such as eval_*.pt asks for them
        matches = [match for match in matches if not is_eval(match)]
    files = [
        file
        for match in sorted(matches, key=natural)
        for file in (_files_of(match, include_eval) if match.is_dir() else [match])
    ]
    if not files:
        raise RolloutError(f"{path}: matches only eval_ files; read them with --include-eval")
    return files


def _files_of(folder: Path, include_eval: bool) -> list[Path]:
    files = _found(folder)
    if not files:
        below = _folders_below(folder)
        hint = f"but {below[0]} does: give {below[0]}" if below else "give one that does"
        if len(below) > 1:
            hint = f"but {some(below, 12)} do: give {below[0]}, or several of them"
        raise RolloutError(
            f"{folder}: the folder holds no rollout files ({', '.join(EXTENSIONS)}){',' if below else ';'} {hint}"
        )
    kept = [file for file in files if include_eval or not is_eval(file)]
    if not kept:
        raise RolloutError(f"{folder}: the folder holds only eval_ files; read them with --include-eval")
    return kept


def need_rollouts(place: Path) -> None:
    """Refuse what aggcli itself has recorded, a results directory or its files, which would be read as rollouts."""
    folder = place if place.is_dir() else place.parent
    own = place.name in (METRICS, LAYOUTS, TIMINGS) or (place.is_dir() and (place / METRICS).is_file())
    held = place.is_dir() and (place / MANIFEST).is_file() and next(place.rglob(METRICS), None) is not None
    if (own and (folder / MANIFEST).is_file()) or held:
        raise RolloutError(
            f"{place}: is what aggcli recorded (a results directory), not rollouts; look at it with `aggcli compare {folder}`"
            f" or `aggcli plot {folder}`"
        )


def _folders_below(folder: Path) -> list[Path]:
    """The folders up to two levels below that hold rollout files, a few."""
    found = []
    for below in sorted((*folder.glob("*/"), *folder.glob("*/*/")), key=natural)[:200]:
        if below.name[0] != "." and below.is_dir() and not (below / MANIFEST).exists() and _found(below):
            found.append(below)
    return found


def _found(folder: Path, depth: int = 2) -> list[Path]:
    """The folder's own rollout files, or those of the subfolders in which frameworks put them."""
    try:
        entries = sorted(folder.iterdir(), key=natural)
    except OSError as error:
        raise RolloutError(f"{folder}: cannot be read ({error.strerror or error})") from error
    files = [file for file in entries if file.suffix in EXTENSIONS and file.name[0] != "." and file.is_file()]
    if files or not depth:
        return files
    subfolders = [entry for pattern in FOLDERS for entry in entries if fnmatch(entry.name, pattern) and entry.is_dir()]
    return [file for subfolder in subfolders for file in _found(subfolder, depth - 1)]


_PIPES: dict[tuple[int, int], bytes] = {}
"""What came out of each pipe, which can be read only once, while telling the format and reading take several looks."""


def is_pipe(path: Path) -> bool:
    """Whether a path can be read only once, and by this process alone."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def forget_pipes() -> None:
    """Drop what was kept of pipes: another source begins."""
    _PIPES.clear()


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read, from its beginning; a pipe (`<(cat file)`, /dev/stdin) is read once and kept.

    Raises `RolloutError` for what cannot be read, in the block too.
    """
    try:
        about = path.stat()
        if stat.S_ISCHR(about.st_mode) and not os.path.samefile(path, os.devnull):
            raise RolloutError(f"{path}: is a device, not a file; give a rollout file, or pipe one in")
        if stat.S_ISFIFO(about.st_mode) or stat.S_ISSOCK(about.st_mode):
            key = about.st_dev, about.st_ino
            if key not in _PIPES:
                with path.open("rb") as pipe:
                    _PIPES[key] = pipe.read()
            yield io.BytesIO(_PIPES[key])
            return
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read ({error.strerror or error})") from error


def is_of_the_machine(error: Exception) -> bool:
    """Whether an error while a file is read says nothing of what it holds: no more files can be open, the disk fails."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM)


def size_of(path: Path) -> int:
    """Bytes of a file, or of what came out of a pipe."""
    with opened(path) as file:
        return file.seek(0, io.SEEK_END)


def is_eval(path: Path) -> bool:
    return path.name.startswith("eval_")


def natural(path: Path | str) -> list[tuple[int, int, str]]:
    """Sort key under which 2.pt comes before 10.pt."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]
