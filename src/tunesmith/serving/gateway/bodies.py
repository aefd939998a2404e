"""Reading a request's body: no more of it than allowed, no longer than allowed, strict JSON, one object."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request

from tunesmith.core import strict_json
from tunesmith.core.errors import quoted
from tunesmith.serving.gateway.api_errors import ApiError

Receive = Callable[[], Awaitable[Any]]
_SLOW_S = 30.0
"""Maximum time for a body to arrive."""
_MAX_DEPTH = 64
_LARGE = 256 << 10  # parsed in a thread, so that nobody else waits


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class JsonRequest(Request):
    """A request whose body was read and parsed: whoever asks for it again is given the same object."""

    def __init__(self, request: Request, said: dict[str, Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._said = said

    async def json(self) -> dict[str, Any]:
        return self._said


async def read_json(headers: Mapping[str, str], receive: Receive, max_bytes: int) -> dict[str, Any]:
    """The object in a body; raises ApiError with what is wrong with it."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        said = f"is {quoted(kind)}" if kind else "is missing"
        raise ApiError(415, f"the Content-Type {said}; send application/json", code="unsupported_media_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not read; send it as it is", code="unsupported_media_type")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        body = await asyncio.wait_for(_read(receive, max_bytes), _SLOW_S)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_SLOW_S:g} s", code="slow_body") from None
    return await asyncio.to_thread(parse, body) if len(body) > _LARGE else parse(body)


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse(body: bytes) -> dict[str, Any]:
    """Strict: UTF-8, no NaN, no key twice, not nested without end."""
    try:
        orjson.loads(body)  # refuses in linear time what the slower second reader might choke on
        value = strict_json.loads(body, _stands_twice)
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except orjson.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at character {error.pos + 1}") from None
    except ValueError as error:
        raise _not_json(str(error)) from None
    if not isinstance(value, dict):
        raise _not_json("it is not an object; send {…}")
    return value


def can_be_passed_on(value: Any) -> bool:
    """Whether it can be written as JSON again wherever it goes: not nested without end, no number beyond 64 bits."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            return True
        if any(isinstance(one, int) and not -(2**63) <= one < 2**64 for one in level):
            return False
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inner for part in parts]
    return False


def _stands_twice(key: str) -> ValueError:
    return ValueError(f"the key {quoted(key)} stands there twice")


def _not_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not JSON that can be used: {reason}", code="invalid_json")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than serve.max_body_bytes ({max_bytes})", code="body_too_large")
