"""From tokenised examples to micro-batches: items, and how many of them share one forward and backward pass.

An *item* is what one example makes the model compute: a prompt, once, and the completions that continue it. A
*micro-batch* puts items into one row without padding (`packed`, see `attention`), or one completion per padded row
(`padded`). Both give the same log-probabilities. Nothing is truncated.

Micro-batches are built at every step while a fast device waits. So an item caches its tokens as arrays, and a
micro-batch is built with a few array operations, never token by token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy
import torch

from tunesmith.models.chat import Tokenized
from tunesmith.models.segments import Segment, VarlenLayout, ranges, starts, varlen_layout


@dataclass(frozen=True)
class Completion:
    """An answer to a prompt; `loss_mask[i]` says whether token i counts in the loss."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    is_chosen: bool = True
    """Whether to learn this answer (chosen) or to avoid it (rejected)."""

    @cached_property
    def num_trained(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class Item:
    """A prompt, which may be empty, and one or more completions of it."""

    id: str
    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    counts_context: bool = False
    """Whether the context tokens of the first conversation are measured too, in a span of their own."""
    num_rewritten: int = 0
    """Earlier answers that the template renders differently than the model generates them: they are not trained."""

    def __len__(self) -> int:
        """Number of tokens that go through the model when packed."""
        return self._num_tokens

    @cached_property
    def _num_tokens(self) -> int:
        return len(self.prompt) + sum(len(completion.ids) for completion in self.completions)

    @cached_property
    def longest(self) -> int:
        """Number of tokens of its longest conversation."""
        return len(self.prompt) + max(len(completion.ids) for completion in self.completions)

    @cached_property
    def num_trained(self) -> int:
        return sum(completion.num_trained for completion in self.completions)

    @cached_property
    def num_context(self) -> int:
        """Number of context tokens of the first conversation; its very first token has no prediction."""
        return len(self.prompt) + len(self.completions[0].ids) - 1 - self.completions[0].num_trained

    @cached_property
    def arrays(self) -> Arrays:
        """The tokens as arrays, computed once."""
        return _item_arrays(self)


@dataclass(frozen=True)
class Arrays:
    """An item's tokens as arrays, and its target tokens: span, id and predicting position of each."""

    ids: Any
    """The prompt, then every completion."""
    bounds: Any
    """Where the prompt ends in `ids`, then where each completion ends."""
    tokens: Any
    sources: Any
    """Predicting positions in the conversation, prompt included."""
    packed_sources: Any
    """The same positions as indices into `ids`, where completions follow each other."""
    spans: Any
    """0 for the context, 1 for the first completion, and so on."""


def _item_arrays(item: Item) -> Arrays:
    num_prompt = len(item.prompt)
    ends = list(accumulate((len(completion.ids) for completion in item.completions), initial=num_prompt))
    ids = numpy.fromiter(
        chain(item.prompt, *(completion.ids for completion in item.completions)), dtype=numpy.int32, count=ends[-1]
    )
    context = numpy.arange(1, num_prompt if item.counts_context else 1)
    tokens, sources, packed_sources, spans = [ids[context]], [context - 1], [context - 1], [numpy.zeros_like(context)]
    for number, completion in enumerate(item.completions):
        is_trained = numpy.fromiter(completion.loss_mask, dtype=bool, count=len(completion.ids))
        is_wanted = is_trained.copy()
        if number == 0 and item.counts_context:
            is_wanted[:] = True
        if num_prompt == 0:
            is_wanted[:1] = False  # nothing predicts the first token of a conversation
        wanted = numpy.flatnonzero(is_wanted)
        tokens.append(ids[ends[number] + wanted])
        sources.append(num_prompt + wanted - 1)
        packed_sources.append(numpy.where(wanted > 0, ends[number] + wanted - 1, num_prompt - 1))
        spans.append(numpy.where(is_trained[wanted], number + 1, 0))
    return Arrays(
        ids,
        numpy.array(ends),
        *(_concatenate(parts, numpy.int32) for parts in (tokens, sources, packed_sources, spans)),
    )


def single(tokens: Tokenized) -> Item:
    """Return the item of one conversation."""
    return Item(tokens.id, (), (Completion(tokens.ids, tokens.loss_mask),), num_rewritten=tokens.num_rewritten)


def with_shared_prompt(
    item_id: str, conversations: Sequence[Tokenized], are_chosen: Sequence[bool], *, counts_context: bool = False
) -> Item:
    """Return one item for conversations with a common beginning, computed once up to the first trained token."""
    shared = min(tokens.loss_mask.index(True) for tokens in conversations)
    first = conversations[0].ids
    for tokens in conversations[1:]:
        pairs = enumerate(zip(first[:shared], tokens.ids[:shared], strict=False))
        shared = next((index for index, (ours, theirs) in pairs if ours != theirs), min(shared, len(tokens.ids)))
    completions = tuple(
        Completion(tokens.ids[shared:], tokens.loss_mask[shared:], is_chosen)
        for tokens, is_chosen in zip(conversations, are_chosen, strict=True)
    )
    return Item(item_id, first[:shared], completions, counts_context, conversations[0].num_rewritten)


def to_learn(item: Item) -> Tokenized | None:
    """Return the chosen conversation of an item with its prompt; None if all its completions are rejected ones."""
    for completion in item.completions:
        if completion.is_chosen:
            return Tokenized(item.id, item.prompt + completion.ids, (False,) * len(item.prompt) + completion.loss_mask)
    return None


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and the positions of the target tokens in it.

    A *span* is a sum of log-probabilities: each item has one for its context, then one per completion.
    """

    ids: Any
    positions: Any
    segments: tuple[Segment, ...] | None
    """None for padded rows."""
    columns: Any
    """The columns whose logits are computed."""
    picks: Any
    """For each target token, the index of its logits: row × number of columns + index among the columns."""
    wanted: Any
    """The ids of the target tokens."""
    spans: Any
    """The span of each target token."""
    num_spans: int

    @cached_property
    def varlen(self) -> VarlenLayout | None:
        """The segments as arguments of the attention kernel; None for padded rows."""
        return None if self.segments is None else varlen_layout(self.segments)


def packed(items: Sequence[Item]) -> MicroBatch:
    """Put all items into one row without padding; completions of one prompt share its computation."""
    arrays = [item.arrays for item in items]
    origins = starts([len(item) for item in items])
    segments: list[Segment] = []
    begins: list[int] = []  # position of the first token of each prompt and completion
    lengths: list[int] = []
    for item in items:
        num_prompt, num_completions = len(item.prompt), len(item.completions)
        answers = [len(completion.ids) for completion in item.completions]
        begins += [0] + [num_prompt] * num_completions
        lengths += [num_prompt, *answers]
        if num_completions > 1 and num_prompt:
            prompt = len(segments)
            segments.append(Segment(num_prompt))
            segments += [Segment(length, prompt) for length in answers]
        else:  # a single completion needs no segment of its own
            segments += [Segment(num_prompt + length) for length in answers]
    num_wanted = [len(one.tokens) for one in arrays]
    return _micro_batch(
        ids=_concatenate([one.ids for one in arrays])[None],
        positions=ranges(numpy.array(begins, dtype=numpy.int64), numpy.array(lengths, dtype=numpy.int64))[None],
        segments=tuple(segments),
        rows=0,
        sources=_concatenate([one.packed_sources for one in arrays]) + numpy.repeat(origins[:-1], num_wanted),
        items=items,
    )


def padded(items: Sequence[Item], pad_id: int) -> MicroBatch:
    """Put each completion with its prompt into a row of its own, padded on the right."""
    width = max(item.longest for item in items)
    ids = numpy.full((sum(len(item.completions) for item in items), width), pad_id)
    first_rows = starts([len(item.completions) for item in items])
    rows, arrays = [], [item.arrays for item in items]
    for first, one in zip(first_rows, arrays, strict=False):
        num_prompt = one.bounds[0]
        for row, (start, end) in enumerate(pairwise(one.bounds), start=first):
            ids[row, :num_prompt] = one.ids[:num_prompt]
            ids[row, num_prompt : num_prompt + end - start] = one.ids[start:end]
        rows.append(first + numpy.maximum(one.spans - 1, 0))
    return _micro_batch(
        ids=ids,
        positions=numpy.tile(numpy.arange(width), (len(ids), 1)),
        segments=None,
        rows=_concatenate(rows),
        sources=_concatenate([one.sources for one in arrays]),
        items=items,
    )


@dataclass(frozen=True)
class Packer:
    """Groups items into micro-batches of at most `max_tokens` tokens, padding included; a longer item gets its own."""

    max_tokens: int
    pad_id: int
    is_packing: bool

    def groups(self, items: Sequence[Item]) -> list[list[int]]:
        """Return groups of indices, one per micro-batch; they depend only on the lengths of the items."""
        if self.is_packing:
            return best_fit([len(item) for item in items], self.max_tokens)
        order = sorted(range(len(items)), key=lambda index: (items[index].longest, index))
        groups: list[list[int]] = []
        num_rows = 0
        for index in order:  # sorted by length, so the added item is the widest of its group
            rows = len(items[index].completions)
            if groups and (num_rows + rows) * items[index].longest <= self.max_tokens:
                groups[-1].append(index)
                num_rows += rows
            else:
                groups.append([index])
                num_rows = rows
        return groups

    def micro_batch(self, items: Sequence[Item]) -> MicroBatch:
        return packed(items) if self.is_packing else padded(items, self.pad_id)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: each size goes into the fullest group that can hold it.

    A size above `capacity` gets a group of its own.
    """
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # remaining capacity and number of each group, sorted
    for index in order:
        size = sizes[index]
        position = bisect_left(free, (size, 0))
        if position < len(free):
            left, number = free.pop(position)
            groups[number].append(index)
            insort(free, (left - size, number))
        else:
            insort(free, (max(0, capacity - size), len(groups)))
            groups.append([index])
    return [sorted(group) for group in groups]


def _micro_batch(
    *, ids: Any, positions: Any, segments: tuple[Segment, ...] | None, rows: Any, sources: Any, items: Sequence[Item]
) -> MicroBatch:
    """`rows` and `sources` say which position predicts each target token."""
    arrays = [item.arrays for item in items]
    first_spans = starts([1 + len(item.completions) for item in items])
    is_column = numpy.zeros(ids.shape[1], dtype=bool)
    is_column[sources] = True
    columns = numpy.flatnonzero(is_column)
    numbers = is_column.cumsum() - 1
    spans = _concatenate([one.spans for one in arrays])
    spans += numpy.repeat(first_spans[:-1], [len(one.spans) for one in arrays])
    return MicroBatch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        segments=segments,
        columns=torch.from_numpy(columns),
        picks=torch.from_numpy(rows * len(columns) + numbers[sources]),
        wanted=torch.from_numpy(_concatenate([one.tokens for one in arrays])),
        spans=torch.from_numpy(spans),
        num_spans=int(first_spans[-1]),
    )


def _concatenate(parts: Sequence[Any], dtype: Any = numpy.int64) -> Any:
    return numpy.concatenate([numpy.empty(0, dtype), *parts], dtype=dtype)
