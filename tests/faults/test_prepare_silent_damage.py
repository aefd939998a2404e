"""Files that used to be read in spite of being damaged, foreign or made to waste time: refused, or read quickly."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sqlite3
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.workspaces import PROFILE, a_workspace
from tunesmith.core.errors import DataError, TunesmithError, UsageError
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PreparedDataset, PrepareOptions

ROWS = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(60)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _prepared(folder: Path, data: bytes, **options: Any) -> PreparedDataset:
    source = folder / "source"
    source.write_bytes(data)
    return prepare([source], folder / "out", PrepareOptions(**options))


def _refusal(folder: Path, data: bytes, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        _prepared(folder, data, **options)
    assert not (folder / "out").exists()
    return caught.value.message


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("cut", ["after_item", "after_comma", "after_space", "before_last_brace"])
def test_array_that_is_cut_off_is_refused_wherever_the_cut_is(tmp_path: Path, cut: str, wrapped: bool) -> None:
    items = ", ".join(map(json.dumps, ROWS))
    ends = {"after_item": items, "after_comma": f"{items},", "after_space": f"{items}\n  ", "before_last_brace": items}
    text = ('{"data": [' if wrapped else "[") + ends[cut]
    if cut == "before_last_brace":
        text += "]" if wrapped else ""
    assert "is cut off after" in _refusal(tmp_path, text.encode())
    whole = ('{"data": [' if wrapped else "[") + items + ('], "meta": {}}\n' if wrapped else "]\n")
    assert sum(_prepared(tmp_path, whole.encode()).counts.values()) == 60


def _tar(kind: int, name: str = "rows.jsonl") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as archive:
        info = tarfile.TarInfo(name)
        info.size = len(LINES)
        archive.addfile(info, io.BytesIO(LINES))
    return made.getvalue()


def _v7_tar() -> bytes:
    """The oldest kind: no magic, only a sum."""
    data = bytearray(_tar(tarfile.USTAR_FORMAT))
    data[257:512] = bytes(255)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("rows.jsonl", LINES)
    return made.getvalue()


def _sqlite(folder: Path) -> bytes:
    with sqlite3.connect(folder / "x.db") as conn:
        conn.execute("CREATE TABLE t (a TEXT)")
        conn.execute("INSERT INTO t VALUES (?)", (LINES.decode(),))
    conn.close()
    return (folder / "x.db").read_bytes()


@pytest.mark.parametrize(
    "kind", ["ustar", "gnu", "pax", "v7", "tar.gz", "zip", "sqlite", "pickle", "pdf", "7z", "xz", "rtf"]
)
def test_archive_or_other_file_that_holds_lines_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    made = {
        "ustar": lambda: _tar(tarfile.USTAR_FORMAT),
        "gnu": lambda: _tar(tarfile.GNU_FORMAT),
        "pax": lambda: _tar(tarfile.PAX_FORMAT, "ünïcode.jsonl"),
        "v7": _v7_tar,
        "tar.gz": lambda: gzip.compress(_tar(tarfile.GNU_FORMAT)),
        "zip": _zip,
        "sqlite": lambda: _sqlite(tmp_path),
        "pickle": lambda: pickle.dumps(LINES),
        "pdf": lambda: b"%PDF-1.7\n" + LINES,
        "7z": lambda: b"7z\xbc\xaf\x27\x1c\n" + LINES,
        "xz": lambda: b"\xfd7zXZ\x00\n" + LINES,
        "rtf": lambda: b"{\\rtf1\n" + LINES,
    }[kind]()
    names = {"v7": "tar", "tar.gz": "tar", "gnu": "tar", "pax": "tar", "ustar": "tar", "sqlite": "SQLite", "pdf": "PDF"}
    told = _refusal(tmp_path, made, max_bad_share=0.9)
    assert names.get(kind, kind).lower() in told.lower()
    assert "not JSONL in UTF-8" in told


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary(8), pa.dictionary(pa.int32(), pa.binary())], ids=str
)
def test_binary_parquet_column_is_refused_and_never_becomes_a_repr(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([f"Answer{n:02}".encode() for n in range(60)], pa.binary(8)).cast(pa.binary())
    column = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
    table = pa.table({"prompt": [row["prompt"] for row in ROWS], "completion": column})
    pq.write_table(table, tmp_path / "x.parquet")
    told = _refusal(tmp_path, (tmp_path / "x.parquet").read_bytes())
    assert "column completion holds bytes, not text" in told


def test_binary_inside_a_parquet_struct_is_refused(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.binary())])
    rows = [[{"role": "user", "content": b"q"}, {"role": "assistant", "content": b"a"}]] * 20
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(message))}), tmp_path / "x.parquet")
    assert "column messages holds bytes" in _refusal(tmp_path, (tmp_path / "x.parquet").read_bytes())


@pytest.mark.parametrize("nothing", ["\u200b", "\ufeff", "\u2060\u2060", "\u3164", "\u2800", "\u0301", "\U000e0041"])
@pytest.mark.parametrize("where", ["prompt", "completion", "message"])
def test_text_of_invisible_characters_only_is_a_bad_row(tmp_path: Path, nothing: str, where: str) -> None:
    bad: dict[str, Any] = {"prompt": "Question", "completion": "Answer"}
    if where == "message":
        bad = {"messages": [{"role": "user", "content": "Question"}, {"role": "assistant", "content": nothing}]}
    else:
        bad[where] = nothing
    report = _prepared(tmp_path, LINES + json.dumps(bad, ensure_ascii=False).encode() + b"\n").report
    (drop,) = report.drops
    assert (drop.reason, drop.num) == ("empty_content", 1)
    assert "only characters that cannot be seen" in str(drop.first[0])


def test_answers_that_look_alike_are_no_pair(tmp_path: Path) -> None:
    pairs = [{"prompt": f"Question {n}", "chosen": f"Yes {n}.", "rejected": f"No {n}."} for n in range(60)]
    pairs += [{"prompt": "Say yes", "chosen": "Yes, it is.", "rejected": other} for other in
              ("Yes, it is. ", "Yes,  it is.", "Yes,\nit is.", "Yes, it is.\u200b")]  # fmt: skip
    report = _prepared(tmp_path, "".join(json.dumps(pair) + "\n" for pair in pairs).encode()).report
    assert [(drop.reason, drop.num) for drop in report.drops] == [("same_answers", 4)]


def test_correction_and_captured_answer_of_invisible_characters_are_refused(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        talk = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A town."}]
        known = client.experiences.add(PROFILE, talk)
        for nothing in ("\u200b", "\ufeff\u2060", "\u3164"):
            with pytest.raises(UsageError, match="shows nothing"):
                client.feedback.add(known.id, "down", correction=nothing)
            for place in (0, 1):
                said = [dict(each) for each in talk]
                said[place]["content"] = nothing
                with pytest.raises(TunesmithError, match="cannot be seen"):
                    client.experiences.add(PROFILE, said)


@pytest.mark.parametrize("flood", ["newlines", "spaces", "between", "members", "keys", "nested", "zstd"])
def test_small_file_never_costs_much_time(tmp_path: Path, flood: str) -> None:
    """A few kilobytes that unpack to millions of blank lines, or that make a parser look again and again."""
    many = 20_000_000
    made = {
        "newlines": lambda: gzip.compress(LINES + b"\n" * many),
        "spaces": lambda: gzip.compress(LINES + b" \r\n" * (many // 3)),
        "between": lambda: gzip.compress((b"\n" * 300_000).join(LINES.splitlines(keepends=True))),
        "members": lambda: gzip.compress(LINES) + gzip.compress(b"\n") * 20_000,
        "keys": lambda: LINES + json.dumps({f"promt{n}": "x" for n in range(200_000)}).encode() + b"\n",
        "nested": lambda: LINES + b"[" * 3_000_000 + b"\n" + b'{"a":' * 700_000 + b"\n",
        "zstd": lambda: pa.compress(LINES + b"\n" * many, "zstd", asbytes=True),
    }[flood]()
    started = time.process_time()
    assert sum(_prepared(tmp_path, made).counts.values()) == 60
    assert time.process_time() - started < 8.0
