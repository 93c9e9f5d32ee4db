"""Damaged, hostile and oversized files end in one line; nothing in a file is executed, or acts on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch._utils import _rebuild_tensor_v2

from aggcli.rollouts.parquet_footer import column_sizes
from tests.cli import aggcli, completed, environment, refused, strict_json, write_jsonl
from tests.speed import few

LINE = {"response_length": 2, "group_index": 0, "reward": 1.0}


def dump(path: Path, *samples: dict[str, Any], **more: Any) -> Path:
    torch.save({"rollout_id": 0, "samples": list(samples), **more}, path)
    return path


def drawn(**fields: Any) -> dict[str, Any]:
    return {"group_index": 0, "response_length": 2, "tokens": [5, 6, 7], "reward": 1.0, **fields}


def inspected(capsys: Any, path: Path | str, *flags: str) -> dict[str, Any]:
    (step,) = aggcli(capsys, "inspect", path, *flags, "--json").steps
    return step


def rewritten(source: Path, target: Path, change: Any = lambda name, data: data, how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for member in old.infolist():
            new.writestr(member.filename, change(member.filename, old.read(member)))
    return target


# -- what trainers put into dumps -----------------------------------------------------------------------------------------


def test_numpys_scalars_and_arrays_in_a_dump_are_ordinary_data(tmp_path: Path, capsys: Any) -> None:
    first = drawn(
        reward=np.float64(0.25), tokens=np.array([5, 6, 7]), rollout_log_probs=np.array([-0.5, -1.0], dtype=np.float32)
    )
    second = drawn(reward=np.bool_(True), group_index=np.int64(0), response_length=np.int32(2))
    second |= {"rollout_log_probs": np.asfortranarray([[-1.0, -2.0]])[0], "loss_mask": np.array([True, False])}
    step = inspected(capsys, dump(tmp_path / "0.pt", first, second))
    assert (step["raw_reward"], step["tokens"], step["response_length"], step["token_ids"]) == (0.625, 3, 2.0, True)
    assert step["group_sizes"] == [2]


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_every_number_type_keep_their_values_in_both_formats(
    tmp_path: Path, capsys: Any, dtype: torch.dtype, new: bool
) -> None:
    whole = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(dtype)
    samples = [drawn(reward=value) for value in (*whole.T[1], torch.nn.Parameter(torch.tensor(1.0)))]  # views of one storage
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt", _use_new_zipfile_serialization=new)
    assert inspected(capsys, tmp_path / "0.pt")["raw_reward"] == 2 / 3


def test_tensors_of_another_device_are_read_on_a_machine_without_it(tmp_path: Path, capsys: Any) -> None:
    path = dump(tmp_path / "0.pt", drawn(reward=torch.tensor(0.25)))
    on_cuda = rewritten(path, tmp_path / "1.pt", lambda _, data: data.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0"))
    assert b"cuda:0" in on_cuda.read_bytes()
    assert inspected(capsys, on_cuda)["raw_reward"] == 0.25


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_give_the_numbers_of_stored_ones(tmp_path: Path, capsys: Any, how: int) -> None:
    path = dump(tmp_path / "0.pt", *(drawn(reward=torch.tensor(float(i))) for i in range(4)))
    assert inspected(capsys, rewritten(path, tmp_path / "1.pt", how=how))["raw_reward"] == 1.5


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (lambda: torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (lambda: torch.empty(3, device="meta"), "_rebuild_meta_tensor_no_storage"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "_rebuild_qtensor"),
        (lambda: torch.ones(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_plain_numbers_are_refused_by_name(tmp_path: Path, capsys: Any, tensor: Any, named: str) -> None:
    line = refused(aggcli(capsys, "inspect", dump(tmp_path / "0.pt", drawn(reward=tensor()))))
    assert named in line
    assert "which is not plain data" in line


def test_a_plain_pickle_named_pt_is_called_what_it_is(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "0.pt"
    path.write_bytes(pickle.dumps({"rollout_id": 0, "samples": [drawn()]}))
    assert "it is a plain pickle, not a file of torch.save: save it with torch.save" in refused(aggcli(capsys, "inspect", path))
    path.write_bytes(pickle.dumps({"samples": [Path("x")]}))
    assert "it holds pathlib.PosixPath, which is not plain data" in refused(aggcli(capsys, "inspect", path))


# -- sizes ------------------------------------------------------------------------------------------------------------------


def zip_bomb(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a/data.pkl", "w") as member:
        for _ in range(300):
            member.write(bytes(2**20))
    return path


def shared_lists(depth: int = 10) -> list[Any]:
    made: list[Any] = [0] * 10
    for _ in range(depth):
        made = [made] * 10
    return made


def repeated_pages(path: Path) -> Path:
    """A column of one entry a thousand times a thousand, which Parquet writes in a few bytes a row group."""
    offsets = pa.array(range(0, 50_000_001, 50_000), pa.int32())
    masks = pa.ListArray.from_arrays(offsets, pa.array(np.ones(50_000_000, dtype=np.int8)))
    table = pa.table({"response_length": [1] * 1000, "loss_mask": masks})
    pq.write_table(table, path, compression="zstd")
    return path


BOMBS = {
    "length": (lambda p: write_jsonl(p / "a.jsonl", [{"response_length": 2147483647}]), "holds nothing of those tokens"),
    "lengths": (lambda p: write_jsonl(p / "a.jsonl", [LINE | {"response_length": 2_000_000}] * 40), "holds nothing of its"),
    "range": (lambda p: dump(p / "a.pt", drawn(tokens=range(10**9))), "stand for 1e+09 entries"),
    "stride 0": (lambda p: dump(p / "a.pt", drawn(reward=torch.zeros(1).expand(10**9))), "stand for 1e+09 entries"),
    "shared": (lambda p: dump(p / "a.pt", drawn(tokens=shared_lists())), "entries, written out"),
    "zip": (lambda p: zip_bomb(p / "a.pt"), "would unpack to 3.15e+08"),
    "parquet": (lambda p: repeated_pages(p / "a.parquet"), "would unpack to"),
}


PROBE = """
import re, sys
from pathlib import Path
from aggcli.cli.main import main
import aggcli.rollouts.builder, pyarrow.parquet
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
for path in sys.argv[1:]:
    before = most()
    code = main(["inspect", path, "--json"])
    print("CODE", code, (most() - before) // 1024, file=sys.stderr)
"""
"""Reads one file after another, and says by how many MiB each has raised the most that the process ever held."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the most memory held is read from /proc")
def test_a_file_that_stands_for_far_more_than_it_holds_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    """One long text used by every row is no such file: it is held once, 400 MB written out, and its characters are lengths."""
    paths = []
    for name, (make, _) in BOMBS.items():
        (tmp_path / name).mkdir()
        paths.append(str(make(tmp_path / name)))
    paths.append(str(one_text(tmp_path / "c.parquet")))
    ran = completed("-c", PROBE, *paths, env=environment(AGGCLI_READ_LIMIT="0.25"))
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("note: ")]
    assert [line.split()[1] for line in lines if line.startswith("CODE")] == ["2"] * len(BOMBS) + ["2"]
    for refusal, (_, said) in zip(lines[::2], [*BOMBS.values(), (None, "holds nothing of its")], strict=True):
        assert said in refusal
        assert "AGGCLI_READ_LIMIT=10" in refusal
    more = [int(line.split()[2]) for line in lines if line.startswith("CODE")]
    assert max(more) < 500, dict(zip([*BOMBS, "text"], more, strict=True))


def one_text(path: Path) -> Path:
    """4,000 rows of one text of 100 kB, which Parquet holds once."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array(["x" * 10**5]))
    columns = {"step": [1] * 4000, "prompt": ["p"] * 4000, "completion": texts, "r": [1.0] * 4000}
    pq.write_table(pa.table({**columns, "advantage": [0.0] * 4000}), path, store_schema=False)
    return path


def test_the_limits_can_be_raised_and_a_wrong_multiplier_is_refused(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [LINE | {"response_length": 10**7 + 1}])
    refused(aggcli(capsys, "inspect", path))
    monkeypatch.setenv("AGGCLI_READ_LIMIT", "2")
    assert inspected(capsys, path)["response_length"] == 10**7 + 1
    monkeypatch.setenv("AGGCLI_READ_LIMIT", "much")
    assert "AGGCLI_READ_LIMIT='much': must be a positive number" in refused(aggcli(capsys, "inspect", path))


# -- pickles cannot act -----------------------------------------------------------------------------------------------------


def state_on(module: str, name: str, state: bytes) -> bytes:
    """A pickle that gives something of the process a state."""
    return b"\x80\x04}c" + f"{module}\n{name}\n".encode() + state + b"b."


SLOTS = b"(N}" + b"\x8c\x0c__defaults__" + b"N" + b"s" + b"t"
"""(None, {'__defaults__': None}): a state whose second half is set attribute by attribute."""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict"),
        ("torch", "device"),
        ("skyrl.train", "TrainingInputBatch"),
    ],
)
@pytest.mark.parametrize("state", [SLOTS, b"}\x8c\x01a\x8c\x01bs"])
def test_no_pickle_can_give_a_function_or_class_a_state(
    tmp_path: Path, capsys: Any, module: str, name: str, state: bytes
) -> None:
    before = _rebuild_tensor_v2.__defaults__
    path = tmp_path / "a.pkl"
    path.write_bytes(state_on(module, name, state))
    assert "refused: it holds a state for" in refused(aggcli(capsys, "inspect", path, "--unsafe-load"))
    assert _rebuild_tensor_v2.__defaults__ == before
    assert not hasattr(_rebuild_tensor_v2, "a")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04]" + b"]" * 200_000 + b"a" * 200_000 + b".",  # nested lists
        b"\x80\x04)" + b"\x85" * 100_000 + b"}" + b"\x8c\x01a" + b"s.",  # nested tuples
        b"\x80\x04}(" + b")" + b"\x85" * 100_000 + b"K\x01u.",  # as a key: hashing them would overrun the stack
        b"\x80\x04]\x94h\x00a.",  # a list that contains itself
        b"\x80\x04r\xff\xff\xff\x7f.",  # a memo index of 2^31
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",  # bytes of 2^63
        b"\x80\x04\x96\xff\xff\xff\xff\x0f\x00\x00\x00x.",  # a bytearray of 64 GB
        b"\x80\x04\x82\x01.",  # copyreg's extensions
        b"\x80\x04(cos\nsystem\no.",
        b"\x80\x04(ios\nsystem\n.",
    ],
)
@pytest.mark.parametrize("flag", few([("--unsafe-load",), ()]))
def test_hostile_opcodes_end_in_one_line(tmp_path: Path, capsys: Any, data: bytes, flag: tuple[str, ...]) -> None:
    for name in ("a.pkl", "a.pt"):
        (tmp_path / name).write_bytes(data)
        refused(aggcli(capsys, "inspect", tmp_path / name, *flag))


def test_keys_that_hold_other_values_are_refused_before_they_are_hashed(tmp_path: Path, capsys: Any) -> None:
    """Hashing tuples nested a million deep overruns the stack of the process."""
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x04}(" + b")" + b"\x85" * 1000 + b"K\x01u.")
    assert "it holds a dict with tuple keys" in refused(aggcli(capsys, "inspect", path, "--unsafe-load"))


def test_a_tensor_that_reaches_beyond_its_bytes_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = dump(tmp_path / "0.pt", drawn(reward=torch.arange(4.0)))
    cut = rewritten(path, tmp_path / "1.pt", lambda name, data: data[:8] if "/data/" in name else data)
    assert "reaches beyond the 8 bytes that the file holds for it" in refused(aggcli(capsys, "inspect", cut))


# -- ids and values of no use -----------------------------------------------------------------------------------------------

VERL = {"input": "p", "output": "a", "score": 1.0, "step": 1}
NEMO = {"token_ids": [7, 1], "token_loss_mask": [0, 1], "sample_loss_mask": 1, "rewards": 1.0}
PRIME = {
    "schema_version": 1,
    "rank": 0,
    "micro_step": 0,
    "token_ids": [7, 1],
    "loss_mask": [0, 1],
    "inference_logprobs": [0, -1],
}
OPEN = {"sequences": [7, 1], "action_mask": [0, 1], "scores": 1.0}
TINKER = {"group_idx": 0, "traj_idx": 0, "steps": [{"ob_len": 1, "ac_len": 2}], "total_reward": 1.0}
NESTED: tuple[Any, ...] = ([1], {"a": [1]}, [[1], [2]], [{}], 10**30, "\ud800")


@pytest.mark.parametrize("value", few(NESTED, fast=2), ids=str)
@pytest.mark.parametrize("row", [LINE | {"status": "x", "rollout_id": 1}, VERL | {"uid": 1}, NEMO, PRIME, OPEN, TINKER])
def test_nested_and_unhashable_values_anywhere_end_in_one_line(tmp_path: Path, capsys: Any, row: dict, value: Any) -> None:
    for key in row:
        path = write_jsonl(tmp_path / "a.jsonl", [row, row | {key: value}])
        result = aggcli(capsys, "inspect", path)
        assert result.code == 0 or refused(result)


@pytest.mark.parametrize("key", ["rollout_id", "samples", "format_version", "dp_shards", "raw_reward"])
def test_a_dump_with_a_list_where_a_name_belongs_ends_in_one_line(tmp_path: Path, capsys: Any, key: str) -> None:
    for value in ([[1]], {"a": {}}, np.zeros(3), torch.zeros(2, 2), None, 2**80):
        path = dump(tmp_path / "0.pt", drawn(), **{key: value})
        result = aggcli(capsys, "inspect", path, path)
        assert result.code == 0 or refused(result)


def test_broken_texts_and_ids_beyond_64_bits_survive_a_conversion(tmp_path: Path, capsys: Any) -> None:
    samples = [drawn(group_index=2**70, status="\ud800"), drawn(group_index=2**70 + 1), drawn(group_index="\udfff\u00e9")]
    path = dump(tmp_path / "0.pt", *samples)
    assert aggcli(capsys, "convert", path, tmp_path / "a.jsonl").code == 0
    rows = [strict_json(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["group_index"] for row in rows] == [2**70, 2**70 + 1, "\udfff\u00e9"]
    assert rows[0]["status"] == "\ud800"
    assert "write .jsonl, which holds any id" in refused(aggcli(capsys, "convert", path, tmp_path / "a.parquet"))
    assert "too large for an id" in refused(aggcli(capsys, "inspect", dump(tmp_path / "1.pt", drawn(group_index=2**20000))))


# -- damaged Parquet ----------------------------------------------------------------------------------------------------------


def test_parquet_with_damaged_pages_or_texts_ends_in_one_line(tmp_path: Path, capsys: Any) -> None:
    columns = {"step": [1] * 8, "prompt": ["p"] * 8, "completion": [f"text {i}" for i in range(8)], "r": [1.0] * 8}
    pq.write_table(pa.table({**columns, "advantage": [0.0] * 8}), tmp_path / "a.parquet", compression="none")
    whole = (tmp_path / "a.parquet").read_bytes()
    for at in range(4, len(whole) - 8, 29):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        (tmp_path / "b.parquet").write_bytes(damaged)
        result = aggcli(capsys, "inspect", tmp_path / "b.parquet")
        assert result.code == 0 or refused(result), at


def test_the_sizes_of_columns_are_those_that_arrow_tells_and_a_damaged_footer_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, 3], "b": [["x"], [], ["y", "z"]]}), tmp_path / "a.parquet", row_group_size=2)
    whole = (tmp_path / "a.parquet").read_bytes()
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    told = [metadata.row_group(group).column(column) for group in range(2) for column in range(2)]
    expected = [(c.path_in_schema.split(".")[0], c.num_values, c.total_uncompressed_size) for c in told]
    assert [tuple(size) for size in column_sizes(io.BytesIO(whole))] == expected
    assert [size.values for size in column_sizes(io.BytesIO(whole))] == [2, 2, 1, 2]
    (length,) = struct.unpack("<I", whole[-8:-4])
    for at in range(len(whole) - 8 - length, len(whole)):
        for bits in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[at] ^= bits
            with contextlib.suppress(ValueError):
                column_sizes(io.BytesIO(damaged))


def test_a_timestamp_out_of_range_in_an_unread_column_hinders_nothing(tmp_path: Path, capsys: Any) -> None:
    times = pa.array([2**62, 0], pa.timestamp("us"))
    pq.write_table(pa.table({"response_length": [1, 2], "reward": [1.0, 0.0], "at": times}), tmp_path / "a.parquet")
    assert inspected(capsys, tmp_path / "a.parquet")["samples"] == 2


# -- pipes, paths, terminals --------------------------------------------------------------------------------------------------


def piped(content: bytes) -> str:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(content)
    return f"/dev/fd/{reading}"


@pytest.mark.parametrize("kind", ["jsonl", "dump", "parquet", "verl"])
def test_a_pipe_is_read_once_and_whole(tmp_path: Path, capsys: Any, kind: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [(VERL if kind == "verl" else LINE) for _ in range(500)])
    if kind == "dump":
        path = dump(tmp_path / "0.pt", *(drawn(reward=torch.tensor(1.0)) for _ in range(20)))
    elif kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist([LINE] * 500), path)
    expected = inspected(capsys, path)
    name = piped(path.read_bytes())
    found = inspected(capsys, name)
    os.close(int(name.rsplit("/", 1)[1]))
    assert {**found, "source": ""} == {**expected, "source": ""}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("~nosuchuser/a.jsonl", "there is no such user"),
        ("a\0b", "no such file"),
        ("/dev/zero", "is a device"),
        ("/dev/null", "is empty"),
    ],
)
def test_paths_that_are_no_files_are_refused_in_one_line(capsys: Any, path: str, said: str) -> None:
    assert said in refused(aggcli(capsys, "inspect", path))


ACTS = set("\x1b\x07\u202e\u2066\x9b\u200f\r")
EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\u2066\x9b\u200f\r"


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_what_a_file_says_never_acts_on_the_terminal(tmp_path: Path, capsys: Any, command: str) -> None:
    columns = {"step": [1] * 4, "prompt": ["a"] * 4, "completion": ["b", "cc", "d", "ee"], f"{EVIL}r": [1.0, 0.0] * 2}
    columns |= {"fmt": [0.0] * 4, "advantage": [0.1] * 4}
    place = tmp_path / f"x{EVIL}"
    place.mkdir()
    pq.write_table(pa.table(columns), place / f"{EVIL}.parquet")
    labelled = place / f"{EVIL}.jsonl"
    labelled.write_text(json.dumps(LINE | {"group_index": EVIL, "status": EVIL, f"{EVIL}key": 1}) + "\n")
    for at, path in enumerate((place / f"{EVIL}.parquet", labelled)):
        arguments = (path, "--groups") if command == "inspect" else (path, place / f"{at}.jsonl")
        result = aggcli(capsys, command, *arguments)
        assert result.code == 0, result.err
        for text in (result.out, result.err):
            assert not set(text) & ACTS
        assert "\\x1b]0;owned\\x07" in (result.out + result.err).replace("\n", "")
    broken = write_jsonl(tmp_path / "b.jsonl", [LINE | {"group_index": {EVIL: 1}}])
    assert not set(refused(aggcli(capsys, "inspect", broken))) & ACTS


def test_a_legacy_torch_file_whose_storage_is_cut_or_oversized_is_refused(tmp_path: Path, capsys: Any) -> None:
    buffer = io.BytesIO()
    torch.save({"rollout_id": 0, "samples": [drawn(reward=torch.tensor(0.5))]}, buffer, _use_new_zipfile_serialization=False)
    whole = buffer.getvalue()
    assert whole.endswith(struct.pack("<qf", 1, 0.5))
    for damaged in (whole[:-2], whole[:-12] + struct.pack("<q", 2**60) + whole[-4:], whole[:-12] + struct.pack("<q", -1)):
        (tmp_path / "0.pt").write_bytes(damaged)
        refused(aggcli(capsys, "inspect", tmp_path / "0.pt"))
