"""Turns one line of JSONL into one canonical row, or says exactly what is wrong with it.

Three forms are read: `messages`; `prompt` and `completion`; `prompt`, `chosen` and `rejected`. Each of prompt,
completion, chosen and rejected is a text or a list of messages.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from typing import Any, NamedTuple

import orjson

from tunesmith.data.conversations import BadRow, MessageChecker, named
from tunesmith.data.syntax import explain
from tunesmith.domain.dataset import Reason
from tunesmith.errors import show

_FORMS = "messages, or prompt and completion, or prompt, chosen and rejected"
_KNOWN = ("messages", "prompt", "completion", "chosen", "rejected")
_READ_KEYS = frozenset({*_KNOWN, "role", "content", "weight"})
_QUOTED_KEYS = {key: f'"{key}"'.encode() for key in _READ_KEYS}
_OTHER_NAMES = {  # what other tools call our fields
    "conversations": "messages",
    "conversation": "messages",
    "instruction": "prompt",
    "question": "prompt",
    "input": "prompt",
    "output": "completion",
    "response": "completion",
    "answer": "completion",
}


class Row(NamedTuple):
    """A valid row: the letters of its roles, its texts in the same order, and how many belong to prompt and answer.

    What remains behind prompt and chosen is the rejected answer; a supervised row has none.
    """

    codes: str
    contents: list[str]
    num_prompt: int
    num_chosen: int

    @property
    def is_preference(self) -> bool:
        return len(self.codes) > self.num_prompt + self.num_chosen


class RowParser:
    """Parses rows; remembers only how often it saw fields that nobody reads."""

    def __init__(self) -> None:
        self._checker = MessageChecker()

    @property
    def ignored_fields(self) -> Counter[str]:
        return self._checker.ignored

    def parse(self, line: bytes, *, ends_open: bool = False) -> Row | None:
        """The row of a line, None if it is blank; raises BadRow."""
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.isspace() or not line:
                return None
            raise explain(line, error, ends_open=ends_open) from None
        if type(fields) is not dict:
            problem = f"the line is {named(fields)}, not an object"
            raise BadRow(Reason.NOT_OBJECT, "", problem, "write one JSON object per line, without an array around them")
        checker = self._checker
        checker.num_weights = 0
        if "messages" in fields and "completion" not in fields and "chosen" not in fields and "rejected" not in fields:
            form: tuple[str, ...] = ("messages",)
            row, num_messages = self._conversation(fields["messages"])
        else:
            form = _form_of(fields)
            row, num_messages = self._pair(fields, form)
        if len(fields) > len(form):
            for name in fields.keys() - set(form):
                checker.ignore(name)
        if (
            line.count(b'"role"') != num_messages
            or line.count(b'"content"') != num_messages
            or any(line.count(_QUOTED_KEYS[key]) != 1 for key in form)
            or (checker.num_weights and line.count(b'"weight"') != checker.num_weights)
            or b"\\u00" in line
        ):
            _look_closer(line, row.contents)
        return row

    def _conversation(self, messages: Any) -> tuple[Row, int]:
        contents: list[str] = []
        codes = self._checker.check(messages, "messages", "", contents)
        if codes[-1] != "a":
            raise _no_answer("messages", codes)
        num_prompt = codes.find("a")
        return Row(codes, contents, num_prompt, len(codes) - num_prompt), len(codes)

    def _pair(self, fields: dict[str, Any], form: tuple[str, ...]) -> tuple[Row, int]:
        contents: list[str] = []
        prompt = self._part(fields["prompt"], "prompt", "", contents)
        if prompt[-1] not in "ut":
            fix = "end the prompt with what the user asks; the answer belongs into the other field"
            raise BadRow(Reason.ROLE_ORDER, "prompt", "does not end with a user or tool message", fix)
        codes = prompt
        for name in form[1:]:
            answer = self._part(fields[name], name, prompt, contents)
            if answer[-1] != "a":
                raise _no_answer(name, answer)
            codes += answer[len(prompt) :]
            if name in {"completion", "chosen"}:
                num_chosen = len(codes) - len(prompt)
        row = Row(codes, contents, len(prompt), num_chosen)
        middle = len(prompt) + num_chosen
        if row.is_preference and (codes[len(prompt) : middle], contents[len(prompt) : middle]) == (
            codes[middle:],
            contents[middle:],
        ):
            fix = "give two different answers, or use the prompt and completion form"
            raise BadRow(Reason.SAME_ANSWERS, "rejected", "is the same as chosen", fix)
        return row, len(codes) - sum(type(fields[name]) is str for name in form)

    def _part(self, value: Any, field: str, codes: str, contents: list[str]) -> str:
        """A text, or a list of messages, that continues a conversation."""
        if type(value) is not str:
            if type(value) is not list:
                problem = f"is {named(value)}, neither a string nor a list"
                raise BadRow(Reason.WRONG_TYPE, field, problem, "write a string or a list of messages")
            return self._checker.check(value, field, codes, contents, trained=field != "prompt")
        if not value or value.isspace():
            problem = "is empty or only white space"
            raise BadRow(Reason.EMPTY_CONTENT, field, problem, "write something, or remove the line")
        contents.append(value)
        return codes + ("u" if field == "prompt" else "a")


def _form_of(fields: dict[str, Any]) -> tuple[str, ...]:
    preference = "chosen" in fields or "rejected" in fields
    if ("messages" in fields) + ("completion" in fields) + preference > 1:
        problem = f"holds {', '.join(name for name in _KNOWN if name in fields)} together"
        raise BadRow(Reason.AMBIGUOUS_FORM, "", problem, f"keep one form: {_FORMS}")
    form = ("prompt", "chosen", "rejected") if preference else ("prompt", "completion")
    missing = [name for name in form if name not in fields]
    if not missing:
        return form
    wanted = missing if len(missing) < len(form) else _KNOWN
    for name in fields:
        if name in _KNOWN:
            continue
        close = difflib.get_close_matches(name[:60], wanted, n=1, cutoff=0.75)
        meant = close[0] if close else _OTHER_NAMES.get(name.lower(), "")
        if meant in wanted:
            raise BadRow(Reason.MISSING_FIELD, meant, "is missing", f"rename {show(name, 30)} to '{meant}'")
    if len(missing) == len(form):
        raise BadRow(Reason.MISSING_FIELD, "", "the line has no field that tunesmith reads", f"use {_FORMS}")
    raise BadRow(
        Reason.MISSING_FIELD, missing[0], "is missing", f"add '{missing[0]}'; {' and '.join(form)} go together"
    )


def _no_answer(field: str, codes: str) -> BadRow:
    if codes[-1] == "c":
        fix = "give the last answer weight 1, or remove the line"
        return BadRow(Reason.NO_ANSWER, field, "the last answer has weight 0, so there is nothing to learn", fix)
    fix = "end with an assistant message, or remove the line"
    return BadRow(Reason.NO_ANSWER, field, "does not end with an assistant message", fix)


def _look_closer(line: bytes, contents: list[str]) -> None:
    """The slow look at a line that a count or an escape made suspicious: duplicate keys, NUL characters."""
    try:
        json.loads(line, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise BadRow(Reason.NOT_JSON, "", "is nested too deeply", "flatten it, or remove the line") from None
    if any("\0" in content for content in contents):
        raise BadRow(Reason.NUL, "", "a text holds the NUL character", "remove \\u0000 from the line")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs if key in _READ_KEYS]
    if len(set(keys)) != len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise BadRow(Reason.DUPLICATE_KEY, twice, f"'{twice}' appears twice in one object", "keep one of the two")
