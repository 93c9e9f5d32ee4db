"""`aggcli demo`: everything from nothing, opened by where its pages are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import aggcli, records, refused


@pytest.mark.slow
def test_the_demo_replays_trains_and_draws_and_says_where_its_pages_are_and_both_answers(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("aggcli.cli.demo.STEPS", 2)
    folder = tmp_path / "demo"
    told = aggcli(capsys, "demo", "--output", folder)
    assert told.code == 0, told.err
    replay, train, *rest = told.out.splitlines()
    assert (replay, train) == tuple(f"{name}: {folder / name / 'figures' / 'report.html'}" for name in ("replay", "train"))
    assert all(Path(line.partition(": ")[2]).stat().st_size > 10_000 for line in (replay, train))
    first, second = " ".join(rest).strip().split("  ")
    assert first.startswith("prompt_mean: gradient norm 0.102x sample_mean's")
    assert second.endswith(".")
    assert len(records(folder / "replay" / "token_mean" / "metrics.jsonl")) == 3
    assert len(records(folder / "train" / "token_mean" / "seed-2" / "metrics.jsonl")) == 2
    assert "--overwrite" in refused(aggcli(capsys, "demo", "--output", folder))
