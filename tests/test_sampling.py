"""Sampling: noise belongs to (seed, step, sample, position), and nothing else moves a token."""

import pytest
import torch
from torch import Tensor

from aggcli.policy import sampling
from aggcli.policy.log_probs import response_log_probs
from aggcli.policy.protocol import Noise, Sampled
from aggcli.policy.sampling import sample
from aggcli.policy.transformer import Parameters, PolicyConfig, initial_parameters, logits, run_of, shapes
from tests.fake_cuda import fake_cuda

CONFIG = PolicyConfig(vocabulary_size=7, max_length=16, layers=2, width=16, heads=2)
END, PAD, LIMIT = 5, 6, 12


def policies(runs: int) -> Parameters:
    """Different random policies that end at different times."""
    made = [initial_parameters(CONFIG, torch.Generator().manual_seed(run), torch.float64) for run in range(runs)]
    return {name: torch.cat([one[name] for one in made]) for name in made[0]}


def prompts_of(runs: int, groups: int) -> Tensor:
    return torch.randint(0, 5, (runs, groups, 4), generator=torch.Generator().manual_seed(9))


def noise_of(runs: int, rows: int) -> Tensor:
    return torch.stack([Noise((run,), 0, 0, rows).uniforms(LIMIT)[0] for run in range(runs)])


def drawn(parameters: Parameters, prompts: Tensor, noise: Tensor, temperature: float = 1.0) -> Sampled:
    return sample(parameters, CONFIG, prompts, noise, end_id=END, pad_id=PAD, temperature=temperature)


def assert_same(one: Sampled, other: Sampled) -> None:
    width = min(one.tokens_RBL.shape[-1], other.tokens_RBL.shape[-1])
    assert int(one.length_RB.max()) <= width
    assert torch.equal(one.length_RB, other.length_RB)
    assert torch.equal(one.truncated_RB, other.truncated_RB)
    assert torch.equal(one.tokens_RBL[..., :width], other.tokens_RBL[..., :width])
    torch.testing.assert_close(one.log_probs_RBL[..., :width], other.log_probs_RBL[..., :width], rtol=0, atol=1e-12)


def assert_as_alone(together: Sampled, parameters: Parameters, prompts: Tensor, noise: Tensor) -> None:
    for run in range(len(prompts)):
        alone = drawn(run_of(parameters, run), prompts[run : run + 1], noise[run : run + 1])
        part = Sampled(*(getattr(together, name)[run : run + 1] for name in Sampled.__dataclass_fields__))
        assert_same(alone, part)


def test_noise_of_a_sample_does_not_depend_on_count_first_or_length():
    every = Noise((3,), 4, 0, 50).uniforms(32)[0]
    assert torch.equal(Noise((3,), 4, 20, 5).uniforms(32)[0], every[20:25])
    assert torch.equal(Noise((3,), 4, 0, 50).uniforms(8)[0], every[:, :8])
    assert not torch.equal(Noise((3,), 5, 0, 50).uniforms(32)[0], every)
    assert not torch.equal(Noise((4,), 4, 0, 50).uniforms(32)[0], every)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_sampling_are_those_of_the_training_forward(temperature: float):
    parameters, prompts = policies(2), prompts_of(2, 3)
    result = drawn(parameters, prompts, noise_of(2, 12), temperature)
    tokens_RBL = torch.cat([prompts.repeat_interleave(4, 1), result.tokens_RBL], -1)
    log_probs_RBC, _ = response_log_probs(parameters, CONFIG, tokens_RBL, 4, result.length_RB, temperature=temperature)
    width = log_probs_RBC.shape[-1]
    torch.testing.assert_close(log_probs_RBC, result.log_probs_RBL[..., :width], rtol=0, atol=1e-12)
    assert len(set(result.length_RB.flatten().tolist())) > 4  # rows ended at different times


def test_each_token_is_the_inverse_of_the_cumulative_distribution_at_its_noise():
    parameters, prompts, noise = policies(1), prompts_of(1, 2), noise_of(1, 4)
    result = drawn(parameters, prompts, noise)
    for row in range(4):
        tokens = prompts[0, row // 2].tolist()
        for position in range(int(result.length_RB[0, row])):
            chances = logits(parameters, CONFIG, torch.tensor([[tokens]]))[0, 0, -1].softmax(-1).tolist()
            target, cumulative, expected = float(noise[0, row, position]), 0.0, 0
            for token, chance in enumerate(chances):  # the first token whose cumulative chance exceeds the noise
                cumulative += chance
                if cumulative > target:
                    expected = token
                    break
            assert int(result.tokens_RBL[0, row, position]) == expected
            tokens.append(expected)


def test_sampling_does_not_depend_on_compaction(monkeypatch: pytest.MonkeyPatch):
    parameters, prompts, noise = policies(3), prompts_of(3, 4), noise_of(3, 24)
    results = []
    for share, fewest, every in ((0.0, 0, 1), (1.0, 0, 1), (1.0, 20, 1), (0.7, 0, 2), (0.9, 0, 5)):
        monkeypatch.setattr(sampling, "COMPACT_AT", share)
        monkeypatch.setattr(sampling, "FEWEST_SAVED", fewest)
        monkeypatch.setitem(sampling.CHECK_EVERY, "cpu", every)
        results.append(drawn(parameters, prompts, noise))
    for result in results[1:]:
        assert_same(results[0], result)


def test_the_policy_is_asked_once_for_each_prefix_that_unfinished_rows_stand_at(monkeypatch: pytest.MonkeyPatch):
    parameters, prompts, noise = policies(2), prompts_of(2, 2), noise_of(2, 24)
    noise[:, 4:8] = noise[:, :4]  # rows that draw alike, of one prompt
    noise[:, 12:14, :3] = noise[:, 14:16, :3]
    asked: list[int] = []
    read = sampling._Decoder.read

    def counted(self: sampling._Decoder, t: int) -> None:
        asked.append(self.prefixes)
        read(self, t)

    monkeypatch.setattr(sampling._Decoder, "read", counted)
    monkeypatch.setattr(sampling, "COMPACT_AT", 1.0)
    monkeypatch.setattr(sampling, "FEWEST_SAVED", 0)
    result = drawn(parameters, prompts, noise)
    for t, prefixes in enumerate(asked):
        standing = [
            len({(row // 12, *result.tokens_RBL[run, row, : t + 1].tolist()) for row in range(24)
                 if int(result.length_RB[run, row]) > t + 1 or (bool(result.truncated_RB[run, row]) and t + 1 < LIMIT)})
            for run in range(2)
        ]  # fmt: skip
        assert prefixes == max(standing)
    assert asked[0] < 12  # of 24 rows: at most 6 tokens go on after each of two prompts
    assert len(asked) > 6


def test_a_run_is_read_no_more_once_half_of_them_have_ended(monkeypatch: pytest.MonkeyPatch):
    parameters, prompts, noise = policies(8), prompts_of(8, 1), noise_of(8, 1)
    asked: list[tuple[int, int]] = []
    read = sampling._Decoder.read

    def counted(self: sampling._Decoder, t: int) -> None:
        asked.append((self.runs, len(self.weights.head)))
        read(self, t)

    monkeypatch.setattr(sampling._Decoder, "read", counted)
    result = drawn(parameters, prompts, noise)
    runs, expected = 8, []
    for t in range(LIMIT - 1):
        unfinished = int(((result.length_RB > t + 1) | (result.truncated_RB & (t + 1 < LIMIT))).sum())
        runs = unfinished if unfinished <= runs / 2 else runs
        expected.append((runs, runs))
    assert asked == [both for both in expected if both[0]]
    assert len(set(asked)) > 2


def test_rows_that_end_between_two_looks_are_drawn_no_more_after_the_second(monkeypatch: pytest.MonkeyPatch):
    parameters, prompts, noise = policies(2), prompts_of(2, 2), noise_of(2, 24)
    monkeypatch.setitem(sampling.CHECK_EVERY, "cpu", 3)
    rows: list[int] = []
    draw = sampling._Decoder.draw

    def counted(self: sampling._Decoder, t: int) -> Tensor:
        rows.append(len(self.row_M))
        return draw(self, t)

    monkeypatch.setattr(sampling._Decoder, "draw", counted)
    result = drawn(parameters, prompts, noise)
    looked = [t // 3 * 3 for t in range(len(rows))]  # the tokens drawn before the last look
    assert rows == [int(((result.length_RB > before) | result.truncated_RB).sum()) for before in looked]
    assert len(set(rows)) > 2


def test_a_run_of_a_stack_samples_what_it_samples_alone():
    parameters, prompts, noise = policies(4), prompts_of(4, 4), noise_of(4, 24)
    together = drawn(parameters, prompts, noise)
    assert_as_alone(together, parameters, prompts, noise)


@pytest.mark.parametrize("every", [1, 3])
def test_runs_that_stay_when_others_leave_sample_what_they_sample_alone(every: int, monkeypatch: pytest.MonkeyPatch):
    parameters, prompts, noise = policies(8), prompts_of(8, 1), noise_of(8, 1)
    monkeypatch.setitem(sampling.CHECK_EVERY, "cpu", every)
    stayed: list[list[int]] = []
    of_runs = sampling._Weights.of_runs

    def seen(self: sampling._Weights, kept_R: Tensor) -> sampling._Weights:
        stayed.append(kept_R.tolist())
        return of_runs(self, kept_R)

    monkeypatch.setattr(sampling._Weights, "of_runs", seen)
    together = drawn(parameters, prompts, noise)
    assert any(runs != list(range(len(runs))) for runs in stayed)  # not the first ones
    assert_as_alone(together, parameters, prompts, noise)


def test_groups_of_runs_sample_what_one_group_samples(monkeypatch: pytest.MonkeyPatch):
    parameters, prompts, noise = policies(5), prompts_of(5, 4), noise_of(5, 24)
    whole = drawn(parameters, prompts, noise)
    monkeypatch.setattr(sampling, "ROWS_AT_ONCE", 48)  # two runs
    assert_same(whole, drawn(parameters, prompts, noise))


def test_a_row_does_not_depend_on_the_order_of_rows_or_on_sharing_its_prompt():
    parameters, prompts, noise = policies(2), prompts_of(2, 4), noise_of(2, 24)
    shared = drawn(parameters, prompts, noise)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    shuffled = drawn(parameters, prompts.repeat_interleave(6, 1)[:, order], noise[:, order])
    back = order.argsort()
    assert_same(shared, Sampled(*(getattr(shuffled, name)[:, back] for name in Sampled.__dataclass_fields__)))


@pytest.mark.parametrize("prompt", [1, 15, 16, 17])
def test_prompts_shorter_and_longer_than_a_vector_register_are_read_as_training_reads_them(prompt: int):
    config = PolicyConfig(vocabulary_size=7, max_length=32, layers=2, width=16, heads=2)
    made = initial_parameters(config, torch.Generator().manual_seed(2), torch.float64)
    prompts = torch.randint(0, 5, (1, 3, prompt), generator=torch.Generator().manual_seed(9))
    result = sample(made, config, prompts, noise_of(1, 12), end_id=END, pad_id=PAD)
    tokens_RBL = torch.cat([prompts.repeat_interleave(4, 1), result.tokens_RBL], -1)
    log_probs_RBC, _ = response_log_probs(made, config, tokens_RBL, prompt, result.length_RB)
    torch.testing.assert_close(log_probs_RBC, result.log_probs_RBL[..., : log_probs_RBC.shape[-1]], rtol=0, atol=1e-12)


def test_first_tokens_have_the_frequencies_of_the_softmax():
    parameters, prompts = policies(1), prompts_of(1, 1)
    chances = logits(parameters, CONFIG, prompts)[0, 0, -1].softmax(-1)
    result = sample(parameters, CONFIG, prompts, Noise((0,), 0, 0, 20000).uniforms(1)[0][None], end_id=END, pad_id=PAD)
    counts = torch.bincount(result.tokens_RBL.flatten(), minlength=7).double()
    assert ((counts - 20000 * chances) ** 2 / (20000 * chances)).sum() < 22.5  # 6 degrees of freedom, one in a thousand


def test_a_row_ends_with_its_end_token_or_is_truncated_and_is_padded_after_it():
    result = drawn(policies(3), prompts_of(3, 4), noise_of(3, 24))
    for tokens, length, truncated, log_probs in zip(
        result.tokens_RBL.flatten(0, 1).tolist(),
        result.length_RB.flatten().tolist(),
        result.truncated_RB.flatten().tolist(),
        result.log_probs_RBL.flatten(0, 1).tolist(),
        strict=True,
    ):
        assert END not in tokens[: length - 1]
        assert truncated == (tokens[length - 1] != END)
        assert length == LIMIT or not truncated
        assert set(tokens[length:]) <= {PAD}
        assert set(log_probs[length:]) <= {0.0}
        assert all(value < 0 for value in log_probs[:length])
    assert result.truncated_RB.any()
    assert not result.truncated_RB.all()


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_noise_give_the_first_and_last_token_with_a_chance(noise: float):
    parameters = {name: value.float() for name, value in policies(1).items()}
    parameters["head"][..., [0, 6]] = -1e30 * parameters["head"][..., [0, 6]].abs()
    parameters["embedding"] = parameters["embedding"].abs()
    prompts = prompts_of(1, 1)
    result = sample(parameters, CONFIG, prompts, torch.full((1, 1, 1), noise, dtype=torch.float64), end_id=END, pad_id=PAD)
    chances = logits(parameters, CONFIG, prompts)[0, 0, -1].softmax(-1)
    possible = chances.nonzero().flatten().tolist()
    assert int(result.tokens_RBL) == (possible[0] if noise == 0 else possible[-1])


def test_sampling_keeps_to_the_device_of_the_parameters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sampling.CHECK_EVERY, "cuda", 100)  # a fake tensor has no value to look at
    with fake_cuda():
        parameters = {name: torch.empty(2, *shape, device="cuda") for name, shape in shapes(CONFIG).items()}
        prompts, noise = torch.zeros(2, 3, 4, dtype=torch.int64, device="cuda"), torch.zeros(2, 6, 6, device="cuda")
        result = drawn(parameters, prompts, noise)
        for name in Sampled.__dataclass_fields__:
            assert getattr(result, name).device.type == "cuda"
        assert result.tokens_RBL.shape == (2, 6, 6)


def test_compaction_keeps_to_the_device_of_the_parameters():
    with fake_cuda():
        parameters = {name: torch.empty(2, *shape, device="cuda") for name, shape in shapes(CONFIG).items()}
        prompts, noise = torch.zeros(2, 3, 4, dtype=torch.int64, device="cuda"), torch.zeros(2, 6, 6, device="cuda")
        decoder = sampling._Decoder(parameters, CONFIG, prompts, noise, 1.0)
        decoder.part(decoder.draw(0))
        decoder.read(0)
        decoder.draw(1)
        result = decoder.finished(END, PAD)
        assert result.tokens_RBL.device.type == "cuda"
        assert result.tokens_RBL.shape == (2, 6, 2)


def test_mixing_devices_is_found():
    with fake_cuda():
        parameters = {name: torch.empty(2, *shape, device="cuda") for name, shape in shapes(CONFIG).items()}
        with pytest.raises(RuntimeError, match="device"):
            drawn(parameters, torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 6, 6, device="cuda"))
