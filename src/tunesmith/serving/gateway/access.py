"""Access control as ASGI middleware: checks Host, Origin and API key, and formats every error.

Runs before the router: a route without its own check is still protected, and an unauthorized caller cannot probe
which paths exist.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from tunesmith.core.errors import TunesmithError, quoted
from tunesmith.core.ids import new_request_id
from tunesmith.core.logs import logger
from tunesmith.serving.gateway.api_errors import BAD_HTTP, ApiError, error_body, headers_of, status_of
from tunesmith.serving.gateway.bodies import ClientDisconnected
from tunesmith.serving.gateway.http_server import MAX_HEADER_BYTES, RateLimitedLog
from tunesmith.serving.gateway.scopes import Caller, Scope

log = logger("gateway")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
_GONE = 499
_CALLER = "tunesmith.caller"
_METHODS = b"GET, HEAD, POST, OPTIONS"
_HEADERS = (
    *(b"authorization", b"content-type", b"accept", b"user-agent", b"idempotency-key", b"x-request-id"),
    *(b"openai-organization", b"openai-project", b"openai-beta", b"x-tunesmith-session", b"x-tunesmith-consent"),
)
"""Headers that a web page may send."""
_STAINLESS = re.compile(rb"x-stainless-[a-z0-9-]{1,60}")
"""What the stock JavaScript client says about itself; its names change with its versions."""
_EXPOSED = b"x-request-id, retry-after, idempotent-replayed"
_SAID_ONCE = frozenset(
    (
        b"x-tunesmith-session",
        b"x-tunesmith-consent",
        b"idempotency-key",
        b"content-type",
        b"content-encoding",
        b"origin",
    )
)
"""Headers of which only one value would be read."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_BAD_REQUEST = 400


class CallerFinder(Protocol):
    """Identifies the caller by the API key."""

    def caller_of(self, authorization: str | None) -> Caller:
        """Raises 401 for an unknown key."""


class AccessMiddleware:
    """ASGI middleware. Its constructor raises if a route declares no scope."""

    def __init__(
        self,
        app: App,
        routes: Iterable[BaseRoute],
        scopes: dict[str, Scope],
        *,
        keys: CallerFinder,
        hosts: Iterable[str],
        origins: Iterable[str],
    ) -> None:
        self._app = app
        self._routes = [_declared(route, scopes) for route in routes]
        self._keys = keys
        self._hosts = LOOPBACK | {name.lower() for name in hosts}
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._refused = RateLimitedLog("requests_refused", "no key, or an Origin or Host that is not allowed")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begun_s = 0, time.monotonic()
        request_id = _request_id(scope)
        cors: list[tuple[bytes, bytes]] = []

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = [*cors, (b"x-request-id", request_id)]
                message = {**message, "headers": [*message.get("headers", []), *ours]}
            await send(message)

        try:
            await self._answer(scope, receive, send_on, cors)
        except ClientDisconnected:
            status = status or _GONE
        except Exception as error:
            if not status:
                with suppress(OSError):
                    await _response(scope, error)(scope, receive, send_on)
            elif not isinstance(error, OSError):
                log.exception("answer_broken", path=scope["path"], request=request_id.decode())
        finally:
            self._log(scope, status, time.monotonic() - begun_s, request_id.decode())

    def _log(self, scope: Message, status: int, seconds: float, request_id: str) -> None:
        """Log requests of known callers; refused ones are counted only, so that they cannot fill the disk."""
        caller: Caller | None = scope.get(_CALLER)
        if caller is None and status >= _BAD_REQUEST:
            self._refused.count()
        elif caller is not None and (scope["method"] == "POST" or status >= _BAD_REQUEST):
            log.info(
                "request",
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                seconds=round(seconds, 3),
                key=caller.label,
                request=request_id,
            )

    async def _answer(self, scope: Message, receive: Receive, send: Send, cors: list[tuple[bytes, bytes]]) -> None:
        """Check the request, then pass it to its route; `cors` gets the headers for an allowed page."""
        _check_header_bytes(scope)
        self._check_host(scope)
        _check_length(scope)
        cors += self._check_origin(scope)
        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers={"allow": _METHODS.decode()})(scope, receive, send)
            return
        self._check_key(scope)
        _check_said_once(scope)
        _check_query(scope)
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self._app(inner, receive, send)  # the server leaves out the body of an answer to HEAD by itself

    def _check_host(self, scope: Message) -> None:
        names = [value for name, value in scope["headers"] if name == b"host"]
        if len(names) != 1 or host_name(names[0].decode("latin-1")) not in self._hosts:
            shown = quoted(names[0].decode("latin-1")) if names else "no Host at all"
            message = f"Host {shown} is not allowed; to accept it, add it to serve.allowed_hosts"
            raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, scope: Message) -> list[tuple[bytes, bytes]]:
        """CORS headers for an allowed Origin; raises 403 for another one."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None and headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            origin = b"null"  # a cross-site request of a browser without an Origin
        if origin is None:
            return []
        if origin.decode("latin-1").rstrip("/").lower() not in self._origins:
            shown = quoted(origin.decode("latin-1"))
            message = f"Origin {shown} is not allowed; to accept it, add it to serve.allowed_origins"
            raise ApiError(403, message, code="origin_not_allowed")
        vary = b"Origin, Access-Control-Request-Headers"
        allowed = [(b"access-control-allow-origin", origin), (b"vary", vary)]
        if scope["method"] == "OPTIONS":
            requested = headers.get(b"access-control-request-headers", b"").lower().replace(b" ", b"").split(b",")
            names = b", ".join((*_HEADERS, *filter(_STAINLESS.fullmatch, requested)))
            allowed += [(b"access-control-allow-methods", _METHODS), (b"access-control-allow-headers", names)]
            return [*allowed, (b"access-control-max-age", b"600")]
        return [*allowed, (b"access-control-expose-headers", _EXPOSED)]

    def _check_key(self, scope: Message) -> None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) > 1:
            raise ApiError(401, "there are several Authorization headers; send one", code="invalid_api_key")
        caller = self._keys.caller_of(values[0].decode("latin-1") if values else None)
        scope[_CALLER] = caller
        needed = self._scope_of(scope)
        if not caller.may(needed):
            whose = "the server's own token" if needed is Scope.CONTROL else "another key"
            message = f"{scope['method']} {quoted(scope['path'])} needs the scope {needed}; use {whose}"
            raise ApiError(403, message, code="scope_missing")

    def _scope_of(self, scope: Message) -> Scope:
        """The scope that a path needs; an unknown path needs the smallest one."""
        for route, needed in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return needed
        return Scope.READ


def caller_of(request: Request) -> Caller:
    """The caller of a request; the middleware has checked its key."""
    caller = request.scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller


def host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None where there is anything else in it."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2].rstrip(".")).lower()


def _request_id(scope: Message) -> bytes:
    """The caller's own id of the request where it sends one that is safe to log and to send back; else a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    is_sane = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
    return given[0] if is_sane else new_request_id().encode()


def _check_header_bytes(scope: Message) -> None:
    """The parser limits headers that arrive in pieces; these have arrived at once."""
    num_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    num_bytes += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if num_bytes > MAX_HEADER_BYTES:
        message = f"the request has more than {MAX_HEADER_BYTES >> 10} KiB of headers; send fewer"
        raise ApiError(431, message, code=BAD_HTTP)


def _check_said_once(scope: Message) -> None:
    """Refuse repeated headers: one of the values would be ignored, and a proxy may have used that one."""
    names = [name for name, _ in scope["headers"] if name in _SAID_ONCE]
    for name in {name for name in names if names.count(name) > 1}:
        shown = name.decode()
        raise ApiError(400, f"there are several {shown} headers; send one", code="invalid_value", param=shown)


def _check_length(scope: Message) -> None:
    """Refuse a request with two lengths: a proxy may read it differently (request smuggling)."""
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        message = "the request has a Content-Length and a Transfer-Encoding; send one of them"
        raise ApiError(400, message, code=BAD_HTTP)


def _check_query(scope: Message) -> None:
    """Refuse query parameters of a POST: they would be silently ignored."""
    if scope["method"] == "POST" and scope["query_string"]:
        name = scope["query_string"].decode("latin-1").partition("=")[0][:60]
        raise ApiError(
            400, f"{quoted(scope['path'])} takes no parameter {quoted(name)}", code="unknown_parameter", param=name
        )


def _declared(route: BaseRoute, scopes: dict[str, Scope]) -> tuple[Route, Scope]:
    path = getattr(route, "path", None)
    if not isinstance(route, Route) or path not in scopes:
        raise TunesmithError(f"the route {path or route!r} declares no scope, so the server does not start")
    return route, scopes[path]


async def error_response(request: Request, error: Exception) -> Response:
    """The response to an exception of a route."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=_GONE)  # nobody reads it; not an error of ours
    return _response(request.scope, error)


def _response(scope: Message, error: Exception) -> Response:
    is_internal = scope["path"].startswith("/control/")
    is_our_fault = getattr(error, "public", None) and not is_internal
    status = 503 if is_our_fault else status_of(error)
    if not isinstance(error, TunesmithError):
        log.exception("request_failed", method=scope["method"], path=scope["path"][:200])
    body = error_body(error, is_internal=is_internal)
    response = Response(orjson.dumps(body), status_code=status, media_type="application/json")
    response.raw_headers.extend(headers_of(error))
    return response
