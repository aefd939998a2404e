"""The columns of a dataset: one row per example, messages as nested columns that any Parquet tool can read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tunesmith.domain.dataset import ROLE_OF_CODE, Kind, Split

_ROLES = ("system", "user", "assistant", "tool")
_LETTERS = "".join(ROLE_OF_CODE).encode()
_ROLE_INDEX = bytes.maketrans(_LETTERS, bytes(_ROLES.index(role) for role, _ in ROLE_OF_CODE.values()))
_WEIGHT = bytes.maketrans(_LETTERS, bytes(weight for _, weight in ROLE_OF_CODE.values()))
_SPLITS = tuple(Split)

_MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("weight", pa.int8(), nullable=False),
    ]
)
_MESSAGES = pa.list_(pa.field("element", _MESSAGE, nullable=False))
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("messages", _MESSAGES, nullable=False),  # the prompt and, after it, the answer to learn
        pa.field("num_prompt", pa.int32(), nullable=False),  # follows from the weights; for other tools
        pa.field("rejected", _MESSAGES),
        pa.field("num_chars", pa.int32(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
    ]
)
_PARSED = SCHEMA.append(pa.field("key", pa.uint64())).append(pa.field("split", pa.int8()))
"""Before the splits part: with 64 bits of the id, to find copies, and the place of the split in `Split`."""

ParsedRow = tuple[str, str, int, float, int, str, list[str]]
"""A valid row: id, group, place of its split, score, line, shape, texts. A bare tuple, for speed."""


def to_batch(rows: Sequence[ParsedRow], source: int) -> Any:
    """Rows as columns."""
    if not rows:
        return pa.record_batch([pa.array([], field.type) for field in _PARSED], schema=_PARSED)
    ids, groups, splits, scores, lines, shapes, contents = zip(*rows, strict=True)
    num = len(rows)
    columns = [
        pa.array(ids, pa.string(), size=num),
        pa.array(groups, pa.string(), size=num),
        *_message_columns(shapes, contents),
        _numbers(pa.int32(), array("i", [sum(map(len, texts)) for texts in contents])),
        pa.array(scores, pa.float64(), size=num),
        _numbers(pa.int32(), array("i", [source]) * num),
        _numbers(pa.int64(), array("q", lines)),
        _numbers(pa.uint64(), array("Q", [int(example_id[:16], 16) for example_id in ids])),
        _numbers(pa.int8(), bytes(splits)),
    ]
    return pa.record_batch(columns, schema=_PARSED)


def _message_columns(shapes: Sequence[str], contents: Sequence[list[str]]) -> tuple[Any, Any, Any]:
    """The columns messages, num_prompt and rejected."""
    num_prompts = _numbers(pa.int32(), array("i", [shape.find("a") for shape in shapes]))
    if not any("|" in shape for shape in shapes):
        return _message_lists(shapes, contents), num_prompts, pa.nulls(len(shapes), _MESSAGES)
    chosen, _, rejected = zip(*(shape.partition("|") for shape in shapes), strict=True)
    messages = _message_lists(chosen, [texts[: len(shape)] for shape, texts in zip(chosen, contents, strict=True)])
    worse = [texts[len(shape) :] for shape, texts in zip(chosen, contents, strict=True)]
    return messages, num_prompts, _message_lists(rejected, worse, mask=pa.array([not shape for shape in rejected]))


def _message_lists(shapes: Sequence[str], contents: Sequence[list[str]], mask: Any = None) -> Any:
    letters = "".join(shapes).encode()
    indices = _numbers(pa.int8(), letters.translate(_ROLE_INDEX))
    roles = pa.DictionaryArray.from_arrays(indices, pa.array(_ROLES)).dictionary_decode()
    texts = pa.array(list(chain.from_iterable(contents)), pa.string(), size=len(letters))
    weights = _numbers(pa.int8(), letters.translate(_WEIGHT))
    messages = pa.StructArray.from_arrays([roles, texts, weights], fields=list(_MESSAGE))
    ends = _numbers(pa.int32(), array("i", accumulate(map(len, shapes), initial=0)))
    return pa.ListArray.from_arrays(ends, messages, type=_MESSAGES, mask=mask)


def _numbers(kind: Any, values: bytes | array[int]) -> Any:
    """An Arrow array over the very bytes of these numbers."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def batch_to_bytes(batch: Any, note: bytes) -> bytes:
    """A batch, and a note beside it, for another process."""
    sink = pa.BufferOutputStream()
    marked = batch.replace_schema_metadata({"note": note})
    with pa.ipc.new_stream(sink, marked.schema) as stream:
        stream.write_batch(marked)
    return bytes(sink.getvalue())


def batch_from_bytes(data: bytes) -> tuple[Any, bytes]:
    with pa.ipc.open_stream(data) as stream:
        batch = stream.read_next_batch()
    return batch.replace_schema_metadata(None), batch.schema.metadata[b"note"]


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
    kept = pc.equal(_numbers(pa.int8(), keep), pa.scalar(1, pa.int8()))
    for place, split in enumerate(_SPLITS):
        mask = pc.and_(kept, pc.equal(batch.column("split"), pa.scalar(place, pa.int8())))
        rows = batch.filter(mask)
        if rows.num_rows:
            yield split, rows.select(SCHEMA.names)
