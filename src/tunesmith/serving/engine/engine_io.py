"""The engine's desk: takes requests in, reads prompts and adapters beside the computing, and sends answers out.

Five threads stand beside the one that computes: one reads lines, one turns prompts into tokens, one reads adapters,
one writes lines, one answers pings (`heartbeat.py`). The computing thread alone changes what is computed.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson

from tunesmith.core.errors import DataError, TunesmithError
from tunesmith.core.files import verify_folder
from tunesmith.core.logs import logger
from tunesmith.models.adapter_parts import AdapterParts, AdapterReader
from tunesmith.profiles.base_model import is_whole_model
from tunesmith.serving.engine.heartbeat import Pulse, name_thread
from tunesmith.serving.engine.sequence_state import EngineRefusal, Listener, Row
from tunesmith.serving.engine.tokenization import Words
from tunesmith.serving.engine.wire import MAX_LINE, asked_from, line, piece_of
from tunesmith.serving.generation import Ended, Finish, Generation, TokenReading

log = logger("engine")
_OF_SOMEBODY = ("generate", "read")
"""What is of no use once whoever asked has gone; adapters come and go all the same."""
Do = Callable[[], None]
"""Something for the computing thread to do between two passes."""
_Reading = tuple[Mapping[str, Any], Callable[[AdapterParts], None]]
"""A message about an adapter, and what to do with its parts."""


class Outbox:
    """Lines on their way to the gateway; the computing never waits for whoever reads them."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lines: deque[bytes] = deque()
        self._wishes: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def put(self, message: Mapping[str, Any]) -> None:
        """Goes out with the next `flush`: what a pass brings for all rows goes at once."""
        self._lines.append(line(message))

    def flush(self) -> None:
        if self._lines:
            self._wishes.put(None)

    def refuse(self, request_id: str, refusal: EngineRefusal) -> None:
        """From whichever thread finds it; goes out at once."""
        self.put({"id": request_id, "error": refusal.as_json()})
        self.flush()

    def _send(self) -> None:
        name_thread("outbox")
        while True:
            self._wishes.get()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            try:
                self._channel.sendall(b"".join(lines))
            except OSError:
                os._exit(0)  # the gateway is gone: nobody waits for anything


class Answers(Listener):
    """Tells the gateway of rows that somebody reads as they are written."""

    def __init__(self, outbox: Outbox, digest_of: Callable[[str | None], str | None]) -> None:
        self._outbox, self._digest_of = outbox, digest_of

    def piece(self, row: Row, text: str, tokens: tuple[TokenReading, ...]) -> None:
        self._outbox.put({"id": row.id, "piece": piece_of(text, tokens)})

    def ended(self, row: Row, finish: Finish) -> None:
        digest = self._digest_of(row.adapter)
        by: Literal["model", "text"] = "text" if row.writer.is_stopped else "model"
        ended = Ended(finish, len(row.prompt), len(row.ids), row.adapter, digest, by)
        self._outbox.put({"id": row.id, "ended": asdict(ended)})

    def failed(self, row: Row, refusal: EngineRefusal) -> None:
        self._outbox.refuse(row.id, refusal)


class Readings(Listener):
    """Collects greedy answers for the parity probe, and sends them once all are there."""

    def __init__(self, outbox: Outbox, request_id: str, words: Words, prompts: list[Any]) -> None:
        self._outbox, self._id, self._words, self._prompts = outbox, request_id, words, prompts
        self._found: dict[str, dict[str, Any]] = {}
        self._has_failed = False

    def piece(self, row: Row, text: str, tokens: tuple[TokenReading, ...]) -> None:
        """Only the whole is of interest."""

    def ended(self, row: Row, finish: Finish) -> None:
        messages = self._prompts[int(row.id.rpartition("#")[2])]
        said = [token for token in row.ids if token not in row.stop_ids]
        self._found[row.id] = {
            "messages": messages,
            "prompt_text": self._words.prompt_text(messages),
            "prompt_ids": row.prompt,
            "num_prompt": len(row.prompt),
            "answer_ids": row.ids,
            "answer_text": self._words.text_of(said),
            "log_probs": row.log_probs,
            "finish": finish,
        }
        if len(self._found) == len(self._prompts) and not self._has_failed:
            ordered = [self._found[f"{self._id}#{number}"] for number in range(len(self._prompts))]
            self._outbox.put({"id": self._id, "done": {"readings": ordered}})

    def failed(self, row: Row, refusal: EngineRefusal) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._outbox.refuse(self._id, refusal)


class Intake:
    """Takes messages in their order, in a thread of its own: one that is cancelled before its turn is never read."""

    def __init__(
        self, take: Callable[[Mapping[str, Any]], Do], outbox: Outbox, inbox: queue.SimpleQueue[Do], pulse: Pulse
    ) -> None:
        self._take, self._outbox, self._inbox, self._pulse = take, outbox, inbox, pulse
        self._waiting: dict[str, Mapping[str, Any]] = {}
        self._order: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: str | None = None
        threading.Thread(target=self._work, name="intake", daemon=True).start()

    def put(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._waiting[message["id"]] = message
        self._order.put(message["id"])

    def drop(self, message_id: str) -> bool:
        """Whether it had not come as far as the computing, and now never will."""
        with self._lock:
            if self._current == message_id:
                self._current = None
                return True
            is_there = self._waiting.get(message_id, {}).get("do") in _OF_SOMEBODY
            return is_there and self._waiting.pop(message_id) is not None

    def _work(self) -> None:
        self._pulse.join("intake", lambda: self._order.put(""))
        while True:
            message_id = self._order.get()
            self._pulse.beat("intake")
            with self._lock:
                message = self._waiting.pop(message_id, None)
                may_be_dropped = message is not None and message["do"] in _OF_SOMEBODY
                self._current = message_id if may_be_dropped else None
            do = None if message is None else self._read(message)
            with self._lock:
                if do is not None and (self._current == message_id or not may_be_dropped):
                    self._inbox.put(do)
                self._current = None

    def _read(self, message: Mapping[str, Any]) -> Do | None:
        try:
            return self._take(message)
        except EngineRefusal as refusal:
            self._outbox.refuse(message["id"], refusal)
        except Exception as error:  # whatever it is, it is about this message, and the next one is read all the same
            reason = " ".join(str(error).split())[:200]
            text = f"the request cannot be read ({reason}); correct it"
            self._outbox.refuse(message["id"], EngineRefusal(text, "invalid_value", 400))
        return None


class Loader:
    """Reads adapters one after the other, while others are being asked."""

    def __init__(self, reader: AdapterReader, outbox: Outbox, inbox: queue.SimpleQueue[Do], pulse: Pulse) -> None:
        self._reader, self._outbox, self._inbox, self._pulse = reader, outbox, inbox, pulse
        self._wanted: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="loader", daemon=True).start()

    def read(self, message: Mapping[str, Any], then: Callable[[AdapterParts], None]) -> None:
        self._wanted.put((message, then))

    def _work(self) -> None:
        self._pulse.join("loader", lambda: self._wanted.put(None))
        while True:
            wanted = self._wanted.get()
            self._pulse.beat("loader")
            if wanted is None:
                continue
            message, then = wanted
            try:
                parts = self._read(Path(message["path"]), message["digest"])
            except (TunesmithError, OSError) as error:
                self._outbox.refuse(message["id"], EngineRefusal(str(error), "adapter_refused", 422))
            except (MemoryError, RuntimeError) as error:
                log.exception("load_failed", adapter=message["name"])
                reason = " ".join(str(error).split())[:200]
                self._outbox.refuse(
                    message["id"], EngineRefusal(f"adapter {message['name']}: {reason}", "load_failed", 503, 5.0)
                )
            else:
                self._inbox.put(partial(then, parts))

    def _read(self, folder: Path, digest: str) -> AdapterParts:
        verify_folder(folder, digest)
        if is_whole_model(folder):
            raise DataError(f"{folder.name} is a model of its own, no adapter: it needs an engine of its own")
        return self._reader.read(folder)


def lines_of(channel: socket.socket) -> Any:
    """Whole lines until the other side closes."""
    with channel.makefile("rb") as source:
        while (read := source.readline(MAX_LINE)).endswith(b"\n"):
            yield orjson.loads(read)


def rows_to_read(message: Mapping[str, Any], words: Words, outbox: Outbox) -> list[Row]:
    """The rows of a parity probe; raises EngineRefusal at the first prompt that cannot be read."""
    prompts = list(message["prompts"])
    listener = Readings(outbox, message["id"], words, prompts)
    rows = []
    for number, messages in enumerate(prompts):
        asked = Generation(
            id=f"{message['id']}#{number}",
            adapter=message["adapter"],
            messages=messages,
            max_tokens=message["max_tokens"],
            temperature=0.0,
            num_top=0,
        )
        rows.append(Row.of(asked, words.prompt_of(asked), words.context, words, listener))
    return rows


def row_to_answer(message: Mapping[str, Any], words: Words, answers: Answers) -> Row:
    """Raises EngineRefusal where it cannot be answered."""
    asked = asked_from(message)
    return Row.of(asked, words.prompt_of(asked), words.context, words, answers)
