"""uvicorn with what it leaves open: headers that never end, connections without end, what is no HTTP, how to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunesmith.gateway.refusals import BAD_HTTP, ApiError, error_body, headers_of, status_of
from tunesmith.logs import logger

log = logger("gateway")
MAX_HEADER_BYTES = 64 << 10
_HEADERS_S = 10.0
"""Longest time for a request's headers to arrive."""
_MOST_CONNECTIONS, _SPARE_FILES, _EXCESS = 4096, 64, 16
"""Files that are kept free for engines and the store; and how many more may come while the silent are hung up on."""
_LOG_EVERY_S = 60.0


class Protocol(H11Protocol):
    """HTTP/1.1. Whoever sends headers without end, or too slowly, is told so and hung up on."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.quiet_since_s = time.monotonic()
        self._late: asyncio.TimerHandle | None = None
        self._expect_headers(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_headers(False)
        super().connection_lost(exc)

    @property
    def is_quiet(self) -> bool:
        """Nothing is asked on it now."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def on_response_complete(self) -> None:
        self.quiet_since_s = time.monotonic()
        super().on_response_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """It is answered as if no upgrade were wished for, which is no news."""

    def _expect_headers(self, are_open: bool) -> None:
        """The clock runs while headers have begun and not ended; a connection that is only kept open has its own."""
        if are_open and self._late is None:
            self._late = self.loop.call_later(_HEADERS_S, self.transport.close)
        elif not are_open and self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        """What cannot be read as a request, in the shape that clients expect of every error."""
        error = ApiError(400, "this is no HTTP request that can be read, or its headers are too large", code=BAD_HTTP)
        if b"\nauthorization:" in self.conn.trailing_data[0][:MAX_HEADER_BYTES].lower():
            error = ApiError(401, "the headers are too large; is the key longer than any key?", code="invalid_api_key")
        body = orjson.dumps(error_body(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *headers_of(error),
        ]
        if (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (
                h11.Response(status_code=status_of(error), headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _SeldomLog:
    """One line a minute about what may happen a thousand times a second."""

    def __init__(self, action: str, advice: str) -> None:
        self._action, self._advice = action, advice
        self._num, self._next_s = 0, 0.0

    def count(self) -> None:
        self._num += 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOG_EVERY_S
            log.warning(self._action, times=self._num, advice=self._advice)


class _Door(socket.socket):
    """A listening socket that keeps files free: the number of a new connection tells how many are open."""

    def __init__(self, listening: socket.socket, make_room: Callable[[], None]) -> None:
        kind = (listening.family, listening.type, listening.proto)
        super().__init__(*kind, fileno=listening.detach())
        self._make_room = make_room
        self._most = _most_files()
        self._refused = _SeldomLog("connections_refused", "too many are open; raise `ulimit -n` if they are all yours")

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            wire, address = super().accept()
            if wire.fileno() < self._most:
                return wire, address
            self._make_room()
            if wire.fileno() < self._most + _EXCESS:
                return wire, address
            self._refused.count()
            with wire, contextlib.suppress(OSError):
                wire.setblocking(False)
                wire.send(_FULL)


def _most_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(soft - _SPARE_FILES - _EXCESS, soft // 2))


def _full() -> bytes:
    error = ApiError(503, "too many connections are open; ask again", code="too_many_connections", retry_after_s=5.0)
    body = orjson.dumps(error_body(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines = [b": ".join(header) for header in (*headers, (b"connection", b"close"), *headers_of(error))]
    return b"\r\n".join([b"HTTP/1.1 503 Service Unavailable", *lines, b"", body])


_FULL = _full()


class HttpServer(uvicorn.Server):
    """A uvicorn server whose signals are ours, and which is never deaf for lack of files."""

    def __init__(self, app: Callable[..., Any], grace_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(grace_s)),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        super().__init__(config)
        self._deaf = _SeldomLog("accept_failed", "no files are left for connections; raise `ulimit -n`")
        for name in ("uvicorn", "asyncio"):  # in our form; what it warns of is what strangers send
            theirs = logging.getLogger(name)
            theirs.handlers, theirs.propagate = logging.getLogger("tunesmith").handlers, False
            theirs.setLevel(logging.ERROR)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_trouble)
        await super().serve([_Door(listening, self._hang_up_on_the_quiet) for listening in sockets or ()])

    def _hang_up_on_the_quiet(self) -> None:
        """Whoever has asked nothing for longest makes room for somebody who may."""
        quiet = [wire for wire in self.server_state.connections if isinstance(wire, Protocol) and wire.is_quiet]
        if quiet:
            min(quiet, key=lambda wire: wire.quiet_since_s).transport.abort()

    def _on_trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket" in context and isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
            self._deaf.count()
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
