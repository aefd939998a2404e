"""A small real HTTP server for tests that speak to servers of others: routes are methods, bodies are JSON."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answered(Exception):
    """The answer to a request: raised by a route, from however deep."""

    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


class JsonServer:
    """Runs in a thread; `stop` and `start` again on the same port play a restart."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.lock = threading.RLock()
        self.connections: set[socket.socket] = set()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def answer(self, method: str, path: str, body: Any, call: BaseHTTPRequestHandler) -> Any:
        """What to answer with 200; raise Answered for anything else."""
        raise NotImplementedError

    def start(self) -> None:
        outer = self

        class Call(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_json = "json" in (self.headers.get("Content-Type") or "")
                body = json.loads(raw) if raw and is_json else raw
                with outer.lock:
                    outer.calls.append((self.command, self.path, body))
                try:
                    self.reply(200, outer.answer(self.command, self.path, body, self))
                except Answered as answered:
                    self.reply(answered.status, answered.body, answered.headers)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def setup(self) -> None:
                super().setup()
                outer.connections.add(self.connection)

            def finish(self) -> None:
                outer.connections.discard(self.connection)
                with contextlib.suppress(OSError):  # `stop` may have closed it
                    super().finish()

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return self.handle_any
                raise AttributeError(name)

            def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
                if body is ...:  # the route has written everything itself
                    self.close_connection = True
                    return
                content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self._port), Call)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self.connections):  # a client's pool may hold some: they would be answered for ever
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
