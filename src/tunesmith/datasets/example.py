"""An example: one training item in one form, whatever the file it came from looked like.

The messages before the first trained answer are its `prompt`, what follows is `chosen` and ends with an answer; for
preferences the worse continuation is `rejected`. A labelled example has one of the two, and the other one is empty.
Light on purpose: the processes that parse import nothing more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NotRequired, TypedDict


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    HELDOUT = "heldout"


class Kind(StrEnum):
    SUPERVISED = "supervised"
    PREFERENCE = "preference"
    LABELLED = "labelled"


class Message(TypedDict):
    """One message of a conversation. Weight 1: the loss counts it; only answers can have it.

    The functions that the model may call come as a first message with the role "tools": its content is their
    definitions as JSON. `tool_calls` are in the form of OpenAI, but with arguments as objects.
    """

    role: str
    content: str
    weight: int
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


TOOLS = "tools"
"""The role of the message that defines the functions the model may call."""
CALLS, RESULT = "calls", "result"
"""Stored in place of a role: an answer with tool calls, and a tool's message that says which call it answers. What they
hold beside their content is stored with it, as JSON."""
ROLE_OF_CODE = {
    "s": ("system", 0),
    "u": ("user", 0),
    "t": ("tool", 0),
    "c": ("assistant", 0),
    "a": ("assistant", 1),
    "d": (TOOLS, 0),
    "C": (CALLS, 0),
    "A": (CALLS, 1),
    "r": (RESULT, 0),
}
"""Stored role and weight of a message by one letter.

The letters of an example's messages are its *shape*: "sua" is a system message, a question and the answer to learn;
"ua|a" is a question, a better and a worse answer; "ua|" is an answer labelled as desirable, "u|a" as undesirable;
"duAra" is a question that is answered with the help of a function. The first "a" or "A" or "|" ends the prompt.
"""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_CODE_OF_ROLE = {role: code for code, role in ROLE_OF_CODE.items()}
_PACKED = {CALLS: "assistant", RESULT: "tool"}
_FIELDS: dict[str, dict[str, type]] = {
    CALLS: {"content": str, "tool_calls": list},
    RESULT: {"content": str, "tool_call_id": str, "name": str},
}
"""What the JSON of a packed message holds."""


@lru_cache(maxsize=4096)
def num_prompt_of(shape: str) -> int:
    """How many messages of an example of this shape come before what is learnt, or avoided."""
    return next((place for place, code in enumerate(shape) if code in "aA|"), len(shape))


def codes_of(stored: Iterable[Message]) -> str:
    """The letters of stored messages; "?" for what no example may hold."""
    return "".join([_CODE_OF_ROLE.get((message["role"], message["weight"]), "?") for message in stored])


def to_json(value: Any) -> str:
    """Compact JSON that keeps the order of keys: the model learns to write them in that order."""
    return _ENCODER.encode(value)


def encode_message(message: Message) -> Message:
    """A message as it is stored and hashed: role, text and weight, nothing else."""
    role = CALLS if "tool_calls" in message else RESULT if "tool_call_id" in message or "name" in message else None
    if role is None:
        return message
    held: Any = message  # keys in the order of `_FIELDS`, whatever order they came in
    text = to_json({key: held[key] for key in _FIELDS[role] if key in message})
    return Message(role=role, content=text, weight=message["weight"])


def decode_message(stored: Message) -> Message:
    """The message of a stored one; raises ValueError when its text is not what `encode_message` writes."""
    if stored["role"] not in _PACKED:
        return stored
    fields, known = json.loads(stored["content"]), _FIELDS[stored["role"]]
    if type(fields) is not dict or any(type(value) is not known.get(key) for key, value in fields.items()):
        raise ValueError("not a stored message")
    message: Any = {"role": _PACKED[stored["role"]], "content": "", "weight": stored["weight"], **fields}
    if encode_message(message) != stored:
        raise ValueError("not a stored message")
    return message  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Example:
    """One training item.

    | kind | chosen | rejected |
    |---|---|---|
    | supervised | the answer to learn | None |
    | preference | the better answer | the worse answer |
    | labelled, desirable | the answer | empty |
    | labelled, undesirable | empty | the answer |

    In preference and labelled examples the answers inside the prompt have weight 0.
    """

    id: str
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...] | None
    group: str
    """Hash of the normalised prompt: examples of one group are always in one split."""
    score: float
    source: int
    """Which of the dataset's sources it came from, counted from 0."""
    line: int

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation to learn: ends with an answer. An undesirable example has none."""
        if not self.chosen:
            raise ValueError(f"example {self.id} holds an undesirable answer only: there is nothing to learn from it")
        return self.prompt + self.chosen

    @property
    def is_desirable(self) -> bool:
        """Whether it has an answer to learn, and to be judged on."""
        return bool(self.chosen)

    @property
    def kind(self) -> Kind:
        if self.rejected is None:
            return Kind.SUPERVISED
        return Kind.PREFERENCE if self.chosen and self.rejected else Kind.LABELLED


def identity(shape: str, contents: Sequence[str]) -> str:
    """The id of an example: sha256 of its content. NUL parts the texts, because no content may hold one."""
    return hashlib.sha256("\0".join((shape, *contents)).encode()).hexdigest()


class Reason(StrEnum):
    """Why a line cannot be an example; stable codes for scripts."""

    TOO_LONG = "too_long"
    CUT_OFF = "cut_off"
    INVALID_UTF8 = "invalid_utf8"
    NUL = "nul"
    BYTE_ORDER_MARK = "byte_order_mark"
    NOT_JSON = "not_json"
    NON_FINITE = "non_finite"
    BAD_ESCAPE = "bad_escape"
    NOT_OBJECT = "not_object"
    DUPLICATE_KEY = "duplicate_key"
    MISSING_FIELD = "missing_field"
    AMBIGUOUS_FORM = "ambiguous_form"
    WRONG_TYPE = "wrong_type"
    EMPTY_CONTENT = "empty_content"
    EMPTY_LIST = "empty_list"
    BAD_ROLE = "bad_role"
    ROLE_ORDER = "role_order"
    NO_ANSWER = "no_answer"
    BAD_WEIGHT = "bad_weight"
    UNSUPPORTED_FIELD = "unsupported_field"
    SAME_ANSWERS = "same_answers"
    BAD_LABEL = "bad_label"
    BAD_TOOLS = "bad_tools"
    CONTROL_TOKEN = "control_token"  # noqa: S105 - a reason, no password
    MIXED_KIND = "mixed_kind"


_NAMES = {
    type(None): "null",
    list: "an array",
    dict: "an object",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


class BadRow(Exception):
    """A row that cannot be an example: why, where in it, and what to do."""

    def __init__(self, reason: Reason, field: str, problem: str, fix: str, at_byte: int | None = None) -> None:
        super().__init__(problem)
        self.at_byte = at_byte  # in the line, where one byte is to blame
        self.reason = reason
        self.field = field
        self.problem = problem
        self.fix = fix


def named(value: Any) -> str:
    """What a JSON value is, in words."""
    return _NAMES.get(type(value)) or f"a Python {type(value).__name__}"  # from a client, not from JSON
