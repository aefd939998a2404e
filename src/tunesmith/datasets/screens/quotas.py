"""Decides how many rows one source, or one template, may give; which ones stay does not depend on who asks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from zlib import crc32

from tunesmith.datasets.screens.words import words_of

_BUCKETS = 1 << 12
_SLOTS = 1 << 21
_WORDS = 8
_CHARS = 200


def allowed(counts: Mapping[int, int], most: int | None, share: float | None) -> dict[int, int]:
    """How many rows each source may give. A share that no choice of rows can meet is not applied."""
    left = {source: min(num, most or num) for source, num in counts.items()}
    if share is None or share * len(left) < 1.0:
        return left
    while True:
        # Those above the share get exactly it: with k of them, all others are the (1 - k·share)th part of the whole.
        total = sum(left.values())
        above = [source for source, num in left.items() if num > share * total]
        if not above:
            return left
        rest = sum(num for source, num in left.items() if source not in above)
        room = 1.0 - share * len(above)
        each = int(share * rest / room) if room > 0 else min(left.values())
        changed = {source: min(num, each) if source in above else num for source, num in left.items()}
        if changed == left or not rest:
            return changed
        left = changed


class SourceRows:
    """Counts the rows of sources by the beginning of their ids, so that those with the lowest ids can be chosen."""

    def __init__(self) -> None:
        self._counts: dict[int, array[int]] = {}
        self.num: dict[int, int] = {}

    def add(self, source: int, keys: list[int]) -> None:
        counts = self._counts.setdefault(source, array("I", bytes(4 * _BUCKETS)))
        for key in keys:
            counts[key >> 52] += 1
        self.num[source] = self.num.get(source, 0) + len(keys)

    def chosen(self, left: Mapping[int, int]) -> Chosen:
        return Chosen({source: _edge(self._counts[source], num) for source, num in left.items()})


class Chosen:
    """Which rows of each source stay: those below an edge, and the first few at it."""

    def __init__(self, edges: dict[int, tuple[int, int]]) -> None:
        self._edges = edges

    def stays(self, source: int, key: int) -> bool:
        bucket, room = self._edges[source]
        if key >> 52 != bucket:
            return key >> 52 < bucket
        self._edges[source] = bucket, room - 1
        return room > 0


def _edge(counts: array[int], num: int) -> tuple[int, int]:
    passed = 0
    for bucket, count in enumerate(counts):
        if passed + count > num:
            return bucket, num - passed
        passed += count
    return _BUCKETS, 0


class TemplateRows:
    """Counts rows by the template of their question, about: memory does not depend on how many templates there are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._templates, self._counts = array("I", bytes(4 * _SLOTS)), array("I", bytes(4 * _SLOTS))

    def stays(self, question: str) -> bool:
        """Count a question; whether there is room for it."""
        template = template_of(question)
        slot = template % _SLOTS
        if self._templates[slot] != template:
            if self._counts[slot] > 1:
                self._counts[slot] -= 1  # two templates in one slot: the one with more rows stays
                return True
            self._templates[slot], self._counts[slot] = template, 0
        self._counts[slot] += 1
        return self._counts[slot] <= self._most


def template_of(question: str) -> int:
    """The first words of a question as a number, whatever numbers stand in it."""
    words = [b"0" if word.isdigit() else word for word in words_of(question[:_CHARS])[:_WORDS]]
    return crc32(b" ".join(words))
