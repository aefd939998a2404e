"""Sources of every container: the same examples, whatever they are packed in; patterns, filters, limits."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data import HALF, a_chat, a_file, a_label, a_pair, a_tool_chat, chats, encoded, num_examples, prepared
from tunesmith.core.errors import DataError, UsageError
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.readers.json_arrays import ArrayItems, array_start, item_groups
from tunesmith.datasets.reading import read_split, verify
from tunesmith.datasets.report import PreparedDataset, PrepareOptions
from tunesmith.datasets.sources import expanded

NUM = 60


def zstd(content: bytes) -> bytes:
    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return packed


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return bytes(sink.getvalue())


def changed(**changes: Any) -> PrepareOptions:
    return HALF.model_copy(update=changes)


CONTAINERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "gzip": lambda rows: gzip.compress(encoded(*rows)),
    "two gzip members": lambda rows: gzip.compress(encoded(*rows[:9])) + gzip.compress(encoded(*rows[9:])),
    "zstd": lambda rows: zstd(encoded(*rows)),
    "gzip with a mark and CRLF": lambda rows: gzip.compress(b"\xef\xbb\xbf" + encoded(*rows).replace(b"\n", b"\r\n")),
    "array": lambda rows: json.dumps(rows).encode(),
    "printed array": lambda rows: b"\n " + json.dumps(rows, indent=2).encode() + b"\n",
    "array in gzip": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "page": lambda rows: json.dumps({"data": rows, "meta": {"page": 1}}).encode(),
    "parquet": parquet,
    "parquet in small groups": lambda rows: parquet(rows, row_group_size=7),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("a_row", [a_chat, a_pair, a_label, a_tool_chat])
def test_container_never_changes_the_dataset(tmp_path: Path, container: str, a_row: Callable[..., Any]) -> None:
    rows = [a_row(number) for number in range(NUM)]
    plain = prepared(tmp_path, encoded(*rows))
    content = CONTAINERS[container](rows)
    packed = prepared(tmp_path, content, name="ds-2")
    assert packed.fingerprint == plain.fingerprint
    (source,) = packed.report.sources
    assert (source.num_bytes, source.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert source.num_lines == NUM


def test_parquet_columns_nobody_reads_are_counted_and_not_read(tmp_path: Path) -> None:
    rows = [{**a_chat(number), "blob": b"\xff\x00", "label": None} for number in range(NUM)]
    dataset = prepared(tmp_path, parquet(rows))
    assert dataset.report.ignored_fields == {"blob": NUM}


def test_bad_row_of_a_parquet_file_is_named_by_its_number(tmp_path: Path) -> None:
    rows = [a_chat(number) for number in range(NUM)]
    rows[40]["messages"][1]["content"] = " "
    rows[41]["messages"][1]["content"] = "x" * 3000
    report = prepared(tmp_path, parquet(rows), changed(max_line_bytes=2048)).report
    told = sorted(str(line) for drop in report.drops for line in drop.first)
    assert told[0].startswith("rows.jsonl row 41: messages[1].content is empty")
    assert told[1].startswith("rows.jsonl row 42: has 30")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (parquet([{"text": "a"}]), "has no column that tunesmith reads, only text"),
        (parquet([a_chat(n) for n in range(9)])[:-20], "is not a readable Parquet file"),
        (b"PAR1", "is not a readable Parquet file"),
    ],
)
def test_parquet_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        prepared(tmp_path, content)


JSON = st.recursive(
    st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@pytest.mark.slow
@given(st.lists(JSON), st.integers(1, 40), st.sampled_from([None, 1]))
def test_items_of_an_array_come_once_and_in_order(values: list[Any], size: int, indent: int | None) -> None:
    text = json.dumps(values, indent=indent).encode()
    start = array_start(text)
    assert start is not None
    chunks = (text[place : place + size] for place in range(start[0], len(text), size))
    groups = list(item_groups(ArrayItems("x", 1 << 20, False), chunks))
    assert [json.loads(item) for _, items, _ in groups for item in items] == values
    assert [number for number, _, _ in groups][:1] in ([], [1])


def test_lines_of_arrays_are_lines() -> None:
    assert array_start(b"[1]\n[2]\n") is None
    assert array_start(b'[{"a": 1},\n{"a": 2}]\n') == (1, False)
    assert array_start(b'{"data": [') == (10, True)
    assert array_start(b'{"messages": [') is None


def test_conversations_of_one_group_stay_in_one_split(tmp_path: Path) -> None:
    rows = []
    for number in range(NUM):
        messages = [message for turn in range(4) for message in a_chat(number + 1000 * turn)["messages"]]
        rows.append({"messages": messages})
    dataset = prepared(tmp_path, encoded(*rows), changed(windows="all"))
    assert num_examples(dataset) == 4 * NUM
    splits = {split: {example.prompt[0]["content"] for example in read_split(dataset.path, split)} for split in Split}
    assert not splits[Split.TRAIN] & splits[Split.HELDOUT]
    assert not splits[Split.TRAIN] & splits[Split.VALIDATION]
    verify(dataset.path, dataset.fingerprint)
    last = prepared(tmp_path, encoded(*rows), changed(windows="last"), name="ds-2")
    assert num_examples(last) == NUM
    assert {split: {e.prompt[0]["content"] for e in read_split(last.path, split)} for split in Split} == splits


def _first(tmp_path: Path, num: int, processes: int = 1) -> PreparedDataset:
    rng = random.Random(3)
    rows = [a_chat(rng.randrange(4000), filler="x" * 900) for _ in range(6000)]
    paths = [a_file(tmp_path, encoded(*rows[:3000]), "a.jsonl"), a_file(tmp_path, encoded(*rows[3000:]), "b.jsonl")]
    out = tmp_path / f"ds-{num}-{processes}"
    return prepare(paths, out, changed(first_examples=num), num_processes=processes)


@pytest.mark.parametrize("num", [100, 2500])
def test_first_examples_are_exactly_so_many_whatever_the_number_of_processes(tmp_path: Path, num: int) -> None:
    one, two = _first(tmp_path, num), _first(tmp_path, num, 2)
    assert num_examples(one) == num
    assert one.report == two.report
    assert [source.name for source in one.report.sources] == ["a.jsonl", "b.jsonl"][: 1 if num == 100 else 2]
    whole = hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert one.report.sources[0].sha256 == whole


def test_where_takes_what_meets_it_and_counts_the_rest(tmp_path: Path) -> None:
    rows = [a_chat(number, lang="en" if number % 2 else "de") for number in range(NUM)]
    bad = {"messages": [], "lang": "de"}
    dataset = prepared(tmp_path, encoded(*rows, bad, a_chat(999)), changed(where=("lang=en",)))
    assert (num_examples(dataset), dataset.report.drops) == (NUM // 2, ())
    assert dataset.report.passed_over == {"not lang=en": NUM // 2 + 1, "no field lang": 1}
    assert dataset.report.ignored_fields == {}
    by_column = prepared(tmp_path, parquet(rows), changed(where=("lang=en",)), name="ds-2")
    assert by_column.fingerprint == dataset.fingerprint


def test_where_that_nothing_meets_says_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl: no example is left: 60 × no field langg; check --where"):
        prepared(tmp_path, encoded(*chats(NUM)), changed(where=("langg=en",)))


@pytest.mark.parametrize("text", ["lang", "=en", ".a=b", "a..b=c", ""])
def test_where_that_is_no_condition_is_refused_before_anything_is_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="write FIELD=VALUE or FIELD!=VALUE"):
        prepared(tmp_path, b"junk", changed(where=(text,)))


def test_pattern_stands_for_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt", "odd[1].jsonl"):
        a_file(tmp_path, b"x", name)
    (tmp_path / "folder.jsonl").mkdir()
    names = [path.name for path in expanded([tmp_path / "*.jsonl", tmp_path / "c.txt", tmp_path / "odd[1].jsonl"])]
    assert names == ["a.jsonl", "b.jsonl", "odd[1].jsonl", "c.txt", "odd[1].jsonl"]
    with pytest.raises(DataError, match=r"no file matches .*\*\.csv'; check the pattern"):
        expanded([tmp_path / "*.csv"])
