"""uvicorn with what it leaves open: headers that never end, connections without end, what is no HTTP, how to stop."""

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
from tunesmith.serving.gateway.idle_connections import Crowd, origin_of

log = logger("gateway")
MAX_HEADER_BYTES = 64 << 10
_HEADERS_S = 10.0
"""Longest time for a request's headers to arrive."""
_MOST_CONNECTIONS, _SPARE_FILES = 4096, 64
"""Files that are kept free for engines and the store."""
_BACKLOG, _MOST_AT_ONCE = 2048, 64
"""Connections that the kernel keeps waiting; and how many of them are taken before anybody else gets a turn."""
_SHARE_OF_ONE = 2
"""The idle of one address take at most one in so many places. Callers of this machine all have the same address."""
_UNREAD_MS = 60_000
"""Longest time that sent bytes may stay unread: then the kernel ends the connection, also of a peer that is gone."""
_LOG_EVERY_S = 60.0


class Protocol(H11Protocol):
    """HTTP/1.1. Whoever sends headers without end, or too slowly, is told so and hung up on."""

    crowd: Crowd[Protocol]
    """Of the server whose connections these are."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        self._expect_headers(True)
        wire = transport.get_extra_info("socket")
        if wire is not None and wire.family in (socket.AF_INET, socket.AF_INET6):
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        hang_up(self.crowd.join(self, origin_of(self.client)))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()
        self._expect_headers(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_headers(False)
        self.crowd.leave(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """Whether something is asked on it now; headers that have only begun are nothing yet."""
        if self.cycle is None or self.cycle.response_complete:
            hang_up(self.crowd.rest(self))
        else:
            self.crowd.work(self)

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


def hang_up(wire: Protocol | None) -> None:
    """On somebody who asks nothing; what was answered before is still sent."""
    if wire is None:
        return
    wire.crowd.leave(wire)
    if wire.transport.get_write_buffer_size():
        wire.transport.close()
    else:
        wire.transport.abort()


class SeldomLog:
    """One line a minute about what may happen a thousand times a second."""

    def __init__(self, action: str, advice: str) -> None:
        self._action, self._advice = action, advice
        self._num, self._next_s = 0, 0.0

    def count(self) -> None:
        self._num += 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOG_EVERY_S
            log.warning(self._action, times=self._num, advice=self._advice)


class _Places(NamedTuple):
    """How many connections there may be, by the limit of open files."""

    most: int
    at_once: int
    """Taken in one go: so many more may be open until those who were hung up on are gone."""

    @classmethod
    def find(cls) -> _Places:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return cls(_MOST_CONNECTIONS, _MOST_AT_ONCE)
        at_once = max(4, min(_MOST_AT_ONCE, soft // 16))
        return cls(min(_MOST_CONNECTIONS, max(soft - _SPARE_FILES - 2 * at_once, soft // 2)), at_once)


class _Door(socket.socket):
    """A listening socket that keeps files free: the number of a new connection tells how many are open."""

    def __init__(self, listening: socket.socket, places: _Places, crowd: Crowd[Protocol]) -> None:
        kind = (listening.family, listening.type, listening.proto)
        super().__init__(*kind, fileno=listening.detach())
        self._places, self._crowd = places, crowd
        self._refused = SeldomLog("connections_refused", "too many are open; raise `ulimit -n` if they are all yours")

    def listen(self, backlog: int = _BACKLOG, /) -> None:
        """What asyncio says here is how many it accepts in one go; the kernel may keep more."""
        super().listen(_BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            wire, address = super().accept()
            if wire.fileno() < self._places.most:
                return wire, address
            hang_up(self._crowd.longest_idle(origin_of(address)))
            if wire.fileno() < self._places.most + 2 * self._places.at_once:
                return wire, address
            self._refused.count()
            with wire, contextlib.suppress(OSError):
                wire.setblocking(False)
                wire.send(_full())


def _full() -> bytes:
    error = ApiError(503, "too many connections are open; ask again", code="too_many_connections", retry_after_s=5.0)
    body = orjson.dumps(error_body(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"x-request-id", new_request_id().encode()))
    lines = [b": ".join(header) for header in (*headers, (b"connection", b"close"), *headers_of(error))]
    return b"\r\n".join([b"HTTP/1.1 503 Service Unavailable", *lines, b"", body])


class HttpServer(uvicorn.Server):
    """A uvicorn server whose signals are ours, and which is never deaf for lack of files."""

    def __init__(self, app: Callable[..., Any], grace_s: float) -> None:
        self._places = _Places.find()
        self._crowd: Crowd[Protocol] = Crowd(self._places.most // _SHARE_OF_ONE)
        config = uvicorn.Config(
            app,
            http=type("Protocol", (Protocol,), {"crowd": self._crowd}),
            backlog=self._places.at_once,
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
        self._deaf = SeldomLog("accept_failed", "no files are left for connections; raise `ulimit -n`")
        for name in ("uvicorn", "asyncio"):  # in our form; what it warns of is what strangers send
            theirs = logging.getLogger(name)
            theirs.handlers, theirs.propagate = logging.getLogger("tunesmith").handlers, False
            theirs.setLevel(logging.ERROR)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_trouble)
        await super().serve([_Door(listening, self._places, self._crowd) for listening in sockets or ()])

    def _on_trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket" in context and isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
            self._deaf.count()
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
