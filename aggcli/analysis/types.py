"""The described fields of a record as Python types that pydantic checks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, Required

import pydantic
from typing_extensions import TypedDict

from aggcli.analysis.schema import Field, Schema
from aggcli.measurement.catalogue import METRICS

_WHOLE = Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)]
_SCALARS: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "integer": _WHOLE,
    "number": pydantic.FiniteFloat,
    "null": None,
    "object": dict[str, Any],
}
_STEP = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
"""The numbers of steps and ranks."""
_NUMBER = _WHOLE | pydantic.FiniteFloat | None
"""A metric: blank where nothing was measured, be it a count."""


def typed_dict(
    name: str, fields: Sequence[Field], needed: Sequence[str] = (), extra: str = "allow", *, of_steps: bool = False
) -> Any:
    """A TypedDict of these fields, strict about types. `needed`: fields that must be there; of the keys whose field stands for
    many (`pattern`) the type is not checked. `extra`: what is done with other keys; `of_steps`: whether numbers of the
    catalogue stand in it under their names.
    """
    types = {}
    for field in fields:
        if field.pattern is None:
            kind = _STEP if field.name in ("step", "rollout_step", "rank") else _type_of(field, of_steps)
            kind = _NUMBER if of_steps and field.name in METRICS else kind
            types[field.name] = Required[kind] if field.name in needed else NotRequired[kind]
    made = TypedDict(name, types)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    made.__pydantic_config__ = pydantic.ConfigDict(extra=extra, strict=True)  # pyright: ignore
    return made


def _type_of(field: Field, of_steps: bool) -> Any:
    if not field.fields:
        return _plain(field.schema)
    many = [one for one in field.fields if one.pattern is not None]
    inner: Any = (
        dict[str, _type_of(many[0], of_steps)] if many else typed_dict(field.name, field.fields, ("rank",), of_steps=of_steps)
    )
    kinds = field.schema["type"] if isinstance(field.schema["type"], list) else [field.schema["type"]]
    inner = list[inner] if "array" in kinds else inner
    return inner | None if "null" in kinds else inner


def _plain(schema: Schema) -> Any:
    if "enum" in schema or "const" in schema:
        return Literal[tuple(schema.get("enum", [schema.get("const")]))]
    if "anyOf" in schema:
        return functools.reduce(operator.or_, map(_plain, schema["anyOf"]))
    if isinstance(schema["type"], list):
        return functools.reduce(operator.or_, (_SCALARS[kind] for kind in schema["type"]))
    if schema["type"] == "array":
        return list[_plain(schema["items"])]
    if "properties" in schema:
        return typed_dict("settings", [Field(name, of, "") for name, of in schema["properties"].items()])
    if isinstance(schema.get("additionalProperties"), dict):
        return dict[str, _plain(schema["additionalProperties"])]
    return _SCALARS[schema["type"]]
