"""`aggcli modes` as a reference: both ways between this project's modes and every framework's names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aggcli.rules import ELSEWHERE, MODES, PROMPT_MEAN, RULES
from aggcli.rules.reference import FRAMEWORKS, differences, elsewhere, varies
from tests.cli import aggcli, refused, strict_json
from tests.test_audit import VARY


def test_the_reference_has_every_mode_with_papers_traps_and_flags() -> None:
    for mode in MODES:
        assert mode.papers
        assert mode.traps
        assert f"--loss-aggregation {mode.name}" in mode.flags


def test_only_skyrl_has_prompt_mean() -> None:
    found = elsewhere(PROMPT_MEAN)
    assert set(found) == set(FRAMEWORKS)
    assert {framework: [rule.name for rule in rules] for framework, rules in found.items() if rules} == {
        "skyrl": ["skyrl:prompt_mean"]
    }


def test_the_rules_that_the_reference_calls_varying_are_those_that_the_audit_finds() -> None:
    assert {rule.name for rule in ELSEWHERE if varies(rule)} == VARY


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("verl:token-mean", []),
        ("trl:dapo", []),
        ("slime:sample_mean", []),
        ("slime:per_token", ["each fully masked sample adds a phantom token"]),
        ("openrlhf:sequence", ["counts samples, not rollouts", "fully masked rows are not counted"]),
        ("trl:grpo", ["counts samples, not rollouts", "exact for equal micro-batches only"]),
        ("trl:bnpo", ["varies with the layout: the trained tokens are counted in each micro-batch"]),
        ("ms-swift:dapo", ["varies with the layout: a loss that is already normalised"]),
        (
            "verl:seq-mean-token-sum-norm",
            ["counts samples, not rollouts", "divides by the padded width by default"],
        ),
        ("verl-legacy:seq-mean-token-sum-norm", ["no mean over rollouts", "divides by the padded width", "varies with"]),
        ("roll:token-mean", ["the mask is not applied to the numerator"]),
        ("skyrl:prompt_mean", ["strict mean over prompts: --prompt-mean-scale prompts"]),
        ("prime-rl", ["tokens of zero advantage are not counted"]),
        ("tinker", ["no mode here equals it"]),
    ],
)
def test_what_differs_from_the_mode_here_is_said_in_words(name: str, expected: list[str]) -> None:
    found = differences(RULES[name])
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def test_a_mode_is_told_with_every_framework_and_not_available_where_it_is_not(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = aggcli(capsys, "modes", "prompt_mean").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("not available" in line for line in lines) == len(FRAMEWORKS) - 1
    assert any("trainer.algorithm.loss_reduction=prompt_mean" in line for line in lines)
    assert any("2503.14476" in line for line in lines)


def test_map_gives_the_mode_and_the_flags_for_a_frameworks_name(capsys) -> None:
    found = strict_json(aggcli(capsys, "modes", "--map", "verl:token-mean", "--json").out)["rules"]["verl:token-mean"]
    assert found["mode"] == "token_mean"
    assert found["differences"] == []
    assert found["here"].startswith("--loss-aggregation token_mean")
    assert "three things bear the name" in " ".join(aggcli(capsys, "modes", "--map", "dapo").out.split())


def test_markdown_has_a_heading_a_mode_and_a_row_a_framework(capsys) -> None:
    lines = aggcli(capsys, "modes", "--format", "md").out.splitlines()
    assert [line for line in lines if line.startswith("## ")] == [f"## `{mode.name}`" for mode in MODES]
    rows = [line for line in lines if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 8 for line in rows)
    for framework in FRAMEWORKS:
        assert sum(line.startswith(f"| {framework} |") for line in rows) >= len(MODES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), "unknown loss aggregation 'nope'; known: "),
        (("token-mean",), "did you mean 'token_mean'"),
        (("verl:token-mean",), "for a framework's own name use --map verl:token-mean"),
        (("--map", "nope"), "unknown loss aggregation 'nope'; known: "),
        (("--map", "acme-rl:prompt_mean"), "no rule of acme-rl is known here; known frameworks: slime, miles, verl"),
        (("token_mean", "--map", "grpo"), "token_mean and --map grpo ask for two things"),
        (("--format", "html"), "--format html: must be text or md"),
    ],
)
def test_what_the_reference_does_not_know_is_refused(arguments: tuple[str, ...], said: str, capsys) -> None:
    assert said in refused(aggcli(capsys, "modes", *arguments))


def test_the_reference_never_imports_torch() -> None:
    script = "import sys; from aggcli.cli.main import main; main(['modes', 'constant']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0
