"""A replay in parts: the records do not depend on where the files are read, and neither do refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggcli.config import SourceConfig
from aggcli.rollouts.sources import RecordedSource
from tests.cli import aggcli, records, refused, write_jsonl
from tests.fixtures import fx_b

FILES = 5
FLAGS = ["--modes=sample_mean,token_mean,prompt_mean", "--global-batch-size=2"]


@pytest.fixture
def dumps(tmp_path: Path) -> list[Path]:
    """Five files, each FX-B with other rewards; the third has no reward that differs in a group."""
    made = []
    for at in range(FILES):
        samples = [{**sample, "reward": 0.5 if at == 2 else sample["reward"] + at} for sample in fx_b()]
        samples = [{name: value for name, value in sample.items() if name != "advantage"} for sample in samples]
        made.append(write_jsonl(tmp_path / f"rollout-{at}.jsonl", samples))
    return made


def _files(directory: Path) -> dict[str, bytes]:
    kept = (".jsonl", ".parquet")
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.suffix in kept}


@pytest.mark.parametrize("more", [[], ["--drop-zero-variance"]], ids=["all", "dropped"])
def test_the_records_of_a_replay_are_the_same_byte_for_byte_wherever_its_files_are_read(
    capsys, tmp_path: Path, dumps: list[Path], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [path.name for path in dumps]
    said = {}
    for name, place in {"plain": [], "here": ["--launcher=here"], "apart": ["--launcher=processes", "--workers=2"]}.items():
        told = aggcli(capsys, "replay", *paths, *FLAGS, *more, *place, "--output", tmp_path / name)
        assert told.code == 0, told.err
        said[name] = (told.out, told.err.replace(str(tmp_path / name), "DIR"))
    plain = _files(tmp_path / "plain")
    assert plain == _files(tmp_path / "here") == _files(tmp_path / "apart")
    assert said["plain"] == said["here"] == said["apart"]
    lines = records(tmp_path / "apart" / "token_mean" / "metrics.jsonl")
    sources = ["step 0 (rollout-0.jsonl)", "step 1 (rollout-1.jsonl)", "step 2 (rollout-2.jsonl)"]
    assert [line["step"] for line in lines] == [*range(len(lines))]
    seen = list(dict.fromkeys(line["source"] for line in lines))
    assert seen[:2] == sources[:2]
    assert (sources[2] in seen) == (not more)


def test_what_is_wrong_with_a_file_is_said_of_the_first_such_file_wherever_it_is_read(
    capsys, tmp_path: Path, dumps: list[Path]
) -> None:
    for at in (1, 3):
        dumps[at].write_text('{"response_length": "x"}\n')
    said = [refused(aggcli(capsys, "replay", *dumps, *place)) for place in ([], ["--launcher=processes", "--workers=2"])]
    assert "rollout-1.jsonl" in said[0]
    assert said[0] == said[1]


def test_a_pipe_and_synthetic_rollouts_are_replayed_here(capsys, tmp_path: Path) -> None:
    apart = ["--launcher=processes", "--no-samples", "--output"]
    told = aggcli(capsys, "replay", "synthetic", *apart, tmp_path / "out")
    assert told.code == 0
    assert "--launcher processes: only files are read elsewhere; this process replays what is no file" in told.err


def test_parts_are_the_pieces_of_a_source_with_the_names_and_notes_of_the_whole(dumps: list[Path]) -> None:
    source = RecordedSource(SourceConfig(rollouts=tuple(map(str, dumps)), length_unit="words"))
    whole = [(batch.name, batch.notes) for batch in source]
    parts = [(batch.name, batch.notes) for at in range(source.parts) for batch in source.part(at)]
    assert whole == parts
    assert [name for name, _ in parts] == [f"step {at} (rollout-{at}.jsonl)" for at in range(FILES)]
