"""What the terminal shows at 80 columns: no broken word and no blank column; and notes in grammatical numbers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from aggcli.cli.live import Terminal
from aggcli.config import ObjectiveConfig, SourceConfig
from aggcli.jobs.listening import heard_by
from aggcli.jobs.replay import MOST_NOTES, _say_notes
from aggcli.measurement.inventory import inventory
from aggcli.measurement.words import at_least, at_most, in_bytes, plural
from aggcli.rollouts.batch import RecordedLayout, RecordedStep
from aggcli.rollouts.sources import open_source
from tests.cli import aggcli, write_jsonl


@pytest.fixture(autouse=True)
def _80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def samples(rights: str, group: int = 0, **fields: object) -> list[dict]:
    """Samples of 2 tokens with a log-probability each, one for every letter: r for right, w for wrong."""
    own = {"group_index": group, "response_length": 2, "rollout_log_probs": [-1.0, -2.0]}
    return [{**own, "index": at, "reward": float(letter == "r"), **fields} for at, letter in enumerate(rights)]


# -- inspect ----------------------------------------------------------------------------------------------------------


def inspected(capsys: pytest.CaptureFixture[str], files: list[Path]) -> list[str]:
    result = aggcli(capsys, "inspect", *files)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_inspect_breaks_no_word_at_80_columns(capsys, tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{step}.pt.jsonl", samples("rw")) for step in range(3)]
    (streams,) = (line for line in inspected(capsys, files) if line.startswith("recorded per token"))
    assert streams.split() == ["recorded", "per", "token", *["rollout_log_probs"] * 3]


def test_inspect_shows_steps_with_long_names_below_the_others_and_says_how_many_are_shown(capsys, tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"completions_0000{step}.jsonl", samples("rw")) for step in range(5)]
    lines = inspected(capsys, files)
    names = [[word for word in line.split() if word.startswith("(")] for line in lines if "(completions" in line]
    assert names == [[f"(completions_0000{at}.jsonl)" for at in of] for of in ((0, 1), (2, 3))]
    streams = [line.split() for line in lines if line.startswith("recorded per token")]
    assert streams == [["recorded", "per", "token", "rollout_log_probs", "rollout_log_probs"]] * 2
    assert "4 of 5 steps shown; --json shows all" in map(str.strip, lines)


def test_inspect_folds_a_name_that_is_longer_than_a_line_and_loses_none_of_it(capsys, tmp_path: Path) -> None:
    lines = inspected(capsys, [write_jsonl(tmp_path / f"{'long' * 25}.jsonl", samples("rw"))])
    table = lines[: next(at for at, line in enumerate(lines) if line.startswith("samples"))]
    assert f"({'long' * 25}.jsonl)" in "".join(line.strip() for line in table[1:])


# -- correct samples --------------------------------------------------------------------------------------------------


def correct_table(capsys: pytest.CaptureFixture[str], files: list[Path], output: Path) -> list[str]:
    """The rows of the table of correct samples, the heads first, in a line each."""
    flags = ("--log-correct-samples", "--layouts", "dp1,dp2:contiguous")
    result = aggcli(capsys, "compare", *(f"--rollouts={file}" for file in files), *flags, "--output", output)
    assert result.code == 0, result.err
    (table,) = [part for part in result.out.split("\n\n") if "count by" in part]
    lines = table.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("──"))
    heads = zip(*(line.ljust(80) for line in lines[:at]), strict=True)
    blank = [set(column) == {" "} for column in heads]
    edges = [start for start in range(80) if not blank[start] and (not start or all(blank[start - 2 : start] or [False]))]
    columns = [slice(start, stop) for start, stop in zip(edges, [*edges[1:], 80], strict=True)]
    return ["; ".join(" ".join(line[column].strip() for line in lines[:at]).strip() for column in columns), *lines[at + 1 :]]


def test_the_correct_samples_of_several_steps_have_the_mean_count_of_each_rank_and_no_blank_column(
    capsys, tmp_path: Path
) -> None:
    """Right are 2 + 1 of the two halves of one step and 1 + 0 of the other's: means 1.5 and 0.5, together 2."""
    files = [write_jsonl(tmp_path / f"{name}.jsonl", samples(name)) for name in ("rrwr", "rwww")]
    heads, one, two = correct_table(capsys, files, tmp_path / "out")
    assert heads == "correct samples; count; mean length; count by rank; mean length by rank (tokens)"
    assert one.split() == ["dp1", "2", "2", "2", "2"]
    assert two.split() == ["dp2:contiguous", "2", "2", "1.5", "+", "0.5", "2,", "2"]


def test_the_correct_samples_of_a_single_step_have_their_lengths_and_each_rank_its_mean(capsys, tmp_path: Path) -> None:
    """Three of length 2, two of them on rank 0; and in the other file two on rank 0 and none on rank 1."""
    heads, one, two = correct_table(capsys, [write_jsonl(tmp_path / "a.jsonl", samples("rrwr"))], tmp_path / "out")
    assert heads == "correct samples; count; mean length; lengths; count by rank; mean length by rank (tokens)"
    assert one.split() == ["dp1", "3", "2", "2", "2", "2", "3", "2"]
    assert two.split() == ["dp2:contiguous", "3", "2", "2", "2", "2", "2", "+", "1", "2,", "2"]
    *_, two = correct_table(capsys, [write_jsonl(tmp_path / "b.jsonl", samples("rrww"))], tmp_path / "other")
    assert two.split() == ["dp2:contiguous", "2", "2", "2", "2", "2", "+", "0", "2,", "-"]


# -- numbers in words -------------------------------------------------------------------------------------------------


def test_one_is_singular_and_any_other_number_plural() -> None:
    assert [plural(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert [plural(n, "sample has", "samples have") for n in (1, 3)] == ["1 sample has", "3 samples have"]


def test_bytes_are_told_in_powers_of_a_thousand() -> None:
    assert [in_bytes(n) for n in (0, 999, 1000, 1_250_000)] == ["0 B", "999 B", "1.0 kB", "1.2 MB"]


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [(5.1e-17, 1, 6e-17), (5e-17, 1, 5e-17), (5.04e-17, 2, 5.1e-17), (9.91e-17, 2, 1e-16), (0.25, 2, 0.25), (0.0, 2, 0.0)],
)
def test_what_a_number_is_at_most_is_never_below_it(value: float, digits: int, said: float) -> None:
    assert at_most(value, digits) == said >= value


@pytest.mark.parametrize(
    ("value", "said"), [(0.25, 0.25), (0.125, 0.12), (2 / 2**7, 0.015), (2 / 2**8, 0.0078), (9.99e-17, 9.9e-17), (0.0, 0.0)]
)
def test_what_a_number_is_at_least_is_never_above_it(value: float, said: float) -> None:
    assert at_least(value, 2) == said <= value


def test_infinity_is_at_most_and_at_least_itself() -> None:
    assert at_most(math.inf, 2) == at_least(math.inf, 2) == math.inf


@pytest.mark.parametrize(("left", "said"), [(1, "1 more note is left out"), (2, "2 more notes are left out")])
def test_notes_that_find_no_room_are_counted(capsys: pytest.CaptureFixture[str], left: int, said: str) -> None:
    with heard_by(Terminal()):
        _say_notes({"note " + at * "x": [0] for at in range(MOST_NOTES + left)}, {0: "step 0 (test)"})
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"note: {said} here; ")


@pytest.mark.parametrize(("rights", "said"), [("r", "1 sample in 1 step"), ("rw", "2 samples in 1 step")])
def test_converted_samples_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path, rights: str, said: str) -> None:
    path, converted = write_jsonl(tmp_path / "a.jsonl", samples(rights)), tmp_path / "b.jsonl"
    assert aggcli(capsys, "convert", path, converted).out == f"{converted}: {said}, from aggcli\n"


@pytest.mark.parametrize(
    ("micro_batches", "said"), [([[0, 1]], "dp1, 1 micro-batch"), ([[0], [1]], "dp1, 2 micro-batches")], ids=["one", "two"]
)
def test_the_micro_batches_of_a_recorded_layout_are_counted(tmp_path: Path, micro_batches: list[list[int]], said: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", samples("rw"))
    (batch,) = open_source(SourceConfig(rollouts=(str(path),)), 0)
    recorded = RecordedLayout((RecordedStep(((0, 1),), (tuple(map(tuple, micro_batches)),)),))
    batch = dataclasses.replace(batch, recorded=recorded)
    assert inventory(batch, ObjectiveConfig(), 1.0)["recorded_layout"] == said


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            1,
            [
                "1 sample has no group_index",
                "fully masked samples: 1; it counts in N and adds no token",
                "rank 3 holds no sample and",
            ],
        ),
        (
            2,
            [
                "2 samples have no group_index",
                "fully masked samples: 2; they count in N and add no token",
                "ranks 4, 5 hold no sample and stay idle",
            ],
        ),
    ],
)
def test_notes_are_grammatical_in_one_and_in_several(capsys, tmp_path: Path, left: int, said: list[str]) -> None:
    """Of 2 + `left` samples `left` have no group and `left` are fully masked; the ranks are one or two more than samples."""
    given = [*samples("rw"), *samples("r" * left, group_index=None, loss_mask=[0, 0])]
    path = write_jsonl(tmp_path / "a.jsonl", [{**sample, "index": at} for at, sample in enumerate(given)])
    layout = f"dp{len(given) + left}:contiguous"
    result = aggcli(capsys, "compare", "--rollouts", path, "--layouts", layout, "--output", tmp_path / "out")
    assert result.code == 0, result.err
    for text in said:
        assert text in result.err
