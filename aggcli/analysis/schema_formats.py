"""The schema of what a run leaves on disk as text: Markdown, and JSON Schema (draft 2020-12), in which a field that is not
described is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aggcli.analysis.schema import FILES, SHARED, Field, Schema, list_of
from aggcli.records import SCHEMA

# -- JSON Schema ----------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The schema of these files as one JSON Schema; `$defs` has one of a line of each, or of the manifest, by file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"aggcli results, schema {SCHEMA}",
        "description": SHARED,
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in FILES],
        "$defs": {name: {"description": about, **object_schema(fields)} for name, (about, fields) in FILES.items()},
    }


def object_schema(fields: Sequence[Field]) -> dict[str, Any]:
    """The JSON Schema of an object with these fields and no other."""
    many = {field.pattern: _described(field) for field in fields if field.pattern is not None}
    return {
        "type": "object",
        "properties": {field.name: _described(field) for field in fields if field.pattern is None},
        **({"patternProperties": many} if many else {}),
        "required": [field.name for field in fields if field.required],
        "additionalProperties": False,
    }


def _described(field: Field) -> dict[str, Any]:
    """A field's JSON Schema; unit and "over what" are annotations of our own."""
    notes = {"description": field.about, "x-unit": field.unit, "x-over": field.over}
    kind = field.schema
    if field.fields and "items" in kind:
        kind = list_of(object_schema(field.fields))
    elif field.fields:
        kind = {**object_schema(field.fields), **kind}
    return {**{name: note for name, note in notes.items() if note}, **kind}


# -- Markdown -------------------------------------------------------------------------------------------------------


def markdown() -> str:
    """The schema as one Markdown table a file; the fields of an object stand below it, with its name before a dot."""
    parts = [f"# Results on disk, schema {SCHEMA}\n\n{SHARED}\n"]
    for name, (about, fields) in FILES.items():
        rows = "\n".join(field_rows(fields))
        parts.append(f"## `{name}`\n\n{about}\n\n| field | type | unit | over | meaning |\n|---|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def field_rows(fields: Sequence[Field], before: str = "") -> Iterator[str]:
    """Rows of a Markdown table of fields: name, type, unit, over what, meaning; those of an object below it."""
    for field in fields:
        cells = (_type_of(field.schema), field.unit, field.over, field.about)
        yield f"| `{before}{field.name}` | {' | '.join(map(_escaped, cells))} |"
        yield from field_rows(field.fields, f"{before}{field.name}.")


def _type_of(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join("null" if value is None else str(value).lower() for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "items" in schema:
        kinds = [f"list of ({_type_of(schema['items'])})" if kind == "array" else kind for kind in kinds]
    return " or ".join(kinds)


def _escaped(text: str) -> str:
    """Text that Markdown would read as markup, or as a table's cell border."""
    for sign in ("\\", "*", "|", "<"):
        text = text.replace(sign, "\\" + sign)
    return text
