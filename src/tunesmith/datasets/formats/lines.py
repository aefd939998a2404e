"""What each line of a source becomes: filtered, in whatever format, one row or several; or exactly what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tunesmith.core.visible_text import plainly_seen
from tunesmith.datasets.example import BadRow, Reason
from tunesmith.datasets.formats.formats import (
    Raw,
    Translated,
    Translator,
    alpaca,
    has_shared_pair,
    openai_pair,
    shared_pair,
    sharegpt,
)
from tunesmith.datasets.formats.traces import NoConversation, is_langfuse, is_mlflow, langfuse, mlflow
from tunesmith.datasets.messages import MessageChecker, count_ignored
from tunesmith.datasets.rows import Row, RowParser, exact, refuse_foreign_duplicates
from tunesmith.datasets.sources import read_conditions

if TYPE_CHECKING:
    from tunesmith.datasets.parse_pool import ParseRules

Found = tuple[str, list[str], int]
"""A row: shape, texts, and how many of its messages name its group; 0: those before the first trained answer."""

_CONTEXT = str.maketrans("aA", "cC")
_FORCED: dict[str, tuple[str, ...]] = {  # formats in our own forms: the fields to read
    "completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
}


class LineImporter:
    """Reads lines; remembers counts only."""

    def __init__(self, rules: ParseRules) -> None:
        self._rows = RowParser(may_lack_answer=rules.windows != "whole")
        self._quick = QuickLines()
        self._format = rules.format
        self._windows = rules.windows
        self._where = read_conditions(rules.where)
        self._is_plain = rules.format == "auto" and rules.windows == "whole" and not rules.where
        self.num_blank = 0
        self.passed_over: Counter[str] = Counter()

    @property
    def ignored_fields(self) -> Counter[str]:
        return self._rows.ignored_fields

    def read(self, line: bytes, *, is_unterminated: bool = False) -> Sequence[Found]:
        """Return the rows of a line: none if it is blank or filtered out. Raises BadRow.

        `is_unterminated`: no newline follows the line.
        """
        fields = self._rows.load(line, is_unterminated=is_unterminated)
        if fields is None:
            self.num_blank += 1
            return ()
        if self._is_plain and "messages" in fields:  # what most lines are, without another look
            shape, contents = self._quick.read(line, fields) or self._rows.own(line, fields)
            return ((shape, contents, 0),)
        for condition in self._where:
            if (why := condition.refuses(fields)) is not None:
                count_ignored(self.passed_over, why)
                return ()
        translate = _translator(fields) if self._format == "auto" else _forced(self._format, fields)
        if translate is not None:
            return self._foreign(line, fields, translate)
        row = self._rows.own(line, fields)
        if self._windows != "whole":
            return self._cut(row)
        return ((*row, 0),)

    def _foreign(self, line: bytes, fields: Raw, translate: Translator) -> Sequence[Found]:
        try:
            rows, has_tools = self._translated(fields, translate)
        except NoConversation:
            count_ignored(self.passed_over, "no answered call of a model")
            return ()
        except BadRow:
            refuse_foreign_duplicates(line, fields)  # the better explanation, if it is one
            raise
        if has_tools:  # numbers in calls are kept as they are written
            counted = Counter(self.ignored_fields)
            rows, _ = self._translated(exact(line), translate)
            self.ignored_fields.clear()  # the first look has counted already
            self.ignored_fields.update(counted)
        refuse_foreign_duplicates(line, fields)
        return rows

    def _translated(self, fields: Raw, translate: Translator) -> tuple[list[Found], bool]:
        found: list[Found] = []
        has_tools = False
        for item in translate(fields):
            try:
                row = self._rows.translated(item.fields)
            except BadRow as bad:
                bad.field = item.place(bad.field)
                raise
            has_tools = has_tools or self._rows.has_tools
            if item.is_window:
                found.append((*row, _beginning(row[0])))
            else:
                found += self._cut(row) if self._windows != "whole" else ((*row, 0),)
        return found, has_tools

    def _cut(self, row: Row) -> Sequence[Found]:
        """The windows of a conversation: each ends with an answer to learn, and what came before is its prompt.

        All of them are in the group of the question that began it: one that is trained on holds the answers of the
        others.
        """
        shape, contents = row
        if "|" in shape:
            return ((*row, 0),)
        ends = [place for place, code in enumerate(shape) if code in "aA"]
        if self._windows == "last":
            ends = ends[-1:]
        begin = _beginning(shape)
        return [(shape[:end].translate(_CONTEXT) + shape[end], contents[: end + 1], begin) for end in ends]


def _beginning(shape: str) -> int:
    """How many messages come before the first answer, trained or not."""
    return next((place for place, code in enumerate(shape) if code in "acAC|"), len(shape))


def _translator(fields: Raw) -> Translator | None:
    """How to read an object that is not in one of our own forms; None: it is, or nobody knows it."""
    if "messages" in fields or "completion" in fields:
        return None
    if "conversations" in fields:
        return sharegpt
    if "preferred_output" in fields or "non_preferred_output" in fields:
        return openai_pair
    if "instruction" in fields and not fields.keys().isdisjoint(("output", "chosen", "rejected")):
        return alpaca
    if "chosen" in fields:
        return shared_pair if has_shared_pair(fields) else None
    if is_langfuse(fields):
        return langfuse
    return mlflow if is_mlflow(fields) else None


def _forced(name: str, fields: Raw) -> Translator | None:
    """How to read an object as this format; raises BadRow where it cannot be that."""
    if name == "openai":
        if "messages" not in fields:
            _want(name, fields, ("input", "preferred_output", "non_preferred_output"), "messages")
            return openai_pair
        return _only("messages")
    if name in _FORCED:
        wanted = _FORCED[name]
        if name == "preference" and has_shared_pair(fields):
            return shared_pair
        _want(name, fields, wanted, wanted[0])
        return _only(*wanted)
    if name == "sharegpt":
        _want(name, fields, ("conversations",), "conversations")
        return sharegpt
    if name == "alpaca":
        _want(name, fields, ("instruction",), "instruction")
        return alpaca
    is_known, translate = (is_langfuse, langfuse) if name == "langfuse" else (is_mlflow, mlflow)
    if not is_known(fields):
        fix = f"export traces or observations of {name}, or leave out --format"
        raise BadRow(Reason.MISSING_FIELD, "", f"the object is no trace of {name}", fix)
    return translate


def _want(name: str, fields: Raw, wanted: Sequence[str], first: str) -> None:
    missing = [key for key in wanted if key not in fields]
    if missing:
        field = first if len(missing) == len(wanted) else missing[0]
        raise BadRow(
            Reason.MISSING_FIELD, field, f"is missing in a row of format {name}", "add it, or leave out --format"
        )


def _only(*names: str) -> Translator:
    """The row with these fields, whatever stands beside them."""

    def translate(fields: Raw) -> Sequence[Translated]:
        return [Translated({name: fields[name] for name in (*names, "tools") if name in fields})]

    return translate


_MAX_SHAPES = 4096
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")


class QuickLines:
    """Parses the most common line quickly: `messages` with `role` and `content` and nothing else.

    It reports no errors. Any other line is left to `RowParser`. Caches which sequences of roles end with an answer.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, ...], str | None] = {}

    def read(self, line: bytes, fields: dict[str, Any]) -> Row | None:
        """The row of such a line; None: not this way."""
        messages = fields["messages"]
        if type(messages) is not list:
            return None
        try:
            roles = tuple(map(_ROLE, messages))
            shape = self._shapes[roles] if roles in self._shapes else self._learnt(roles)
            contents = list(map(_CONTENT, messages))
            are_texts = all(map(plainly_seen, contents))  # of what is no text, it raises
        except (KeyError, TypeError):
            return None
        # Two quotes for each key and text we know of: then there is nothing else in the line, no key twice either.
        if not are_texts or shape is None or line.count(b'"') != 2 + 8 * len(contents):
            return None
        if b"\\" in line and b"\\u0000" in line:
            return None
        return shape, contents

    def _learnt(self, roles: tuple[Any, ...]) -> str | None:
        """The shape of a conversation with these roles, None if it is none."""
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        shape: str | None = None
        if all(type(role) is str for role in roles):
            try:
                shape = MessageChecker().check([{"role": role, "content": "…"} for role in roles], "messages", "", [])
            except BadRow:
                shape = None
        self._shapes[roles] = shape if shape is not None and shape[-1] == "a" else None
        return self._shapes[roles]
