"""Files are whole or not there: while they are written, when the writer is killed, and when two write at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from aggcli.files import scratch_folder, whole_file
from tests.cli import ROOT, aggcli, completed, refused


def test_the_old_file_stands_until_the_new_one_is_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for text, before in (("one", None), ("two", "one")):
        with whole_file(path) as draft:
            draft.write_text(text)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == text
    assert os.listdir(tmp_path) == ["x.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_ends_the_writer_leaves_the_old_file_and_no_draft(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def write() -> None:
        with whole_file(path) as draft:
            draft.write_text("ha")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_a_writer_that_is_killed_leaves_the_old_file_and_the_next_one_is_not_held_up(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    if (child := os.fork()) == 0:
        with whole_file(path) as draft:
            draft.write_text("half")
            os._exit(1)
    os.waitpid(child, 0)
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["x.txt", "x.txt.tmp"]
    with whole_file(path) as draft:
        draft.write_text("new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_a_sigterm_that_would_end_the_writer_at_once_waits_until_the_file_is_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with whole_file(path) as draft:
            draft.write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
            draft.write_text("whole")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert path.read_text() == "whole"
    assert os.listdir(tmp_path) == ["x.txt"]


def _pressed_again(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Ctrl-C in the middle of what this function does."""
    does = getattr(owner, name)

    def pressed(*given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return does(*given, **named)

    monkeypatch.setattr(owner, name, pressed)


def test_a_second_ctrl_c_while_the_first_is_seen_to_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pressed_again(monkeypatch, Path, "unlink")
    _pressed_again(monkeypatch, shutil, "rmtree")
    for whole in (whole_file, scratch_folder):
        with pytest.raises(KeyboardInterrupt), whole(tmp_path / "data"):
            raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_writers_of_a_file_take_turns(tmp_path: Path) -> None:
    path, begun = tmp_path / "x.txt", tmp_path / "begun"
    if (child := os.fork()) == 0:
        with whole_file(path) as draft, draft.open("w") as file:
            file.write("first, ")
            file.flush()
            begun.touch()
            time.sleep(0.3)
            file.write("whole")
        os._exit(0)
    while not begun.exists():
        time.sleep(0.001)
    with whole_file(path) as draft:
        assert path.read_text() == "first, whole", "the second begins when the first is done"
        draft.write_text("second, whole")
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_text() == "second, whole"


def test_what_cannot_be_written_is_named_as_the_file_and_not_as_its_draft(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory") as caught, whole_file(tmp_path / "no" / "x.txt"):
        pass
    assert caught.value.filename == str(tmp_path / "no" / "x.txt")
    with pytest.raises(OSError, match="No space left on device") as caught, whole_file(tmp_path / "x.txt"):
        raise OSError(28, "Error writing bytes to file. Detail: [errno 28] No space left on device")  # as pyarrow says it
    assert (caught.value.filename, caught.value.strerror) == (str(tmp_path / "x.txt"), "No space left on device")


WATCHED = """
import json, os, sys
here, moved = os.path.abspath(sys.argv[1]), []
def watch(event, arguments):
    if event == "os.rename":
        moved.append([os.path.abspath(os.fspath(path)) for path in arguments[:2]])
sys.addaudithook(watch)
from aggcli.cli.main import main
code = main(sys.argv[2:])
files = [os.path.join(folder, name) for folder, _, names in os.walk(here) for name in names]
print(json.dumps({"code": code, "moved": moved, "files": files}), file=sys.stderr)
"""
TRAINED = ["--task=control", "--steps=2", "--rollout-batch-size=2", "--n-samples-per-prompt=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "names"),
    [
        (["compare", "--rollouts=example", "--output=new"], {"manifest.json", "step-000002.parquet"}),
        (
            ["compare", *TRAINED, "--seeds=1", "--output=new"],
            {"manifest.json", "checkpoint.safetensors", "learning_curves.png"},
        ),
        (["plot", "old", "--html", "--format=png,svg,pdf", "--output=new"], {"weight_shares.pdf", "report.html"}),
        (["convert", "example", "new/steps", "--to=parquet"], {"0.parquet"}),
        (["convert", str(ROOT / "tests/data/slime_rollout/0.pt"), "new/x.jsonl"], {"x.jsonl"}),
    ],
    ids=["replay", "training", "plot", "convert to a folder", "convert to a file"],
)
def test_every_file_of_a_command_is_moved_to_its_place_but_for_logs_that_grow_by_lines(
    tmp_path: Path, command: list[str], names: set[str]
) -> None:
    """Seen from outside: which files a command renames, and which of those that are there at the end it did not."""
    if command[0] == "plot":
        assert completed("-m", "aggcli", "run", "--rollouts=example", "--output=old", cwd=tmp_path).returncode == 0
    told = completed("-c", WATCHED, "new", *command, cwd=tmp_path)
    seen = json.loads(told.stderr.splitlines()[-1])
    assert seen["code"] == 0, told.stderr
    placed = {after for _, after in seen["moved"]}
    inside = {Path(path) for path in seen["files"]}
    assert names <= {path.name for path in inside}
    logs = {path for path in inside if path.name in ("metrics.jsonl", "layouts.jsonl", "timings.jsonl")}
    unmoved = {path for path in inside - logs if not any(str(path).startswith(to) for to in placed)}
    assert not unmoved
    assert not [path for path in inside if path.name.endswith(".tmp")]


def test_the_scratch_folder_of_a_conversion_that_was_killed_is_taken_over_by_the_next_one(capsys, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / ".out.tmp"
    (scratch / "new").mkdir(parents=True)
    (scratch / "new" / "0.jsonl").write_text('{"half')
    (scratch / "old").mkdir()
    assert aggcli(capsys, "convert", "example", out, "--to=jsonl").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl"]


def test_a_folder_of_the_users_that_has_the_name_of_the_scratch_folder_is_left_alone(capsys, tmp_path: Path) -> None:
    thesis = tmp_path / ".out.tmp" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years")
    line = refused(aggcli(capsys, "convert", "example", tmp_path / "out", "--to=jsonl"))
    assert line == f"aggcli: {tmp_path / 'out'}: cannot be written (.out.tmp beside it holds something else: move that away)"
    assert thesis.read_text() == "years"
    thesis.unlink()
    thesis.parent.rmdir()
    away = tmp_path / "away"
    (away / "new").mkdir(parents=True)
    (tmp_path / ".out.tmp").symlink_to(away)
    assert "holds something else" in refused(aggcli(capsys, "convert", "example", tmp_path / "out", "--to=jsonl"))
    assert (away / "new").is_dir()


def test_a_link_that_has_the_name_of_a_draft_is_not_written_through(capsys, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    assert aggcli(capsys, "run", "--rollouts=example", "--output", out).code == 0
    (out / "figures").mkdir()
    drawn = out / "figures" / "weight_shares.png"
    for link in (drawn, drawn.with_name(drawn.name + ".tmp"), out / "figures" / "report.html.tmp"):
        link.symlink_to(victim)
    assert aggcli(capsys, "plot", out, "--html").code == 0
    assert victim.read_text() == "mine"
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    assert drawn.read_bytes().startswith(b"\x89PNG")
