"""Splits one large JSON array into its items as it is read, without ever holding more than a few of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from tunesmith.core.errors import DataError

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)  # a lone quote: a string that goes on
_PLAIN = re.compile(rb"\s*\[")
_WRAPPED = re.compile(rb'\s*\{\s*"(?:data|traces|observations)"\s*:\s*\[')
_OPEN, _CLOSE, _QUOTE, _COMMA = b"[{", b"]}", ord('"'), ord(",")


def array_start(beginning: bytes) -> tuple[int, bool] | None:
    """Where the items of a file that begins like this start, and whether an object is around the array.

    None: the file has one object per line. So has one whose first line is an array that more lines follow.
    """
    found = _PLAIN.match(beginning) or _WRAPPED.match(beginning)
    if found is None:
        return None
    lines = beginning.lstrip().split(b"\n", 2)
    if len(lines) > 1 and any(map(bytes.strip, lines[1:])):
        try:
            orjson.loads(lines[0])
            return None
        except orjson.JSONDecodeError:
            pass
    return found.end(), found.re is _WRAPPED


@dataclass(slots=True)
class ArrayItems:
    """The items of one array, read chunk by chunk."""

    name: str
    max_bytes: int
    is_wrapped: bool
    num_items: int = 0
    is_closed: bool = False
    """Whether the end of the array was seen."""
    left: bytes = b""
    """What came after the last complete item."""
    _scanned: int = 0
    _depth: int = 1
    _last: bytes = b""
    """The last byte after the end of the array that is no white space."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The items that this chunk completes, each as one line."""
        if self.is_closed:
            self._after(chunk, self.num_items)
            return []
        text = self.left + chunk
        items: list[bytes] = []
        begin, depth, scanned = 0, self._depth, len(text)
        for token in _TOKEN.finditer(text, self._scanned):
            place = token.start()
            mark = text[place]
            if mark == _QUOTE:
                if token.end() == place + 1:
                    scanned = place
                    break
            elif mark in _OPEN:
                depth += 1
            elif mark in _CLOSE:
                depth -= 1
                if not depth:
                    if text[begin:place].strip():
                        items.append(_as_line(text[begin:place]))
                    self.is_closed = True
                    self._after(text[place + 1 :], self.num_items + len(items))
                    begin = scanned = len(text)
                    break
            elif depth == 1:
                items.append(_as_line(text[begin:place]))
                begin = place + 1
        self.left, self._scanned, self._depth = text[begin:], scanned - begin, depth
        self.num_items += len(items)
        if len(self.left) > self.max_bytes:
            raise DataError(
                f"{self.name} item {self.num_items + 1} has more than {self.max_bytes} bytes; split or remove it"
            )
        return items

    def _after(self, text: bytes, num_items: int) -> None:
        self._last = text.rstrip()[-1:] or self._last
        if text.strip() and not self.is_wrapped:
            raise DataError(
                f"{self.name}: text follows the array after item {num_items}; "
                "write one array, or one JSON object per line"
            )

    def refuse_cut_off(self) -> None:
        """At the end of the file: raises where the array, or the object around it, has no end."""
        if self.is_closed:
            if self.is_wrapped and self._last != b"}":
                raise DataError(f"{self.name} is cut off after its array: the object has no end; copy it again")
            return
        is_whole = _is_whole(self.left)
        if is_whole or not self.left.strip():
            num = self.num_items + is_whole
            raise DataError(f"{self.name} is cut off after item {num}: its array has no end; copy it again")


def _is_whole(item: bytes) -> bool:
    try:
        orjson.loads(item)
    except orjson.JSONDecodeError:
        return False
    return True


def _as_line(item: bytes) -> bytes:
    """The item on one line: outside of strings, both ends of a line are white space; inside, both are refused."""
    return item.strip().replace(b"\n", b"\r")


def item_groups(items: ArrayItems, chunks: Iterator[bytes]) -> Iterator[tuple[int, list[bytes], bool]]:
    """Items as they come: the number of the first, their texts, and whether the file ends inside the last one."""
    for chunk in chunks:
        first = items.num_items + 1
        if found := items.feed(chunk):
            yield first, found, False
    items.refuse_cut_off()
    if not items.is_closed:
        yield items.num_items + 1, [_as_line(items.left)], True
