"""Writes the examples of a dataset for other tools: JSONL in the forms of OpenAI's fine-tuning, or Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from tunesmith.core.errors import Conflict, DataError, quoted
from tunesmith.core.files import fsync_folder
from tunesmith.core.ids import new_token
from tunesmith.datasets.example import TOOLS, Example, Kind, Message, Split, to_json
from tunesmith.datasets.reading import iter_examples

_BATCH = 1024

Row = dict[str, Any]
_Written = Iterator[tuple[Split, Example]]


def export(folder: Path, target: Path, form: str, splits: Sequence[Split], *, replace: bool = False) -> int:
    """Write the examples of these splits to a file, whole or not at all; how many there are.

    `form`: jsonl or parquet. Each example is checked against its id on the way.
    """
    if not replace and target.exists():
        raise Conflict(f"{quoted(str(target), 200)} is there already; choose another name, or replace it with --force")
    if target.is_dir():
        raise DataError(f"{quoted(str(target), 200)} is a directory; name a file in it")
    examples = ((split, example) for split in splits for example in iter_examples(folder, split))
    write = _write_parquet if form == "parquet" else _write_jsonl
    try:
        with _whole(target) as draft:
            return write(draft, examples)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise DataError(f"cannot write {quoted(str(target), 200)}: {why}; choose another place") from None


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A file beside the target that takes its place once it is complete, and is gone otherwise."""
    draft = target.parent / f".{target.name[:100]}.{new_token()}"
    try:
        yield draft
        handle = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        draft.replace(target)
        fsync_folder(target.parent)
    finally:
        draft.unlink(missing_ok=True)


def _write_jsonl(path: Path, examples: _Written) -> int:
    num = 0
    with path.open("xb") as sink:
        for _, example in examples:
            sink.write(to_json(openai_row(example)).encode() + b"\n")
            num += 1
    return num


def _write_parquet(path: Path, examples: _Written) -> int:
    """Batches of rows; memory does not grow with their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tunesmith.datasets.export_columns import columns_of

    num = 0
    writer: Any = None
    try:
        while batch := list(islice(examples, _BATCH)):
            if writer is None:
                writer = pq.ParquetWriter(path, columns_of(batch[0][1].kind), compression="zstd")
            rows = [_parquet_row(split, example) for split, example in batch]
            writer.write_table(pa.Table.from_pylist(rows, schema=writer.schema))
            num += len(batch)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise DataError("the split is empty, so there is nothing to write; export another one")
    return num


def openai_row(example: Example) -> Row:
    """The example in the form in which OpenAI's fine-tuning reads it; labelled ones, which it does not know, as KTO."""
    if example.kind is Kind.PREFERENCE:
        given = {"messages": _messages(example.prompt), **_tools(example, lambda tools: tools)}
        answers = {"preferred_output": example.chosen, "non_preferred_output": example.rejected or ()}
        return {"input": given, **{name: _messages(answer) for name, answer in answers.items()}}
    return {**_plain_row(example), **_tools(example, lambda tools: tools)}


def _parquet_row(split: Split, example: Example) -> Row:
    tools = _tools(example, lambda tools: orjson.dumps(tools).decode())
    return {"id": example.id, "split": split.value, **_plain_row(example), **tools}


def _plain_row(example: Example) -> Row:
    if example.kind is Kind.SUPERVISED:
        return {"messages": _messages(example.messages, weighted=True)}
    prompt, rejected = _messages(example.prompt), example.rejected or ()
    if example.kind is Kind.PREFERENCE:
        return {"prompt": prompt, "chosen": _messages(example.chosen), "rejected": _messages(rejected)}
    answer = _messages(example.chosen or rejected)
    return {"prompt": prompt, "completion": answer, "label": example.is_desirable}


def _messages(messages: Sequence[Message], *, weighted: bool = False) -> list[Row]:
    return [_message(message, weighted) for message in messages if message["role"] != TOOLS]


def _message(message: Message, weighted: bool) -> Row:
    row: Row = {"role": message["role"], "content": message["content"]}
    if "tool_calls" in message:
        row["content"] = message["content"] or None
        row["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    for key in ("tool_call_id", "name"):
        if key in message:
            row[key] = message[key]
    if weighted and message["role"] == "assistant" and not message["weight"]:
        row["weight"] = 0
    return row


def _call(call: Row) -> Row:
    """A call with its arguments as a text, as servers send them."""
    function = {**call["function"]}
    if "arguments" in function:
        function["arguments"] = to_json(function["arguments"])
    return {**call, "function": function}


def _tools(example: Example, form: Callable[[Any], Any]) -> Row:
    first = example.prompt[0] if example.prompt else None
    return {"tools": form(orjson.loads(first["content"]))} if first and first["role"] == TOOLS else {}
