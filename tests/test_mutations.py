"""The faults of `tests.mutations` can all still be put in."""

from __future__ import annotations

import pytest

from tests.cli import ROOT
from tests.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("one", MUTATIONS, ids=lambda one: one.fault)
def test_a_fault_finds_its_text_once_and_its_tests(one: Mutation) -> None:
    assert (ROOT / "aggcli" / one.file).read_text(encoding="utf-8").count(one.old) == 1
    assert all((ROOT / name).is_file() for name in one.tests)
