"""Whether a value may stand at a key, and if not, one clear reason: what it is, what was expected, which range."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.core.section import Section
from tunesmith.profiles.keys import REFUSED, Problem, SchemaField, is_free, schema_fields, unknown_key
from tunesmith.profiles.yaml_files import KeyPath, parse_inline

_SECRET = frozenset({("store", "url")})  # may hold a password: never repeated in a message


def check_value(place: SchemaField, value: Any) -> list[Problem]:
    """Why a value cannot stand there; empty when it can. Strict: text is no number, 16.0 is no whole number."""
    # With a dot in a name, the dotted key would mean something else when it is read again.
    odd = [part for part in place.rest if not part or "." in part] if is_free(place.info) else []
    if odd:
        return [Problem(place.path, f"the name {quoted(odd[0])} is empty or holds a dot; use another one")]
    for part in reversed(place.rest):
        value = {part: value}
    try:
        place.section.model_validate_json(json.dumps({place.field: value}), strict=True)
    except ValidationError as error:
        details = error.errors()
        if details[0]["type"] == "json_invalid":
            return [Problem(place.path, "holds characters that are not valid text")]
        # Other fields of the section are missing here, and rules between fields wait for the whole.
        about_field = [detail for detail in details if detail["loc"][:1] == (place.field,)]
        found = [_problem(place, value, detail) for detail in about_field]
        return list({problem.path: problem for problem in reversed(found)}.values())[::-1]
    except (TypeError, ValueError, RecursionError):
        return [Problem(place.path, "holds something that cannot be written as JSON")]
    if _holds_nonfinite(value):  # only options reach this: their values have no declared type
        return [Problem(place.path, "holds NaN or infinity; write a finite number")]
    return []


def _holds_nonfinite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_nonfinite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_nonfinite, value))
    return isinstance(value, float) and not math.isfinite(value)


def coerce_text(place: SchemaField, text: str) -> tuple[Any, list[Problem]]:
    """The value that text from a command line or the environment stands for there, or why it stands for none.

    Such text is untyped, so a quoted number is a number, 0 and 1 are booleans, and 123 may be a revision.
    """
    parsed = parsed_or_text(text)
    if not place.rest and not text.strip() and (str not in _kinds(place.info.annotation) or check_value(place, "")):
        return None, [Problem(place.path, f"is empty; must be {describe_place(place)}")]
    unquoted = isinstance(parsed, str) and text[:1] not in ("'", '"')
    candidates: list[Any] = [text.strip() if unquoted else parsed, text]
    if isinstance(parsed, str):
        candidates.append(parsed_or_text(parsed))
    if type(parsed) is int and parsed in (0, 1):
        candidates.append(bool(parsed))
    for candidate in candidates:
        if not check_value(place, candidate):
            return candidate, []
    return None, check_value(place, parsed)


def parsed_or_text(text: str) -> Any:
    """What the text means as YAML; text that is no YAML means itself."""
    try:
        return parse_inline(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class _Spot:
    """A place inside a value, with the type that is expected there."""

    path: KeyPath
    kind: Any
    limits: tuple[Any, ...]
    value: Any

    def below(self, part: str | int) -> _Spot | None:
        """One level down; None at a branch of a union, where the field as a whole says what it expects."""
        path = (*self.path, part)
        section = section_type(self.kind)
        name = section.aliases.get(str(part), str(part)) if section is not None else ""
        if section is not None and name in section.model_fields:
            info = section.model_fields[name]
            return _Spot(path, info.annotation, tuple(info.metadata), _item(self.value, part))
        if get_origin(self.kind) is dict and part != "[key]":
            return _Spot(path, get_args(self.kind)[1], (), _item(self.value, part))
        if get_origin(self.kind) is tuple and isinstance(part, int):
            return _Spot(path, get_args(self.kind)[0], (), _item(self.value, part))
        return None


def _problem(place: SchemaField, value: Any, detail: ErrorDetails) -> Problem:
    """One error of pydantic in our words."""
    spot = _Spot(place.prefix, place.section, (), {place.field: value})
    for part in detail["loc"]:
        if part == "[key]":
            return Problem(spot.path, unknown_key((), str(spot.path[-1]), _key_names(place), ()))
        below = spot.below(part)
        if below is None:
            section = section_type(spot.kind)
            if section is None:
                break
            return Problem((*spot.path, part), unknown_key((), str(part), tuple(section.model_fields), ()))
        spot = below
    if detail["type"] == "value_error":
        return Problem(spot.path, detail["msg"].removeprefix("Value error, "))
    if spot.path in _SECRET:
        return Problem(spot.path, f"must be {expected(spot.kind, spot.limits)}")
    return Problem(spot.path, _refusal(spot))


def _key_names(place: SchemaField) -> tuple[str, ...]:
    """The keys of a mapping whose keys are an enum."""
    return tuple(str(member.value) for member in get_args(place.info.annotation)[0])


def section_type(kind: Any) -> type[Section] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _item(value: Any, part: str | int) -> Any:
    try:
        return value[part]
    except (KeyError, IndexError, TypeError):
        return None


def _refusal(spot: _Spot) -> str:
    """What the value is, and what should stand there instead."""
    value, wanted = spot.value, expected(spot.kind, spot.limits).removesuffix(" or null")
    kinds = _kinds(spot.kind)
    if spot.path[-1] in REFUSED:
        return REFUSED[str(spot.path[-1])]
    if value is None:
        return f"is empty (null); must be {wanted}"
    if isinstance(value, str):
        return _refusal_of_text(value, spot.kind, wanted)
    if isinstance(value, int | float) and not isinstance(value, bool) and kinds & {float, int}:
        if not math.isfinite(value):
            return f"{value} is not a finite number; must be {wanted}"
        if float in kinds or isinstance(value, int):
            return f"{value} is out of range; must be {wanted}"
    return f"{_shown(value)} is not {wanted}"


def _refusal_of_text(value: str, kind: Any, wanted: str) -> str:
    kinds = _kinds(kind)
    if bool in kinds:
        return f"{quoted(value)} is text; write true or false, without quotes"
    if kinds & {float, int} and isinstance(parsed_or_text(value), int | float):
        return f"{quoted(value)} is text; write the number without quotes"
    close = did_you_mean(value, _names(kind)).partition("; known")[0]  # the known ones are listed already
    return f"{quoted(value)} is not {wanted}{close}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "the list " + quoted(json.dumps(value, ensure_ascii=False))[1:-1]
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def expected(kind: Any, limits: tuple[Any, ...] = ()) -> str:
    """What a type stands for, in words, with its range: "a number > 0 and ≤ 1"."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *extra = get_args(kind)
        return expected(inner, (*limits, *extra))
    if origin in (Union, UnionType):
        parts = [expected(part, limits) for part in get_args(kind) if part is not NoneType]
        return " or ".join([*parts, "null"] if NoneType in get_args(kind) else parts)
    if origin is tuple:
        return f"a list (each {expected(get_args(kind)[0])})"
    if origin is dict:
        return "a mapping" if get_args(kind)[1] is Any else f"a mapping (each {expected(get_args(kind)[1])})"
    if names := _names(kind):
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    section = section_type(kind)
    if section is not None:
        return f"a mapping with {', '.join(section.model_fields)}"
    word = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}.get(kind, "a value")
    return f"{word}{_range(limits)}"


def _names(kind: Any) -> tuple[str, ...]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(member.value) for member in kind)
    if get_origin(kind) is Literal:
        return tuple(str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(kind))
    return ()


def _kinds(kind: Any) -> frozenset[Any]:
    """The plain types a kind is made of."""
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*(_kinds(part) for part in get_args(kind)))
    return _kinds(get_args(kind)[0]) if get_origin(kind) is Annotated else frozenset({kind})


def _range(limits: tuple[Any, ...]) -> str:
    flat = [rule for limit in limits for rule in (limit.metadata if isinstance(limit, FieldInfo) else (limit,))]
    low = [f"> {_plain(rule.gt)}" for rule in flat if isinstance(rule, Gt)]
    low += [f"≥ {_plain(rule.ge)}" for rule in flat if isinstance(rule, Ge)]
    high = [f"< {_plain(rule.lt)}" for rule in flat if isinstance(rule, Lt)]
    high += [f"≤ {_plain(rule.le)}" for rule in flat if isinstance(rule, Le)]
    text = " and ".join(low + high)
    return f" {text}" if text else ""


def _plain(number: Any) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def describe(dotted: str) -> str:
    """What may stand at a key of the schema, in words."""
    return describe_place(schema_fields()[dotted])


def describe_place(place: SchemaField) -> str:
    return expected(place.info.annotation, tuple(place.info.metadata))
