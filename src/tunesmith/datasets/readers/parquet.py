"""Reads the rows of a Parquet file as lines of JSON, batch by batch; only the columns that somebody reads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tunesmith.core.errors import DataError
from tunesmith.datasets.formats.formats import FIELDS
from tunesmith.datasets.readers.text import Block

if TYPE_CHECKING:
    from tunesmith.datasets.report import Unit

_BATCH_ROWS = 512
_CHUNK = 1 << 20
_JSON_COLUMNS = ("tools", "tool_calls")  # of free form, so other tools keep them as a text of JSON


class ParquetReader:
    """One Parquet file, open; iterating yields its rows once. Has the face of a `LineReader`."""

    unit: Unit = "row"

    def __init__(self, path: Path, source: int, max_line_bytes: int, wanted: frozenset[str]) -> None:
        self.name = path.name
        self.num_lines = 0
        self.ignored: dict[str, int] = {}
        """Columns that nobody reads, with the number of rows."""
        self._source = source
        self._max_line = max_line_bytes
        self._handle = path.open("rb")
        found = os.fstat(self._handle.fileno())
        self.num_bytes = found.st_size
        self._before = (found.st_size, found.st_mtime_ns)
        self._wanted = FIELDS | wanted
        self.sha256 = ""

    def __enter__(self) -> ParquetReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._handle.close()

    def blocks(self) -> Iterator[Block]:
        """Every row in order, as a line without the fields that are null."""
        self.sha256 = self._hash()
        try:
            with pq.ParquetFile(self._handle, buffer_size=_CHUNK, pre_buffer=False) as table:
                yield from self._rows(table)
        except (pa.ArrowException, OSError) as error:
            where = f"after row {self.num_lines}" if self.num_lines else "at its beginning"
            raise DataError(
                f"{self.name} is not a readable Parquet file ({type(error).__name__} {where}); copy or write it again"
            ) from None

    def finish(self) -> None:
        """Nothing is left to hash: that was done first."""

    def _rows(self, table: Any) -> Iterator[Block]:
        total = table.metadata.num_rows
        names = [name for name in table.schema_arrow.names if name in self._wanted]
        if not names:
            known = ", ".join(sorted(table.schema_arrow.names)[:10])
            raise DataError(
                f"{self.name} has no column that tunesmith reads, only {known}; rename its columns, e.g. to messages"
            )
        for name in names:
            if _holds_bytes(table.schema_arrow.field(name).type):
                raise DataError(
                    f"{self.name}: column {name} holds bytes, not text; write it as a column of strings (UTF-8)"
                )
        self.ignored = {name: total for name in table.schema_arrow.names if name not in self._wanted}
        for batch in table.iter_batches(_BATCH_ROWS, columns=names):
            first = self.num_lines + 1
            lines = [self._line(row, first + place) for place, row in enumerate(batch.to_pylist())]
            self.num_lines += len(lines)
            end = self.num_bytes * self.num_lines // total
            yield from self._split(lines, first, end)
        after = os.fstat(self._handle.fileno())
        if (after.st_size, after.st_mtime_ns) != self._before:
            raise DataError(f"{self.name} changed while it was read; prepare it again when nothing writes to it")

    def _split(self, lines: list[bytes], first: int, end: int) -> Iterator[Block]:
        """The lines as blocks; one that is too long is a block of its own."""
        begin = 0
        for place, line in enumerate(lines):
            if len(line) > self._max_line:
                if begin < place:
                    yield Block(self._source, first + begin, -1, b"\n".join(lines[begin:place]), end)
                yield Block(self._source, first + place, -1, b"", end, num_skipped=len(line))
                begin = place + 1
        if begin < len(lines):
            yield Block(self._source, first + begin, -1, b"\n".join(lines[begin:]), end)

    def _line(self, row: dict[str, Any], number: int) -> bytes:
        try:
            return orjson.dumps(_without_nulls(row), default=_as_text)
        except (TypeError, orjson.JSONEncodeError):
            raise DataError(
                f"{self.name} row {number} holds what JSON cannot; write texts and lists of texts"
            ) from None

    def _hash(self) -> str:
        found = hashlib.sha256()
        while chunk := self._handle.read(_CHUNK):
            found.update(chunk)
        self._handle.seek(0)
        return found.hexdigest()


def _holds_bytes(kind: Any) -> bool:
    """Whether a column, or something inside it, is binary."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    if pa.types.is_binary_view(kind):
        return True
    if pa.types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    return any(_holds_bytes(kind.field(place).type) for place in range(kind.num_fields))


def _as_text(value: Any) -> str:
    """A number or an instant that JSON does not know, as a text; bytes are none."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError
    return str(value)


def _without_nulls(value: Any) -> Any:
    """A column has every field in every row: what is null was not there."""
    if type(value) is dict:
        return {key: _read(key, inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if type(value) is list else value


def _read(key: str, value: Any) -> Any:
    if key in _JSON_COLUMNS and type(value) is str:
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value  # refused by whoever reads it
    return _without_nulls(value)
