"""Printed to a pipe or on a narrow terminal, a number or an interval stands on one line, in every table that is printed."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aggcli.report.folding import folded
from tests.cli import aggcli, results_of, strict_json

NUMBER = r"[+-]?\d[\d.]*(?:e[+-]?\d+)?"
WHOLE = re.compile(rf"\[{NUMBER}, {NUMBER}\]|{NUMBER}")
"""An interval, or a number."""
DATA = Path(__file__).parent / "data"
TRAINING = ("--steps=3", "--rollout-batch-size=2", "--n-samples-per-prompt=4", "--device=cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "out"
    return results_of("compare", "--modes=sample_mean,token_mean,constant", "--seeds=2", *TRAINING, f"--output={folder}")


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed") / "out"
    return results_of("compare", "--rollouts=example", "--log-correct-samples", f"--output={folder}")


Calls = dict[str, Callable[[Path], tuple[object, ...]]]
_MODES = "--modes=sample_mean,prompt_mean,token_mean,constant,verl-legacy:seq-mean-token-sum-norm"
CALLS: Calls = {
    "run": lambda out: ("run", "--rollouts=example", "--log-correct-samples", f"--output={out}"),
    "compare": lambda out: ("compare", "--rollouts=example", "--log-correct-samples", _MODES, f"--output={out}"),
    "audit": lambda out: ("audit", "--no-search"),
    "inspect": lambda out: ("inspect", *[DATA / "slime_train" / "2.pt"] * 2, "--groups"),
}


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, *call: object) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    result = aggcli(capsys, *call)
    assert result.code == 0, result.err
    return re.sub(r"\x1b\[[\d;]*m", "", result.out)


def test_no_word_of_a_head_is_broken_beside_short_names(capsys, monkeypatch, trained: Path) -> None:
    """The first column of settings, environments and prompt groups holds names that are shorter than its head."""
    runs = [trained / "sample_mean" / "seed-0", trained / "token_mean" / "seed-0"]
    calls = {"show": ("runs", "show", runs[0]), "diff": ("runs", "diff", *runs), "inspect": CALLS["inspect"](Path())}
    for name, words in (("show", "setting environment"), ("diff", "settings environment records"), ("inspect", "group")):
        text = printed(capsys, monkeypatch, 80, *calls[name])
        assert not set(words.split()) - set(text.split()), name
        assert not re.search(r"^\w{1,2}$", text, re.MULTILINE), "a letter or two alone on a line"


def missing(wide: str, narrow: str) -> Counter[str]:
    """Numbers and intervals of a text without folds that the folded text has less often."""
    return Counter(WHOLE.findall(wide)) - Counter(WHOLE.findall(narrow))


@pytest.mark.parametrize("name", CALLS)
def test_no_number_is_broken_at_any_width_and_no_line_is_longer(name: str, capsys, monkeypatch, tmp_path: Path) -> None:
    """The same call without folds is the second route: each of its numbers stands whole in the narrow text too."""
    wide = printed(capsys, monkeypatch, 5000, *CALLS[name](tmp_path / "wide"))
    assert len(WHOLE.findall(wide)) > 15
    for width in (60, 80, 100):
        narrow = printed(capsys, monkeypatch, width, *CALLS[name](tmp_path / str(width)))
        assert not missing(wide, narrow.replace(str(tmp_path / str(width)), str(tmp_path / "wide"))), width
        assert max(map(len, narrow.splitlines())) <= width


def in_three(value: float) -> str:
    """Three digits, without an exponent above: 2142345 is 2140000."""
    text = f"{value:.3g}"
    return f"{float(text):.0f}" if "e+" in text else text


def as_shown(mean: float, low: float | None, high: float | None, sign: str = "") -> str:
    """The mean of an interval that is symmetric, `0.957 ± 0.010`; else that interval; without one the mean."""
    if low is None or high is None:
        return in_three(mean)
    half = (high - low) / 2
    if not half or abs(low + high - 2 * mean) > 1e-6 * half:
        digits = ".3g"
        ends = [f"{float(f'{end:{digits}}'):{sign}.0f}" if abs(end) >= 100 else f"{end:{sign}{digits}}" for end in (low, high)]
        return f"[{ends[0]}, {ends[1]}]"
    places = max(0, 1 - int(f"{half:.1e}".split("e")[1]))
    return f"{mean:{sign}.{places}f} ± {half:.{places}f}"


@pytest.mark.parametrize("of", ["trained", "replayed"])
def test_no_number_of_compared_results_is_broken_at_any_width(of: str, capsys, monkeypatch, request) -> None:
    """The numbers are those of `--json`, in three digits, or to the second digit of the half width."""
    folder = request.getfixturevalue(of)
    found = strict_json(aggcli(capsys, "compare", folder, "--format", "json").out)
    texts = {width: printed(capsys, monkeypatch, width, "compare", folder) for width in (60, 80, 100)}
    assert found["outcomes"]
    for row, (width, text) in itertools.product(found["outcomes"], texts.items()):
        places = set(WHOLE.findall(text)) if row["low"] is None else text
        assert as_shown(row["mean"], row["low"], row["high"]) in places, (width, row)
        if row["difference_low"] is not None:
            assert as_shown(row["difference"], row["difference_low"], row["difference_high"], "+") in text, (width, row)
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_number_of_a_training_summary_is_broken_however_many_digits_it_has(width: int) -> None:
    """Rendered from a summary whose numbers are known: symmetric intervals as half widths, one that is not as its ends."""
    from rich.console import Console

    from aggcli.report.training_tables import training_table

    metric = {"mean": -0.000123456, "low": -0.000234567, "high": -1.2345e-05, "n": 5}
    of_mode = {
        "accuracy": metric,
        "response_length": metric,
        "correct/response_length": metric,
        "incorrect/response_length": metric,
    }
    other = {name: {**metric, "high": 0.5, "difference": metric} for name in of_mode}
    summary = {
        "modes": {"sample_mean": of_mode, "verl:seq-mean-token-sum-norm": other},
        "baseline": "sample_mean",
        "missing": [],
    }
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(training_table(summary))
    lines = capture.get().splitlines()
    whole = Counter(WHOLE.findall(capture.get()))
    assert max(map(len, lines)) <= width
    assert capture.get().count("-0.00012 ± 0.00011") == 8
    assert whole["[-0.000235, 0.5]"] == 4


def test_columns_that_find_no_room_stand_below_with_the_names_of_the_rows_again(capsys, monkeypatch, tmp_path: Path) -> None:
    """By hand of `--json`: total weights 1, and under constant the tokens of a step over 64 rollouts times 16."""
    call = ("compare", "--rollouts=example", "--modes=sample_mean,token_mean,constant,verl-legacy:seq-mean-token-sum-norm")
    lines = printed(capsys, monkeypatch, 60, *call, f"--output={tmp_path / 'out'}").splitlines()
    heads = [at for at, line in enumerate(lines) if line.startswith("mean of 3 steps")]
    assert len(heads) == 2
    rows = [next(line for line in lines[at:] if line.startswith("total weight")).split()[2:] for at in heads]
    assert rows[0] == ["1", "1", "0.454"]
    assert len(rows[1]) == 1
    assert lines[heads[1] - 1] == ""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("command", [("runs", "show"), ("runs", "list")], ids=" ".join)
def test_no_number_of_a_results_directory_is_broken(command, terminal: bool, capsys, monkeypatch, trained: Path) -> None:
    """In a pipe a row is a line; on a terminal columns without room stand below."""
    folder = trained.parent if "list" in command else trained
    wide = printed(capsys, monkeypatch, 5000, *command, folder)
    if terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
    for width in (60, 80, 100):
        narrow = printed(capsys, monkeypatch, width, *command, folder)
        if not terminal:
            assert not missing(wide, narrow), width
            continue
        assert max(map(len, narrow.splitlines())) <= width
        told = strict_json(aggcli(capsys, "runs", "show", trained, "--json").out)
        for numbers in told["accuracy"].values():
            assert f"{numbers['mean']:.4g}" in WHOLE.findall(narrow), width


def at_every_width(text: str) -> Iterator[str]:
    for width in range(26, 90):
        yield folded(text, width, "  ", "      ")


def test_an_interval_in_a_sentence_is_a_word() -> None:
    text = "token_mean: no difference shown, +0.00456 [-0.0421, +0.0512], Holm p = 1, 3 seeds, over steps [0, 5] of a run"
    for lines in at_every_width(text):
        assert " ".join(lines.split()) == text
        assert WHOLE.findall(lines) == ["+0.00456", "[-0.0421, +0.0512]", "1", "3", "[0, 5]"]
        assert not [line for line in lines.splitlines() if line.count("[") != line.count("]")]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_name_of_a_rule_is_broken_behind_a_hyphen_alone(width: int, capsys, monkeypatch) -> None:
    """The pieces of the longest name, put together again, are the name; each but the last ends in a hyphen."""
    name = "verl-legacy:seq-mean-token-sum-norm"
    lines = printed(capsys, monkeypatch, width, "audit", "--rules", f"{name},oat:grpo", "--no-search").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("──")) + 1
    pieces = [lines[start].split()[0]]
    while "".join(pieces) != name:
        assert pieces[-1].endswith("-")
        pieces.append(lines[start + len(pieces)].split()[0])
    assert max(map(len, lines)) <= width
