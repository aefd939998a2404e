"""Segments of a packed row, their layout for variable-length attention, and the buckets that CUDA graphs pad to."""

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
    """A stretch of a row; `prompt` is the index of an earlier segment that this one continues, or None."""

    length: int
    prompt: int | None = None


@dataclass(frozen=True)
class VarlenLayout:
    """The arguments of one variable-length attention call; a shared prompt's keys precede those of each completion."""

    cu_seqlens_q: Any
    """Where each segment begins in the row, and where the last one ends."""
    key_indices: Any
    """Indices into the row of each segment's keys, segment after segment; a shared prompt occurs once per completion.
    Entries after the last segment's are padding."""
    cu_seqlens_k: Any
    max_seqlen_q: int
    max_seqlen_k: int
    num_copies: int = 1
    """Minimum number of rows of `copies`."""

    @property
    def is_plain(self) -> bool:
        """Whether no key is shared between segments."""
        return int(self.cu_seqlens_k[-1]) == int(self.cu_seqlens_q[-1])

    @cached_property
    def copies(self) -> Any:
        """Inverse of `key_indices`: for each position of the row, where its copies are; -1 where there are fewer."""
        indices = self.key_indices.numpy()[: int(self.cu_seqlens_k[-1])]
        order = numpy.argsort(indices, kind="stable")
        counts = numpy.bincount(indices, minlength=int(self.cu_seqlens_q[-1]))
        copies = numpy.full((max(self.num_copies, int(counts.max())), len(counts)), -1)
        copies[numpy.arange(len(indices)) - starts(counts)[indices[order]], indices[order]] = order
        return torch.from_numpy(copies)


def varlen_layout(segments: Sequence[Segment]) -> VarlenLayout:
    """Return the layout, on the CPU. A segment's keys are those of the prompt that it continues, then its own."""
    lengths = numpy.array([segment.length for segment in segments])
    prompts = numpy.array([-1 if segment.prompt is None else segment.prompt for segment in segments])
    begins = starts(lengths)
    pieces = numpy.stack([numpy.where(prompts < 0, 0, lengths[prompts]), lengths], axis=1)
    # the start of a piece without tokens does not matter
    piece_begins = numpy.stack([begins[prompts], begins[:-1]], axis=1).ravel()
    num_keys = pieces.sum(axis=1)
    return VarlenLayout(
        cu_seqlens_q=torch.from_numpy(begins.astype(numpy.int32)),
        key_indices=torch.from_numpy(ranges(piece_begins, pieces.ravel())),
        cu_seqlens_k=torch.from_numpy(starts(num_keys).astype(numpy.int32)),
        max_seqlen_q=int(lengths.max()),
        max_seqlen_k=int(num_keys.max()),
    )


@dataclass(frozen=True)
class GraphBucket:
    """Static sizes of a CUDA graph: every row that is padded to them can run as the same captured graph."""

    num_tokens: int
    num_segments: int
    num_shared: int
    """Keys beyond one per token: the prompt's, once more for every completion."""
    num_copies: int
    """Maximum number of uses of one key; 1 where no prompt is shared."""
    longest: int

    def fits_in(self, other: GraphBucket, max_ratio: float) -> bool:
        """Whether rows of this bucket can be padded to the other, with at most `max_ratio` times as many tokens."""
        is_large_enough = (
            other.num_segments >= self.num_segments
            and other.longest >= self.longest
            and other.num_shared >= self.num_shared
            and other.num_copies >= self.num_copies
            # what is missing must fit into two padding segments; rounding may have hidden up to one `longest` more
            and other.num_tokens - self.num_tokens <= other.longest
        )
        both_share = (other.num_copies == 1) == (self.num_copies == 1)
        return is_large_enough and both_share and self.num_tokens <= other.num_tokens <= max_ratio * self.num_tokens


def graph_bucket(segments: Sequence[Segment]) -> GraphBucket:
    """Return the bucket for these segments; sizes are rounded up so that many rows share one."""
    prompts = Counter(segment.prompt for segment in segments if segment.prompt is not None)
    num_shared = sum(segments[number].length * num for number, num in prompts.items())
    longest = max(segment.length + (segments[segment.prompt].length if segment.prompt is not None else 0)
                  for segment in segments)  # fmt: skip
    num_tokens = _round_up(sum(segment.length for segment in segments))
    return GraphBucket(
        num_tokens=num_tokens,
        num_segments=_power_of_two(len(segments) + 2, least=32),
        num_shared=_round_up(num_shared) if prompts else 0,
        num_copies=1 + max(prompts.values(), default=0),
        longest=_power_of_two(max(longest, num_tokens // 16), least=256),
    )


def pad_to_bucket(segments: Sequence[Segment], bucket: GraphBucket) -> tuple[Segment, ...]:
    """Append one or two padding segments so that the row has the bucket's number of tokens."""
    missing = bucket.num_tokens - sum(segment.length for segment in segments)
    first = min(missing, bucket.longest)
    return (*segments, *(Segment(length) for length in (first, missing - first) if length))


def varlen_layout_in(segments: Sequence[Segment], bucket: GraphBucket) -> VarlenLayout:
    """Return the layout of padded segments with the bucket's static sizes: empty segments and unused keys are added."""
    varlen = varlen_layout(segments)
    num_keys, max_keys = len(varlen.key_indices), bucket.num_tokens + bucket.num_shared
    assert len(segments) <= bucket.num_segments
    assert num_keys <= max_keys, "a kernel would read out of bounds"
    return VarlenLayout(
        cu_seqlens_q=_pad_to(varlen.cu_seqlens_q, bucket.num_segments + 1, bucket.num_tokens),
        key_indices=_pad_to(varlen.key_indices, max_keys, 0),
        cu_seqlens_k=_pad_to(varlen.cu_seqlens_k, bucket.num_segments + 1, num_keys),
        max_seqlen_q=bucket.longest,
        max_seqlen_k=bucket.longest,
        num_copies=bucket.num_copies,
    )


def _round_up(num: int) -> int:
    """Round up to one of few sizes: at most 64 between a number and its double."""
    step = max(256, _power_of_two(num, least=1) // 128)
    return -(-num // step) * step


def _power_of_two(num: int, least: int) -> int:
    return max(least, 1 << (num - 1).bit_length())


def _pad_to(values: Any, num: int, fill: int) -> Any:
    return torch.nn.functional.pad(values, (0, num - len(values)), value=fill)


def to_device(tensor: Any, device: Any) -> Any:
    """Copy a tensor to the device without synchronizing with it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def starts(lengths: Any) -> Any:
    """Return where each of these begins when they are concatenated, and where the last one ends."""
    return numpy.concatenate(([0], numpy.cumsum(lengths, dtype=numpy.int64)))


def ranges(begins: Any, lengths: Any) -> Any:
    """Concatenate `begin`, `begin` + 1, … (`length` numbers) of every pair."""
    first = starts(lengths)
    return numpy.arange(first[-1]) + numpy.repeat(begins - first[:-1], lengths)
