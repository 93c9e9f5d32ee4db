"""Hugging Face causal language models: the chunked path against the plain one, padding, and their own noise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aggcli.config import settings_from
from aggcli.policy import causal_lm, chunked
from aggcli.policy.causal_lm import causal_start, row_log_probs
from aggcli.policy.generation import generate, gumbel, keys_of
from aggcli.policy.loading import load_model
from aggcli.policy.protocol import Noise, Shards
from aggcli.world import ALONE
from tests.tiny_models import FAMILIES, tiny, write_tiny

TEMPERATURE = 0.7


def _rows(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    prompt_B, length_B = torch.tensor([3, 5, 2, 4, 3]), torch.tensor([6, 1, 9, 0, 4])
    tokens_BL = torch.randint(vocabulary, (5, 12), generator=generator)
    return tokens_BL, prompt_B, length_B


def _plain(module: Any, tokens_BL: Tensor, prompt_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row, unpadded, through the model's own logits, all at once."""
    log_probs, entropies = [], []
    for tokens_L, prompt, length in zip(tokens_BL, prompt_B.tolist(), length_B.tolist(), strict=True):
        row_L = tokens_L[: prompt + length]
        all_LV = torch.log_softmax(module(input_ids=row_L[None]).logits[0] / TEMPERATURE, -1)[prompt - 1 : prompt + length - 1]
        log_probs.append(all_LV.gather(1, row_L[prompt:, None])[:, 0])
        entropies.append(-(all_LV.exp() * all_LV).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_in_chunks_are_those_of_the_models_own_logits(family: str, monkeypatch) -> None:
    module = tiny(family)
    monkeypatch.setattr(chunked, "LOGITS_AT_ONCE", 3 * module.config.vocab_size)  # three places at a time
    rows = _rows(module.config.vocab_size)
    weight_T = torch.linspace(-1, 1, 20, dtype=torch.float64)
    found = row_log_probs(module, *rows, torch.float64, temperature=TEMPERATURE, entropy_gradient=True)
    valid_BC = torch.arange(found[0].shape[1]) < rows[2][:, None]
    made = [value_BC[valid_BC] for value_BC in found]
    expected = _plain(module, *rows)
    gradients = []
    for log_prob_T, entropy_T in (made, expected):
        loss = weight_T @ log_prob_T + weight_T.square() @ entropy_T
        gradients.append(torch.autograd.grad(loss, list(module.parameters())))
    for mine, theirs in zip(made, expected, strict=True):
        assert (mine - theirs).abs().max() < 1e-12
    assert not found[0][~valid_BC].any()
    assert max(float((mine - theirs).abs().max()) for mine, theirs in zip(*gradients, strict=True)) < 1e-12
    assert max(float(part.abs().max()) for part in gradients[0]) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_bins_and_the_order_of_rows_change_nothing(family: str) -> None:
    module = tiny(family)
    tokens_BL, prompt_B, length_B = _rows(module.config.vocab_size)
    with torch.no_grad():
        whole, _ = row_log_probs(module, tokens_BL, prompt_B, length_B, torch.float64)
        order_B = torch.tensor([2, 4, 0, 3, 1])
        moved, _ = row_log_probs(module, tokens_BL[order_B], prompt_B[order_B], length_B[order_B], torch.float64)
        wide_BL = torch.nn.functional.pad(tokens_BL, (0, 5), value=7)
        padded, _ = row_log_probs(module, wide_BL, prompt_B, length_B, torch.float64)
        alone = [
            row_log_probs(module, tokens_BL[at : at + 1], prompt_B[at : at + 1], length_B[at : at + 1], torch.float64)[0][0]
            for at in range(5)
        ]
    assert (moved - whole[order_B]).abs().max() < 1e-12
    assert (padded - whole).abs().max() < 1e-12
    for at, own_C in enumerate(alone):
        assert (own_C - whole[at, : len(own_C)]).abs().max() < 1e-12
    assert whole[:, 0].abs().max() > 1


def _sampled(policy: Any, noise: Noise, prompts_RPL: Tensor, length_RP: Tensor, limit: int = 8) -> Any:
    return policy.sample(prompts_RPL, length_RP, noise, limit, end_id=1, pad_id=0)


def test_a_row_draws_the_same_tokens_whatever_stands_beside_it_and_its_log_probs_are_the_trainers() -> None:
    config = settings_from({"dtype": "float64", "temperature": 0.9})
    policy = causal_start(tiny("llama"), config).stack([1e-3, 1e-3], ALONE)
    prompts_RPL = torch.tensor([[5, 6, 7, 8], [9, 10, 2, 2]]).expand(2, 2, 4)
    length_RP = torch.tensor([[4, 2], [4, 2]])
    noise = Noise((3, 3), 2, 0, 6)
    found = _sampled(policy, noise, prompts_RPL, length_RP)
    assert torch.equal(found.tokens_RBL[0], found.tokens_RBL[1]), "runs of one seed draw the same"
    second = _sampled(policy, noise.rows(3, 6), prompts_RPL[:, 1:], length_RP[:, 1:])
    width = second.tokens_RBL.shape[-1]
    assert torch.equal(second.tokens_RBL[0], found.tokens_RBL[0, 3:, :width])
    other = _sampled(policy, Noise((4, 4), 2, 0, 6), prompts_RPL, length_RP)
    assert not torch.equal(other.tokens_RBL[..., :3], found.tokens_RBL[..., :3])
    prompt_B = length_RP[0].repeat_interleave(3)
    rows = [
        torch.cat([prompts_RPL[0, b // 3, : int(prompt_B[b])], found.tokens_RBL[0, b], torch.zeros(4, dtype=torch.int64)])[:12]
        for b in range(6)
    ]
    (some, *_) = policy.passes()
    with torch.no_grad():
        log_probs, *_ = some.log_probs(torch.stack(rows)[None], prompt_B[None], found.length_RB[:1])
    assert (log_probs[0] - found.log_probs_RBL[0][:, : log_probs.shape[-1]]).abs().max() < 1e-5  # generation is in float32
    assert found.log_probs_RBL.min() < -1


def test_gumbel_noise_draws_from_the_softmax() -> None:
    logits_V = torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)
    keys_B = keys_of(Noise((0,), 0, 0, 20000), 0)
    drawn_B = (logits_V + gumbel(keys_B, 3, 4)).argmax(-1)
    share_V = torch.bincount(drawn_B, minlength=4) / 20000
    assert (share_V - logits_V.softmax(0)).abs().max() < 4 * (0.25 / 20000) ** 0.5
    assert not torch.equal(drawn_B, (logits_V + gumbel(keys_B, 4, 4)).argmax(-1))


def test_runs_of_a_stack_learn_apart_and_go_on_from_their_state() -> None:
    config = settings_from({"dtype": "float64", "optimizer": "adamw"})
    start = causal_start(tiny("qwen2"), config)
    policy = start.stack([1e-2, 1e-2], ALONE)
    tokens_BL, prompt_B, length_B = _rows(40)

    def gradient(of: Any) -> Tensor:
        gradient_RQ = of.no_gradient()
        for some in of.passes():
            log_probs, *_ = some.log_probs(tokens_BL[None], prompt_B[None], length_B[None])
            some.add_gradient((1.0 + some.runs.start) * log_probs.sum(), gradient_RQ)
        return gradient_RQ

    first_RQ = gradient(policy)
    assert torch.allclose(2 * first_RQ[0], first_RQ[1], rtol=1e-12, atol=1e-12)
    policy.step(first_RQ.clone(), policy.shards.norm(first_RQ), torch.tensor([True, False]))
    assert torch.equal(policy.flat_RQ[1], start.initial_Q)
    assert not torch.equal(policy.flat_RQ[0], start.initial_Q)
    second_RQ = gradient(policy)
    assert torch.equal(second_RQ[1], first_RQ[1]), "the run that stayed has the gradient that it had"
    assert (second_RQ[0] - first_RQ[0]).abs().max() > 1e-3
    again = start.stack([1e-2, 1e-2], ALONE)
    again.load({name: value.clone() for name, value in policy.state().items()})
    for one in (policy, again):
        gradient_RQ = gradient(one)
        one.step(gradient_RQ, one.shards.norm(gradient_RQ), torch.tensor([True, True]))
    assert torch.equal(policy.flat_RQ, again.flat_RQ)


def test_rows_without_a_gradient_go_apart_unless_all_ranks_must_make_the_same_passes() -> None:
    start = causal_start(tiny("qwen2"), settings_from({"dtype": "float64"}))
    assert start.stack([1e-2], ALONE).fewest_apart == 1
    cut: Any = SimpleNamespace(size=2)
    assert causal_lm.CausalPolicy(start, [1e-2], Shards(cut)).fewest_apart is None


def test_what_the_policy_that_all_runs_begin_as_samples_is_sampled_once(monkeypatch) -> None:
    calls: list[int] = []

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(len(given[3]))
        return generate(*given, **more)

    monkeypatch.setattr(causal_lm, "generate", counted)
    policy = causal_start(tiny("llama"), settings_from({"dtype": "float64"})).stack([1e-2] * 3, ALONE)
    prompts_RPL, length_RP = torch.tensor([[5, 6, 7]]).expand(3, 1, 3), torch.full((3, 1), 3)
    first = _sampled(policy, Noise((3, 3, 4), 0, 0, 2), prompts_RPL, length_RP)
    assert calls == [2, 2], "runs of seed 3 once, the run of seed 4"
    again = _sampled(policy, Noise((3, 3, 4), 0, 0, 2), prompts_RPL, length_RP)
    assert torch.equal(first.tokens_RBL, again.tokens_RBL)
    assert calls == [2, 2]
    _sampled(policy, Noise((3, 3, 4), 1, 0, 2), prompts_RPL, length_RP)
    _sampled(policy, Noise((3, 3, 4), 0, 0, 2), prompts_RPL + 1, length_RP)
    assert len(calls) == 6, "of another step and other prompts anew"
    policy.flat_RQ[0] += 1e-3
    _sampled(policy, Noise((3, 3, 4), 0, 0, 2), prompts_RPL, length_RP)
    assert len(calls) == 7, "the run that has learnt samples for itself"


def _loaded(folder: Path, **settings: Any) -> Any:
    config = settings_from(
        {"model": str(folder), "dtype": "float64", "lr": 0.1, "optimizer": "sgd", "clip_grad": 0.0, **settings}
    )
    return causal_start(load_model(str(folder), config, torch.device("cpu")), config)


def _summed(policy: Any) -> tuple[Tensor, Tensor]:
    """The sum of the log-probabilities of some rows, and its gradient [R, Q]."""
    tokens_BL, prompt_B, length_B = _rows(40)
    gradient_RQ = policy.no_gradient()
    (some,) = policy.passes()
    log_probs, *_ = some.log_probs(tokens_BL[None], prompt_B[None], length_B[None])
    some.add_gradient(log_probs.sum(), gradient_RQ)
    return log_probs.sum().detach(), gradient_RQ


def test_adapters_are_all_that_is_trained_and_merged_into_the_weights_they_give_the_same_log_probs(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    whole, start = _loaded(tmp_path), _loaded(tmp_path, lora_rank=3)
    frozen = {name: value.clone() for name, value in start.module.named_parameters() if not value.requires_grad}
    policy = start.stack([0.1], ALONE)
    plain, _ = _summed(whole.stack([0.1], ALONE))
    assert float(_summed(policy)[0]) == pytest.approx(float(plain), abs=1e-12), "they begin as no change"
    for _ in range(2):
        _, gradient_RQ = _summed(policy)
        policy.step(gradient_RQ, policy.shards.norm(gradient_RQ), torch.tensor([True]))
    adapted, _ = _summed(policy)
    assert abs(float(adapted - plain)) > 1e-3
    named = dict(start.module.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in frozen.items())
    linear = 2 * (
        2 * (16 + 16) + 2 * (16 + 8) + 2 * (16 + 32) + (32 + 16)
    )  # of two layers: q and o, k and v, gate and up, down
    assert sum(policy.sizes().values()) == 3 * linear
    changed = dict(whole.module.named_parameters())
    with torch.no_grad():
        for name, value_OR in named.items():
            if "lora_B" in name:
                value_RI = named[name.replace("lora_B", "lora_A")]
                changed[name.replace(".lora_B.default", "")] += 2 * value_OR @ value_RI  # alpha over rank
        merged = causal_lm.row_log_probs(whole.module, *_rows(40), torch.float64)[0].sum()
    assert float(merged) == pytest.approx(float(adapted), abs=1e-11)


def test_recomputed_activations_give_the_same_gradient(tmp_path: Path, monkeypatch) -> None:
    write_tiny(tmp_path)
    passes: list[str] = []
    layer = type(_loaded(tmp_path).module.model.layers[0].mlp)
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *given: (passes.append("mlp"), forward(self, *given))[1])
    starts = _loaded(tmp_path), _loaded(tmp_path, gradient_checkpointing=True)
    passes.clear()
    plain, gradient_RQ = _summed(starts[0].stack([0.1], ALONE))
    once = len(passes)
    again, recomputed_RQ = _summed(starts[1].stack([0.1], ALONE))
    assert float(again) == float(plain)
    assert (recomputed_RQ - gradient_RQ).abs().max() < 1e-12 < gradient_RQ.abs().max()
    assert (once, len(passes) - once) == (2, 4), "each layer once more in the backward pass"


def test_bfloat16_is_the_arithmetic_of_the_layers_and_not_of_the_parameters(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    exact, _ = _summed(_loaded(tmp_path, dtype="float32").stack([0.1], ALONE))
    policy = _loaded(tmp_path, dtype="bfloat16").stack([0.1], ALONE)
    half, gradient_RQ = _summed(policy)
    assert policy.flat_RQ.dtype == gradient_RQ.dtype == half.dtype == torch.float32
    assert 1e-5 < abs(float(half - exact)) / abs(float(exact)) < 2e-2
    assert torch.isfinite(gradient_RQ).all()


def test_what_is_compiled_is_the_layers_through_which_rows_and_generation_go(tmp_path: Path, monkeypatch) -> None:
    write_tiny(tmp_path)
    compiled: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: compiled.append((self, given)))
    assert not _loaded(tmp_path).module.training
    assert not compiled
    module = _loaded(tmp_path, compile=True).module
    assert compiled == [(module.model, {"backend": "inductor", "dynamic": True})]
    seen: list[str] = []
    module.model.register_forward_hook(lambda *_: seen.append("layers"))
    _summed(causal_start(module, settings_from({"dtype": "float64"})).stack([0.1], ALONE))
    assert len(seen) == 2 + 1, "two of the check of its logits"
