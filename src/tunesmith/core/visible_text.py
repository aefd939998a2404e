"""Whether a text says anything that a reader can see, and whether two texts look the same."""

from __future__ import annotations

import re
import unicodedata

plainly_seen = re.compile(
    "[!-~\u00a1-\u00ac\u00ae-\u02af\u0370-\u0377\u0386-\u0482\u048a-\u052f\u05d0-\u05ea\u0620-\u064a\u0671-\u06d3"
    "\u0904-\u0939\u0985-\u09b9\u0e01-\u0e30\u3041-\u3096\u30a1-\u30fa\u3400-\u9fff\uac00-\ud7a3\uff01-\uff60]"
).search
"""Finds a letter, digit or sign of the commonest scripts. The quick answer: it may miss one, and never invents one."""

_NOTHING = frozenset("\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u2065\u2800\u3164\uffa0\ufffc\U0001d159")
"""Look like nothing, though their category is that of letters and signs: fillers, blanks, and what stands for them."""
_NO_GLYPH = frozenset({"Cc", "Cf", "Cs", "Zs", "Zl", "Zp", "Mn", "Mc", "Me"})
"""Controls, formats, halves of pairs, white space, and marks that need a letter to stand on."""
_IGNORABLE = ((0xFFF0, 0xFFF8), (0xE0000, 0xE0FFF))
"""Unassigned, and ignorable by default."""


def is_seen(character: str) -> bool:
    """Whether a character on its own shows anything."""
    if character in _NOTHING or unicodedata.category(character) in _NO_GLYPH:
        return False
    return not any(first <= ord(character) <= last for first, last in _IGNORABLE)


def says_nothing(text: str) -> bool:
    """Whether a reader would see nothing of it: empty, white space, or characters that do not show."""
    return plainly_seen(text) is None and not any(map(is_seen, text))


def looks(text: str) -> str:
    """The text as a reader sees it: white space collapsed, and without what does not show; marks stay on letters."""
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    shown = "".join(each for each in text if each.isspace() or is_seen(each) or unicodedata.category(each)[0] == "M")
    return " ".join(shown.split())
