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
    """Where in the row the keys of each segment lie, segment after segment; a shared prompt is there once for each."""
    key_starts: Any
    longest_query: int
    longest_key: int

    @property
    def is_plain(self) -> bool:
        """Whether every key is used by its own segment alone."""
        return len(self.key_places) == int(self.query_starts[-1])

    @cached_property
    def copies(self) -> Any:
        """The way back: of each place in the row where its keys went, one row per copy; -1 where there are fewer."""
        places = self.key_places.numpy()
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
