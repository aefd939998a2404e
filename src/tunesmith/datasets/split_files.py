"""The Parquet files of a dataset, one per split: parsed batches are divided by kind and split, written in row groups,
and read back example by example."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tunesmith.core.errors import DataError
from tunesmith.datasets.columns import SCHEMA, numbers
from tunesmith.datasets.example import Example, Kind, Message, Split, codes_of, decode_message, identity, num_prompt_of
from tunesmith.datasets.report import SplitDigest

_DICTIONARIES = ["score", "source", "messages.list.element.role", "rejected.list.element.role"]
_GROUP_BYTES = 16 << 20
"""A row group is written when it is so large; each split holds one at most."""
_READ_ROWS = 1024
_PLAIN = frozenset("suactd|")
"""Letters of messages that are stored as they are."""


class SplitWriter:
    """Writes one split: batches gather into row groups, so memory is bounded."""

    def __init__(self, path: Path) -> None:
        self.digest = SplitDigest()
        self.lengths: Counter[int] = Counter()
        """Examples by the number of binary digits of their number of characters."""
        self.total_score = 0.0
        self.num_undesirable = 0
        self._batches: list[Any] = []
        self._num_bytes = 0
        self._writer = pq.ParquetWriter(
            path,
            SCHEMA,
            compression="zstd",
            compression_level=1,
            use_dictionary=_DICTIONARIES,
            write_statistics=False,  # of texts and hashes they help nobody, and would copy texts into the footer
        )

    def write(self, batch: Any) -> None:
        """Take the next examples of the split."""
        self.digest.update(batch.column("id").to_pylist())
        self.lengths.update(map(int.bit_length, batch.column("num_chars").to_pylist()))
        self.total_score += pc.sum(batch.column("score")).as_py()
        if batch.column("rejected").null_count < batch.num_rows:
            self.num_undesirable += num_undesirable(batch)
        self._batches.append(batch)
        self._num_bytes += batch.nbytes
        if self._num_bytes >= _GROUP_BYTES:
            self._end_group()

    def finish(self) -> None:
        """Write what is left and close the file; a failure to do so is a failure."""
        self._end_group()
        self._writer.close()

    def close(self) -> None:
        """Give the file back, finished or not: what was not finished is about to be deleted."""
        with contextlib.suppress(Exception):
            self._writer.close()

    def _end_group(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches))
            self._batches = []
            self._num_bytes = 0


def read_examples(path: Path) -> Iterator[Example]:
    """The examples of one split file, in order. Each is checked against its own id: a changed text is refused."""
    try:
        with pq.ParquetFile(path) as source:
            if not source.schema_arrow.equals(SCHEMA):
                raise DataError(f"{path}: its columns are not those of a tunesmith dataset; prepare it again")
            for batch in source.iter_batches(_READ_ROWS):
                yield from _examples(batch, path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({type(error).__name__}); prepare it again") from None


def _examples(batch: Any, path: Path) -> Iterator[Example]:
    names = ("id", "group", "score", "source", "line")
    columns = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    lists = zip(_read_lists(batch.column("messages")), _read_lists(batch.column("rejected")), strict=True)
    for (messages, rejected), (example_id, group, score, source, line) in zip(lists, columns, strict=True):
        codes = codes_of(messages or ())
        shape = codes if rejected is None else f"{codes}|{codes_of(rejected)}"
        texts = [message["content"] for message in (*(messages or ()), *(rejected or ()))]
        if messages is None or example_id != identity(shape, texts):
            raise DataError(f"{path}: example {example_id[:12]}… is not what its id says; prepare the dataset again")
        num_prompt = num_prompt_of(shape)
        prompt, chosen, worse = messages[:num_prompt], messages[num_prompt:], rejected
        if not _PLAIN.issuperset(shape):
            prompt, chosen, worse = (_decode(part, path) for part in (prompt, chosen, worse))
        yield Example(example_id, prompt, chosen, worse, group, score, source, line)


def _decode(stored: Sequence[Message] | None, path: Path) -> Any:
    try:
        return None if stored is None else tuple(map(decode_message, stored))
    except (ValueError, RecursionError):
        raise DataError(f"{path}: holds a tool call that is not one; prepare the dataset again") from None


def _read_lists(column: Any) -> Iterator[tuple[Message, ...] | None]:
    """The lists of a nested column, through flat columns: far quicker than one value at a time."""
    fields = (column.values.field(name).to_pylist() for name in ("role", "content", "weight"))
    messages = [Message(role=role, content=text, weight=weight) for role, text, weight in zip(*fields, strict=True)]
    ends = column.offsets.to_pylist()
    for index, is_there in enumerate(column.is_valid().to_pylist()):
        yield tuple(messages[ends[index] : ends[index + 1]]) if is_there else None


def kind_of_first(batch: Any) -> Kind:
    """The kind of the first row of a parsed batch."""
    return _kind(batch.slice(0, 1)) if batch.num_rows else Kind.SUPERVISED


def part_by_kind(batch: Any, kind: Kind | None) -> tuple[Any, list[tuple[int, Kind]]]:
    """Return the rows of `kind` in a parsed batch, and line and kind of all other rows."""
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
