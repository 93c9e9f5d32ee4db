"""Which cases of a law make the quick answer of `pytest -m "not slow"`, and which wait for the whole suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """All of the cases of one parameter, of which all but the first `fast` are marked slow."""
    return [case if at < fast else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]
