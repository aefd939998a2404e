"""Checks chat messages: what one message must have, who may speak after whom, and that everybody says something.

`role_fault` and `content_fault` are the rules of one message, for every edge: files and captures (`MessageChecker`) and
the gateway, each with errors of its own. A list that is learnt has stricter rules than one that is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from tunesmith.core.errors import quoted
from tunesmith.core.visible_text import says_nothing
from tunesmith.datasets.example import BadRow, Reason, named
from tunesmith.datasets.tool_calls import packed_calls, packed_result

_AFTER: dict[str, dict[str, str]] = {  # who may speak next, with the letter it gets, after whom ("" begins)
    "": {"system": "s", "user": "u"},
    "s": {"user": "u"},
    "u": {"assistant": "a"},
    "a": {"user": "u", "tool": "t"},
    "c": {"user": "u", "tool": "t"},
    "t": {"tool": "t", "assistant": "a"},
    "A": {"tool": "t"},
    "C": {"tool": "t"},
    "r": {"tool": "t", "assistant": "a"},
}
_SPEAKER = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool", "r": "tool"}
_SPEAKER |= {"A": "an assistant message with tool calls", "C": "an assistant message with tool calls"}
ROLES = ("system", "user", "assistant", "tool")
ANSWER_CODES, CONTEXT_ANSWER_CODES = "aAcC", "cC"
"""Letters of a shape (`example.ROLE_OF_CODE`): all answers, and those that only give context to a later one."""
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}
_OTHER_ROLES |= {"developer": "system", "function": "tool", "ipython": "tool"}
_OTHER_KEYS = {"from": "role", "value": "content", "text": "content"}
_CHANGES_MEANING = ("function_call", "audio", "images")  # leaving these out would teach something else
_IN_CONTENT = "write it into the message's content as the model should write it, or remove the line"
_MAX_IGNORED_NAMES = 50


class MessageFault(Enum):
    """What is wrong with one message, whatever stands before it."""

    NOT_OBJECT = "not_object"
    NO_ROLE = "no_role"
    ROLE_NOT_TEXT = "role_not_text"
    UNKNOWN_ROLE = "unknown_role"
    NO_CONTENT = "no_content"
    CONTENT_NOT_TEXT = "content_not_text"


def role_fault(message: Any, roles: Collection[str] = ROLES) -> MessageFault | None:
    """What is wrong with the role of a message; None where it is one of `roles`."""
    if type(message) is not dict:
        return MessageFault.NOT_OBJECT
    if "role" not in message:
        return MessageFault.NO_ROLE
    if type(message["role"]) is not str:
        return MessageFault.ROLE_NOT_TEXT
    return None if message["role"] in roles else MessageFault.UNKNOWN_ROLE


def content_fault(message: Mapping[str, Any]) -> MessageFault | None:
    """What is wrong with the content of a message whose role is known; only an answer with calls may do without it."""
    if "content" not in message:
        return None if makes_calls(message) else MessageFault.NO_CONTENT
    return None if type(message["content"]) is str else MessageFault.CONTENT_NOT_TEXT


def makes_calls(message: Mapping[str, Any]) -> bool:
    """Whether it is an answer that calls functions."""
    return bool(message.get("tool_calls")) and message.get("role") == "assistant"


class MessageChecker:
    """Checks message lists and counts the fields that nobody reads."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()
        self.num_weights = 0  # in the present row, for the search for duplicate keys
        self.has_tools = False  # the present row
        self._open_ids: list[str] = []  # of calls in the present list that have no result yet

    def check(self, messages: Any, field: str, shape: str, contents: list[str], *, trained: bool = True) -> str:
        """Append the texts of a message list to `contents`; returns `shape` with the letters of its roles appended.

        The list continues the conversation `shape`. Answers in it count for the loss if `trained`.
        """
        if type(messages) is not list:
            raise BadRow(Reason.WRONG_TYPE, field, f"is {named(messages)}, not a list", "write a list of messages")
        if not messages:
            raise BadRow(Reason.EMPTY_LIST, field, "has no messages", "add messages, or remove the line")
        last = shape[-1:]
        start = len(contents)
        self._open_ids = []
        for message in messages:
            try:
                code = _AFTER[last][message["role"]]
                content = message["content"]
            except (KeyError, TypeError):
                code = _code_of_bare_call(message, last, f"{field}[{len(contents) - start}]")
                content = ""
            if (type(content) is not str or says_nothing(content)) and not makes_calls(message):
                raise _bad_message(message, last, f"{field}[{len(contents) - start}]")
            if code == "a" and not trained:
                code = "c"
            if len(message) > 2 or not content:
                code, content = self._extra(message, f"{field}[{len(contents) - start}]", code)
            last = code
            shape += code
            contents.append(content)
        return shape

    def _extra(self, message: dict[str, Any], field: str, code: str) -> tuple[str, str]:
        """Letter and stored text of a message that has more than role and content."""
        content: str | None = None
        for key, value in message.items():
            if key in {"role", "content"}:
                continue
            if key == "weight":
                self.num_weights += 1
                code = _weighted(value, f"{field}.weight", code)
            elif key in _CHANGES_MEANING and value:
                raise BadRow(Reason.UNSUPPORTED_FIELD, f"{field}.{key}", "cannot be trained on", _IN_CONTENT)
            elif key == "tool_calls" and value:
                if code not in "ac":
                    fix = "move the calls to the assistant message that makes them"
                    raise BadRow(Reason.BAD_TOOLS, f"{field}.tool_calls", "only the assistant calls functions", fix)
                content, self._open_ids = packed_calls(message, field)
            elif code != "t" or key not in {"tool_call_id", "name"}:
                count_ignored(self.ignored, f"messages.{key}")
        if content is not None:
            code = code.upper()
        elif code == "t" and (content := packed_result(message, field, self._open_ids)) is not None:
            code = "r"
        self.has_tools = self.has_tools or content is not None
        return code, message["content"] if content is None else content


def count_ignored(counts: Counter[str], name: str, num: int = 1) -> None:
    """Count a field that nobody reads; the number of names is bounded, whatever a file holds."""
    short = name[:60]
    counts[short if short in counts or len(counts) < _MAX_IGNORED_NAMES else "(others)"] += num


def _code_of_bare_call(message: Any, last: str, field: str) -> str:
    """The letter of an answer that has calls and no content at all; everything else without a content is bad."""
    if type(message) is dict and makes_calls(message):
        code = _AFTER[last].get("assistant")
        if code is not None:
            return code
    raise _bad_message(message, last, field)


def _weighted(value: Any, field: str, code: str) -> str:
    if type(value) is bool or value not in (0, 1):
        raise BadRow(Reason.BAD_WEIGHT, field, "is neither 0 nor 1", "use 1 to train on an answer, 0 to skip it")
    if code not in "ac" and value == 1:
        raise BadRow(Reason.BAD_WEIGHT, field, "only answers can be trained on", "remove weight from this message")
    if code == "c" and value == 1:
        raise BadRow(
            Reason.BAD_WEIGHT, field, "a prompt is never trained on", "remove weight, or use the messages form"
        )
    return "c" if code == "a" and value == 0 else code


def _bad_message(message: Any, last: str, field: str) -> BadRow:
    """What is wrong with a message that follows one with the letter `last`."""
    fault = role_fault(message)
    if fault is MessageFault.NOT_OBJECT:
        problem = f"is {named(message)}, not a message"
        return BadRow(Reason.WRONG_TYPE, field, problem, 'write {"role": …, "content": …}')
    if fault is not None:
        return _bad_role(message, fault, f"{field}.role")
    return _bad_order(message["role"], last, f"{field}.role") or _bad_content(message, f"{field}.content")


def _bad_role(message: dict[str, Any], fault: MessageFault, field: str) -> BadRow:
    if fault is MessageFault.NO_ROLE:
        return BadRow(Reason.MISSING_FIELD, field, "is missing", _rename(message, "role"))
    role, every = message["role"], f"use one of {', '.join(ROLES)}"
    if fault is MessageFault.ROLE_NOT_TEXT:
        return BadRow(Reason.WRONG_TYPE, field, f"is {named(role)}, not a string", every)
    known = _OTHER_ROLES.get(role.strip().lower(), role.strip().lower())
    fix = f"use '{known}'" if known in ROLES else every
    return BadRow(Reason.BAD_ROLE, field, f"{quoted(role, 30)} is not a role", fix)


def _bad_order(role: str, last: str, field: str) -> BadRow | None:
    if role in _AFTER[last]:
        return None
    where = f"follows {_SPEAKER[last]}" if last else "begins the conversation"
    expected = " or ".join(_AFTER[last])
    return BadRow(Reason.ROLE_ORDER, field, f"{role} {where}", f"expected {expected} here; merge or reorder messages")


def _bad_content(message: dict[str, Any], field: str) -> BadRow:
    fault = content_fault(message)
    if fault is MessageFault.NO_CONTENT:
        return BadRow(Reason.MISSING_FIELD, field, "is missing", _rename(message, "content"))
    content = message["content"]
    if any(message.get(key) for key in _CHANGES_MEANING):
        return BadRow(Reason.UNSUPPORTED_FIELD, field, "has no text beside a call or media", _IN_CONTENT)
    if fault is MessageFault.CONTENT_NOT_TEXT:
        fix = "join its text parts into one string" if type(content) is list else "write a string"
        return BadRow(Reason.WRONG_TYPE, field, f"is {named(content)}, not a string", fix)
    return empty_text(content, field)


def empty_text(text: str, field: str) -> BadRow:
    """What is wrong with a text of which nothing can be seen."""
    blank = not text or text.isspace()
    problem = "is empty or only white space" if blank else "holds only characters that cannot be seen"
    return BadRow(Reason.EMPTY_CONTENT, field, problem, "write something, or remove the line")


def _rename(message: dict[str, Any], wanted: str) -> str:
    other = [key for key, known in _OTHER_KEYS.items() if known == wanted and key in message]
    return f"rename '{other[0]}' to '{wanted}'" if other else f"add '{wanted}' to the message"
