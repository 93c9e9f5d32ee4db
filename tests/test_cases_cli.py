"""cases/README.md, section 11: the command line (R75a, R75d, R75e, R75g)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import fx_b
from tests.test_cases_formulas import Cli, records, strict

# -- R75a -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize(
    "option", ["--eps-clipp", "--loss-agregation", "--layout", "--no-such-thing", "--modse"], ids=lambda option: option[2:]
)
def test_r75a_an_unknown_option_is_refused_by_name(tmp_path, capsys, command, option) -> None:
    told = Cli(tmp_path, capsys).replay(fx_b(), option, "1", command=command)
    assert option in told.refusal
    assert not told.output.exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("eps_clipp = 0.1", "unknown setting 'eps_clipp'; did you mean 'eps_clip'?"),
        ("[objective]\neps_clip = 0.1", "unknown setting 'objective'"),
        ("eps-clip = 0.1", "unknown setting 'eps-clip'; did you mean 'eps_clip'?"),
        ('eps_clip = "a lot"', "--eps-clip 'a lot': must be of type float"),
        ("eps_clip = 1.5", "--eps-clip 1.5: must be above 0 and below 1"),
        ('recipe = "grop"', "unknown recipe 'grop'; did you mean 'grpo'?"),
        ('layouts = ["dp2:contigous"]', "unknown partition rule 'contigous'; did you mean 'contiguous'?"),
        ('kl_estimator = "k4"', "--kl-estimator 'k4' is not one of its values"),
        ("eps_clip = ", "is not valid TOML"),
    ],
)
def test_r75a_a_wrong_config_file_is_refused_by_key(tmp_path, capsys, text, named) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert named in Cli(tmp_path, capsys).replay(fx_b(), "--config", path, command="run").refusal


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--loss-aggregation", "sample-mean"), "unknown loss aggregation 'sample-mean'; did you mean 'sample_mean'?"),
        (("--recipe", "dappo"), "unknown recipe 'dappo'; did you mean 'dapo'?"),
        (("--rollout-format", "slime-rolout"), "'slime-rolout' is unknown; did you mean 'slime-rollout'?"),
        (("--custom-pg-loss-reducer-function-path", "no.such:thing"), "no.such:thing"),
        (("--dtype", "float16"), "--dtype 'float16' is not one of its values"),
        (("--global-batch-size", "x"), "--global-batch-size"),
    ],
)
def test_r75a_a_wrong_value_is_refused_by_flag_or_name(tmp_path, capsys, flags, named) -> None:
    assert named in Cli(tmp_path, capsys).replay(fx_b(), *flags, command="run").refusal


def test_r75a_a_flag_beats_the_config_file_which_beats_the_recipe_which_beats_the_default(tmp_path, capsys) -> None:
    """eps_clip: default 0.2, file 0.3, flag 0.1; eps_clip_high: default none, recipe dapo 0.28, file 0.4."""
    cli = Cli(tmp_path, capsys)
    path = cli.file(fx_b())
    plain, more = tmp_path / "plain.toml", tmp_path / "more.toml"
    plain.write_text("eps_clip = 0.3\n")
    more.write_text('eps_clip = 0.3\neps_clip_high = 0.4\nrecipe = "dapo"\n')
    for flags, expected in (
        ((), (0.2, None, "sample_mean")),
        (("--config", plain), (0.3, None, "sample_mean")),
        (("--config", plain, "--eps-clip", 0.1), (0.1, None, "sample_mean")),
        (("--config", plain, "--recipe", "dapo"), (0.3, 0.28, "prompt_mean")),
        (("--config", more), (0.3, 0.4, "prompt_mean")),
        (("--config", more, "--eps-clip-high", 0.5, "--loss-aggregation", "token_mean"), (0.3, 0.5, "token_mean")),
    ):
        told = cli.replay(path, *flags, command="run")
        assert told.code == 0, told.err
        settings = strict((told.output / "manifest.json").read_text())["settings"]
        assert (settings["eps_clip"], settings["eps_clip_high"], settings["loss_aggregation"]) == expected


def test_r75a_a_recorded_config_gives_the_same_run_again(tmp_path, capsys) -> None:
    cli = Cli(tmp_path, capsys)
    path = cli.file(fx_b())
    first = cli.replay(path, "--eps-clip", 0.05, "--layouts", "dp1,dp2cp2", "--loss-aggregation", "token_mean", command="run")
    again = tmp_path / "again.toml"
    again.write_text(strict((first.output / "manifest.json").read_text())["config"])
    assert cli("run", "--config", again, "--output", tmp_path / "second").code == 0
    for name in ("metrics.jsonl", "layouts.jsonl"):
        assert (tmp_path / "second" / name).read_bytes() == (first.output / name).read_bytes()


# -- R75d -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "compare"])
def test_r75d_a_used_output_folder_is_refused_and_left_as_it_was(tmp_path, capsys, command) -> None:
    cli = Cli(tmp_path, capsys)
    path, output = cli.file(fx_b()), tmp_path / "out"
    arguments = (command, "--rollouts", path, "--output", output)
    assert cli(*arguments).code == 0
    before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
    line = cli(*arguments, "--eps-clip", 0.1).refusal
    assert str(output) in line
    assert "--overwrite" in line
    assert {file: file.read_bytes() for file in output.rglob("*") if file.is_file()} == before


def test_r75d_overwrite_replaces_and_never_mixes_old_and_new_steps(tmp_path, capsys) -> None:
    cli = Cli(tmp_path, capsys)
    path, output = cli.file(fx_b()), tmp_path / "out"
    assert cli("compare", "--rollouts", path, "--output", output, "--global-batch-size", 2).code == 0
    assert len(records(output / "token_mean" / "metrics.jsonl")) == 2
    assert cli("run", "--rollouts", path, "--output", output, "--overwrite").code == 0
    assert sorted(file.name for file in output.iterdir()) == ["layouts.jsonl", "manifest.json", "metrics.jsonl", "samples"]
    assert len(records(output / "metrics.jsonl")) == len(list((output / "samples").iterdir())) == 1


def test_r75d_overwrite_never_removes_a_folder_of_somebody_else(tmp_path, capsys) -> None:
    cli = Cli(tmp_path, capsys)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("five years")
    line = cli("run", "--rollouts", cli.file(fx_b()), "--output", mine, "--overwrite").refusal
    assert "is not a results directory" in line
    assert (mine / "thesis.txt").read_text() == "five years"


def test_r75d_without_an_output_folder_a_new_one_is_made_and_named(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli = Cli(tmp_path, capsys)
    path = cli.file(fx_b())
    for name in ("run-sample_mean", "run-sample_mean-2", "run-sample_mean-3"):
        told = cli("run", "--rollouts", path)
        assert f"recorded in results/{name}\n" in told.err
        assert len(records(Path("results") / name / "metrics.jsonl")) == 1


# -- R75e -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), *((command, "--help") for command in ("run", "compare", "inspect", "modes", "env"))],
    ids=" ".join,
)
def test_r75e_help_and_version_import_nothing_heavy(arguments) -> None:
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "aggcli", *arguments], capture_output=True, text=True, check=True
    )
    imported = {line.rsplit("|", 1)[-1].strip() for line in told.stderr.splitlines() if line.startswith("import time:")}
    assert "aggcli.cli.main" in imported
    assert not {"torch", "numpy", "pandas", "matplotlib", "pyarrow", "scipy"} & imported
    assert told.stdout.startswith(("aggcli ", "Usage: "))


# -- R75g -----------------------------------------------------------------------------------------------------------


def _unreadable(tmp_path: Path) -> dict[str, Path]:
    """Paths that hold no rollouts, each in its own way."""
    made = {name: tmp_path / name for name in ("missing.jsonl", "empty", "folder.jsonl", "picture.png", "cut.pt", "other")}
    made["empty"].mkdir()
    made["folder.jsonl"].mkdir()
    made["picture.png"].write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    made["cut.pt"].write_bytes(b"PK\x03\x04" + bytes(100))
    made["other"].mkdir()
    (made["other"] / "notes.txt").write_text("nothing here")
    return made | {"no*.jsonl": tmp_path / "no*.jsonl", "a name [nats]": tmp_path / "a name [nats]"}


@pytest.mark.parametrize("command", ["run", "compare", "inspect"])
@pytest.mark.parametrize(
    "name",
    ["missing.jsonl", "empty", "folder.jsonl", "picture.png", "cut.pt", "other", "no*.jsonl", "a name [nats]"],
)
def test_r75g_a_path_without_rollouts_is_refused_in_one_line_that_names_it(tmp_path, capsys, command, name) -> None:
    path = _unreadable(tmp_path)[name]
    arguments = ("inspect", path) if command == "inspect" else (command, "--rollouts", path, "--output", tmp_path / "out")
    line = Cli(tmp_path, capsys)(*arguments).refusal
    assert str(path) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--config", "{folder}"), "cannot be read"),
        (("--config", "{folder}/none.toml"), "cannot be read"),
        (("--output", "{file}"), "--output"),
        (("--output", "{file}/deeper"), "--output"),
    ],
    ids=["config folder", "config missing", "output file", "output below a file"],
)
def test_r75g_a_folder_for_a_file_or_a_file_for_a_folder_is_refused_in_one_line(tmp_path, capsys, flags, named) -> None:
    cli = Cli(tmp_path, capsys)
    path = cli.file(fx_b())
    given = [flag.format(folder=tmp_path, file=path) for flag in flags]
    output = () if "--output" in given else ("--output", tmp_path / "out")
    line = cli("run", "--rollouts", path, *output, *given).refusal
    assert named in line
    assert given[1] in line


def test_r75g_an_unknown_command_or_a_missing_argument_is_refused_by_name(tmp_path, capsys) -> None:
    cli = Cli(tmp_path, capsys)
    assert "rnu" in cli("rnu").refusal
    assert "Missing argument 'rollouts'" in cli("inspect").refusal
