"""events.jsonl: the program appends, the worker reads what is whole and believes nothing that breaks the rules."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tunesmith.core.errors import ProgramError
from tunesmith.core.files import NotPlainFile, open_plain
from tunesmith.programs.protocol import (
    MAX_COUNT,
    MAX_EVENTS,
    MAX_LINE,
    CheckpointEvent,
    Event,
    Metrics,
    Progress,
    ValidationEvent,
)

_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
_CHUNK = 256 << 10
_BATCH = 8 << 20


class EventWriter:
    """Appends one whole line per event; a line that could not be written is taken back."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._seq = 0

    def write(self, kind: str, **fields: Any) -> None:
        with self._lock:
            event = {"v": 1, "seq": self._seq + 1, "at": round(time.time(), 3), "type": kind, **fields}
            line = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
            if len(line) > MAX_LINE:
                raise ValueError(f"an event of type {kind} has {len(line)} bytes, more than {MAX_LINE}")
            self._append(line)
            self._seq += 1

    def _append(self, line: bytes) -> None:
        start = os.fstat(self._handle).st_size
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError:
            os.ftruncate(self._handle, start)  # half a line would be a protocol violation
            raise


class EventReader:
    """Reads new whole lines on each call, a bounded amount at a time, and raises ProgramError at the first breach."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._num_lines = 0
        self._seq = 0
        self._step = 0

    @property
    def has_half_line(self) -> bool:
        return bool(self._rest)

    def read(self) -> list[Any]:
        """The events since the last call; at most some 8 MiB of them, so call again until none come."""
        events: list[Event] = []
        budget = _BATCH
        while budget > 0 and (chunk := self._next_chunk()):
            budget -= len(chunk)
            lines = (self._rest + chunk).split(b"\n")
            self._rest = lines.pop()
            events.extend(self._event(line) for line in lines)
            if len(self._rest) > MAX_LINE:
                raise self._violation("a line is longer than 1 MiB")
        return events

    def _next_chunk(self) -> bytes:
        try:
            source = open_plain(self._path)
        except FileNotFoundError:
            if self._offset:
                raise self._violation("the event log was removed") from None
            return b""
        except NotPlainFile:
            raise self._violation("the event log is not a plain file") from None
        except OSError as error:
            raise self._violation(f"the event log cannot be read ({error.strerror})") from None
        with source:
            size = os.fstat(source.fileno()).st_size
            if size < self._offset:
                raise self._violation("the event log was cut")
            if size > MAX_EVENTS:
                raise self._violation("the event log is larger than 1 GiB")
            chunk = os.pread(source.fileno(), _CHUNK, self._offset)
        self._offset += len(chunk)
        return chunk

    def _event(self, line: bytes) -> Event:
        self._num_lines += 1
        if len(line) > MAX_LINE:
            raise self._violation("a line is longer than 1 MiB")
        try:
            event = _EVENT.validate_json(line, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(str(part) for part in first["loc"][:6])
            raise self._violation(f"{place}: {first['msg']}"[:300] if place else str(first["msg"])[:300]) from None
        self._check_order(event)
        if isinstance(event, CheckpointEvent):
            self._check_checkpoint(event)
        return event

    def _check_order(self, event: Event) -> None:
        if event.seq <= self._seq or event.seq > MAX_COUNT:
            raise self._violation(f"seq {str(event.seq)[:20]} does not follow {self._seq}")
        self._seq = event.seq
        if not math.isfinite(event.at):
            raise self._violation("at: not a time")
        if isinstance(event, Metrics | ValidationEvent | CheckpointEvent) and event.step > MAX_COUNT:
            raise self._violation("step: too large")
        if isinstance(event, Progress) and max(event.done, event.total) > MAX_COUNT:
            raise self._violation("progress: too large")
        if isinstance(event, Metrics):
            if event.step < self._step:
                raise self._violation(f"step {event.step} after step {self._step}: steps go forward only")
            self._step = event.step

    def _check_checkpoint(self, event: CheckpointEvent) -> None:
        name = event.path
        if not name or len(name) > 200 or name.startswith(".") or any(bad in name for bad in "/\\\0"):
            raise self._violation("a checkpoint outside its folder")

    def _violation(self, what: str) -> ProgramError:
        shown = "".join(char if char.isprintable() else " " for char in what)
        return ProgramError(f"the program broke the protocol at line {self._num_lines} of its events: {shown}")
