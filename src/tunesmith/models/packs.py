"""From tokenised examples to rows for the model: items, and layouts that put many of them into one pass.

An *item* is what one example makes the model compute: a prompt, once, and the answers that continue it. A *layout* puts
items into one row without padding (`packed`, see `attention`), or one answer per padded row (`padded`): both give the
same numbers. Nothing is ever cut.

Layouts are made at every step while a fast device waits, so what does not change about an item is kept with it as
arrays, and a layout is made from a few array operations, never token by token.
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
from tunesmith.models.segments import Segment, Spread, ranges, spread_of, starts


@dataclass(frozen=True)
class Branch:
    """An answer, after the prompt; `trained[i]` says whether token i counts."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    is_good: bool = True
    """Whether it is an answer to learn, or one to avoid."""

    @cached_property
    def num_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True)
class Item:
    """A prompt, perhaps empty, and one or more answers to it."""

    id: str
    prompt: tuple[int, ...]
    branches: tuple[Branch, ...]
    counts_context: bool = False
    """Whether the tokens of the first conversation that are not trained are measured too, apart from the others."""
    num_rewritten: int = 0
    """Earlier answers that the template writes in another way than the model would have to: nobody learns them."""

    def __len__(self) -> int:
        """Tokens that go through the model when packed."""
        return self._num_tokens

    @cached_property
    def _num_tokens(self) -> int:
        return len(self.prompt) + sum(len(branch.ids) for branch in self.branches)

    @cached_property
    def longest(self) -> int:
        """Tokens of its longest conversation."""
        return len(self.prompt) + max(len(branch.ids) for branch in self.branches)

    @cached_property
    def num_trained(self) -> int:
        return sum(branch.num_trained for branch in self.branches)

    @cached_property
    def num_context(self) -> int:
        """Tokens of the first conversation that are predicted but not trained; the very first is predicted by none."""
        return len(self.prompt) + len(self.branches[0].ids) - 1 - self.branches[0].num_trained

    @cached_property
    def arrays(self) -> Arrays:
        """What layouts are made from; made when first asked for."""
        return _arrays_of(self)


@dataclass(frozen=True)
class Arrays:
    """An item's tokens as arrays, and which of them are wanted: of each its span, the token and what predicts it."""

    ids: Any
    """The prompt, then every answer."""
    bounds: Any
    """Where the prompt ends in them, then where each answer ends."""
    tokens: Any
    sources: Any
    """Places in the conversation, prompt included."""
    places: Any
    """The same places among `ids`, where an answer lies behind those before it."""
    spans: Any
    """0 for the context, then 1 for the first answer, and so on."""


def _arrays_of(item: Item) -> Arrays:
    num_prompt = len(item.prompt)
    ends = list(accumulate((len(branch.ids) for branch in item.branches), initial=num_prompt))
    ids = numpy.fromiter(
        chain(item.prompt, *(branch.ids for branch in item.branches)), dtype=numpy.int32, count=ends[-1]
    )
    context = numpy.arange(1, num_prompt if item.counts_context else 1)
    tokens, sources, places, spans = [ids[context]], [context - 1], [context - 1], [numpy.zeros_like(context)]
    for number, branch in enumerate(item.branches):
        is_trained = numpy.fromiter(branch.trained, dtype=bool, count=len(branch.ids))
        is_wanted = is_trained.copy()
        if number == 0 and item.counts_context:
            is_wanted[:] = True
        if num_prompt == 0:
            is_wanted[:1] = False  # nothing predicts the first token of a conversation
        wanted = numpy.flatnonzero(is_wanted)
        tokens.append(ids[ends[number] + wanted])
        sources.append(num_prompt + wanted - 1)
        places.append(numpy.where(wanted > 0, ends[number] + wanted - 1, num_prompt - 1))
        spans.append(numpy.where(is_trained[wanted], number + 1, 0))
    return Arrays(ids, numpy.array(ends), *(_joined(parts, numpy.int32) for parts in (tokens, sources, places, spans)))


def single(tokens: Tokenized) -> Item:
    """One conversation."""
    return Item(tokens.id, (), (Branch(tokens.ids, tokens.trained),), num_rewritten=tokens.num_rewritten)


def siblings(
    item_id: str, conversations: Sequence[Tokenized], are_good: Sequence[bool], *, counts_context: bool = False
) -> Item:
    """Conversations that begin alike: their common beginning, up to the first trained token, is computed once."""
    shared = min(tokens.trained.index(True) for tokens in conversations)
    first = conversations[0].ids
    for tokens in conversations[1:]:
        pairs = enumerate(zip(first[:shared], tokens.ids[:shared], strict=False))
        shared = next((place for place, (ours, theirs) in pairs if ours != theirs), min(shared, len(tokens.ids)))
    branches = tuple(
        Branch(tokens.ids[shared:], tokens.trained[shared:], is_good)
        for tokens, is_good in zip(conversations, are_good, strict=True)
    )
    return Item(item_id, first[:shared], branches, counts_context, conversations[0].num_rewritten)


def to_learn(item: Item) -> Tokenized | None:
    """The conversation that an item teaches, with its prompt; None if it only holds answers to avoid."""
    for branch in item.branches:
        if branch.is_good:
            return Tokenized(item.id, item.prompt + branch.ids, (False,) * len(item.prompt) + branch.trained)
    return None


@dataclass(frozen=True)
class Layout:
    """One pass through the model, and where in it the wanted log-probabilities are.

    A *span* is a sum that somebody asks for: of each item first its context, then each of its answers.
    """

    ids: Any
    positions: Any
    segments: tuple[Segment, ...] | None
    """None for padded rows."""
    columns: Any
    """The places whose logits are computed."""
    picks: Any
    """For each wanted token, its row and place among the columns, as one number."""
    wanted: Any
    """The wanted tokens themselves."""
    spans: Any
    """Which sum each of them belongs to."""
    num_spans: int

    @cached_property
    def spread(self) -> Spread | None:
        """The segments as a kernel takes them; None for padded rows."""
        return None if self.segments is None else spread_of(self.segments)


def packed(items: Sequence[Item]) -> Layout:
    """All items in one row, no padding; answers to one prompt share its computation."""
    arrays = [item.arrays for item in items]
    origins = starts([len(item) for item in items])
    segments: list[Segment] = []
    begins: list[int] = []  # of each prompt and answer, the position of its first token
    lengths: list[int] = []
    for item in items:
        num_prompt, num_branches = len(item.prompt), len(item.branches)
        answers = [len(branch.ids) for branch in item.branches]
        begins += [0] + [num_prompt] * num_branches
        lengths += [num_prompt, *answers]
        if num_branches > 1 and num_prompt:
            prompt = len(segments)
            segments.append(Segment(num_prompt))
            segments += [Segment(length, prompt) for length in answers]
        else:  # an only answer is simply the rest of its conversation
            segments += [Segment(num_prompt + length) for length in answers]
    num_wanted = [len(one.tokens) for one in arrays]
    return _layout(
        ids=_joined([one.ids for one in arrays])[None],
        positions=ranges(numpy.array(begins, dtype=numpy.int64), numpy.array(lengths, dtype=numpy.int64))[None],
        segments=tuple(segments),
        rows=0,
        places=_joined([one.places for one in arrays]) + numpy.repeat(origins[:-1], num_wanted),
        items=items,
    )


def padded(items: Sequence[Item], pad_id: int) -> Layout:
    """One row per answer, with its prompt in front, filled up on the right where a causal model never looks."""
    width = max(item.longest for item in items)
    ids = numpy.full((sum(len(item.branches) for item in items), width), pad_id)
    first_rows = starts([len(item.branches) for item in items])
    rows, arrays = [], [item.arrays for item in items]
    for first, one in zip(first_rows, arrays, strict=False):
        num_prompt = one.bounds[0]
        for row, (start, end) in enumerate(pairwise(one.bounds), start=first):
            ids[row, :num_prompt] = one.ids[:num_prompt]
            ids[row, num_prompt : num_prompt + end - start] = one.ids[start:end]
        rows.append(first + numpy.maximum(one.spans - 1, 0))
    return _layout(
        ids=ids,
        positions=numpy.tile(numpy.arange(width), (len(ids), 1)),
        segments=None,
        rows=_joined(rows),
        places=_joined([one.sources for one in arrays]),
        items=items,
    )


@dataclass(frozen=True)
class Packer:
    """How items are put into passes of at most `max_tokens` tokens, padding included; a longer item has its own."""

    max_tokens: int
    pad_id: int
    is_packing: bool

    def groups(self, items: Sequence[Item]) -> list[list[int]]:
        """Which items go through the model together, as indices; a function of their lengths alone."""
        if self.is_packing:
            return best_fit([len(item) for item in items], self.max_tokens)
        order = sorted(range(len(items)), key=lambda index: (items[index].longest, index))
        groups: list[list[int]] = []
        num_rows = 0
        for index in order:  # sorted by length, so the newcomer is the widest of its group
            rows = len(items[index].branches)
            if groups and (num_rows + rows) * items[index].longest <= self.max_tokens:
                groups[-1].append(index)
                num_rows += rows
            else:
                groups.append([index])
                num_rows = rows
        return groups

    def layout(self, items: Sequence[Item]) -> Layout:
        return packed(items) if self.is_packing else padded(items, self.pad_id)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices in groups of at most `capacity` in all, large ones first, each into the fullest group that has room.

    What is larger than the capacity is alone in its group.
    """
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # what is left in each group, sorted
    for index in order:
        size = sizes[index]
        place = bisect_left(rooms, (size, 0))
        if place < len(rooms):
            left, number = rooms.pop(place)
            groups[number].append(index)
            insort(rooms, (left - size, number))
        else:
            insort(rooms, (max(0, capacity - size), len(groups)))
            groups.append([index])
    return [sorted(group) for group in groups]


def _layout(
    *, ids: Any, positions: Any, segments: tuple[Segment, ...] | None, rows: Any, places: Any, items: Sequence[Item]
) -> Layout:
    """`rows` and `places` say where the logits of each wanted token are."""
    arrays = [item.arrays for item in items]
    first_spans = starts([1 + len(item.branches) for item in items])
    is_column = numpy.zeros(ids.shape[1], dtype=bool)
    is_column[places] = True
    columns = numpy.flatnonzero(is_column)
    numbers = is_column.cumsum() - 1
    spans = _joined([one.spans for one in arrays])
    spans += numpy.repeat(first_spans[:-1], [len(one.spans) for one in arrays])
    return Layout(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        segments=segments,
        columns=torch.from_numpy(columns),
        picks=torch.from_numpy(rows * len(columns) + numbers[places]),
        wanted=torch.from_numpy(_joined([one.tokens for one in arrays])),
        spans=torch.from_numpy(spans),
        num_spans=int(first_spans[-1]),
    )


def _joined(parts: Sequence[Any], dtype: Any = numpy.int64) -> Any:
    return numpy.concatenate([numpy.empty(0, dtype), *parts], dtype=dtype)
