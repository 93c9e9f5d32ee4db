"""What nobody foresaw, and what the machine refuses: one line, never exit code 1, never a traceback unless it is asked for."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aggcli.cli.main import main
from aggcli.errors import FAULT, RecordError, doing, told
from aggcli.rollouts import sources
from tests.cli import aggcli, completed, refused, write_jsonl
from tests.fixtures import fx_b


def _raises(error: BaseException) -> Any:
    def function(*given: object, **named: object) -> None:
        raise error

    return function


def test_an_exception_that_nobody_foresaw_is_one_line_that_says_what_was_read_and_asks_for_a_report(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(*given: object) -> None:
        with doing("reading dumps/3.pt"), doing("at sample 7"):
            raise KeyError("reward\nof the second line")

    monkeypatch.setattr("aggcli.rollouts.sources.open_source", reading)
    assert main(["compare", "--rollouts", "example"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aggcli: KeyError: ")
    assert ", at sample 7, reading dumps/3.pt; " in line
    assert f"; {FAULT}: please report it with the command and what it read; --debug shows where it happened" in line


@pytest.mark.parametrize("at", ["first", "last"])
def test_debug_shows_where_it_happened_wherever_it_stands_and_for_this_command_only(
    capsys, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr("aggcli.rollouts.sources.open_source", _raises(IndexError("x")))
    command = ["compare", "--rollouts", "example"]
    assert main(["--debug", *command] if at == "first" else [*command, "--debug"]) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert 'test_last_net.py", line' in said
    assert said.splitlines()[-1].startswith("aggcli: IndexError: x; ")
    assert main(command) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setattr("aggcli.rollouts.sources.open_source", _raises(RecordError("told")))
    assert main([*command, "--debug"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said, "also of an error that is foreseen"
    assert said.endswith("aggcli: told\n")


def _out_of_memory() -> list[BaseException]:
    """As each library says it, where it can be had without filling the machine."""
    found: list[BaseException] = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError()]
    for ask in (lambda: torch.empty(2**45), lambda: np.empty(2**57, np.int8), lambda: bytearray(2**60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            ask()
        found.append(caught.value)
    return [*found, OSError(12, "Cannot allocate memory")]


@pytest.mark.parametrize("number", range(6))
def test_too_little_memory_is_one_line_and_exit_code_2_however_a_library_says_it(number: int) -> None:
    code, line = told(_out_of_memory()[number])
    assert code == 2
    assert line.startswith("not enough memory: ")
    assert line.endswith("split the files, or use fewer rollouts, runs or ranks")
    assert FAULT not in line


def test_a_runtime_error_of_another_kind_is_a_fault_and_no_lack_of_memory() -> None:
    code, line = told(RuntimeError("shape mismatch"))
    assert code == 2
    assert line.startswith("RuntimeError: shape mismatch; " + FAULT)


@pytest.mark.slow
def test_a_replay_that_needs_more_memory_than_there_is_ends_in_one_line_and_exit_code_2(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

    command = ["compare", "--rollouts=synthetic", "--synthetic-prompts=4000", "--synthetic-length=2000", "--output=out"]
    done = completed("-m", "aggcli", *command, preexec_fn=limit, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1
    assert errors[0].startswith("aggcli: not enough memory")


def test_code_that_is_called_cannot_end_the_program_as_if_all_were_well(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggcli.rollouts.sources.open_source", _raises(SystemExit(0)))
    assert "code that was called has ended the program (exit 0)" in refused(aggcli(capsys, "compare", "--rollouts", "example"))


def test_sigterm_ends_a_command_as_ctrl_c_does_and_leaves_no_scratch_folder(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_only(items: Any, *given: object) -> Any:
        yield next(iter(items))
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("still there")

    monkeypatch.setattr("aggcli.cli.convert.progress", first_only)
    before = signal.getsignal(signal.SIGTERM)
    told = aggcli(capsys, "convert", "example", tmp_path / "out")
    assert (told.code, told.err) == (130, "aggcli: interrupted; what was recorded is kept\n")
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fault_in_a_reader_is_told_with_the_file_that_was_being_read(capsys, monkeypatch, tmp_path) -> None:
    path = write_jsonl(tmp_path / "dump.jsonl", fx_b())
    monkeypatch.setitem(sources.READERS, "aggcli", _raises(IndexError("x")))
    code = main(["inspect", str(path)])
    assert code == 2
    assert "aggcli: IndexError: x, reading step 0 (dump.jsonl)" in capsys.readouterr().err
