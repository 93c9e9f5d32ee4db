"""What stands on the terminal once training has ended: the answer, the table with what is shown and what not, the settings."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from aggcli.analysis.comparison import Comparison
from aggcli.report.comparison_rows import half_width, with_half_width
from aggcli.report.training_tables import training_table
from tests.cli import aggcli, strict_json

SMALL = ("--steps=2", "--rollout-batch-size=2", "--n-samples-per-prompt=4", "--device=cpu")


@pytest.mark.parametrize(
    ("numbers", "signed", "text"),
    [
        ((0.957, 0.947, 0.967), False, "0.957 ± 0.010"),
        ((-0.72, -0.96, -0.48), True, "-0.72 ± 0.24"),
        ((1234.5, 1134.5, 1334.5), False, "1234 ± 100"),
        ((0.7, 0.6, 0.72), False, "0.7\n[0.6, 0.72]"),
        ((0.0378, 0.02, 0.03), True, "+0.0378\n[+0.02, +0.03]"),
        ((0.5, None, None), False, "0.5"),
        ((0.25, 0.25, 0.25), True, "+0.25\n[+0.25, +0.25]"),
    ],
)
def test_a_symmetric_interval_is_its_half_width_and_any_other_its_ends(numbers, signed: bool, text: str) -> None:
    assert with_half_width(*numbers, signed=signed) == text


def test_more_digits_are_given_where_they_are_asked_for() -> None:
    assert half_width(0.95712, 0.94712, 0.96712, precision=5) == ("0.95712", "± 0.01000")
    assert half_width(0.95712, 0.94712, 0.96712, precision=1) == ("0.96", "± 0.01")
    assert half_width(0.7, 0.6, 0.72) is None


def rendered(shown: dict[str, bool]) -> str:
    """Accuracies 0.5, 0.75 and 0.25 of modes a, b and c, with the bold of a terminal. `shown`: mode -> whether it differs."""

    def metrics(mean: float) -> dict[str, Any]:
        own = {"mean": mean, "low": mean - 0.125, "high": mean + 0.125, "n": 3}
        difference = {**own, "mean": mean - 0.5, "low": mean - 0.625, "high": mean - 0.375}
        names = ("accuracy", "response_length", "correct/response_length", "incorrect/response_length")
        return {name: {**own, "difference": difference} for name in names}

    summary = {"baseline": "a", "modes": {"a": metrics(0.5), "b": metrics(0.75), "c": metrics(0.25)}, "missing": []}
    pairs = {mode: SimpleNamespace(pair=SimpleNamespace(shown=one, test=SimpleNamespace(p=0.5))) for mode, one in shown.items()}
    comparison = SimpleNamespace(outcomes={"accuracy_on_fresh_prompts": pairs}, tests=len(pairs))
    console = Console(width=100, force_terminal=True, color_system="standard", markup=False, highlight=False)
    with console.capture() as capture:
        console.print(training_table(summary, cast(Comparison, comparison)))
    return capture.get()


def test_what_is_not_shown_is_marked_and_the_best_is_bold_only_where_it_is_shown_to_be_the_best() -> None:
    plain = rendered({"b": False, "c": True})
    assert "~ +0.25 ± 0.12" in plain
    assert "~ -" not in plain
    assert not re.search(r"\x1b\[1m *0\.75 ± 0\.12", plain)
    assert "~: no difference shown" in " ".join(plain.split())
    sure = rendered({"b": True, "c": True})
    assert len(re.findall(r"\x1b\[1m *0\.75 ± 0\.12", sure)) == 1, "the accuracy alone"
    assert "~ +" not in sure
    assert "~ -" not in sure


def test_a_comparison_that_was_trained_prints_the_answer_of_its_directory_first(capsys, tmp_path: Path) -> None:
    call = ("train", "--modes=sample_mean,token_mean", "--seeds=2", *SMALL)
    told = aggcli(capsys, *call, f"--output={tmp_path / 'a'}")
    assert told.code == 0, told.err
    found = strict_json(aggcli(capsys, "compare", tmp_path / "a", "--json").out)["answer"]
    paragraph, table, *_ = told.out.split("\n\n")
    assert " ".join(paragraph.split()) == " ".join(found)
    assert table.split()[0] == "after"
    assert "accuracy ↑" in table
    as_json = strict_json(aggcli(capsys, *call, f"--output={tmp_path / 'b'}", "--json").out)
    assert as_json["answer"] == found
    assert as_json["baseline"] == "sample_mean"


def test_a_single_run_says_where_it_got_to_and_what_dynamic_sampling_and_the_overlong_penalty_did(
    capsys, tmp_path: Path
) -> None:
    call = ("run", "--recipe=dapo", "--overlong-buffer=4", "--policy-loss=gspo", *SMALL, f"--output={tmp_path / 'a'}")
    told = aggcli(capsys, *call, "--json")
    assert told.code == 0, told.err
    found = strict_json(told.out)
    accuracy = found["modes"]["prompt_mean"]["accuracy"]["mean"]
    (sentence,) = found["answer"]
    assert sentence.startswith(f"prompt_mean, seed 0, after 2 steps: accuracy {accuracy:.3g} (")
    assert "before) on 512 fresh prompts; responses of " in sentence
    text = aggcli(capsys, *call, "--overwrite").out
    assert " ".join(text.split("\n\n")[0].split()) == sentence
    steps = [step["modes"]["prompt_mean"] for step in found["steps"]]
    generated, kept = (sum(step[name] for step in steps) / len(steps) for name in ("groups_generated", "groups_kept"))
    assert f"dynamic sampling: {generated:.3g} prompt groups sampled a step, {kept:.3g} trained on" in " ".join(text.split())
    assert ", policy loss: gspo, clip: 0.2 below, 0.28 above" in " ".join(text.split())
    assert "overlong penalty: down to -1 over the last 4 tokens of " in text
