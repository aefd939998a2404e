"""Finds contradictions: another short answer to a question that an earlier row answers. Long ones may well differ."""

from __future__ import annotations

import hashlib
from array import array

from tunesmith.datasets.example import num_prompt_of
from tunesmith.datasets.splits import normalise

_MAX_WORDS = 12
_SLOTS = 1 << 20

Answer = tuple[int, int]
"""64 bits of the group of the question, and of the answer as it reads."""


def short_answer(group: bytes, shape: str, contents: list[str]) -> Answer | None:
    """What is kept of a row to find contradictions; None unless one short answer is all that it teaches."""
    if num_prompt_of(shape) != len(shape) - 1 or shape[-1] != "a" or len(contents[-1]) > 20 * _MAX_WORDS:
        return None
    answer = normalise(contents[-1]).rstrip(b".! ")
    if answer.count(b" ") >= _MAX_WORDS:
        return None
    return int.from_bytes(group[:8], "big"), int.from_bytes(hashlib.blake2b(answer, digest_size=8).digest(), "big")


class Contradictions:
    """The answers to the latest million questions: memory does not depend on how many there were."""

    def __init__(self) -> None:
        self._groups, self._answers, self._places = (array("Q", bytes(8 * _SLOTS)) for _ in range(3))

    def earlier(self, source: int, line: int, row: Answer) -> tuple[int, int] | None:
        """Source and line of an earlier row that answers the same question otherwise; else the row is remembered."""
        group, answer = row
        slot = group % _SLOTS
        place = self._places[slot]
        if place and self._groups[slot] == group:
            return (place >> 40, place & ((1 << 40) - 1)) if self._answers[slot] != answer else None
        self._groups[slot], self._answers[slot], self._places[slot] = group, answer, source << 40 | line
        return None
