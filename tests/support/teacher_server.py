"""A teacher on this machine that speaks OpenAI's chat completions and plays what a test wants: good, rude, dead."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Play = Callable[["Call"], None]


class Call(BaseHTTPRequestHandler):
    """One request, and how it may be answered."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self.asked: dict[str, Any] = json.loads(self.rfile.read(size))
        with self.server.lock:
            self.server.calls.append((self.path, dict(self.headers), self.asked))
        self.close_connection = True
        with contextlib.suppress(OSError):  # whoever asked may have gone
            self.server.play(self)

    @property
    def question(self) -> str:
        return str(self.asked["messages"][-1]["content"])

    def say(self, text: str | None, *, finish: str = "stop", usage: Any = "honest", **more: Any) -> None:
        """An answer as it should be; `usage` None leaves it out."""
        counted = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30} if usage == "honest" else usage
        message = {"role": "assistant", "content": text}
        body = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
        self.reply(200, {**body, **({} if counted is None else {"usage": counted}), **more})

    def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin(self, length: int) -> None:
        """Only the head of a response that promises so many bytes."""
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.flush()

    def drip(self, raw: bytes, every_s: float) -> None:
        """Write to the connection byte by byte, head included."""
        for place in range(len(raw)):
            self.connection.sendall(raw[place : place + 1])
            time.sleep(every_s)

    def hang_up(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, play: Play) -> None:
        super().__init__(("127.0.0.1", 0), Call)
        self.play = play
        self.lock = threading.Lock()
        self.calls: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@dataclass
class Teacher:
    """A running one; `play` may be changed at any time."""

    server: _Server = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    @property
    def calls(self) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
        with self.server.lock:
            return list(self.server.calls)

    def plays(self, play: Play) -> None:
        self.server.play = play


@contextmanager
def a_teacher(play: Play) -> Iterator[Teacher]:
    server = _Server(play)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield Teacher(server)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def better(call: Call) -> None:
    """Keeps everything that the question names."""
    call.say(f"Certainly: {call.question}, as you wish.")
