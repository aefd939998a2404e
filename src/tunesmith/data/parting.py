"""Parts parsed rows: by kind, and into their splits without copies of earlier examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tunesmith.data.columns import SCHEMA, numbers
from tunesmith.domain.example import Kind, Split


def part_by_kind(batch: Any, kind: Kind | None) -> tuple[Any, list[int]]:
    """The rows of that kind in a parsed batch, and the lines of the others."""
    ours = batch.column("rejected").is_valid() if kind is Kind.PREFERENCE else batch.column("rejected").is_null()
    if ours.true_count == batch.num_rows:
        return batch, []
    return batch.filter(ours), batch.column("line").filter(pc.invert(ours)).to_pylist()


def keys_of(batch: Any) -> list[int]:
    """64 bits of the id of each row of a parsed batch."""
    keys: list[int] = batch.column("key").to_pylist()
    return keys


def part(batch: Any, keep: bytes) -> Iterator[tuple[Split, Any]]:
    """Part a parsed batch into its splits; a row is kept where `keep` is 1."""
    kept = pc.equal(numbers(pa.int8(), keep), pa.scalar(1, pa.int8()))
    for place, split in enumerate(Split):
        mask = pc.and_(kept, pc.equal(batch.column("split"), pa.scalar(place, pa.int8())))
        rows = batch.filter(mask)
        if rows.num_rows:
            yield split, rows.select(SCHEMA.names)
