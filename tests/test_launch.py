"""Launchers: shares are done wherever they run, and what happens when a process ends, is killed or is told to stop."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from aggcli import grid
from aggcli.cli import live
from aggcli.config import ObjectiveConfig, settings_from
from aggcli.errors import FAULT, RecordError, told
from aggcli.interrupts import none_dropped
from aggcli.jobs import preparation, training
from aggcli.jobs.listening import Progress
from aggcli.launch import Launcher, Link, Outcome, ShareFailed, Work, processes
from aggcli.launch.here import Here
from aggcli.launch.processes import Processes
from aggcli.measurement.comparison import LayoutComparison
from aggcli.measurement.report import StepReport
from aggcli.rules import SAMPLE_MEAN
from aggcli.training.loop import TrainedStep
from aggcli.training.report import RunReport
from aggcli.training.stack import RunSpec
from aggcli.world import ALONE
from tests.cli import aggcli, completed, environment, records, refused, results_of, started
from tests.fixtures import MODES, rules_named
from tests.train_worker import flags

FLAGS = flags(steps=None)


LAUNCHERS = {"here": Here, "processes": lambda: Processes(2)}


@pytest.mark.parametrize(("place", "times"), [(Processes, 1), (Here, 0)])
def test_what_is_done_meanwhile_is_done_once_while_shares_are_elsewhere(
    place: type[Processes] | type[Here], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def run(self: object, work: Work, shares: Sequence[object], hear: object) -> Iterator[Outcome]:
        called.append("shares")
        yield Outcome(0, training.Trained())

    request = SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(steps=1)))
    share = cast(training.TrainingShare, SimpleNamespace(request=request, world=ALONE, directory=Path()))
    launcher = Processes(1) if place is Processes else Here()
    monkeypatch.setattr(place, "run", run)
    before = set(threading.enumerate())
    beside = threading.Thread(target=lambda: (time.sleep(0.05), called.append("meanwhile")))
    training._launched(launcher, [share], beside)
    assert sorted(called) == [*["meanwhile"] * times, "shares"]
    assert set(threading.enumerate()) == before, "nothing is left to run beside what comes next"


def test_what_is_done_meanwhile_is_stopped_and_waited_for_by_a_job_that_is_interrupted_twice() -> None:
    ended: list[bool] = []

    def work(stop: threading.Event) -> None:
        stop.wait(5)
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.05)
        ended.append(stop.is_set())

    def interrupted() -> None:
        with training._beside(work) as beside:
            beside.start()
            raise KeyboardInterrupt("the first")

    with pytest.raises(KeyboardInterrupt, match="the first"):
        interrupted()
    assert ended == [True]


@pytest.mark.slow
def test_a_comparison_that_is_called_from_python_leaves_the_drawing_of_its_caller_alone(tmp_path: Path) -> None:
    program = (
        "import os, sys, aggcli; from aggcli.launch import processes\n"
        "if __name__ == '__main__':\n"
        "    aggcli.train(output=sys.argv[1], task='control', steps=1, seeds=2, shares=2, workers=2, rollout_batch_size=2,"
        " n_samples_per_prompt=2, evaluation_prompts=2)\n"
        "    print(os.environ['MPLBACKEND'], 'matplotlib' in sys.modules)\n"
    )
    script = tmp_path / "called.py"
    script.write_text(program)
    told = completed(script, tmp_path / "out", env=environment(MPLBACKEND="svg"))
    assert told.stdout.splitlines()[-1] == "svg False", told.stderr


def _squared(share: int, link: Link) -> tuple[int, int]:
    """A share that tells its number and returns its square, with the process that it ran in."""
    link.tell(("at", share))
    return share * share, os.getpid()


def _ends(share: object, link: Link) -> str:
    """A share that ends in the way that it names, or not at all."""
    if share == "no":
        raise RecordError("no room")
    if share == "full":
        raise OSError(28, "No space left on device", "out/metrics.jsonl")
    if share == "fault":
        raise ZeroDivisionError("division by zero")
    if share == "interrupted":
        raise KeyboardInterrupt
    if isinstance(share, int):
        os.kill(os.getpid(), share)
    return "done"


def _waits(share: str, link: Link) -> str:
    """A share that waits until it is told to stop, and says whether it was: `deaf`, until it is ended."""
    link.tell(os.getpid())
    while not link.is_stopping or share == "deaf":
        time.sleep(0.005)
    return "stopped"


def _outcomes(work: Work, shares: Sequence[object], launcher: Launcher) -> tuple[list[Outcome], list[tuple[int, object]]]:
    heard: list[tuple[int, object]] = []
    return list(launcher.run(work, shares, lambda number, message: heard.append((number, message)))), heard


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_share_is_done_once_and_given_in_its_order_wherever_it_runs(name: str) -> None:
    outcomes, heard = _outcomes(_squared, range(7), LAUNCHERS[name]())
    assert [outcome.number for outcome in outcomes] == [*range(7)]
    assert [outcome.result[0] for outcome in outcomes] == [0, 1, 4, 9, 16, 25, 36]
    assert sorted(heard) == [(share, ("at", share)) for share in range(7)]
    places = {outcome.result[1] for outcome in outcomes}
    assert places == {os.getpid()} if name == "here" else len(places) == 7 and os.getpid() not in places


def test_a_share_whose_process_is_killed_is_named_with_its_signal_and_ends_no_other() -> None:
    outcomes, heard = _outcomes(_ends, ["well", signal.SIGKILL, "well", 35], Processes(2))
    assert [outcome.result for outcome in outcomes] == ["done", None, "done", None]
    killed, other = outcomes[1].error, outcomes[3].error
    assert isinstance(killed, ShareFailed)
    assert re.fullmatch(r"share 2 \(process \d+\) was ended by SIGKILL; what was recorded is kept", str(killed))
    assert "share 4" in str(other), "a signal without a name is given by its number"
    assert "was ended by signal 35;" in str(other)
    assert (1, killed) in heard, "it is told as soon as it is known, since others go on"
    assert killed.exit_code == 1
    ((one,), _) = _outcomes(_ends, [signal.SIGKILL], Processes(1, named="the preparation"))
    assert re.fullmatch(r"the preparation \(process \d+\) was ended by SIGKILL; what was recorded is kept", str(one.error))


@pytest.mark.parametrize(
    ("share", "text", "code"),
    [
        ("no", "no room", 2),
        ("full", "out/metrics.jsonl: No space left on device", 2),
        ("fault", f"ZeroDivisionError: division by zero; {FAULT}", 2),
    ],
)
def test_what_a_share_elsewhere_says_no_with_is_what_this_process_would_say(share: str, text: str, code: int) -> None:
    ((outcome,), heard) = _outcomes(_ends, [share], Processes(1))
    assert str(outcome.error).startswith(text)
    assert told(outcome.error or Exception())[0] == code
    assert not heard, "nobody goes on"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_an_interrupted_share_is_no_failure(name: str) -> None:
    outcomes, _ = _outcomes(_ends, ["interrupted"], LAUNCHERS[name]())
    assert [outcome.is_interrupted for outcome in outcomes] == [True]


def test_shares_that_are_told_to_stop_come_to_their_end_and_no_other_is_begun() -> None:
    launcher, begun = Processes(2), []

    def hear(number: int, message: object) -> None:
        begun.append(number)
        if len(begun) == 2:
            launcher.stop()

    outcomes = list(launcher.run(_waits, ["", "", "", ""], hear))
    assert [outcome.result for outcome in outcomes] == ["stopped", "stopped", None, None]
    assert [outcome.is_interrupted for outcome in outcomes] == [False, False, True, True]
    assert sorted(begun) == [0, 1]


@pytest.mark.parametrize("state", ["deaf", "halted"])
def test_shares_that_do_not_hear_are_ended_with_the_iterator(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(processes, "KILL_AFTER", 0.2)
    pids: list[int] = []

    def hear(number: int, message: object) -> None:
        pids.append(cast(int, message))
        if len(pids) == 2:
            if state == "halted":
                os.kill(pids[0], signal.SIGSTOP)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(Processes(2).run(_waits, ["deaf", "deaf"], hear))
    assert time.monotonic() - began < 20
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _collects(share: None, link: Link) -> tuple[bool, bool]:
    """Whether a share's process collects what is no longer used, and leaves out what its server has imported."""
    return gc.isenabled(), gc.get_freeze_count() > 1000


def test_a_share_collects_what_it_no_longer_uses_but_not_what_was_imported() -> None:
    outcomes, _ = _outcomes(_collects, [None], Processes(1))
    assert outcomes[0].result == (True, True)


def _faults(rounds: int, link: Link) -> int:
    """Pages that a share had to be given anew while it made 48 MiB of arrays and threw them away, round after round."""
    given = [0, 0]
    for at in (0, 1):
        for _ in range(rounds):
            arrays = [np.ones(2**18) for _ in range(24)]
            arrays.clear()
        given[at] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return given[1] - given[0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("keeps_freed", [True, False])
def test_shares_keep_freed_memory_for_their_next_arrays_where_they_are_to(keeps_freed: bool) -> None:
    """Given back in every round they would be up to 48 MiB / 4 KiB = 12,288 pages in each."""
    program = f"""
from aggcli.launch import processes
from tests.test_launch import _faults

processes.warm_up((), keeps_freed={keeps_freed})
(outcome,) = processes.Processes(1).run(_faults, [8], print)
print(outcome.result)
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 12_288) == keeps_freed


def test_an_own_setting_of_kept_memory_stays_and_nothing_is_left_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    mmap, trim = processes.KEPT_MEMORY
    monkeypatch.setenv(trim, "4096")
    monkeypatch.delenv(mmap, raising=False)
    monkeypatch.setattr(processes.multiprocessing, "set_forkserver_preload", lambda modules: None)
    begun_with: dict[str, str] = {}
    monkeypatch.setattr(processes.forkserver, "ensure_running", lambda: begun_with.update(os.environ))
    before = dict(os.environ)
    processes.warm_up((), keeps_freed=True)
    assert (begun_with[trim], begun_with[mmap]) == ("4096", processes.KEPT_MEMORY[mmap])
    assert dict(os.environ) == before


def test_the_shares_of_a_training_job_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(processes, "warm_up", lambda modules, *, keeps_freed=False: asked.append(keeps_freed))
    config = settings_from({"launcher": "processes"})
    preparation.warm_up(training.TrainingRequest("compare", config, rules_named(MODES, config.objective), (0,)))
    assert asked == [True]


class _Interrupted:
    """Sends a signal to its own process while it is thrown away, where Python drops what a handler raises."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.001)  # in which the handler is called


def _interrupted_while_it_throws_away(number: int, link: Link) -> str:
    _Interrupted(number)
    time.sleep(20)
    return "went on"


def test_an_interrupt_that_python_would_drop_ends_a_share_all_the_same(capfd) -> None:
    began = time.monotonic()
    outcomes, _ = _outcomes(_interrupted_while_it_throws_away, [processes.AT_ONCE], Processes(1))
    assert [outcome.is_interrupted for outcome in outcomes] == [True]
    assert time.monotonic() - began < 15
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("number", "ignored"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)])
def test_an_interrupt_that_python_would_drop_ends_a_command_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys, number: int, ignored: bool
) -> None:
    """`ignored`: in the background of a shell Ctrl-C is, and SIGTERM is not."""

    def app(*given: object, **named: object) -> None:
        _Interrupted(number)
        time.sleep(20)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("aggcli.cli.main.app", app)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    hook = sys.unraisablehook
    try:
        told = aggcli(capsys, "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (told.code, told.err) == (130, "aggcli: interrupted; what was recorded is kept\n")
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_other_errors_that_python_drops_are_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: shown.append(dropped.exc_type))

    class Broken:
        def __del__(self) -> None:
            raise ZeroDivisionError

    with none_dropped(lambda: None):
        Broken()
    assert shown == [ZeroDivisionError]


def test_closed_standard_streams_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    outcomes, _ = _outcomes(_squared, [3], Processes(1))
    assert outcomes[0].result[0] == 9


def test_a_script_without_a_guard_is_not_run_again_in_the_processes_that_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('begun')\n"
        "from aggcli.launch.processes import Processes\n"
        "from tests.test_launch import _squared\n"
        "print([outcome.result[0] for outcome in Processes(1).run(_squared, [2, 3], print)])\n"
    )
    told = completed(script, cwd=tmp_path)
    assert told.stdout.splitlines() == ["begun", "0 ('at', 2)", "1 ('at', 3)", "[4, 9]"], told.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone") / "out"
    return results_of("compare", *FLAGS, "--seeds=2", "--steps=4", "--shares=2", "--launcher=here", "--output", directory)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [2, 3])
def test_the_records_of_shares_are_the_same_wherever_they_run_and_as_those_of_one_stack_up_to_rounding(
    capsys, tmp_path: Path, alone: Path, shares: int
) -> None:
    directory = tmp_path / "out"
    alone = Path(shutil.copytree(alone, tmp_path / "alone"))
    flags = [*FLAGS, "--seeds=2", "--steps=4", f"--shares={shares}", "--workers=2"]
    told = aggcli(capsys, "compare", *flags, "--output", directory, "--json")
    assert told.code == 0, told.err
    manifest, expected = (json.loads((one / "manifest.json").read_text()) for one in (directory, alone))
    assert manifest["shares"] == shares
    assert manifest["runs"] == expected["runs"]
    assert json.loads(told.out)["modes"] == manifest["final"]["modes"]
    for name in manifest["runs"]:
        for file in ("metrics.jsonl", "layouts.jsonl"):
            assert _close(records(directory / name / file), records(alone / name / file)) < 1e-12
            assert shares != 2 or (directory / name / file).read_bytes() == (alone / name / file).read_bytes()
        own, other = (json.loads((one / name / "manifest.json").read_text()) for one in (directory, alone))
        assert own["evaluation"] == other["evaluation"]
    longer = [*FLAGS, "--seeds=2", "--steps=6", "--resume", "--output"]
    assert aggcli(capsys, "compare", *longer, directory, "--launcher=processes").code == 0
    assert json.loads((directory / "manifest.json").read_text())["shares"] == shares, "goes on as it was begun"
    assert aggcli(capsys, "compare", *longer, alone, "--launcher=here").code == 0
    last = Path(manifest["runs"][-1], "metrics.jsonl")
    assert _close(records(directory / last), records(alone / last)) < 1e-12
    assert len(records(alone / last)) == 6
    said = refused(aggcli(capsys, "compare", *longer, directory, "--shares=4"))
    assert f"--resume: shares is 4 now and was {shares} in {directory}" in said


def _close(a: object, b: object) -> float:
    """The largest difference of numbers at the same place; everything else must be equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        return max((_close(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b)
        return max((_close(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b)
    assert a == b
    return 0.0


def test_no_more_shares_than_runs_and_one_for_a_single_run(capsys, tmp_path: Path) -> None:
    assert aggcli(capsys, "run", *FLAGS, "--steps=1", "--workers=4", "--output", tmp_path / "run").code == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["shares"] == 1
    many = [*FLAGS, "--modes=token_mean,constant", "--seeds=1", "--steps=1", "--shares=9", "--launcher=here"]
    assert aggcli(capsys, "compare", *many, "--output", tmp_path / "two").code == 0
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["shares"] == 2
    for flag in ("--workers", "--shares"):
        assert f"{flag} 0: must be at least 1" in refused(aggcli(capsys, "compare", *FLAGS, f"{flag}=0"))
    said = refused(aggcli(capsys, "compare", *FLAGS, "--launcher=processes", "--dp=2"))
    assert "--launcher processes: ranks (--dp 2 --cp 1) share every run" in said
    assert "did you mean 'processes'?" in refused(aggcli(capsys, "compare", *FLAGS, "--launcher=process"))


@pytest.mark.slow
def test_a_run_that_diverges_in_another_process_is_named_once_and_the_others_go_on(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grid.runs_of
    monkeypatch.setattr(
        grid,
        "runs_of",
        lambda *given: [dataclasses.replace(run, lr=1e6) if run.mode == "constant" else run for run in made(*given)],
    )
    wild = ["--optimizer=sgd", "--clip-grad=0", "--lr=0.01", "--num-iterations=2", "--kl-coef=0.1", "--no-layout-records"]
    command = ["compare", *FLAGS, *wild, "--modes=token_mean,constant", "--seeds=1", "--workers=2"]
    told = aggcli(capsys, *command, "--steps=5", "--output", tmp_path / "out")
    assert told.code == 1
    assert told.err.count("note: run constant, seed 0 diverged in step ") == 1
    assert told.err.splitlines()[-1].startswith("aggcli: 1 of 2 runs diverged: run constant, seed 0 diverged in step ")
    assert len(records(tmp_path / "out" / "token_mean" / "seed-0" / "metrics.jsonl")) == 10
    assert 1 <= len(records(tmp_path / "out" / "constant" / "seed-0" / "metrics.jsonl")) < 10
    told = aggcli(capsys, *command, "--steps=6", "--output", tmp_path / "out", "--resume")
    assert told.code == 1
    assert told.err.count("note: run constant, seed 0 diverged in step ") == 1, "it stays where it was, and is still named"
    assert len(records(tmp_path / "out" / "token_mean" / "seed-0" / "metrics.jsonl")) == 12


def test_the_live_table_has_a_row_for_each_mode_of_all_shares() -> None:
    rules = [dataclasses.replace(SAMPLE_MEAN, name=mode) for mode in ("a", "b")]
    runs = [RunSpec(rule.name, 0, ObjectiveConfig(loss_aggregation=rule), 1e-3) for rule in rules]
    values = [{"samples": 4, "correct/count": 3, "raw_reward": 0.75, "pg_loss": None}, {"samples": 0, "raw_reward": None}]
    comparison = LayoutComparison(("dp1",), (), None, {})
    steps = [
        StepReport(0, "", (run.mode,), {run.mode: value}, [], comparison, "", False, [], {}, {}, {})
        for run, value in zip(runs, values, strict=True)
    ]
    reports = [RunReport(run, step, False) for run, step in zip(runs, steps, strict=True)]
    shown = training._numbers(TrainedStep(0, [[reports[0]], [reports[1]]], [], 1.0, 4, 0, {}))  # b took one more
    assert shown == [("a", values[0]), ("b", values[1])]
    other = ("a", {"raw_reward": 0.25, "correct/count": 2, "samples": 4, "pg_loss": -1.0})
    table = live._table("mode", [*shown, other], "caption")
    assert [list(column.cells) for column in table.columns] == [["a", "b"], ["0.5000", ""], ["0.6250", ""], ["-1.0000", ""]]


def test_a_share_has_a_line_with_the_time_that_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 of 8 steps were done 10 s ago, and 2 more since: the other 3 take 15 s."""
    monkeypatch.setattr(live.time, "perf_counter", lambda: 110.0)
    assert live._line(Progress(5, 1234.5), 8, 100.0, 3) == "step 5/8, 1,234 tokens/s, 15 s left"
    assert live._line(Progress(3, 1234.5), 8, 100.0, 3) == "step 3/8, 1,234 tokens/s"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_comparison_that_is_ended_while_it_is_prepared_in_another_process_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """It is prepared for long: nobody has taught this policy yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    process = started("compare", "--task-digits=5", "--seeds=2", "--workers=2", "--output", tmp_path / "out")
    begun: list[int] = []
    while process.poll() is None and not begun:
        begun = [prepares for child in _children(process.pid) for prepares in _children(child)]
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    until = time.monotonic() + 5  # which is less than the policy takes to be taught
    while any(Path(f"/proc/{one}").exists() for one in begun) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{one}").exists() for one in begun)
    _, errors = process.communicate()
    assert errors == ("aggcli: interrupted; what was recorded is kept\n" if code == 130 else "")
    assert not (tmp_path / "out").exists()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_process_ends_its_share_alone_and_the_job_is_resumable(tmp_path: Path, alone: Path) -> None:
    directory, steps = tmp_path / "out", 60
    command = ["compare", *FLAGS, "--seeds=2", "--checkpoint-every=2", f"--steps={steps}", "--workers=2", "--output", directory]
    process = started(*command)
    metrics = directory / MODES[0] / "seed-1" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    ((_, second),) = [sorted(found) for child in _children(process.pid) if len(found := _children(child)) == 2]
    os.kill(second, signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert f"note: share 2 (process {second}) was ended by SIGKILL; what was recorded is kept; the other shares go on" in errors
    assert errors.splitlines()[-1] == f"aggcli: share 2 (process {second}) was ended by SIGKILL; what was recorded is kept"
    assert "Traceback" not in errors
    assert json.loads((directory / "manifest.json").read_text())["status"] == "failed"
    done = metrics.read_bytes().count(b"\n")
    assert done < steps
    assert len(records(directory / MODES[0] / "seed-0" / "metrics.jsonl")) == steps
    process = started(*command, "--resume")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert re.search(rf"resuming {directory} at steps \d+ to {steps}", errors)
    for run in json.loads((directory / "manifest.json").read_text())["runs"]:
        lines = records(directory / run / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(steps))
        whole = records(alone / run / "metrics.jsonl")[:4]
        for line in [*lines, *whole]:  # evaluated where there is a checkpoint, which the two runs have at different steps
            line.pop("layout_deviation")
        assert lines[:4] == whole
