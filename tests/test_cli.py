"""The command line: what it refuses and by which name, what it leaves on disk, and how it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import aggcli, exactly, records, refused, replay, strict_json, write_jsonl
from tests.fixtures import FX_B, fx_b
from tests.speed import few

# -- names and values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize(
    "option", ["--eps-clipp", "--loss-agregation", "--layout", "--no-such-thing", "--modse"], ids=lambda option: option[2:]
)
def test_an_unknown_option_is_refused_by_name(tmp_path, capsys, command, option) -> None:
    told = replay(capsys, tmp_path, fx_b(), option, "1", command=command)
    assert option in refused(told)
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
def test_a_wrong_config_file_is_refused_by_key(tmp_path, capsys, text, named) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    said = refused(replay(capsys, tmp_path, fx_b(), "--config", path, command="run"))
    assert named in said
    if "unknown setting" in named:
        assert f"--config {path}: {named}" in said


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
def test_a_wrong_value_is_refused_by_flag_or_name(tmp_path, capsys, flags, named) -> None:
    assert named in refused(replay(capsys, tmp_path, fx_b(), *flags, command="run"))


def test_a_flag_beats_the_config_file_which_beats_the_recipe_which_beats_the_default(tmp_path, capsys) -> None:
    """eps_clip: default 0.2, file 0.3, flag 0.1; eps_clip_high: default none, recipe dapo 0.28, file 0.4."""
    path = write_jsonl(tmp_path / "rollouts.jsonl", fx_b())
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
        told = replay(capsys, tmp_path, path, *flags, command="run")
        assert told.code == 0, told.err
        settings = strict_json((told.output / "manifest.json").read_text())["settings"]
        assert (settings["eps_clip"], settings["eps_clip_high"], settings["loss_aggregation"]) == expected


def test_a_recorded_config_gives_the_same_run_again(tmp_path, capsys) -> None:
    path = write_jsonl(tmp_path / "rollouts.jsonl", fx_b())
    first = replay(
        capsys, tmp_path, path, "--eps-clip", 0.05, "--layouts", "dp1,dp2cp2", "--loss-aggregation", "token_mean", command="run"
    )
    again = tmp_path / "again.toml"
    again.write_text(strict_json((first.output / "manifest.json").read_text())["config"])
    assert aggcli(capsys, "run", "--config", again, "--output", tmp_path / "second").code == 0
    for name in ("metrics.jsonl", "layouts.jsonl"):
        assert (tmp_path / "second" / name).read_bytes() == (first.output / name).read_bytes()


def test_token_mean_and_calculate_per_token_loss_are_one_thing(tmp_path, capsys) -> None:
    one = replay(capsys, tmp_path, fx_b(), "--loss-aggregation", "token_mean", command="run")
    other = replay(capsys, tmp_path, fx_b(), "--calculate-per-token-loss", command="run")
    (first, second) = (strict_json((told.output / "metrics.jsonl").read_text()) for told in (one, other))
    assert first["mode"] == "token_mean"
    assert first["pg_loss"] == exactly(FX_B["token_mean"])
    assert {**second, "source": first["source"]} == first


def test_a_divisor_under_another_mode_is_unused_and_said_so(tmp_path, capsys) -> None:
    told = replay(capsys, tmp_path, fx_b(), "--loss-aggregation-divisor", 10, command="run")
    assert told.code == 0
    assert "unused" in told.err


def test_a_dry_run_prints_settings_that_config_reads_back_and_writes_nothing(tmp_path, capsys) -> None:
    first = replay(capsys, tmp_path, fx_b(), "--recipe", "dr_grpo", "--dry-run", command="run")
    (tmp_path / "c.toml").write_text(first.out)
    second = aggcli(capsys, "run", "--config", tmp_path / "c.toml", "--dry-run")
    assert first.code == second.code == 0
    assert 'loss_aggregation = "constant"' in first.out
    assert second.out == first.out
    assert not first.output.exists()


def test_a_custom_reducer_wins_over_the_mode_and_says_so(tmp_path, capsys, monkeypatch) -> None:
    """The masked sum over 1000: (-.55*1 + .5*3 - .55*4 + .5*8) / 1000."""
    (tmp_path / "mine_reducer.py").write_text(
        "def halves(total_lengths, response_lengths, loss_masks, per_token):\n"
        "    assert total_lengths == [4, 6, 7, 11] and per_token is True\n"
        "    def reduce(x):\n"
        "        parts = x.split(response_lengths)\n"
        "        return sum((p * m).sum() for p, m in zip(parts, loss_masks)) / 1000\n"
        "    return reduce\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--loss-aggregation", "token_mean", "--custom-pg-loss-reducer-function-path")
    told = replay(capsys, tmp_path, fx_b(), *flags, "mine_reducer:halves", "--json", command="run")
    assert "takes precedence over --loss-aggregation token_mean" in told.err
    assert told.modes["custom"]["pg_loss"] == exactly(2.75 / 1000)
    assert "thirds" in refused(replay(capsys, tmp_path, fx_b(), *flags, "mine_reducer:thirds", command="run"))


# -- replay and train: compare's uses by their own names ---------------------------------------------------------------


def test_replay_and_train_have_the_settings_of_compare_and_only_their_own_options(capsys) -> None:
    for own, whole in (
        (("replay", "example", "--modes=token_mean"), ("compare", "--rollouts=example", "--modes=token_mean")),
        (("train", "--seeds=2", "--steps=4"), ("compare", "--seeds=2", "--steps=4")),
        (("train", "example", "--steps=2"), ("compare", "--rollouts=example", "--train", "--steps=2")),
    ):
        told = [aggcli(capsys, *arguments, "--dry-run") for arguments in (own, whole)]
        assert (told[0].code, told[0].err) == (0, "")
        assert told[0].out == told[1].out
    for own in (
        ("replay", "example", "--lr=0.1"),
        ("replay", "example", "--baseline=constant"),
        ("train", "--synthetic-tail=0.1"),
    ):
        assert f"No such option: {own[-1].partition('=')[0]}" in refused(aggcli(capsys, *own))


def test_a_replay_without_rollouts_and_a_training_that_is_none_are_refused_in_a_line(tmp_path, capsys) -> None:
    assert "replay: no rollouts are given; name a file" in refused(aggcli(capsys, "replay"))
    (tmp_path / "c.toml").write_text('rollouts = ["example"]\n')
    assert "names rollouts and not train = true" in refused(aggcli(capsys, "train", "--config", tmp_path / "c.toml"))
    (tmp_path / "c.toml").write_text("train = true\n")
    assert "replay: --config trains" in refused(aggcli(capsys, "replay", "example", "--config", tmp_path / "c.toml"))


# -- answers ----------------------------------------------------------------------------------------------------------


def test_json_has_the_default_layouts_and_a_share_of_every_rank(tmp_path, capsys) -> None:
    told = replay(capsys, tmp_path, fx_b(), "--json")
    assert strict_json(told.out)["schema"] == 1
    layouts = told.modes["sample_mean"]["layouts"]
    assert list(layouts) == ["dp1:first-fit", "dp2:interleaved", "dp2:contiguous", "dp4:balanced"]
    ranks = layouts["dp4:balanced"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert sum(rank["pg_loss"] for rank in ranks) == exactly(FX_B["sample_mean"])
    assert sum(rank["samples"] for rank in ranks) == 4
    assert sum(rank["correct/count"] for rank in ranks) == layouts["dp4:balanced"]["correct/count"] == 2


def test_a_manifest_says_that_the_run_is_done_and_with_which_versions(tmp_path, capsys) -> None:
    manifest = strict_json((replay(capsys, tmp_path, fx_b(), command="run").output / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert {"torch", "numpy"} <= manifest["environment"]["packages"].keys()


def test_a_file_of_lengths_alone_works_and_says_what_is_skipped(tmp_path, capsys) -> None:
    told = replay(capsys, tmp_path, [{"response_length": 3}, {"response_length": 5}])
    assert told.code == 0
    assert "needs reward" in told.out
    assert "needs advantage, or reward and group_index" in " ".join(told.out.split())
    (line,) = records(told.output / "sample_mean" / "metrics.jsonl")
    assert "pg_loss" not in line
    assert line["total_weight"] == 1.0


@pytest.mark.parametrize(
    "command", few([["modes"], ["runs", "schema"], ["compare", "--rollouts", "example", "--output", "out"]])
)
def test_a_reader_that_has_seen_enough_is_no_fault(tmp_path: Path, command: list[str]) -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    told = subprocess.run([sys.executable, "-m", "aggcli", *command], stdout=reader.stdin, stderr=subprocess.PIPE, cwd=tmp_path)
    assert reader.stdin is not None
    reader.stdin.close()
    assert told.returncode == 0, told.stderr
    assert b"Traceback" not in told.stderr
    assert b"Broken pipe" not in told.stderr


# -- output folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_used_output_folder_is_refused_and_left_as_it_was(tmp_path, capsys, command) -> None:
    path, output = write_jsonl(tmp_path / "rollouts.jsonl", fx_b()), tmp_path / "out"
    arguments = (command, "--rollouts", path, "--output", output)
    assert aggcli(capsys, *arguments).code == 0
    before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
    line = refused(aggcli(capsys, *arguments, "--eps-clip", 0.1))
    assert str(output) in line
    assert "--overwrite" in line
    assert {file: file.read_bytes() for file in output.rglob("*") if file.is_file()} == before


def test_overwrite_replaces_and_never_mixes_old_and_new_steps(tmp_path, capsys) -> None:
    path, output = write_jsonl(tmp_path / "rollouts.jsonl", fx_b()), tmp_path / "out"
    assert aggcli(capsys, "compare", "--rollouts", path, "--output", output, "--global-batch-size", 2).code == 0
    assert len(records(output / "token_mean" / "metrics.jsonl")) == 2
    assert aggcli(capsys, "run", "--rollouts", path, "--output", output, "--overwrite").code == 0
    assert sorted(file.name for file in output.iterdir()) == ["layouts.jsonl", "manifest.json", "metrics.jsonl", "samples"]
    assert len(records(output / "metrics.jsonl")) == len(list((output / "samples").iterdir())) == 1


def test_overwrite_never_removes_a_folder_of_somebody_else(tmp_path, capsys) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("five years")
    line = refused(
        aggcli(capsys, "run", "--rollouts", write_jsonl(tmp_path / "rollouts.jsonl", fx_b()), "--output", mine, "--overwrite")
    )
    assert "is not a results directory" in line
    assert (mine / "thesis.txt").read_text() == "five years"


def test_without_an_output_folder_a_new_one_is_made_and_named(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_jsonl(tmp_path / "rollouts.jsonl", fx_b())
    for name in ("run-sample_mean", "run-sample_mean-2", "run-sample_mean-3"):
        told = aggcli(capsys, "run", "--rollouts", path)
        assert f"recorded in results/{name}\n" in told.err
        assert len(records(Path("results") / name / "metrics.jsonl")) == 1


# -- start-up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    few(
        [
            ("--version",),
            ("--help",),
            *((command, "--help") for command in ("run", "compare", "plot", "inspect", "modes", "env")),
        ],
        fast=3,
    ),
    ids=" ".join,
)
def test_help_and_version_import_nothing_heavy(arguments) -> None:
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "aggcli", *arguments], capture_output=True, text=True, check=True
    )
    modules = {line.rsplit("|", 1)[-1].strip() for line in told.stderr.splitlines() if line.startswith("import time:")}
    assert "aggcli.cli.main" in modules
    assert not {"torch", "numpy", "pandas", "matplotlib", "pyarrow", "scipy"} & {name.partition(".")[0] for name in modules}
    assert told.stdout.startswith(("aggcli ", "Usage: "))


# -- paths ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("command", few(["run", "compare", "inspect"]))
@pytest.mark.parametrize(
    "name",
    ["missing.jsonl", "empty", "folder.jsonl", "picture.png", "cut.pt", "other", "no*.jsonl", "a name [nats]"],
)
def test_a_path_without_rollouts_is_refused_in_one_line_that_names_it(tmp_path, capsys, command, name) -> None:
    path = _unreadable(tmp_path)[name]
    arguments = ("inspect", path) if command == "inspect" else (command, "--rollouts", path, "--output", tmp_path / "out")
    line = refused(aggcli(capsys, *arguments))
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
def test_a_folder_for_a_file_or_a_file_for_a_folder_is_refused_in_one_line(tmp_path, capsys, flags, named) -> None:
    path = write_jsonl(tmp_path / "rollouts.jsonl", fx_b())
    given = [flag.format(folder=tmp_path, file=path) for flag in flags]
    output = () if "--output" in given else ("--output", tmp_path / "out")
    line = refused(aggcli(capsys, "run", "--rollouts", path, *output, *given))
    assert named in line
    assert given[1] in line


def test_an_unknown_command_or_a_missing_argument_is_refused_by_name(tmp_path, capsys) -> None:
    assert "rnu" in refused(aggcli(capsys, "rnu"))
    assert "Missing argument 'ROLLOUTS'" in refused(aggcli(capsys, "inspect"))
