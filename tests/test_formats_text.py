"""Dumps of text only, verl's and TRL's: lengths in a stated unit, groups of identical prompts, rewards of several columns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aggcli.config import SourceConfig, settings_from
from aggcli.errors import RolloutError, SettingError
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.sources import detect_format, open_source

DATA = Path(__file__).parent / "data"
UNIT_NOTE = "lengths are in {}, not tokens: so is everything called a token here (--tokenizer PATH counts tokens)"


def refused(text: str):
    """The error's whole single line must match."""
    return pytest.raises((RolloutError, SettingError), match=rf"^{text}$")


def read(path: Path, **options: Any) -> RolloutBatch:
    (batch,) = open_source(SourceConfig(rollouts=(str(path),), **options), 0)
    return batch


def verl(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "1.jsonl"
    path.write_text(
        "".join(json.dumps({"input": "p", "output": "abc", "gts": "1", "score": 1.0, "step": 1, **row}) + "\n" for row in rows)
    )
    return path


def trl(folder: Path, **columns: list[Any]) -> Path:
    rows = len(next(iter(columns.values())))
    filled = {"step": [1] * rows, "prompt": ["p"] * rows, "completion": ["abc"] * rows, **columns, "advantage": [0.5] * rows}
    pq.write_table(pa.table(filled), folder / "completions_00001.parquet")
    return folder / "completions_00001.parquet"


# -- real dumps -------------------------------------------------------------------------------------------------------


def test_real_verl_dumps_are_the_same_batches_as_slimes_files_one_number_lower() -> None:
    theirs = list(open_source(SourceConfig(rollouts=(str(DATA / "verl_jsonl"),)), 0))
    ours = list(open_source(SourceConfig(rollouts=(str(DATA / "slime_rollout"),)), 0))
    assert [batch.name for batch in theirs] == ["step 0 (1.jsonl)", "step 1 (2.jsonl)", "step 2 (3.jsonl)"]
    for verl_batch, slime_batch in zip(theirs, ours, strict=True):
        assert verl_batch.reward_S is not None
        assert slime_batch.reward_S is not None
        assert verl_batch.reward_S.tolist() == slime_batch.reward_S.tolist()
        assert verl_batch.group_S.tolist() == slime_batch.group_S.tolist() == [i // 8 for i in range(64)]
        # A character a token, but for the end of sequence that a text does not show.
        assert verl_batch.response_length_S.tolist() == [length - 1 for length in slime_batch.response_length_S.tolist()]
    assert [batch.reward_S.mean().item() for batch in theirs if batch.reward_S is not None] == [0.546875, 0.625, 0.484375]


def test_real_trl_completions_keep_their_advantages_and_sum_their_reward_columns() -> None:
    batch = next(iter(open_source(SourceConfig(rollouts=(str(DATA / "trl_completions"),)), 0)))
    table = pq.read_table(DATA / "trl_completions/completions_00001.parquet").to_pydict()
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [a + b for a, b in zip(table["rew"], table["fmt"], strict=True)]
    assert batch.group_S.tolist() == [i // 8 for i in range(32)]
    lengths = [len(text) for text in table["completion"]]
    assert batch.response_length_S.tolist() == lengths
    expected = [advantage for advantage, length in zip(table["advantage"], lengths, strict=True) for _ in range(length)]
    assert batch.token_fields["advantages_T"].tolist() == expected
    assert "reward = 1 * rew + 1 * fmt (--reward-weights sets others)" in batch.notes


@pytest.mark.parametrize(("folder", "kind"), [("verl_jsonl", "verl"), ("trl_completions", "trl")])
def test_text_dumps_are_detected_by_content_and_their_unit_is_always_said(folder: str, kind: str) -> None:
    source = open_source(SourceConfig(rollouts=(str(DATA / folder),)), 0)
    assert (source.format, len(source)) == (kind, 3)
    for batch in source:
        assert batch.length_unit == "chars"
        assert batch.notes[0] == UNIT_NOTE.format("characters")


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_are_counted_in_words_when_asked_and_labelled(tmp_path: Path) -> None:
    batch = read(verl(tmp_path, {"output": " two  words\n", "input": "a b c"}, {"output": ""}), length_unit="words")
    assert batch.response_length_S.tolist() == [2, 0]
    assert batch.total_length_S.tolist() == [5, 1]
    assert (batch.length_unit, batch.notes[0]) == ("words", UNIT_NOTE.format("words"))


def test_a_local_tokenizer_counts_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "p": 1, "yes": 2, "no": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = verl(tmp_path, {"output": "yes, no"})  # yes|,|no
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        batch = read(path, tokenizer=str(place))
        assert (batch.response_length_S.tolist(), batch.total_length_S.tolist()) == ([3], [4])
        assert batch.length_unit == "tokens"
        assert f"lengths are counted with the tokenizer {place}; " in batch.notes[1]
    with refused(r"--tokenizer .*nowhere: no tokenizer\.json there; give that file, or the folder that holds it"):
        read(path, tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "bad.json").write_text("{}")
    with refused(r"--tokenizer .*bad\.json: is not a tokenizer\.json \(.*\)"):
        read(path, tokenizer=str(tmp_path / "bad.json"))


def test_two_ways_to_count_and_bad_weights_are_refused_at_once() -> None:
    with refused(r"--length-unit and --tokenizer are two ways to count lengths; give one"):
        settings_from({"length_unit": "chars", "tokenizer": "x"})
    with refused(r"--length-unit 'letters' is not one of its values; known: chars, words"):
        settings_from({"length_unit": "letters"})
    for text in ("a=b", "a=1,b=nan", "=1", ""):
        with refused(r"--reward-weights .*"):
            settings_from({"reward_weights": text})


# -- groups -----------------------------------------------------------------------------------------------------------


def test_rows_are_grouped_by_uid_else_by_prompt_never_by_position(tmp_path: Path) -> None:
    rows = [{"input": prompt, "score": 1.0} for prompt in "abab"]
    assert read(verl(tmp_path, *rows)).group_S.tolist() == [0, 1, 0, 1]
    named = [{**row, "uid": uid} for row, uid in zip(rows, ("x", "x", "y", 0), strict=True)]
    batch = read(verl(tmp_path, *named))
    assert batch.group_S.tolist() == [0, 0, 1, 2]
    assert (batch.labels.groups, batch.grouping) == (("x", "y", 0), None)


def test_one_prompt_sampled_as_several_groups_is_cut_into_consecutive_runs(tmp_path: Path) -> None:
    path = verl(tmp_path, *({"input": prompt} for prompt in "aaaabbaa"))
    assert read(path).group_S.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert read(path, group_size=2).group_S.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    with refused(r"step 0 \(1\.jsonl\): the prompt of sample 0 has 6 rows, which cannot be cut into groups of 4; .*"):
        read(path, group_size=4)


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_verl_scores_as_text_boolean_and_null_are_read_and_noted(tmp_path: Path) -> None:
    batch = read(verl(tmp_path, *({"score": score} for score in ("1.0", 1, True, None, 0.5))))
    assert batch.reward_S is not None
    assert str(batch.reward_S.tolist()) == "[1.0, 1.0, 1.0, nan, 0.5]"
    for note in ("1 reward was given as text and read as numbers", "1 sample is unscored (reward null or NaN)"):
        assert note in batch.notes
    with refused(r"step 0 \(1\.jsonl\), sample 1 \(line 2\): reward is the text 'True': must be a number or null"):
        read(verl(tmp_path, {"score": 1}, {"score": "True"}))
    with refused(r".*, sample 0 \(line 1\): reward is an object with the keys acc, f: choose one with --reward-key"):
        read(verl(tmp_path, {"score": {"acc": 1, "f": 0}}))


def test_reward_weights_are_printed_and_choose_the_columns(tmp_path: Path) -> None:
    path = verl(tmp_path, {"acc": True, "fmt": 0.5}, {"score": 0.0, "acc": False, "fmt": 1})
    batch = read(path, reward_weights="acc=2, fmt=-0.5")
    assert batch.reward_S is not None
    assert batch.reward_S.tolist() == [1.75, -0.5]
    assert "reward = 2 * acc + -0.5 * fmt; left out: score" in batch.notes
    with refused(r"step 0 .*: --reward-weights 'accuracy' is no reward column; the columns are score, acc, fmt"):
        read(path, reward_weights="accuracy")


def test_trl_columns_may_be_named_by_their_function_and_a_missing_score_counts_as_zero(tmp_path: Path) -> None:
    columns = {"rewards/accuracy": [1.0, None, None], "rewards/format": [0.5, 0.25, None], "note": ["a", "b", "c"]}
    batch = read(trl(tmp_path, **columns), reward_weights="accuracy=1,format=2")
    assert batch.reward_S is not None
    assert batch.reward_S[:2].tolist() == [2.0, 0.5]
    assert math.isnan(batch.reward_S[2].item())
    both = {"a/x": [1.0], "b/x": [1.0]}
    with refused(r"step 0 .*: --reward-weights 'x' is the end of a/x, b/x; the columns are a/x, b/x"):
        read(trl(tmp_path, **both), reward_weights="x")


# -- what is wrong is named ---------------------------------------------------------------------------------------------


def test_a_text_that_is_missing_is_refused_by_sample_and_a_conversation_is_read(tmp_path: Path) -> None:
    with refused(r"step 0 \(1\.jsonl\), sample 1 \(line 2\): output is null: must be a text, or a list of messages"):
        read(verl(tmp_path, {}, {"output": None}))
    batch = read(verl(tmp_path, {"output": [{"role": "a", "content": "ab"}, {"role": "b", "content": "c"}]}))
    assert batch.response_length_S.tolist() == [3]


def test_parquet_that_is_damaged_or_unknown_is_refused(tmp_path: Path) -> None:
    whole = trl(tmp_path, r=[1.0]).read_bytes()
    path = tmp_path / "cut.parquet"
    path.write_bytes(whole[: len(whole) // 2])
    with refused(r".*cut\.parquet: is not a whole Parquet file \(.*\)"):
        detect_format(path)
    pq.write_table(pa.table({"question": ["q"], "answer": ["a"]}), path)
    with refused(r".*: is Parquet with the columns answer, question; known are TRL's completions .*"):
        detect_format(path)
