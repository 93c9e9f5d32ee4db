"""Tasks in words: numbers of questions, what is right, and checkers that raise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aggcli.errors import SettingError
from aggcli.tasks.protocol import EVALUATION_STEP
from aggcli.tasks.text import Numbering, SpokenTask, spoken_task


class Letters:
    """A token a character; 1 ends, 0 pads."""

    end_id, pad_id = 1, 0

    def prompt_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def text(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def _judged(task: SpokenTask, number: int, *said: str) -> list[tuple[float, bool, bool]]:
    width = max(map(len, said)) + 1
    response = torch.tensor([[*map(ord, text), 1, *[0] * (width - len(text) - 1)] for text in said])
    found = task.verify(torch.full((len(said),), number), response, torch.tensor([len(text) + 1 for text in said]))
    return list(zip(found.reward.tolist(), found.correct.tolist(), found.failed.tolist(), strict=True))


def _file(tmp_path: Path, *rows: dict, checker: str = "exact") -> SpokenTask:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return spoken_task(f"{path}?checker={checker}", Letters())


def test_the_last_tenth_of_a_file_is_evaluated_on_and_never_trained_on() -> None:
    numbering = Numbering(30)
    trained = {n for step in range(20) for n in numbering.numbers(5, step, torch.arange(27)).tolist()}
    assert trained == set(range(27))
    assert set(numbering.numbers(5, EVALUATION_STEP, torch.arange(9)).tolist()) == {27, 28, 29}
    first = numbering.numbers(5, 3, torch.arange(27))
    assert len(set(first.tolist())) == 27, "a step asks nothing twice before it has asked all"
    assert torch.equal(numbering.numbers(5, 3, torch.arange(4, 9)), first[4:9])
    assert not torch.equal(numbering.numbers(6, 3, torch.arange(27)), first)


def test_answers_of_a_file_in_gsm8ks_layout_are_what_stands_behind_the_hashes(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 1,007"}, {"prompt": "b", "answer": 2}]
    task = _file(tmp_path, *rows, checker="numeric")
    judged = _judged(task, 0, "I say 1007.0", "1007 or 8", "none", "1,007 apples")
    assert judged == [(1.0, True, False), (0.0, False, False), (0.0, False, False), (1.0, True, False)]
    exact = _file(tmp_path, *rows)
    assert _judged(exact, 0, "1,007", "1007", " 1,007 ") == [(1.0, True, False), (0.0, False, False), (1.0, True, False)]


def test_a_file_of_mathematics_is_checked_by_value(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    task = _file(tmp_path, {"problem": "a", "solution": "\\frac{1}{2}"}, {"problem": "b", "solution": "2"}, checker="math")
    assert [right for _, right, _ in _judged(task, 0, "$0.5$", "$\\frac{2}{4}$", "$2$")] == [True, True, False]


def test_part_of_a_reward_is_not_a_right_answer_and_a_checker_that_raises_is_counted() -> None:
    pytest.importorskip("reasoning_gym")
    task = spoken_task("rg:chain_sum", Letters())
    number = int(task.prompts(0, 0, 1).answer_S)
    _, entry = task.words._entry(number)  # pyright: ignore[reportAttributeAccessIssue]
    answer = entry["answer"]
    judged = _judged(task, number, answer, f"It is {answer}", "no")
    share = len(answer) / len(f"It is {answer}")  # reasoning-gym's own rule
    assert judged == [(1.0, True, False), (pytest.approx(share), False, False), (0.0, False, False)]
    raising = spoken_task("rg:prime_factorization", Letters())
    assert _judged(raising, number, "not a number") == [(0.0, False, True)]


def test_a_task_of_the_gym_takes_the_last_number_said_for_the_answer_where_it_is_asked_to() -> None:
    pytest.importorskip("reasoning_gym")
    task, own = (spoken_task(f"rg:chain_sum?max_terms=2{more}", Letters()) for more in ("&checker=numeric", ""))
    number = int(task.prompts(0, 0, 1).answer_S)
    _, entry = task.words._entry(number)  # pyright: ignore[reportAttributeAccessIssue]
    answer = entry["answer"]
    said = [f"1 and 2 make {answer}.", f"{answer}, or {int(answer) + 1}", "no"]
    assert _judged(task, number, *said) == [(1.0, True, False), (0.0, False, False), (0.0, False, False)]
    assert own.words.question(number) == f"{task.words.question(number)}\nReply with the answer only."


def test_prompts_depend_on_seed_step_and_index_alone() -> None:
    pytest.importorskip("reasoning_gym")
    task = spoken_task("rg:chain_sum?max_terms=2", Letters())
    every, some = task.prompts(3, 5, 8), task.prompts(3, 5, 3, first=4)
    assert torch.equal(every.answer_S[4:7], some.answer_S)
    assert len(set(every.answer_S.tolist())) == 8
    for at, length in enumerate(some.length_S.tolist()):
        assert torch.equal(every.tokens_SL[4 + at, :length], some.tokens_SL[at, :length])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.jsonl", "cannot be read (No such file or directory)"),
        ("rg:chain_sun", "did you mean 'chain_sum'?"),
        ("rg:chain_sum?max_terms", "'max_terms' must be key=value"),
        ("rg:chain_sum?max_terms=0", "reasoning-gym says:"),
        ("rg:chain_sum?checker=nearly", "behind ?, checker= is one of exact, numeric, math"),
        ("nowhere:task", "cannot import it (ModuleNotFoundError"),
        ("json:dumps", "cannot import it"),
        ("json:JSONDecoder", "has no method question"),
    ],
)
def test_a_task_that_cannot_be_is_refused_in_a_line(name: str, said: str) -> None:
    if name.startswith("rg:"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(SettingError) as refusal:
        spoken_task(name, Letters())
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds 0 prompts"),
        ('{"question": "a", "answer": "b"}\n', "holds 1 prompts"),
        ("[1]\n", "line 1: is no JSON object"),
        ('{"question": " ", "answer": "b"}\n', "line 1: needs a text under question"),
        ('{"question": "a", "answer": null}\n', "line 1: needs a text or a number under answer"),
    ],
)
def test_a_file_without_prompts_and_answers_is_refused_by_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(text)
    with pytest.raises(SettingError, match=said):
        spoken_task(str(path), Letters())
