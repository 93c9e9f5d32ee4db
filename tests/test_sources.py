"""Where batches come from: which files, in which order, in which format, joined with which."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path

import pytest
import torch

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError
from aggcli.jobs import replay as replaying
from aggcli.rollouts.jsonl import read_jsonl
from aggcli.rollouts.slime import read_slime
from aggcli.rollouts.sources import RecordedPart, detect_format, open_source
from tests.cli import aggcli, refused, write_jsonl
from tests.fixtures import fx_b

DATA = Path(__file__).parent / "data"


def raises_line(text: str):
    """The error's whole single line must match."""
    return pytest.raises(RolloutError, match=rf"^{text}$")


def jsonl(folder: Path, content: str | bytes, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


LINE = '{"response_length": 1, "rollout_id": 0}\n'


def names(config: SourceConfig) -> list[str]:
    return [re.sub(r".*\((.*)\)", r"\1", batch.name) for batch in open_source(config, 0)]


def test_a_folder_is_read_in_numeric_order_without_eval_and_hidden_files(tmp_path: Path) -> None:
    for name in ("10.jsonl", "2.jsonl", "0.jsonl", "1.jsonl", "eval_0.jsonl", ".3.jsonl", "notes.txt"):
        jsonl(tmp_path, LINE, name)
    numeric = ["0.jsonl", "1.jsonl", "2.jsonl", "10.jsonl"]
    assert names(SourceConfig(rollouts=(str(tmp_path),))) == numeric
    assert names(SourceConfig(rollouts=(str(tmp_path / "*.jsonl"),))) == numeric
    assert names(SourceConfig(rollouts=(str(tmp_path),), include_eval=True)) == [*numeric, "eval_0.jsonl"]
    assert names(SourceConfig(rollouts=(str(tmp_path / "eval_*"),))) == ["eval_0.jsonl"]
    assert names(SourceConfig(rollouts=(str(tmp_path / "eval_0.jsonl"), str(tmp_path / "2.jsonl")))) == [
        "eval_0.jsonl",
        "2.jsonl",
    ]


def test_slimes_dump_details_folder_is_read_and_joined(tmp_path: Path) -> None:
    for ours, theirs in (("rollout_data", "slime_rollout"), ("train_data", "slime_train")):
        (tmp_path / ours).mkdir()
        (tmp_path / ours / "1.pt").write_bytes((DATA / theirs / "1.pt").read_bytes())
    # An evaluation dump has a rollout_id too, but is another rollout.
    (tmp_path / "rollout_data/eval_1.pt").write_bytes((DATA / "slime_rollout/1.pt").read_bytes())
    assert names(SourceConfig(rollouts=(str(tmp_path),))) == ["1.pt"]
    assert names(SourceConfig(rollouts=(str(tmp_path),), include_eval=True)) == ["1.pt", "eval_1.pt"]


def test_the_example_has_groups_both_policies_and_the_layouts_of_one_two_and_four_ranks() -> None:
    """Mean rewards and lengths as counted when the dumps were made: 35, 40 and 31 of 64 right; 411, 503 and 482 tokens."""
    batches = list(open_source(SourceConfig(rollouts=("example",)), 0))
    assert [int(batch.reward_S.sum()) for batch in batches if batch.reward_S is not None] == [35, 40, 31]
    assert [int(batch.response_length_S.sum()) for batch in batches] == [411, 503, 482]
    for batch, ranks in zip(batches, (1, 2, 4), strict=True):
        assert torch.bincount(batch.group_S).tolist() == [8] * 8
        assert batch.log_probs_T is not None
        assert batch.rollout_log_probs_T is not None
        assert (batch.log_probs_T != batch.rollout_log_probs_T).any()
        assert batch.recorded is not None
        assert [len(step.partitions) for step in batch.recorded.steps] == [ranks]


def test_the_format_is_told_by_content_and_can_be_forced(tmp_path: Path) -> None:
    assert detect_format(jsonl(tmp_path, "\n " + LINE, "rows.txt")) == "aggcli"
    odd = tmp_path / "dump.bin"
    odd.write_bytes((DATA / "slime_train/0.pt").read_bytes())
    assert detect_format(odd) == "slime-train"
    with raises_line(r".*dump\.bin: is a slime-train dump, not slime-rollout; change or drop --rollout-format"):
        list(open_source(SourceConfig(rollouts=(str(odd),), rollout_format="slime-rollout"), 0))
    with raises_line(r"--rollout-format 'slime-trian' is unknown; did you mean 'slime-train'\?"):
        open_source(SourceConfig(rollouts=(str(odd),), rollout_format="slime-trian"), 0)
    with raises_line(r".*: is in no format known by its content .*"):
        detect_format(jsonl(tmp_path, "hello", "c.txt"))
    with raises_line(r".*: is empty; give a file with at least one sample"):
        detect_format(jsonl(tmp_path, "", "d.jsonl"))


def test_dumps_with_their_keys_in_another_order_are_told_apart_too(tmp_path: Path) -> None:
    for kind in ("slime_train", "slime_rollout"):
        payload = torch.load(DATA / kind / "0.pt", weights_only=True)
        torch.save(dict(reversed(payload.items())), tmp_path / f"{kind}.pt")
    source = open_source(SourceConfig(rollouts=(str(tmp_path),)), 0)
    assert (len(source), source.format) == (1, "slime-train")


def test_a_source_reads_again_when_iterated_again_and_reads_nothing_ahead(tmp_path: Path) -> None:
    path = jsonl(tmp_path, LINE)
    source = open_source(SourceConfig(rollouts=(str(path), str(jsonl(tmp_path, "{}", "b.jsonl")))), 0)
    assert next(iter(source)).num_samples == 1  # b.jsonl, which is bad, is not read yet
    jsonl(tmp_path, LINE + '{"response_length": 4, "rollout_id": 1}')
    assert next(iter(source)).num_samples == 2


def test_a_step_is_let_go_when_the_next_is_asked_for() -> None:
    steps = iter(open_source(SourceConfig(rollouts=("example",)), 0))
    first = weakref.ref(next(steps).loss_mask_T)
    second = next(steps)
    assert first() is None
    assert second.name == "step 1 (train_1.pt)"


@pytest.mark.parametrize(("kept", "reads"), [(56_820, 3), (56_819, 6), (0, 6)])
def test_steps_that_fit_together_into_a_bounded_memory_are_read_once_and_others_twice(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, kept: int, reads: int
) -> None:
    """The three steps of the example: 1,396 tokens of 33 bytes (a mask, three log-probabilities, an advantage) and 192 samples
    of 56 (lengths, ids, a reward); the numbers are the same either way."""
    asked = ("compare", "--rollouts", "example", "--modes", "token_mean", "--json", "--output", tmp_path / "o", "--overwrite")
    losses = [step["modes"]["token_mean"]["pg_loss"] for step in aggcli(capsys, *asked).steps]
    read, count = RecordedPart.batches, []
    monkeypatch.setattr(RecordedPart, "batches", lambda part: count.append(1) or read(part))
    monkeypatch.setattr(replaying, "KEPT", kept)
    assert [step["modes"]["token_mean"]["pg_loss"] for step in aggcli(capsys, *asked).steps] == losses
    assert len(count) == reads


def test_source_options_reach_the_reader(tmp_path: Path) -> None:
    rows = [{"response_length": 1, "rollout_id": i, "reward": {"acc": i}} for i in range(4)]
    path = jsonl(tmp_path, "\n".join(map(json.dumps, rows)))
    (batch,) = open_source(SourceConfig(rollouts=(str(path),), reward_key="acc", group_size=2), 0)
    assert batch.reward_S is not None
    assert (batch.reward_S.tolist(), batch.group_S.tolist()) == ([0, 1, 2, 3], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing.pt", r".*missing\.pt: no such file or folder; give .*"),
        ("*.nothing", r".*\*\.nothing: no file matches it; give .*"),
        ("empty", r".*empty: the folder holds no rollout files \(\.pt, \.jsonl, \.parquet, \.pkl\); give one that does"),
        ("evals", r".*evals: the folder holds only eval_ files; read them with --include-eval"),
        ("eva*/*", r".*: matches only eval_ files; read them with --include-eval"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "evals").mkdir()
    jsonl(tmp_path / "evals", LINE, "eval_0.jsonl")
    with raises_line(text):
        open_source(SourceConfig(rollouts=(str(tmp_path / path),)), 0)


def test_no_path_and_synthetic_beside_a_file_are_refused() -> None:
    with raises_line(r"no rollouts given: --rollouts takes a file, a folder, a glob or 'synthetic'"):
        open_source(SourceConfig(), 0)
    with raises_line(r"--rollouts synthetic stands alone; drop it or the files"):
        open_source(SourceConfig(rollouts=("synthetic", "a.pt")), 0)


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", no)
    monkeypatch.setattr(Path, "iterdir", no)


@pytest.mark.usefixtures("unreadable")
def test_what_may_not_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    for read in (detect_format, lambda p: read_jsonl(p, "s"), lambda p: read_slime(p, "s")):
        with raises_line(r".*a\.jsonl: cannot be read \(Permission denied\)"):
            read(path)
    with raises_line(r".*: cannot be read \(Permission denied\)"):
        open_source(SourceConfig(rollouts=(str(tmp_path),)), 0)


def test_no_module_of_the_readers_imports_one_that_imports_it() -> None:
    """Taking away, again and again, the modules that import none of those left must take all of them away."""
    graph = pytest.importorskip("grimp").build_graph("aggcli", cache_dir=None)
    left = {module for module in graph.modules if module.startswith("aggcli.rollouts.")}
    assert len(left) > 20
    while free := {module for module in left if not graph.find_modules_directly_imported_by(module) & left}:
        left -= free
    assert not left


# -- paths in whatever way they are given -----------------------------------------------------------------------------


def test_rollouts_are_taken_from_the_flag_from_the_argument_and_from_a_glob_that_the_shell_wrote_out(capsys, tmp_path) -> None:
    """`--rollouts *.jsonl` reaches the program as the flag with the first file, and the rest alone."""
    files = [write_jsonl(tmp_path / f"{at}.jsonl", fx_b()) for at in range(3)]
    ways = (
        ("--rollouts", files[0], files[1], files[2]),
        (files[0], files[1], files[2]),
        ("--rollouts", files[0], "--rollouts", files[1], files[2]),
        (tmp_path / "*.jsonl",),
    )
    for command in ("compare", "run", "audit"):
        for at, way in enumerate(ways):
            where = () if command == "audit" else ("--output", tmp_path / f"{command}-{at}")
            told = aggcli(capsys, command, *way, *where, "--json", *(("--no-search",) if command == "audit" else ()))
            assert told.code == 0, told.err
            assert len(told.steps) == 3, (command, way)


def test_results_and_rollouts_are_not_compared_with_each_other(capsys, tmp_path) -> None:
    dump = write_jsonl(tmp_path / "dump.jsonl", fx_b())
    assert aggcli(capsys, "compare", dump, "--output", tmp_path / "out").code == 0
    line = refused(aggcli(capsys, "compare", tmp_path / "out", dump))
    assert f"{tmp_path / 'out'} is a results directory and {dump} is not" in line
