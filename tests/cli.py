"""Calling the command line in this process, as a user would see it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aggcli.cli.main import main


@dataclass(frozen=True)
class Result:
    """Exit code, standard output and error of one call."""

    code: int
    out: str
    err: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of a `--json` answer, parsed strictly."""
        assert self.code == 0, self.err
        return strict_json(self.out)["steps"]


def strict_json(text: str) -> Any:
    """Parse JSON that may not hold NaN or Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in strict JSON")

    return json.loads(text, parse_constant=refuse)


def aggcli(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run `aggcli` with these arguments; a traceback would propagate and fail the test."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def refused(result: Result) -> str:
    """The one line with which a call was refused (exit code 2)."""
    assert result.code == 2, (result.out, result.err)
    errors = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1, result.err
    assert errors[0].startswith("aggcli: ")
    assert "Traceback" not in result.err
    return errors[0]


def write_jsonl(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """One sample a line; NaN and infinity are written bare, as trainers do."""
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def close(value: float | None, expected: float, limit: float = 1e-12) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=limit, abs_tol=limit)
