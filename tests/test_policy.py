"""The stacked transformer, its log-probabilities of responses, and its warm start."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aggcli.errors import SettingError
from aggcli.policy import warm_start as warm
from aggcli.policy.log_probs import response_log_probs
from aggcli.policy.packing import pack
from aggcli.policy.sampling import sample, uniforms
from aggcli.policy.transformer import (
    Parameters,
    PolicyConfig,
    hidden,
    initial_parameters,
    logits,
    run_of,
    shapes,
    stacked,
)
from aggcli.tasks import make_task
from tests.fake_cuda import fake_cuda

CONFIG = PolicyConfig(vocabulary_size=7, max_length=20, layers=2, width=16, heads=2)
PROMPT = 4


def policies(runs: int, config: PolicyConfig = CONFIG) -> Parameters:
    made = [initial_parameters(config, torch.Generator().manual_seed(run), torch.float64) for run in range(runs)]
    return {name: torch.cat([one[name] for one in made]) for name in made[0]}


def rows_of(runs: int, groups: int = 3, repeats: int = 4, longest: int = 11) -> tuple[Tensor, Tensor]:
    """Rows that share prompts in groups, with responses of 0 to `longest` tokens, and noise as padding."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 7, (runs, groups, PROMPT), generator=generator).repeat_interleave(repeats, 1)
    response = torch.randint(0, 7, (runs, groups * repeats, longest), generator=generator)
    length_RB = torch.randint(0, longest + 1, (runs, groups * repeats), generator=generator)
    length_RB[:, :3] = torch.tensor([0, 1, longest])
    return torch.cat([prompts, response], -1), length_RB


def by_hand(parameters: Parameters, tokens: list[int]) -> list[list[float]]:
    """Logits of one row of run 0 by loops over positions, heads and keys."""
    weight = {name: value[0].tolist() for name, value in parameters.items()}
    size, heads = CONFIG.head_width, CONFIG.heads

    def times(vector: list[float], matrix: list[list[float]]) -> list[float]:
        return [sum(v * row[j] for v, row in zip(vector, matrix, strict=True)) for j in range(len(matrix[0]))]

    def normed(vector: list[float]) -> list[float]:
        return [v / math.sqrt(sum(u * u for u in vector) / len(vector)) for v in vector]

    stream = [
        [a + b for a, b in zip(weight["embedding"][token], weight["position"][place], strict=True)]
        for place, token in enumerate(tokens)
    ]
    for layer in range(CONFIG.layers):
        qkv = [times(normed(x), weight[f"layers.{layer}.qkv"]) for x in stream]
        for place in reversed(range(len(tokens))):
            mixed: list[float] = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                key_part = slice(16 + head * size, 16 + (head + 1) * size)
                value_part = slice(32 + head * size, 32 + (head + 1) * size)
                scores = [
                    math.exp(sum(q * k for q, k in zip(qkv[place][part], qkv[j][key_part], strict=True)) / math.sqrt(size))
                    for j in range(place + 1)
                ]
                mixed += [
                    sum(score / sum(scores) * qkv[j][value_part][d] for j, score in enumerate(scores)) for d in range(size)
                ]
            added = times(mixed, weight[f"layers.{layer}.attention_out"])
            stream[place] = [a + b for a, b in zip(stream[place], added, strict=True)]
        for place, x in enumerate(stream):
            active = [max(v, 0.0) for v in times(normed(x), weight[f"layers.{layer}.mlp_in"])]
            stream[place] = [a + b for a, b in zip(x, times(active, weight[f"layers.{layer}.mlp_out"]), strict=True)]
    return [times(normed(x), weight["head"]) for x in stream]


def test_logits_are_those_of_attention_written_as_loops():
    parameters = policies(2)
    tokens = [3, 1, 4, 1, 5, 2, 6]
    expected = torch.tensor([by_hand(parameters, tokens)], dtype=torch.float64)
    got = logits(run_of(parameters, 0), CONFIG, torch.tensor([[tokens]]))[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_response_log_probs_and_entropies_are_those_of_each_row_alone(packed: bool):
    parameters = policies(2)
    tokens_RBL, length_RB = rows_of(2)
    prompt = PROMPT if packed else torch.full((2, 12), PROMPT)
    log_prob_RBC, entropy_RBC = response_log_probs(parameters, CONFIG, tokens_RBL, prompt, length_RB, entropy=True)
    assert entropy_RBC is not None
    for run in range(2):
        for row in range(12):
            n = int(length_RB[run, row])
            alone = tokens_RBL[run, row, : PROMPT + n]
            log_probs = logits(run_of(parameters, run), CONFIG, alone[None, None])[0, 0].log_softmax(-1)
            expected = [float(log_probs[PROMPT + c - 1, alone[PROMPT + c]]) for c in range(n)]
            spread = [-sum(math.exp(v) * v for v in log_probs[PROMPT + c - 1].tolist()) for c in range(n)]
            rest = [0.0] * (log_prob_RBC.shape[-1] - n)
            assert log_prob_RBC[run, row].tolist() == pytest.approx(expected + rest, abs=1e-12)
            assert entropy_RBC[run, row].tolist() == pytest.approx(spread + rest, abs=1e-12)


def test_rows_may_have_prompts_of_different_length():
    parameters, (tokens_RBL, length_RB) = policies(1), rows_of(1)
    prompt_RB = torch.arange(12)[None] % 3 + 2
    length_RB = (length_RB - 2).clamp(min=0)
    log_prob_RBC, _ = response_log_probs(parameters, CONFIG, tokens_RBL, prompt_RB, length_RB)
    for row in range(12):
        prompt, n = int(prompt_RB[0, row]), int(length_RB[0, row])
        alone = tokens_RBL[:, row : row + 1, : prompt + n]
        expected, _ = response_log_probs(parameters, CONFIG, alone, prompt, torch.tensor([[n]]))
        torch.testing.assert_close(log_prob_RBC[0, row, :n], expected[0, 0, :n], rtol=0, atol=1e-12)


def gradients(parameters: Parameters, tokens_RBL: Tensor, length_RB: Tensor, prompt: int | Tensor) -> list[Tensor]:
    """Of an arbitrary weighted sum of log-probabilities and entropies."""
    leaves = {name: value.clone().requires_grad_(True) for name, value in parameters.items()}
    log_prob, entropy = response_log_probs(leaves, CONFIG, tokens_RBL, prompt, length_RB, entropy=True)
    assert entropy is not None
    weight = torch.linspace(-1, 2, log_prob.shape[1] * log_prob.shape[2], dtype=torch.float64).view(log_prob.shape[1:])
    return list(torch.autograd.grad((log_prob * weight + entropy * weight.cos()).sum(), list(leaves.values())))


def test_a_run_of_a_stack_is_the_run_alone_and_so_are_its_gradients():
    parameters, (tokens_RBL, length_RB) = policies(4), rows_of(4)
    length_RB[2] = length_RB[2].clamp(max=3)  # another run than the longest decides nothing here
    length_RB[:, 0] = 11
    together, _ = response_log_probs(parameters, CONFIG, tokens_RBL, PROMPT, length_RB)
    slopes = gradients(parameters, tokens_RBL, length_RB, PROMPT)
    for run in range(4):
        part = slice(run, run + 1)
        alone, _ = response_log_probs(run_of(parameters, run), CONFIG, tokens_RBL[part], PROMPT, length_RB[part])
        torch.testing.assert_close(together[part], alone, rtol=0, atol=1e-12)
        for slope, own in zip(
            slopes, gradients(run_of(parameters, run), tokens_RBL[part], length_RB[part], PROMPT), strict=True
        ):
            torch.testing.assert_close(slope[part], own, rtol=0, atol=1e-12)


def test_gradients_of_packed_rows_are_those_of_padded_rows():
    parameters, (tokens_RBL, length_RB) = policies(2), rows_of(2)
    padded = gradients(parameters, tokens_RBL, length_RB, torch.full((2, 12), PROMPT))
    for packed, expected in zip(gradients(parameters, tokens_RBL, length_RB, PROMPT), padded, strict=True):
        torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    config = PolicyConfig(vocabulary_size=5, max_length=6, layers=1, width=4, heads=2)
    parameters = policies(1, config)
    tokens_RBL = torch.tensor([[[1, 2, 3, 0, 4], [1, 2, 0, 4, 4], [3, 2, 1, 0, 0]]])
    length_RB = torch.tensor([[3, 2, 1]])
    names = list(parameters)

    def total(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        log_prob, entropy = response_log_probs(given, config, tokens_RBL, 2, length_RB, entropy=True)
        assert entropy is not None
        return (log_prob * torch.tensor([1.0, -2.0, 3.0]) + entropy).sum()

    assert torch.autograd.gradcheck(total, [parameters[name].requires_grad_(True) for name in names], atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_padding_never_reaches_a_real_token(packed: bool):
    parameters, (tokens_RBL, length_RB) = policies(2), rows_of(2)
    prompt = PROMPT if packed else torch.full((2, 12), PROMPT)
    padding_RBL = torch.arange(tokens_RBL.shape[-1]) >= PROMPT + length_RB[..., None]
    changed_RBL = torch.where(padding_RBL, (tokens_RBL + 3) % 7, tokens_RBL)
    for made in (gradients, lambda *given: list(response_log_probs(given[0], CONFIG, given[1], given[3], given[2]))[:1]):
        for one, other in zip(
            made(parameters, tokens_RBL, length_RB, prompt), made(parameters, changed_RBL, length_RB, prompt), strict=True
        ):
            assert torch.equal(one, other)


def test_each_bin_holds_every_row_once_and_padding_is_small():
    tokens_RBL, length_RB = rows_of(3, groups=16, repeats=8)
    packing = pack(tokens_RBL, PROMPT, length_RB)
    read = int((length_RB - 1).clamp(min=0).sum(-1).max())
    flat = packing.tokens_RT.shape[1]
    assert flat == 16 * PROMPT + sum(piece.rows * piece.length for piece in packing.bins)
    assert flat < 1.3 * (read + 16 * PROMPT)
    places = packing.predicted_at_RBC[packing.valid_RBC & (torch.arange(11) > 0)]
    per_run = (length_RB - 1).clamp(min=0).sum(-1).tolist()
    for run, own in enumerate(places.split(per_run)):
        assert own.unique().numel() == per_run[run]


def test_a_shard_with_gathered_keys_computes_the_rows_of_the_whole():
    parameters, (tokens_RBL, _) = policies(2), rows_of(2)
    whole_RBLD = hidden(parameters, CONFIG, tokens_RBL)
    L, kept = tokens_RBL.shape[-1], torch.tensor([0, 1, 2, 3, 11, 12, 13, 14])  # the zig-zag share of rank 0 of 2
    every_layer = []
    hidden(
        parameters,
        CONFIG,
        tokens_RBL,
        positions=torch.arange(L),
        gather=lambda key, value, positions: every_layer.append((key, value, positions)) or (key, value, positions),
    )
    whole = iter(every_layer)
    shard_RBLD = hidden(
        parameters, CONFIG, tokens_RBL[..., kept], positions=kept, gather=lambda key, value, positions: next(whole)
    )
    torch.testing.assert_close(shard_RBLD, whole_RBLD[:, :, kept], rtol=0, atol=1e-12)


def test_padding_of_a_shard_stands_after_every_token():
    parameters, (tokens_RBL, _) = policies(1), rows_of(1)
    padded_RBL = torch.cat([tokens_RBL[..., :3], tokens_RBL[..., -2:], tokens_RBL[..., 3:]], -1)
    L = tokens_RBL.shape[-1]
    positions = torch.cat([torch.arange(3), torch.full((2,), CONFIG.max_length), torch.arange(3, L)])
    got = hidden(parameters, CONFIG, padded_RBL, positions=positions, gather=lambda *local: local)
    real = torch.cat([got[:, :, :3], got[:, :, 5:]], 2)
    torch.testing.assert_close(real, hidden(parameters, CONFIG, tokens_RBL), rtol=0, atol=1e-12)


def test_copies_of_a_run_are_equal_and_do_not_share_memory():
    one = initial_parameters(CONFIG, torch.Generator().manual_seed(0))
    three = stacked(one, 3)
    for name, value in three.items():
        assert value.is_contiguous()
        value[1] += 1
        assert torch.equal(value[0], one[name][0])
        assert torch.equal(value[2], one[name][0])


def test_every_precision_starts_at_the_same_point():
    single = initial_parameters(CONFIG, torch.Generator().manual_seed(3), torch.float32)
    double = initial_parameters(CONFIG, torch.Generator().manual_seed(3), torch.float64)
    assert all(torch.equal(single[name].double(), double[name]) for name in single)


def test_the_default_policy_has_about_a_hundred_thousand_parameters():
    task = make_task("running-sum")
    config = warm.default_policy(task, 32)
    assert sum(math.prod(shape) for shape in shapes(config).values()) == 104192
    assert config.max_length == 64
    assert warm.default_policy(task, 58).max_length == 128


def test_rows_longer_than_the_policy_are_refused():
    with pytest.raises(SettingError, match="rows of 21 tokens: the policy holds at most 20; raise its max_length"):
        logits(policies(1), CONFIG, torch.zeros(1, 1, 21, dtype=torch.int64))
    with pytest.raises(SettingError, match="policy width 30: must be a multiple of its 4 heads"):
        PolicyConfig(vocabulary_size=7, max_length=8, width=30)


def test_forward_and_backward_keep_to_one_device():
    tokens_RBL, length_RB = rows_of(2)
    packing = pack(tokens_RBL, PROMPT, length_RB)
    parameters = {name: torch.empty(2, *shape, device="meta", requires_grad=True) for name, shape in shapes(CONFIG).items()}
    log_prob, entropy = warm.packed_log_probs(parameters, CONFIG, packing.to("meta"), entropy=True)
    assert entropy is not None
    (log_prob.sum() + entropy.sum()).backward()
    prompt_RB = torch.full((2, 12), PROMPT, device="meta")
    hidden(parameters, CONFIG, tokens_RBL.to("meta"), positions=prompt_RB[..., None], gather=lambda *k: k).sum().backward()
    for value in parameters.values():
        assert value.grad is not None
        assert value.grad.device.type == "meta"


def test_padded_rows_run_on_cuda_tensors():
    with fake_cuda():
        parameters = {name: torch.empty(2, *shape, device="cuda") for name, shape in shapes(CONFIG).items()}
        tokens_RBL = torch.zeros(2, 3, 9, dtype=torch.int64, device="cuda")
        log_prob, entropy = response_log_probs(parameters, CONFIG, tokens_RBL, 4, entropy=True)
        assert entropy is not None
        assert log_prob.device.type == entropy.device.type == "cuda"
        assert log_prob.shape == (2, 3, 5)


def test_autocast_computes_the_same_in_bfloat16_roughly():
    parameters = {name: value.float().requires_grad_(True) for name, value in policies(2).items()}
    tokens_RBL, length_RB = rows_of(2)
    exact, _ = response_log_probs(parameters, CONFIG, tokens_RBL, PROMPT, length_RB)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = response_log_probs(parameters, CONFIG, tokens_RBL, PROMPT, length_RB)
    rough.sum().backward()
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.1)
    assert not torch.equal(rough, exact)
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in parameters.values())


# -- warm start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["running-sum", "control"])
def test_the_shipped_policy_is_right_about_half_of_the_time(name: str):
    task = make_task(name)
    config = warm.default_policy(task, 32)
    parameters, about = warm.load_policy(warm.SHIPPED / warm.file_name(task))
    assert about["settings"] == warm.settings_of(task, config)
    prompts = task.prompts(0, 0, 512)
    result = sample(
        parameters, config, prompts.tokens_SP[None], uniforms(0, 0, 0, 512, 32)[None], end_id=task.end_id, pad_id=task.pad_id
    )
    reward, _ = task.verify(prompts.answer_S[None], result.tokens_RBL, result.length_RB)
    assert float(reward.mean()) == pytest.approx(0.5, abs=0.09)
    assert int(result.truncated_RB.sum()) <= 5
    assert float(result.length_RB.double().mean()) == pytest.approx({"running-sum": 8.5, "control": 12.3}[name], abs=0.9)


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
    (path,) = (tmp_path / "aggcli").iterdir()
    assert path.name == warm.key_of(warm.settings_of(task, config)) + ".safetensors"
    path.write_bytes(b"half a file")
    warm.starting_policy(task, config)
    assert len(made) == 2
    warm.starting_policy(task, dataclasses.replace(config, max_length=64))
    assert len(made) == 3


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
