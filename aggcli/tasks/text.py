"""Tasks in words, for language models: reasoning-gym's, a file of prompts and answers, and the user's own."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from aggcli.errors import SettingError, nearest
from aggcli.tasks.chance import PROMPTS, uniform
from aggcli.tasks.protocol import EVALUATION_STEP, Prompts, Verdict

CHECKERS = ("exact", "numeric", "math")
ONLY_ANSWER = "Reply with the answer only."
"""Stands under every question whose checker wants nothing but the answer, as those of reasoning-gym do."""


class TextTask(Protocol):
    """Questions by number, and a checker. A user's own task is an object with `question` and `score`."""

    def question(self, number: int) -> str:
        """The prompt of this number."""
        ...

    def score(self, number: int, response: str) -> float:
        """The reward of a response to it; 1 means right. An exception counts as 0, and is counted."""
        ...


@dataclass(frozen=True)
class Numbering:
    """Which questions a step asks. `count`: how many there are, None where there are as many as numbers below 2^31. Of a file,
    the last tenth is kept for evaluation and never trained on, and no step asks a question twice before it has asked them
    all."""

    count: int | None = None

    @property
    def held_out(self) -> int:
        """Questions kept for evaluation."""
        return 0 if self.count is None else max(self.count // 10, 1)

    def numbers(self, seed: int, step: int, index_S: Tensor) -> Tensor:
        """The number of each question, int64 [S]; it depends on (seed, step, index) alone."""
        if self.count is None:
            return (uniform(seed, PROMPTS, step, index_S, 1)[:, 0] * 2**31).long()
        if step == EVALUATION_STEP:
            return self.count - 1 - index_S % self.held_out
        trained = self.count - self.held_out
        order = uniform(seed, PROMPTS, step, torch.arange(trained), 1)[:, 0].argsort(stable=True)
        return order[index_S % trained]


class Tokenizer(Protocol):
    """What a task needs of a model's tokenizer."""

    @property
    def end_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    def prompt_ids(self, text: str) -> list[int]: ...
    def text(self, ids: list[int]) -> str: ...


class SpokenTask:
    """A task in words as a `Task` in the tokens of one model; `answer_S` is the number of the question."""

    can_fail = True

    def __init__(self, name: str, words: TextTask, numbering: Numbering, tokenizer: Tokenizer, limit: int) -> None:
        self.name, self.words, self.numbering, self.tokenizer = name, words, numbering, tokenizer
        self.end_id, self.pad_id = tokenizer.end_id, tokenizer.pad_id
        self.default_max_response_length = limit
        self.most_fresh_prompts = numbering.held_out or None

    def prompts(self, seed: int, step: int, count: int, first: int = 0) -> Prompts:
        """See `Task.prompts`."""
        number_S = self.numbering.numbers(seed, step, torch.arange(first, first + count))
        rows = []
        for number in number_S.tolist():
            text = self.words.question(number)
            ids = self.tokenizer.prompt_ids(text) if text.strip() else []
            if not ids:
                raise SettingError(f"--task {self.name}: prompt {number} is empty")
            rows.append(ids)
        length_S = torch.tensor([len(row) for row in rows])
        tokens_SL = torch.full((count, int(length_S.max())), self.pad_id)
        for at, row in enumerate(rows):
            tokens_SL[at, : len(row)] = torch.tensor(row)
        return Prompts(tokens_SL, length_S, number_S)

    def verify(self, answer: Tensor, response: Tensor, length: Tensor) -> Verdict:
        """See `Task.verify`. A response without an end token was cut off; it is judged by what there is of it."""
        rewards, failed = [], []
        rows = zip(answer.flatten().tolist(), response.flatten(0, -2).tolist(), length.flatten().tolist(), strict=True)
        for number, ids, tokens in rows:
            said = self.tokenizer.text([one for one in ids[:tokens] if one != self.end_id]).strip()
            reward, has_failed = 0.0, False
            try:
                reward = float(self.words.score(number, said))
            except Exception:  # whatever a checker does on what a model says is counted, and is not the end of the run
                has_failed = True
            if not math.isfinite(reward):
                reward, has_failed = 0.0, True
            rewards.append(reward)
            failed.append(has_failed)
        reward = torch.tensor(rewards, dtype=torch.float64).view(answer.shape)
        return Verdict(reward, reward >= 1.0, torch.tensor(failed).view(answer.shape))


# -- by name ----------------------------------------------------------------------------------------------------------


def is_in_words(name: str) -> bool:
    """Whether a name is one of a task in words: `rg:NAME`, `FILE.jsonl`, `pkg.mod:name`."""
    return ":" in name or name.partition("?")[0].endswith(".jsonl")


def spoken_task(name: str, tokenizer: Tokenizer) -> SpokenTask:
    """The task called `rg:NAME?key=value&...`, `FILE.jsonl` or `pkg.mod:name`, for a model with this tokenizer; behind either
    of the first two, `checker=exact|numeric|math`. Raises `SettingError`."""
    place, _, query = name.partition("?")
    settings = _settings(name, query)
    if place.startswith("rg:"):
        checker = _checker(name, settings, None)
        return SpokenTask(name, _Gym(name, place.removeprefix("rg:"), settings, checker), Numbering(), tokenizer, 64)
    if place.endswith(".jsonl"):
        checker = _checker(name, settings, "exact")
        if settings:
            raise SettingError(f"--task {name}: behind a file only checker= may stand")
        words = _File(Path(place), checker)
        return SpokenTask(name, words, Numbering(len(words.asked)), tokenizer, 256)
    if settings:
        raise SettingError(f"--task {name}: a task of your own takes no settings behind ?")
    return SpokenTask(name, _own(name), Numbering(), tokenizer, 256)


Check = Callable[[str, str], bool]
"""Whether a response (the second) has the answer (the first)."""


def _checker(name: str, settings: dict[str, Any], default: str | None) -> Check | None:
    """What the settings' `checker` names, which is taken from them; None where neither they nor the default name one. Raises
    `SettingError`, also where what it needs is not installed."""
    asked = settings.pop("checker", default)
    if asked is None:
        return None
    if asked not in CHECKERS:
        raise SettingError(f"--task {name}: behind ?, checker= is one of {', '.join(CHECKERS)}")
    if asked == "math":
        from importlib.util import find_spec

        if find_spec("math_verify") is None:
            raise SettingError(f'--task {name} needs math-verify; install it with pip install "aggcli[tasks]"')
    return {"exact": _is_exact, "numeric": _is_number, "math": _is_same_math}[asked]


def _settings(name: str, query: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in filter(None, query.split("&")):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise SettingError(f"--task {name}: '{item}' must be key=value")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


class _Gym:
    """A task of reasoning-gym: every number is the seed of a data set of one question. Right means a score of 1 exactly: part
    of a score is given for an answer that stands among other words. With a `checker`, that is asked instead."""

    def __init__(self, given: str, name: str, settings: Mapping[str, Any], checker: Check | None) -> None:
        from importlib.util import find_spec

        if find_spec("reasoning_gym") is None:
            raise SettingError(f'--task {given} needs reasoning-gym; install it with pip install "aggcli[tasks]"')
        library: Any = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if name not in known:
            raise SettingError(f"--task {given}: reasoning-gym has no task '{name}'{nearest(name, known)}")
        self.check = checker
        self.asks = f"\n{ONLY_ANSWER}" if checker in (None, _is_exact) else ""
        self.made: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.create: Callable[[int], Any] = lambda number: library.create_dataset(name, size=1, seed=number, **settings)
        try:
            self.create(0)[0]
        except Exception as error:  # its settings are checked by itself, each in a way of its own
            raise SettingError(f"--task {given}: reasoning-gym says: {' '.join(str(error).split())[:200]}") from None

    def question(self, number: int) -> str:
        return self._entry(number)[1]["question"] + self.asks

    def score(self, number: int, response: str) -> float:
        data_set, entry = self._entry(number)
        if self.check is not None:
            return float(self.check(str(entry["answer"]), response))
        return float(data_set.score_answer(response, entry))

    def _entry(self, number: int) -> tuple[Any, dict[str, Any]]:
        if number not in self.made:
            data_set = self.create(number)
            if len(self.made) >= 4096:
                self.made.clear()
            self.made[number] = (data_set, data_set[0])
        return self.made[number]


class _File:
    """A JSONL of prompts and answers: `question` or `prompt` or `problem`, and `answer` or `solution`; of an answer as GSM8K
    writes it, what stands behind `####`."""

    def __init__(self, path: Path, checker: Check | None) -> None:
        self.asked: list[str] = []
        self.answers: list[str] = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"--task {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
        for at, line in enumerate(lines, 1):
            if line.strip():
                self._add(path, at, line)
        if len(self.asked) < 2:
            raise SettingError(
                f"--task {path}: holds {len(self.asked)} prompts; at least 2 are needed, since the last tenth is kept for"
                " evaluation"
            )
        self.check = checker or _is_exact

    def _add(self, path: Path, at: int, line: str) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise SettingError(f"--task {path}, line {at}: is no JSON object")
        asked = next((found[key] for key in ("question", "prompt", "problem") if key in found), None)
        answer = next((found[key] for key in ("answer", "solution") if key in found), None)
        if not isinstance(asked, str) or not asked.strip():
            raise SettingError(f"--task {path}, line {at}: needs a text under question, prompt or problem")
        if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
            raise SettingError(f"--task {path}, line {at}: needs a text or a number under answer or solution")
        self.asked.append(asked)
        self.answers.append(str(answer).rpartition("####")[2].strip())

    def question(self, number: int) -> str:
        return self.asked[number]

    def score(self, number: int, response: str) -> float:
        return float(self.check(self.answers[number], response))


def _is_exact(answer: str, response: str) -> bool:
    return response == answer


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def _is_number(answer: str, response: str) -> bool:
    """The last number of the response is the number of the answer, thousands separators left out."""
    said, meant = _NUMBER.findall(response), _NUMBER.findall(answer)
    return bool(said and meant) and float(said[-1].replace(",", "")) == float(meant[-1].replace(",", ""))


def _is_same_math(answer: str, response: str) -> bool:
    library: Any = importlib.import_module("math_verify")
    return bool(library.verify(library.parse(f"${answer}$"), library.parse(response)))


def _own(name: str) -> TextTask:
    """Import `pkg.mod:name` (the current folder is on the path): an object, or a class or function that makes one."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
        if not hasattr(found, "question") or isinstance(found, type):
            found = found()
    except (Exception, SystemExit) as error:  # a user's module may do anything when it is imported
        raise SettingError(f"--task {name}: cannot import it ({type(error).__name__}: {error})") from error
    for method in ("question", "score"):
        if not callable(getattr(found, method, None)):
            raise SettingError(f"--task {name}: has no method {method}; it needs question(number) and score(number, response)")
    return cast(TextTask, found)
