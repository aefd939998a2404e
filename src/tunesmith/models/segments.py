"""A row cut into segments that must not see each other, and how a kernel for sequences end to end is told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class Segment:
    """A stretch of a row; `prompt` is the number of an earlier segment that this one continues, or None."""

    length: int
    prompt: int | None = None


@dataclass(frozen=True)
class Spread:
    """All segments for one call of a kernel that takes sequences end to end; keys of a prompt precede the answer's."""

    query_starts: Any
    """Where in the row each segment begins, and where the last one ends."""
    key_places: Any
    """Where in the row the keys of each segment lie, segment after segment; a shared prompt is there once for each.
    Behind the end of the last segment's there may be some that nobody looks at."""
    key_starts: Any
    longest_query: int
    longest_key: int
    num_copies: int = 1
    """Rows that `copies` has at least."""

    @property
    def is_plain(self) -> bool:
        """Whether every key is used by its own segment alone."""
        return int(self.key_starts[-1]) == int(self.query_starts[-1])

    @cached_property
    def copies(self) -> Any:
        """The way back: of each place in the row where its keys went, one row per copy; -1 where there are fewer."""
        places = self.key_places.numpy()[: int(self.key_starts[-1])]
        order = numpy.argsort(places, kind="stable")
        counts = numpy.bincount(places, minlength=int(self.query_starts[-1]))
        found = numpy.full((max(self.num_copies, int(counts.max())), len(counts)), -1)
        found[numpy.arange(len(places)) - starts(counts)[places[order]], places[order]] = order
        return torch.from_numpy(found)


def spread_of(segments: Sequence[Segment]) -> Spread:
    """On the CPU; the keys of a segment are its prompt's, where it continues one, and its own."""
    lengths = numpy.array([segment.length for segment in segments])
    prompts = numpy.array([-1 if segment.prompt is None else segment.prompt for segment in segments])
    begins = starts(lengths)
    pieces = numpy.stack([numpy.where(prompts < 0, 0, lengths[prompts]), lengths], axis=1)
    # of a piece without tokens it does not matter where it begins
    piece_begins = numpy.stack([begins[prompts], begins[:-1]], axis=1).ravel()
    num_keys = pieces.sum(axis=1)
    return Spread(
        query_starts=torch.from_numpy(begins.astype(numpy.int32)),
        key_places=torch.from_numpy(ranges(piece_begins, pieces.ravel())),
        key_starts=torch.from_numpy(starts(num_keys).astype(numpy.int32)),
        longest_query=int(lengths.max()),
        longest_key=int(num_keys.max()),
    )


@dataclass(frozen=True)
class Form:
    """The sizes of a spread: rows of one form can be computed by one recording of what a device has to do."""

    num_tokens: int
    num_segments: int
    num_shared: int
    """Keys beyond one for each token: those of prompts, once more for every answer."""
    num_copies: int
    """How often a key is used at most; 1 where no prompt is shared."""
    longest: int

    def covers(self, other: Form, most: float) -> bool:
        """Whether rows of the other form can be filled up to this one without computing `most` times as much."""
        is_wide_enough = (
            self.num_segments >= other.num_segments
            and self.longest >= other.longest
            and self.num_shared >= other.num_shared
            and self.num_copies >= other.num_copies
        )
        is_alike = (self.num_copies == 1) == (other.num_copies == 1)
        return is_wide_enough and is_alike and other.num_tokens <= self.num_tokens <= most * other.num_tokens


def form_of(segments: Sequence[Segment]) -> Form:
    """A form that many rows have, and that these segments can be filled up to."""
    prompts = Counter(segment.prompt for segment in segments if segment.prompt is not None)
    num_shared = sum(segments[number].length * num for number, num in prompts.items())
    longest = max(segment.length + (segments[segment.prompt].length if segment.prompt is not None else 0)
                  for segment in segments)  # fmt: skip
    num_tokens = _rounded(sum(segment.length for segment in segments))
    return Form(
        num_tokens=num_tokens,
        num_segments=_power_of_two(len(segments) + 2, least=32),
        num_shared=_rounded(num_shared) if prompts else 0,
        num_copies=1 + max(prompts.values(), default=0),
        longest=_power_of_two(max(longest, num_tokens // 16), least=256),
    )


def filled_up(segments: Sequence[Segment], form: Form) -> tuple[Segment, ...]:
    """With one or two more segments, so that the row is as long as the form says."""
    missing = form.num_tokens - sum(segment.length for segment in segments)
    first = min(missing, form.longest)
    return (*segments, *(Segment(length) for length in (first, missing - first) if length))


def spread_in(segments: Sequence[Segment], form: Form) -> Spread:
    """A row that was filled up, spread in its form: the starts are filled up with segments without tokens, and the
    keys with some that nobody looks at."""
    spread = spread_of(segments)
    num_keys, most_keys = len(spread.key_places), form.num_tokens + form.num_shared
    assert len(segments) <= form.num_segments
    assert num_keys <= most_keys, "a kernel would read what is not there"
    return Spread(
        query_starts=_lengthened(spread.query_starts, form.num_segments + 1, form.num_tokens),
        key_places=_lengthened(spread.key_places, most_keys, 0),
        key_starts=_lengthened(spread.key_starts, form.num_segments + 1, num_keys),
        longest_query=form.longest,
        longest_key=form.longest,
        num_copies=form.num_copies,
    )


def _rounded(num: int) -> int:
    """Up to one of few sizes: at most 64 between a number and its double."""
    step = max(256, _power_of_two(num, least=1) // 128)
    return -(-num // step) * step


def _power_of_two(num: int, least: int) -> int:
    return max(least, 1 << (num - 1).bit_length())


def _lengthened(values: Any, num: int, fill: int) -> Any:
    return torch.nn.functional.pad(values, (0, num - len(values)), value=fill)


def moved(tensor: Any, device: Any) -> Any:
    """On the device, without waiting for what it is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def starts(lengths: Any) -> Any:
    """Where each of these begins when they lie end to end, and where the last one ends."""
    return numpy.concatenate(([0], numpy.cumsum(lengths, dtype=numpy.int64)))


def ranges(begins: Any, lengths: Any) -> Any:
    """`begin`, `begin` + 1, … for `length` numbers, of every pair, end to end."""
    first = starts(lengths)
    return numpy.arange(first[-1]) + numpy.repeat(begins - first[:-1], lengths)
