"""The Parquet form of a split: one row per example, messages as nested columns that any tool can read."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tunesmith.data.rows import Row
from tunesmith.domain.dataset import CODE_OF_ROLE, ROLE_OF_CODE, Example, Message, SplitDigest, identity
from tunesmith.errors import DataError

_ROLES = ("system", "user", "assistant", "tool")
_ROLE_INDEX = bytes.maketrans(
    "".join(ROLE_OF_CODE).encode(), bytes(_ROLES.index(role) for role, _ in ROLE_OF_CODE.values())
)
_WEIGHT = bytes.maketrans("".join(ROLE_OF_CODE).encode(), bytes(weight for _, weight in ROLE_OF_CODE.values()))

_MESSAGE = pa.struct(
    [
        pa.field("role", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("weight", pa.int8(), nullable=False),
    ]
)
_MESSAGES = pa.list_(pa.field("element", _MESSAGE, nullable=False))
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("prompt", _MESSAGES, nullable=False),
        pa.field("chosen", _MESSAGES, nullable=False),
        pa.field("rejected", _MESSAGES),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
    ]
)
_DICTIONARIES = ["score", "source", *(f"{name}.list.element.role" for name in ("prompt", "chosen", "rejected"))]
_BATCH_ROWS = 4096
_BATCH_CHARS = 4 << 20
_GROUP_BYTES = 16 << 20
"""A row group is written when it is so large; three splits may each hold one."""
_READ_ROWS = 1024


class _Messages:
    """One column of message lists under construction."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.contents: list[str] = []

    def append(self, codes: str, contents: list[str]) -> None:
        self.codes.append(codes)
        self.contents += contents

    def to_arrow(self) -> Any:
        codes = "".join(self.codes).encode()
        roles = pa.DictionaryArray.from_arrays(_int8(codes.translate(_ROLE_INDEX)), pa.array(_ROLES))
        texts = pa.array(self.contents, pa.string(), size=len(codes))
        weights = _int8(codes.translate(_WEIGHT))
        messages = pa.StructArray.from_arrays([roles, texts, weights], fields=list(_MESSAGE))
        ends = array("i", accumulate(map(len, self.codes), initial=0))
        offsets = pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)])
        return pa.ListArray.from_arrays(offsets, messages, type=_MESSAGES)


def _int8(values: bytes) -> Any:
    return pa.Array.from_buffers(pa.int8(), len(values), [None, pa.py_buffer(values)])


class SplitWriter:
    """Writes one split: rows gather into batches, batches into row groups, so memory is bounded."""

    def __init__(self, path: Path) -> None:
        self.digest = SplitDigest()
        self.lengths = [0] * 64
        """Examples by the number of binary digits of their number of characters."""
        self.total_score = 0.0
        self._batches: list[Any] = []
        self._clear()
        self._writer = pq.ParquetWriter(
            path,
            SCHEMA,
            compression="zstd",
            compression_level=1,
            use_dictionary=_DICTIONARIES,
            write_statistics=False,  # of texts and hashes they help nobody, and would copy texts into the footer
        )

    def add(self, example_id: str, group: str, row: Row, score: float, source: int, line: int) -> None:
        """Take one example."""
        codes, contents, num_prompt, num_chosen = row
        middle = num_prompt + num_chosen
        num_chars = sum(map(len, contents))
        self.lengths[num_chars.bit_length()] += 1
        self._num_chars += num_chars
        self._ids.append(example_id)
        self._groups.append(group)
        self._scores.append(score)
        self._sources.append(source)
        self._lines.append(line)
        self._prompt.append(codes[:num_prompt], contents[:num_prompt])
        self._chosen.append(codes[num_prompt:middle], contents[num_prompt:middle])
        if len(codes) > middle:
            self._rejected.append(codes[middle:], contents[middle:])
        if len(self._ids) >= _BATCH_ROWS or self._num_chars >= _BATCH_CHARS:
            self._end_batch()

    def finish(self) -> None:
        """Write what is left and close the file; a failure to do so is a failure."""
        if self._ids:
            self._end_batch()
        self._end_group()
        self._writer.close()

    def close(self) -> None:
        """Give the file back, finished or not: what was not finished is about to be deleted."""
        with contextlib.suppress(Exception):
            self._writer.close()

    def _clear(self) -> None:
        self._num_chars = 0
        self._ids: list[str] = []
        self._groups: list[str] = []
        self._scores: list[float] = []
        self._sources = array("i")
        self._lines = array("q")
        self._prompt, self._chosen, self._rejected = _Messages(), _Messages(), _Messages()

    def _end_batch(self) -> None:
        num = len(self._ids)
        rejected = self._rejected.to_arrow() if self._rejected.codes else pa.nulls(num, _MESSAGES)
        columns = [
            pa.array(self._ids, pa.string(), size=num),
            pa.array(self._groups, pa.string(), size=num),
            self._prompt.to_arrow(),
            self._chosen.to_arrow(),
            rejected,
            pa.array(self._scores, pa.float64(), size=num),
            pa.Array.from_buffers(pa.int32(), num, [None, pa.py_buffer(self._sources)]),
            pa.Array.from_buffers(pa.int64(), num, [None, pa.py_buffer(self._lines)]),
        ]
        self._batches.append(pa.record_batch(columns, schema=SCHEMA))
        self.digest.update(self._ids)
        self.total_score += sum(self._scores)
        self._clear()
        if sum(batch.nbytes for batch in self._batches) >= _GROUP_BYTES:
            self._end_group()

    def _end_group(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches))
            self._batches = []


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
    ids, groups, scores, sources, lines = (batch.column(name).to_pylist() for name in names)
    parts = [_message_lists(batch.column(name)) for name in ("prompt", "chosen", "rejected")]
    for index, (prompt, chosen, rejected) in enumerate(zip(*parts, strict=True)):
        if prompt is None or chosen is None:
            raise DataError(f"{path}: an example without prompt or answer; prepare the dataset again")
        messages = (*prompt, *chosen, *(rejected or ()))
        codes = "".join([CODE_OF_ROLE[message["role"], message["weight"]] for message in messages])
        found = identity(codes, [message["content"] for message in messages], len(prompt), len(chosen))
        if found != ids[index]:
            raise DataError(f"{path}: example {ids[index][:12]}… is not what its id says; prepare the dataset again")
        yield Example(found, prompt, chosen, rejected, groups[index], scores[index], sources[index], lines[index])


def _message_lists(column: Any) -> Iterator[tuple[Message, ...] | None]:
    """The lists of a nested column, through flat columns: far quicker than one value at a time."""
    values = column.values
    fields = (values.field(name).to_pylist() for name in ("role", "content", "weight"))
    messages = [Message(role=role, content=text, weight=weight) for role, text, weight in zip(*fields, strict=True)]
    ends = column.offsets.to_pylist()
    for index, is_there in enumerate(column.is_valid().to_pylist()):
        yield tuple(messages[ends[index] : ends[index + 1]]) if is_there else None
