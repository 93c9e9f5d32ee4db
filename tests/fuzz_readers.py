"""Mutated rollout files over all readers: each must be read or refused in one line, in bounded time and memory.

    python -m tests.fuzz_readers --files 50000 --seed 0

File n of a seed is the same on every machine. Workers read the files one after another; one that dies takes no other file with
it and is named. Prints counts for each format, and every file that failed, with the numbers that make it again; exit code 1
where any did.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli import ROOT, environment

SECONDS = 60
"""Longest time for a file."""
ROOM = 2**30
"""Memory that a file may take beyond ten times its own size, in bytes."""
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**31 - 1, 2**63, -(2**63) - 1, 10**30, float("nan"), float("inf"), "", "x", "1", "True", "\ud800",
    "\x1b[2J", [], [[]], [None], ["x"], [1, [2]], [1e308, -1e308], {}, {"a": {}}, {"data": "x"}, [0] * 300,
)  # fmt: skip


# -- whole files of every format ----------------------------------------------------------------------------------------


def _sample(i: int, length: int = 3) -> dict[str, Any]:
    streams = {name: [-0.5 * t - i for t in range(length)] for name in ("log_probs", "old_log_probs", "ref_log_probs")}
    return {
        "group_index": i // 2,
        "rollout_id": i,
        "response_length": length,
        "total_length": length + 2,
        "tokens": list(range(length + 2)),
        "loss_mask": [1] * length,
        "reward": float(i % 2),
        "status": "completed",
        **streams,
        "advantage": 0.5 - i % 2,
    }


def _lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _prompted(prompt: int) -> dict[str, list[Any]]:
    """Lists over a prompt of two tokens and a response of three."""
    return {"ids": [prompt, 8, 1, 2, 3], "mask": [0, 0, 1, 1, 1], "numbers": [0.0, 0.0, -1.0, -2.0, -3.0]}


def _nemo(i: int) -> dict[str, Any]:
    lists = _prompted(i // 2)
    row = {"rewards": float(i % 2), "input_lengths": 5, "token_ids": lists["ids"], "token_loss_mask": lists["mask"]}
    return row | {"sample_loss_mask": 1, "advantages": lists["numbers"], "prev_logprobs": lists["numbers"]}


def _prime(i: int) -> dict[str, Any]:
    lists = _prompted(i // 2)
    row = {"schema_version": 1, "rank": 0, "micro_step": i // 2, "token_ids": lists["ids"], "loss_mask": lists["mask"]}
    return row | {"inference_logprobs": lists["numbers"], "trainer_logprobs": lists["numbers"], "entropy": lists["numbers"]}


def _openrlhf(i: int) -> dict[str, Any]:
    lists = _prompted(i // 2)
    return {
        "sequences": lists["ids"],
        "action_mask": lists["mask"],
        "action_log_probs": lists["numbers"],
        "scores": float(i % 2),
        "uid": str(i // 2),
    }


def _tinker(i: int) -> dict[str, Any]:
    steps = [{"ob_len": 2, "ac_len": 3, "stop_reason": "length"}]
    return {"group_idx": i // 2, "traj_idx": i % 2, "steps": steps, "total_reward": float(i % 2)}


def _verl(i: int) -> dict[str, Any]:
    return {
        "input": f"p{i // 2}",
        "output": "x" * (i + 1),
        "gts": "1",
        "score": float(i % 2),
        "step": 1 + i // 2,
        "acc": i % 2 == 1,
    }


def _torch(payload: Any, new: bool = True) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(payload, file, _use_new_zipfile_serialization=new)
    return file.getvalue()


def _slime_rollout(new: bool = True) -> bytes:
    import numpy as np
    import torch

    extra = {"rollout_log_probs": torch.full((3,), -0.5), "tokens": np.arange(5), "reward": np.float64(0.5)}
    return _torch(
        {
            "rollout_id": 0,
            "samples": [{**_sample(i), **(extra if i == 1 else {"rollout_log_probs": [-1.0] * 3})} for i in range(4)],
        },
        new,
    )


def _slime_train() -> bytes:
    import torch

    samples = [
        {
            "rollout_position": i,
            "response_lengths": 3,
            "total_lengths": 5,
            "loss_masks": torch.ones(3, dtype=torch.int32),
            "tokens": list(range(5)),
            "log_probs": torch.full((3,), -1.0),
            "advantages": torch.full((3,), 0.5),
            "truncated": i % 2,
        }
        for i in range(4)
    ]
    shards = [
        {"data_parallel_rank": r, "partition": [r, r + 2], "micro_batch_indices": [[0], [1]], "num_microbatches": [2]}
        for r in range(2)
    ]
    return _torch({"format_version": 2, "rollout_id": 0, "samples": samples, "raw_reward": [0, 1, 0, 1], "dp_shards": shards})


def _miles() -> bytes:
    import torch

    lists = {name: [3] * 2 for name in ("response_lengths",)} | {"total_lengths": [5] * 2, "truncated": [0, 1]}
    streams = {"log_probs": [torch.full((3,), -1.0)] * 2, "loss_masks": [torch.ones(3)] * 2, "tokens": [torch.arange(5)] * 2}
    return _torch(
        {"rollout_id": 3, "rank": 0, "rollout_data": {"partition": range(2), "raw_reward": [0.0, 1.0], **lists, **streams}}
    )


def _skyrl() -> bytes:
    import torch

    ones = torch.ones(2, 3)
    batch = {
        "sequences": torch.arange(10).reshape(2, 5),
        "attention_mask": torch.ones(2, 5),
        "response_mask": ones,
        "loss_mask": ones,
        "action_log_probs": -ones,
        "rewards": ones,
    }
    own = {
        k: {"format": "numpy", "data": v.numpy().tobytes(), "shape": tuple(v.shape), "dtype": str(v.numpy().dtype)}
        for k, v in batch.items()
    }
    return pickle.dumps({"batch_dict": {**batch, "loss_mask": own["loss_mask"]}, "metadata": {"uids": ["a", "a"]}})


def _parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return file.getvalue()


def _trl(i: int) -> dict[str, Any]:
    return {"step": str(9 + i // 2), "prompt": f"p{i // 2}", "completion": "x" * (i + 1), "r": float(i % 2), "advantage": 0.5}


SEEDS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "aggcli": ("a.jsonl", lambda: _lines(*map(_sample, range(4)))),
    "aggcli-parquet": ("a.parquet", lambda: _parquet([_sample(i) for i in range(4)])),
    "aggcli-parquet, plain": (
        "a.parquet",
        lambda: _parquet([_sample(i) for i in range(4)], compression="none", use_dictionary=False),
    ),
    "slime-rollout": ("0.pt", _slime_rollout),
    "slime-rollout, older": ("0.pt", lambda: _slime_rollout(new=False)),
    "slime-train": ("0.pt", _slime_train),
    "miles-train": ("0.pt", _miles),
    "verl": ("1.jsonl", lambda: _lines(*map(_verl, range(4)))),
    "trl": ("c.parquet", lambda: _parquet([_trl(i) for i in range(4)])),
    "nemo-rl": ("t.jsonl", lambda: _lines(*map(_nemo, range(4)))),
    "prime-rl": ("rank_0.jsonl", lambda: _lines(*map(_prime, range(4)))),
    "tinker": ("r.jsonl", lambda: _lines(*map(_tinker, range(4)))),
    "skyrl": ("b.pkl", _skyrl),
    "openrlhf": ("o.jsonl", lambda: _lines(*map(_openrlhf, range(4)))),
}
"""Format -> name and content of a small whole file."""


# -- mutations ----------------------------------------------------------------------------------------------------------


def mutated(data: bytes, name: str, draw: random.Random) -> bytes:
    """The file changed: its bytes; or, more often, what they stand for, so that readers and not only parsers are met."""
    if name.endswith(".jsonl") and draw.random() < 0.7:
        return _changed_rows(data, draw)
    if data.startswith(b"PK") and draw.random() < 0.7:
        return _changed_members(data, draw)
    return _changed_bytes(data, draw)


def _changed_bytes(data: bytes, draw: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(made) + 1)
        kind = draw.randrange(7)
        if kind == 0:
            del made[at:]
        elif kind == 1:
            del made[at : at + draw.choice((1, 2, 8, 64))]
        elif kind == 2:
            made[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 2, 8))))
        elif kind == 3:
            made[at:at] = made[at : at + draw.choice((4, 32, 256))] * draw.choice((1, 2, 50))
        elif kind == 4 and at < len(made):
            made[at] = draw.choice((0, 1, 127, 128, 255))
        elif kind == 5 and at < len(made):
            made[at] ^= 1 << draw.randrange(8)
        else:
            made[at : at + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\0\1\0\0\0"))
        if not made:
            break
    return bytes(made)


def _changed_rows(data: bytes, draw: random.Random) -> bytes:
    rows = [json.loads(line) for line in data.splitlines()]
    for _ in range(draw.choice((1, 1, 2, 4))):
        row = draw.choice(rows)
        key = draw.choice(list(row))
        kind = draw.randrange(5)
        if kind == 0:
            del row[key]
        elif kind == 1 and isinstance(row[key], list) and row[key]:
            row[key][draw.randrange(len(row[key]))] = _odd(draw)
        elif kind == 2:
            row[draw.choice(list(draw.choice(rows)))] = _odd(draw)
        elif kind == 3:
            row[key] = [row[key]] * draw.choice((1, 2, 40))
        else:
            row[key] = _odd(draw)
        if not row:
            row["x"] = 1
    return _lines(*rows)


def _odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(ODD))


def _changed_members(data: bytes, draw: random.Random) -> bytes:
    """A torch file whose pickle, or one of whose storages, is changed, in an archive that is whole."""
    file = io.BytesIO()
    how = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", how) as new:
        members = old.infolist()
        chosen = next(m for m in members if m.filename.endswith("data.pkl")) if draw.random() < 0.8 else draw.choice(members)
        for member in members:
            content = old.read(member)
            new.writestr(member.filename, _changed_bytes(content, draw) if member is chosen and content else content)
    return file.getvalue()


# -- reading ------------------------------------------------------------------------------------------------------------


def case(seed: int, number: int) -> tuple[str, str, bytes]:
    """Format, name and content of file `number` of a seed."""
    kinds = list(SEEDS)
    kind = kinds[number % len(kinds)]
    name, make = SEEDS[kind]
    if kind not in _WHOLE:
        _WHOLE[kind] = make()
    return kind, name, mutated(_WHOLE[kind], name, random.Random(f"{seed} {number}"))


_WHOLE: dict[str, bytes] = {}


def read(path: Path) -> str:
    """`read` or `refused`; whatever else happens is raised."""
    from aggcli.config import settings_from
    from aggcli.errors import AggcliError
    from aggcli.measurement.inventory import group_facts, inventory
    from aggcli.rollouts.sources import open_source

    settings = settings_from({"rollouts": [str(path)], "unsafe_load": True})
    try:
        for batch in open_source(settings.source, 0):
            inventory(batch, settings.objective, 1.0)
            group_facts(batch, settings.objective, 1.0)
    except AggcliError as error:
        if not str(error).strip():
            raise AssertionError("refused without a word") from error
        return "refused"
    return "read"


def work(seed: int, first: int, end: int, step: int) -> None:
    """Read files, saying before each which it is and after each what became of it; one JSON array a line."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, end, step):
            kind, name, data = case(seed, number)
            path = Path(folder) / name
            path.write_bytes(data)
            print(json.dumps(["begin", number, kind]), flush=True)
            began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                outcome = read(path)
            except BaseException as error:  # whatever it is, it is what is looked for
                place = traceback.extract_tb(error.__traceback__)[-1]
                outcome = f"{type(error).__name__}: {str(error)[:100]} ({Path(place.filename).name}:{place.lineno})"
            took = time.monotonic() - began
            more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            if took > SECONDS:
                outcome = f"took {took:.0f} s"
            elif more > 10 * len(data) + ROOM:
                outcome = f"took {more / 2**20:.0f} MiB for {len(data)} bytes"
            print(json.dumps(["end", number, kind, outcome]), flush=True)


def fuzz(files: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """(how many files of each format were read and refused, what is to be said of each that failed)."""
    counts: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    at = 0
    while at < files:
        command = [sys.executable, "-m", "tests.fuzz_readers", "--worker", str(at), "--files", str(files), "--seed", str(seed)]
        with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            kind = ""
            for line in worker.stdout:
                what, at, kind, *outcome = json.loads(line)
                if what == "end":
                    counts[kind, outcome[0] if outcome[0] in ("read", "refused") else "failed"] += 1
                    if outcome[0] not in ("read", "refused"):
                        failures.append(f"seed {seed}, file {at} ({kind}): {outcome[0]}")
        if worker.returncode:
            counts[kind, "failed"] += 1
            failures.append(f"seed {seed}, file {at} ({kind}): ended the process with {worker.returncode}")
        at += 1
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=int, metavar="N", help="write file N of the seed into the current folder, and no more")
    given = parser.parse_args()
    if given.write is not None:
        _, name, data = case(given.seed, given.write)
        Path(name).write_bytes(data)
        print(name)
        return 0
    if given.worker is not None:
        work(given.seed, given.worker, given.files, 1)
        return 0
    began = time.monotonic()
    counts, failures = fuzz(given.files, given.seed)
    for kind in SEEDS:
        found = {what: counts[kind, what] for what in ("read", "refused", "failed")}
        print(f"{kind:24}" + "".join(f"{number:8} {what}" for what, number in found.items()))
    print(f"seed {given.seed}: {sum(counts.values())} files, {len(failures)} failed, {time.monotonic() - began:.0f} s")
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
