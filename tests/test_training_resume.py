"""Whatever ends a training run, --resume goes on bit for bit. AGGCLI_KILLS sets how often the long test kills (default 3)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from aggcli.cli.recording import processes_before
from aggcli.errors import RecordError
from aggcli.training.checkpoint import load, save
from tests.cli import aggcli, refused, results_of, started
from tests.train_worker import flags

KILLS = int(os.environ.get("AGGCLI_KILLS", "3"))
MODES = ("sample_mean", "prompt_mean")
STEPS = 40
FLAGS = flags(steps=None, dtype=None)
FILES = ("metrics.jsonl", "layouts.jsonl")


def _start(output: Path, *more: str) -> subprocess.Popen[str]:
    arms = [f"--modes={','.join(MODES)}", "--seeds=1", "--processes=2"]
    return started("compare", *arms, *FLAGS, f"--steps={STEPS}", "--checkpoint-every=3", "--output", output, *more)


def _parameters(directory: Path) -> dict[str, bytes]:
    with safe_open(directory / "checkpoint.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 (not a dict)


def _same_results(directory: Path, undisturbed: Path) -> None:
    for mode in MODES:
        for name in FILES:
            assert (directory / mode / "seed-0" / name).read_bytes() == (undisturbed / mode / "seed-0" / name).read_bytes()
    assert _parameters(directory) == _parameters(undisturbed)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else -1


def _signal_at(process: subprocess.Popen[str], path: Path, lines: int, number: int, delay: float = 0.0) -> None:
    """Send a signal once the file has so many lines (-1: once its directory is there), if the process still runs."""
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        if _lines(path) >= lines and path.parent.parent.parent.exists():
            time.sleep(delay)
            process.send_signal(number)
            return
        time.sleep(0.001)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "out"
    process = _start(directory)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert _lines(directory / MODES[0] / "seed-0" / "metrics.jsonl") == STEPS
    return directory


@pytest.mark.slow
def test_kill_9_at_random_moments_and_resume_gives_the_undisturbed_records_and_parameters(
    tmp_path: Path, undisturbed: Path
) -> None:
    draw, directory = random.Random(2026), tmp_path / "out"
    metrics = directory / MODES[0] / "seed-0" / "metrics.jsonl"
    moments = sorted(draw.randint(-1, STEPS) for _ in range(KILLS))
    killed = 0
    for at in moments:
        process = _start(directory, *(["--resume"] if directory.exists() else []))
        _signal_at(process, metrics, at, signal.SIGKILL, draw.random() * 0.05)
        process.communicate(timeout=300)
        killed += process.returncode == -signal.SIGKILL
    assert killed >= KILLS - 1, "a run may at most have finished before the last kill"
    process = _start(directory, "--resume")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    _same_results(directory, undisturbed)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["final"] == json.loads((undisturbed / "manifest.json").read_text())["final"]


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_exits_130_and_resumes_bit_for_bit(tmp_path: Path, undisturbed: Path) -> None:
    directory = tmp_path / "out"
    process = _start(directory)
    _signal_at(process, directory / MODES[0] / "seed-0" / "metrics.jsonl", 10, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"go on with --resume --output {directory}" in errors
    for where in (directory, directory / MODES[1] / "seed-0"):
        assert json.loads((where / "manifest.json").read_text())["status"] == "interrupted"
    done = _lines(directory / MODES[1] / "seed-0" / "metrics.jsonl")
    assert 10 <= done < STEPS
    process = _start(directory, "--resume")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"resuming {directory} at step {done}" in errors, "nothing that was recorded is done again"
    _same_results(directory, undisturbed)


# -- in this process ------------------------------------------------------------------------------------------------

RUN = ["run", *FLAGS, "--checkpoint-every=2", "--no-layout-records"]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results_of(*RUN, "--steps=5", "--output", tmp_path_factory.mktemp("five") / "out")


def _copy(five: Path, tmp_path: Path) -> Path:
    shutil.copytree(five, tmp_path / "out")
    return tmp_path / "out"


def test_more_steps_on_a_finished_run_are_those_of_a_longer_run(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    assert aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory).code == 0
    assert aggcli(capsys, *RUN, "--steps=8", "--output", tmp_path / "long").code == 0
    assert (directory / "metrics.jsonl").read_bytes() == (tmp_path / "long" / "metrics.jsonl").read_bytes()
    assert _parameters(directory) == _parameters(tmp_path / "long")
    assert not list(directory.glob("*.before-resume*")), "nothing was cut, so nothing is backed up"


def test_lines_past_the_checkpoint_are_cut_and_kept_in_a_backup(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    assert aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory).code == 0
    whole = (directory / "metrics.jsonl").read_bytes()
    shutil.copy(five / "checkpoint.safetensors", directory)
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "rollout_st')
    assert aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory).code == 0
    assert (directory / "metrics.jsonl").read_bytes() == whole
    assert (directory / "metrics.jsonl.before-resume").read_bytes() == whole + b'{"step": 8, "rollout_st'
    shutil.copy(five / "checkpoint.safetensors", directory)
    assert aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory).code == 0
    assert (directory / "metrics.jsonl.before-resume-2").read_bytes() == whole, "an earlier backup is not overwritten"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("--lr=0.001", "lr is 0.001 now and was 0.0003"),
        ("--seed=3", "seed is 3 now and was 0"),
        ("--loss-aggregation=token_mean", "loss_aggregation is token_mean now and was sample_mean"),
        ("--micro-batch-size=2", "micro_batch_size is 2 now and was None"),
        ("--layouts=dp2", "layouts is ['dp2'] now and was None"),
    ],
)
def test_resume_with_a_changed_setting_is_refused_by_name(capsys, five: Path, changed: str, named: str) -> None:
    before = (five / "metrics.jsonl").read_bytes()
    assert named in refused(aggcli(capsys, *RUN, "--steps=5", changed, "--resume", "--output", five))
    assert (five / "metrics.jsonl").read_bytes() == before


def test_resume_needs_an_output_directory_that_a_run_of_that_command_has_made(capsys, five: Path, tmp_path: Path) -> None:
    assert "--resume needs --output" in refused(aggcli(capsys, *RUN, "--steps=5", "--resume"))
    nothing = tmp_path / "nothing"
    assert "not a results directory" in refused(aggcli(capsys, *RUN, "--steps=5", "--resume", "--output", nothing))
    assert not nothing.exists()
    compare = ["compare", *RUN[1:], "--steps=5", "--resume", "--output", five]
    assert "was made by `aggcli run`" in refused(aggcli(capsys, *compare))


def test_a_run_killed_before_it_wrote_what_it_is_starts_from_the_first_step(capsys, five: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json.tmp").write_text('{"sch')
    assert aggcli(capsys, *RUN, "--steps=5", "--resume", "--output", tmp_path).code == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == (five / "metrics.jsonl").read_bytes()


def test_a_damaged_checkpoint_is_refused_in_one_line(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    (directory / "checkpoint.safetensors").write_bytes(b"\x00" * 40)
    assert "checkpoint.safetensors: cannot be read" in refused(
        aggcli(capsys, *RUN, "--steps=5", "--resume", "--output", directory)
    )


def test_a_line_that_is_no_record_is_refused_by_its_number_and_not_cut_off(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    said = refused(aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory))
    assert f"{directory / 'metrics.jsonl'}: line 6 is not the record of a step; remove it to go on" in said
    assert (directory / "metrics.jsonl").read_text().endswith("garbage\n")


def test_records_that_are_gone_are_not_gone_on_with(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    (directory / "metrics.jsonl").unlink()
    said = refused(aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory))
    assert "metrics.jsonl: is missing, so what was done before step 5 cannot be kept" in said


def test_a_directory_from_before_runs_were_shared_out_goes_on_in_one_process(five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest.pop("processes") == 1
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert processes_before(directory) == 1
    (directory / "manifest.json").write_text(json.dumps({**manifest, "processes": 3}))
    assert processes_before(directory) == 3
    (tmp_path / "blank").mkdir()
    assert processes_before(tmp_path / "blank") is None


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _copy(five, tmp_path)
    before, found = _parameters(directory), load(directory)
    assert found is not None

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(
        RecordError, match=r"checkpoint\.safetensors: cannot be written \(No space left on device\); the one before"
    ):
        save(directory, found)
    assert _parameters(directory) == before
    assert not list(directory.glob("*.tmp"))
