"""uvicorn with what it leaves open: headers that never end, what is no HTTP at all, and our own way to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunesmith.gateway.refusals import ApiError, error_body, headers_of, status_of

MAX_HEADER_BYTES = 64 << 10
_HEADERS_S = 10.0
"""Longest time for a request's headers to arrive."""


class Protocol(H11Protocol):
    """HTTP/1.1. Whoever sends headers without end, or too slowly, is told so and hung up on."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        self._expect_headers(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_headers(False)
        super().connection_lost(exc)

    def _expect_headers(self, are_open: bool) -> None:
        """The clock runs while headers have begun and not ended; a connection that is only kept open has its own."""
        if are_open and self._late is None:
            self._late = self.loop.call_later(_HEADERS_S, self.transport.close)
        elif not are_open and self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        """What cannot be read as a request, in the shape that clients expect of every error."""
        error = ApiError(400, "this is no HTTP request that can be read, or its headers are too large", code="bad_http")
        if b"\nauthorization:" in self.conn.trailing_data[0][:MAX_HEADER_BYTES].lower():
            error = ApiError(401, "the headers are too large; is the key longer than any key?", code="invalid_api_key")
        body = orjson.dumps(error_body(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *headers_of(error),
        ]
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (
                h11.Response(status_code=status_of(error), headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server whose signals are ours."""

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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
