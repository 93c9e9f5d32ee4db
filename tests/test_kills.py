"""A few kills at random moments; `python tests/kills.py --count 100` is the long run."""

from __future__ import annotations

import pytest

from tests.cli import ROOT, completed


@pytest.mark.slow
def test_a_killed_command_leaves_nothing_half_written_and_nothing_running() -> None:
    kinds = "training,converting,replaying"
    told = completed(ROOT / "tests" / "kills.py", "--count=6", "--seed=3", f"--kinds={kinds}")
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.splitlines()[-1].startswith("6 kills ("), told.stdout
    assert told.stdout.splitlines()[-1].endswith(", 0 faults")
