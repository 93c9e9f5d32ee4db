"""The warm start: shipped, made, cached."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from aggcli.errors import SettingError
from aggcli.policy import warm_start as warm
from aggcli.policy.log_probs import response_log_probs
from aggcli.policy.protocol import Noise
from aggcli.policy.sampling import sample
from aggcli.policy.transformer import PolicyConfig, initial_parameters
from aggcli.policy.weights import weights_of
from aggcli.tasks import make_task


@pytest.mark.parametrize("name", ["running-sum", "control"])
def test_the_shipped_policy_is_right_about_half_of_the_time(name: str):
    task = make_task(name)
    config = warm.default_policy(task, 32)
    parameters, about = warm.load_policy(warm.SHIPPED / warm.file_name(task))
    assert about["settings"] == warm.settings_of(task, config)
    prompts = task.prompts(0, 0, 512)
    result = sample(
        parameters,
        config,
        prompts.tokens_SL[None],
        Noise((0,), 0, 0, 512).uniforms(32)[0][None],
        end_id=task.end_id,
        pad_id=task.pad_id,
    )
    reward, *_ = task.verify(prompts.answer_S[None], result.tokens_RBL, result.length_RB)
    assert float(reward.mean()) == pytest.approx(0.5, abs=0.09)
    assert int(result.truncated_RB.sum()) <= 5
    assert float(result.length_RB.double().mean()) == pytest.approx({"running-sum": 8.5, "control": 12.3}[name], abs=0.9)


@pytest.mark.slow
def test_the_warm_start_is_deterministic_and_learns():
    task = make_task("running-sum")
    config = warm.default_policy(task, 32)
    first, again = warm.warm_start(task, config, steps=20), warm.warm_start(task, config, steps=20)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = warm.warm_start(task, config, steps=20, seed=1)
    assert not torch.equal(first["head"], other["head"])
    tokens_BL, prompt, length_B = task.demonstrations(torch.Generator().manual_seed(99), 256)
    before, _ = response_log_probs(
        warm.warm_start(task, config, steps=0), config, tokens_BL[None], prompt, (length_B - prompt)[None]
    )
    after, _ = response_log_probs(first, config, tokens_BL[None], prompt, (length_B - prompt)[None])
    assert float(after.sum()) > 0.8 * float(before.sum())


def test_another_policy_is_made_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = make_task("running-sum", digits=2)
    config = PolicyConfig(len(task.vocabulary), max_length=32, layers=1, width=8, heads=2)
    made = []
    monkeypatch.setattr(warm, "warm_start", lambda *given: made.append(given) or initial_parameters(config, torch.Generator()))
    first = warm.starting_policy(task, config)
    second = warm.starting_policy(task, config)
    assert len(made) == 1
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(weights_of(first).flat_RQ, weights_of(second).flat_RQ), "a checkpoint of the one is read into the other"
    (path,) = (tmp_path / "aggcli").iterdir()
    assert path.name == warm.key_of(warm.settings_of(task, config)) + ".safetensors"
    path.write_bytes(b"half a file")
    warm.starting_policy(task, config)
    assert len(made) == 2
    warm.save_policy(path, first, warm.settings_of(task, config, seed=1), "")  # not what the name says
    warm.starting_policy(task, config)
    assert len(made) == 3
    warm.starting_policy(task, dataclasses.replace(config, max_length=64))
    assert len(made) == 4


def test_a_saved_policy_names_its_settings_and_command_and_is_the_same_file_each_time(tmp_path: Path):
    task = make_task("running-sum", digits=3)
    config = warm.default_policy(task, 32)
    parameters = initial_parameters(config, torch.Generator().manual_seed(0))
    settings, command = warm.settings_of(task, config), warm.command_of(task, config, "x.safetensors")
    for name in ("one", "two"):
        warm.save_policy(tmp_path / name, parameters, settings, command)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    loaded, about = warm.load_policy(tmp_path / "one")
    assert all(torch.equal(loaded[name], parameters[name]) for name in parameters)
    assert about["settings"] == json.loads(json.dumps(settings))
    assert about["command"] == (
        "python -m aggcli.policy.warm_start --task running-sum --digits 3 --max-length 64 --output x.safetensors"
    )


def test_a_file_that_is_no_policy_is_refused_by_name(tmp_path: Path):
    (tmp_path / "bad.safetensors").write_bytes(b"not one")
    with pytest.raises(SettingError, match=re.escape(f"{tmp_path / 'bad.safetensors'}: is not a policy that aggcli saved")):
        warm.load_policy(tmp_path / "bad.safetensors")
