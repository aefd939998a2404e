"""Finds rows that are far from all others in length, or in a language that nearly no other row is in."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from tunesmith.verifiers.languages import language_of

_MIN_ROWS = 1000  # fewer tell nothing about what is usual
_USUAL = 0.99
_FACTOR = 8
GRAIN_BITS = 5
"""Lengths that differ only in so many of the last bits count as one step."""
_MAX_CHARS = 400  # of an answer that tell its language
_MAIN = 0.8  # of the rows whose language can be told
_FEW = 0.005
_KEPT = 50_000  # rows of one language that can still be few

Place = int


class Lengths:
    """How many rows have which length, in steps (`GRAIN_BITS`)."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, steps: dict[int, int]) -> None:
        self.counts.update(steps)

    @property
    def limit(self) -> int | None:
        """More characters than this are far from the others; None where no row has more, or there are too few."""
        total, passed = self.counts.total(), 0
        if total < _MIN_ROWS:
            return None
        for step, num in sorted(self.counts.items()):
            passed += num
            if passed >= _USUAL * total:
                limit = _FACTOR * (step + 1 << GRAIN_BITS)
                return limit if (max(self.counts) + 1 << GRAIN_BITS) > limit else None
        return None


def length_reason(limit: int) -> str:
    return f"has more than {limit:,} characters; 99 of 100 rows have up to {limit // _FACTOR:,}"


class Languages:
    """The rows by language; of one that is no longer few, only their number."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        self._places: dict[str, array[int]] = {}

    def add(self, place: Place, answer: str) -> None:
        language = language_of(answer[:_MAX_CHARS])
        if language is None:
            return
        self._num[language] += 1
        kept = self._places.setdefault(language, array("Q"))
        if len(kept) < _KEPT:
            kept.append(place)

    def found(self) -> Iterator[tuple[array[int], str]]:
        """The rows of each language that nearly no row is in, and what is suspect about them."""
        total = self._num.total()
        if total < _MIN_ROWS:
            return
        main, most = self._num.most_common(1)[0]
        if most < _MAIN * total:
            return
        for language, num in sorted(self._num.items()):
            if num <= _FEW * total and num <= _KEPT:
                yield (
                    self._places[language],
                    f"is answered in {language!r}, as {num} of {total} rows are; most are in {main!r}",
                )
