"""The columns of a dataset: one row per example, messages as nested columns that any Parquet tool can read."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

from tunesmith.datasets.example import ROLE_OF_CODE, num_prompt_of

_ROLES = tuple(dict.fromkeys(role for role, _ in ROLE_OF_CODE.values()))
_LETTERS = "".join(ROLE_OF_CODE).encode()
_ROLE_INDEX = bytes.maketrans(_LETTERS, bytes(_ROLES.index(role) for role, _ in ROLE_OF_CODE.values()))
_WEIGHT = bytes.maketrans(_LETTERS, bytes(weight for _, weight in ROLE_OF_CODE.values()))

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
        pa.field("messages", _MESSAGES, nullable=False),  # the prompt and, after it, the answer to learn, if any
        pa.field("num_prompt", pa.int32(), nullable=False),  # follows from the weights; for other tools
        pa.field("rejected", _MESSAGES),  # none: supervised; empty: a desirable answer of labelled data
        pa.field("num_chars", pa.int32(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
    ]
)
_PARSED = SCHEMA.append(pa.field("key", pa.uint64())).append(pa.field("split", pa.int8()))
"""Before the splits part: with 64 bits of the id, to find copies, and the place of the split in `Split`."""

ParsedRow = tuple[bytes, bytes, int, float, int, int, str, list[str]]
"""A valid row: id, group, place of its split, score, line, characters, shape, texts. A bare tuple, for speed."""


def to_batch(rows: Sequence[ParsedRow], source: int) -> Any:
    """Rows as columns."""
    if not rows:
        return pa.record_batch([pa.array([], field.type) for field in _PARSED], schema=_PARSED)
    ids, groups, splits, scores, lines, sizes, shapes, contents = zip(*rows, strict=True)
    num = len(rows)
    columns = [
        _hashes(ids),
        _hashes(groups),
        *_message_columns(shapes, contents),
        numbers(pa.int32(), array("i", sizes)),
        numbers(pa.float64(), array("d", scores)),
        numbers(pa.int32(), array("i", [source]) * num),
        numbers(pa.int64(), array("q", lines)),
        _keys(ids),
        numbers(pa.int8(), bytes(splits)),
    ]
    return pa.record_batch(columns, schema=_PARSED)


def _message_columns(shapes: Sequence[str], contents: Sequence[list[str]]) -> tuple[Any, Any, Any]:
    """The columns messages, num_prompt and rejected."""
    num_prompts = numbers(pa.int32(), array("i", map(num_prompt_of, shapes)))
    if "|" not in "".join(shapes):
        return _message_lists(shapes, contents), num_prompts, pa.nulls(len(shapes), _MESSAGES)
    chosen, bars, rejected = zip(*(shape.partition("|") for shape in shapes), strict=True)
    messages = _message_lists(chosen, [texts[: len(shape)] for shape, texts in zip(chosen, contents, strict=True)])
    worse = [texts[len(shape) :] for shape, texts in zip(chosen, contents, strict=True)]
    return messages, num_prompts, _message_lists(rejected, worse, mask=pa.array([not bar for bar in bars]))


def _message_lists(shapes: Sequence[str], contents: Sequence[list[str]], mask: Any = None) -> Any:
    letters = "".join(shapes).encode()
    indices = numbers(pa.int8(), letters.translate(_ROLE_INDEX))
    roles = pa.DictionaryArray.from_arrays(indices, pa.array(_ROLES)).dictionary_decode()
    texts = pa.array(list(chain.from_iterable(contents)), pa.string(), size=len(letters))
    weights = numbers(pa.int8(), letters.translate(_WEIGHT))
    messages = pa.StructArray.from_arrays([roles, texts, weights], fields=list(_MESSAGE))
    ends = numbers(pa.int32(), array("i", accumulate(map(len, shapes), initial=0)))
    return pa.ListArray.from_arrays(ends, messages, type=_MESSAGES, mask=mask)


def _hashes(digests: Sequence[bytes]) -> Any:
    """Hashes of 32 bytes as texts in hex."""
    texts = b"".join(digests).hex().encode()
    ends = array("i", range(0, len(texts) + 1, 64))
    return pa.Array.from_buffers(pa.string(), len(digests), [None, pa.py_buffer(ends), pa.py_buffer(texts)])


def _keys(digests: Sequence[bytes]) -> Any:
    """64 bits of each id."""
    keys = array("Q", b"".join([digest[:8] for digest in digests]))
    if sys.byteorder == "little":
        keys.byteswap()
    return numbers(pa.uint64(), keys)


def numbers(kind: Any, values: bytes | array[int] | array[float]) -> Any:
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
