"""`aggcli convert` and the writers: a round trip changes no number, and nothing on disk is ever half-written or mixed."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from aggcli.cli.commands import GroupedCommand
from aggcli.cli.convert import convert
from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, SettingError
from aggcli.rollouts.batch import Labels, RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.sources import open_source
from aggcli.rollouts.writers import one_file, whole_folder, write_jsonl, write_parquet
from tests.cli import strict_json

DATA = Path(__file__).parent / "data"
NUMBERS = [0.1, -0.0, 5e-324, -1.7976931348623157e308, 1 / 3, -2.2250738585072014e-308, 123456789.125]


def refused(text: str):
    """The error's whole single line must match."""
    return pytest.raises((RolloutError, SettingError), match=rf"^{text}$")


def read(path: Path, **options: Any) -> RolloutBatch:
    (batch,) = open_source(SourceConfig(rollouts=(str(path),), **options), 0)
    return batch


def aggcli_convert(*arguments: object) -> None:
    """Run the command as the command line does; errors propagate."""
    app = typer.Typer()
    app.command(cls=GroupedCommand)(convert)
    app([str(argument) for argument in arguments], standalone_mode=False)


def bits(value: Any) -> Any:
    """A float tensor as its bits, with every NaN the same; everything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.where(value.isnan(), torch.tensor(math.nan, dtype=value.dtype), value).view(torch.int64).tolist()
    return value.tolist() if isinstance(value, torch.Tensor) else value


def numbers_of(batch: RolloutBatch) -> dict[str, Any]:
    """Everything of a batch but its name, its notes, and what our format does not hold: layout and grouping."""
    fields = [field.name for field in dataclasses.fields(batch) if field.name not in ("name", "notes", "recorded", "grouping")]
    return {field: bits(getattr(batch, field)) for field in fields}


def everything(ids: Any = str) -> RolloutBatch:
    """Fan-out, null groups, text ids, masks with NaN and infinity under them, null rewards, every optional field."""
    rng = random.Random(1)
    builder = BatchBuilder("s")
    for i in range(40):
        length = rng.randrange(0, 6)
        mask = [rng.randrange(2) for _ in range(length)]
        junk = [math.nan, math.inf, -math.inf]
        stream = [rng.choice(NUMBERS) * rng.random() if bit else rng.choice(junk) for bit in mask]
        rollout = i // 2 if i < 20 else i
        builder.add(
            {
                "group_index": None if i > 35 else ids(rollout % 5),
                "rollout_id": ids(rollout),
                "reward": rng.choice(NUMBERS) if i >= 20 and i % 7 else None,
                "status": rng.choice(["completed", "truncated", None]),
                "response_length": length,
                "total_length": length + 3,
                "tokens": [rng.randrange(2**40) for _ in range(length + 3)],
                "loss_mask": mask if i % 3 else [1] * length,
                **{field: stream if i % 3 else [rng.choice(NUMBERS) for _ in mask] for field in STREAMS},
            }
        )
    return builder.build()


STREAMS = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy", "advantage")


@pytest.mark.parametrize("ids", [int, str])
@pytest.mark.parametrize(("name", "write"), [("a.jsonl", write_jsonl), ("a.parquet", write_parquet)])
def test_a_round_trip_changes_no_number(tmp_path: Path, ids: type, name: str, write: Any) -> None:
    batch = everything(ids)
    write(batch, tmp_path / name)
    assert numbers_of(read(tmp_path / name)) == numbers_of(batch)


def test_what_is_written_is_strict_json_with_null_for_nan(tmp_path: Path) -> None:
    write_jsonl(everything(), tmp_path / "a.jsonl")
    text = (tmp_path / "a.jsonl").read_text()
    rows = [strict_json(line) for line in text.splitlines()]
    assert len(rows) == 40
    assert "1e999" in text
    assert any(None in row["log_probs"] for row in rows)
    assert "reward" not in rows[0]


@pytest.mark.parametrize("source", ["slime_rollout", "slime_rollout_fanout", "slime_train", "verl_jsonl", "trl_completions"])
@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_every_real_dump_survives_the_command_line(tmp_path: Path, source: str, to: str) -> None:
    aggcli_convert(DATA / source, tmp_path / "out", "--to", to)
    theirs = list(open_source(SourceConfig(rollouts=(str(DATA / source),)), 0))
    ours = list(open_source(SourceConfig(rollouts=(str(tmp_path / "out"),)), 0))
    assert [batch.name for batch in ours] == [f"step {i} ({i}.{to})" for i in range(len(theirs))]
    for before, after in zip(theirs, ours, strict=True):
        assert numbers_of(after) == numbers_of(before) | {"labels": after.labels}
        assert after.labels.groups == before.labels.groups


def test_lengths_that_count_characters_stay_labelled_after_a_conversion(tmp_path: Path) -> None:
    aggcli_convert(DATA / "verl_jsonl/1.jsonl", tmp_path / "a.parquet")
    batch = read(tmp_path / "a.parquet")
    assert batch.length_unit == "chars"
    assert batch.notes[0].startswith("lengths are in characters, not tokens")
    mixed = [{"response_length": 1, "length_unit": "chars"}, {"response_length": 1, "length_unit": "words"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    with refused(r"step 0 .*, sample 1 \(line 2\): length_unit is 'words': must be one of tokens, chars, words, the same .*"):
        read(tmp_path / "m.jsonl")


def test_slimes_own_format_comes_back_with_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aggcli_convert(DATA / "slime_rollout_fanout/0.pt", tmp_path / "0.pt")
    assert numbers_of(read(tmp_path / "0.pt")) == numbers_of(read(DATA / "slime_rollout_fanout/0.pt"))
    aggcli_convert(DATA / "slime_train/2.pt", tmp_path / "2.pt")
    assert list(read(tmp_path / "2.pt").token_fields) == ["rollout_log_probs_T"]
    said = capsys.readouterr().err
    assert "note: log_probs, ref_log_probs, advantage: no place for it in this format, left out" in said
    assert "note: the recorded layout has no place in this format and is left out" in said


def test_ids_of_mixed_kinds_need_jsonl(tmp_path: Path) -> None:
    batch = everything(lambda i: i if i % 2 else str(i))
    write_jsonl(batch, tmp_path / "a.jsonl")
    assert numbers_of(read(tmp_path / "a.jsonl")) == numbers_of(batch)
    with refused(
        r"group_index mixes whole numbers and texts, or has too large or broken ones: write \.jsonl, which holds any id"
    ):
        write_parquet(batch, tmp_path / "a.parquet")


def test_a_batch_without_the_sources_own_ids_keeps_its_groups_and_rollouts(tmp_path: Path) -> None:
    batch = dataclasses.replace(everything(int), labels=Labels())
    write_jsonl(batch, tmp_path / "a.jsonl")
    after = numbers_of(read(tmp_path / "a.jsonl"))
    assert after == numbers_of(batch) | {"labels": after["labels"]}


# -- places -----------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_unless_asked_and_only_what_a_conversion_wrote(tmp_path: Path) -> None:
    source, file, folder = DATA / "slime_rollout/0.pt", tmp_path / "a.jsonl", tmp_path / "out"
    for _ in range(2):
        aggcli_convert(source, file, "--overwrite")
    with refused(r".*a\.jsonl: it exists already; replace it with --overwrite"):
        aggcli_convert(source, file)
    aggcli_convert(DATA / "slime_rollout", folder)
    with refused(r".*out: holds steps already \(0\.jsonl, 1\.jsonl, 2\.jsonl\); replace them with --overwrite"):
        aggcli_convert(source, folder)
    aggcli_convert(source, folder, "--overwrite")
    assert [path.name for path in folder.iterdir()] == ["0.jsonl"]
    (folder / "notes.txt").write_text("mine")
    with refused(r".*out: holds other files \(notes\.txt\); give a new folder"):
        aggcli_convert(source, folder, "--overwrite")
    with refused(r".*a\.jsonl: is a file; several steps need a folder"):
        whole_folder(file, ".jsonl", overwrite=True).__enter__()
    with refused(r".*out: it is a folder"):
        one_file(folder, overwrite=True).__enter__()


def test_a_conversion_that_fails_leaves_what_was_there_and_no_rubbish(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "0.jsonl").write_text('{"response_length": 1}\n')
    (bad / "1.jsonl").write_text('{"response_length": "x"}\n')
    folder = tmp_path / "out"
    aggcli_convert(DATA / "slime_rollout", folder)
    before = (folder / "0.jsonl").read_bytes()
    with refused(r"step 1 .*"):
        aggcli_convert(bad, folder, "--overwrite")
    assert (folder / "0.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "out"]
    with refused(r"step 0 .*"):
        aggcli_convert(bad / "1.jsonl", tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_several_steps_need_a_folder_and_formats_must_agree(tmp_path: Path) -> None:
    with refused(r".*slime_rollout holds 3 steps, and .*a\.jsonl is one file: give a folder, one file a step"):
        aggcli_convert(DATA / "slime_rollout", tmp_path / "a.jsonl")
    with refused(r"--to 'parket' is not a format that is written; did you mean 'parquet'\?"):
        aggcli_convert(DATA / "slime_rollout", tmp_path / "a", "--to", "parket")
    with refused(r"--to slime writes \.pt files, not \.jsonl: change one of the two"):
        aggcli_convert(DATA / "slime_rollout", tmp_path / "a.jsonl", "--to", "slime")
