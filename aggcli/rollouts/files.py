"""Which files a path names: a file, a folder of them as the frameworks lay them out, or a glob; in natural order."""

from __future__ import annotations

import glob
import re
from fnmatch import fnmatch
from pathlib import Path

from aggcli.errors import RolloutError

SYNTHETIC = "synthetic"
EXAMPLE = "example"
"""The real rollouts that ship with the package: three slime rollout dumps of a small policy on an arithmetic task."""
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
    place = Path(__file__).parent.parent / "data" / "slime_rollout" if path == EXAMPLE else Path(path).expanduser()
    try:
        if place.is_dir():
            return _files_of(place, include_eval)
        if place.exists():
            return [place]
        matches = [Path(match) for match in glob.glob(str(place), recursive=True)]
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read ({error.strerror or error})") from error
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
        raise RolloutError(f"{folder}: the folder holds no rollout files ({', '.join(EXTENSIONS)}); give one that does")
    kept = [file for file in files if include_eval or not is_eval(file)]
    if not kept:
        raise RolloutError(f"{folder}: the folder holds only eval_ files; read them with --include-eval")
    return kept


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


def is_eval(path: Path) -> bool:
    return path.name.startswith("eval_")


def natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key under which 2.pt comes before 10.pt."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]
