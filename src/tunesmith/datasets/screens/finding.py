"""What a screen found in a text: where, why it matters, and an excerpt that never repeats a secret."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Hit:
    """One suspicious place in one text."""

    start: int
    end: int
    reason: str
    """In words a person understands; holds nothing of the text."""
    excerpt: str


@dataclass(frozen=True, slots=True)
class ScreenFinding:
    """One match of a screen in one row."""

    screen: str
    message: int
    """Which text of the row, counted from 0 in the order in which it is stored."""
    start: int
    """In characters of that text; `end` is behind the last one."""
    end: int
    reason: str
    excerpt: str


def redacted(text: str, num_shown: int = 2) -> str:
    """How a secret is shown: its first characters, if it is long enough to keep the rest to itself, and its length."""
    shown = text[:num_shown] if len(text) >= 4 * num_shown else ""
    return f"{visible(shown)}… ({len(text)} characters)"


def visible(text: str) -> str:
    """A short text with everything that cannot be seen, or would disturb a terminal, written as U+XXXX."""
    cut = text[:_SHOWN]
    told = "".join(char if char.isprintable() else f"<U+{ord(char):04X}>" for char in cut)
    return told + ("…" if len(text) > _SHOWN else "")


def entropy(text: str) -> float:
    """Bits for each character, from the characters' own frequencies."""
    size = len(text)
    return -sum(num / size * math.log2(num / size) for num in Counter(text).values()) if size else 0.0
