"""In what lengths are counted: tokens, or characters or words in dumps that hold text only. It stands beside every length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aggcli.errors import RecordError, some

LENGTH_UNITS = {"tokens": "tokens", "chars": "characters", "words": "words"}
"""`length_unit` of a record -> the word for people."""
UNKNOWN = "length units of unknown kind"


def length_unit_of(manifest: Mapping[str, Any]) -> str:
    """The word for the unit of a run's lengths. Training counts tokens; a replay whose manifest does not say is `UNKNOWN`."""
    settings = manifest.get("settings", {})
    counts_tokens = bool(settings.get("train")) or not settings.get("rollouts")
    recorded = manifest.get("length_unit", "tokens" if counts_tokens else None)
    return LENGTH_UNITS.get(str(recorded), UNKNOWN)


def in_length_unit(unit: str, length_unit: str) -> str:
    """A catalogued unit as these lengths have it: what the catalogue counts in tokens is in characters in a dump of texts."""
    return length_unit if unit == "tokens" else unit


def one_length_unit(units: Mapping[object, str]) -> str:
    """The unit of all these runs, given as run -> its unit. Raises `RecordError` where they differ: no mean is of both."""
    runs: dict[str, list[object]] = {}
    for run, unit in units.items():
        runs.setdefault(unit, []).append(run)
    if len(runs) > 1:
        told = "; ".join(f"{unit}: {some(own, 3)}" for unit, own in runs.items())
        raise RecordError(f"lengths are in different units and cannot be compared ({told}); give those of one unit")
    return next(iter(runs), "tokens")
