"""Tasks: prompts from a seed, a verifier, demonstrations."""

import re

import pytest
import torch

from aggcli.errors import SettingError
from aggcli.tasks import TASKS, make_task
from aggcli.tasks.chance import uniform
from aggcli.tasks.protocol import END, FILLER, PAD, VOCABULARY


def ids(text: str, length: int) -> list[int]:
    return [VOCABULARY.index(character) for character in text] + [PAD] * (length - len(text))


def test_ids_are_those_of_the_recorded_dumps_of_this_task():
    task = make_task("running-sum")
    recorded = [6, 1, 6, 5, 1, 7, 10, 6, 7, 3, 8, 9, 6, 12]  # sample 0 of tests/data/slime_rollout/0.pt
    assert task.text(torch.tensor(recorded)) == "616517=673896$"
    assert (FILLER, END, PAD) == (11, 12, 13)


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_does_not_depend_on_how_many_are_drawn_or_from_where(name: str):
    task = make_task(name)
    every = task.prompts(3, 5, 40)
    some = task.prompts(3, 5, 4, first=17)
    assert torch.equal(every.tokens_SL[17:21], some.tokens_SL)
    assert torch.equal(every.answer_S[17:21], some.answer_S)
    for other in (task.prompts(4, 5, 40), task.prompts(3, 6, 40)):
        assert not torch.equal(every.tokens_SL, other.tokens_SL)


@pytest.mark.parametrize(("name", "pattern"), [("running-sum", r"\d{6}="), ("control", r"\d{2}=")])
def test_the_answer_is_the_digit_sum_modulo_ten(name: str, pattern: str):
    task = make_task(name)
    prompts = task.prompts(0, 0, 50)
    for tokens, answer in zip(prompts.tokens_SL, prompts.answer_S.tolist(), strict=True):
        text = task.text(tokens)
        assert re.fullmatch(pattern, text)
        assert len(text) == task.prompt_length
        assert sum(int(digit) for digit in text[:-1]) % 10 == answer


def test_prompt_digits_are_uniform():
    digits = make_task("running-sum").prompts(1, 2, 5000).tokens_SL[:, :6]
    counts = torch.bincount(digits.flatten(), minlength=10).double()
    chi_square = ((counts - 3000) ** 2 / 3000).sum()
    assert chi_square < 27.9  # 9 degrees of freedom, one in a thousand


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("6$", True),
        ("673896$", True),
        ("...6..$", True),  # the last digit counts, filler after it does not
        ("66663$", False),
        ("$", False),  # no answer
        ("=..$", False),
        ("6", False),  # cut off before the end token
        ("666666", False),  # fills the limit without an end token
        ("", False),
    ],
)
def test_a_response_is_right_when_its_last_digit_before_the_end_is_the_answer(response: str, right: bool):
    task = make_task("running-sum")
    padded = torch.tensor(ids(response, 8))
    padded[len(response) :] = torch.randint(0, 14, (8 - len(response),), generator=torch.Generator().manual_seed(0))
    reward, correct, _ = task.verify(torch.tensor(6), padded, torch.tensor(len(response)))
    assert (float(reward), bool(correct)) == (float(right), right)


def test_the_verifier_keeps_any_leading_axes():
    task = make_task("running-sum")
    response_RBL = torch.tensor([[ids("1$", 4), ids("2$", 4)], [ids("3$", 4), ids("..4$", 4)]])
    length_RB = torch.tensor([[2, 2], [2, 4]])
    reward_RB, correct_RB, _ = task.verify(torch.tensor([[1, 9], [3, 4]]), response_RBL, length_RB)
    assert correct_RB.tolist() == [[True, False], [True, True]]
    assert reward_RB.tolist() == [[1, 0], [1, 1]]


def demonstrated(name: str, count: int) -> tuple[list[str], list[str]]:
    task = make_task(name)
    tokens_BL, prompt_length, length_B = task.demonstrations(torch.Generator().manual_seed(0), count)
    assert (tokens_BL[torch.arange(tokens_BL.shape[1]) >= length_B[:, None]] == PAD).all()
    assert prompt_length == task.prompt_length
    texts = [task.text(row[:end]) for row, end in zip(tokens_BL, length_B.tolist(), strict=True)]
    return [text[:prompt_length] for text in texts], [text[prompt_length:] for text in texts]


def test_running_sum_demonstrations_are_the_stated_mixture():
    prompts, responses = demonstrated("running-sum", 8000)
    kinds = {"direct": r"\.{0,20}\d\$", "sums": r"\d{6}\$", "long": r"\d{6}\.{0,20}\d\$"}
    shares, right_steps, steps = dict.fromkeys(kinds, 0), 0, 0
    for prompt, response in zip(prompts, responses, strict=True):
        kind = "sums" if re.fullmatch(kinds["sums"], response) else "direct" if response[0] == "." else "other"
        if kind == "other":
            kind = "long" if len(response) > 7 else "direct"
        assert re.fullmatch(kinds[kind], response)
        shares[kind] += 1
        digits = [int(digit) for digit in prompt[:-1]]
        if kind == "direct":
            assert int(response[-2]) == sum(digits) % 10
            continue
        before = 0
        for digit, written in zip(digits, response, strict=False):
            right_steps += int(written) == (before + digit) % 10
            steps += 1
            before = int(written)
        assert int(response[-2]) == before  # the long style repeats its own result
    for kind, share in (("direct", 0.45), ("sums", 0.45), ("long", 0.10)):
        assert shares[kind] / 8000 == pytest.approx(share, abs=4 * (share * (1 - share) / 8000) ** 0.5)
    assert right_steps / steps == pytest.approx(0.96, abs=4 * (0.04 * 0.96 / steps) ** 0.5)


def test_control_demonstrations_have_lengths_that_say_nothing_about_right_or_wrong():
    prompts, responses = demonstrated("control", 8000)
    right = torch.tensor([int(r[-2]) == (int(p[0]) + int(p[1])) % 10 for p, r in zip(prompts, responses, strict=True)]).double()
    length = torch.tensor([len(response) for response in responses]).double()
    first = torch.tensor([int(prompt[0]) for prompt in prompts]).double()
    assert abs(torch.corrcoef(torch.stack([right, length]))[0, 1]) < 4 / 8000**0.5
    assert torch.corrcoef(torch.stack([right, first]))[0, 1] > 0.3
    assert right.mean().item() == pytest.approx(0.3 + 0.07 * 4.5, abs=0.02)


def test_noise_is_uniform_and_uncorrelated_across_each_of_its_integers():
    noise = uniform(7, 1, 3, torch.arange(4000), 8)
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    counts = torch.histc(noise.flatten(), 16, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 37.7  # 15 degrees of freedom, one in a thousand
    for other in (
        uniform(8, 1, 3, torch.arange(4000), 8),
        uniform(7, 2, 3, torch.arange(4000), 8),
        noise.roll(1, 0),
        noise.roll(1, 1),
    ):
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]) < 4 / 32000**0.5


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("running-sums", {}, "unknown task 'running-sums'; did you mean 'running-sum'?"),
        ("running-sum", {"digit": 3}, "task running-sum has no setting 'digit'; did you mean 'digits'?"),
        ("running-sum", {"digits": 0}, "task running-sum: digits 0: must be from 1 to 100"),
    ],
)
def test_a_task_that_does_not_exist_is_refused_by_name(name: str, settings: dict, message: str):
    with pytest.raises(SettingError, match=re.escape(message)):
        make_task(name, **settings)
