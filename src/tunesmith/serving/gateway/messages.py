"""The conversation of a chat request: roles, texts, and nothing that the model would not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.core.strict_json import storable
from tunesmith.datasets.messages import ROLES, MessageFault, content_fault, role_fault
from tunesmith.datasets.tool_calls import CALL_FIELDS, CALLED_FIELDS, Fault, function_of, refuse_unknown
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter

_ROLES = {"developer": "system", **{role: role for role in ROLES}}
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call")
_MAX_MESSAGES = 2048
_MAX_CALLS = 128
_MAX_NAME = 512


def check_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Messages with plain texts as their content; raises with the place of what is wrong."""
    if not isinstance(messages, list) or not messages:
        raise invalid_parameter("messages", 'must be a list with at least one {"role": "user", "content": "…"}')
    if len(messages) > _MAX_MESSAGES:
        raise invalid_parameter("messages", f"has {len(messages)} entries; {_MAX_MESSAGES} are the most")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid_parameter(place, 'must be an object; write {"role": "user", "content": "…"}')
    said = {name: value for name, value in message.items() if value is not None}
    refuse_unknown(said, place, _refused, _FIELDS)
    role = said.get("role")
    if role_fault(said, _ROLES) is not None:
        raise invalid_parameter(f"{place}.role", f"is {quoted(str(role))}{did_you_mean(str(role), _ROLES)}")
    for name in ("audio", "function_call"):
        if name in said:
            raise ApiError(400, f"{place}.{name} is not supported", code="unsupported_parameter", param=place)
    names = ("name", "tool_call_id")
    checked: dict[str, Any] = {name: _name(said[name], f"{place}.{name}") for name in names if said.get(name, "") != ""}
    if calls := _calls(said.get("tool_calls", []), f"{place}.tool_calls"):
        checked["tool_calls"] = calls
    if isinstance(said.get("content"), list) and said["content"]:
        said["content"] = _joined(said["content"], f"{place}.content")
    match content_fault(said):
        case MessageFault.NO_CONTENT:
            raise invalid_parameter(f"{place}.content", "is missing")
        case MessageFault.CONTENT_NOT_TEXT:
            raise invalid_parameter(f"{place}.content", "must be a text or a list of texts")
    text = _plain(said.get("content", ""), f"{place}.content")
    return {"role": _ROLES[str(role)], "content": text, **checked}


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Calls of functions, as an answer tells them: their arguments are a text."""
    if not isinstance(calls, list) or len(calls) > _MAX_CALLS:
        raise invalid_parameter(place, f"is no list of at most {_MAX_CALLS} calls")
    return [_call(call, f"{place}[{number}]") for number, call in enumerate(calls)]


def _call(call: Any, place: str) -> dict[str, Any]:
    if isinstance(call, dict):  # first: a misspelt `function` is answered with the nearest name
        refuse_unknown(call, place, _refused, CALL_FIELDS)
    function = function_of(call, place, _refused)
    refuse_unknown(function, f"{place}.function", _refused, CALLED_FIELDS)
    return {
        "id": _name(call.get("id"), f"{place}.id"),
        "type": "function",
        "function": {
            "name": _name(function.get("name"), f"{place}.function.name"),
            "arguments": _plain(function.get("arguments"), f"{place}.function.arguments"),
        },
    }


def _refused(fault: Fault, place: str, value: Any, fields: Sequence[str]) -> ApiError:
    match fault:
        case Fault.UNKNOWN_FIELD:
            return invalid_parameter(place, f"is unknown{did_you_mean(value, fields)}", "unknown_parameter")
        case Fault.OTHER_TYPE:
            return invalid_parameter(place, "is not function; only functions are called here")
        case Fault.NOT_OBJECT | Fault.NO_FUNCTION:
            return invalid_parameter(place, f"is no object with {', '.join(sorted(fields))}")


def _name(value: Any, place: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise invalid_parameter(place, f"is no text of at most {_MAX_NAME} characters")
    return _plain(value, place)


def _joined(parts: list[Any], place: str) -> str:
    """The text of parts that are all texts."""
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            problem = f"is of type {quoted(str(kind))}; only text is read here"
            raise invalid_parameter(f"{place}[{number}]", problem, "unsupported_content")
        texts.append(part[kind])
    return "".join(texts)


def _plain(text: Any, place: str) -> str:
    if not isinstance(text, str):
        raise invalid_parameter(place, "is no text")
    if storable(text) != text:
        raise invalid_parameter(place, "holds a character that no text should (NUL, or half of a pair); remove it")
    return text
