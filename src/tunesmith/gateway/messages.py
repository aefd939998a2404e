"""The conversation of a chat request: roles, texts, and nothing that the model would not see."""

from __future__ import annotations

from typing import Any

from tunesmith.errors import nearest, show
from tunesmith.gateway.refusals import ApiError, wrong

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call"}
_MOST_MESSAGES = 2048


def check_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Messages with plain texts as their content; raises with the place of what is wrong."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", 'must be a list with at least one {"role": "user", "content": "…"}')
    if len(messages) > _MOST_MESSAGES:
        raise wrong("messages", f"has {len(messages)} entries; {_MOST_MESSAGES} are the most")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong(place, 'is no object; write {"role": "user", "content": "…"}')
    said = {name: value for name, value in message.items() if value is not None}
    for name in said:
        if name not in _FIELDS:
            raise wrong(f"{place}.{name[:60]}", f"is unknown{nearest(name, _FIELDS)}", "unknown_parameter")
    role = said.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{place}.role", f"is {show(str(role))}{nearest(str(role), _ROLES)}")
    for name in ("audio", "function_call"):
        if name in said:
            raise ApiError(400, f"{place}.{name} is not supported", code="unsupported_parameter", param=place)
    checked = {name: said[name] for name in ("name", "tool_call_id", "tool_calls") if said.get(name)}
    has_calls = role == "assistant" and isinstance(said.get("tool_calls"), list) and said["tool_calls"]
    if "content" not in said and not has_calls:
        raise wrong(f"{place}.content", "is missing")
    text = _text(said["content"], f"{place}.content") if "content" in said else ""
    return {"role": _ROLES[role], "content": text, **checked}


def _text(content: Any, place: str) -> str:
    """A text, or parts that are all texts."""
    if isinstance(content, list) and content:
        texts = []
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
                problem = f"is of type {show(str(kind))}; only text is read here"
                raise wrong(f"{place}[{number}]", problem, "unsupported_content")
            texts.append(part[kind])
        content = "".join(texts)
    if not isinstance(content, str):
        raise wrong(place, "is no text, and no list of texts")
    if "\0" in content or not _is_writable(content):
        raise wrong(place, "holds a character that no text should (NUL, or half of a pair); remove it")
    return content


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
