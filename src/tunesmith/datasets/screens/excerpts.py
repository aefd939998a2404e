"""Excerpts of hostile text that are safe to look at: secrets masked, nothing that hides, or steers a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

from tunesmith.datasets.screens.rows import RowScreens
from tunesmith.profiles.sections.screens import Screen

_PRIVATE = (Screen.SECRET, Screen.EMAIL, Screen.PERSONAL_NUMBER)


_EXCERPT = 160


Span = tuple[int, int]
_BLANK_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # printable by their class, yet blank
_MARKS_IN_A_ROW = 3  # as many as any script stacks on a letter; more climb over the lines around
_MAX_LOOKS = 20


def escaped(text: str) -> str:
    """The text with everything that cannot be seen, or would move what can, written out as an escape."""
    if text.isascii() and text.isprintable():
        return text
    told, marks = [], 0
    for char in text:
        marks = marks + 1 if unicodedata.combining(char) else 0
        told.append(char if _is_plain(char) and marks <= _MARKS_IN_A_ROW else _escape(char))
    return "".join(told)


def _is_plain(char: str) -> bool:
    return char.isprintable() and char not in _BLANK_LETTERS and not _is_selector(char)


def _is_selector(char: str) -> bool:
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"


def _escape(char: str) -> str:
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char)
    return known or (f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}")


def masked(text: str, find: Callable[[str], Sequence[Span]]) -> str:
    """The text without what `find` finds in it; looks again until it finds nothing, because a look finds only some."""
    for _ in range(_MAX_LOOKS):
        spans = [(start, end) for start, end in find(text) if start < end]
        if not spans:
            return text
        for start, end in sorted(_joined(spans), reverse=True):
            text = f"{text[:start]}[…]{text[end:]}"
    return f"[{len(text)} characters, full of what must not be shown]"


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The same places, none of them twice."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def excerpt(text: str, limit: int) -> str:
    """The beginning of a text, safe to show, of at most about `limit` characters."""
    shown = escaped(text[:limit])
    return shown[: 4 * limit] + ("…" if len(text) > limit or len(shown) > 4 * limit else "")


def safe_text(text: str, limit: int = _EXCERPT) -> str:
    """The beginning of a text without secrets and personal data, and without anything that cannot be seen."""
    screens = RowScreens([screen.value for screen in _PRIVATE])
    return excerpt(masked(text, lambda left: [(found.start, found.end) for found in screens.look([left])]), limit)
