"""The documented schema of the records, against records that were really written."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from jsonschema import Draft202012Validator

from aggcli.analysis.schema import FILES
from aggcli.analysis.schema_formats import json_schema
from aggcli.config import FIELDS
from aggcli.measurement.catalogue import METRICS
from aggcli.rollouts import known
from tests.cli import aggcli, refused, results_of, strict_json

TRAINING = ("--steps", 1, "--rollout-batch-size", 2, "--n-samples-per-prompt", 4, "--device", "cpu", "--log-correct-samples")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A replay, a training run and a comparison of each kind."""
    folder = tmp_path_factory.mktemp("results")
    calls = {
        "replay": ("run", "--rollouts", "example", "--log-correct-samples"),
        "training": ("run", *TRAINING),
        "replayed": ("compare", "--rollouts", "synthetic", "--synthetic-masked", 0.2, "--synthetic-off-policy", 0.1),
        "trained": ("compare", "--modes", "sample_mean,constant", "--seeds", 2, "--kl-coef", 0.1, *TRAINING),
    }
    for name, call in calls.items():
        results_of(*call, "--output", folder / name)
    return folder


def validator_of(file: str) -> Draft202012Validator:
    return Draft202012Validator(schema_of(file))


def schema_of(file: str) -> dict[str, Any]:
    whole = json_schema()
    Draft202012Validator.check_schema(whole)
    return {"$schema": whole["$schema"], "$ref": f"#/$defs/{file}", "$defs": whole["$defs"]}


def records(results: Path, file: str) -> Iterator[tuple[Path, Any]]:
    for path in sorted(results.rglob(file)):
        text = path.read_text(encoding="utf-8")
        for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
            yield path, strict_json(line)


@pytest.mark.parametrize(
    ("file", "count"), [("metrics.jsonl", 12), ("layouts.jsonl", 51), ("timings.jsonl", 5), ("manifest.json", 12)]
)
def test_every_record_that_is_written_fits_the_schema(results: Path, file: str, count: int) -> None:
    """3 steps replayed, 1 trained, 1 under 4 modes, 1 under 2 modes x 2 seeds; each under 4
    layouts, those of the example under the recorded one too; 10 runs, 2 comparisons."""
    validator = validator_of(file)
    found = list(records(results, file))
    assert len(found) == count
    for path, record in found:
        assert [f"{path}: {error.message}" for error in validator.iter_errors(record)] == []


def test_every_row_of_a_sample_file_fits_the_schema(results: Path) -> None:
    """64 samples in each of three recorded steps; the synthetic step has 128, under each of four modes."""
    validator = validator_of("samples")
    rows = [row for path in sorted(results.rglob("step-*.parquet")) for row in pyarrow.parquet.read_table(path).to_pylist()]
    assert len(rows) == 3 * 64 + 4 * 128
    for row in rows:
        assert [error.message for error in validator.iter_errors(row)] == []
        assert row.keys() == json_schema()["$defs"]["samples"]["properties"].keys()


def test_a_field_that_is_not_documented_or_of_another_type_is_refused(results: Path) -> None:
    for file, inner in (("metrics.jsonl", ()), ("layouts.jsonl", ("ranks", 0)), ("manifest.json", ("environment",))):
        validator = validator_of(file)
        _, record = next(records(results / "training", file))
        for change in ({"surprise": 1}, {"pg_los": 0.0}):
            changed = copy.deepcopy(record)
            place = changed
            for key in inner:
                place = place[key]
            place.update(change)
            assert not validator.is_valid(changed), (file, change)
    metrics = validator_of("metrics.jsonl")
    _, line = next(records(results / "training", "metrics.jsonl"))
    assert metrics.is_valid(line | {"samples": 8, "pass@16": 0.5, "pg_loss": None})
    for change in ({"samples": 8.5}, {"samples": None}, {"mode": 1}, {"pass@x": 0.5}, {"skipped": {"pg_loss": 1}}):
        assert not metrics.is_valid(line | change), change


@pytest.mark.slow
def test_removing_the_description_of_a_recorded_field_makes_the_records_invalid(results: Path) -> None:
    """What the first test would say of any recorded number whose entry left the catalogue or the schema."""
    _, line = next(records(results / "replay", "metrics.jsonl"))
    for name in line:
        if name.startswith("pass@"):
            continue
        schema = schema_of("metrics.jsonl")
        del schema["$defs"]["metrics.jsonl"]["properties"][name]
        assert not Draft202012Validator(schema).is_valid(line), name


def test_the_catalogue_and_the_settings_stand_in_it_whole() -> None:
    defs = json_schema()["$defs"]
    metrics = defs["metrics.jsonl"]["properties"]
    assert METRICS.keys() <= metrics.keys()
    assert metrics["ppo_kl"]["x-unit"] == "nats"
    assert metrics["ppo_kl"]["x-over"] == METRICS["ppo_kl"].over
    ranks = defs["layouts.jsonl"]["properties"]["ranks"]["items"]["properties"]
    assert {name for name in METRICS if name not in ranks} == {m.name for m in METRICS.values() if m.reduction == "global"}
    assert defs["manifest.json"]["properties"]["settings"]["properties"].keys() == FIELDS.keys()


def test_markdown_has_a_row_of_five_cells_for_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    told = aggcli(capsys, "runs", "schema")
    assert told.code == 0
    rows = [line for line in told.out.splitlines() if line.startswith("| `")]
    names = {row.split("`")[1] for row in rows}
    for file, (_, fields) in FILES.items():
        assert f"## `{file}`" in told.out
        assert {field.name for field in fields} <= names
    assert {"ranks.partition", "environment.git_commit", "final.modes.<mode>.<metric>.difference.low", "pass@<k>"} <= names
    for row in rows:
        assert row.replace("\\|", "").count("|") == 6, row
        assert row.replace("\\|", "").split("|")[5].strip(), f"no meaning: {row}"


def test_json_is_the_schema_and_another_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    told = aggcli(capsys, "runs", "schema", "--format", "json")
    assert strict_json(told.out) == json.loads(json.dumps(json_schema()))
    assert aggcli(capsys, "runs", "schema", "--json").out == told.out
    assert "--format jsn: must be md or json; did you mean 'json'?" in refused(
        aggcli(capsys, "runs", "schema", "--format", "jsn")
    )


# -- the plain format of rollouts -----------------------------------------------------------------------------------------


def test_the_plain_formats_schema_has_every_field_that_is_read_and_what_is_written_fits_it(tmp_path: Path, capsys) -> None:
    schema = strict_json(aggcli(capsys, "convert", "--schema", "--format", "json").out)
    validator = Draft202012Validator(schema)
    Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == set(known.FIELDS)
    assert aggcli(capsys, "convert", "example", tmp_path / "plain").code == 0
    lines = [strict_json(line) for path in sorted((tmp_path / "plain").iterdir()) for line in path.read_text().splitlines()]
    assert len(lines) == 3 * 64
    for line in lines:
        assert [error.message for error in validator.iter_errors(line)] == []
    written = set().union(*lines)
    assert {"log_probs", "rollout_log_probs", "ref_log_probs", "advantage", "group_index", "tokens"} <= written
    for wrong in (
        {},
        {"response_length": -1},
        {"response_length": 1, "loss_mask": [2]},
        {"response_length": 1, "log_probs": "x"},
    ):
        assert not validator.is_valid(wrong)
    table = aggcli(capsys, "convert", "--schema").out
    assert all(f"| `{name}` |" in table for name in known.FIELDS)


def test_schema_and_conversion_are_asked_for_apart(capsys) -> None:
    assert "give IN and OUT" in refused(aggcli(capsys, "convert"))
    assert "is how --schema prints" in refused(aggcli(capsys, "convert", "a", "b", "--format", "json"))
    assert "--format yaml: must be md or json" in refused(aggcli(capsys, "convert", "--schema", "--format", "yaml"))
