"""Bad input to training is refused in one line; what is merely pointless is said; a diverging run ends alone."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from aggcli import grid
from aggcli.config import settings_from, unread_settings
from aggcli.errors import RolloutError
from aggcli.policy.transformer import PolicyConfig, initial_parameters
from aggcli.policy.warm_start import save_policy
from aggcli.training.checkpoint import Saver, load
from aggcli.training.recorded import prepared
from aggcli.training.stack import RunSpec
from aggcli.world import ALONE
from tests.cli import aggcli, records, refused, strict_json
from tests.fixtures import MODES, batch_of
from tests.speed import few
from tests.train_worker import Trained, flags, runs_of, setup_of, small, train

FLAGS = flags(steps=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--lr=nan"], "--lr nan: must be a positive finite number"),
        (["--lr=-1"], "--lr -1.0: must be a positive finite number"),
        (["--lr=0"], "--lr 0.0: must be"),
        (["--steps=0"], "--steps 0: must be at least 1"),
        (["--temperature=0"], "--temperature 0.0: must be"),
        (["--clip-grad=-1"], "--clip-grad -1.0: must be"),
        (["--adam-beta2=1"], "--adam-beta2 1.0: must be at least 0 and below 1"),
        (["--task=running-summ"], "unknown task 'running-summ'; did you mean 'running-sum'?"),
        (["--optimizer=adam"], "adamw"),
        (["--heads=3"], "--heads 3: must be a divisor of --width 64"),
        (["--device=tpu"], "--device tpu: must be cpu, cuda, cuda:<number> or auto"),
        (["--device=meta"], "--device meta: must be cpu"),
        (["--max-response-length=0"], "--max-response-length 0: must be at least 1"),
        (["--layouts=dp2:nonsense"], "unknown partition rule 'nonsense'"),
        (["--layouts=recorded"], "--layouts recorded: training makes its own schedules"),
        (["--advantages=recorded"], "--advantages recorded: sampled rollouts have none"),
        (["--custom-pg-loss-reducer-function-path=os.path:join"], "--custom-pg-loss-reducer-function-path"),
        (["--loss-aggregation=prompt_mean", "--global-batch-size=6"], "give a multiple of --n-samples-per-prompt 4"),
        (["--warm-start=/nowhere/at-all.safetensors"], "/nowhere/at-all.safetensors"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: list[str], said: str
) -> None:
    assert said in refused(aggcli(capsys, "run", *FLAGS, *given, "--output", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_cuda_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str) -> None:
    result = aggcli(capsys, "run", *FLAGS, "--device", device, "--output", tmp_path / "out")
    assert f"--device {device}: this machine has no CUDA device" in refused(result)
    assert not (tmp_path / "out").exists()


def _trained(capsys: pytest.CaptureFixture[str], output: Path, *given: str, code: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """What was said, and the lines of metrics.jsonl, strict JSON."""
    result = aggcli(capsys, "run", *FLAGS, *given, "--output", output)
    assert result.code == code, result.err
    return result.err, records(output / "metrics.jsonl")


def test_one_rollout_per_prompt_is_warned_about_and_trains_without_a_signal(capsys, tmp_path: Path) -> None:
    said, lines = _trained(capsys, tmp_path / "out", "--n-samples-per-prompt=1")
    assert "one rollout per prompt: every advantage is 0, so there is no signal; raise --n-samples-per-prompt" in said
    assert [line["grad_norm"] for line in lines] == [0.0, 0.0]
    silent = "2 steps of runs had only groups of equal rewards: the policy loss has no gradient there; "
    assert f"{silent}AdamW's moments of earlier steps can still move the parameters" in said
    assert "no trained token" not in said


def test_one_step_without_a_signal_is_told_in_the_singular_and_under_sgd_moves_nothing(capsys, tmp_path: Path) -> None:
    flags = ("--n-samples-per-prompt=1", "--steps=1", "--optimizer=sgd")
    said, _ = _trained(capsys, tmp_path / "out", *flags)
    silent = "1 step of a run had only groups of equal rewards: the policy loss has no gradient there; "
    assert f"{silent}no parameter moves" in said
    said, _ = _trained(capsys, tmp_path / "terms", *flags, "--weight-decay=0.1", "--entropy-coef=0.1")
    assert f"{silent}weight decay and the entropy term can still move the parameters" in said


def test_steps_without_a_mixed_group_are_empty_change_nothing_and_are_said_plainly(capsys, tmp_path: Path) -> None:
    said, lines = _trained(
        capsys, tmp_path / "out", "--n-samples-per-prompt=1", "--dynamic-sampling", "--dynamic-sampling-rounds=3"
    )
    assert "2 steps of runs had no trained token: they took no optimizer step and changed nothing" in said
    assert "equal rewards" not in said
    for line in lines:
        assert (line["groups_generated"], line["groups_kept"], line["tokens"], line["rollouts"]) == (12, 0, 0, 0)
        assert (line["pg_loss"], line["entropy_loss"], line["raw_reward"]) == (None, None, None)
    setup = setup_of(n_samples_per_prompt=1, dynamic_sampling=True, weight_decay=0.5, steps=2)
    done = train(setup, runs_of(setup))
    start_P = torch.cat([value.flatten() for value in small(setup).initial.values()])
    assert torch.equal(done.flat_RQ, start_P.expand(4, -1)), "an empty step takes no optimizer step, weight decay included"


def test_an_empty_step_does_not_hold_up_the_other_runs_of_its_stack() -> None:
    """With one round of sampling, one seed finds mixed groups where another finds none."""
    settings: dict[str, Any] = {"dynamic_sampling": True, "dynamic_sampling_rounds": 1, "steps": 3}
    setup = setup_of(**settings, rollout_batch_size=1, n_samples_per_prompt=2)
    runs = runs_of(setup, ("sample_mean", "prompt_mean"), (0, 1, 2))
    done = train(setup, runs)
    kept = {run.name: [values["groups_kept"] for values in done.values(run.name)] for run in runs}
    assert {0, 1} <= {count for counts in kept.values() for count in counts}
    for at, run in enumerate(runs):
        alone = train(setup, [run])
        assert (alone.flat_RQ[0] - done.flat_RQ[at]).abs().max() < 1e-10


def test_a_task_that_cannot_vary_in_length_is_warned_about(capsys, tmp_path: Path) -> None:
    said, _ = _trained(capsys, tmp_path / "out", "--max-response-length=1")
    assert "standard deviation 0.0" in said
    assert "every response has the same length, so the modes cannot differ on this task" in said
    said, _ = _trained(capsys, tmp_path / "other")
    assert "the same length" not in said


def test_a_warm_start_of_another_shape_is_refused_naming_the_parameter(capsys, tmp_path: Path) -> None:
    policy = PolicyConfig(14, 64, layers=1, width=8, heads=2)
    save_policy(tmp_path / "other.safetensors", initial_parameters(policy, torch.Generator().manual_seed(0)), {}, "")
    said = refused(aggcli(capsys, "run", *FLAGS, f"--warm-start={tmp_path / 'other.safetensors'}", "-o", tmp_path / "out"))
    assert "parameter embedding is (14, 8), the policy has (14, 64)" in said


# -- runs that diverge ----------------------------------------------------------------------------------------------

WILD: dict[str, Any] = {
    "optimizer": "sgd",
    "clip_grad": 0.0,
    "lr": 0.01,
    "steps": 5,
    "num_iterations": 2,
    "kl_coef": 0.1,
    "layout_records": False,
}
"""With a far larger learning rate, the k3 estimate of the KL overflows in the second update on a batch."""


def _with_a_wild_one(setup: grid.Setup, wild: str) -> list[RunSpec]:
    return [dataclasses.replace(run, lr=1e6) if run.mode == wild else run for run in runs_of(setup)]


@pytest.mark.parametrize("wild", few(MODES))
def test_a_run_that_diverges_is_dropped_by_name_and_step_and_poisons_no_other_run(wild: str) -> None:
    setup = setup_of(**WILD)
    trainer = grid.trainer_of(setup, _with_a_wild_one(setup, wild), ALONE)
    steps = list(trainer.steps())
    ((gone, at),) = [(gone, step.step) for step in steps for gone in step.diverged]
    assert (gone.run.mode, gone.step) == (wild, at)
    assert at < 4
    assert gone.what == "its gradient is not finite"
    assert [run.mode for run in trainer.runs] == [mode for mode in MODES if mode != wild]
    shown = [report.run.mode for step in steps for reports in step.optimizer_steps for report in reports]
    assert [shown.count(mode) for mode in MODES if mode != wild] == [10] * 3
    assert 1 <= shown.count(wild) < 10, "what it did before is recorded"
    for at, run in enumerate(trainer.runs):
        alone: Trained = train(setup, [run])
        assert (alone.flat_RQ[0] - trainer.policy.state()["parameters"][at]).abs().max() < 1e-12


def test_a_run_that_diverges_stops_with_step_and_mode_named_and_keeps_its_records(capsys, tmp_path: Path) -> None:
    wild = ["--optimizer=sgd", "--lr=1e6", "--clip-grad=0", "--steps=5", "--kl-coef=0.1", "--num-iterations=2"]
    wild += ["--loss-aggregation=token_mean"]
    said, lines = _trained(capsys, tmp_path / "out", *wild, code=1)
    last = said.splitlines()[-1]
    assert last.startswith("aggcli: 1 of 1 runs diverged: run token_mean, seed 0 diverged in step ")
    assert 1 <= len(lines) < 10
    assert all(math.isfinite(line["pg_loss"]) for line in lines)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "diverged in step" in manifest["diverged"]
    assert manifest["final"]["missing"] == ["."]


def test_a_run_that_diverges_in_the_very_last_step_is_noticed_too(capsys, tmp_path: Path) -> None:
    wild = ["--optimizer=sgd", "--lr=1e39", "--clip-grad=0", "--steps=1", "--dtype=float32"]
    said, _ = _trained(capsys, tmp_path / "out", *wild, code=1)
    assert "run sample_mean, seed 0 diverged in step 0: its parameters are not finite" in said


def test_a_resumed_stack_still_knows_which_run_diverged_when_and_why(tmp_path: Path) -> None:
    setup = setup_of(**WILD)
    trainer = grid.trainer_of(setup, _with_a_wild_one(setup, "constant"), ALONE)
    for _ in zip(range(4), trainer.steps(), strict=False):
        pass
    with Saver(tmp_path / "checkpoint") as saver:
        saver.save(trainer.checkpoint())
    again = grid.trainer_of(setup, _with_a_wild_one(setup, "constant"), ALONE)
    found = load(tmp_path / "checkpoint")
    assert found is not None
    again.restore(found)
    assert [gone.run.mode for gone in again.gone] == ["constant"]
    assert [(gone.run.mode, gone.step, gone.what) for gone in again.gone] == [
        (gone.run.mode, gone.step, gone.what) for gone in trainer.gone
    ]
    assert [run.mode for run in again.runs] == ["sample_mean", "prompt_mean", "token_mean"]
    for _ in trainer.steps():
        pass
    for _ in again.steps():
        pass
    assert torch.equal(again.policy.state()["parameters"], trainer.policy.state()["parameters"])


# -- recorded rollouts ----------------------------------------------------------------------------------------------

WITHOUT_GROUPS = ["--rollouts", str(Path(__file__).parent / "data" / "slime_train"), "--train", "--steps=1", "--dtype=float32"]


def test_prompt_mean_is_left_out_of_training_where_rollouts_have_no_groups(capsys, tmp_path: Path) -> None:
    told = aggcli(capsys, "compare", *WITHOUT_GROUPS, "--json", "--output", tmp_path / "out")
    assert told.code == 0, told.err
    assert list(strict_json(told.out)["modes"]) == ["sample_mean", "token_mean", "constant"]
    assert (
        "note: prompt_mean is left out: step 0 (0.pt), sample 0: group_index is missing and prompt_mean needs one" in told.err
    )


@pytest.mark.parametrize("mode", [["compare", "--modes=prompt_mean,constant"], ["run", "--loss-aggregation=prompt_mean"]])
def test_prompt_mean_asked_for_without_groups_is_refused_before_anything_starts(
    capsys, tmp_path: Path, mode: list[str]
) -> None:
    told = aggcli(capsys, *mode, *WITHOUT_GROUPS, "--output", tmp_path / "out")
    assert "group_index is missing and prompt_mean needs one" in refused(told)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_workers_that_cannot_be_used_are_said(capsys, tmp_path: Path) -> None:
    wide = [*FLAGS, "--steps=1", "--width=256", "--no-layout-records", "--modes=constant,token_mean", "--seeds=1"]
    told = aggcli(capsys, "compare", *wide, "--workers=2", "--warm-start", _wide(tmp_path), "--output", tmp_path / "out")
    assert told.code == 0, told.err
    assert "note: --workers 2: the runs are cut into 1 share, so no more are at work; --shares cuts more" in told.err
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["shares"] == 1


def _wide(tmp_path: Path) -> Path:
    """An untaught policy of width 256, so that the test does not wait for its warm start."""
    policy = PolicyConfig(14, 64, width=256)
    path = tmp_path / "wide.safetensors"
    save_policy(path, initial_parameters(policy, torch.Generator().manual_seed(0)), {}, "")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [("run", "run-token_mean"), ("compare", "compare"), ("train", "compare")],
)
def test_without_an_output_the_results_are_named_by_command_and_mode(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--steps=1", "--rollout-batch-size=2", "--n-samples-per-prompt=2", "--device=cpu", "--evaluation-prompts=4")
    mode = ("--loss-aggregation=token_mean",) if command == "run" else ("--modes=token_mean", "--seeds=1")
    for _ in range(2):
        told = aggcli(capsys, command, *mode, *flags)
        assert told.code == 0, told.err
    assert {path.name for path in (tmp_path / "results").iterdir()} == {name, f"{name}-2"}


@pytest.mark.parametrize(("vocabulary_size", "asked"), [(None, "--train"), (10, "--model")])
def test_rollouts_without_token_ids_are_refused_by_the_flag_that_was_given(vocabulary_size: int | None, asked: str) -> None:
    batch = batch_of([{"response_length": 2, "advantage": 1.0}])
    with pytest.raises(RolloutError, match=rf"step 0 \(test\): {asked} needs token ids"):
        prepared([batch], settings_from({}), vocabulary_size)


def test_settings_that_only_training_uses_are_said_to_be_so() -> None:
    useless = unread_settings(trains=False)
    assert useless["lr"] == "only training uses it"
    assert useless["shares"].startswith("only training is cut into shares; with --launcher, rollouts are read in parts")
    assert "shares" not in unread_settings(trains=True)
