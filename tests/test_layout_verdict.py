"""The layout verdict of a report page: what rounding explains depends on the dtype that each run recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aggcli.records import read_lines
from tests.test_page import Page, report
from tests.test_plot import write_lines, write_run


def moved_run(directory: Path, dtype: str | None, moved: float) -> Path:
    """A run whose second layout has a pg_loss that is further by this much, relative to its absolute terms, of 1."""
    run = write_run(directory, samples=False)
    lines = list(read_lines(run / "layouts.jsonl"))
    write_lines(run / "layouts.jsonl", [lines[0], {**lines[1], "pg_loss": lines[0]["pg_loss"] + moved}])
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "settings": {**manifest["settings"], "dtype": dtype}}))
    return run


@pytest.mark.parametrize(
    ("dtype", "moved", "said"),
    [
        (None, 1e-7, "A layout changes pg_loss by 1.0e-07 {}1e-09 are taken for rounding in float64 (2 "),
        (
            "float64",
            1.04e-10,
            "nothing but rounding: pg_loss differs by at most 1.1e-10 {}1e-09 are taken for rounding in float64",
        ),
        (
            "bfloat16",
            1.04e-7,
            "nothing but rounding: pg_loss differs by at most 1.1e-07 {}0.0001 are taken for rounding in bfloat16",
        ),
        ("float32", 1e-3, "A layout changes pg_loss by 1.0e-03 {}0.0001 are taken for rounding in float32 (2 "),
    ],
)
def test_the_layouts_are_judged_by_the_dtype_that_the_run_recorded(
    tmp_path: Path, dtype: str | None, moved: float, said: str
) -> None:
    expected = said.format("of the sum of its absolute terms, where differences up to ")
    assert expected in Page(report(moved_run(tmp_path / "run", dtype, moved))).text


def test_each_run_is_judged_by_its_own_dtype(tmp_path: Path) -> None:
    """1e-5 is rounding in bfloat16; 1e-8 in float64 is not, though it is smaller."""
    coarse, exact = moved_run(tmp_path / "coarse", "bfloat16", 1.04e-5), moved_run(tmp_path / "exact", "float64", 1e-8)
    assert (
        "A layout changes pg_loss by 1.0e-08 of the sum of its absolute terms, where differences up to 1e-09 are taken for"
        " rounding in float64" in Page(report(coarse, exact)).text
    )
    assert "changes nothing but rounding: pg_loss differs by at most 1.1e-05" in Page(report(coarse)).text
