"""Runs that died on the way: their directories stay aggcli's own, and say how they ended where there is room for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aggcli import records, run_writer
from aggcli.errors import RecordError
from aggcli.run_writer import RunWriter
from tests.cli import aggcli, environment, refused, write_jsonl
from tests.fixtures import fx_a


def _limited(tmp_path: Path, kind: int, most: int, *command: str) -> subprocess.CompletedProcess[str]:
    """A command under a limit of the operating system: the size of a file (a disk that is full for it), or open files."""
    import resource

    return subprocess.run(
        [sys.executable, "-m", "aggcli", *command],
        preexec_fn=lambda: resource.setrlimit(kind, (most, most)), cwd=tmp_path, capture_output=True, text=True,
        env=environment(), timeout=200,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", ["overwrite", "rm"])
def test_a_comparison_that_died_while_it_opened_its_runs_is_still_aggclis_own(capsys, tmp_path: Path, how: str) -> None:
    import resource

    rollouts = write_jsonl(tmp_path / "a.jsonl", fx_a())  # read with a file open at a time
    for files in range(8, 16):  # at each limit it dies a little later
        out = tmp_path / "out"
        told = _limited(tmp_path, resource.RLIMIT_NOFILE, files, "compare", f"--rollouts={rollouts}", "--output=out")
        if told.returncode == 0 or files == 15:
            break
        assert told.returncode == 2
        assert told.stderr.splitlines()[-1].endswith("Too many open files"), told.stderr
        if not out.exists():
            continue
        if how == "rm":
            assert aggcli(capsys, "runs", "rm", out, "--yes").code == 0
            assert not out.exists()
        else:
            assert (
                aggcli(capsys, "compare", f"--rollouts={rollouts}", "--modes=token_mean", "--output", out, "--overwrite").code
                == 0
            )
            assert [path.name for path in out.iterdir() if path.is_dir()] == ["token_mean"]
            assert aggcli(capsys, "runs", "rm", out, "--yes").code == 0


def test_a_run_that_died_before_its_manifest_was_whole_is_replaced_without_a_word_and_may_be_removed(
    capsys, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json.tmp").write_text('{"sch')
    assert aggcli(capsys, "run", "--rollouts=example", "--output", tmp_path / "a").code == 0
    assert not (tmp_path / "a" / "manifest.json.tmp").exists()
    assert aggcli(capsys, "runs", "rm", tmp_path / "b", "--yes").code == 0
    assert not (tmp_path / "b").exists()
    (tmp_path / "empty").mkdir()
    assert "is not a results directory" in refused(aggcli(capsys, "runs", "rm", tmp_path / "empty", "--yes"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json.tmp").write_text("{")
    (tmp_path / "c" / "thesis.txt").write_text("years")
    assert "is not a results directory" in refused(aggcli(capsys, "runs", "rm", tmp_path / "c", "--yes"))
    assert "is not a results directory" in refused(
        aggcli(capsys, "run", "--rollouts=example", "--overwrite", "--output", tmp_path / "c")
    )


def test_drafts_that_a_killed_run_left_are_aggclis_own(capsys, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert aggcli(capsys, "run", "--rollouts=example", "--output", out).code == 0
    assert aggcli(capsys, "plot", out).code == 0
    for name in ("manifest.json", "checkpoint.safetensors", "samples/step-000001.parquet", "figures/weight_shares.png"):
        (out / f"{name}.tmp").write_text("half")
    (out / "metrics.jsonl.before-resume-2.tmp").write_text("half")
    assert aggcli(capsys, "runs", "rm", out, "--yes").code == 0
    assert not out.exists()


@pytest.mark.slow
def test_a_replay_on_a_full_disk_names_the_file_and_all_its_runs_say_that_they_failed(tmp_path: Path) -> None:
    import resource

    told = _limited(tmp_path, resource.RLIMIT_FSIZE, 12_000, "compare", "--rollouts=example", "--output=out")
    assert told.returncode == 2
    assert told.stderr.splitlines()[-1] == "aggcli: out/sample_mean/layouts.jsonl: File too large"
    manifests = list((tmp_path / "out").rglob("manifest.json"))
    assert len(manifests) >= 2
    assert {json.loads(path.read_text())["status"] for path in manifests} == {"failed"}


@pytest.mark.slow
def test_a_disk_without_a_byte_left_still_takes_how_the_run_ended(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("a file system of its own needs the rights to mount one")
    try:
        told = _limited(tmp_path, 0, -1, "compare", "--rollouts=example", "--output=disk/out")
        assert told.returncode == 2
        last = told.stderr.splitlines()[-1]
        assert last.startswith("aggcli: disk/out/")
        assert last.endswith(": No space left on device")
        manifests = list((disk / "out").rglob("manifest.json"))
        assert {json.loads(path.read_text())["status"] for path in manifests} == {"failed"}
        assert not list(disk.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_results_that_are_removed_or_moved_while_a_run_goes_on_are_noticed_at_the_next_record(tmp_path: Path, how: str) -> None:
    small = ["--task=control", "--steps=100000", "--rollout-batch-size=2", "--n-samples-per-prompt=2", "--seeds=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "aggcli", "compare", *small, "--workers=2", "--output=out"],
        cwd=tmp_path, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    metrics = tmp_path / "out" / "sample_mean" / "seed-0" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 1):
        time.sleep(0.01)
    if how == "removed":
        while (tmp_path / "out").exists():  # again where a run was still being opened in it meanwhile
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    else:
        (tmp_path / "out").rename(tmp_path / "away")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "was removed or moved while it was being written; the run ends here" in said.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["token_mean/seed-0", "."])
def test_a_run_is_not_opened_in_results_that_were_removed(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordError, match="out: was removed or moved while it was being written; the run ends here"):
        RunWriter(tmp_path / "out", name, {})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("last", ["write_manifest", "refuse_links"])
def test_results_that_are_removed_between_two_steps_of_opening_a_run_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    (tmp_path / "out").mkdir()

    def then_removed(*given: Any) -> None:
        getattr(records, last)(*given)
        shutil.rmtree(tmp_path / "out")

    monkeypatch.setattr(run_writer, last, then_removed)
    with pytest.raises(RecordError, match="out: was removed or moved while it was being written; the run ends here"):
        RunWriter(tmp_path / "out", "token_mean/seed-0", {})
    assert not (tmp_path / "out").exists()


def test_a_replay_that_died_before_its_first_run_was_opened_is_still_aggclis_own(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    command = ["compare", "--rollouts", "example", "--modes", "token_mean", "--output", str(tmp_path / "new")]
    with monkeypatch.context() as patch:
        patch.setattr("aggcli.sinks.Sinks.__init__", interrupted)
        assert aggcli(capsys, *command).code == 130
    assert (tmp_path / "new").is_dir()
    assert aggcli(capsys, *command, "--overwrite").code == 0
