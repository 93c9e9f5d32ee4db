"""The layout verdict of a report page: what rounding explains depends on the dtype that each run recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aggcli.analysis.frames import read_frames
from aggcli.records import read_lines
from aggcli.report.base import NothingToDraw
from aggcli.report.layout_deviation import layout_deviation
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


def test_what_is_at_most_is_so_of_runs_of_every_dtype(tmp_path: Path) -> None:
    """5e-10 is nearest to its limit, 1.04e-5 the largest; both are rounding."""
    coarse, exact = moved_run(tmp_path / "coarse", "bfloat16", 1.04e-5), moved_run(tmp_path / "exact", "float64", 5e-10)
    assert (
        "pg_loss differs by at most 1.1e-05 of the sum of its absolute terms, where differences up to 0.0001 are taken for"
        " rounding in bfloat16 and up to 1e-09 in float64 (2 layouts, " in Page(report(coarse, exact)).text
    )


@pytest.mark.parametrize(
    ("moved", "said", "drawn"),
    [
        (1e-7, "A layout changes pg_loss by 1.0e-07 of ", None),
        (0.0, "The layout changes nothing: pg_loss is the same to the last bit (", "the same to the last bit in 1 of 2 "),
        (1e-12, "The layout changes nothing but rounding: pg_loss differs by at most ", "the layouts differ by at most "),
    ],
)
def test_a_layout_without_a_loss_hides_nothing_of_the_others(
    tmp_path: Path, moved: float, said: str, drawn: str | None
) -> None:
    whole, lacks = moved_run(tmp_path / "whole", None, moved), moved_run(tmp_path / "lacks", None, 0.0)
    lines = list(read_lines(lacks / "layouts.jsonl"))
    write_lines(lacks / "layouts.jsonl", [lines[0], {**lines[1], "pg_loss": None}])
    text = Page(report(whole, lacks)).text
    assert said in text
    assert "In 1 of 2 comparisons one of the two layouts has no pg_loss." in text
    frames = read_frames([whole, lacks])
    if drawn is None:
        assert layout_deviation(frames).axes
    else:
        with pytest.raises(NothingToDraw, match=f"{drawn}.*; 1 of 2 comparisons of layouts has no loss under one of the two"):
            layout_deviation(frames)
    alone = Page(report(lacks)).text
    assert "In 1 of 1 comparison one of the two layouts has no pg_loss." in alone
    assert "The layout changes nothing" not in alone
    with pytest.raises(NothingToDraw, match="1 of 1 comparison of layouts has no loss under one of the two"):
        layout_deviation(read_frames([lacks]))


@pytest.mark.parametrize(("second", "said"), [(0.75, ("5.0e-01", "0.5")), (None, ("2.5e-01, 1 with a blank", "0.25"))])
def test_a_comparison_with_a_blank_loss_is_counted_beside_the_largest_difference_of_the_others(
    tmp_path: Path, second: float | None, said: tuple[str, str]
) -> None:
    run = write_run(tmp_path / "run", steps=[{"pg_loss": 0.25}] * 2, samples=False)
    lines = list(read_lines(run / "layouts.jsonl"))
    moved = iter([0.5, second])
    lines = [{**line, "pg_loss": next(moved)} if line["layout"] == "dp4:balanced" else line for line in lines]
    write_lines(run / "layouts.jsonl", lines)
    (row,) = Page(report(run)).table("pg_loss of each layout")
    assert (row["comparisons"], row["largest difference"]) == (("2", "2"), said)


def test_where_every_comparison_has_a_blank_there_is_no_largest_difference(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=False)
    lines = [
        {**line, "pg_loss": None if line["layout"] == "dp4:balanced" else 0.25} for line in read_lines(run / "layouts.jsonl")
    ]
    write_lines(run / "layouts.jsonl", lines)
    (row,) = Page(report(run)).table("pg_loss of each layout")
    assert row["largest difference"] == ("1 with a blank", None)
