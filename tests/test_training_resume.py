"""Whatever ends a training run, --resume goes on bit for bit. AGGCLI_KILLS sets how often the long test kills (default 3)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aggcli.errors import RecordError
from aggcli.jobs.recording import shares_before
from aggcli.training import checkpoint as checkpoint_module
from aggcli.training.checkpoint import Checkpoint, Saver, load
from tests.cli import aggcli, refused, results_of, started
from tests.train_worker import flags

KILLS = int(os.environ.get("AGGCLI_KILLS", "3"))
MODES = ("sample_mean", "prompt_mean")
STEPS = 40
FLAGS = flags(steps=None, dtype=None)
FILES = ("metrics.jsonl", "layouts.jsonl")


def _start(output: Path, *more: str) -> subprocess.Popen[str]:
    arms = [f"--modes={','.join(MODES)}", "--seeds=1", "--workers=2"]
    return started("compare", *arms, *FLAGS, f"--steps={STEPS}", "--checkpoint-every=3", "--output", output, *more)


def _parameters(directory: Path) -> dict[str, bytes]:
    """Every tensor of the shares' checkpoints, by file and name."""
    found = {path.name: load_file(path) for path in sorted(directory.glob("checkpoint*"))}
    return {f"{share} {name}": value.numpy().tobytes() for share, tensors in found.items() for name, value in tensors.items()}


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
    done = sorted({_lines(directory / mode / "seed-0" / "metrics.jsonl") for mode in MODES})
    assert 10 <= done[-1] < STEPS
    process = _start(directory, "--resume")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    where = f"step {done[0]}" if len(done) == 1 else f"steps {done[0]} to {done[1]}"
    assert f"resuming {directory} at {where}\n" in errors, "nothing that was recorded is done again"
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


def test_a_run_goes_on_with_other_ranks_unless_its_rule_depends_on_the_layout(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["settings"]["dp"] = 2
    (directory / "manifest.json").write_text(json.dumps(manifest))
    told = aggcli(capsys, *RUN, "--dp=1", "--steps=6", "--resume", "--output", directory)
    assert told.code == 0, told.err
    assert "note: --resume: dp is 1 now and was 2, so the numbers go on up to rounding, not to the bit" in told.err
    manifest["settings"]["loss_aggregation"] = "trl:bnpo"
    (directory / "manifest.json").write_text(json.dumps(manifest))
    again = (*RUN, "--loss-aggregation=trl:bnpo", "--dp=1", "--steps=8", "--resume", "--output", directory)
    assert "dp is 1 now and was 2" in refused(aggcli(capsys, *again))


def test_a_checkpoint_whose_parts_are_gone_or_damaged_is_refused_in_a_line(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    _checkpoint_with(directory, {"parts": "checkpoint-parts-1"})
    assert "checkpoint.safetensors: cannot be read (checkpoint-parts-1 is not beside it)" in _resumed(capsys, directory)
    (directory / "checkpoint-parts-1").mkdir()
    (directory / "checkpoint-parts-1" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"cut")
    assert "checkpoint.safetensors: cannot be read" in _resumed(capsys, directory)


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


def test_a_directory_from_before_runs_were_cut_into_shares_goes_on_as_one(five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest.pop("shares") == 1
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert shares_before(directory) == 1
    (directory / "manifest.json").write_text(json.dumps({**manifest, "shares": 3}))
    assert shares_before(directory) == 3
    (tmp_path / "blank").mkdir()
    assert shares_before(tmp_path / "blank") is None


@pytest.mark.parametrize("told", ["by the next", "when it is waited for", "at the end"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    directory = _copy(five, tmp_path)
    path = directory / "checkpoint.safetensors"
    before, found = _parameters(directory), load(path)
    assert found is not None

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)

    def saved() -> None:
        with Saver(path) as saver:
            saver.save(found)
            if told == "when it is waited for":
                saver.wait()
            elif told == "by the next":
                saver.save(found)
            assert told == "at the end"

    with pytest.raises(
        RecordError, match=r"checkpoint\.safetensors: cannot be written \(No space left on device\); the one before"
    ):
        saved()
    assert _parameters(directory) == before
    assert not list(directory.glob("*.tmp"))


class _Late:
    """A pool that does what it is given when that is asked for."""

    def __init__(self, workers: int) -> None:
        self.given: list[Callable[[], None]] = []

    def submit(self, work: Callable[..., None], *given: object) -> SimpleNamespace:
        self.given.append(lambda: work(*given))
        return SimpleNamespace(result=self.shutdown)

    def shutdown(self) -> None:
        while self.given:
            self.given.pop()()


@pytest.mark.parametrize("is_large", [False, True])
def test_a_checkpoint_is_of_its_step_though_it_is_written_beside_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """A large one is written at once: memory would hold it twice."""
    monkeypatch.setattr(checkpoint_module, "ThreadPoolExecutor", _Late)
    monkeypatch.setattr(checkpoint_module, "BESIDE_UP_TO", 100 if is_large else 2**28)
    path, value = tmp_path / "checkpoint.safetensors", torch.ones(3)
    with Saver(path) as saver:
        saver.save(Checkpoint(1, [1], ["run"], {}, {"parameters": value}))
        assert path.exists() == is_large
        value += 1
    found = load(path)
    assert found is not None
    assert found.tensors["parameters"].tolist() == [1.0] * 3


# -- damaged records and checkpoints ----------------------------------------------------------------------------------


def _resumed(capsys, directory: Path, *more: str) -> str:
    before = (directory / "metrics.jsonl").read_bytes()
    said = refused(aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory, *more))
    assert (directory / "metrics.jsonl").read_bytes() == before, "what is refused changes nothing"
    return said


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        ({"settings": ...}, "manifest.json has no settings, so it is not known what to go on with"),
        ({"command": ...}, "manifest.json has no command"),
        ({"command": 3}, "command in its manifest.json is not of type str"),
        ({"shares": "two"}, "shares in its manifest.json is not of type int"),
        ({"shares": -1}, "shares in its manifest.json is -1"),
        ({"settings": {"lr": {}}}, "--lr {}: must be of type float"),
    ],
)
def test_resume_on_a_damaged_manifest_is_one_line_that_names_what_is_wrong(
    capsys, five: Path, tmp_path: Path, manifest: dict, named: str
) -> None:
    directory = _copy(five, tmp_path)
    recorded = {**json.loads((directory / "manifest.json").read_text()), **manifest}
    (directory / "manifest.json").write_text(json.dumps({name: value for name, value in recorded.items() if value is not ...}))
    assert named in _resumed(capsys, directory)


def test_resume_on_a_manifest_nested_beyond_all_measure_is_one_line(capsys, five: Path, tmp_path: Path) -> None:
    directory = _copy(five, tmp_path)
    (directory / "manifest.json").write_text('{"schema": 1, "settings": ' + "[" * 100_000)
    assert "is not a results directory (no readable manifest.json)" in _resumed(capsys, directory)


def _checkpoint_with(directory: Path, facts: object = None, tensors: dict | None = None) -> None:
    path = directory / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        own = json.loads(file.metadata()["aggcli"])
    changed = {**own, **facts} if isinstance(facts, dict) and facts else own if facts is None else facts
    save_file({**load_file(path), **(tensors or {})}, path, {"aggcli": json.dumps(changed)})


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, "is of another version of aggcli, or damaged: it does not say step, optimizer_steps, runs, gone;"),
        ([], "is damaged: its facts are not step"),
        ("x", "is damaged: its facts are not step"),
        ({"step": "x"}, "is damaged: step is no count"),
        ({"step": True}, "step is no count"),
        ({"step": 1.5}, "step is no count"),
        ({"optimizer_steps": 5}, "optimizer_steps is no count of each run"),
        ({"optimizer_steps": [-1]}, "optimizer_steps is no count of each run"),
        ({"optimizer_steps": [5, 5]}, "optimizer_steps is no count of each run"),
        ({"runs": None}, "runs is no list of names"),
        ({"runs": [3]}, "runs is no list of names"),
        ({"runs": ["other"]}, "holds the runs"),
        ({"runs": [".", "."], "optimizer_steps": [5, 5]}, "holds the runs"),
        ({"gone": []}, "gone does not hold the step"),
        ({"gone": {".": 3}}, "gone does not hold the step"),
        ({"gone": {".": ["x", 3]}}, "gone does not hold the step"),
        ({"gone": {".": [1, "nan"]}}, "holds the runs"),
    ],
)
def test_resume_on_a_checkpoint_of_other_facts_is_one_line_that_names_them(
    capsys, five: Path, tmp_path: Path, facts: object, named: str
) -> None:
    directory = _copy(five, tmp_path)
    _checkpoint_with(directory, facts)
    said = _resumed(capsys, directory)
    assert named in said
    assert f"{directory / 'checkpoint.safetensors'}: " in said
    assert said.endswith("remove it to start from the first step")


@pytest.mark.parametrize("name", ["parameters", "optimizer.mean_RQ", "optimizer.steps_R"])
def test_resume_on_a_checkpoint_without_a_tensor_or_of_another_width_is_one_line(
    capsys, five: Path, tmp_path: Path, name: str
) -> None:
    directory = _copy(five, tmp_path)
    path = directory / "checkpoint.safetensors"
    whole = {key: value.clone() for key, value in load_file(path).items()}  # not a map of the file that is written over
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    save_file({key: value for key, value in whole.items() if key != name}, path, facts)
    assert "and not parameters, optimizer.lr_R" in _resumed(capsys, directory)
    narrow = whole[name][..., :-1].contiguous()
    save_file({**whole, name: narrow}, path, facts)
    assert f"{name} is {tuple(narrow.shape)} of {narrow.dtype}, and this" in _resumed(capsys, directory)
    save_file({**whole, name: whole[name].half()}, path, facts)
    assert f"{name} is {tuple(whole[name].shape)} of torch.float16, and this policy's is" in _resumed(capsys, directory)


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "layouts.jsonl", "timings.jsonl", "samples", "tensorboard"])
def test_a_resumed_run_does_not_write_through_a_link_in_its_directory(capsys, five: Path, tmp_path: Path, name: str) -> None:
    directory, elsewhere = _copy(five, tmp_path), tmp_path / "elsewhere"
    if (directory / name).exists():
        (directory / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (directory / name).symlink_to(elsewhere)
    before = elsewhere.read_bytes() if elsewhere.is_file() else sorted(elsewhere.iterdir())
    told = refused(aggcli(capsys, *RUN, "--steps=8", "--resume", "--output", directory))
    assert f"{directory / name}: is a link, and records are never written through one" in told
    assert (elsewhere.read_bytes() if elsewhere.is_file() else sorted(elsewhere.iterdir())) == before


@pytest.mark.parametrize("where", ["sample_mean", "sample_mean/seed-0"])
def test_a_run_folder_that_is_a_link_out_of_the_comparison_is_neither_written_nor_read(
    capsys, tmp_path: Path, where: str
) -> None:
    small = ["compare", *FLAGS, "--modes=sample_mean", "--seeds=1", "--output", tmp_path / "out"]
    assert aggcli(capsys, *small, "--steps=1").code == 0
    (tmp_path / "out" / where).rename(tmp_path / "elsewhere")
    (tmp_path / "out" / where).symlink_to(tmp_path / "elsewhere")
    before = {path: path.read_bytes() for path in (tmp_path / "elsewhere").rglob("*.json*")}
    inside = "runs in its manifest.json must be folders inside it, and not sample_mean/seed-0"
    assert inside in refused(aggcli(capsys, *small, "--steps=2", "--resume"))
    for command in (["compare"], ["plot"], ["runs", "show"]):
        assert inside in refused(aggcli(capsys, *command, tmp_path / "out"))
    assert {path: path.read_bytes() for path in (tmp_path / "elsewhere").rglob("*.json*")} == before
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (tmp_path / "out" / "manifest.json").write_text(json.dumps({**manifest, "runs": ["token_mean"]}))
    assert "leads out of the results directory" in refused(aggcli(capsys, *small, "--steps=2", "--resume"))


@pytest.mark.parametrize("name", ["..", "../other", "/tmp", "a/../../b", "", ".", "a\0b"])
def test_a_manifest_cannot_name_a_run_outside_its_directory(capsys, five: Path, tmp_path: Path, name: str) -> None:
    directory = _copy(five, tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "kind": "comparison", "runs": [name]}))
    for command in (["compare"], ["plot"], ["runs", "show"], ["runs", "rm", "--yes"]):
        assert "must be folders inside it" in refused(aggcli(capsys, *command, directory))
    assert (directory / "metrics.jsonl").exists()
