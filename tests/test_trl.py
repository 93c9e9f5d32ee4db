"""TRL's own trainer computes any mode, on one process and two; its rollouts replay to its loss; the probe changes nothing.

One process runs all cases of one rank, a pair those of two ranks: importing TRL takes eight seconds.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aggcli
from tests.cli import ROOT, environment
from tests.cli import aggcli as command
from tests.trl_worker import LIMIT, Case, tiny_llama

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
UNDER = ("dr_grpo", "grpo", "dapo")


def _exact(world: int, accumulations: tuple[int, ...] = (1, 2, 4)) -> list[Case]:
    """Each mode under each accumulation, over different loss types."""
    made = []
    for at, mode in enumerate(MODES):
        for place, accumulation in enumerate(accumulations):
            options = {"divisor": 7.0} if mode == "constant" else {}
            loss_type = UNDER[(at + place) % 3]
            name = f"{mode}-{loss_type}-{accumulation}-{world}"
            made.append(Case(name, mode, loss_type, accumulation, options=options))
    return made


HARDER = [
    Case("strict", "prompt_mean", "grpo", 2, options={"prompt_mean_scale": "prompts"}, double=True),
    Case("luspo", "token_mean", "luspo", 2, double=True),
    Case("truncated", "sample_mean", "dapo", 2, trl={"mask_truncated_completions": True}, double=True),
    Case("tools", "prompt_mean", "dr_grpo", 4, with_tools=True, double=True),
    Case("reused", "prompt_mean", "grpo", 2, steps=3, trl={"num_iterations": 3}, double=True),
    Case("cut-dapo", "token_mean", "dapo", 2, steps=2, per_device=4, trl={"steps_per_generation": 4}, double=True),
    Case("cut-grpo", "sample_mean", "dr_grpo", 2, steps=2, per_device=4, trl={"steps_per_generation": 4}, double=True),
]
PROBED = [
    Case("grpo", None, "grpo", 2, steps=2, probe=True),
    Case("bnpo", None, "bnpo", 2, steps=2, probe=True),
    Case("dapo", None, "dapo", 4, steps=2, probe=True, trl={"num_iterations": 2}),
    Case("wanted", "prompt_mean", "dr_grpo", 2, steps=2, probe=True),
]
PLAIN = [dataclasses.replace(case, name=f"plain-{case.name}", plain=True, probe=False) for case in PROBED[:3]]
STEPPED = [
    Case(
        f"stepped-{loss_type}-{beta:g}-{steps}",
        loss_type=loss_type,
        steps=steps,
        from_folder=True,
        trl={"beta": beta, "num_iterations": steps, "model_init_kwargs": {"dtype": "float32"}},
    )
    for loss_type in ("grpo", "dr_grpo", "dapo", "bnpo")
    for beta in (0.0, 0.3)
    for steps in (1, 2)
]
STEPPED.append(dataclasses.replace(STEPPED[3], name="stepped-biased", trl={**STEPPED[3].trl, "use_bias_correction_kl": False}))
"""In a second step on the same rollouts ratios are not 1, some are clipped, and the KL term has a gradient."""
UNPROBED = dataclasses.replace(PROBED[3], name="unprobed", probe=False, write=False)
RESUMED = Case("resumed", "sample_mean", "grpo", 2, steps=4, trl={"save_strategy": "steps", "save_steps": 2})
"""Trained to the end, resumed at its second step and trained to the end again, then begun anew in the same folder."""
REFUSED = {
    Case("varies", "prompt_mean", "bnpo"): "trl:bnpo: its weights change with the layout",
    Case("straddles", "prompt_mean", "grpo", trl={"steps_per_generation": 2}, per_device=8): "which prompt groups straddle",
    Case(
        "unaligned", "sample_mean", "grpo", 2, 1, 4, trl={"steps_per_generation": 3}
    ): "no multiple of gradient_accumulation_st",
    Case("no-divisor", "constant"): "constant divides by a constant: give divisor=L, such as max_completion_length",
    Case("own-loss", "sample_mean", own_loss=True): "Own has a _compute_loss of its own",
    Case("probed-cispo", None, "cispo", probe=True): "loss_type=cispo makes another loss of the token",
    Case("probed-cut", None, "dapo", 1, 1, 8, probe=True, trl={"steps_per_generation": 2}): "divides by the generation batch's",
    Case("wanted-varies", "trl:bnpo"): "trl:bnpo: its weights change with the layout",
}
ONE = [*_exact(1), *HARDER, *PROBED, *PLAIN, *STEPPED, UNPROBED, RESUMED, *REFUSED]
TWO = [*_exact(2, (2,)), dataclasses.replace(PROBED[1], name="bnpo-2")]


def found_by(cases: list[Case], world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What the cases' steps gave, by name."""
    asked = folder / "cases.json"
    asked.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)} if world > 1 else {}
    command = [sys.executable, "-W", "ignore", "-m", "tests.trl_worker", str(asked), str(folder)]
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        variables = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **rendezvous, **own)
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=variables, cwd=ROOT, text=True, stdout=pipe, stderr=pipe))
    told = [rank.communicate(timeout=200) for rank in ranks]
    assert not any(rank.returncode for rank in ranks), told[0][1][-3000:]
    return {one["name"]: one for one in json.loads(told[0][0].rpartition("FOUND ")[2])}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return found_by(ONE, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return found_by(TWO, 2, tmp_path_factory.mktemp("two"))


def _check_exact(found: dict[str, Any], steps: int, samples: int = 16) -> None:
    assert len(found["steps"]) == steps
    for step, logged in zip(found["steps"], found["losses"], strict=True):
        assert step["samples"] == samples
        assert step["lengths"] > 1
        assert step["largest"] > 1e-3
        assert step["apart"] < 1e-6
        assert logged == pytest.approx(step["loss"], abs=1e-6)


@pytest.mark.parametrize("case", _exact(1), ids=lambda case: case.name)
def test_the_gradient_is_the_closed_form_of_the_mode(case: Case, one: dict[str, dict[str, Any]]) -> None:
    _check_exact(one[case.name], 1)


@pytest.mark.parametrize("case", TWO[:-1], ids=lambda case: case.name)
def test_the_gradient_is_the_closed_form_on_two_processes(case: Case, two: dict[str, dict[str, Any]]) -> None:
    _check_exact(two[case.name], 1)


@pytest.mark.parametrize("case", HARDER, ids=lambda case: case.name)
def test_it_is_under_masks_of_truncation_and_tools_reused_rollouts_and_several_steps_a_generation(
    case: Case, one: dict[str, dict[str, Any]]
) -> None:
    found = one[case.name]
    _check_exact(found, case.steps, 8 if case.per_device == 4 else 16)
    masked = [step["masked"] for step in found["steps"]]
    assert all(masked) if case.name in ("truncated", "tools") else not any(masked)


@pytest.mark.parametrize("case", PROBED[:3], ids=lambda case: case.name)
def test_the_writer_and_the_probe_leave_the_run_as_it_is_to_the_last_bit(case: Case, one: dict[str, dict[str, Any]]) -> None:
    found, plain = one[case.name], one[f"plain-{case.name}"]
    assert found["parameters"] == plain["parameters"]
    assert found["losses"] == plain["losses"]
    assert one["wanted"]["parameters"] == one["unprobed"]["parameters"] != one["unprobed"]["losses"]


@pytest.mark.parametrize("case", [*PROBED, TWO[-1]], ids=lambda case: case.name)
def test_the_files_replay_to_the_loss_that_the_trainer_logged(
    case: Case, one: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]]
) -> None:
    world = 2 if case in TWO else 1
    found = (two if world == 2 else one)[case.name]
    mode = case.mode or f"trl:{case.loss_type}"
    layout = f"dp{world}:contiguous:mb{16 // world // case.accumulation}"
    replayed = aggcli.replay(found["rollouts"], [mode], [layout], max_response_length=LIMIT, loss_aggregation_divisor=LIMIT)
    values = replayed.metrics
    assert values["pg_loss"].tolist() == pytest.approx(found["losses"], abs=1e-6)
    assert min(map(abs, found["losses"])) > 1e-4 or case.loss_type == "grpo"
    assert values["samples"].tolist() == [16] * case.steps


def test_the_probe_logs_what_a_replay_of_the_files_gives(one: dict[str, dict[str, Any]]) -> None:
    found = one["wanted"]
    modes = ["prompt_mean", "sample_mean", "token_mean", "constant"]
    replayed = aggcli.replay(
        found["rollouts"], modes, ["dp1:contiguous:mb8"], max_response_length=LIMIT, loss_aggregation_divisor=LIMIT
    )
    for step, logged in zip(replayed.steps, found["logs"], strict=True):
        for mode in modes:
            for name in ("gradient_ratio", "gradient_cosine", "weight_share/length_p100", "effective_tokens"):
                assert logged[f"aggcli/{mode}/{name}"] == pytest.approx(step["modes"][mode][name], abs=1e-12)
    assert found["logs"][0]["aggcli/prompt_mean/gradient_ratio"] == 1
    assert found["logs"][0]["aggcli/constant/gradient_cosine"] < 0.999


@pytest.mark.parametrize("case", STEPPED, ids=lambda case: case.name)
def test_a_step_of_the_trainer_is_a_step_of_ours(case: Case, one: dict[str, dict[str, Any]], tmp_path: Path, capsys) -> None:
    where = Path(one[case.name]["rollouts"]).parent
    flags = {
        "rollouts": where / "rollouts" / "000001.jsonl",
        "model": where / "model",
        "loss_aggregation": f"trl:{case.loss_type}",
        "loss_aggregation_divisor": LIMIT if case.loss_type == "dr_grpo" else None,
        "max_response_length": LIMIT,
        "advantages": "recorded",
        "kl_coef": case.trl["beta"],
        "num_iterations": case.steps,
        "optimizer": "sgd",
        "lr": 0.05,
        "clip_grad": 0,
        "micro_batch_size": 16,
        "dtype": "float32",
        "output": tmp_path / "ours",
    }
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
    unbiased = ["--kl-unbiased"] if case.trl.get("use_bias_correction_kl", True) else []
    told = command(capsys, "run", *given, *unbiased)
    assert told.code == 0, told.err
    theirs_Q = load_file(where / "after")["parameters"]
    ours, before = load_file(tmp_path / "ours" / "checkpoint.safetensors"), dict(tiny_llama().named_parameters())
    ours_Q = torch.cat([ours[f"parameters.{name}"][0].flatten() for name in before])
    before_Q = torch.cat([value.detach().flatten() for value in before.values()])
    assert (theirs_Q - before_Q).abs().max() > 1e-3
    assert (ours_Q - theirs_Q).abs().max() < 1e-6


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_anew_and_another_run_is_refused(
    one: dict[str, dict[str, Any]],
) -> None:
    found = one["resumed"]
    assert [Path(name).stem for name in found["files"]] == ["000001", "000002", "000003", "000004"]
    assert found["rewritten"] == ["000003.jsonl", "000004.jsonl"]
    assert "holds the rollouts of another run; give write_rollouts a new folder" in found["again"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_has_no_exact_answer_is_refused_in_one_line(case: Case, one: dict[str, dict[str, Any]]) -> None:
    refused = one[case.name]["refused"]
    assert REFUSED[case] in refused
    assert "\n" not in refused
