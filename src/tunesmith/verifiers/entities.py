"""Entities of a text, found by rules alone: numbers, dates, addresses, codes, quoted words and names. Deterministic."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_MAX_CHARS = 100_000  # of a text; what stands behind is not looked at, so that a hostile text costs little
_PATTERNS = (  # in this order: what one has found, the next no longer sees
    re.compile(r"https?://[^\s<>\"')\]]{1,500}"),
    re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,5}"),
    re.compile(r"[\"“„«]([^\"“”„«»\n]{2,80})[\"”“»]"),  # quoted
    re.compile(r"\b[A-Za-z]{1,20}[-_]?\d[\w-]{0,30}\b"),  # codes such as AB-12, v3
    re.compile(r"(?<![\w.])\d[\d.,:/-]*\d(?!\w)|(?<![\w.])\d(?!\w)"),  # numbers, dates, times
    re.compile(r"\b[A-Z][A-Z0-9]{1,15}\b"),  # acronyms
    re.compile(r"(?<=[\w,;:)] )[A-Z][\w’'-]+(?: [A-Z][\w’'-]+){0,3}"),  # names: a capital inside a sentence
)
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BLANKS = re.compile(r"\s+")
_NOT_NAMES = frozenset(("i", "i'm", "i'll", "i've", "i'd", "i’m", "i’ll", "i’ve", "i’d", "ok", "okay", "yes", "no"))


def normalised(text: str) -> str:
    """The text as entities are compared: one form of each character, no case, no grouping of digits."""
    folded = unicodedata.normalize("NFKC", text[:_MAX_CHARS]).casefold()
    return _BLANKS.sub(" ", _GROUPED.sub("", folded))


def entities_of(text: str) -> tuple[str, ...]:
    """What a faithful answer about this text must not change, normalised, each once, in order of kind and place."""
    head = unicodedata.normalize("NFKC", text[:_MAX_CHARS])
    found: dict[str, None] = {}
    for pattern in _PATTERNS:
        for match in pattern.finditer(head):
            found[_tidy(match[match.lastindex or 0])] = None
        head = pattern.sub("_", head)
    return tuple(entity for entity in found if entity and entity not in _NOT_NAMES)


def missing_from(entities: Iterable[str], text: str) -> tuple[str, ...]:
    """Those that do not stand in the text as words of their own: 42 is not in 142."""
    whole = normalised(text)
    return tuple(entity for entity in entities if not _stands_in(entity, whole))


def _stands_in(entity: str, whole: str) -> bool:
    start = whole.find(entity)
    while start >= 0:
        end = start + len(entity)
        if not _continues(whole[start - 1 : start], entity[0]) and not _continues(whole[end : end + 1], entity[-1]):
            return True
        start = whole.find(entity, start + 1)
    return False


def _continues(neighbour: str, edge: str) -> bool:
    """Whether the character beside an entity belongs to the same word."""
    return bool(neighbour) and edge.isalnum() and neighbour.isalnum()


def _tidy(text: str) -> str:
    return normalised(text).strip(" .,;:!?'’\"")
