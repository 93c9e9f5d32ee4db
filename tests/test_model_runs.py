"""`aggcli run|compare --model`: a tiny random language model through the same commands, records and resume as the small one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli import aggcli, records, refused
from tests.tiny_models import write_tiny

TASK = """
class Often:
    def question(self, number):
        return f"say {number % 1000}"

    def score(self, number, response):
        if len(response) % 3 == 2:
            raise RuntimeError("an answer of a length that this checker does not like")
        return float(len(response) % 3)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in `tiny`, and a task that it answers right at times."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "tiny")
    (folder / "often_right.py").write_text(TASK)
    return folder


def _flags(place: Path, **more: object) -> list[str]:
    settings = {
        "model": place / "tiny",
        "task": "often_right:Often",
        "dtype": "float64",
        "lr": 1e-2,
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 4,
        "max_response_length": 6,
        "evaluation_prompts": 2,
        "modes": "sample_mean,token_mean",
        "seeds": 1,
        "steps": 2,
        **more,
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None]


def _rollouts(folder: Path, step: int = 0) -> list[dict]:
    return records(folder / "rollouts" / f"{step:05d}.jsonl")


@pytest.mark.slow
def test_modes_of_a_seed_begin_with_the_same_responses_and_a_resumed_stack_goes_on_exactly(
    place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    told = aggcli(capsys, "compare", *_flags(place), "--save-rollouts", "-o", whole)
    assert told.code == 0, told.err
    modes = [whole / name / "seed-0" for name in ("sample_mean", "token_mean")]
    first = [[sample["tokens"] for sample in _rollouts(mode)] for mode in modes]
    assert first[0] == first[1]
    assert len({len(sample["old_log_probs"]) for sample in _rollouts(modes[0])}) > 1
    losses = [[line["pg_loss"] for line in records(mode / "metrics.jsonl")] for mode in modes]
    assert losses[0] != losses[1]
    (line, *_) = records(modes[0] / "metrics.jsonl")
    assert 0 < line["checker_errors"] < 12
    cut_off = [sample["status"] == "truncated" for sample in _rollouts(modes[0])]
    lengths = [sample["response_length"] - (not was_cut) for sample, was_cut in zip(_rollouts(modes[0]), cut_off, strict=True)]
    assert line["checker_errors"] == sum(length % 3 == 2 for length in lengths)
    assert aggcli(capsys, "compare", *_flags(place, steps=1), "--save-rollouts", "-o", cut).code == 0
    assert aggcli(capsys, "compare", *_flags(place), "--save-rollouts", "--resume", "-o", cut).code == 0
    for name in ("sample_mean", "token_mean"):
        for file in ("metrics.jsonl", "rollouts/00001.jsonl"):
            at = f"{name}/seed-0/{file}"
            assert (cut / at).read_bytes() == (whole / at).read_bytes(), at


BAD = [
    ({"model": "nowhere/at/all"}, "there is no such folder"),
    ({"model": "."}, "is no model folder: it has no config.json"),
    ({"model": ""}, "--model is empty"),
    ({"task": "running-sum"}, "--task running-sum: is for the small policy; with --model give rg:NAME"),
    ({"task": "summing"}, "--task summing: is not known; with --model give rg:NAME"),
    ({"max_response_length": 300}, "and the model holds 256"),
    ({"warm_start": "some.safetensors"}, "--warm-start is for the small policy"),
    ({"model": None, "task": "rg:chain_sum"}, "is in words; give a language model with --model"),
    ({"model": None, "task": "control", "lora_rank": 2}, "--lora-rank is for language models"),
    ({"cp": 2}, "context parallelism is for the small policy"),
]


@pytest.mark.parametrize(("bad", "said"), BAD, ids=lambda value: "" if isinstance(value, str) else ",".join(value))
def test_what_cannot_be_trained_is_refused_in_a_line(
    bad: dict, said: str, place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(tmp_path)
    assert said in refused(aggcli(capsys, "compare", *_flags(place, **bad), "-o", tmp_path / "out"))


def test_a_tokenizer_without_an_end_token_and_damaged_weights_are_refused_in_a_line(
    place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    endless = write_tiny(tmp_path / "endless", end_token=None)
    assert "its tokenizer has no end token" in refused(
        aggcli(capsys, "run", *_flags(place, model=endless, modes=None, seeds=None))
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(place / "tiny", damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights")
    line = refused(aggcli(capsys, "run", *_flags(place, model=damaged, modes=None, seeds=None)))
    assert "transformers cannot load it" in line


def test_code_and_pickles_that_come_with_a_model_are_never_run(
    place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights as a pickle, which torch would load; and a model class of the folder's own, which leaves a trace if imported."""
    monkeypatch.syspath_prepend(str(place))
    pickled, coded, trace = tmp_path / "pickled", tmp_path / "coded", tmp_path / "trace"
    for folder in (pickled, coded):
        shutil.copytree(place / "tiny", folder)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert "transformers cannot load it" in refused(
        aggcli(capsys, "run", *_flags(place, model=pickled, modes=None, seeds=None))
    )
    config = json.loads((coded / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert "transformers cannot load it" in refused(aggcli(capsys, "run", *_flags(place, model=coded, modes=None, seeds=None)))
    assert not trace.exists()
