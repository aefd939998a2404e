"""Layouts made from arrays hold what a builder that goes token by token writes down; so do groups and spreads."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.models.packs import Completion, Item, MicroBatch, best_fit, packed, padded
from tunesmith.models.segments import Segment


@dataclass
class Written:
    """A layout, written down token by token: slow, and easy to believe."""

    rows: list[list[int]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    wanted: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Row, place, token, span."""

    def want(self, item: Item, span: int, starts: Sequence[tuple[int, int, int]]) -> None:
        """`starts`: of each answer, the row, where its first token lies, and where the prompt's first token lies."""
        if item.counts_context:
            row, _, origin = starts[0]
            for number, token in enumerate(item.prompt[1:]):
                self.wanted.append((row, origin + number, token, span))
        for number, (completion, (row, start, origin)) in enumerate(zip(item.completions, starts, strict=True)):
            before = origin + len(item.prompt) - 1
            for place, (token, is_trained) in enumerate(zip(completion.ids, completion.loss_mask, strict=True)):
                is_context = number == 0 and item.counts_context and not is_trained
                source = start + place - 1 if place else before
                if source >= origin and (is_trained or is_context):
                    self.wanted.append((row, source, token, span if is_context else span + 1 + number))

    def batch(self, num_spans: int, *, is_packed: bool) -> MicroBatch:
        columns, found = torch.unique(numbers(place for _, place, _, _ in self.wanted), return_inverse=True)
        return MicroBatch(
            ids=torch.tensor(self.rows, dtype=torch.long),
            positions=torch.tensor(self.positions, dtype=torch.long),
            segments=tuple(self.segments) if is_packed else None,
            columns=columns,
            picks=numbers(row for row, _, _, _ in self.wanted) * len(columns) + found,
            wanted=numbers(token for _, _, token, _ in self.wanted),
            spans=numbers(span for _, _, _, span in self.wanted),
            num_spans=num_spans,
        )


def numbers(values: Any) -> Any:
    return torch.tensor(list(values), dtype=torch.long)


def first_spans(items: Sequence[Item]) -> list[int]:
    return list(accumulate((1 + len(item.completions) for item in items), initial=0))


def packed_slowly(items: Sequence[Item]) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    written = Written([ids], [positions])
    spans = first_spans(items)
    for item, span in zip(items, spans, strict=False):
        origin, prompt, starts = len(ids), None, []
        if len(item.completions) > 1 and item.prompt:
            prompt = len(written.segments)
            written.segments.append(Segment(len(item.prompt)))
        ids += item.prompt
        positions += range(len(item.prompt))
        for completion in item.completions:
            starts.append((0, len(ids), origin))
            alone = len(item.prompt) if prompt is None else 0
            written.segments.append(Segment(alone + len(completion.ids), prompt))
            ids += completion.ids
            positions += range(len(item.prompt), len(item.prompt) + len(completion.ids))
        written.want(item, span, starts)
    return written.batch(spans[-1], is_packed=True)


def padded_slowly(items: Sequence[Item], pad_id: int) -> MicroBatch:
    written = Written()
    spans = first_spans(items)
    for item, span in zip(items, spans, strict=False):
        starts = []
        for completion in item.completions:
            starts.append((len(written.rows), len(item.prompt), 0))
            written.rows.append([*item.prompt, *completion.ids])
        written.want(item, span, starts)
    width = max(len(row) for row in written.rows)
    written.rows = [row + [pad_id] * (width - len(row)) for row in written.rows]
    written.positions = [list(range(width))] * len(written.rows)
    return written.batch(spans[-1], is_packed=False)


def assert_same(ours: MicroBatch, theirs: MicroBatch) -> None:
    for name in ("ids", "positions", "columns", "picks", "wanted", "spans"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert one.dtype == other.dtype == torch.long, name
        assert one.tolist() == other.tolist(), name
    assert (ours.segments, ours.num_spans) == (theirs.segments, theirs.num_spans)


TOKENS = st.integers(0, 200_000)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(st.lists(TOKENS, min_size=1, max_size=7))
    trained = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return Completion(tuple(ids), tuple(trained), draw(st.booleans()))


ITEMS = st.lists(
    st.builds(
        Item,
        st.just("x"),
        st.lists(TOKENS, max_size=6).map(tuple),
        st.lists(completions(), min_size=1, max_size=4).map(tuple),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(ITEMS)
def test_packed_layout_equals_the_one_written_token_by_token(items: list[Item]) -> None:
    assert_same(packed(items), packed_slowly(items))


@given(ITEMS, st.integers(0, 9))
def test_padded_layout_equals_the_one_written_token_by_token(items: list[Item], pad_id: int) -> None:
    assert_same(padded(items, pad_id), padded_slowly(items, pad_id))


def test_packed_layout_of_nothing_is_an_empty_row() -> None:
    assert_same(packed([]), packed_slowly([]))


@given(ITEMS)
def test_counts_of_an_item_are_those_of_its_tokens(items: list[Item]) -> None:
    for item in items:
        for _ in range(2):  # the second time from what was kept
            assert len(item) == len(item.prompt) + sum(len(completion.ids) for completion in item.completions)
            assert item.longest == max(len(item.prompt + completion.ids) for completion in item.completions)
            assert item.num_trained == sum(sum(completion.loss_mask) for completion in item.completions)
            first = item.completions[0]
            assert item.num_context == len(item.prompt) + len(first.ids) - 1 - sum(first.loss_mask)


def test_an_item_that_was_used_is_still_the_same_value() -> None:
    fresh, used = (Item("x", (1, 2), (Completion((3, 4), (True, False)),)) for _ in range(2))
    packed([used])
    assert len(used) == 4
    assert used == fresh
    assert hash(used) == hash(fresh)
    assert pickle.loads(pickle.dumps(used)) == fresh
    changed = replace(used, prompt=(1, 2, 5))
    assert len(changed) == 5
    assert packed([changed]).ids.tolist() == [[1, 2, 5, 3, 4]]


def best_fit_slowly(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Looks at every group for every size."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        fitting = [(left, number) for number, left in enumerate(room) if left >= sizes[index]]
        if fitting:
            _, number = min(fitting)
            groups[number].append(index)
            room[number] -= sizes[index]
        else:
            groups.append([index])
            room.append(max(0, capacity - sizes[index]))
    return [sorted(group) for group in groups]


@given(st.lists(st.integers(0, 90), max_size=80), st.integers(1, 120))
def test_best_fit_groups_as_the_simple_search_does(sizes: list[int], capacity: int) -> None:
    assert best_fit(sizes, capacity) == best_fit_slowly(sizes, capacity)


@given(ITEMS)
def test_spread_of_a_pack_is_what_the_loop_over_segments_finds(items: list[Item]) -> None:
    batch = packed(items)
    assert batch.segments is not None
    assert batch.varlen is not None
    starts = list(accumulate((segment.length for segment in batch.segments), initial=0))
    places: list[int] = []
    ends = [0]
    for number, segment in enumerate(batch.segments):
        if segment.prompt is not None:
            places += range(starts[segment.prompt], starts[segment.prompt + 1])
        places += range(starts[number], starts[number + 1])
        ends.append(len(places))
    varlen = batch.varlen
    assert (varlen.cu_seqlens_q.tolist(), varlen.cu_seqlens_q.dtype) == (starts, torch.int32)
    assert (varlen.key_indices.tolist(), varlen.key_indices.dtype) == (places, torch.int64)
    assert (varlen.cu_seqlens_k.tolist(), varlen.cu_seqlens_k.dtype) == (ends, torch.int32)
    assert varlen.max_seqlen_q == max(segment.length for segment in batch.segments)
    assert varlen.max_seqlen_k == max(end - start for start, end in pairwise(ends))


def test_padded_rows_have_no_spread() -> None:
    assert padded([Item("x", (1,), (Completion((2,), (True,)),))], 0).varlen is None
