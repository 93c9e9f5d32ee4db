"""Runs that other trainers made: compared, and with an output kept and drawn, so that they can be compared and drawn again
without their logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from aggcli.analysis.arms import read_arms
from aggcli.analysis.kept_curves import Kept, holds_curves, keep_curves, read_curves
from aggcli.errors import RecordError, SettingError
from aggcli.jobs.compare import ComparisonOptions, ComparisonResult, compared_runs
from aggcli.ownership import OWN_FOLDERS
from aggcli.records import CURVES, refuse_links


def compare_curves(
    curves: Sequence[str],
    metrics: Sequence[str] = (),
    options: ComparisonOptions | None = None,
    output: Path | None = None,
    *,
    overwrite: bool = False,
) -> ComparisonResult:
    """Compare runs that other trainers made, by arm. `curves`: `NAME=PATTERN`, an arm each; `metrics`: `KEY=COLUMN`
    (`aggcli.analysis.arms`); `output`: a folder for `curves.json`, the figures and the page; `overwrite`: whether it may hold
    those of another comparison, which alone are replaced. Raises `SettingError` and `RecordError`.
    """
    asked = options or ComparisonOptions()
    if output is not None:
        _need_free(output, overwrite=overwrite)
    _need_no_seconds(asked)
    given = {one.name: value for one in fields(asked) if (value := getattr(asked, one.name)) != one.default}
    kept = Kept(read_arms(curves, metrics), {"curves": [*map(str, curves)], "metrics": [*map(str, metrics)], "options": given})
    found = compared_runs(kept.arms, asked)
    return found if output is None else replace(found, page=_keep(kept, output))


def compare_kept(directory: Path, options: ComparisonOptions | None = None) -> ComparisonResult:
    """Compare the runs that `compare_curves` kept in this folder, by default as it did. Raises `SettingError` and
    `RecordError`."""
    kept = read_curves(directory)
    asked = options or _options_of(directory, kept)
    _need_no_seconds(asked)
    return compared_runs(kept.arms, asked)


def _options_of(directory: Path, kept: Kept) -> ComparisonOptions:
    try:
        return ComparisonOptions(**kept.arguments["options"])
    except (TypeError, KeyError, SettingError) as error:
        raise RecordError(f"{directory / CURVES}: its options are not known here; compare the logs again") from error


def _need_no_seconds(asked: ComparisonOptions) -> None:
    if asked.axis == "seconds":
        raise SettingError(
            "--axis seconds: the seconds of other trainers' runs are not read; leave it out, or give --axis steps"
        )


def _need_free(output: Path, *, overwrite: bool) -> None:
    """Refuse, before any work, an output that is no folder of its own. Raises `RecordError`."""
    if not str(output).strip() or str(output) == ".":
        raise RecordError(f"--output '{output}': must name a folder of its own, such as results/first")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise RecordError(f"--output {output}: already holds something; choose another folder or give --overwrite")
        if not holds_curves(output):
            raise RecordError(f"--output {output}: holds no {CURVES}, so it is no comparison of logs; choose another folder")
        try:
            read_curves(output)
        except RecordError as error:
            raise RecordError(
                f"--output {output}: its {CURVES} is none that this version wrote, and is not replaced; choose another folder"
            ) from error
    elif output.exists():
        raise RecordError(f"--output {output}: is a file; choose a folder")


def _keep(kept: Kept, output: Path) -> Path | None:
    """Write the numbers, then draw them; the page."""
    from aggcli.jobs.plot import plot

    folder = output / "figures"
    refuse_links([output, output / CURVES, folder])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # of an earlier comparison
            if re.fullmatch(OWN_FOLDERS["figures"], path.name):
                path.unlink()
    except OSError as error:
        raise RecordError(f"--output {output}: cannot be written ({error.strerror or error})") from error
    keep_curves(output, kept)
    return plot([output], html=True).report
