"""--log-to: what TensorBoard's own reader and trackio's database hold is what metrics.jsonl holds, number by number."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from aggcli import sinks
from aggcli.analysis.histories import read_histories
from aggcli.analysis.settings import differences, labelled
from aggcli.config import settings_from
from aggcli.errors import RecordError, SettingError
from aggcli.measurement.catalogue import describe
from aggcli.ownership import fresh_directory
from tests.cli import ROOT, aggcli, completed, environment, refused, results_of, strict_json, write_jsonl
from tests.fixtures import fx_b, fx_e
from tests.speed import few
from tests.train_worker import flags

FLAGS = flags(steps=None)
RUN = ["run", *FLAGS, "--checkpoint-every=2", "--no-layout-records"]
COMPARE = ["compare", "--modes=sample_mean,token_mean", "--seeds=2", *FLAGS, "--no-layout-records"]
Curves = dict[str, list[tuple[int, float]]]

STAND_IN = '''
"""What aggcli uses of trackio 0.43, with its habits: it prints, reads where to write on import, and has one current run."""
import contextvars, json, os, sqlite3
from pathlib import Path

TRACKIO_DIR = Path(os.environ["TRACKIO_DIR"])
_current = contextvars.ContextVar("current", default=None)
SEEN = {name: value for name, value in os.environ.items() if name.startswith(("TRACKIO_", "HF_HUB_"))}
print("* trackio is imported")

class Run:
    def __init__(self, project, name, config):
        TRACKIO_DIR.mkdir(parents=True, exist_ok=True)
        self.name, self.done, self.waiting = name, False, []
        self.file = TRACKIO_DIR / f"{project}.db"
        self.write("create table if not exists configs (run_name, config)")
        self.write("create table if not exists metrics (run_name, step, metrics)")
        self.write("insert into configs values (?, ?)", (name, json.dumps(config)))
    def write(self, *statement):
        with sqlite3.connect(self.file) as base:
            base.execute(*statement)
        base.close()
    def log(self, metrics, step=None):
        assert not self.done, "logged to a run that was finished"
        self.waiting.append((self.name, step, json.dumps(metrics)))
    def finish(self):
        print("* Run finished")
        self.done = True
        for row in self.waiting:
            self.write("insert into metrics values (?, ?, ?)", row)
        self.waiting = []

class Found:
    def __init__(self, project, name):
        self.file, self.name = TRACKIO_DIR / f"{project}.db", name
    def delete(self):
        for table in ("configs", "metrics"):
            Run.write(self, f"delete from {table} where run_name = ?", (self.name,))

class Api:
    def runs(self, project):
        with sqlite3.connect(TRACKIO_DIR / f"{project}.db") as base:
            names = base.execute("select distinct run_name from metrics").fetchall()
        base.close()
        return [Found(project, name) for (name,) in names]

def init(project, name=None, config=None, resume="never", embed=True, auto_log_gpu=None, auto_log_cpu=None):
    if _current.get() is not None:
        _current.get().finish()
    if project.startswith("registry-"):
        raise ValueError(f"Project name {project!r} is not allowed")
    assert (resume, embed, auto_log_gpu, auto_log_cpu) == ("never", False, False, False)
    print(f"* Trackio project initialized: {project}")
    run = Run(project, name, config)
    _current.set(run)
    return run
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `trackio` that is not imported yet, and an environment that the test gets back as it was."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    for name in ("TRACKIO_DIR", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "of the user")
    yield
    sys.modules.pop("trackio", None)


def recorded(run: Path, kind: type = np.float64) -> Curves:
    """Every number of metrics.jsonl but the step and the seed, as that kind of float: name -> [(step, value)]."""
    found: Curves = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for name, value in line.items():
            if type(value) in (int, float) and name not in ("step", "seed"):
                found.setdefault(name, []).append((line["step"], float(kind(value))))
    return found


def events(run: Path) -> EventAccumulator:
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def shown(run: Path) -> Curves:
    """What TensorBoard shows of a run."""
    found = events(run)
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def tracked(results: Path) -> dict[str, Curves]:
    """What trackio's database holds: run -> name -> [(step, value)]."""
    base = sqlite3.connect(results / "trackio" / f"{results.name}.db")
    found: dict[str, Curves] = {}
    for name, step, text in base.execute("select run_name, step, metrics from metrics order by rowid"):
        for metric, value in json.loads(text).items():
            found.setdefault(name, {}).setdefault(metric, []).append((step, value))
    base.close()
    return found


def configs(results: Path) -> list[tuple[str, dict[str, Any]]]:
    """The name and the settings of every run in trackio's database."""
    base = sqlite3.connect(results / "trackio" / f"{results.name}.db")
    found = [(name, json.loads(text)) for name, text in base.execute("select run_name, config from configs order by run_name")]
    base.close()
    return found


# -- TensorBoard ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two modes x two seeds, three rollout steps of two optimizer steps each, mirrored into TensorBoard."""
    directory = tmp_path_factory.mktemp("trained") / "out"
    return results_of(*COMPARE, "--steps=3", "--global-batch-size=8", "--log-to=tensorboard", "--output", directory)


def test_tensorboard_shows_every_number_of_every_run_at_its_optimizer_step_to_the_last_bit_of_float32(trained: Path) -> None:
    for mode in ("sample_mean", "token_mean"):
        for seed in (0, 1):
            run = trained / mode / f"seed-{seed}"
            assert shown(run) == recorded(run, np.float32)
            assert [step for step, _ in shown(run)["pg_loss"]] == [0, 1, 2, 3, 4, 5]
            assert [value for _, value in shown(run)["rollout_step"]] == [0, 0, 1, 1, 2, 2]


def test_names_are_those_of_the_catalogue_and_what_is_null_or_no_number_is_left_out(capsys, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [s | {"reward": 0} for s in fx_e()])
    arguments = ["compare", "--rollouts", path, "--log-to", "tensorboard", "--output", tmp_path / "o"]
    assert aggcli(capsys, *arguments).code == 0
    for mode in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        run = tmp_path / "o" / mode
        line = strict_json((run / "metrics.jsonl").read_text())
        assert line["correct/response_length"] is None
        assert shown(run) == recorded(run, np.float32)
        for absent in ("correct/response_length", "empty", "source", "mode", "seed", "step"):
            assert absent not in shown(run)
        for name in shown(run):
            assert name == "layout_deviation" or describe(name).name == name
    assert len({shown(tmp_path / "o" / mode)["total_weight"][0] for mode in ("sample_mean", "constant")}) == 2


def test_the_settings_are_there_as_text_and_as_hparams_with_the_runs_own_mode_and_seed(trained: Path) -> None:
    run = trained / "token_mean" / "seed-1"
    found = events(run)
    text = found.Tensors("settings")[0].tensor_proto.string_val[0].decode()
    assert text == "```toml\n" + json.loads((run / "manifest.json").read_text())["config"] + "```"
    (content,) = (found.summary_metadata["_hparams_/session_start_info"].plugin_data.content,)
    hparams = parse_session_start_info_plugin_data(content).hparams
    assert hparams["mode"].string_value == "token_mean"
    assert hparams["seed"].number_value == 1
    assert hparams["lr"].number_value == 3e-4
    assert hparams["log_to"].string_value == "tensorboard"
    assert hparams["dynamic_sampling"].bool_value is False
    assert "eps_clip_high" not in hparams, "what is not set is left out"


@pytest.mark.slow
def test_the_records_are_the_same_bytes_with_a_sink_and_the_runs_are_of_the_same_arm(
    capsys, trained: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    assert aggcli(capsys, *COMPARE, "--steps=3", "--global-batch-size=8", "--output", plain).code == 0
    for run in ("sample_mean/seed-0", "token_mean/seed-1"):
        assert (plain / run / "metrics.jsonl").read_bytes() == (trained / run / "metrics.jsonl").read_bytes()
    assert not list(plain.rglob("tensorboard"))
    runs = labelled(read_histories([plain, trained])[0])
    assert {run.label for run in runs} == {"sample_mean", "token_mean"}
    assert not differences(runs)


@pytest.mark.slow
def test_a_resumed_run_shows_each_step_once_though_it_was_ended_past_its_checkpoint_in_the_middle_of_an_event(
    capsys, tmp_path: Path
) -> None:
    directory, checkpoint = tmp_path / "out", tmp_path / "out" / "checkpoint.safetensors"
    run = [*RUN, "--global-batch-size=8", "--log-to=tensorboard", "--output", directory]
    assert aggcli(capsys, *run, "--steps=5").code == 0
    shutil.copy(checkpoint, tmp_path)
    assert aggcli(capsys, *run, "--steps=8", "--resume").code == 0
    once = shown(directory)
    assert once == recorded(directory, np.float32)
    shutil.copy(tmp_path / checkpoint.name, checkpoint)  # as a run killed in step 8 with a checkpoint of step 5
    with sorted((directory / "tensorboard").iterdir())[-1].open("ab") as file:
        file.write(b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7f")
    assert aggcli(capsys, *run, "--steps=8", "--resume").code == 0
    assert len(list((directory / "tensorboard").iterdir())) == 3
    assert shown(directory) == recorded(directory, np.float32) == once
    assert [step for step, _ in once["pg_loss"]] == list(range(16))
    assert {entry.step for entry in events(directory).Tensors("settings")} == {0, 10}, "the settings of each start"


def test_event_files_that_were_deleted_are_made_again_from_the_records_on_resume(capsys, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    run = [*RUN, "--log-to=tensorboard", "--output", directory]
    assert aggcli(capsys, *run, "--steps=2").code == 0
    shutil.rmtree(directory / "tensorboard")
    assert aggcli(capsys, *run, "--steps=4", "--resume").code == 0
    assert shown(directory) == recorded(directory, np.float32)
    assert len(shown(directory)["pg_loss"]) == 4


@pytest.mark.slow
def test_only_the_root_writes_when_there_are_several_ranks(tmp_path: Path) -> None:
    told = completed("-m", "aggcli", *RUN, "--steps=2", "--dp=2", "--log-to=tensorboard", "--output", tmp_path / "out")
    assert told.returncode == 0, told.stderr
    assert len(list((tmp_path / "out" / "tensorboard").iterdir())) == 1
    assert shown(tmp_path / "out") == recorded(tmp_path / "out", np.float32)


# -- trackio --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", few([1, 2]))
def test_trackio_gets_every_number_of_every_run_as_it_is_under_the_name_of_the_results_and_of_mode_and_seed(
    capsys, stand_in: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shares: int
) -> None:
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
        monkeypatch.setenv(name, "https://elsewhere")
    directory = tmp_path / "first"
    arguments = [*COMPARE, "--steps=3", "--log-to=trackio", "--log-to=tensorboard", "--output", directory, "--json"]
    told = aggcli(capsys, *arguments, "--launcher=here", "--shares", shares)
    assert told.code == 0
    strict_json(told.out)  # nothing that trackio prints is among it
    assert all(line.startswith("note: ") for line in told.err.splitlines())
    runs = {
        f"{mode}/seed-{seed}": directory / mode / f"seed-{seed}" for mode in ("sample_mean", "token_mean") for seed in (0, 1)
    }
    assert tracked(directory) == {name: recorded(run) for name, run in runs.items()}
    assert all(shown(run) == recorded(run, np.float32) for run in runs.values())
    settings = {name: (config["mode"], config["seed"]) for name, config in configs(directory)}
    assert settings == {name: (name.split("/")[0], int(name[-1])) for name in runs}
    seen = sys.modules["trackio"].SEEN
    assert seen == {
        "TRACKIO_DIR": str(directory / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def test_a_replay_is_mirrored_too(capsys, stand_in: None, tmp_path: Path) -> None:
    rollouts = write_jsonl(tmp_path / "x.jsonl", fx_b())
    directory = tmp_path / "second"
    arguments = ["run", "--rollouts", rollouts, "--loss-aggregation=token_mean", "--log-to=tensorboard,trackio"]
    assert aggcli(capsys, *arguments, "--output", directory).code == 0
    assert tracked(directory) == {"token_mean/seed-0": recorded(directory)}
    assert shown(directory) == recorded(directory, np.float32)
    assert shown(directory)["pg_loss"] == [(0, float(np.float32(0.171875)))]  # FX-B's closed form


@pytest.mark.slow
def test_trackio_holds_each_step_once_after_a_resume(capsys, stand_in: None, tmp_path: Path) -> None:
    directory, checkpoint = tmp_path / "out", tmp_path / "out" / "checkpoint.safetensors"
    run = [*RUN, "--log-to=trackio", "--output", directory]
    assert aggcli(capsys, *run, "--steps=3").code == 0
    shutil.copy(checkpoint, tmp_path)
    assert aggcli(capsys, *run, "--steps=5", "--resume").code == 0
    shutil.copy(tmp_path / checkpoint.name, checkpoint)
    assert aggcli(capsys, *run, "--steps=5", "--resume").code == 0
    assert tracked(directory) == {"sample_mean/seed-0": recorded(directory)}
    assert len(configs(directory)) == 1
    assert [step for step, _ in recorded(directory)["pg_loss"]] == [0, 1, 2, 3, 4]


def test_what_trackio_cannot_do_is_refused_in_one_line(capsys, stand_in: None, tmp_path: Path) -> None:
    rollouts = write_jsonl(tmp_path / "x.jsonl", fx_b())
    run = ["run", "--rollouts", rollouts, "--log-to=trackio", "--output"]
    said = refused(aggcli(capsys, *run, tmp_path / "registry-1"))
    assert "Project name 'registry-1' is not allowed; choose another --output" in said
    said = refused(aggcli(capsys, *run, tmp_path / "other"))
    assert f"this process writes into {tmp_path / 'registry-1' / 'trackio'} already" in said


@pytest.mark.slow
def test_the_real_trackio_holds_what_metrics_jsonl_holds_and_nothing_reaches_the_network_or_stdout(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    refuse = (
        "connect = socket.socket.connect\n"
        "def refuse(*given):\n"
        "    if isinstance(given[0], socket.socket) and given[0].family == socket.AF_UNIX:\n"  # processes of this machine
        "        return connect(*given)\n"
        "    os.write(2, f'connects to {given[1:]}'.encode())\n"
        "    os._exit(9)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, socket\n{refuse}socket.socket.connect = socket.getaddrinfo = refuse\n"
    )
    directory = tmp_path / "out"
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    own = environment(PYTHONPATH=paths, HF_TOKEN="x", TRACKIO_SPACE_ID="a/b")

    def run(steps: int, *more: str) -> None:
        command = [*COMPARE, "--workers=2", f"--steps={steps}", "--checkpoint-every=2", "--log-to=trackio", "--json"]
        told = completed("-W", "error", "-m", "aggcli", *command, "--output", directory, *more, env=own)
        assert told.returncode == 0, told.stderr
        strict_json(told.stdout)
        assert all(line.startswith("note: ") for line in told.stderr.splitlines()), told.stderr

    runs = {
        f"{mode}/seed-{seed}": directory / mode / f"seed-{seed}" for mode in ("sample_mean", "token_mean") for seed in (0, 1)
    }
    run(3)
    assert tracked(directory) == {name: recorded(run) for name, run in runs.items()}
    run(5, "--resume")
    assert tracked(directory) == {name: recorded(run) for name, run in runs.items()}
    assert [name for name, _ in configs(directory)] == sorted(runs)
    assert len(recorded(directory / "token_mean" / "seed-1")["pg_loss"]) == 5
    assert fresh_directory(directory, "out", overwrite=True) == directory


# -- what is refused, and what is left alone --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["run"], ["compare"], ["run", "--rollouts=example"], ["compare", "--rollouts=example"]])
@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_library_that_is_missing_is_refused_before_any_work_with_the_extra_to_install(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], name: str
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda asked: None if asked == name else find_spec(asked))
    monkeypatch.chdir(tmp_path)
    said = refused(aggcli(capsys, *command, f"--log-to={name}", "--output=out"))
    assert said == (
        f"aggcli: --log-to {name}: the {name} library is not installed; install aggcli[{name}], or leave {name} out"
    )
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_working_directory_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a_sink_nobody_has_installed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("a_sink_nobody_has_installed") is not None, "Python would import it"
    with pytest.raises(SettingError, match=r"install aggcli\[a_sink_nobody_has_installed\]"):
        sinks.need(["a_sink_nobody_has_installed"])
    sinks.need(["tensorboard"])


def test_what_is_not_finite_or_no_number_is_not_given_to_a_sink() -> None:
    line = {"step": 3, "seed": 1, "pg_loss": float("nan"), "ratio_max": float("inf"), "loss": None, "empty": True, "notes": []}
    assert sinks.numbers(line | {"mode": "a", "samples": 4, "grad_norm": -0.5}) == {"samples": 4, "grad_norm": -0.5}


def test_the_setting_is_a_list_with_commas_or_repeated_and_an_unknown_name_is_refused(capsys) -> None:
    for given in (["--log-to=tensorboard,trackio"], ["--log-to=tensorboard", "--log-to=trackio"]):
        assert 'log_to = ["tensorboard", "trackio"]' in aggcli(capsys, "run", *given, "--dry-run").out
    assert "log_to = []" in aggcli(capsys, "compare", "--dry-run").out
    assert settings_from({"log_to": "trackio"}).log_to == ("trackio",)
    assert "did you mean 'tensorboard'?" in refused(aggcli(capsys, "run", "--log-to=tensorbord"))


@pytest.mark.slow
def test_no_sink_is_imported_unless_it_is_asked_for_and_none_brings_torch_or_tensorflow(tmp_path: Path) -> None:
    rollouts = write_jsonl(tmp_path / "x.jsonl", fx_b())
    code = (
        "import sys\nfrom aggcli.cli.main import main\nassert main(sys.argv[1:]) == 0\n"
        "print(*(name for name in ('tensorboard', 'trackio', 'tensorflow', 'torch.utils.tensorboard') if name in sys.modules))"
    )
    for more, expected in (([], ""), (["--log-to=tensorboard"], "tensorboard")):
        output = tmp_path / str(len(more))
        command = ("run", f"--rollouts={rollouts}", "--json", f"--output={output}", *more)
        told = completed("-W", "error", "-c", code, *command)
        assert told.returncode == 0, told.stderr
        answer, imported, _ = told.stdout.split("\n")
        assert strict_json(answer)["schema"] == 1
        assert imported == expected


@pytest.mark.slow
def test_a_results_directory_with_mirrors_can_be_overwritten_but_not_one_with_something_else_among_them(
    capsys, stand_in: None, tmp_path: Path
) -> None:
    rollouts = write_jsonl(tmp_path / "x.jsonl", fx_b())
    arguments: list[Any] = ["compare", "--rollouts", rollouts, "--log-to=tensorboard,trackio", "--output", tmp_path / "out"]
    assert aggcli(capsys, *arguments).code == 0
    assert aggcli(capsys, *arguments, "--overwrite").code == 0
    (tmp_path / "out" / "token_mean" / "tensorboard" / "notes.txt").write_text("mine")
    assert "notes.txt, which aggcli did not write" in refused(aggcli(capsys, *arguments, "--overwrite"))


def test_a_trackio_that_cannot_be_imported_is_one_line(stand_in: None, tmp_path: Path) -> None:
    (tmp_path / "library" / "trackio.py").write_text("import a_module_nobody_has_installed")
    with pytest.raises(RecordError, match=r"cannot be imported \(No module named 'a_module_nobody_has_installed'\)"):
        sinks.Sinks(["trackio"], tmp_path).of_run(tmp_path, {})
