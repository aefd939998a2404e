"""What changed from one dataset to another: examples by their ids, and prompts that got another answer."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tunesmith.core.errors import DataError
from tunesmith.datasets.columns import numbers
from tunesmith.datasets.example import Example, Split
from tunesmith.datasets.reading import iter_examples

_SHOWN = 5
_BATCH = 16_384
_MAX_TEXT = 200


@dataclass(frozen=True)
class ShownExample:
    """One example of a difference."""

    id: str
    split: str
    question: str
    """The last thing that was asked, cut."""
    answer: str
    line: int


@dataclass(frozen=True)
class ChangedPrompt:
    """A prompt that both datasets have, with other answers."""

    question: str
    before: str
    after: str


@dataclass(frozen=True)
class DatasetDiff:
    num_same: int
    num_added: int
    num_removed: int
    num_changed: int
    """Prompts that both have and answer differently; their examples count neither as added nor as removed."""
    num_moved: int
    """Of the same ones, those that are in another split: other shares."""
    added: tuple[ShownExample, ...]
    removed: tuple[ShownExample, ...]
    changed: tuple[ChangedPrompt, ...]


def diff(before: Path, after: Path) -> DatasetDiff:
    """What is different in the second; both are read from their files, ids and groups first, a few texts last."""
    old, new = _index(before), _index(after)
    gone, fresh = _missing(old, new, "key"), _missing(new, old, "key")
    removed, added = _missing(gone, fresh, "group"), _missing(fresh, gone, "group")
    groups = _first(pc.unique(_missing(fresh, added, "key").column("group")))
    answers = (_by_group(before, gone, groups), _by_group(after, fresh, groups))
    changed = tuple(
        ChangedPrompt(_question(answers[0][group]), _answer(answers[0][group]), _answer(answers[1][group]))
        for group in groups
        if group in answers[0] and group in answers[1]
    )
    num_same = new.num_rows - fresh.num_rows
    return DatasetDiff(
        num_same=num_same,
        num_added=added.num_rows,
        num_removed=removed.num_rows,
        num_changed=len(pc.unique(_missing(fresh, added, "key").column("group"))),
        num_moved=num_same - _num_in_place(old, new),
        added=_shown(after, _first(added.column("key"))),
        removed=_shown(before, _first(removed.column("key"))),
        changed=changed,
    )


def _index(folder: Path) -> Any:
    """Key, group and split of every example, 17 bytes each."""
    parts = []
    try:
        for place, split in enumerate(Split):
            with pq.ParquetFile(folder / f"{split.value}.parquet") as source:
                for batch in source.iter_batches(_BATCH, columns=["id", "group"]):
                    keys = [_key(text) for text in batch.column("id").to_pylist()]
                    groups = [_key(text) for text in batch.column("group").to_pylist()]
                    columns = [numbers(pa.uint64(), array("Q", values)) for values in (keys, groups)]
                    columns.append(numbers(pa.int8(), bytes([place]) * len(keys)))
                    parts.append(pa.record_batch(columns, names=["key", "group", "split"]))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{folder}: cannot be read ({type(error).__name__}); run `tunesmith dataset verify`") from None
    schema = pa.schema({"key": pa.uint64(), "group": pa.uint64(), "split": pa.int8()})
    return pa.Table.from_batches(parts, schema=schema)


def _key(text: str) -> int:
    return int(text[:16], 16)


def _missing(rows: Any, others: Any, column: str) -> Any:
    """The rows whose value no row of the others has."""
    return rows.filter(pc.invert(pc.is_in(rows.column(column), value_set=others.column(column).combine_chunks())))


def _num_in_place(old: Any, new: Any) -> int:
    """How many examples both have in the same split."""
    num = 0
    for place in range(len(Split)):
        here = [table.filter(pc.equal(table.column("split"), place)) for table in (old, new)]
        num += here[1].num_rows - _missing(here[1], here[0], "key").num_rows
    return num


def _first(column: Any) -> list[int]:
    values: list[int] = column.slice(0, _SHOWN).to_pylist()
    return values


def _shown(folder: Path, keys: list[int]) -> tuple[ShownExample, ...]:
    found = {_key(example.id): (split, example) for split, example in _find(folder, set(keys))}
    return tuple(
        ShownExample(example.id, split.value, _question(example), _answer(example), example.line)
        for split, example in (found[key] for key in keys)
    )


def _by_group(folder: Path, rows: Any, groups: list[int]) -> dict[int, Example]:
    """For each group, the first of these rows that is in it."""
    wanted = rows.filter(pc.is_in(rows.column("group"), value_set=pa.array(groups, pa.uint64())))
    first: dict[int, int] = {}
    for group, key in zip(wanted.column("group").to_pylist(), wanted.column("key").to_pylist(), strict=True):
        first.setdefault(group, key)
    return {_key(example.group): example for _, example in _find(folder, set(first.values()))}


def _find(folder: Path, keys: set[int]) -> Iterable[tuple[Split, Example]]:
    """The examples with these keys; reads no further than the last of them."""
    for split in Split:
        if not keys:
            return
        for example in iter_examples(folder, split):
            if _key(example.id) in keys:
                keys.discard(_key(example.id))
                yield split, example
                if not keys:
                    return


def _question(example: Example) -> str:
    return _short(example.prompt[-1]["content"])


def _answer(example: Example) -> str:
    answer = example.chosen or example.rejected or example.prompt
    return _short(answer[-1]["content"] or "(a call of a function)")


def _short(text: str) -> str:
    line = " ".join(text[: 2 * _MAX_TEXT].split())
    return line if len(line) <= _MAX_TEXT else line[:_MAX_TEXT] + "…"
