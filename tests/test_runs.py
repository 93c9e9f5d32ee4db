"""`aggcli runs`: what is listed, shown and told apart, and that nothing is removed that aggcli did not write."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aggcli.config import RunConfig, to_flat
from aggcli.errors import RecordError
from aggcli.ownership import FIGURES, check_output
from aggcli.report.page import CAPTIONS
from tests.cli import aggcli, refused, strict_json

SETTINGS = {name: list(value) if isinstance(value, tuple) else value for name, value in to_flat(RunConfig()).items()}
ENVIRONMENT = {"aggcli": "0.1.0", "git_commit": "abc", "device": "cpu", "threads": 1, "packages": {"torch": "2.9.0"}}


def write_manifest(directory: Path, **facts: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps({"schema": 1, "status": "done", **facts}), encoding="utf-8")


def write_run(directory: Path, mode: str = "sample_mean", seed: int = 0, steps: int = 2, **facts: Any) -> Path:
    """A training run by hand, of steps whose pg_loss is their number plus a hundredth of the seed."""
    settings = SETTINGS | {"steps": 5, "seed": seed, "loss_aggregation": mode} | facts.pop("settings", {})
    shared = {"kind": "run", "command": "run", "arguments": ["run"], "mode": mode, "seed": seed, "environment": ENVIRONMENT}
    write_manifest(directory, **{**shared, "settings": settings, **facts})
    lines = [{"step": s, "rollout_step": s, "mode": mode, "seed": seed, "pg_loss": s + seed / 100} for s in range(steps)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (directory / "layouts.jsonl").write_text("", encoding="utf-8")
    return directory


def write_comparison(directory: Path, accuracies: Mapping[str, Iterable[float | None]], **facts: Any) -> Path:
    """Modes x seeds, with the accuracy after training of each, None where the run was not evaluated."""
    names = []
    for mode, values in accuracies.items():
        for seed, value in enumerate(values):
            names.append(f"{mode}/seed-{seed}")
            own = {"evaluation": {"accuracy": value}} if value is not None else {"diverged": "in step 1", "diverged_step": 1}
            write_run(directory / names[-1], mode, seed, 2 if value is not None else 1, **{**own, **facts})
    settings = SETTINGS | {"steps": 5} | facts.pop("settings", {})
    shared = {"kind": "comparison", "command": "compare", "arguments": ["compare"], "runs": names}
    write_manifest(directory, **{**shared, "environment": ENVIRONMENT, "settings": settings, **facts})
    return directory


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# -- list -----------------------------------------------------------------------------------------------------------


def test_a_comparison_and_a_run_are_one_line_each_with_steps_status_and_accuracy(capsys, tmp_path: Path) -> None:
    write_comparison(tmp_path / "deep" / "cmp", {"sample_mean": [0.5, 0.75], "constant": [0.25, None]})
    killed = write_run(tmp_path / "killed", "token_mean", 3, 4, status="running")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout_st')
    write_run(tmp_path / "replay", "constant", 0, 3, settings={"rollouts": ["example"]}, status="interrupted")
    told = aggcli(capsys, "runs", "list", tmp_path, "--json")
    (cmp, run, replay) = strict_json(told.out)["runs"]
    assert [one["name"] for one in (cmp, run, replay)] == ["deep/cmp", "killed", "replay"]
    assert (cmp["command"], cmp["modes"], cmp["seeds"]) == ("compare", ["sample_mean", "constant"], [0, 1])
    assert cmp["accuracy"] == {"sample_mean": {"mean": 0.625, "n": 2}, "constant": {"mean": 0.25, "n": 1}}
    assert (cmp["steps_done"], cmp["steps_planned"], cmp["diverged"]) == (2, 5, 1)  # the diverged run recorded 1
    assert (run["steps_done"], run["steps_planned"], run["status"], run["seeds"]) == (4, 5, "running", [3])
    assert (replay["steps_done"], replay["steps_planned"], replay["status"]) == (3, None, "interrupted")
    rows = [line.split() for line in aggcli(capsys, "runs", "list", tmp_path).out.splitlines() if " run " in line]
    assert [row[:6] for row in rows] == [
        ["killed", "run", "token_mean", "1", "4/5", "running"],
        ["replay", "run", "constant", "1", "3", "interrupted"],
    ]


def test_the_time_is_that_of_the_last_write(capsys, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    os.utime(run / "manifest.json", (1e9, 1e9))
    os.utime(run / "metrics.jsonl", (1.1e9, 1.1e9))
    (one,) = strict_json(aggcli(capsys, "runs", "list", tmp_path, "--json").out)["runs"]
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1.1e9))
    assert one["when"].startswith(local)


def test_broken_and_foreign_directories_are_skipped_with_a_note(capsys, tmp_path: Path) -> None:
    write_run(tmp_path / "fine")
    for at, text in enumerate(["{", "[]", '{"name": "app"}', '{"schema": 2}', "\xff", '{"schema": 1, "settings": []}']):
        (tmp_path / f"bad-{at}").mkdir()
        (tmp_path / f"bad-{at}" / "manifest.json").write_bytes(text.encode("latin-1"))
    write_manifest(tmp_path / "bad-6", runs=["sample_mean"])  # which is not there
    write_manifest(tmp_path / "bad-7", runs=[1])
    (write_run(tmp_path / "bad-8") / "metrics.jsonl").write_text("[]\n")
    (write_run(tmp_path / "bad-9") / "metrics.jsonl").write_text('{"step": "x"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "fine")
    told = aggcli(capsys, "runs", "list", tmp_path, "--json")
    assert told.code == 0
    assert [one["name"] for one in strict_json(told.out)["runs"]] == ["fine"]
    notes = told.err.splitlines()
    assert [re.findall(r"bad-\d", note)[0] for note in notes] == [f"bad-{at}" for at in range(10)]
    assert all(note.startswith("note: ") and note.endswith("; skipped") for note in notes)


def test_the_list_fits_80_columns_in_a_terminal_and_is_a_line_a_directory_in_a_pipe(capsys, tmp_path, monkeypatch) -> None:
    modes = ("sample_mean", "prompt_mean", "token_mean", "constant")
    write_comparison(tmp_path / "a-comparison-with-a-name-that-is-rather-long", dict.fromkeys(modes, (1 / 3, 2 / 3)))
    piped = aggcli(capsys, "runs", "list", tmp_path).out
    (row,) = [line for line in piped.splitlines() if "compare" in line]
    assert "sample_mean, prompt_mean, token_mean, constant" in row
    assert "0.5, 0.5, 0.5, 0.5" in row
    assert "a-comparison-with-a-name-that-is-rather-long" in row
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shown = re.sub(r"\x1b\[[\d;]*m", "", aggcli(capsys, "runs", "list", tmp_path).out).splitlines()
    assert max(map(len, shown)) <= 80
    for words in ("2/5", "done"):
        assert any(words in line.split() for line in shown), words
    for mode in modes:
        assert any(mode in line.split() and line.split()[-1] == "0.5" for line in shown), mode


def test_an_accuracy_stands_in_the_row_of_its_mode_however_the_mode_wraps(capsys, tmp_path: Path, monkeypatch) -> None:
    long = "verl-legacy:seq-mean-token-sum-norm"
    write_comparison(tmp_path / "a-comparison-with-a-long-name", {long: (0.25,), "b": (0.5,), "c": (0.75,)})
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shown = re.sub(r"\x1b\[[\d;]*m", "", aggcli(capsys, "runs", "list", tmp_path).out).splitlines()
    assert max(map(len, shown)) <= 80
    assert [line.split() for line in shown if line.strip()][-2:] == [["b", "0.5"], ["c", "0.75"]]


def test_of_many_modes_the_first_four_are_listed_and_the_others_counted(capsys, tmp_path: Path, monkeypatch) -> None:
    write_comparison(tmp_path / "cmp", {f"mode-{at}": (at / 100,) for at in range(44)})
    piped = aggcli(capsys, "runs", "list", tmp_path).out
    assert max(map(len, piped.splitlines())) < 200
    (row,) = [line for line in piped.splitlines() if "compare" in line]
    assert "mode-0, mode-1, mode-2, mode-3 and 40 others" in row
    assert "0, 0.01, 0.02, 0.03 and 40 others" in row
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    shown = aggcli(capsys, "runs", "list", tmp_path).out
    assert "and 40 others" in shown
    assert "mode-4" not in shown


@pytest.mark.slow
def test_a_thousand_directories_take_seconds_and_no_torch(tmp_path: Path) -> None:
    for at in range(1000):
        write_run(tmp_path / str(at))
    code = (
        "import sys, time; from aggcli.cli.main import main; start = time.process_time();"
        " code = main(['runs', 'list', sys.argv[1], '--json']); took = time.process_time() - start;"
        " sys.exit(f'{took:.1f} s' if took > 5 else 'torch' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 1000


def test_nothing_to_list_is_said_and_a_missing_folder_refused(capsys, tmp_path: Path) -> None:
    told = aggcli(capsys, "runs", "list", tmp_path)
    assert (told.code, told.out) == (0, "")
    assert "no results directory under" in told.err
    assert "is not a folder" in refused(aggcli(capsys, "runs", "list", tmp_path / "none"))


# -- show and diff --------------------------------------------------------------------------------------------------


def test_show_has_changed_settings_environment_files_and_the_last_steps_numbers(capsys, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "constant", 4, 3, settings={"lr": 0.01, "new_setting": 7})
    told = strict_json(aggcli(capsys, "runs", "show", run, "--json").out)
    assert told["settings"] == {
        "steps": {"value": 5, "default": 100},
        "lr": {"value": 0.01, "default": 3e-4},
        "seed": {"value": 4, "default": 0},
        "loss_aggregation": {"value": "constant", "default": "sample_mean"},
        "new_setting": {"value": 7, "default": None},
    }
    assert (told["environment"]["git_commit"], told["environment"]["torch"]) == ("abc", "2.9.0")
    assert told["files"] == {path.name: len(path.read_bytes()) for path in run.iterdir()}
    assert told["last"] == {".": {"step": 2, "rollout_step": 2, "mode": "constant", "seed": 4, "pg_loss": 2.04}}
    text = [line.split() for line in aggcli(capsys, "runs", "show", run).out.splitlines()]
    for row in (["lr", "0.01", "0.0003"], ["git_commit", "abc"], ["layouts.jsonl", "1", "0", "B"], ["pg_loss", "2.04"]):
        assert row in text, row


def test_show_of_a_comparison_is_the_mean_of_the_runs_that_recorded_its_last_step(capsys, tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "cmp", {"sample_mean": [0.5, 0.7, 0.6], "constant": [0.25, None, 0.3]})
    rows = [line.split() for line in aggcli(capsys, "runs", "show", folder).out.splitlines()]
    assert ["mean,", "n=3", "mean,", "n=2"] in [row[-4:] for row in rows]
    assert ["pg_loss", "1.01", "1.01"] in rows  # (1 + 1.01 + 1.02)/3, and without the diverged seed 1: (1 + 1.02)/2


def test_a_last_line_longer_than_the_first_read_from_the_end_is_found_whole(capsys, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=1)
    notes = ["x" * 100_000]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "notes": notes}) + '\n{"step": 2, "no')
    told = strict_json(aggcli(capsys, "runs", "show", run, "--json").out)
    assert told["last"]["."] == {"step": 1, "notes": notes}


def test_diff_names_what_numbers_depend_on_what_is_only_recorded_and_the_environment(capsys, tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", "constant", 0, settings={"lr": 0.001}, divisor=32.0)
    newer = {**ENVIRONMENT, "packages": {"torch": "2.10.0"}}
    b = write_run(
        tmp_path / "b", "constant", 1, settings={"checkpoint_every": 1, "log_to": ["trackio"]}, divisor=64.0, environment=newer
    )
    told = strict_json(aggcli(capsys, "runs", "diff", a, b, "--json").out)
    assert told["settings"] == [
        {"name": "loss_aggregation_divisor", "a": [32.0], "b": [64.0]},
        {"name": "lr", "a": [0.001], "b": [0.0003]},
    ]
    assert told["environment"] == [{"name": "torch", "a": ["2.9.0"], "b": ["2.10.0"]}]
    assert told["records"] == [
        {"name": "seeds", "a": [[0]], "b": [[1]]},
        {"name": "checkpoint_every", "a": [20], "b": [1]},
        {"name": "log_to", "a": [[]], "b": [["trackio"]]},
    ]
    assert told["final"]["what"] == "last recorded step"
    assert told["final"]["metrics"] == [
        {"mode": None, "metric": "pg_loss", "a": {"mean": 1.0, "n": 1}, "b": {"mean": 1.01, "n": 1}}
    ]


def test_diff_of_replays_names_no_setting_that_a_replay_does_not_read(capsys, tmp_path: Path) -> None:
    told = []
    for at, settings in enumerate([{"lr": 0.01, "eps_clip": 0.3}, {"synthetic_prompts": 3, "layers": 5}]):
        write_run(tmp_path / str(at), settings={"rollouts": ["example"], **settings})
    told = strict_json(aggcli(capsys, "runs", "diff", tmp_path / "0", tmp_path / "1", "--json").out)
    assert told["settings"] == [{"name": "eps_clip", "a": [0.3], "b": [0.2]}]
    assert [one["name"] for one in told["records"]] == ["synthetic_prompts", "lr", "layers"]


def test_diff_of_a_directory_with_itself_and_with_other_modes(capsys, tmp_path: Path) -> None:
    """A divisor that only the other's modes read is no difference of the settings: the modes differ."""
    both = write_comparison(tmp_path / "both", {"sample_mean": [0.5, 0.75], "constant": [0.25, 0.5]}, divisor=8.0)
    one = write_comparison(tmp_path / "one", {"sample_mean": [0.25]})
    same = aggcli(capsys, "runs", "diff", both, both)
    assert (same.code, same.out.count("nothing differs")) == (0, 4)
    assert "0.625" not in same.out
    told = strict_json(aggcli(capsys, "runs", "diff", both, one, "--json").out)
    assert (told["settings"], told["environment"]) == ([], [])
    assert [row["name"] for row in told["records"]] == ["modes", "seeds"]
    assert told["final"]["what"] == "after training, on fresh prompts"
    assert [(row["mode"], row["metric"], row["a"], row["b"]) for row in told["final"]["metrics"]] == [
        ("sample_mean", "accuracy", {"mean": 0.625, "n": 2}, {"mean": 0.25, "n": 1}),
        ("constant", "accuracy", {"mean": 0.375, "n": 2}, None),
    ]


def test_what_is_no_results_directory_is_refused_by_every_command(capsys, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (tmp_path / "mine").mkdir()
    for arguments in (("show", tmp_path / "mine"), ("diff", run, tmp_path / "mine"), ("rm", "--yes", tmp_path / "mine")):
        assert "is not a results directory" in refused(aggcli(capsys, "runs", *arguments))
    refused(aggcli(capsys, "runs"))
    refused(aggcli(capsys, "runs", "lst"))


# -- rm -------------------------------------------------------------------------------------------------------------


def test_rm_removes_what_it_names_and_nothing_beside_it(capsys, tmp_path: Path) -> None:
    kept = write_run(tmp_path / "kept")
    run = write_run(tmp_path / "run")
    for name in ("samples", "figures"):
        (run / name).mkdir()
    for name in ("samples/step-000000.parquet", "figures/learning_curves.svg", "figures/report.html", "checkpoint.safetensors"):
        (run / name).write_text("0123456789")
    for name in ("metrics.jsonl.before-resume", "layouts.jsonl.before-resume-2", "manifest.json.tmp"):
        (run / name).write_text("")
    cmp = write_comparison(tmp_path / "cmp", {"sample_mean": [0.5, 0.5], "constant": [0.5, 0.5]})
    before = snapshot(kept)
    sizes = [path.stat().st_size for path in run.rglob("*") if path.is_file()]
    told = aggcli(capsys, "runs", "rm", run, cmp, run, "--yes")
    assert told.code == 0
    assert f"{run}: {len(sizes)} files, {sum(sizes) / 1000:.1f} kB" in told.err
    assert f"{cmp}: 13 files, " in told.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert snapshot(kept) == before


@pytest.mark.parametrize(
    "foreign",
    [
        "thesis.txt",
        "metrics.jsonl.bak",
        "sample_mean/notes.md",
        "sample_mean/seed-0/thesis.txt",
        "sample_mean/seed-0/samples/mine.parquet",
        "sample_mean/seed-1/thesis.txt",
        "figures/thesis.docx",
        "figures/my_photo.png",
        "figures/learning_curves-old.png",
        "figures/my_report.html",
        "figures/more/curve.png",
        "figures/manifest.json",
        "samples-old/step-000000.parquet",
    ],
)
def test_neither_rm_nor_overwrite_touches_a_directory_that_holds_something_else(capsys, tmp_path: Path, foreign: str) -> None:
    folder = write_comparison(tmp_path / "cmp", {"sample_mean": [0.5, 0.5]})
    (folder / foreign).parent.mkdir(parents=True, exist_ok=True)
    (folder / foreign).write_text("five years")
    other, before = write_run(tmp_path / "other"), snapshot(tmp_path)
    line = refused(aggcli(capsys, "runs", "rm", "--yes", other, folder))
    assert "which aggcli did not write" in line
    with pytest.raises(RecordError, match="which aggcli did not write; choose another folder"):
        check_output(folder, overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("facts", [{"kind": "app"}, {"kind": None}, {"command": None}, {"settings": None}])
@pytest.mark.parametrize("part", [".", "sample_mean/seed-1"])
def test_a_manifest_that_is_not_one_of_aggclis_keeps_its_folder_from_being_removed_or_replaced(
    capsys, tmp_path: Path, facts: dict[str, Any], part: str
) -> None:
    folder = write_comparison(tmp_path / "cmp", {"sample_mean": [0.5, 0.5]})
    path = folder / part / "manifest.json"
    changed = {**json.loads(path.read_text()), **facts}
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    before = snapshot(tmp_path)
    said = "so aggcli did not write it; nothing is removed or replaced"
    assert said in refused(aggcli(capsys, "runs", "rm", "--yes", folder))
    with pytest.raises(RecordError, match=said):
        check_output(folder, overwrite=True)
    assert snapshot(tmp_path) == before


def test_every_figure_that_is_drawn_may_be_removed_with_its_run(capsys, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "figures").mkdir()
    for name in CAPTIONS:
        for ending in ("png", "svg", "pdf"):
            (run / "figures" / f"{name}.{ending}").write_text("")
    assert aggcli(capsys, "runs", "rm", "--yes", run).code == 0
    assert tuple(CAPTIONS) == FIGURES


def test_links_are_neither_followed_nor_removed(capsys, tmp_path: Path) -> None:
    run, mine = write_run(tmp_path / "run"), write_run(tmp_path / "mine")
    (tmp_path / "link").symlink_to(mine)
    for path in (tmp_path / "link", f"{tmp_path / 'link'}/", tmp_path / "link" / "x" / ".."):
        assert "is a link" in refused(aggcli(capsys, "runs", "rm", "--yes", path))
    for name, target in (("samples", mine), ("figures", mine), ("layouts.jsonl.tmp", mine / "layouts.jsonl")):
        (run / name).symlink_to(target)
        assert f"{name}, which aggcli did not write" in refused(aggcli(capsys, "runs", "rm", "--yes", run))
        (run / name).unlink()
    assert (mine / "metrics.jsonl").exists()
    assert run.exists()


def test_a_part_of_a_comparison_cannot_be_removed_on_its_own(capsys, tmp_path: Path, monkeypatch) -> None:
    folder = write_comparison(tmp_path / "cmp", {"sample_mean": [0.5, 0.5]})
    (tmp_path / "here").symlink_to(folder)
    monkeypatch.chdir(folder / "sample_mean")
    for part in (folder / "sample_mean" / "seed-0", folder / "sample_mean", tmp_path / "here" / "sample_mean", "seed-1", "."):
        line = refused(aggcli(capsys, "runs", "rm", "--yes", part))
        assert f"belongs to the comparison {folder}" in line
    assert (folder / "sample_mean" / "seed-1" / "manifest.json").exists()


class Terminal(io.StringIO):
    """Standard input at which somebody types."""

    def isatty(self) -> bool:
        return True


def test_rm_asks_at_a_terminal_and_refuses_without_one(capsys, tmp_path: Path, monkeypatch) -> None:
    run = write_run(tmp_path / "run", status="running")
    assert "give --yes" in refused(aggcli(capsys, "runs", "rm", run))
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    told = aggcli(capsys, "runs", "rm", run)
    assert told.code == 0
    assert f"Remove {run}? [y/N]" in told.err
    assert "still running" in told.err
    assert "nothing was removed" in told.err
    assert run.exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert aggcli(capsys, "runs", "rm", run).code == 0
    assert not run.exists()
