"""Settings as TOML: what `--config` reads, and what `--dry-run` prints."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from aggcli.config.flat import FIELDS, to_flat
from aggcli.config.sections import RunConfig
from aggcli.errors import SettingError, nearest


def read_toml(path: Path) -> dict[str, object]:
    """Flat settings from a TOML file; raises `SettingError` for a file that is missing, not TOML, or has an unknown setting."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--config {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"--config {path}: is not valid TOML ({error})") from error
    for name in found:
        if name not in FIELDS:
            raise SettingError(f"--config {path}: unknown setting '{name}'{nearest(name, FIELDS)}")
    return found


def to_toml(config: RunConfig) -> str:
    """The settings as TOML that `--config` reads back; what is unset is left out."""
    lines = []
    for name, value in to_flat(config).items():
        if value is not None:
            shown = list(value) if isinstance(value, tuple) else value
            lines.append(f"{name} = {json.dumps(shown)}")  # JSON texts, numbers, booleans and lists are TOML too
    return "\n".join(lines) + "\n"
