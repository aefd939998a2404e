"""Reading YAML that people write: plain values only, the line of every key, one clear reason when it is refused.

Plain scalars follow YAML 1.2 rather than 1.1: ``1e-4`` is a number, ``no`` and ``12:30`` are text, dates are text.
Tags, merge keys, duplicate keys and further documents are refused; aliases count as what they expand to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tunesmith.core.errors import ConfigError, quoted
from tunesmith.core.files import FileTooLarge, NotPlainFile, read_capped

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
MAX_DEPTH = 24
_MAX_DIGITS = 18  # a longer whole number fits no setting
_MAX_FLOAT_CHARS = 64

KeyPath = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C scanner where PyYAML was built with it
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_INF = re.compile(r"([-+]?)\.(inf|Inf|INF)\Z")
_NAN = frozenset({".nan", ".NaN", ".NAN"})


@dataclass(frozen=True)
class Document:
    """What a file says, and on which line it says it."""

    shown: str
    tree: dict[str, Any]
    lines: dict[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """The file with the line of that key, or of the nearest one above it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.shown}:{self.lines[path]}" if path else self.shown


class _Refused(Exception):
    def __init__(self, line: int | None, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


def parse_yaml(text: str, shown: str) -> Document:
    """Parse the text of one file; `shown` is how errors call it."""
    try:
        value, lines = _parse(text)
    except _Refused as problem:
        line = f":{problem.line}" if problem.line is not None else ""
        raise ConfigError(f"{shown}{line}: {problem.reason}") from None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{shown}: must be a mapping of keys to values at the top, not {_kind(value)}")
    return Document(shown, value, lines)


def parse_inline(text: str) -> Any:
    """One value as written on a command line or in an environment variable; ValueError if it is not YAML."""
    try:
        return _parse(text)[0]
    except _Refused as problem:
        raise ValueError(problem.reason) from None


def read_text(path: Path, shown: str) -> str:
    """Read the text of one file; `shown` is how errors call it."""
    try:
        raw = read_capped(path, MAX_BYTES, follow_links=True)
    except NotPlainFile:
        raise ConfigError(f"{shown}: not a regular file") from None
    except FileTooLarge:
        raise ConfigError(f"{shown}: larger than {MAX_BYTES >> 20} MiB, which no configuration file is") from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read ({error.strerror})") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown}:{line}: not UTF-8 text; save the file as UTF-8") from None


def _parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        events = yaml.parse(text, Loader=_LOADER)
        builder = _Builder(iter(events))
        return builder.document(), builder.lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = f"not valid YAML: {error.problem or error.context}"
        begun = error.context_mark
        if mark and begun and begun.line != mark.line:
            reason += f" ({error.context} that begins on line {begun.line + 1})"
        raise _Refused(mark.line + 1 if mark else None, reason) from None
    except yaml.YAMLError as error:
        raise _Refused(None, f"not valid YAML: {str(error).splitlines()[0]}") from None
    except UnicodeError:
        raise _Refused(None, "not valid text") from None


@dataclass
class _Builder:
    """Turns YAML events into plain values, counting what aliases expand to."""

    events: Iterator[Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    anchors: dict[str, tuple[Any, int]] = field(default_factory=dict)
    num_nodes: int = 0

    def document(self) -> Any:
        value = None
        num_documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise _Refused(_line(event), "a second document begins here; a file holds one")
                value = self._value(next(self.events), ())
        return value

    def _value(self, event: Any, path: KeyPath) -> Any:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        before = self.num_nodes
        self._count(1, line)
        if event.tag is not None:
            raise _Refused(line, f"the tag {quoted(event.tag)} is not allowed; write plain values only")
        if len(path) > MAX_DEPTH:
            raise _Refused(line, f"nested deeper than {MAX_DEPTH} levels")
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path)
        else:
            value = self._mapping(path)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.num_nodes - before)
        return value

    def _alias(self, event: Any) -> Any:
        known = self.anchors.get(event.anchor)
        if known is None:
            raise _Refused(_line(event), f"the alias {quoted('*' + event.anchor)} stands for nothing written before it")
        value, weight = known
        self._count(weight, _line(event))
        return value

    def _sequence(self, path: KeyPath) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            place = (*path, len(values))
            self.lines[place] = _line(event)
            values.append(self._value(event, place))
        return values

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
                raise _Refused(line, "a key must be plain text")
            key = event.value
            place = (*path, key)
            if key == "<<":
                raise _Refused(line, "merge keys (<<) are not supported; write the keys out")
            if key in values:
                name = ".".join(map(str, place))
                raise _Refused(line, f"{name}: written twice, first on line {self.lines[place]}; keep one of them")
            self.lines[place] = line
            values[key] = self._value(next(self.events), place)
        return values

    def _count(self, weight: int, line: int) -> None:
        self.num_nodes += weight
        if self.num_nodes > MAX_NODES:
            raise _Refused(line, f"holds more than {MAX_NODES} values (aliases count as what they expand to)")


def _scalar(event: Any) -> Any:
    """The value of a scalar; only unquoted text can be anything but text."""
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.match(text):
        _check_length(event, _MAX_DIGITS)
        return int(text)
    if _FLOAT.match(text):
        _check_length(event, _MAX_FLOAT_CHARS)
        return float(text)
    if infinite := _INF.match(text):
        return float(f"{infinite[1]}inf")
    return float("nan") if text in _NAN else text


def _check_length(event: Any, limit: int) -> None:
    if len(event.value) > limit:
        raise _Refused(_line(event), f"the number {quoted(event.value, 24)} has more than {limit} characters")


def _line(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1


def _kind(value: Any) -> str:
    """Never the value itself: a file that is no mapping may be anybody's, reached through a link."""
    return "a list" if isinstance(value, list) else "a single value"
