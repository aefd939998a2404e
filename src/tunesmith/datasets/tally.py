"""Counts by reason, with the first few of each: its size does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
_KEPT_OF_EACH = 20


class Tally(Generic[K, V]):
    def __init__(self) -> None:
        self._num: dict[K, int] = {}
        self._first: dict[K, list[V]] = {}

    @property
    def total(self) -> int:
        return sum(self._num.values())

    def count(self, reason: K, num: int, found: Sequence[V]) -> None:
        """Count so many more; of what was found, the first few of all are kept."""
        self._num[reason] = self._num.get(reason, 0) + num
        kept = self._first.setdefault(reason, [])
        kept += found[: _KEPT_OF_EACH - len(kept)]

    def in_order_met(self) -> list[tuple[K, int, list[V]]]:
        return [(reason, num, self._first[reason]) for reason, num in self._num.items()]

    def most_frequent_first(self) -> list[tuple[K, int, list[V]]]:
        """Equals in the order in which they were met."""
        return sorted(self.in_order_met(), key=lambda each: -each[1])
