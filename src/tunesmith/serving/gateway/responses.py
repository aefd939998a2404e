"""How an answer leaves: JSON at once or server-sent events; what follows it is done after its last byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

from tunesmith.serving.gateway.api_errors import error_body
from tunesmith.serving.gateway.bodies import ClientGone

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
_UNREAD_S = 30.0
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class JsonAnswer(Response):
    """One object; `after` is called once it was sent."""

    def __init__(self, body: Mapping[str, Any], *, status: int = 200, after: Callable[[], None] | None = None) -> None:
        super().__init__(orjson.dumps(body), status_code=status, media_type="application/json")
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        if self._after is not None:
            self._after()


class SseAnswer(Response):
    """A stream of objects. Trouble in the middle becomes an error object, and the stream ends without `[DONE]`."""

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        *,
        end: Callable[[], Awaitable[None]],
        after: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._events = events
        self._end = end
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_whole = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _SSE})
            is_whole = await while_there(receive, self._write(send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._end()  # also where nothing of the stream was ever asked for
            self._after(is_whole)

    async def _write(self, send: Any) -> bool:
        """Whether the answer went out whole."""
        last = b"data: [DONE]\n\n"
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await _send(send, b"data: " + orjson.dumps(event) + b"\n\n")
        except (ClientGone, OSError):
            raise
        except Exception as error:
            last = b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        await _send(send, last, more=False)
        return last.endswith(b"[DONE]\n\n")


async def _send(send: Any, body: bytes, *, more: bool = True) -> None:
    """Whoever reads nothing of a stream for so long is gone, and must not hold a place."""
    try:
        async with asyncio.timeout(_UNREAD_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})
    except TimeoutError:
        raise ClientGone from None


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as whoever asked has gone; raises ClientGone then."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        for task in (doing, leaving):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
