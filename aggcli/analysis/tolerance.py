"""How far layouts may be apart before one of them has changed a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-4}
"""Largest relative difference between layouts that rounding can explain; beyond it a layout changed a number."""


def tolerance_of(settings: Mapping[str, Any]) -> tuple[str, float]:
    """The dtype of a recorded run, and its limit."""
    dtype = settings.get("dtype") or "float64"
    return dtype, TOLERANCE.get(dtype, TOLERANCE["float64"])
