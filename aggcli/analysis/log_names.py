"""What the columns of trainers' logs are called, and what they are: the one table of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A measure of training rollouts. `key`: its name in `--metric`; `measure`: that of a `History`; `names`: columns that are
    known to be it, the first that is there counts, each also behind `train/`; `word`: what it is called in a sentence."""

    key: str
    measure: str
    names: tuple[str, ...]
    word: str


KNOWN = {
    one.key: one
    for one in (
        # TRL's accuracy_reward is 1 for a right answer and 0 for a wrong one
        Known("accuracy", "accuracy", ("accuracy", "rewards/accuracy_reward/mean", "rewards/accuracy_reward"), "accuracy"),
        # verl's critic/rewards/mean may have a KL penalty taken off, and slime's rollout/rewards is normalised: neither is raw
        Known("reward", "raw_reward", ("raw_reward", "rollout/raw_reward", "critic/score/mean", "reward"), "raw reward"),
        Known(
            "length",
            "response_length",
            (
                "completions/mean_length",
                "completion_length",
                "response_length/mean",
                "rollout/response_lengths",
                "rollout/response_len/mean",
                "response_length",
            ),
            "response length",
        ),
        Known("correct_length", "correct/response_length", ("correct/response_length",), "length of correct responses"),
        Known("incorrect_length", "incorrect/response_length", ("incorrect/response_length",), "length of wrong responses"),
        Known("entropy", "entropy_loss", ("entropy", "actor/entropy", "entropy_loss"), "entropy"),
        Known("kl", "kl", ("kl", "actor/kl_loss", "kl_loss"), "KL divergence"),
        # what the trainer had processed after the step, and what it processed in the step; both count prompts too
        Known("tokens", "tokens", ("num_tokens",), "tokens so far"),
        Known("step_tokens", "tokens", ("perf/total_num_tokens",), "tokens of a step"),
    )
}
"""By their key. `step` in `--metric` is the column that counts steps (`aggcli.analysis.logs.STEP_NAMES`)."""
KEYS = (*KNOWN, "step")
WORDS = {one.measure: one.word for one in KNOWN.values() if one.measure != "tokens"}
"""Measure of a `History` -> what it is called in a sentence, in the order in which measures are drawn."""


def column_of(known: Known, columns: Iterable[str]) -> str | None:
    """The column of a log that is this measure, None without any."""
    there = set(columns)
    return next((at for name in known.names for at in (name, f"train/{name}") if at in there), None)


def like(known: Known, columns: Iterable[str]) -> list[str]:
    """Up to three columns whose names contain the stem of a measure's key, or are near to it by their letters."""
    names = sorted(columns)
    stem = known.key.rpartition("_")[2][:6]
    inside = [name for name in names if stem in name.lower()]
    close = difflib.get_close_matches(known.key, names, n=2, cutoff=0.7)
    return list(dict.fromkeys([*close, *inside]))[:3]
