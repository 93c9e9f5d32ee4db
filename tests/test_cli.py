"""The command line: what it prints, what it refuses, and what it leaves on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import aggcli, close, refused, strict_json, write_jsonl
from tests.fixtures import MODES, fx_a, fx_b, fx_e, sample

DATA = Path(__file__).parent / "data"
DUMP = DATA / "slime_rollout" / "0.pt"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without --output write into the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fx_b_file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "fx_b.jsonl", fx_b())


# -- compare and run ------------------------------------------------------------------------------------------------


def test_compare_lines_up_the_four_modes_of_fx_b_by_their_closed_forms(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    arguments = ["compare", "--rollouts", fx_b_file, "--loss-aggregation-divisor", 10, "--output", tmp_path / "o", "--json"]
    (step,) = aggcli(capsys, *arguments).steps
    expected = {"sample_mean": -0.025, "prompt_mean": 0.096875, "token_mean": 0.171875, "constant": 0.06875}
    for mode, value in expected.items():
        assert close(step["modes"][mode]["pg_loss"], value), mode
    assert close(step["modes"]["prompt_mean"]["total_weight"], 2 / 4)
    assert close(step["modes"]["constant"]["total_weight"], 16 / 40)


def test_the_strict_prompt_mean_is_n_over_p_times_the_default(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    arguments = ["run", "--rollouts", fx_b_file, "--loss-aggregation", "prompt_mean", "--prompt-mean-scale", "prompts"]
    (step,) = aggcli(capsys, *arguments, "--output", tmp_path / "o", "--json").steps
    assert close(step["modes"]["prompt_mean"]["pg_loss"], 0.19375)
    assert close(step["modes"]["prompt_mean"]["total_weight"], 1.0)


def test_json_has_the_shape_of_the_design(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    result = aggcli(capsys, "compare", "--rollouts", fx_b_file, "--output", tmp_path / "o", "--json")
    told = strict_json(result.out)
    assert told["schema"] == 1
    layouts = told["steps"][0]["modes"]["sample_mean"]["layouts"]
    assert list(layouts) == ["dp1:first-fit", "dp2:interleaved", "dp2:contiguous", "dp4:balanced"]
    ranks = layouts["dp4:balanced"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert close(sum(rank["pg_loss"] for rank in ranks), -0.025)
    assert sum(rank["samples"] for rank in ranks) == 4
    assert sum(rank["correct/count"] for rank in ranks) == layouts["dp4:balanced"]["correct/count"] == 2


def test_the_flag_and_the_default_leave_byte_identical_metrics(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    aggcli(capsys, "run", "--rollouts", fx_b_file, "--output", tmp_path / "a")
    aggcli(capsys, "run", "--rollouts", fx_b_file, "--loss-aggregation", "sample_mean", "--output", tmp_path / "b")
    first, second = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in "ab")
    assert first == second
    assert b'"mode":"sample_mean"' in first


def test_the_mode_in_force_is_printed_and_recorded_even_when_it_is_the_default(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    result = aggcli(capsys, "run", "--rollouts", fx_b_file, "--output", tmp_path / "o")
    assert "mode: sample_mean" in result.out
    manifest = strict_json((tmp_path / "o" / "manifest.json").read_text())
    assert manifest["mode"] == "sample_mean"
    assert manifest["status"] == "done"
    assert manifest["settings"]["eps_clip"] == 0.2
    assert {"torch", "numpy"} <= manifest["environment"]["packages"].keys()


@pytest.mark.parametrize("reverse", [False, True])
def test_fx_e_has_four_correct_samples_of_mean_length_14_25_in_every_layout(capsys, tmp_path: Path, reverse: bool) -> None:
    samples = fx_e()[::-1] if reverse else fx_e()
    path = write_jsonl(tmp_path / "fx_e.jsonl", samples)
    layouts = ["dp1:first-fit", "dp2:interleaved", "dp2:contiguous", "dp4:balanced", "dp1:first-fit@110", "dp8"]
    arguments = ["run", "--rollouts", path, "--log-correct-samples", "--layouts", ",".join(layouts)]
    result = aggcli(capsys, *arguments, "--output", tmp_path / "o")
    lines = [strict_json(line) for line in (tmp_path / "o" / "layouts.jsonl").read_text().splitlines()]
    assert [line["layout"] for line in lines] == layouts
    if reverse:  # total lengths 38,37,36,35,...: 36 does not fit behind 38+37, 35 does, so one rank is a permutation
        assert lines[4]["ranks"][0]["partition"][:4] == [0, 1, 3, 2]
    for line in lines:
        assert (line["correct/count"], line["correct/response_length"]) == (4, 14.25)
        assert line["correct/lengths"] == [11, 14, 15, 17]
        assert sum(rank["correct/count"] for rank in line["ranks"]) == 4
        for rank in line["ranks"]:  # rank-local: its own samples only, blank where it has no correct one
            own = sorted(samples[at]["response_length"] for at in rank["partition"] if samples[at]["reward"] == 1)
            assert rank["correct/lengths"] == own
            assert rank["correct/response_length"] == (sum(own) / len(own) if own else None)
    table = [line.split() for line in result.out.splitlines() if line.startswith(" dp")]
    assert sum(row[1:7] == ["4", "14.25", "11", "14", "15", "17"] for row in table) == 6


def test_a_batch_without_a_correct_sample_shows_blanks_not_zeros(capsys, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [s | {"reward": 0} for s in fx_e()])
    (step,) = aggcli(capsys, "run", "--rollouts", path, "--output", tmp_path / "o", "--json").steps
    values = step["modes"]["sample_mean"]
    assert values["correct/count"] == 0
    assert values["correct/response_length"] is None
    assert values["correct_length/p25"] is None


def test_a_file_without_rewards_works_and_says_what_is_skipped(capsys, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"response_length": 3}, {"response_length": 5}])
    result = aggcli(capsys, "compare", "--rollouts", path, "--output", tmp_path / "o")
    assert result.code == 0
    assert "needs reward" in result.out
    assert "needs advantage, or reward and group_index" in " ".join(result.out.split())
    (line,) = (strict_json(text) for text in (tmp_path / "o" / "sample_mean" / "metrics.jsonl").read_text().splitlines())
    assert line.get("pg_loss") is None
    assert line["total_weight"] == 1.0


# -- start-up checks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", ["0", "-3", "nan", "inf"])
def test_constant_refuses_a_divisor_that_is_no_positive_number(capsys, fx_b_file: Path, divisor: str) -> None:
    arguments = ["run", "--rollouts", fx_b_file, "--loss-aggregation", "constant", "--loss-aggregation-divisor", divisor]
    assert "--loss-aggregation-divisor" in refused(aggcli(capsys, *arguments))


def test_constant_without_a_divisor_is_refused_and_with_one_accepted(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    arguments = ["run", "--rollouts", fx_b_file, "--loss-aggregation", "constant"]
    assert "--loss-aggregation-divisor" in refused(aggcli(capsys, *arguments))
    (step,) = aggcli(capsys, *arguments, "--loss-aggregation-divisor", 10, "--output", tmp_path / "o", "--json").steps
    assert close(step["modes"]["constant"]["pg_loss"], 0.06875)


def test_a_divisor_under_another_mode_is_unused_and_said_so(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    arguments = ["run", "--rollouts", fx_b_file, "--loss-aggregation-divisor", "10", "--output", tmp_path / "o"]
    assert "unused" in aggcli(capsys, *arguments).err


def test_token_mean_and_calculate_per_token_loss_are_one_thing(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    aggcli(capsys, "run", "--rollouts", fx_b_file, "--loss-aggregation", "token_mean", "--output", tmp_path / "a")
    aggcli(capsys, "run", "--rollouts", fx_b_file, "--calculate-per-token-loss", "--output", tmp_path / "b")
    first, second = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in "ab")
    assert first == second
    arguments = ["run", "--rollouts", fx_b_file, "--calculate-per-token-loss", "--loss-aggregation"]
    assert "constant" in refused(aggcli(capsys, *arguments, "constant", "--loss-aggregation-divisor", 10))


def test_an_unknown_mode_is_refused_with_the_nearest_name(capsys, fx_b_file: Path) -> None:
    told = refused(aggcli(capsys, "run", "--rollouts", fx_b_file, "--loss-aggregation", "promt_mean"))
    assert "did you mean 'prompt_mean'?" in told


def test_a_misspelt_option_or_config_key_is_refused_and_named(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    assert "--los-aggregation" in refused(aggcli(capsys, "run", "--rollouts", fx_b_file, "--los-aggregation", "x"))
    config = tmp_path / "c.toml"
    config.write_text('los_aggregation = "token_mean"\n')
    told = refused(aggcli(capsys, "run", "--rollouts", fx_b_file, "--config", config))
    assert "los_aggregation" in told
    assert "did you mean 'loss_aggregation'?" in told


def test_flags_beat_the_config_file_which_beats_the_recipe_which_beats_defaults(
    capsys, fx_b_file: Path, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('recipe = "dapo"\neps_clip = 0.15\nkl_coef = 0.5\n')
    result = aggcli(capsys, "run", "--rollouts", fx_b_file, "--config", config, "--kl-coef", "0.25", "--dry-run")
    settings = dict(line.split(" = ", 1) for line in result.out.splitlines())
    assert settings["kl_coef"] == "0.25"  # flag
    assert settings["eps_clip"] == "0.15"  # file
    assert settings["eps_clip_high"] == "0.28"  # recipe
    assert settings["loss_aggregation"] == '"prompt_mean"'  # recipe
    assert settings["seed"] == "0"  # default


def test_a_dry_run_prints_settings_that_config_reads_back_and_writes_nothing(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    first = aggcli(capsys, "run", "--rollouts", fx_b_file, "--recipe", "dr_grpo", "--dry-run", "--output", tmp_path / "o")
    (tmp_path / "c.toml").write_text(first.out)
    second = aggcli(capsys, "run", "--config", tmp_path / "c.toml", "--dry-run")
    assert first.code == second.code == 0
    assert second.out == first.out
    assert not (tmp_path / "o").exists()


# -- prompt groups --------------------------------------------------------------------------------------------------


def test_prompt_mean_names_a_null_group_index_and_the_other_modes_run(capsys, tmp_path: Path) -> None:
    samples = fx_b()
    samples[2]["group_index"] = None
    path = write_jsonl(tmp_path / "x.jsonl", samples)
    told = refused(aggcli(capsys, "run", "--rollouts", path, "--loss-aggregation", "prompt_mean", "--output", tmp_path / "p"))
    assert "sample 2" in told
    assert "group_index" in told
    for mode, value in (("sample_mean", -0.025), ("token_mean", 0.171875)):
        arguments = ["run", "--rollouts", path, "--loss-aggregation", mode, "--output", tmp_path / mode, "--json"]
        (step,) = aggcli(capsys, *arguments).steps
        assert close(step["modes"][mode]["pg_loss"], value)


def test_only_prompt_mean_builds_prompt_mask_sums_and_misses_them_loudly() -> None:
    from aggcli.objective.aggregation import sample_weights, step_denominators
    from tests.fixtures import batch_of

    batch = batch_of(fx_b())
    assert "prompt_mask_sums" not in step_denominators(batch, prompt_sums=False)
    assert step_denominators(batch, prompt_sums=True)["prompt_mask_sums"].tolist() == [4, 4, 12, 12]
    with pytest.raises(KeyError, match="prompt_mask_sums"):
        sample_weights("prompt_mean", step_denominators(batch, prompt_sums=False))


def test_a_group_that_straddles_two_optimizer_steps_is_refused_with_the_flag_to_change(capsys, fx_b_file: Path) -> None:
    arguments = ["run", "--rollouts", fx_b_file, "--loss-aggregation", "prompt_mean", "--global-batch-size", 3]
    told = refused(aggcli(capsys, *arguments))
    assert "straddles optimizer steps 0 and 1" in told
    assert "--global-batch-size" in told


def test_denominators_are_counted_per_optimizer_step(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    arguments = ["run", "--rollouts", fx_b_file, "--loss-aggregation", "token_mean", "--global-batch-size", 2]
    steps = aggcli(capsys, *arguments, "--output", tmp_path / "o", "--json").steps
    # step 0: samples of 1 and 3 tokens, losses -.55 and +.5; step 1: 4 and 8 tokens
    expected = [(-0.55 + 3 * 0.5) / 4, (4 * -0.55 + 8 * 0.5) / 12]
    assert [step["step"] for step in steps] == [0, 1]
    for step, value in zip(steps, expected, strict=True):
        assert close(step["modes"]["token_mean"]["pg_loss"], value)


# -- custom reducer -------------------------------------------------------------------------------------------------


def test_a_custom_reducer_wins_over_the_mode_and_says_so(capsys, fx_b_file: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine_reducer.py").write_text(
        "def halves(total_lengths, response_lengths, loss_masks, per_token):\n"
        "    assert total_lengths == [4, 6, 7, 11] and per_token is True\n"
        "    def reduce(x):\n"
        "        parts = x.split(response_lengths)\n"
        "        return sum((p * m).sum() for p, m in zip(parts, loss_masks)) / 1000\n"
        "    return reduce\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flag = ["--custom-pg-loss-reducer-function-path", "mine_reducer:halves"]
    arguments = ["run", "--rollouts", fx_b_file, "--loss-aggregation", "token_mean", *flag, "--output", tmp_path / "o"]
    result = aggcli(capsys, *arguments, "--json")
    assert "takes precedence over --loss-aggregation token_mean" in result.err
    (step,) = result.steps
    # masked sum over 1000: (-.55*1 + .5*3 - .55*4 + .5*8) / 1000
    assert close(step["modes"]["custom"]["pg_loss"], 2.75 / 1000)
    missing = ["--custom-pg-loss-reducer-function-path", "mine_reducer:thirds"]
    assert "thirds" in refused(aggcli(capsys, "run", "--rollouts", fx_b_file, *missing))


# -- bad input ------------------------------------------------------------------------------------------------------


def test_bad_files_are_refused_in_one_line(capsys, tmp_path: Path) -> None:
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    truncated = tmp_path / "cut.pt"
    truncated.write_bytes(DUMP.read_bytes()[:1000])
    for path in ("nowhere.jsonl", "empty_folder", "empty.jsonl", "cut.pt"):
        assert path in refused(aggcli(capsys, "run", "--rollouts", tmp_path / path, "--output", tmp_path / "o"))
    assert not (tmp_path / "o").exists()


def test_a_broken_line_that_is_not_the_last_is_named_by_number(capsys, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"response_length": 3}\n{"response_le\n{"response_length": 3}\n')
    assert "line 2" in refused(aggcli(capsys, "run", "--rollouts", path))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"loss_mask": [1, 1]}, "loss_mask"),
        ({"log_probs": [-1.0] * 5}, "log_probs"),
        ({"old_log_probs": [-1.0, float("nan"), -1.0], "log_probs": [-1.0] * 3}, "token 1"),
        ({"reward": "very good"}, "very good"),
        ({"reward": {"score": 1.0, "format": 0.5}}, "--reward-key"),
    ],
)
def test_bad_samples_are_refused_by_name(capsys, tmp_path: Path, fields: dict, wanted: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [sample(3, group_index=0) | fields])
    told = refused(aggcli(capsys, "run", "--rollouts", path))
    assert "sample 0" in told
    assert wanted in told


def test_what_can_be_read_is_read_with_a_note(capsys, tmp_path: Path) -> None:
    rewards = ["1.0", True, None, float("nan"), 0]
    lines = [json.dumps(sample(3, group_index=0, reward=reward, loss_mask=[1, 0, 1])) for reward in rewards]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines) + '\n{"response_len')
    arguments = ["run", "--rollouts", path, "--layouts", "dp8:balanced", "--output", tmp_path / "o", "--json"]
    result = aggcli(capsys, *arguments)
    (step,) = result.steps
    values = step["modes"]["sample_mean"]
    assert (values["samples"], values["unscored_samples"]) == (5, 2)
    assert close(values["raw_reward"], 2 / 3)
    for word in ("half-written line dropped", "text", "true/false", "unscored", "idle"):
        assert word in result.err, word


def test_a_file_that_would_execute_code_is_refused_and_leaves_no_trace(capsys, tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'trace'}",)

    path = tmp_path / "bomb.pt"
    path.write_bytes(pickle.dumps({"rollout_id": 0, "samples": [Bomb()]}))
    refused(aggcli(capsys, "inspect", path))
    refused(aggcli(capsys, "run", "--rollouts", path))
    assert not (tmp_path / "trace").exists()


# -- records --------------------------------------------------------------------------------------------------------


def test_a_results_directory_is_never_mixed_into(capsys, fx_b_file: Path, tmp_path: Path) -> None:
    arguments = ["run", "--rollouts", fx_b_file, "--output", tmp_path / "o"]
    aggcli(capsys, *arguments)
    before = (tmp_path / "o" / "metrics.jsonl").read_bytes()
    assert "--overwrite" in refused(aggcli(capsys, *arguments, "--loss-aggregation", "token_mean"))
    assert (tmp_path / "o" / "metrics.jsonl").read_bytes() == before
    assert aggcli(capsys, *arguments, "--loss-aggregation", "token_mean", "--overwrite").code == 0
    assert b"token_mean" in (tmp_path / "o" / "metrics.jsonl").read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    arguments = ["run", "--rollouts", fx_b_file, "--output", tmp_path / "mine", "--overwrite"]
    assert "is not a results directory" in refused(aggcli(capsys, *arguments))
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_without_output_each_run_gets_a_directory_of_its_own(capsys, fx_b_file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        aggcli(capsys, "run", "--rollouts", fx_b_file)
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["run-sample_mean", "run-sample_mean-2"]


def test_a_loss_of_zero_prints_0_and_explains_itself(capsys, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "fx_a.jsonl", fx_a())
    result = aggcli(capsys, "compare", "--rollouts", path, "--output", tmp_path / "o")
    assert "pg_loss is 0 under sample_mean but the gradient is not" in result.err
    assert "-0 " not in result.out
    row = next(line.split() for line in result.out.splitlines() if line.strip().startswith("pg_loss "))
    assert row[1:4] == ["0", "0.104167", "0.1875"]


# -- start-up cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["plot"], ["inspect"], ["modes"], ["env"]])
def test_help_and_version_import_neither_torch_nor_pandas_nor_matplotlib(command: list[str]) -> None:
    flags = [[*command, "--help"], ["--version"]] if not command else [[*command, "--help"]]
    for arguments in flags:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "aggcli", *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout
        imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
        assert "typer" in imported
        assert not imported & {"torch", "pandas", "matplotlib", "numpy", "pyarrow", "scipy"}


def test_modes_gives_formula_weight_and_sources(capsys) -> None:
    told = aggcli(capsys, "modes")
    for mode in MODES:
        assert mode in told.out
    assert "1/(N*T_p)" in aggcli(capsys, "modes", "prompt_mean").out
    assert "did you mean 'token_mean'" in refused(aggcli(capsys, "modes", "token-mean"))


@pytest.mark.parametrize("command", [["runs", "schema"], ["modes"], ["compare", "--rollouts", "example", "--output", "out"]])
def test_a_reader_that_has_seen_enough_is_no_fault(tmp_path: Path, command: list[str]) -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    told = subprocess.run([sys.executable, "-m", "aggcli", *command], stdout=reader.stdin, stderr=subprocess.PIPE, cwd=tmp_path)
    assert reader.stdin is not None
    reader.stdin.close()
    assert told.returncode == 0, told.stderr
    assert b"Traceback" not in told.stderr
    assert b"Broken pipe" not in told.stderr
