"""A row cut into segments that must not see each other, and how a kernel for sequences end to end is told of them."""

from __future__ import annotations

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
        found = numpy.full((int(counts.max()), len(counts)), -1)
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
    """The sizes of a spread: rows of the same form can be computed by one recording of what a device has to do."""

    num_tokens: int
    num_segments: int
    num_keys: int
    num_copies: int
    longest: int


def filled_up(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """With one more segment, so that the row has one of few lengths."""
    num_tokens = sum(segment.length for segment in segments)
    missing = _rounded(num_tokens) - num_tokens
    return (*segments, Segment(missing)) if missing else tuple(segments)


def fixed_form(segments: Sequence[Segment]) -> tuple[Form, Spread]:
    """A form that many rows have, and these segments spread in it: the starts are filled up with segments without
    tokens, and the keys with some that nobody looks at."""
    spread = spread_of(segments)
    num_tokens, num_keys = int(spread.query_starts[-1]), len(spread.key_places)
    form = Form(
        num_tokens=num_tokens,
        num_segments=_power_of_two(len(segments), least=32),
        num_keys=num_keys if spread.is_plain else _rounded(num_keys),
        num_copies=1 if spread.is_plain else len(spread.copies),
        longest=_power_of_two(max(spread.longest_query, spread.longest_key), least=256),
    )
    return form, Spread(
        query_starts=_lengthened(spread.query_starts, form.num_segments + 1, num_tokens),
        key_places=_lengthened(spread.key_places, form.num_keys, 0),
        key_starts=_lengthened(spread.key_starts, form.num_segments + 1, num_keys),
        longest_query=form.longest,
        longest_key=form.longest,
    )


def _rounded(num: int) -> int:
    """Up to one of few sizes: 16 between a number and its double."""
    step = max(256, _power_of_two(num, least=1) // 32)
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
