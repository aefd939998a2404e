"""A small part of JSON Schema, enough to say what an answer must look like; unknown keywords are refused, not skipped.

Our own rather than a dependency: the verifiers need the dozen keywords below, must treat a deeply nested or huge answer
as a plain failure, and must never run a pattern of the schema over text that a stranger wrote.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from tunesmith.core import strict_json
from tunesmith.core.errors import did_you_mean, quoted

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES = frozenset({"title", "description", "$schema", "$id", "examples", "default"})
_SIZES: dict[str, type[str] | type[list[Any]]] = {
    "minLength": str,
    "maxLength": str,
    "minItems": list,
    "maxItems": list,
}
_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_CHECKED = ("type", "enum", "const", "properties", "required", "additionalProperties", "items", *_SIZES, *_HOLDS)
_MAX_DEPTH = 32
_MAX_CHARS = 1_000_000


def schema_problem(schema: Any, path: str = "") -> str | None:
    """Why a schema cannot be used; None when it can."""
    where = f"{path}: " if path else ""
    if not isinstance(schema, Mapping):
        return f"{where}a schema is a mapping"
    if path.count(".") > _MAX_DEPTH:
        return f"{where}is nested too deeply"
    for key, value in schema.items():
        if key in _NOTES:
            continue
        if key not in _CHECKED:
            return f"{where}keyword {quoted(str(key))} is not checked here{did_you_mean(str(key), _CHECKED)}"
        if not _is_well_formed(key, value):
            return f"{where}{key} has a value that makes no sense there"
    below = [*dict(schema.get("properties", {})).items()]
    below += [("items", schema["items"])] if "items" in schema else []
    for name, inner in below:
        problem = schema_problem(inner, f"{path}.{name}" if path else str(name))
        if problem is not None:
            return problem
    return None


def _is_well_formed(key: str, value: Any) -> bool:
    match key:
        case "type":
            names = value if isinstance(value, list) else [value]
            return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)
        case "enum":
            return isinstance(value, list) and bool(value)
        case "properties" | "items":
            return isinstance(value, Mapping)
        case "required":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "additionalProperties":
            return isinstance(value, bool)
        case "const":
            return True
        case _ if key in _SIZES:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


def violation(text: str, schema: Mapping[str, Any]) -> str | None:
    """Why a text is not JSON of that schema; None when it is."""
    if len(text) > _MAX_CHARS:
        return "is too long to be checked"
    try:
        value = strict_json.loads(text, _appears_twice, parse_constant=_refuse_constant)
    except RecursionError:
        return "is nested too deeply"
    except ValueError as error:
        return f"is not JSON: {error}"
    return _violation(value, schema, "", 0)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _appears_twice(key: str) -> ValueError:  # not named: it is the answer's own text
    return ValueError("a key appears twice in one object")


def _violation(value: Any, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
    where = path or "the answer"
    if depth > _MAX_DEPTH:
        return f"{where} is nested too deeply"
    names = schema.get("type")
    if names is not None and not any(_is_a(value, name) for name in ([names] if isinstance(names, str) else names)):
        return f"{where} is no {names if isinstance(names, str) else ' or '.join(names)}"
    if "enum" in schema and not any(_equal(value, allowed) for allowed in schema["enum"]):
        return f"{where} is none of the allowed values"
    if "const" in schema and not _equal(value, schema["const"]):
        return f"{where} is not the one allowed value"
    return _outside(value, schema, where) or _violation_inside(value, schema, path, depth)


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _equal(value: Any, other: Any) -> bool:
    """As JSON means it: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _outside(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    for key, kind in _SIZES.items():
        if key in schema and isinstance(value, kind):
            too_short = key.startswith("min") and len(value) < schema[key]
            too_long = key.startswith("max") and len(value) > schema[key]
            if too_short or too_long:
                return f"{where} has {len(value)} {'characters' if kind is str else 'items'}, {key} is {schema[key]}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    for key, holds in _HOLDS.items():
        if key in schema and not holds(value, schema[key]):
            return f"{where} is {value}, {key} is {schema[key]}"
    return None


def _violation_inside(value: Any, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
    if isinstance(value, list) and "items" in schema:
        inner = (_violation(item, schema["items"], f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
        return next((problem for problem in inner if problem is not None), None)
    if not isinstance(value, dict):
        return None
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{path + '.' if path else ''}{name} is missing"
    if schema.get("additionalProperties", True) is False:
        for name in value:
            if name not in properties:
                return f"{path + '.' if path else ''}{quoted(str(name), 40)} is not among the properties"
    for name, inner_schema in properties.items():
        if name in value:
            problem = _violation(value[name], inner_schema, f"{path + '.' if path else ''}{name}", depth + 1)
            if problem is not None:
                return problem
    return None
