"""uvicorn with limits: slow headers, number of connections, idle connections, malformed requests; and our signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunesmith.core.ids import new_request_id
from tunesmith.core.logs import logger
from tunesmith.serving.gateway.api_errors import BAD_HTTP, ApiError, error_body, headers_of, status_of
from tunesmith.serving.gateway.idle_connections import IdleConnections, origin_of

log = logger("gateway")
MAX_HEADER_BYTES = 64 << 10
_HEADERS_S = 10.0
"""Maximum time for the headers of a request to arrive."""
_MAX_CONNECTIONS, _SPARE_FILES = 4096, 64
"""Maximum connections, and file descriptors kept free for engines and the store."""
_BACKLOG, _MAX_ACCEPTS = 2048, 64
"""The listen backlog, and how many connections are accepted in one go."""
_MAX_ADDRESS_SHARE = 2
"""Idle connections of one address take at most one in this many. All local callers share one address."""
_UNREAD_MS = 60_000
"""TCP_USER_TIMEOUT: the kernel closes a connection whose peer acknowledges nothing for this long."""
_LOG_EVERY_S = 60.0


class Protocol(H11Protocol):
    """HTTP/1.1; closes connections whose headers are too large or arrive too slowly."""

    idle_connections: IdleConnections[Protocol]
    """The idle connections of this server."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        self._expect_headers(True)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        close_idle(self.idle_connections.add(self, origin_of(self.client)))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._mark()
        self._expect_headers(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_headers(False)
        self.idle_connections.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._mark()

    def _mark(self) -> None:
        """Mark the connection as idle or busy; it is idle until its headers are complete."""
        if self.cycle is None or self.cycle.response_complete:
            close_idle(self.idle_connections.mark_idle(self))
        else:
            self.idle_connections.mark_busy(self)

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade request is answered as a plain one; not worth a log line."""

    def _expect_headers(self, are_open: bool) -> None:
        """Run the header timeout while headers are incomplete; the keep-alive timeout is uvicorn's own."""
        if are_open and self._late is None:
            self._late = self.loop.call_later(_HEADERS_S, self.transport.close)
        elif not are_open and self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with the error format of all others."""
        error = ApiError(
            400, f"malformed HTTP request, or headers larger than {MAX_HEADER_BYTES >> 10} KiB", code=BAD_HTTP
        )
        if b"\nauthorization:" in self.conn.trailing_data[0][:MAX_HEADER_BYTES].lower():
            error = ApiError(401, "the headers are too large; the API key may be too long", code="invalid_api_key")
        body = orjson.dumps(error_body(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", new_request_id().encode()),
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


def close_idle(connection: Protocol | None) -> None:
    """Close an idle connection to free a file descriptor; unsent bytes are still sent."""
    if connection is None:
        return
    connection.idle_connections.remove(connection)
    if connection.transport.get_write_buffer_size():
        connection.transport.close()
    else:
        connection.transport.abort()


class RateLimitedLog:
    """Logs at most one line a minute about a frequent event, with the number of times."""

    def __init__(self, action: str, advice: str) -> None:
        self._action, self._advice = action, advice
        self._num, self._next_s = 0, 0.0

    def count(self) -> None:
        self._num += 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOG_EVERY_S
            log.warning(self._action, times=self._num, advice=self._advice)


class _ConnectionLimits(NamedTuple):
    """Limits of connections, from the limit of open files."""

    most: int
    at_once: int
    """Accepted in one go; this many more may be open until closed ones are gone."""

    @classmethod
    def find(cls) -> _ConnectionLimits:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return cls(_MAX_CONNECTIONS, _MAX_ACCEPTS)
        at_once = max(4, min(_MAX_ACCEPTS, soft // 16))
        return cls(min(_MAX_CONNECTIONS, max(soft - _SPARE_FILES - 2 * at_once, soft // 2)), at_once)


class _LimitedSocket(socket.socket):
    """A listening socket that keeps file descriptors free: closes the longest idle connection, or refuses with 503."""

    def __init__(
        self, listening: socket.socket, limits: _ConnectionLimits, idle_connections: IdleConnections[Protocol]
    ) -> None:
        kind = (listening.family, listening.type, listening.proto)
        super().__init__(*kind, fileno=listening.detach())
        self._limits, self._idle_connections = limits, idle_connections
        self._refused = RateLimitedLog(
            "connections_refused", "too many are open; raise `ulimit -n` if they are all yours"
        )

    def listen(self, backlog: int = _BACKLOG, /) -> None:
        """asyncio passes the number of accepts here; the kernel's backlog is larger."""
        super().listen(_BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            connection, address = super().accept()
            if connection.fileno() < self._limits.most:
                return connection, address
            close_idle(self._idle_connections.longest_idle(origin_of(address)))
            if connection.fileno() < self._limits.most + 2 * self._limits.at_once:
                return connection, address
            self._refused.count()
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(_full())


def _full() -> bytes:
    error = ApiError(503, "too many connections are open; retry", code="too_many_connections", retry_after_s=5.0)
    body = orjson.dumps(error_body(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"x-request-id", new_request_id().encode()))
    lines = [b": ".join(header) for header in (*headers, (b"connection", b"close"), *headers_of(error))]
    return b"\r\n".join([b"HTTP/1.1 503 Service Unavailable", *lines, b"", body])


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us and keeps accepting when file descriptors run out."""

    def __init__(self, app: Callable[..., Any], grace_s: float) -> None:
        self._limits = _ConnectionLimits.find()
        self._idle_connections: IdleConnections[Protocol] = IdleConnections(self._limits.most // _MAX_ADDRESS_SHARE)
        config = uvicorn.Config(
            app,
            http=type("Protocol", (Protocol,), {"idle_connections": self._idle_connections}),
            backlog=self._limits.at_once,
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
        self._accept_failed = RateLimitedLog("accept_failed", "no files are left for connections; raise `ulimit -n`")
        for name in ("uvicorn", "asyncio"):  # in our log format; their warnings are about malformed requests
            theirs = logging.getLogger(name)
            theirs.handlers, theirs.propagate = logging.getLogger("tunesmith").handlers, False
            theirs.setLevel(logging.ERROR)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_trouble)
        await super().serve(
            [_LimitedSocket(listening, self._limits, self._idle_connections) for listening in sockets or ()]
        )

    def _on_trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket" in context and isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
            self._accept_failed.count()
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
