"""`aggcli run --check-determinism`: the same run twice, each in a process of its own, and their records held side by side."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aggcli.cli.console import say
from aggcli.errors import CheckFailed, ExitCode, SettingError
from aggcli.lifeline import end_with
from aggcli.records import LAYOUTS, METRICS, first_free

FLAG = "--check-determinism"
CHECKPOINT = "checkpoint.safetensors"


def run_twice(arguments: Sequence[str], output: Path | None, resume: bool, rollouts: Sequence[str]) -> int:
    """Run `aggcli <arguments>` as it stands, then again into a folder for temporary files, and compare the records.

    output: where the first run is recorded; default: the first free `results/run-twice`. rollouts: what both read. Returns
    the exit code of the first run where that is not 0. Raises `CheckFailed` where the records differ, `SettingError` for what
    cannot be run twice.
    """
    if resume:
        raise SettingError(f"{FLAG} runs twice from the start, which --resume does not: leave one of the two out")
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise SettingError(f"{FLAG} starts the ranks itself: give --dp and --cp instead of a launcher")
    if pipes := [path for path in rollouts if Path(path).is_fifo() or path.startswith("/dev/")]:
        raise SettingError(f"{FLAG} reads the rollouts twice, and {pipes[0]} can be read once: save it as a file")
    first = output if output is not None else first_free(Path("results"), "run-twice")
    plain = [argument for argument in arguments if argument != FLAG]
    code = _run(_into(first, plain) if output is None else plain, quiet=False)
    if code == ExitCode.CHECK_FAILED:
        say(f"{FLAG}: not run a second time, since a check of the first has failed")
    if code != ExitCode.DONE:
        return code
    with tempfile.TemporaryDirectory(prefix="aggcli-") as scratch:
        second = Path(scratch) / "second"
        code = _run(_into(second, plain), quiet=True)
        if code != ExitCode.DONE:
            raise CheckFailed(f"{FLAG}: the first run ended well and the second with exit code {code}")
        compare_records(first, second)
    return ExitCode.DONE


def compare_records(first: Path, second: Path) -> None:
    """Say that two runs left the same numbers. Raises `CheckFailed` with the first line that differs."""
    same = []
    for name in (METRICS, LAYOUTS):
        ours, again = ((folder / name).read_bytes().splitlines(keepends=True) for folder in (first, second))
        for at, (one, other) in enumerate(zip(ours, again, strict=False), start=1):
            if one != other:
                raise CheckFailed(f"run twice, {name} differs first in line {at}: {_difference(one, other)}")
        if len(ours) != len(again):
            raise CheckFailed(f"run twice, {name} has {len(ours)} lines and then {len(again)}")
        same.append(f"{name} ({len(ours)} lines)")
    if (first / CHECKPOINT).exists() or (second / CHECKPOINT).exists():
        same.append(f"{CHECKPOINT} ({_same_tensors(first / CHECKPOINT, second / CHECKPOINT)} tensors)")
    say(f"run twice: {', '.join(same)} are the same byte for byte; not compared: the manifest, timings, samples")


def _same_tensors(first: Path, second: Path) -> int:
    """How many tensors the two files hold, all the same to the bit. Raises `CheckFailed`."""
    ours, again = (dict(_tensors(path)) for path in (first, second))
    if ours.keys() != again.keys():
        raise CheckFailed(f"run twice, {CHECKPOINT} holds other tensors: {sorted(ours.keys() ^ again.keys())[0]} in one only")
    for name, tensor in ours.items():
        if tensor != again[name]:
            raise CheckFailed(f"run twice, {CHECKPOINT} differs first in the tensor {name}")
    return len(ours)


def _tensors(path: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name, and dtype, shape and bytes of each tensor, in the order of names; the header's own facts are left out."""
    from safetensors import deserialize

    for name, content in sorted(deserialize(path.read_bytes())):
        yield name, (content["dtype"], tuple(content["shape"]), bytes(content["data"]))


def _difference(one: bytes, other: bytes) -> str:
    """The first number or text that differs, with both values."""
    ours, again = (dict(_leaves(json.loads(line))) for line in (one, other))
    for where in [*ours, *(where for where in again if where not in ours)]:
        if repr(ours.get(where)) != repr(again.get(where)) or (where in ours) != (where in again):
            return f"{where} is {ours.get(where, 'missing')} and then {again.get(where, 'missing')}"
    return "the same fields, written in another way"


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of a record, by the way to it: `pg_loss`, `ranks[1].pg_loss`."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{where}[{at}]")
    else:
        yield where, value


def _into(folder: Path, arguments: Sequence[str]) -> list[str]:
    """The arguments with this results directory: of several --output the last counts, and none may stand after `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:at], f"--output={folder}", *arguments[at:]]


def _run(arguments: Sequence[str], *, quiet: bool) -> int:
    """Run the program again, in a session of its own, so that Ctrl-C reaches it through this process and once; it ends with
    this process. `quiet`: only errors are seen."""
    process = subprocess.Popen(
        [sys.executable, "-m", "aggcli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE if quiet else None,
        start_new_session=True,
        preexec_fn=functools.partial(end_with, os.getpid()),
    )
    try:
        said = process.communicate()[1]
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if quiet and process.returncode != ExitCode.DONE:
        sys.stderr.write(said.decode(errors="replace"))
    return process.returncode
