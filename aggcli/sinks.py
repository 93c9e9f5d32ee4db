"""Optional mirrors of metrics.jsonl: TensorBoard event files, and a local trackio project.

    tensorboard   <run>/tensorboard/     an event file for each time the run was started or resumed
    trackio       <results>/trackio/     one database; its project is named as the results directory, a run `mode/seed-<seed>`

A sink gets every finite number of a line of metrics.jsonl under the name that it has there, at the line's optimizer step; null
stays out, and so do the step and the seed themselves. The run's settings go with it. Nothing is ever read back from a sink: the
records stay the truth. Both libraries are extras, imported when the first sink is opened, and neither prints to stdout.

A sink opens on what metrics.jsonl holds. When a run is resumed, TensorBoard keeps its event files and is told to forget the
steps from the first one to come (a `purge_step`); trackio has no such call, so the run is deleted there and made anew from
metrics.jsonl, with the time of the copy in place of that of the step. Processes that share the runs write into one database,
each its own runs. trackio stays on this machine: what would have it send anything elsewhere is taken out of the environment.
"""

from __future__ import annotations

import contextvars
import io
import math
import os
import socket
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aggcli.errors import RecordError, SettingError
from aggcli.records import METRICS, TENSORBOARD, TRACKIO, read_lines, refuse_links
from aggcli.run_writer import Sink

_NOT_MEASURED = ("step", "seed")
_REMOTE = ("SPACE_ID", "SERVER_URL", "WRITE_TOKEN", "DATASET_ID", "BUCKET_ID", "WEBHOOK_URL")
"""`TRACKIO_...` variables that would have trackio send what it is given to another machine."""


def need(names: Iterable[str]) -> None:
    """Raises `SettingError` for a sink whose library is not installed. Imports none."""
    for name in names:
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder called so in the working directory has no origin
            raise SettingError(
                f"--log-to {name}: the {name} library is not installed; install aggcli[{name}], or leave {name} out"
            )


def numbers(line: Mapping[str, Any]) -> dict[str, int | float]:
    """What a line of metrics.jsonl has for a sink: its finite numbers by name."""
    return {
        name: value
        for name, value in line.items()
        if name not in _NOT_MEASURED
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


class Sinks:
    """The sinks of one results directory. They are opened with the first run, after its manifest is written: a folder of theirs
    that stands alone would not be known as aggcli's own."""

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        self.names = names
        self._directory = directory.resolve()

    @cached_property
    def _trackio(self) -> Any:
        folder = self._directory / TRACKIO
        refuse_links([folder])
        return _local_trackio(folder)

    def of_run(self, directory: Path, manifest: Mapping[str, Any]) -> list[Sink]:
        """The sinks of a run, holding the steps that its metrics.jsonl holds.

        Raises `RecordError` where trackio cannot write into the directory.
        """
        path = directory / METRICS
        recorded = list(read_lines(path)) if self.names and path.exists() else []
        opened: list[Sink] = []
        if TENSORBOARD in self.names:
            opened.append(_TensorBoard(directory / TENSORBOARD, manifest, recorded))
        if TRACKIO in self.names:
            opened.append(_Trackio(self._trackio, self._directory.name, manifest, recorded))
        return opened


def _settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are set, flat, with the run's own mode, seed, learning rate and divisor."""
    own = {"mode": "mode", "seed": "seed", "lr": "lr", "loss_aggregation_divisor": "divisor"}
    resolved = {name: manifest.get(key) for name, key in own.items()}
    known = {**manifest["settings"], **{name: value for name, value in resolved.items() if value is not None}}
    return {
        name: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        for name, value in known.items()
        if value is not None
    }


class _TensorBoard:
    """An event file of one run: an event a step, on disk when `step` returns.

    Written by tensorboard's record writer: no thread, no torch, and no TensorFlow where that happens to be installed.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = _messages("event").Event, _messages("summary").Summary
        resumes = folder.is_dir() and any(folder.iterdir())
        folder.mkdir(exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)  # tensorboard reads the files of a run in the order of their names
        file = folder / f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(file.open("xb"))
        first = recorded[-1]["step"] + 1 if resumes and recorded else 0
        self._write(step=first, file_version="brain.Event:2")
        if resumes:
            start = _messages("event").SessionLog(status="START")
            self._write(step=first, session_log=start)  # forget what was read from here on
        self._write(step=first, summary=hparams_pb(_settings(manifest)))
        self._write(step=first, summary=text_pb("settings", f"```toml\n{manifest['config']}```"))
        for line in () if resumes else recorded:
            self.step(line)
        self._records.flush()

    def step(self, metrics: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()]
        self._write(step=metrics["step"], summary=self._summary(value=values))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _write(self, **event: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **event).SerializeToString())


def _messages(name: str) -> Any:
    """The messages of one of tensorboard's protocol files; they are made when it is imported."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


class _Trackio:
    """A run of a local trackio project. trackio writes from a thread of its own, twice a second and when the run is closed."""

    def __init__(self, trackio: Any, project: str, manifest: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> None:
        name = f"{manifest['mode']}/seed-{manifest['seed']}"
        settings = {"project": project, "name": name, "config": _settings(manifest), "resume": "never"}
        local = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        # trackio has one current run and ends it when another begins; in a context of its own none knows of the others
        context = contextvars.copy_context()
        try:
            with redirect_stdout(io.StringIO()):
                for earlier in list(trackio.Api().runs(project)) if recorded else ():
                    if earlier.name == name:
                        earlier.delete()
                self._run = context.run(trackio.init, **settings, **local)
        except ValueError as error:  # a project name that trackio keeps for itself
            raise RecordError(f"--log-to trackio: {error}; choose another --output") from error
        for line in recorded:
            self.step(line)

    def step(self, metrics: Mapping[str, Any]) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.log(numbers(metrics), step=metrics["step"])

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


def _local_trackio(folder: Path) -> Any:
    """The trackio module, writing into `folder`: it reads where to write when it is imported."""
    for name in _REMOTE:
        os.environ.pop(f"TRACKIO_{name}", None)
    os.environ |= {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trackio = import_module("trackio")
        except ImportError as error:
            raise RecordError(f"--log-to trackio: trackio cannot be imported ({error}); reinstall aggcli[trackio]") from error
    if Path(trackio.TRACKIO_DIR) != folder:
        raise RecordError(
            f"--log-to trackio: this process writes into {trackio.TRACKIO_DIR} already; start another for {folder}"
        )
    return trackio
