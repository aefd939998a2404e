"""Parts parsed rows: by kind, and into their splits without copies of earlier examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tunesmith.datasets.columns import SCHEMA, numbers
from tunesmith.datasets.example import Kind, Split


def kind_of_first(batch: Any) -> Kind:
    """The kind of the first row of a parsed batch."""
    return _kind(batch.slice(0, 1)) if batch.num_rows else Kind.SUPERVISED


def part_by_kind(batch: Any, kind: Kind | None) -> tuple[Any, list[tuple[int, Kind]]]:
    """The rows of that kind in a parsed batch, and the lines of the others with what they are."""
    ours = _are(batch, kind or Kind.SUPERVISED)
    if ours.true_count == batch.num_rows:
        return batch, []
    others = batch.filter(pc.invert(ours))
    lines = others.column("line").to_pylist()
    return batch.filter(ours), [(line, _kind(others.slice(place, 1))) for place, line in enumerate(lines)]


def num_undesirable(batch: Any) -> int:
    """How many rows of a batch hold an answer to avoid, and none to learn."""
    return int(pc.equal(pc.list_value_length(batch.column("messages")), batch.column("num_prompt")).true_count)


def _kind(row: Any) -> Kind:
    return next(kind for kind in Kind if _are(row, kind).true_count)


def _are(batch: Any, kind: Kind) -> Any:
    """Which rows are of that kind; `Example.kind` says the same of an example."""
    rejected = batch.column("rejected")
    if kind is Kind.SUPERVISED:
        return rejected.is_null()
    has_chosen = pc.greater(pc.list_value_length(batch.column("messages")), batch.column("num_prompt"))
    is_pair = pc.and_(has_chosen, pc.fill_null(pc.greater(pc.list_value_length(rejected), 0), False))
    return is_pair if kind is Kind.PREFERENCE else pc.and_(rejected.is_valid(), pc.invert(is_pair))


def keys_of(batch: Any) -> list[int]:
    """64 bits of the id of each row of a parsed batch."""
    keys: list[int] = batch.column("key").to_pylist()
    return keys


def kept_rows(batch: Any, keep: bytes) -> Any:
    """The rows of a parsed batch where `keep` is 1."""
    return batch if 0 not in keep else batch.filter(_is_kept(keep))


def _is_kept(keep: bytes) -> Any:
    return pc.equal(numbers(pa.int8(), keep), pa.scalar(1, pa.int8()))


def part(batch: Any, keep: bytes) -> Iterator[tuple[Split, Any]]:
    """Part a parsed batch into its splits; a row is kept where `keep` is 1."""
    kept = _is_kept(keep)
    for place, split in enumerate(Split):
        mask = pc.and_(kept, pc.equal(batch.column("split"), pa.scalar(place, pa.int8())))
        rows = batch.filter(mask)
        if rows.num_rows:
            yield split, rows.select(SCHEMA.names)
