"""Finds near-duplicates: rows whose long answer and whose prompt are both almost the same as an earlier row's.

MinHash with one permutation: of a text's pairs of words (of a prompt: its words), one byte of the lowest hash in each
of 32 bins. The share of equal bytes estimates the Jaccard similarity. Groups of these hashes (bands) find candidates;
the signatures decide. Short answers are never near-duplicates: "positive" and "42" are rightly learnt many times.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from zlib import crc32

from tunesmith.datasets.screens.words import words_of

_NUM_BINS = 32
_NUM_BANDS = 6
_BAND = 4  # bins in a band
_MIN_WORDS = 24  # in an answer
_SLOTS = 1 << 20
_MIN_SAME_ANSWER = 0.84  # of the bins: so many of all pairs of words are the same
_MIN_SAME_PROMPT = 0.5
_RECORD = struct.Struct(f"<Q{_NUM_BINS}s{_NUM_BINS}s{_NUM_BANDS}I")
_LOWEST = struct.Struct(f"<{_NUM_BINS}I")
_BAND_PLACES = range(0, 4 * _BAND * _NUM_BANDS, 4 * _BAND)

Signature = tuple[int, bytes, bytes, tuple[int, ...]]
"""Key of the row, bins of the answer, bins of the prompt, bands of the answer."""


def minhash_signature(key: int, prompt: str, answer: str) -> Signature | None:
    """Return the MinHash signature of a row, or None if its answer is short."""
    words = words_of(answer)
    if len(words) < _MIN_WORDS:
        return None
    lowest = _lowest(map(add, words, words[1:]))
    bands = tuple([crc32(lowest[place : place + 4 * _BAND]) for place in _BAND_PLACES])
    return key, lowest[1::4], _lowest(words_of(prompt))[1::4], bands


def encode_signatures(signatures: Sequence[Signature]) -> bytes:
    """Encode signatures for another process."""
    return b"".join(_RECORD.pack(key, answer, prompt, *bands) for key, answer, prompt, bands in signatures)


def decode_signatures(data: bytes) -> Iterator[Signature]:
    for key, answer, prompt, *bands in _RECORD.iter_unpack(data):
        yield key, answer, prompt, tuple(bands)


class NearDuplicates:
    """The signatures of the latest million rows, so memory is bounded."""

    def __init__(self) -> None:
        self._num = 0
        self._bins = bytearray()
        self._places = array("Q")
        self._slots = [array("I", bytes(4 * _SLOTS)) for _ in range(_NUM_BANDS)]

    def earlier(self, source: int, line: int, row: Signature) -> tuple[int, int] | None:
        """Return source and line of an earlier near-duplicate. If there is none, remember the row."""
        _, answer, prompt, bands = row
        looked_at = set()
        for slots, band in zip(self._slots, bands, strict=True):
            held = slots[band % _SLOTS] - 1
            if held < 0 or held in looked_at:
                continue
            looked_at.add(held)
            begin, middle = held * 2 * _NUM_BINS, held * 2 * _NUM_BINS + _NUM_BINS
            if (
                _share(answer, self._bins[begin:middle]) >= _MIN_SAME_ANSWER
                and _share(prompt, self._bins[middle : middle + _NUM_BINS]) >= _MIN_SAME_PROMPT
            ):
                place = self._places[held]
                return place >> 40, place & ((1 << 40) - 1)
        self._remember(source << 40 | line, answer + prompt, bands)
        return None

    def _remember(self, place: int, bins: bytes, bands: Sequence[int]) -> None:
        index = self._num % _SLOTS
        self._bins[index * 2 * _NUM_BINS : (index + 1) * 2 * _NUM_BINS] = bins
        self._places[index : index + 1] = array("Q", (place,))
        for slots, band in zip(self._slots, bands, strict=True):
            slots[band % _SLOTS] = index + 1
        self._num += 1


def _lowest(parts: Iterable[bytes]) -> bytes:
    """The lowest hash in each bin, four bytes each; 0 in a bin that is empty. Low bits name the bin, high ones decide:
    the second byte is free of both."""
    bins = {value & (_NUM_BINS - 1): value for value in sorted(map(crc32, parts), reverse=True)}
    find = bins.get
    return _LOWEST.pack(*[find(place, 0) for place in range(_NUM_BINS)])


def _share(one: Sequence[int], two: Sequence[int]) -> float:
    """How many of the bins that are not empty in both are the same."""
    pairs = [pair for pair in zip(one, two, strict=True) if pair != (0, 0)]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs) if pairs else 1.0
