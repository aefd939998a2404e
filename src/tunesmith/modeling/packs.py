"""From tokenised examples to rows for the model: items, and layouts that put many of them into one pass.

An *item* is what one example makes the model compute: a prompt, once, and the answers that continue it. A *layout* puts
items into one row without padding (`packed`, see `attention`), or one answer per padded row (`padded`): both give the
same numbers. Nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tunesmith.modeling.attention import Segment
from tunesmith.modeling.chat import Tokenized


@dataclass(frozen=True)
class Branch:
    """An answer, after the prompt; `trained[i]` says whether token i counts."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    is_good: bool = True
    """Whether it is an answer to learn, or one to avoid."""

    @property
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
        return len(self.prompt) + sum(len(branch.ids) for branch in self.branches)

    @property
    def longest(self) -> int:
        """Tokens of its longest conversation."""
        return len(self.prompt) + max(len(branch.ids) for branch in self.branches)

    @property
    def num_trained(self) -> int:
        return sum(branch.num_trained for branch in self.branches)

    @property
    def num_context(self) -> int:
        """Tokens of the first conversation that are predicted but not trained; the very first is predicted by none."""
        return len(self.prompt) + len(self.branches[0].ids) - 1 - self.branches[0].num_trained


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


@dataclass
class _Wanted:
    """Collects which tokens are wanted, from which place, for which sum."""

    rows: list[int]
    places: list[int]
    tokens: list[int]
    spans: list[int]

    def add(self, row: int, place: int, token: int, span: int) -> None:
        self.rows.append(row)
        self.places.append(place)
        self.tokens.append(token)
        self.spans.append(span)

    def add_item(self, item: Item, span: int, starts: Sequence[tuple[int, int, int]]) -> None:
        """`starts`: of each answer, the row, where its first token lies, and where the prompt's first token lies."""
        if item.counts_context:
            row, _, origin = starts[0]
            for number, token in enumerate(item.prompt[1:]):
                self.add(row, origin + number, token, span)
        for number, (branch, (row, start, origin)) in enumerate(zip(item.branches, starts, strict=True)):
            before = origin + len(item.prompt) - 1  # what predicts the first token of the answer
            for place, (token, is_trained) in enumerate(zip(branch.ids, branch.trained, strict=True)):
                is_context = number == 0 and item.counts_context and not is_trained
                source = start + place - 1 if place else before
                if source >= origin and (is_trained or is_context):
                    self.add(row, source, token, span if is_context else span + 1 + number)


def packed(items: Sequence[Item]) -> Layout:
    """All items in one row, no padding; answers to one prompt share its computation."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    wanted = _Wanted([], [], [], [])
    for item, span in zip(items, _first_spans(items), strict=True):
        origin, prompt = len(ids), None
        if len(item.branches) > 1 and item.prompt:
            prompt = len(segments)
            segments.append(Segment(len(item.prompt)))
        ids += item.prompt
        positions += range(len(item.prompt))
        starts = []
        for branch in item.branches:
            starts.append((0, len(ids), origin))
            # an only answer is simply the rest of its conversation
            alone = len(item.prompt) if prompt is None else 0
            segments.append(Segment(alone + len(branch.ids), prompt))
            ids += branch.ids
            positions += range(len(item.prompt), len(item.prompt) + len(branch.ids))
        wanted.add_item(item, span, starts)
    return _layout([ids], [positions], tuple(segments), wanted, _num_spans(items))


def padded(items: Sequence[Item], pad_id: int) -> Layout:
    """One row per answer, with its prompt in front, filled up on the right where a causal model never looks."""
    rows: list[list[int]] = []
    wanted = _Wanted([], [], [], [])
    for item, span in zip(items, _first_spans(items), strict=True):
        starts = []
        for branch in item.branches:
            starts.append((len(rows), len(item.prompt), 0))
            rows.append([*item.prompt, *branch.ids])
        wanted.add_item(item, span, starts)
    width = max(len(row) for row in rows)
    filled = [row + [pad_id] * (width - len(row)) for row in rows]
    return _layout(filled, [list(range(width))] * len(rows), None, wanted, _num_spans(items))


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
    room: list[int] = []
    for index in order:
        fitting = [(left, number) for number, left in enumerate(room) if left >= sizes[index]]
        if fitting:
            _, number = min(fitting)
            groups[number].append(index)
            room[number] -= sizes[index]
        else:
            groups.append([index])
            room.append(max(0, capacity - sizes[index]))
    return [sorted(group) for group in groups]


def _layout(
    ids: list[list[int]],
    positions: list[list[int]],
    segments: tuple[Segment, ...] | None,
    wanted: _Wanted,
    num_spans: int,
) -> Layout:
    places = torch.tensor(wanted.places, dtype=torch.long)
    columns, found = torch.unique(places, return_inverse=True)  # sorted
    picks = torch.tensor(wanted.rows, dtype=torch.long) * len(columns) + found
    return Layout(
        ids=torch.tensor(ids, dtype=torch.long),
        positions=torch.tensor(positions, dtype=torch.long),
        segments=segments,
        columns=columns,
        picks=picks,
        wanted=torch.tensor(wanted.tokens, dtype=torch.long),
        spans=torch.tensor(wanted.spans, dtype=torch.long),
        num_spans=num_spans,
    )


def _first_spans(items: Sequence[Item]) -> list[int]:
    return [0, *accumulate(1 + len(item.branches) for item in items)][:-1]


def _num_spans(items: Sequence[Item]) -> int:
    return sum(1 + len(item.branches) for item in items)
