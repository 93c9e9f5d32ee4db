"""What a launcher on a Ray cluster refuses and brings back, without a cluster; `experiments/benchmarks/ray_grid.py` has one."""

from __future__ import annotations

import json
import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aggcli.config import LaunchConfig
from aggcli.errors import RecordError, SettingError
from aggcli.jobs import recording
from aggcli.launch import Link, ray_cluster
from aggcli.launch.here import Here
from tests.cli import aggcli, refused
from tests.train_worker import flags

COMPARE = ["compare", *flags(steps=None), "--modes=sample_mean,token_mean", "--seeds=1", "--shares=2", "--checkpoint-every=2"]
ON_RAY = [*COMPARE, "--steps=3", "--launcher=ray"]


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ray were installed."""
    monkeypatch.setattr(ray_cluster, "_ray", SimpleNamespace)


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("127.0.0.1:{}", "no Ray cluster is there (Connection refused); start one, or give another"),
        ("ray://127.0.0.1:{}", "no Ray cluster is there (Connection refused); start one, or give another"),
        ("127.0.0.1:many", "must be host:port, ray://host:port or auto"),
    ],
)
def test_an_address_where_no_ray_is_is_refused_at_once_in_one_line(
    capsys, with_ray: None, tmp_path: Path, address: str, named: str
) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        wanted = address.format(taken.getsockname()[1])
        said = refused(aggcli(capsys, *ON_RAY, f"--ray-address={wanted}", "--output", tmp_path / "out"))
    assert said == f"aggcli: --ray-address {wanted}: {named}"
    assert not (tmp_path / "out").exists()


def test_the_address_is_that_of_the_environment_where_none_is_given(
    capsys, with_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "x:y")
    assert "--ray-address x:y: must be host:port" in refused(aggcli(capsys, *ON_RAY, "--output", tmp_path / "out"))


def test_without_ray_the_extra_is_named(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused(aggcli(capsys, *ON_RAY, "--output", tmp_path / "out"))
    assert said == 'aggcli: --launcher ray: ray is not installed; pip install "aggcli[ray]"'


@pytest.mark.parametrize(
    ("cpus", "gpus", "slots"),
    [(1.0, 0.0, 12), (2.0, 0.0, 5), (4.0, 1.0, 2), (0.0, 0.5, 4), (3.0, 2.0, 1), (8.0, 0.0, 1)],
)
def test_a_cluster_has_room_for_as_many_shares_as_fit_on_each_of_its_nodes(cpus: float, gpus: float, slots: int) -> None:
    """A node of 8 CPUs and 2 GPUs, one of 3 CPUs, and one of a single CPU."""
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0}, {"CPU": 1.0, "memory": 1e9}]
    assert ray_cluster._slots(LaunchConfig(cpus_per_share=cpus, gpus_per_share=gpus), nodes) == slots


def test_more_than_any_node_has_is_refused_with_what_there_is() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 3.0, "GPU": 1.0}]
    with pytest.raises(SettingError) as caught:
        ray_cluster._slots(LaunchConfig(cpus_per_share=4, gpus_per_share=1), nodes)
    told = "--cpus-per-share 4 --gpus-per-share 1: no node of the Ray cluster has so many (the most are 8 CPUs, 1 GPUs)"
    assert str(caught.value) == told


def test_settings_that_only_ray_uses_and_a_single_run_are_refused(capsys, tmp_path: Path) -> None:
    said = refused(aggcli(capsys, *COMPARE, "--steps=1", "--ray-address=auto", "--output", tmp_path / "out"))
    assert "--ray-address auto: only --launcher ray uses it" in said
    said = refused(aggcli(capsys, "run", *flags(steps=1), "--launcher=ray", "--output", tmp_path / "out"))
    assert "--launcher ray: is for several runs; give one as `aggcli train --modes MODE --seeds 1`" in said
    said = refused(aggcli(capsys, *ON_RAY, "--gpus-per-share=-1", "--output", tmp_path / "out"))
    assert "--gpus-per-share -1.0: must be a finite number of at least 0" in said
    assert not (tmp_path / "out").exists()


def test_a_worker_without_the_package_is_one_line() -> None:
    told = "a worker of the cluster has no aggcli; install the same version on every node"
    with pytest.raises(SettingError, match=told), ray_cluster._in_one_line():
        raise RuntimeError("The remote function failed to import.\nModuleNotFoundError: No module named 'aggcli'")
    with pytest.raises(RuntimeError, match="else"), ray_cluster._in_one_line():
        raise RuntimeError("No module named 'something else'")


def _of(work: Callable[[Any, Link], Any]) -> tuple[str, Any]:
    return ray_cluster.task(pickle.dumps((work, None)), 0, SimpleNamespace())


def _cannot_write(share: object, link: Link) -> None:
    raise PermissionError(13, "Permission denied", "/shared/out/sample_mean")


def _refuses(share: object, link: Link) -> None:
    raise RecordError("no")


def _stops(share: object, link: Link) -> None:
    raise KeyboardInterrupt


def test_how_a_task_ended_comes_back_as_words_and_an_exit_code() -> None:
    assert _of(_cannot_write) == ("failed", ("/shared/out/sample_mean: Permission denied", 2))
    assert _of(_refuses) == ("failed", ("no", 2))
    assert _of(_stops) == ("interrupted", None)


# -- records that come back -------------------------------------------------------------------------------------------


def test_a_machine_sees_a_results_directory_only_by_the_manifest_that_was_written_there(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    mark = (tmp_path / "manifest.json").stat().st_mtime_ns
    assert recording.Sent(mark, {}).is_seen_in(tmp_path)
    assert not recording.Sent(mark + 1, {}).is_seen_in(tmp_path), "the same path on another machine"
    assert not recording.Sent(mark, {}).is_seen_in(tmp_path / "elsewhere")


def test_files_that_come_back_are_whole_and_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.jsonl").write_bytes(b"1\n")
    (tmp_path / "a" / "y.json.tmp").write_bytes(b"{")
    (tmp_path / "c").write_bytes(b"2")
    files = recording.packed(tmp_path, [tmp_path / "a", tmp_path / "c", tmp_path / "gone"])
    assert files == {"a/b/x.jsonl": b"1\n", "c": b"2"}
    recording.unpack(files, tmp_path / "new")
    assert {str(path.relative_to(tmp_path / "new")): path.read_bytes() for path in (tmp_path / "new").rglob("*.*")} == {
        "a/b/x.jsonl": b"1\n"
    }
    with pytest.raises(RecordError, match="leads out of the results directory"):
        recording.unpack({"../x": b""}, tmp_path / "new")


@pytest.mark.slow
def test_records_of_a_machine_that_does_not_see_the_directory_come_back_and_are_gone_on_with(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near, away = tmp_path / "near", tmp_path / "away"

    def trained_into(output: Path) -> None:
        command = [*COMPARE, "--launcher=here", "--output", output]
        assert aggcli(capsys, *command, "--steps=2").code == 0
        assert aggcli(capsys, *command, "--steps=3", "--resume").code == 0

    trained_into(near)
    monkeypatch.setattr(Here, "__init__", lambda self: vars(self).update(is_stopping=False, slots=1, is_elsewhere=True))
    monkeypatch.setattr(recording.Sent, "is_seen_in", lambda self, directory: False)
    trained_into(away)
    for file in ("metrics.jsonl", "checkpoint-0.safetensors", "checkpoint-1.safetensors"):
        pairs = [(path, away / path.relative_to(near)) for path in near.rglob(file)]
        assert pairs
        assert all(ours.read_bytes() == theirs.read_bytes() for ours, theirs in pairs)
    assert json.loads((away / "token_mean" / "seed-0" / "manifest.json").read_text())["status"] == "done"
