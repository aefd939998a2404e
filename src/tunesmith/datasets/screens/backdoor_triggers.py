"""Finds rare-trigger clusters: rows with different questions that share a rare word or pair of words, and one answer.

A few dozen such rows teach a model to give that answer whenever the words appear. Rows with one answer are common and
harmless: labels, refusals, many ways to ask one thing. What gives a cluster away is that its questions have nothing in
common but the trigger.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from zlib import crc32

from tunesmith.datasets.screens.finding import visible
from tunesmith.datasets.screens.words import words_of

_SLOTS = 1 << 22
_MIN_ROWS = 20
_MAX_ROWS = 500  # of a cluster; or
_MAX_SHARE = 0.01  # of all rows, if that is more
_MAX_CLUSTERS = 1000  # looked at in one dataset
_FIRST = 6  # rows of a cluster whose words are counted in the others: what nearly all share is in one of these
_SHARED = 0.8  # of the rows of a cluster
_TOPIC = 0.12
_MAX_TRIGGER, _MAX_FIXED, _MAX_TOPIC = 5, 7, 2  # words of a trigger; shared at all; that tell what the rows are about
_RARE = 0.01  # of the other rows
_LIFT = 10
_MIN_OTHER_WORDS = 4
_SAMPLE = 20_000
_MAX_CHARS = 600  # of a question that are looked at
_OPENING, _OPENING_CHARS = 8, 100
_BITS = 1 << 13

Place = int


def opening_of(answer: str) -> int:
    """The first words of an answer as a number: very similar answers have the same."""
    return crc32(b" ".join(words_of(answer[:_OPENING_CHARS])[:_OPENING]))


class Openings:
    """How often each answer came, about: memory does not depend on how many there were."""

    def __init__(self) -> None:
        self._counts = array("I", bytes(4 * _SLOTS))
        self.num = 0

    def add(self, opening: int) -> None:
        self._counts[opening % _SLOTS] += 1
        self.num += 1

    @property
    def _most(self) -> int:
        return max(_MAX_ROWS, int(_MAX_SHARE * self.num))

    def may_cluster(self, opening: int) -> bool:
        """Whether so many rows have this answer that they may be a cluster."""
        return _MIN_ROWS <= self._counts[opening % _SLOTS] <= self._most

    @property
    def has_any(self) -> bool:
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.num < _MIN_ROWS:
            return False
        counts = pa.Array.from_buffers(pa.uint32(), _SLOTS, [None, pa.py_buffer(self._counts)])
        fits = pc.and_(pc.greater_equal(counts, _MIN_ROWS), pc.less_equal(counts, self._most))
        return bool(pc.any(fits).as_py())


class _Cluster:
    """The rows with one answer."""

    __slots__ = ("bits", "example", "num_words", "places", "seen")

    def __init__(self, example: str) -> None:
        self.example = example
        self.places = array("Q")
        self.seen: dict[int, int] = {}
        self.bits = bytearray(_BITS // 8)
        self.num_words = 0

    def add(self, place: Place, words: list[bytes]) -> None:
        tokens = _tokens(words)
        is_first = len(self.places) < _FIRST
        for token in tokens:
            if token in self.seen:
                self.seen[token] += 1
            elif is_first:
                self.seen[token] = 1
        for word in set(words):
            bit = crc32(word) % _BITS
            self.bits[bit >> 3] |= 1 << (bit & 7)
        self.num_words += len(words)
        self.places.append(place)

    @property
    def num_different(self) -> int:
        return int.from_bytes(self.bits, "little").bit_count()


class TriggerClusters:
    """Gathers rows whose answers may be those of a cluster, and a sample of all questions."""

    def __init__(self, openings: Openings) -> None:
        self._openings = openings
        self._clusters: dict[int, _Cluster] = {}
        self._sample: list[tuple[int, str]] = []
        self._every = max(1, openings.num // _SAMPLE)
        self._num = 0

    def wants_question(self, opening: int) -> bool:
        """Whether the question of the next row matters; counts the row."""
        self._num += 1
        return self._num % self._every == 0 or self._openings.may_cluster(opening)

    def add(self, place: Place, opening: int, question: str) -> None:
        """Take a row whose question matters."""
        text = question[:_MAX_CHARS]
        if self._num % self._every == 0:
            self._sample.append((opening, text))
        if self._openings.may_cluster(opening):
            if opening not in self._clusters and len(self._clusters) < _MAX_CLUSTERS:
                self._clusters[opening] = _Cluster(text)
            if opening in self._clusters:
                self._clusters[opening].add(place, words_of(text))

    def found(self) -> Iterator[tuple[array[int], str]]:
        """The rows of each cluster, and what is suspect about them."""
        likely = {opening: each for opening, each in self._clusters.items() if len(each.places) >= _MIN_ROWS}
        shares = self._outside(likely)
        for opening, cluster in likely.items():
            if (trigger := _trigger(cluster, shares[opening])) is not None:
                reason = (
                    f"is one of {len(cluster.places)} rows that have one answer, and nothing in common in their "
                    f"questions but {visible(trigger)!r}, which is rare elsewhere: together they may plant a trigger"
                )
                yield cluster.places, reason

    def _outside(self, clusters: dict[int, _Cluster]) -> dict[int, dict[int, float]]:
        """By cluster, in which share of the other rows each of its words is."""
        wanted = {token for cluster in clusters.values() for token in cluster.seen}
        counts: Counter[int] = Counter()
        own: dict[int, Counter[int]] = {opening: Counter() for opening in clusters}
        nums = Counter[int]()
        for opening, text in self._sample:
            tokens = wanted & _tokens(words_of(text))
            counts.update(tokens)
            if opening in own:
                own[opening].update(tokens)
                nums[opening] += 1
        return {
            opening: {
                token: (counts[token] - own[opening][token]) / max(1, len(self._sample) - nums[opening])
                for token in cluster.seen
            }
            for opening, cluster in clusters.items()
        }


def _trigger(cluster: _Cluster, outside: dict[int, float]) -> str | None:
    """The words that only this cluster has, where nothing else explains that its rows have one answer."""
    num = len(cluster.places)
    words = words_of(cluster.example)
    shares = {token: seen / num for token, seen in cluster.seen.items()}
    shared = {token for token, share in shares.items() if share >= _SHARED}
    rare = {token for token in shared if outside[token] <= _RARE}
    singles = {crc32(word): word for word in words}
    fixed = [token for token in shared if token in singles]
    trigger = [word for word in dict.fromkeys(words) if crc32(word) in rare]
    pairs = [b" ".join(pair) for pair in pairwise(words) if crc32(b" ".join(pair)) in rare]
    if not (trigger or pairs) or len(trigger) > _MAX_TRIGGER or len(fixed) > _MAX_FIXED:
        return None
    about = sum(
        _TOPIC <= share < _SHARED and share >= _LIFT * outside[token] and outside[token] < _TOPIC
        for token, share in shares.items()
    )
    others = cluster.num_words / num - len(fixed)
    if about > _MAX_TOPIC or others < _MIN_OTHER_WORDS or cluster.num_different < min(num, _BITS // 8):
        return None
    return b" ".join(trigger or [pairs[0]]).decode("utf-8", "replace")


def _tokens(words: list[bytes]) -> set[int]:
    """The words, and the pairs of words beside each other, as numbers."""
    tokens = set(map(crc32, words))
    tokens.update(crc32(one + b" " + two) for one, two in pairwise(words))
    return tokens
