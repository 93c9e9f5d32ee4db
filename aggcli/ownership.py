"""Which files are aggcli's own: what may be replaced by --overwrite and removed by `aggcli runs rm`, and nothing else."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from aggcli.errors import RecordError, some
from aggcli.files import DRAFT
from aggcli.records import (
    CHECKPOINT_PARTS,
    LAYOUTS,
    MANIFEST,
    METRICS,
    ROLLOUTS,
    SAMPLES,
    TENSORBOARD,
    TIMINGS,
    TRACKIO,
    first_free,
    read_manifest,
)

FIGURES = (
    "effects",
    "accuracy_by_tokens",
    "reward_by_tokens",
    "learning_curves",
    "weight_by_length",
    "weight_shares",
    "mode_gradients",
    "modes_over_steps",
    "correct_by_rank",
    "pg_loss_by_rank",
    "layout_deviation",
)
"""Every figure that is drawn, in the order of a report; a file of one is its name and an ending."""
FIGURE_FORMATS = ("png", "svg", "pdf")
REPORT = "report.html"
OWN_FILES = (*map(re.escape, (MANIFEST, METRICS, LAYOUTS, TIMINGS)), r"checkpoint(-\d+)?\.safetensors")
OWN_FOLDERS = {
    SAMPLES: r"step-\d+\.parquet",
    "figures": rf"({'|'.join(FIGURES)})\.({'|'.join(FIGURE_FORMATS)})|{re.escape(REPORT)}",
    ROLLOUTS: r"\d+\.jsonl",
    TENSORBOARD: r"events\.out\.tfevents\..+",
    TRACKIO: r".+\.(db(-wal|-shm|-journal)?|lock)",
    **dict.fromkeys(CHECKPOINT_PARTS, r"shard-\d+-model-\d+-of-\d+\.safetensors"),
}
"""What a results directory holds besides the run directories that its manifest names: files, and folder -> files in it."""
_DRAFT = rf"({re.escape(DRAFT)})?"
_BESIDE = rf"(\.before-resume(-\d+)?)?{_DRAFT}"
"""How the draft of a file ends, which a killed run leaves, and the backup that a resumed run makes of it."""


def is_blank(directory: Path) -> bool:
    """A directory that a run has made and was killed before it had written what it is; also an empty one."""
    return directory.is_dir() and all(path.name == MANIFEST + DRAFT for path in directory.iterdir())


def check_output(wanted: Path | None, *, overwrite: bool) -> None:
    """Refuse, before any work, an output that exists and is not empty, unless `overwrite` may replace what a run left there.

    A folder that holds anything aggcli did not write is never replaced. Raises `RecordError`.
    """
    if wanted is None:
        return
    if not str(wanted).strip() or str(wanted) == ".":
        raise RecordError(f"--output '{wanted}': must name a folder of its own, such as results/first")
    try:
        if not wanted.exists() or is_blank(wanted):
            return
        if not overwrite:
            raise RecordError(f"--output {wanted}: already holds something; choose another folder or give --overwrite")
        if wanted.is_symlink() or not (wanted / MANIFEST).is_file():
            raise RecordError(f"--output {wanted}: holds no {MANIFEST}, so it is not a results directory; choose another")
        need_own(wanted)
        _, foreign = contents(wanted)
    except OSError as error:
        raise RecordError(f"--output {wanted}: cannot be read ({error.strerror or error})") from error
    if foreign:
        raise RecordError(
            f"--output {wanted}: also holds {some(foreign, 3)}, which aggcli did not write; choose another folder"
        )


def figure_file(name: str, ending: str) -> str:
    """The file name of a figure; one that is not among `FIGURES` would be taken for the user's own and never removed."""
    assert name in FIGURES, name
    assert ending in FIGURE_FORMATS, ending
    return f"{name}.{ending}"


def need_own(directory: Path) -> None:
    """Refuse a directory whose manifest, or that of one of its runs, is not one that aggcli writes. Raises `RecordError`.

    A folder that holds the draft of a manifest and nothing else is aggcli's too.
    """
    if _holds_a_draft_only(directory):
        return
    runs = [directory / name for name in read_manifest(directory).get("runs", [])]
    for place in (directory, *(run for run in runs if (run / MANIFEST).exists())):
        manifest = read_manifest(place)
        lacking = [name for name in ("kind", "command", "settings") if name not in manifest]
        if lacking or manifest["kind"] not in ("run", "comparison"):
            what = f"has no {', '.join(lacking)}" if lacking else f"is of kind {manifest['kind']}"
            raise RecordError(f"{place}: its {MANIFEST} {what}, so aggcli did not write it; nothing is removed or replaced")


def _holds_a_draft_only(directory: Path) -> bool:
    return is_blank(directory) and any(directory.iterdir())


def contents(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files in a results directory that aggcli wrote, and whatever else stands in it; both sorted.

    A link is never aggcli's and is not followed; of a folder that is not aggcli's only the folder itself is named. Raises
    `RecordError` for a folder without a readable manifest, `OSError` for one that cannot be listed.
    """
    manifest = {} if _holds_a_draft_only(directory) else read_manifest(directory)
    runs = [directory / name for name in manifest.get("runs", [])]
    with_records = {directory, *runs}
    own_folders = with_records | {parent for run in runs for parent in run.parents if directory in parent.parents}
    own_file = rf"({'|'.join(OWN_FILES)}){_BESIDE}"
    own, foreign, folders = [], [], [directory]
    while folders:
        folder = folders.pop()
        files = own_file if folder in with_records else _draft_too(OWN_FOLDERS.get(folder.name))
        for path in folder.iterdir():
            if path.is_symlink():
                foreign.append(path)
            elif path.is_dir():
                known = path in own_folders or (folder in with_records and path.name in OWN_FOLDERS)
                (folders if known else foreign).append(path)
            else:
                (own if files and re.fullmatch(files, path.name) else foreign).append(path)
    return sorted(own), sorted(foreign)


def _draft_too(files: str | None) -> str | None:
    return None if files is None else f"({files}){_DRAFT}"


def fresh_directory(wanted: Path | None, default_name: str, *, overwrite: bool) -> Path:
    """A results directory that nothing else has written into, made now; see `check_output` for what is refused.

    Without `wanted`: `results/<default_name>`, or the first free `results/<default_name>-2`, `-3`, ... Raises `RecordError`.
    """
    path = wanted if wanted is not None else first_free(Path("results"), default_name)
    check_output(wanted, overwrite=overwrite)
    try:
        if path.exists() and any(path.iterdir()):
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"--output {path}: cannot be written ({error.strerror or error})") from error
    return path


@contextlib.contextmanager
def not_left_empty(made: Path | None) -> Iterator[None]:
    """Remove a directory that was made for what is refused before anything was written into it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if made is not None:
                made.rmdir()  # which an empty directory alone lets happen
        raise
