"""The help of every command fits a screen and is whole; the shell completes values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main

from aggcli.cli.commands import command
from aggcli.cli.main import app
from aggcli.cli.screens import PANELS, SCREENS
from tests.cli import aggcli, completed, environment

COMMANDS = ("", *SCREENS)
WITH_MORE = [name for name, screen in SCREENS.items() if screen.front]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys: pytest.CaptureFixture[str], name: str, flag: str = "--help") -> str:
    told = aggcli(capsys, *name.split(), flag)
    assert (told.code, told.err) == (0, "")
    return told.out


def parameters(name: str) -> list[Any]:
    """The options and arguments of a command but its help."""
    words = name.split()
    found: Any = typer.main.get_command(app) if not words else command(words[0])
    return found.params if len(words) < 2 else found.commands[words[1]].params


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_a_screen_of_40_lines_and_80_columns(capsys, name: str) -> None:
    lines = shown(capsys, name).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_of_a_help_is_cut_and_no_value_is_called_by_its_type_in_python(capsys, name: str) -> None:
    for flag in ("--help", "--help-all") if name in WITH_MORE else ("--help",):
        _, _, text = shown(capsys, name, flag).partition("\n")
        lines = text.splitlines()
        assert not [line for line in lines if line.endswith("...")]
        assert not [line for line in lines if re.search(r"<(str|int|float|path)>|list\[|\bNone\b", line)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_help_or_else_in_help_all(capsys, name: str) -> None:
    text = shown(capsys, name, "--help-all" if name in WITH_MORE else "--help")
    words = set(text.replace("--[no-]", "--").replace(",", " ").split())
    for parameter in parameters(name):
        if parameter.param_type_name == "option":
            assert {opt for opt in parameter.opts if opt.startswith("--")} <= words, parameter.name


@pytest.mark.parametrize("name", WITH_MORE)
def test_the_options_at_the_front_are_the_commands_own_each_once_and_shown_whole(capsys, name: str) -> None:
    """Each in a line of its own or wrapped: never cut, whatever the width of its name."""
    own = {parameter.name: parameter for parameter in parameters(name)}
    front = [option for names in SCREENS[name].front.values() for option in names]
    assert len(front) == len(set(front))
    assert set(front) <= own.keys()
    assert 8 <= len(front) <= 26
    text = " ".join(shown(capsys, name).split())
    for option in front:
        head, _, _ = own[option].help.partition(". ")
        assert head.removesuffix(".") in text
        assert own[option].param_type_name == "argument" or max(own[option].opts, key=len) in text
    assert "--help-all" in text


def test_each_command_has_its_line_in_the_help_of_the_program(capsys) -> None:
    lines = shown(capsys, "").splitlines()
    named = [name for names in PANELS.values() for name in names]
    assert sorted(named) == sorted(name for name in SCREENS if " " not in name)
    for name in named:
        assert any(line.split() == [name, *SCREENS[name].about.split()] for line in lines), name


@pytest.mark.parametrize("name", [name for name in SCREENS if SCREENS[name].examples])
def test_the_help_of_a_command_ends_with_command_lines_of_it(capsys, name: str) -> None:
    examples = SCREENS[name].examples
    assert shown(capsys, name).splitlines()[-len(examples) :] == [f"  {line}" for line in examples]
    assert all(line.startswith(f"aggcli {name}") for line in examples)


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("comp", ["compare"]),
        ("run --recipe da", ["dapo"]),
        ("train --modes sample_mean,tok", ["sample_mean,token_mean"]),
        ("replay --layouts dp1,dp4:ba", ["dp1,dp4:balanced"]),
        ("inspect x --rollout-format slime-t", ["slime-train"]),
        ("modes --map verl:token-s", ["verl:token-sum"]),
        ("modes con", ["constant"]),
        ("plot x --format png,sv", ["png,svg"]),
        ("compare x --format la", ["latex"]),
        ("compare x --axis to", ["tokens"]),
        ("convert a b --to par", ["parquet"]),
        ("runs schema --format j", ["json"]),
    ],
)
def test_the_shell_completes_commands_and_values(capsys, monkeypatch, begun: str, offered: list[str]) -> None:
    words = f"aggcli {begun}"
    monkeypatch.setenv("_AGGCLI_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    told = aggcli(capsys)
    assert (told.out.split(), told.err) == (offered, "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["run", "--loss-aggregation", "verl", ":", "token-s"], ["token-sum"]),
        (["run", "--loss-aggregation", "tinker-", ":"], []),
        (["modes", "--map", "delta-l", ":"], ["repo"]),
        (["run", "--recipe", "=", "da"], ["dapo"]),
        (["run", "--loss-aggregation", "=", "verl", ":", "token-s"], ["token-sum"]),
        (["replay", "--layouts", "dp2", ":", "ba"], ["balanced"]),
        (["replay", "--layouts", "dp1,dp2", ":", "ba"], ["balanced"]),
        (["replay", "--layouts", "dp2:ba"], ["dp2:balanced"]),
    ],
)
def test_a_value_with_a_colon_is_completed_where_bash_breaks_it(
    capsys, monkeypatch, words: list[str], offered: list[str]
) -> None:
    """bash hands over `verl:to` as three words, and puts what is answered in the place of the last."""
    monkeypatch.setenv("_AGGCLI_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["aggcli", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    told = aggcli(capsys)
    assert (told.out.split(), told.err) == (offered, "")


def test_completion_can_be_shown_for_a_shell(capsys, monkeypatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    told = completed("-m", "aggcli", "--show-completion", "bash", env=environment())
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.rstrip().endswith("complete -o default -F _aggcli_completion aggcli")
