"""The engine's input and output: the queue of messages, the adapter loader and the response writer.

Five threads run beside the compute thread: one reads lines, one tokenizes prompts, one reads adapters, one writes
lines, one answers pings (`heartbeat.py`). Only the compute thread changes the scheduler and the loaded adapters.
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
from tunesmith.models.adapter_weights import AdapterReader, AdapterWeights
from tunesmith.profiles.base_model import is_whole_model
from tunesmith.serving.engine.heartbeat import HeartbeatReporter, name_thread
from tunesmith.serving.engine.sequence_state import EngineRefusal, Listener, SequenceState
from tunesmith.serving.engine.tokenization import PromptTokenizer
from tunesmith.serving.engine.wire import MAX_LINE, decode_request, encode_delta, line
from tunesmith.serving.generation import FinishReason, GenerationEnd, GenerationRequest, TokenLogprob

log = logger("engine")
_CANCELLABLE = ("generate", "probe")
"""Operations that are dropped when the client disconnects; loads and unloads run in any case."""
Action = Callable[[], None]
"""Runs on the compute thread between two passes."""
_LoadRequest = tuple[Mapping[str, Any], Callable[[AdapterWeights], None]]
"""A load message, and what to do with the adapter's tensors."""


class ResponseWriter:
    """Sends lines to the gateway from its own thread, so that the compute thread never waits for the socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lines: deque[bytes] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="writer", daemon=True).start()

    def put(self, message: Mapping[str, Any]) -> None:
        """Queue a message until the next `flush`, so that one pass sends the tokens of all sequences at once."""
        self._lines.append(line(message))

    def flush(self) -> None:
        if self._lines:
            self._wake.put(None)

    def refuse(self, request_id: str, refusal: EngineRefusal) -> None:
        """Send an error for one request at once; may be called from any thread."""
        self.put({"id": request_id, "error": refusal.as_json()})
        self.flush()

    def _send(self) -> None:
        name_thread("writer")
        while True:
            self._wake.get()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            try:
                self._channel.sendall(b"".join(lines))
            except OSError:
                os._exit(0)  # the gateway is gone


class StreamListener(Listener):
    """Streams a sequence to the gateway."""

    def __init__(self, writer: ResponseWriter, digest_of: Callable[[str | None], str | None]) -> None:
        self._writer, self._digest_of = writer, digest_of

    def delta(self, sequence: SequenceState, text: str, tokens: tuple[TokenLogprob, ...]) -> None:
        self._writer.put({"id": sequence.id, "delta": encode_delta(text, tokens)})

    def ended(self, sequence: SequenceState, finish: FinishReason) -> None:
        digest = self._digest_of(sequence.adapter)
        stopped_by: Literal["model", "text"] = "text" if sequence.detokenizer.is_stopped else "model"
        ended = GenerationEnd(finish, len(sequence.prompt), len(sequence.ids), sequence.adapter, digest, stopped_by)
        self._writer.put({"id": sequence.id, "ended": asdict(ended)})

    def failed(self, sequence: SequenceState, refusal: EngineRefusal) -> None:
        self._writer.refuse(sequence.id, refusal)


class ProbeListener(Listener):
    """Collects the greedy answers of a parity probe and sends them together."""

    def __init__(self, writer: ResponseWriter, request_id: str, tokenizer: PromptTokenizer, prompts: list[Any]) -> None:
        self._writer, self._id, self._tokenizer, self._prompts = writer, request_id, tokenizer, prompts
        self._results: dict[str, dict[str, Any]] = {}
        self._has_failed = False

    def delta(self, sequence: SequenceState, text: str, tokens: tuple[TokenLogprob, ...]) -> None:
        """A probe reports complete answers only."""

    def ended(self, sequence: SequenceState, finish: FinishReason) -> None:
        messages = self._prompts[int(sequence.id.rpartition("#")[2])]
        answer = [token for token in sequence.ids if token not in sequence.stop_ids]
        self._results[sequence.id] = {
            "messages": messages,
            "prompt_text": self._tokenizer.prompt_text(messages),
            "prompt_ids": sequence.prompt,
            "num_prompt": len(sequence.prompt),
            "answer_ids": sequence.ids,
            "answer_text": self._tokenizer.text_of(answer),
            "log_probs": sequence.log_probs,
            "finish": finish,
        }
        if len(self._results) == len(self._prompts) and not self._has_failed:
            ordered = [self._results[f"{self._id}#{number}"] for number in range(len(self._prompts))]
            self._writer.put({"id": self._id, "done": {"readings": ordered}})

    def failed(self, sequence: SequenceState, refusal: EngineRefusal) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._writer.refuse(self._id, refusal)


class MessageQueue:
    """Handles messages in order, in its own thread; a message that is cancelled while it waits is never parsed."""

    def __init__(
        self,
        take: Callable[[Mapping[str, Any]], Action],
        writer: ResponseWriter,
        inbox: queue.SimpleQueue[Action],
        heartbeat: HeartbeatReporter,
    ) -> None:
        self._take, self._writer, self._inbox, self._heartbeat = take, writer, inbox, heartbeat
        self._waiting: dict[str, Mapping[str, Any]] = {}
        self._order: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: str | None = None
        threading.Thread(target=self._work, name="messages", daemon=True).start()

    def put(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._waiting[message["id"]] = message
        self._order.put(message["id"])

    def drop(self, message_id: str) -> bool:
        """Cancel a queued message. True if it had not reached the compute thread."""
        with self._lock:
            if self._current == message_id:
                self._current = None
                return True
            is_there = self._waiting.get(message_id, {}).get("op") in _CANCELLABLE
            return is_there and self._waiting.pop(message_id) is not None

    def _work(self) -> None:
        self._heartbeat.register("messages", lambda: self._order.put(""))
        while True:
            message_id = self._order.get()
            self._heartbeat.beat("messages")
            with self._lock:
                message = self._waiting.pop(message_id, None)
                is_cancellable = message is not None and message["op"] in _CANCELLABLE
                self._current = message_id if is_cancellable else None
            action = None if message is None else self._handle(message)
            with self._lock:
                if action is not None and (self._current == message_id or not is_cancellable):
                    self._inbox.put(action)
                self._current = None

    def _handle(self, message: Mapping[str, Any]) -> Action | None:
        try:
            return self._take(message)
        except EngineRefusal as refusal:
            self._writer.refuse(message["id"], refusal)
        except Exception as error:  # an error here concerns one message only; keep reading
            reason = " ".join(str(error).split())[:200]
            text = f"the request is invalid ({reason})"
            self._writer.refuse(message["id"], EngineRefusal(text, "invalid_value", 400))
        return None


class Loader:
    """Reads adapters from disk one at a time, in its own thread, while generation goes on."""

    def __init__(
        self,
        reader: AdapterReader,
        writer: ResponseWriter,
        inbox: queue.SimpleQueue[Action],
        heartbeat: HeartbeatReporter,
    ) -> None:
        self._reader, self._writer, self._inbox, self._heartbeat = reader, writer, inbox, heartbeat
        self._wanted: queue.SimpleQueue[_LoadRequest | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="loader", daemon=True).start()

    def read(self, message: Mapping[str, Any], then: Callable[[AdapterWeights], None]) -> None:
        self._wanted.put((message, then))

    def _work(self) -> None:
        self._heartbeat.register("loader", lambda: self._wanted.put(None))
        while True:
            wanted = self._wanted.get()
            self._heartbeat.beat("loader")
            if wanted is None:
                continue
            message, then = wanted
            try:
                parts = self._read(Path(message["path"]), message["digest"])
            except (TunesmithError, OSError) as error:
                self._writer.refuse(message["id"], EngineRefusal(str(error), "adapter_refused", 422))
            except (MemoryError, RuntimeError) as error:
                log.exception("load_failed", adapter=message["name"])
                reason = " ".join(str(error).split())[:200]
                self._writer.refuse(
                    message["id"], EngineRefusal(f"adapter {message['name']}: {reason}", "load_failed", 503, 5.0)
                )
            else:
                self._inbox.put(partial(then, parts))

    def _read(self, folder: Path, digest: str) -> AdapterWeights:
        verify_folder(folder, digest)
        if is_whole_model(folder):
            raise DataError(f"{folder.name} is a full model, not an adapter; it needs its own engine")
        return self._reader.read(folder)


def lines_of(channel: socket.socket) -> Any:
    """Yield the complete lines, parsed, until the other side closes."""
    with channel.makefile("rb") as source:
        while (read := source.readline(MAX_LINE)).endswith(b"\n"):
            yield orjson.loads(read)


def probe_sequences(
    message: Mapping[str, Any], tokenizer: PromptTokenizer, writer: ResponseWriter
) -> list[SequenceState]:
    """The sequences of a parity probe; raises EngineRefusal at the first invalid prompt."""
    prompts = list(message["prompts"])
    listener = ProbeListener(writer, message["id"], tokenizer, prompts)
    sequences = []
    for number, messages in enumerate(prompts):
        request = GenerationRequest(
            id=f"{message['id']}#{number}",
            adapter=message["adapter"],
            messages=messages,
            max_tokens=message["max_tokens"],
            temperature=0.0,
            top_logprobs=0,
        )
        sequences.append(
            SequenceState.of(request, tokenizer.prompt_of(request), tokenizer.context, tokenizer, listener)
        )
    return sequences


def stream_sequence(message: Mapping[str, Any], tokenizer: PromptTokenizer, listener: StreamListener) -> SequenceState:
    """The sequence of a `generate` message; raises EngineRefusal for an invalid request."""
    request = decode_request(message)
    return SequenceState.of(request, tokenizer.prompt_of(request), tokenizer.context, tokenizer, listener)
