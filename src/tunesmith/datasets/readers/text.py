"""Reads JSONL and JSON arrays as blocks of lines, packed or not, in memory that does not depend on their size."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tunesmith.core.errors import DataError, quoted
from tunesmith.datasets.readers.decompress import codec_of, decompressed
from tunesmith.datasets.readers.foreign_files import refuse_foreign
from tunesmith.datasets.readers.json_arrays import ArrayItems, array_start, item_groups

if TYPE_CHECKING:
    from tunesmith.datasets.report import Unit

_BLOCK = 1 << 20
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive lines of one source."""

    source: int
    """Which source, counted from 0."""
    first_line: int
    offset: int
    """Where the first line begins in the text of the file; -1: nobody knows."""
    text: bytes
    """The lines, without the end of the last one."""
    end: int
    """How much of the file has been read with this block."""
    is_unterminated: bool = False
    """No newline follows the last line, which ends the file."""
    num_skipped: int = 0
    """Not 0: the block stands for one line of so many bytes, too many to hold, and its text is empty."""


class LineReader:
    """One regular file, open; iterating yields its lines once, after which hash and counts are known."""

    def __init__(self, path: Path, source: int, max_line_bytes: int) -> None:
        self.name = path.name
        self._source = source
        self._handle, before = _open_regular(path)
        self.num_bytes = before.st_size
        self.num_lines = 0
        self.unit: Unit = "line"
        self.ignored: dict[str, int] = {}  # that is for whoever parses the lines
        self.bytes_done = 0
        self._text_done = 0  # of the unpacked text
        self._before = (before.st_size, before.st_mtime_ns)
        self._max_line = max_line_bytes
        self._chunk = min(_BLOCK, max_line_bytes)  # so that only a line that crosses chunks can be too long
        self._hash = hashlib.sha256()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)

    @property
    def sha256(self) -> str:
        """Of what was read, once everything has been."""
        return self._hash.hexdigest()

    def blocks(self) -> Iterator[Block]:
        """Every line of the file, in order, blank ones included; of a JSON array, every item as a line."""
        chunks = self._chunks()
        first = next(chunks)
        start = array_start(first)
        if start is None:
            yield from self._lines(chain((first,), chunks))
            return
        self.unit = "item"
        items = ArrayItems(self.name, self._max_line, start[1])
        for number, texts, is_cut in item_groups(items, chain((first[start[0] :],), chunks)):
            self.num_lines += len(texts)
            yield Block(self._source, number, -1, b"\n".join(texts), self.bytes_done, is_cut)

    def finish(self) -> None:
        """Read what is left without looking at it, so that the hash is that of the file."""
        for _ in self._raw_chunks():
            pass

    def _lines(self, chunks: Iterator[bytes]) -> Iterator[Block]:
        carry = b""  # the beginning of a line whose end is in a later chunk
        num_open = 0  # its length so far; past the limit, nothing of it is held
        for chunk in chunks:
            end = chunk.find(b"\n")
            if end < 0:
                num_open += len(chunk)
                carry = carry + chunk if num_open <= self._max_line else b""
                continue
            begin = 0
            if num_open + end > self._max_line:
                yield self._skipped(num_open + end)
                begin, carry = end + 1, b""
            last = chunk.rfind(b"\n")
            if begin <= last:
                yield self._block(carry + chunk[begin:last], self._text_done - len(chunk) + begin - len(carry))
            carry = chunk[last + 1 :]
            num_open = len(carry)
        if num_open > self._max_line:
            yield self._skipped(num_open)
        elif num_open:
            yield self._block(carry, self._text_done - len(carry), is_unterminated=True)

    def _block(self, text: bytes, offset: int, *, is_unterminated: bool = False) -> Block:
        first_line = self.num_lines + 1
        self.num_lines += text.count(b"\n") + 1
        return Block(self._source, first_line, offset, text, self.bytes_done, is_unterminated)

    def _skipped(self, num_bytes: int) -> Block:
        self.num_lines += 1
        return Block(self._source, self.num_lines, 0, b"", self.bytes_done, num_skipped=num_bytes)

    def _chunks(self) -> Iterator[bytes]:
        """The file's text, unpacked, without a byte-order mark, never nothing; refuses what is not UTF-8."""
        raw = self._raw_chunks()
        first = next(raw, b"")
        chunks = chain((first,), raw)
        codec = codec_of(first)
        if codec is not None:
            chunks = chain(decompressed(codec, chunks, self._chunk, self.name, lambda: self.num_lines))
        is_first = True
        for chunk in chunks:
            self._text_done += len(chunk)
            if is_first:
                refuse_foreign(self.name, chunk)
            yield chunk.removeprefix(_UTF8_BOM) if is_first else chunk
            is_first = not chunk
        if is_first:
            raise DataError(f"{self.name} is empty; give a file with one JSON object per line")

    def _raw_chunks(self) -> Iterator[bytes]:
        """The file's bytes, hashed on the way.

        Reads no further than the file went when it was opened: one that grows quicker than it is read would never end.
        """
        while chunk := os.read(self._handle, min(self._chunk, self.num_bytes - self.bytes_done)):
            self._hash.update(chunk)
            self.bytes_done += len(chunk)
            yield chunk
        after = os.fstat(self._handle)
        if (after.st_size, after.st_mtime_ns) != self._before or self.bytes_done != self.num_bytes:
            raise DataError(f"{self.name} changed while it was read; prepare it again when nothing writes to it")


def size_of(path: Path) -> int:
    """The size of a regular file; raises on anything else."""
    handle, found = _open_regular(path)
    os.close(handle)
    return found.st_size


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file; anything that could block or never end is refused before a byte is read."""
    # its name is written into manifests and the store
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        raise DataError(f"the name of the file {quoted(str(path), 200)} is not valid UTF-8; rename the file")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DataError(f"no file {quoted(str(path), 200)}; check the path") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a path"
        raise DataError(f"cannot open {quoted(str(path), 200)}: {why}; check the path and its permissions") from None
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode):
        return handle, found
    os.close(handle)
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    what = kinds.get(stat.S_IFMT(found.st_mode), "not a regular file")
    raise DataError(f"{quoted(str(path), 200)} is {what}; give the path of a JSONL file")
