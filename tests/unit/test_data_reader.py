"""The line reader: every line once, in bounded memory, and only from regular files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data import a_file
from tunesmith.core.errors import DataError
from tunesmith.datasets.readers.text import Block, LineReader, size_of

LIMIT = 1024


def blocks_of(path: Path, limit: int = LIMIT) -> list[Block]:
    with LineReader(path, 0, limit) as reader:
        return list(reader.blocks())


def lines_of(path: Path, limit: int = LIMIT) -> list[tuple[int, bytes | int]]:
    """(line number, its text), or the length of one that is too long."""
    found: list[tuple[int, bytes | int]] = []
    for block in blocks_of(path, limit):
        if block.num_skipped:
            found.append((block.first_line, block.num_skipped))
        else:
            found += [(block.first_line + index, line) for index, line in enumerate(block.text.split(b"\n"))]
    return found


@given(
    st.lists(st.binary(max_size=3000).map(lambda line: line.replace(b"\n", b"")), min_size=1, max_size=20),
    st.booleans(),
)
def test_lines_of_any_length_come_once_and_in_order(
    tmp_path_factory, lines: list[bytes], is_unterminated: bool
) -> None:
    content = b"x" + b"\n".join(lines) + (b"" if is_unterminated else b"\n")
    path = a_file(tmp_path_factory.mktemp("lines"), content)
    expected = content.split(b"\n") if is_unterminated else content[:-1].split(b"\n")
    if is_unterminated and not expected[-1]:
        expected.pop()
    wanted = [(n, line if len(line) <= LIMIT else len(line)) for n, line in enumerate(expected, start=1)]
    assert lines_of(path) == wanted


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT, 5 * LIMIT + 7])
@pytest.mark.parametrize("before", [0, 1, 500])
def test_line_is_too_long_exactly_past_the_limit(tmp_path: Path, length: int, before: int) -> None:
    content = b"b" * before + b"\n" + b"x" * length + b"\n" + b"after\n"
    found = lines_of(a_file(tmp_path, content))
    assert found == [(1, b"b" * before), (2, b"x" * length if length <= LIMIT else length), (3, b"after")]


def test_blocks_say_where_their_lines_begin_in_the_file(tmp_path: Path) -> None:
    content = (
        b"\xef\xbb\xbf" + b"".join(b"%d\n" % number * (number % 7) for number in range(3000)) + b"y" * 2000 + b"\nend"
    )
    path = a_file(tmp_path, content)
    for block in blocks_of(path):
        if not block.num_skipped:
            assert content[block.offset : block.offset + len(block.text)] == block.text
    last = blocks_of(path)[-1]
    assert (last.text, last.is_unterminated, last.end) == (b"end", True, len(content))


def test_reader_hashes_and_counts_what_it_read(tmp_path: Path) -> None:
    content = b"one\ntwo\n" + b"x" * 5000
    with LineReader(a_file(tmp_path, content), 0, LIMIT) as reader:
        for _ in reader.blocks():
            pass
    assert reader.sha256 == hashlib.sha256(content).hexdigest()
    assert (reader.name, reader.num_bytes, reader.num_lines) == ("rows.jsonl", len(content), 3)


def test_utf8_mark_is_taken_off_the_first_line(tmp_path: Path) -> None:
    assert lines_of(a_file(tmp_path, b"\xef\xbb\xbfone\ntwo\n")) == [(1, b"one"), (2, b"two")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}\n'.encode("utf-16"), "UTF-16 (little endian)"),
        (b"\xfe\xff" + '{"a": 1}\n'.encode("utf-16-be"), "UTF-16 (big endian)"),
        ('{"a": 1}\n'.encode("utf-16-le"), "UTF-16 (little endian, without a mark)"),
        ('{"a": 1}\n'.encode("utf-16-be"), "UTF-16 (big endian, without a mark)"),
        ('{"a": 1}\n'.encode("utf-32"), "UTF-32 (little endian)"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
        (b"", "is empty"),
    ],
)
def test_file_that_is_not_jsonl_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl") as caught:
        blocks_of(a_file(tmp_path, content))
    assert said in str(caught.value)
    assert "; " in str(caught.value)  # what to do


def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="is a pipe; give the path of a JSONL file"):
        size_of(pipe)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/dev/zero", "is a device"),
        ("/dev/null", "is a device"),
        (".", "is a directory"),
        ("no-such-file.jsonl", "no file 'no-such-file.jsonl'; check the path"),
        ("a\0b", "cannot open"),
        ("x" * 5000, "cannot open"),
        ("/etc/hostname/x", "cannot open"),
    ],
)
def test_path_that_is_no_regular_file_is_refused(path: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        size_of(Path(path))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = a_file(tmp_path, b"one\n" * 1000)

    def read_and_write() -> None:
        with LineReader(path, 0, LIMIT) as reader:
            for block in reader.blocks():
                with path.open("ab") as sink:
                    sink.write(b"more\n" + block.text)

    with pytest.raises(DataError, match="changed while it was read"):
        read_and_write()
