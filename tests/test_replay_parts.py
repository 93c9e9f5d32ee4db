"""A replay in parts: the records do not depend on where the files are read, and neither do refusals."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aggcli.config import SourceConfig, settings_from
from aggcli.jobs import parts as parts_job
from aggcli.jobs.parts import Part, Parts
from aggcli.jobs.steps import Replay
from aggcli.launch import Hear, Outcome, Work
from aggcli.launch.here import Here
from aggcli.rollouts.sources import RecordedSource
from aggcli.rules import TOKEN_MEAN
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
    assert "--launcher processes: only files are read elsewhere; this process reads what is no file" in told.err


def test_parts_are_the_pieces_of_a_source_with_the_names_and_notes_of_the_whole(dumps: list[Path]) -> None:
    source = RecordedSource(SourceConfig(rollouts=tuple(map(str, dumps)), length_unit="words"))
    whole = [(batch.name, batch.notes) for batch in source]
    parts = [(batch.name, batch.notes) for part in source.parts for batch in part.batches()]
    assert whole == parts
    assert [name for name, _ in parts] == [f"step {at} (rollout-{at}.jsonl)" for at in range(FILES)]


@dataclass
class _Weighing(Here):
    """This process, which notes the bytes of each share that another place would be sent, and when it was left."""

    sent: list[int] = field(default_factory=list)
    closed: int = 0

    def run(self, work: Work, shares: Sequence[Part], hear: Hear) -> Iterator[Outcome]:
        self.sent += [len(pickle.dumps((work, share))) for share in shares]
        return super().run(work, shares, hear)

    def close(self) -> None:
        self.closed += 1


def test_what_a_part_is_sent_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """The first of 90 files is sent as many bytes as the first of 3, to be looked at and to be measured."""
    paths = [str(write_jsonl(tmp_path / f"rollout-{at:02d}.jsonl", fx_b())) for at in range(90)]
    sent = {}
    for files in (3, 90):
        config = settings_from({"rollouts": paths[:files]})
        place = _Weighing()
        parts = Parts(RecordedSource(config.source).parts, place)
        assert len(parts.looked_at()) == files
        next(parts.measured(Replay(config, (TOKEN_MEAN,), lenient=False, max_response_length=4)))
        assert len(place.sent) == 2 * files
        sent[files] = [place.sent[0], place.sent[files]]
    assert sent[3] == sent[90]


@pytest.mark.parametrize("more", [[], ["--modes=prompt_mean", "--global-batch-size=1"]], ids=["whole", "refused"])
def test_a_replay_enters_the_place_of_its_parts_once_and_leaves_it(
    capsys, tmp_path: Path, dumps: list[Path], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    places: list[_Weighing] = []

    def entered(*given: object) -> _Weighing:
        places.append(_Weighing())
        return places[-1]

    monkeypatch.setattr(parts_job, "launcher_of", entered)
    told = aggcli(capsys, "replay", *dumps, *FLAGS, *more, "--launcher=ray", "--output", tmp_path / "out")
    assert (told.code == 0) == (not more), told.err
    assert [(len(place.sent), place.closed) for place in places] == [(2 * FILES, 1)]


def test_an_audit_is_the_same_to_the_byte_wherever_its_files_are_read(capsys, dumps: list[Path]) -> None:
    """A mode that holds under every layout, rules that vary or look at the longest of all responses, and a faulty reducer; two
    optimizer steps a file, each file with a note."""
    write_jsonl(dumps[1], fx_b()[:2])
    command = ["audit", *dumps[:3], "--rules=sample_mean,constant,trl:bnpo", "--reducer=tests.reducers:local_token_count"]
    command += ["--length-unit=words", "--global-batch-size=2", "--json"]
    places = ([], ["--launcher=here"], ["--launcher=processes", "--workers=2"])
    plain, here, apart = (aggcli(capsys, *command, *place) for place in places)
    assert plain.code == 0, plain.err
    assert (plain.out, plain.err) == (here.out, here.err) == (apart.out, apart.err)
    assert "--length-unit is not used" in plain.err
    assert {step["rules"]["trl:bnpo"]["verdict"] for step in plain.steps} == {"varies"}
    assert [step["batch"] for step in plain.steps[:2]] == [f"step 0 (rollout-0.jsonl), optimizer step {at}" for at in range(2)]
