"""Checks the calls of functions in a conversation, the results of these calls, and the definitions of the functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import orjson

from tunesmith.core import strict_json
from tunesmith.datasets.example import CALLS, RESULT, BadRow, Message, Reason, encode_message, named, to_json

CALL_FIELDS = ("id", "type", "function")
CALLED_FIELDS = ("name", "arguments")
_DEFINITION_FIELDS = ("name", "description", "parameters", "strict", "return")
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # in JSON: the character, not the text of its escape
_MAX_DEPTH = 64  # lists and objects in each other; the readers and templates after us have limits of their own
_FUNCTION = '{"type": "function", "function": {"name": …}}'


class Fault(Enum):
    """What is wrong with the build of a call or of a definition."""

    NOT_OBJECT = "not_object"
    UNKNOWN_FIELD = "unknown_field"
    NO_FUNCTION = "no_function"
    OTHER_TYPE = "other_type"


Refuse = Callable[[Fault, str, Any, Sequence[str]], Exception]
"""Words a fault and makes the exception: from the place, the value or the name of the field, and the known fields."""


def function_of(holder: Any, place: str, refuse: Refuse, fields: Sequence[str] = CALL_FIELDS) -> dict[str, Any]:
    """What a call or a definition calls or defines, its own fields unchecked; raises what `refuse` makes of a fault."""
    if type(holder) is not dict:
        raise refuse(Fault.NOT_OBJECT, place, holder, fields)
    if holder.get("type", "function") != "function":
        raise refuse(Fault.OTHER_TYPE, f"{place}.type", holder["type"], ("function",))
    if "function" not in holder:
        raise refuse(Fault.NO_FUNCTION, f"{place}.function", None, CALLED_FIELDS)
    refuse_unknown(holder, place, refuse, fields)
    function = holder["function"]
    if type(function) is not dict:
        raise refuse(Fault.NOT_OBJECT, f"{place}.function", function, CALLED_FIELDS)
    return function


def refuse_unknown(holder: dict[str, Any], place: str, refuse: Refuse, fields: Sequence[str]) -> None:
    """Raises what `refuse` makes of a field that is none of these."""
    for name in holder:
        if name not in fields:
            raise refuse(Fault.UNKNOWN_FIELD, f"{place}.{name[:60]}", name, fields)


def _bad_row(fault: Fault, place: str, value: Any, fields: Sequence[str]) -> BadRow:
    match fault:
        case Fault.NOT_OBJECT:
            return _wrong(value, place, "an object", f"write {_FUNCTION}")
        case Fault.UNKNOWN_FIELD:
            fix = f"remove it; known are {', '.join(fields)}"
            return BadRow(Reason.UNSUPPORTED_FIELD, place, "is not read here", fix)
        case Fault.NO_FUNCTION:
            return BadRow(Reason.MISSING_FIELD, place, "is missing", f"write {_FUNCTION}")
        case Fault.OTHER_TYPE:
            return BadRow(Reason.BAD_TOOLS, place, "is not 'function'", "only functions can be called")


def packed_calls(message: dict[str, Any], field: str) -> tuple[str, list[str]]:
    """An answer with calls as it is stored, and the ids of its calls. Its content may be missing."""
    content = message.get("content")
    if content is not None and type(content) is not str:
        raise BadRow(Reason.WRONG_TYPE, f"{field}.content", f"is {named(content)}, not a string", "write a string")
    given = message["tool_calls"]
    if type(given) is not list:
        raise _wrong(given, f"{field}.tool_calls", "a list", "write a list of calls")
    calls = [_call(call, f"{field}.tool_calls[{place}]") for place, call in enumerate(given)]
    ids = [call["id"] for call in calls if "id" in call]
    if len(set(ids)) != len(ids):
        fix = "give every call an id of its own"
        raise BadRow(Reason.BAD_TOOLS, f"{field}.tool_calls", "two calls have the same id", fix)
    return _packed(Message(role="assistant", content=content or "", weight=0, tool_calls=calls), CALLS, field), ids


def packed_result(message: dict[str, Any], field: str, open_ids: list[str]) -> str | None:
    """A tool's message as it is stored, if it says which call or which function it answers. Takes it off the list."""
    stored = Message(role="tool", content=message["content"], weight=0)
    for key in ("tool_call_id", "name"):
        value = message.get(key)
        if value is None:
            continue
        if type(value) is not str:
            raise _wrong(value, f"{field}.{key}", "a string", "write a string")
        stored[key] = value
    if len(stored) == 3:
        return None
    call_id = stored.get("tool_call_id")
    if call_id is not None:
        if call_id not in open_ids:
            fix = "answer each call of the assistant message before it once, by its id"
            raise BadRow(Reason.BAD_TOOLS, f"{field}.tool_call_id", "no call that waits for an answer has this id", fix)
        open_ids.remove(call_id)
    return _packed(stored, RESULT, field)


def packed_definitions(tools: Any) -> str:
    """The definitions of functions as they are stored."""
    if type(tools) is not list:
        raise _wrong(tools, "tools", "a list", f"write a list of {_FUNCTION}")
    names = [_definition(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if len(set(names)) != len(names):
        raise BadRow(Reason.BAD_TOOLS, "tools", "two functions have the same name", "define each function once")
    return str(_checked(to_json, tools, "tools"))


def key_twice(key: str) -> BadRow:
    """The error for any key of a row with calls: arguments are content, so no key may silently win over another."""
    return BadRow(Reason.DUPLICATE_KEY, "", "a key appears twice in one object", "keep one of the two")


def _call(call: Any, field: str) -> dict[str, Any]:
    """A call in the form that templates expect: arguments as an object."""
    function = _named_function(call, field)
    stored: dict[str, Any] = {}
    if call.get("id") is not None:
        if type(call["id"]) is not str or not call["id"]:
            raise BadRow(Reason.BAD_TOOLS, f"{field}.id", "is not an id", "write a text that is not empty, or leave it")
        stored["id"] = call["id"]
    refuse_unknown(function, f"{field}.function", _bad_row, CALLED_FIELDS)
    if "arguments" not in function:
        fix = "add the arguments as an object; {} if there are none"
        raise BadRow(Reason.MISSING_FIELD, f"{field}.function.arguments", "is missing", fix)
    arguments = _arguments(function["arguments"], f"{field}.function.arguments")
    return {**stored, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(given: Any, field: str) -> dict[str, Any]:
    value = given
    if type(given) is str:
        try:
            orjson.loads(given)  # the stricter of the two; the other one keeps long numbers as they are
            value = strict_json.loads(given, key_twice)
        except (ValueError, RecursionError):
            fix = "write the arguments as an object, or as a text that is JSON"
            raise BadRow(Reason.BAD_TOOLS, field, "is a text that is not JSON", fix) from None
        except BadRow as bad:
            raise BadRow(bad.reason, field, bad.problem, bad.fix) from None
    if type(value) is not dict:
        raise BadRow(Reason.BAD_TOOLS, field, f"is {named(value)}, not an object", "name each argument: {…: …}")
    return value


def _definition(tool: Any, field: str) -> str:
    """The name of a defined function."""
    function = _named_function(tool, field, CALL_FIELDS[1:])
    refuse_unknown(function, f"{field}.function", _bad_row, _DEFINITION_FIELDS)
    for key, kind in (("description", str), ("parameters", dict)):
        value = function.get(key)
        if value is not None and type(value) is not kind:
            raise _wrong(value, f"{field}.function.{key}", "a string" if kind is str else "an object", "correct it")
    return str(function["name"])


def _named_function(holder: Any, field: str, fields: Sequence[str] = CALL_FIELDS) -> dict[str, Any]:
    function = function_of(holder, field, _bad_row, fields)
    name = function.get("name")
    if type(name) is not str or not name.strip():
        reason = Reason.MISSING_FIELD if name is None else Reason.BAD_TOOLS
        raise BadRow(reason, f"{field}.function.name", "is no name", "write the function's name")
    return function


def _packed(message: Message, role: str, field: str) -> str:
    stored: Message = _checked(encode_message, message, field)
    assert stored["role"] == role
    return stored["content"]


def _checked(write: Any, value: Any, field: str) -> Any:
    """What `write` makes of it, unless it is too deep, or holds what no text may hold."""
    try:
        written = write(value)
        text = written if type(written) is str else written["content"]
        is_deep = text.count("[") + text.count("{") > _MAX_DEPTH and _is_deeper(value, _MAX_DEPTH)
    except RecursionError:
        is_deep = True
    if is_deep:
        problem = f"is nested more than {_MAX_DEPTH} times"
        raise BadRow(Reason.BAD_TOOLS, field, problem, "flatten it, or remove the line")
    if "\\u0000" in text and _NUL.search(text):
        raise BadRow(Reason.NUL, field, "a text holds the NUL character", "remove \\u0000 from the line")
    return written


def _is_deeper(value: Any, limit: int) -> bool:
    if type(value) is not dict and type(value) is not list:
        return False
    inner = value.values() if type(value) is dict else value
    return limit == 0 or any(_is_deeper(part, limit - 1) for part in inner)


def _wrong(value: Any, field: str, wanted: str, fix: str) -> BadRow:
    return BadRow(Reason.WRONG_TYPE, field, f"is {named(value)}, not {wanted}", fix)
