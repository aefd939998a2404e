"""Turns one object into one canonical row, or says exactly what is wrong with it.

Four forms are read: `messages`; `prompt` and `completion`; these two with a `label`; `prompt`, `chosen` and `rejected`.
Each of prompt, completion, chosen and rejected is a text or a list of messages. Beside each form, `tools` may define
the functions that the model can call. `importing` reads what other tools write, by way of these.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from itertools import islice
from typing import Any, NoReturn

import orjson
from orjson import JSONDecodeError

from tunesmith.core import strict_json
from tunesmith.core.errors import quoted
from tunesmith.core.visible_text import looks, says_nothing
from tunesmith.datasets.example import BadRow, Reason, named
from tunesmith.datasets.formats.formats import FIELDS
from tunesmith.datasets.messages import MessageChecker, count_ignored, empty_text
from tunesmith.datasets.tool_calls import key_twice, packed_definitions

_FORMS = "messages, or prompt and completion (and label), or prompt, chosen and rejected"
_KNOWN = ("messages", "prompt", "completion", "chosen", "rejected")
_READ_KEYS = frozenset({*_KNOWN, "label", "tools", "role", "content", "weight", "tool_calls", "tool_call_id"})
_FOREIGN_KEYS = _READ_KEYS | FIELDS | {"from", "value"}
_QUOTED_KEYS = {key: f'"{key}"'.encode() for key in _READ_KEYS}
_ESCAPED_KEY = re.compile(rb"\\u00[67]")  # a letter of a key may hide behind an escape
_MESSAGES_FORM: tuple[str, ...] = ("messages",)
_PLAIN_FORM: tuple[str, ...] = ("prompt", "completion")
_LABELLED_FORM: tuple[str, ...] = ("prompt", "completion", "label")
_PAIR_FORM: tuple[str, ...] = ("prompt", "chosen", "rejected")
_MAX_COMPARED = 50  # names that a fix is looked for among: comparing is slow, and a line may have a million
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


Row = tuple[str, list[str]]
"""A valid row: the shape of the example (see `example`) and its texts in order. A bare tuple, for speed."""


class RowParser:
    """Parses rows; remembers only how often it saw fields that nobody reads."""

    def __init__(self, *, may_lack_answer: bool = False) -> None:
        self._checker = MessageChecker()
        self._may_lack_answer = may_lack_answer  # what follows the last answer of a conversation is cut off

    @property
    def ignored_fields(self) -> Counter[str]:
        return self._checker.ignored

    def load(self, line: bytes, *, is_unterminated: bool = False) -> dict[str, Any] | None:
        """The object of a line, None if it is blank; raises BadRow. `is_unterminated`: no newline follows the line."""
        try:
            fields: Any = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.isspace() or not line:
                return None
            raise explain(line, error, is_unterminated=is_unterminated) from None
        if type(fields) is not dict:
            problem = f"the line is {named(fields)}, not an object"
            raise BadRow(Reason.NOT_OBJECT, "", problem, "write one JSON object per line, without an array around them")
        return fields

    def own(self, line: bytes, fields: dict[str, Any]) -> Row:
        """The row of a line that holds these fields, in one of our forms; raises BadRow."""
        self._checker.num_weights = 0
        self._checker.has_tools = False
        try:
            shape, contents, form, num_objects = self._read(fields)
        except BadRow:
            _refuse_duplicates(line)  # the better explanation, if it is one
            raise
        if self._checker.has_tools:
            return self._exact(line)
        # Two quotes for each key and text we know of: then there is nothing else in the line, no key twice either.
        if line.count(b'"') != 2 * (len(form) + 3 * num_objects + len(contents)) and self._may_repeat(
            line, form, num_objects
        ):
            _refuse_duplicates(line)
        if b"\\" in line and b"\\u0000" in line and any("\0" in content for content in contents):
            raise _nul()
        return shape, contents

    def translated(self, fields: dict[str, Any]) -> Row:
        """The row of fields that another form was translated into; raises BadRow."""
        self._checker.num_weights = 0
        self._checker.has_tools = False
        shape, contents, *_ = self._read(fields)
        if any("\0" in content for content in contents):
            raise _nul()
        return shape, contents

    @property
    def has_tools(self) -> bool:
        """Whether the last row had calls or definitions of functions."""
        return self._checker.has_tools

    def _read(self, fields: dict[str, Any]) -> tuple[str, list[str], tuple[str, ...], int]:
        """Shape and texts of a row, the fields they were read from, and how many objects held messages."""
        contents: list[str] = []
        if "messages" in fields and "completion" not in fields and "chosen" not in fields and "rejected" not in fields:
            form = _MESSAGES_FORM
            shape = self._checker.check(fields["messages"], "messages", "", contents)
            num_objects = len(contents)
            if shape[-1] not in "aA":
                end = max(shape.rfind("a"), shape.rfind("A")) + 1
                if not end or not self._may_lack_answer:
                    raise _no_answer("messages", shape)
                shape = shape[:end]
                del contents[end:]
        else:
            form = _form_of(fields)
            shape = self._pair(fields, form, contents)
            num_objects = len(contents) - sum(type(fields[name]) is str for name in form)
        if len(fields) > len(form):
            shape = self._beside(fields, form, shape, contents)
        return shape, contents, form, num_objects

    def _beside(self, fields: dict[str, Any], form: tuple[str, ...], shape: str, contents: list[str]) -> str:
        """The shape with what stands beside the form in the line."""
        for name in fields.keys() - set(form):
            value = fields[name]
            if name == "tools" and value:
                contents.insert(0, packed_definitions(value))
                shape = "d" + shape
                self._checker.has_tools = True
            elif name == "label" and type(value) is bool:
                fix = "write the line as prompt, completion and label, or remove label"
                raise BadRow(Reason.BAD_LABEL, "label", f"does not go with {' and '.join(form)}", fix)
            else:
                count_ignored(self._checker.ignored, name)
        return shape

    def _exact(self, line: bytes) -> Row:
        """The row again, with the numbers in its calls as they are written, and no key twice in any object.

        The quick parser rounds numbers of more than 64 bits and keeps the last of two equal keys.
        """
        counted, self._checker.ignored = self._checker.ignored, Counter()  # the first look has counted already
        try:
            shape, contents, *_ = self._read(exact(line))
        except RecursionError:
            raise _too_deep() from None
        finally:
            self._checker.ignored = counted
        if any("\0" in content for content in contents):
            raise _nul()
        return shape, contents

    def _may_repeat(self, line: bytes, form: tuple[str, ...], num_objects: int) -> bool:
        """Whether a key that we read may be in an object twice: orjson keeps the last one without a word."""
        num_weights = self._checker.num_weights
        return (
            not line.count(b'"role"') == num_objects == line.count(b'"content"')
            or any(line.count(_QUOTED_KEYS[key]) != 1 for key in form)
            or (num_weights > 0 and line.count(b'"weight"') != num_weights)
            or b'"tool_calls"' in line
            or b'"tools"' in line
            or (b"\\u00" in line and _ESCAPED_KEY.search(line) is not None)
        )

    def _pair(self, fields: dict[str, Any], form: tuple[str, ...], contents: list[str]) -> str:
        """The shape of a prompt with one answer, with or without a label, or with a better and a worse one."""
        prompt = self._part(fields["prompt"], "prompt", "", contents)
        if prompt[-1] not in "utr":
            fix = "end the prompt with what the user asks; the answer belongs into the other field"
            raise BadRow(Reason.ROLE_ORDER, "prompt", "does not end with a user or tool message", fix)
        answers = []
        for name in form[1:]:
            if name == "label":
                continue
            whole = self._part(fields[name], name, prompt, contents)
            if whole[-1] not in "aA":
                raise _no_answer(name, whole)
            answer = whole[len(prompt) :]
            if form is not _PLAIN_FORM and "c" in answer.lower():
                fix = "remove weight: an answer is compared, or labelled, as a whole"
                raise BadRow(Reason.BAD_WEIGHT, name, "has an answer of weight 0", fix)
            answers.append(answer)
        if form is _PLAIN_FORM:
            return prompt + answers[0]
        if form is _LABELLED_FORM:
            return prompt + (answers[0] + "|" if _label(fields["label"]) else "|" + answers[0])
        chosen, rejected = answers
        middle = len(prompt) + len(chosen)
        if chosen == rejected and _look_alike(contents[len(prompt) : middle], contents[middle:]):
            fix = "give two different answers, or use the prompt and completion form"
            is_same = contents[len(prompt) : middle] == contents[middle:]
            problem = "is the same as chosen" + ("" if is_same else ", but for white space or what cannot be seen")
            raise BadRow(Reason.SAME_ANSWERS, "rejected", problem, fix)
        return f"{prompt}{chosen}|{rejected}"

    def _part(self, value: Any, field: str, codes: str, contents: list[str]) -> str:
        """A text, or a list of messages, that continues a conversation."""
        if type(value) is not str:
            if type(value) is not list:
                problem = f"is {named(value)}, neither a string nor a list"
                raise BadRow(Reason.WRONG_TYPE, field, problem, "write a string or a list of messages")
            return self._checker.check(value, field, codes, contents, trained=field != "prompt")
        if says_nothing(value):
            raise empty_text(value, field)
        contents.append(value)
        return codes + ("u" if field == "prompt" else "a")


def _look_alike(some: list[str], others: list[str]) -> bool:
    """Whether a reader could not tell these answers from the others."""
    if some == others:
        return True
    return list(map(looks, some)) == list(map(looks, others))


def _form_of(fields: dict[str, Any]) -> tuple[str, ...]:
    preference = "chosen" in fields or "rejected" in fields
    if ("messages" in fields) + ("completion" in fields) + preference > 1:
        problem = f"holds {', '.join(name for name in _KNOWN if name in fields)} together"
        raise BadRow(Reason.AMBIGUOUS_FORM, "", problem, f"keep one form: {_FORMS}")
    form = _PAIR_FORM if preference else _LABELLED_FORM if "label" in fields else _PLAIN_FORM
    missing = [name for name in form if name not in fields]
    if not missing:
        return form
    wanted = missing if len(missing) < len(form) else _KNOWN
    for name in islice((name for name in fields if name not in _KNOWN), _MAX_COMPARED):
        close = difflib.get_close_matches(name[:60], wanted, n=1, cutoff=0.75)
        meant = close[0] if close else _OTHER_NAMES.get(name.lower(), "")
        if meant in wanted:
            raise BadRow(Reason.MISSING_FIELD, meant, "is missing", f"rename {quoted(name, 30)} to '{meant}'")
    if len(missing) == len(form):
        raise BadRow(Reason.MISSING_FIELD, "", "the line has no field that tunesmith reads", f"use {_FORMS}")
    raise BadRow(
        Reason.MISSING_FIELD, missing[0], "is missing", f"add '{missing[0]}'; {' and '.join(form)} go together"
    )


def _no_answer(field: str, codes: str) -> BadRow:
    if codes[-1] in "cC":
        fix = "give the last answer weight 1, or remove the line"
        return BadRow(Reason.NO_ANSWER, field, "the last answer has weight 0, so there is nothing to learn", fix)
    fix = "end with an assistant message, or remove the line"
    return BadRow(Reason.NO_ANSWER, field, "does not end with an assistant message", fix)


def _label(value: Any) -> bool:
    if type(value) is not bool:
        fix = "write true for an answer like which the model should write, false for one it should avoid; or remove it"
        raise BadRow(Reason.BAD_LABEL, "label", f"is {named(value)}, neither true nor false", fix)
    return value


def _nul() -> BadRow:
    return BadRow(Reason.NUL, "", "a text holds the NUL character", "remove \\u0000 from the line")


def _too_deep() -> BadRow:
    return BadRow(Reason.NOT_JSON, "", "is nested too deeply", "flatten it, or remove the line")


def exact(line: bytes) -> Any:
    """The object of a line with its numbers as they are written, and no key twice in any object."""
    try:
        return strict_json.loads(line, key_twice)
    except RecursionError:
        raise _too_deep() from None


def refuse_foreign_duplicates(line: bytes, fields: dict[str, Any]) -> None:
    """The same look for an object in a form of another tool: quick, and slow only where it may find something.

    Written again, an object has two quotes less for each key that came twice.
    """
    if b"\\u0022" in line or line.count(b'"') != orjson.dumps(fields).count(b'"'):
        _refuse_duplicates(line, _FOREIGN_KEYS)


def _refuse_duplicates(line: bytes, read_keys: frozenset[str] = _READ_KEYS) -> None:
    """The slow and sure look for keys that are in an object twice."""
    try:
        strict_json.refuse_repeated(line, read_keys, _read_key_twice)
    except RecursionError:
        raise _too_deep() from None


def _read_key_twice(key: str) -> BadRow:
    return BadRow(Reason.DUPLICATE_KEY, key, f"'{key}' appears twice in one object", "keep one of the two")


_MAX_DIGITS = 308  # of the largest number that a double holds
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def explain(line: bytes, error: JSONDecodeError, *, is_unterminated: bool) -> BadRow:
    """What to tell the user about such a line. `is_unterminated`: no newline follows, so it may be cut off."""
    if line.startswith(b"\xef\xbb\xbf"):
        return BadRow(Reason.BYTE_ORDER_MARK, "", "begins with a byte-order mark", "remove its first three bytes")
    if b"\0" in line:
        fix = "remove the NUL bytes; is the file damaged, or UTF-16?"
        return BadRow(Reason.NUL, "", "holds a NUL byte", fix, at_byte=line.index(0))
    try:
        text = line.decode()
    except UnicodeDecodeError as wrong:
        if is_unterminated and wrong.end == len(line):
            return _cut_off()
        return BadRow(Reason.INVALID_UTF8, "", "is not UTF-8", "write the file as UTF-8", at_byte=wrong.start)
    return _explain_text(text, error, is_unterminated)


def _explain_text(text: str, error: JSONDecodeError, is_unterminated: bool) -> BadRow:
    try:
        json.loads(text, parse_constant=_refuse_non_finite, parse_float=_refuse_overflow, parse_int=_refuse_long_number)
    except BadRow as found:
        return found
    except RecursionError:
        return BadRow(Reason.NOT_JSON, "", "is nested too deeply", "flatten it, or remove the line")
    except ValueError:
        has_other_ends = "\r" in text.rstrip()
        if is_unterminated and not has_other_ends and text.lstrip().startswith("{"):
            return _cut_off()
        fix = "write one JSON object per line" + ("; end lines with LF" if has_other_ends else "")
        return BadRow(Reason.NOT_JSON, "", f"is not JSON at character {error.pos + 1}", fix)
    if _HALF_PAIR.search(text):
        fix = "write characters beyond U+FFFF as a pair of escapes, or as UTF-8"
        return BadRow(Reason.BAD_ESCAPE, "", "holds half of a surrogate pair", fix)
    return BadRow(Reason.NOT_JSON, "", f"is not usable JSON ({error.msg})", "simplify it, or remove the line")


def _cut_off() -> BadRow:
    fix = "the file ends inside this line: copy it again, or remove the line"
    return BadRow(Reason.CUT_OFF, "", "is cut off", fix)


def _refuse_non_finite(text: str) -> NoReturn:
    raise BadRow(Reason.NON_FINITE, "", f"holds {quoted(text, 20)}, which is not a number", "replace it, or use null")


def _refuse_long_number(text: str) -> None:
    if len(text) > _MAX_DIGITS:
        problem = f"holds a number of {len(text)} digits, too large to be one"
        raise BadRow(Reason.NON_FINITE, "", problem, "write it as a text, or use null")


def _refuse_overflow(text: str) -> None:
    if math.isinf(float(text)):
        _refuse_non_finite(text)
