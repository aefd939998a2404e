"""Finds characters that hide something from a reader, and takes disguises off so that other screens see the text."""

# ruff: noqa: E501 - a pattern or an example reads better in one line

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from tunesmith.datasets.screens.finding import Hit

_INVISIBLE = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2060-\u2064\u206a-\u206f\u3164\ufeff\uffa0"
_BIDI = "\u202a-\u202e\u2066-\u2069"
_TAGS = "\U000e0000-\U000e007f"
_SELECTORS = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_WIDE = "\uff0f\uff10-\uff19\uff1c\uff1e\uff20-\uff3b\uff3d\uff3f\uff41-\uff5c"
_STYLED = "\U0001d400-\U0001d7ff\u24b6-\u24e9\u2460-\u2473\U0001f130-\U0001f149\U0001f170-\U0001f189\ufe64\ufe65"
_LETTERS = "А-Яа-яЀ-џΑ-ω"
_C1 = "\x80-\x9f"
CONTROLS = bytes(byte for byte in range(128) if (byte < 32 and byte not in b"\t\n\r") or byte == 127)
"""Those of ASCII that no text needs, and that a terminal may obey."""
_FOUND = re.compile(
    f"[{_C1}{_INVISIBLE}{_BIDI}{_TAGS}\U000e0100-\U000e01ef{_WIDE}{_STYLED}]|[{_SELECTORS}]{{2}}|[A-Za-z_][{_LETTERS}]|[{_LETTERS}][A-Za-z_]"
)
_SUSPICIOUS = re.compile(f"[{_C1}{_INVISIBLE}{_BIDI}{_TAGS}{_SELECTORS}{_WIDE}{_STYLED}{_LETTERS}ԁԛԝһ]")
_DROPPED = re.compile(f"[{_INVISIBLE}{_BIDI}{_TAGS}{_SELECTORS}]")
_SHAPED = re.compile(f"[{_WIDE}{_STYLED}]")
_LOOKALIKES = str.maketrans(
    "АВЕЅІЈКМНОРСТХУаеѕіјорсухһԁԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧορν", "ABESIJKMHOPCTXYaesijopcyxhdqwABEZHIKMNOPTYXopv"
)
_MIXED = re.compile(f"[A-Za-z_{_LETTERS}ԁԛԝһ]+")
_LOOKALIKE_WORD = re.compile(r"(?=\w{0,40}[A-Za-z])(?=\w{0,40}[АВЕЅІЈКМНОРСТХУаеѕіјорсухһԁԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧορν])[A-Za-zАВЕЅІЈКМНОРСТХУаеѕіјорсухһԁԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧορν]{4,}(?!\w)")  # fmt: skip
_TAG_RUN = re.compile(f"(.?)([{_TAGS}]+)", re.DOTALL)
_SELECTOR_RUN = re.compile(f"[{_SELECTORS}]{{2,}}|[\U000e0100-\U000e01ef]{{2,}}")
_CONTROL = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f{_C1}]+")
_OVERRIDE = re.compile("[\u202d\u202e]")
_DIRECTION = re.compile("[\u202a-\u202c\u2066-\u2069]")
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_INSIDE_WORD = re.compile(
    r"(?<=[!-~])[\u00ad\u034f\u115f\u1160\u180e\u200b-\u200d\u2060-\u2064\u206a-\u206f\u3164\ufeff\uffa0]+(?=[!-~])"
)
_MANY = re.compile("[\u115f\u1160\u200b-\u200f\u2060-\u2064\u206a-\u206f\u3164\ufeff\uffa0]{4,}")


def could_hide(beyond: str) -> bool:
    """Whether the characters of a text beyond ASCII leave it possible that it hides something: dashes, quotation marks
    and accents do not."""
    return _SUSPICIOUS.search(beyond) is not None


def may_hide(text: str) -> bool:
    """Whether a text holds a character worth a closer look; cheap, and never for ASCII: its controls are seen before."""
    return _FOUND.search(text) is not None


def hidden_characters(text: str) -> Iterator[Hit]:
    """Characters nobody sees that change what is read: directions, zero widths, tags, look-alike letters, controls."""
    for found in _CONTROL.finditer(text):
        yield _hit(found, "control characters, which a terminal may obey and nobody sees")
    if text.isascii():
        return
    for found in _OVERRIDE.finditer(text):
        yield _hit(found, "a character that turns the direction of the text around")
    if not _RIGHT_TO_LEFT.search(text):
        for found in _DIRECTION.finditer(text):
            yield _hit(found, "a direction mark in a text that runs in one direction")
    for found in _TAG_RUN.finditer(text):
        is_flag = found[1] == "\U0001f3f4" and found[2].endswith("\U000e007f") and len(found[2]) <= 7
        if not is_flag:
            yield Hit(found.start(2), found.end(2), "invisible tag characters, which can carry text", _told(found[2]))
    for found in _SELECTOR_RUN.finditer(text):
        yield _hit(found, "a run of variation selectors, which can carry text")
    for found in _INSIDE_WORD.finditer(text):
        if found[0] != "\u00ad" or not (text[found.start() - 1].isalpha() and text[found.end()].isalpha()):
            yield _hit(found, "invisible characters between visible ones")
    for found in _MANY.finditer(text):
        yield _hit(found, "a run of invisible characters, which can carry text")
    for found in _LOOKALIKE_WORD.finditer(text):
        if found[0].translate(_LOOKALIKES).isascii():
            yield Hit(*found.span(), "a word that mixes letters of two alphabets that look alike", found[0][:40])


def undisguised(text: str) -> tuple[str, list[int]]:
    """The text as a model or a person might read it: look-alikes as plain letters, invisible characters left out.

    With it, the place of each of its characters in the original.
    """
    plain = _MIXED.sub(_plain_word, text)
    chars: list[str] = []
    places: list[int] = []
    for place, char in enumerate(plain):
        if char < "\x80":
            chars.append(char)
            places.append(place)
        elif not _DROPPED.match(char):
            shaped = unicodedata.normalize("NFKC", char) if _SHAPED.match(char) else char
            chars.append(shaped)
            places += [place] * len(shaped)
    return "".join(chars), places


def _plain_word(found: re.Match[str]) -> str:
    word = found[0]
    plain = word.translate(_LOOKALIKES)
    return plain if plain.isascii() and not word.isascii() else word


def _hit(found: re.Match[str], reason: str) -> Hit:
    return Hit(*found.span(), reason, _told(found[0]))


def _told(text: str) -> str:
    more = "…" if len(text) > 4 else ""
    return " ".join(f"U+{ord(char):04X}" for char in text[:4]) + more
