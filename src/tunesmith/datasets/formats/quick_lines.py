"""Reads the commonest line, a chat of `messages` with `role` and `content` and nothing else, by the shortest way.

It never says what is wrong: whatever is unusual about a line, it leaves to the parser that looks at everything.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from tunesmith.core.visible_text import plainly_seen
from tunesmith.datasets.bad_row import BadRow
from tunesmith.datasets.messages import MessageChecker
from tunesmith.datasets.rows import Row

_MAX_SHAPES = 4096
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")


class QuickLines:
    """Remembers which sequences of roles are conversations that end with an answer."""

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
