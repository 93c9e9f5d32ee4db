"""`aggcli convert`: rollouts of any format that is read, as our own JSONL or Parquet, or as slime's rollout dumps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aggcli.cli.console import progress, say
from aggcli.cli.options import offered, with_settings
from aggcli.config import FIELDS, SOURCE_SETTINGS, settings_from
from aggcli.errors import SettingError, nearest, printable
from aggcli.measurement.words import plural

if TYPE_CHECKING:
    from aggcli.rollouts.sources import Source
    from aggcli.rollouts.writers import Target


@with_settings(without=[name for name in FIELDS if name not in SOURCE_SETTINGS or name == "rollouts"])
def convert(
    given: dict[str, Any],
    rollouts: Annotated[str | None, typer.Argument(metavar="IN", help="File, folder or glob; example or synthetic.")] = None,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="File (.jsonl, .parquet, .pt) or folder. A file for one step; a folder for several, one file a step.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="jsonl|parquet|slime",
            help="Format. Default: by OUT's extension, jsonl for a folder.",
            autocompletion=offered(("jsonl", "parquet", "slime")),
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion in OUT.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the fields of the plain format, and stop.")] = False,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="md|json",
            help="With --schema: Markdown (default) or JSON Schema.",
            autocompletion=offered(("md", "json")),
        ),
    ] = None,
) -> None:
    """Write rollouts in the plain format: JSONL or Parquet, one sample a line or row, every number kept to the last bit.

    Texts are not kept; lengths counted from them are, with their unit. slime's dumps (--to slime) hold less, as noted.
    """
    if schema:
        _print_schema(format or "md")
        return
    if format is not None:
        raise SettingError(f"--format {format}: is how --schema prints; --to names the format that is written")
    if rollouts is None or out is None:
        raise SettingError("convert: give IN and OUT, as in aggcli convert dumps/ plain/")
    settings = settings_from({**given, "rollouts": [rollouts]})
    from aggcli.rollouts.sources import open_source

    source = open_source(settings.source, settings.seed)
    target, is_file = _target(to, out)
    if is_file and len(source) != 1:
        raise SettingError(f"{rollouts} holds {len(source)} steps, and {out} is one file: give a folder, one file a step")
    _write(source, out, target, is_file, overwrite)


def _print_schema(format: str) -> None:
    from aggcli.analysis import rollout_schema
    from aggcli.records import to_json

    if format not in ("md", "json"):
        raise SettingError(f"--format {format}: must be md or json{nearest(format, ('md', 'json'))}")
    print(to_json(rollout_schema.json_schema(), indent=2) if format == "json" else rollout_schema.markdown().rstrip())


def _target(to: str | None, out: Path) -> tuple[Target, bool]:
    """The target, and whether OUT is one file: whether it ends in the extension of a format."""
    from aggcli.rollouts.writers import TARGETS

    if out.suffix and out.suffix not in {target.extension for target in TARGETS.values()} and not (to or out.is_dir()):
        raise SettingError(f"{out}: '{out.suffix}' is not written; end in .jsonl, .parquet or .pt, or name a folder")
    by_extension = {target.extension: name for name, target in TARGETS.items()}
    wanted = to or by_extension.get(out.suffix, "jsonl")
    if wanted not in TARGETS:
        raise SettingError(f"--to '{wanted}' is not a format that is written{nearest(wanted, TARGETS)}")
    if out.suffix in by_extension and out.suffix != TARGETS[wanted].extension:
        raise SettingError(f"--to {wanted} writes {TARGETS[wanted].extension} files, not {out.suffix}: change one of the two")
    return TARGETS[wanted], out.suffix in by_extension


def _write(source: Source, out: Path, target: Target, is_file: bool, overwrite: bool) -> None:
    from aggcli.rollouts.writers import lost, one_file, whole_folder

    notes: dict[str, None] = {}
    place = one_file(out, overwrite) if is_file else whole_folder(out, target.extension, overwrite)
    steps = samples = 0
    with place as path:
        for batch in progress(source, len(source), "converting"):
            target.write(batch, path if is_file else path / f"{steps}{target.extension}")
            notes.update(dict.fromkeys([*batch.notes, *lost(batch, target)]))
            steps, samples = steps + 1, samples + batch.num_samples
    for note in notes:
        say(note)
    print(printable(f"{out}: {plural(samples, 'sample')} in {plural(steps, 'step')}, from {source.format}"))
