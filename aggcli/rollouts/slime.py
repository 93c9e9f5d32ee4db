"""slime's dumps: rollout dumps (`--save-debug-rollout-data`) and train dumps (`--save-debug-train-data`, version 2).

A rollout dump has the samples as they were drawn: groups, raw rewards, the inference engine's log-probabilities. A
train dump has what the trainer saw: its own log-probabilities before the update, the reference's, advantages, and the
partition and micro-batches really used, but no group_index. Joined, one complements the other.

Dumps are loaded as plain data only; nothing in a file is ever executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from aggcli.config import SourceConfig
from aggcli.errors import RolloutError, some
from aggcli.rollouts.batch import RolloutBatch
from aggcli.rollouts.builder import BatchBuilder
from aggcli.rollouts.fields import NOT_TRUNCATED, plain, shown, truncation
from aggcli.rollouts.slime_layout import recorded_layout
from aggcli.rollouts.steps import Step
from aggcli.rollouts.torch_files import head_words, load

Kind = Literal["slime-rollout", "slime-train", "miles-train"]

FORMAT_VERSION = 2
TRAIN_FIELDS = {
    "response_lengths": "response_length",
    "total_lengths": "total_length",
    "loss_masks": "loss_mask",
    "rollout_ids": "rollout_id",
    "tokens": "tokens",
    "log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "entropy": "entropy",
    "advantages": "advantage",
}
"""Field of a train dump's sample -> canonical field."""


def read_slime(
    path: Path,
    name: str,
    *,
    kind: Kind | None = None,
    rollout_dump: Path | None = None,
    reward_key: str | None = None,
    group_size: int | None = None,
) -> RolloutBatch:
    """The batch called `name` from the dump at `path`, of whichever kind it is, or of the `kind` asked for.

    `rollout_dump` is the rollout dump of the same rollout_id: a train dump takes group_index and status from it.
    Raises `RolloutError` for a file that is not plain data, is no dump of that kind, or contradicts its rollout dump.
    """
    builder = BatchBuilder(name, reward_key=reward_key, group_size=group_size)
    payload = load(path)
    found = kind_of(payload, path)
    if kind not in (None, found):
        raise RolloutError(f"{path}: is a {found} dump, not {kind}; change or drop --rollout-format")
    if found == "slime-rollout":
        for sample in samples_of(payload, name):
            builder.add(sample)
        return builder.build()
    version = plain(payload.get("format_version"))
    if version != FORMAT_VERSION:
        raise RolloutError(f"{path}: train dump of format_version {shown(version)}; only version {FORMAT_VERSION} is read")
    drawn = None if rollout_dump is None else list(samples_of(load(rollout_dump), rollout_dump.name))
    return _train_batch(payload, builder, drawn)


def read_rollout(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of a rollout dump; see `read_slime`."""
    return read_slime(step.path, name, kind="slime-rollout", reward_key=config.reward_key, group_size=config.group_size)


def read_train(step: Step, name: str, config: SourceConfig) -> RolloutBatch:
    """The batch of a train dump, joined with the step's rollout dump; see `read_slime`."""
    options = {"reward_key": config.reward_key, "group_size": config.group_size}
    return read_slime(step.path, name, kind="slime-train", rollout_dump=step.rollout_dump, **options)


# -- telling dumps apart --------------------------------------------------------------------------------------------


def kind_of(payload: object, path: Path) -> Kind:
    """Which dump a loaded file is, by its keys."""
    if isinstance(payload, Mapping) and "samples" in payload:
        return "slime-train" if "format_version" in payload or "dp_shards" in payload else "slime-rollout"
    if isinstance(payload, Mapping) and isinstance(payload.get("rollout_data"), Mapping):
        return "miles-train"
    keys = f"keys {some(payload, 8)}" if isinstance(payload, Mapping) else f"a {type(payload).__name__}"
    raise RolloutError(f"{path}: is not a slime dump: it holds {keys}, and no 'samples'")


def peek(path: Path) -> tuple[Kind, int | str | None]:
    """(kind, rollout_id) of a dump, from the head of its pickle where that tells, else by loading it.

    The rollout_id is None where it is nothing that names a rollout.
    """
    found = _peek_head(path)
    if found is None:
        payload = load(path)
        found = kind_of(payload, path), plain(payload.get("rollout_id"))
    return found[0], found[1] if isinstance(found[1], (int, str)) else None


def _peek_head(path: Path, most: int = 200) -> tuple[Kind, object] | None:
    """Look at the first words of the pickle: `{[format_version: 2,] rollout_id: 7, ...`."""
    words = head_words(path, most)
    if words[:1] == ["format_version"] and words[2:3] == ["rollout_id"]:
        return "slime-train", words[3]
    if words[:1] == ["rollout_id"] and words[2:3] == ["samples"] and "group_index" in words:
        return "slime-rollout", words[1]
    return None


def samples_of(payload: Mapping[str, object], name: str) -> Iterator[Mapping[str, object]]:
    samples = payload.get("samples")
    if not isinstance(samples, (list, tuple)):
        raise RolloutError(f"{name}: samples is {shown(samples)}; must be a list of samples")
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise RolloutError(f"{name}, sample {i}: is {shown(sample)}; each sample must be a dict of its fields")
        yield sample


# -- train dumps ----------------------------------------------------------------------------------------------------


def _train_batch(
    payload: Mapping[str, object], builder: BatchBuilder, drawn: list[Mapping[str, object]] | None
) -> RolloutBatch:
    """The samples in the order of their rollout_position, with what the rollout dump `drawn` adds to each."""
    by_position: dict[int, Mapping[str, object]] = {}
    for i, sample in enumerate(samples_of(payload, builder.name)):
        position = plain(sample.get("rollout_position"))
        if type(position) is not int or position < 0 or position in by_position:
            raise RolloutError(
                f"{builder.name}, sample {i}: rollout_position is {shown(position)}; each sample must have its own"
                " whole number of at least 0"
            )
        by_position[position] = sample
    positions = sorted(by_position)
    raw_reward = plain(payload.get("raw_reward"))
    for i, position in enumerate(positions):
        sample = _canonical(by_position[position])
        sample["reward"] = raw_reward_at(raw_reward, by_position[position], position, f"{builder.name}, sample {i}")
        if drawn is not None:
            join_rollout(sample, drawn, position, f"{builder.name}, sample {i}")
        builder.add(sample)
    shards = payload.get("dp_shards")
    recorded = recorded_layout(shards, positions)
    if recorded is None and shards is not None:
        builder.notes.append("dp_shards do not cover every sample exactly once: the recorded layout is left out")
    return builder.build(recorded=recorded)


def _canonical(sample: Mapping[str, object]) -> dict[str, object]:
    fields = {ours: sample.get(theirs) for theirs, ours in TRAIN_FIELDS.items()}
    fields["status"] = truncation(sample.get("truncated"))
    return fields


def raw_reward_at(raw_reward: object, sample: Mapping[str, object], position: int, label: str) -> object:
    """The reward before normalisation; `rewards` of a train dump are normalised."""
    if raw_reward is None:
        return sample.get("local_raw_reward")
    if not isinstance(raw_reward, (list, tuple)):
        raise RolloutError(f"{label}: raw_reward is {shown(raw_reward)}; must be a list, one reward per rollout_position")
    if position >= len(raw_reward):
        raise RolloutError(f"{label}: raw_reward has {len(raw_reward)} entries and none at rollout_position {position}")
    return raw_reward[position]


def join_rollout(sample: dict[str, object], drawn: list[Mapping[str, object]], position: int, label: str) -> None:
    """Add to `sample` what it lacks, from the rollout dump's sample at its rollout_position."""
    if position >= len(drawn):
        raise RolloutError(
            f"{label}: rollout_position {position} is not in the rollout dump, which has {len(drawn)} samples; give the"
            " rollout dump of the same rollout, or the train dump alone"
        )
    theirs = drawn[position]
    pairs = [(field, sample[field], theirs.get(field)) for field in ("response_length", "total_length")]
    ids, their_ids = plain(sample["tokens"]), plain(theirs.get("tokens"))
    if isinstance(ids, list) and isinstance(their_ids, list):
        pairs.append(("number of tokens", len(ids), len(their_ids)))
    for field, mine, other in pairs:
        if mine is not None and other is not None and plain(mine) != plain(other):
            raise RolloutError(
                f"{label}: {field} is {shown(plain(mine))} in the train dump but {shown(plain(other))} in the rollout"
                " dump; give the rollout dump of the same rollout, or the train dump alone"
            )
    for field in ("group_index", "status", "reward"):
        if sample.get(field) in (None, NOT_TRUNCATED) and theirs.get(field) is not None:
            sample[field] = theirs[field]
