"""An example: one training item in one form, whatever the file it came from looked like.

The messages before the first trained answer are its `prompt`, what follows is `chosen` and ends with an answer; for
preferences the worse continuation is `rejected`. Light on purpose: the processes that parse import nothing more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    HELDOUT = "heldout"


class Kind(StrEnum):
    SUPERVISED = "supervised"
    PREFERENCE = "preference"


class Message(TypedDict):
    """One message of a conversation. Weight 1: the loss counts it; only answers can have it."""

    role: str
    content: str
    weight: int


ROLE_OF_CODE = {"s": ("system", 0), "u": ("user", 0), "t": ("tool", 0), "c": ("assistant", 0), "a": ("assistant", 1)}
"""Role and weight of a message by one letter.

The letters of an example's messages are its *shape*: "sua" is a system message, a question and the answer to learn;
"ua|a" is a question, a better and a worse answer. The first "a" ends the prompt.
"""
_CODE_OF_ROLE = {role: code for code, role in ROLE_OF_CODE.items()}


def codes_of(messages: Sequence[Message]) -> str:
    """The letters of these messages; "?" for what no example may hold."""
    return "".join([_CODE_OF_ROLE.get((message["role"], message["weight"]), "?") for message in messages])


@dataclass(frozen=True, slots=True)
class Example:
    """One training item."""

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
        """The conversation to learn: ends with an answer."""
        return self.prompt + self.chosen

    @property
    def kind(self) -> Kind:
        return Kind.SUPERVISED if self.rejected is None else Kind.PREFERENCE


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
    CONTROL_TOKEN = "control_token"  # noqa: S105 - a reason, no password
    MIXED_KIND = "mixed_kind"
