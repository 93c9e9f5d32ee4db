"""Damaged results directories through every command that reads them: `python -m tests.fuzz_records --count 5000 --seed 0`.

Each case copies a results directory, damages one of its files, and calls one command in this process. What may come of it is an
answer or one line and exit code 2; a traceback, a warning on stderr or a crash of the interpreter is a fault, and the seed that
is printed makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aggcli.cli.main import main

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, -1e308, 2**31, 2**63, 2**70, -(2**63), 10**400),
    *("", "x", "\x1b[31m\n\x07", "\u202e", "\ud800", "../..", "a|b<c>$d$", [], [None], [[[]]], {}, {"a": None}, {"": []}),
)
LINES = (
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"{}",
    b"",
    b"{",
    b"\xff\xfe",
    b'{"step": 1}{"step": 2}',
    b"[" * 3000,
    b'{"a":' * 3000,
    b"NaN",
)


def made(folder: Path) -> list[Path]:
    """A replayed comparison, a trained one, and a run."""
    train = ("--steps", "12", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--device", "cpu")
    calls = {
        "replayed": ("compare", "--rollouts", "example", "--log-correct-samples"),
        "trained": ("compare", "--modes", "sample_mean,token_mean", "--seeds", "2", *train),
        "run": ("run", *train),
    }
    for name, call in calls.items():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main([*call, "--output", str(folder / name)]) == 0
    return [folder / name for name in calls]


def commands(directory: Path, output: Path, *, draw: bool) -> list[list[str]]:
    """What reads a results directory; drawing takes seconds, the others a tenth of one."""
    if draw:
        return [["plot", "--html", str(directory), "--output", str(output)]]
    return [
        ["compare", str(directory)],
        ["compare", str(directory), "--format", "csv", "--no-fit"],
        ["runs", "list", str(directory)],
        ["runs", "show", str(directory)],
        ["runs", "diff", str(directory), str(directory)],
    ]


def damage(path: Path, rng: random.Random) -> str:
    """Damage one file of a results directory; returns what was done."""
    data = path.read_bytes()
    kind = rng.choice(("value", "value", "value", "line", "bytes", "cut", "repeat", "gone"))
    if path.suffix not in (".json", ".jsonl") and kind in ("value", "line", "repeat"):
        kind = "bytes"
    if kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "bytes":
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(bytes(changed))
    else:
        lines = [data] if path.suffix == ".json" else data.split(b"\n")[:-1]
        at = rng.randrange(len(lines))
        if kind == "line":
            lines[at] = rng.choice(LINES)
        elif kind == "repeat":
            lines.insert(rng.randrange(len(lines)), lines[at])
        else:
            lines[at] = json.dumps(changed_value(json.loads(lines[at]), rng)).encode("utf-8", "surrogatepass")
        path.write_bytes(b"\n".join([*lines, b""]))
    return f"{kind} in {path.name}"


def changed_value(record: Any, rng: random.Random) -> Any:
    """The record with one value somewhere in it replaced, removed or renamed."""
    changed = copy.deepcopy(record)
    place, key = rng.choice(list(_places(changed)))
    what = rng.choice(("junk", "junk", "junk", "remove", "rename"))
    if what == "junk" or isinstance(place, list):
        place[key] = copy.deepcopy(rng.choice(JUNK))
    else:
        value = place.pop(key)
        if what == "rename":
            place[rng.choice(("\x1b]0;x\x07", "pass@8", "pass@x", "weight_share/x", ""))] = value
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def call(arguments: Sequence[str]) -> tuple[int | None, str, str]:
    """Exit code (None after a traceback), stdout and stderr of one command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, kind, *_: err.write(f"a warning: {kind.__name__}: {message}\n")
        try:
            code: int | None = main(list(arguments))
        except BaseException:  # whatever gets out of main is a fault
            err.write(traceback.format_exc())
            code = None
    return code, out.getvalue(), err.getvalue()


def fault_of(code: int | None, err: str) -> str:
    """What is wrong with an answer; empty where nothing is."""
    if code is None or code not in (0, 1, 2):
        return err.strip().splitlines()[-1] if err.strip() else f"exit code {code}"
    if "a warning: " in err or "Traceback" in err:
        return next(line for line in err.splitlines() if "a warning: " in line or "Traceback" in line)
    errors = [line for line in err.splitlines() if line.startswith("aggcli: ")]
    if code == 2 and len(errors) != 1:
        return f"{len(errors)} lines of error"
    return "\x1b in a note" if "\x1b" in err else ""


def fuzz(count: int, seed: int, *, draw_every: int = 10, tell: Callable[[str], None] = print) -> list[str]:
    """The faults of `count` damaged directories, each with the seed of its case."""
    faults, kinds = [], Counter()
    with tempfile.TemporaryDirectory() as scratch:
        whole = made(Path(scratch) / "whole")
        for case in range(count):
            rng = random.Random(f"{seed}/{case}")
            source, broken = rng.choice(whole), Path(scratch) / "broken"
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(source, broken)
            files = sorted(
                path for path in broken.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".parquet")
            )
            done = damage(rng.choice(files), rng)
            chosen = rng.choice(commands(broken, Path(scratch) / "figures", draw=case % draw_every == draw_every - 1))
            code, _, err = call(chosen)
            kinds[chosen[0] if chosen[0] != "runs" else f"runs {chosen[1]}", code] += 1
            if said := fault_of(code, err):
                faults.append(f"seed {seed}, case {case}: {done} of {source.name}, {' '.join(chosen[:2])}: {said}")
                tell(faults[-1])
    told = ", ".join(f"{name} exit {code}: {times}" for (name, code), times in sorted(kinds.items(), key=str))
    tell(f"{count} damaged directories, seed {seed}: {len(faults)} faults ({told})")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(bool(fuzz(given.count, given.seed)))
