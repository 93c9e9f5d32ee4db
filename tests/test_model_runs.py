"""`aggcli run|compare --model`: a tiny random language model through the same commands, records and resume as the small one."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aggcli.policy import loading
from aggcli.policy.causal_lm import CausalPolicy
from tests.cli import aggcli, records, refused
from tests.tiny_models import LETTERS, write_tiny

TASK = """
class Often:
    def question(self, number):
        return f"say {number % 1000}"

    def score(self, number, response):
        if response[0] in RAISES:
            raise RuntimeError("an answer that this checker does not like")
        return float(sum(map(ord, response)) % 2)


RAISES = "abcdefgh "
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
        "max_response_length": 16,
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
    assert {path.name for path in whole.glob("*.safetensors")} == {"checkpoint-0.safetensors", "checkpoint-1.safetensors"}
    assert [line["runs"] for mode in modes for line in records(mode / "timings.jsonl")] == [1, 1, 1, 1]
    first = [[sample["tokens"] for sample in _rollouts(mode)] for mode in modes]
    assert first[0] == first[1]
    assert len({len(sample["old_log_probs"]) for sample in _rollouts(modes[0])}) > 1
    losses = [[line["pg_loss"] for line in records(mode / "metrics.jsonl")] for mode in modes]
    assert losses[0] != losses[1]
    (line, *_) = records(modes[0] / "metrics.jsonl")
    first_ids = [sample["tokens"][-sample["response_length"]] for sample in _rollouts(modes[0])]
    assert line["checker_errors"] == sum(at == 1 or LETTERS[at] in "abcdefgh" for at in first_ids) > 0
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
]


@pytest.mark.parametrize(("bad", "said"), BAD, ids=lambda value: "" if isinstance(value, str) else ",".join(value))
def test_what_cannot_be_trained_is_refused_in_a_line(
    bad: dict, said: str, place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(tmp_path)
    assert said in refused(aggcli(capsys, "compare", *_flags(place, **bad), "-o", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


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


def test_a_hub_that_does_not_answer_is_said_at_once_and_its_cache_is_used(
    place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    hub = import_module("huggingface_hub")
    asked: list[str] = []

    def silent(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.HfApi, "model_info", silent)
    flags = _flags(place, model="some/model", modes=None, seeds=None)
    line = refused(aggcli(capsys, "run", *flags, "-o", tmp_path / "out"))
    assert "--model some/model: there is no such folder, and the hub of Hugging Face does not answer (Name or service" in line
    assert asked == ["some/model"]
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: str(place / "tiny" / file))
    assert loading._place("some/model") == ("some/model", True)


def _trained_on(place: Path, dump: Path, capsys, output: Path, **more: object) -> dict:
    settings = {"model": place / "tiny", "rollouts": dump, "dtype": "float64", "lr": 1e-2, **more}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    told = aggcli(capsys, "run", *flags, "-o", output)
    assert told.code == 0, told.err
    (line,) = records(output / "metrics.jsonl")
    return line


@pytest.mark.slow
def test_rollouts_trained_on_with_the_weights_that_sampled_them_have_a_ratio_of_1_exactly(
    place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    flags = _flags(place, modes=None, seeds=None, steps=1, temperature=0.8)
    assert aggcli(capsys, "run", *flags, "--save-rollouts", "-o", tmp_path / "sampled").code == 0
    (sampled,) = records(tmp_path / "sampled" / "metrics.jsonl")
    dump = tmp_path / "sampled" / "rollouts"
    line = _trained_on(place, dump, capsys, tmp_path / "again", temperature=0.8, kl_coef=0.1)
    assert (line["ratio_max"], line["ratio_deviation"], line["pg_clipfrac"], line["ppo_kl"], line["kl_loss"]) == (1, 0, 0, 0, 0)
    assert 0 < line["sampler_mismatch"] < 1e-5, "generation works in float32"
    for name in ("pg_loss", "grad_norm", "entropy_loss", "raw_reward"):
        assert line[name] == pytest.approx(sampled[name], rel=1e-12), name
    assert line["grad_norm"] > 1e-3
    other = _trained_on(place, dump, capsys, tmp_path / "hotter", temperature=1.0)
    assert other["ratio_deviation"] > 1e-2, "the recorded log-probabilities are the old policy's"


@pytest.mark.slow
def test_a_model_learns_the_same_where_rows_without_a_gradient_go_apart(
    place: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    told = {}
    for name, fewest in (("apart", 1), ("whole", None)):
        monkeypatch.setattr(CausalPolicy, "fewest_apart", fewest)
        flags = _flags(place, modes=None, seeds=None, rollout_batch_size=6, n_samples_per_prompt=2)
        assert aggcli(capsys, "run", *flags, "-o", tmp_path / name).code == 0
        told[name] = records(tmp_path / name / "metrics.jsonl")
    for apart, whole in zip(told["apart"], told["whole"], strict=True):
        assert 0 < apart["zero_variance_groups"] < apart["groups"], "some rows have a gradient and some have none"
        for number in ("pg_loss", "grad_norm", "entropy_loss", "sampler_mismatch", "raw_reward"):
            assert apart[number] == pytest.approx(whole[number], rel=1e-9, abs=1e-15), number


def test_token_ids_outside_of_the_vocabulary_and_rows_beyond_the_context_are_refused(
    place: Path, tmp_path: Path, capsys
) -> None:
    row = {"group_index": 0, "reward": 1.0, "response_length": 2, "total_length": 3, "tokens": [3, 4, 99]}
    for name, rows, said in (
        ("ids", [row], "sample 0: token id 99 is outside of the model's vocabulary of 44"),
        ("long", [row | {"tokens": [3] * 300, "total_length": 300}], "and the model holds 256"),
    ):
        dump = tmp_path / f"{name}.jsonl"
        dump.write_text("".join(json.dumps({**rows[0], "reward": reward}) + "\n" for reward in (0.0, 1.0)))
        assert said in refused(aggcli(capsys, "run", f"--rollouts={dump}", f"--model={place / 'tiny'}", "-o", tmp_path / "out"))
