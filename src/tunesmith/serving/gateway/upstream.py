"""Upstream servers (vLLM, llama.cpp, Ollama): forwards one request and streams its answer back.

Clients see the error of an upstream server, never its address or key. The replica with the fewest running requests is
used; an unreachable one is skipped for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from tunesmith.core import http
from tunesmith.core.errors import TunesmithError
from tunesmith.core.logs import logger
from tunesmith.deployment.targets.base import Endpoint, ProxyTarget, ServedAdapter, TargetError
from tunesmith.deployment.targets.registry import make_target
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.served_profiles import ServedProfile

if TYPE_CHECKING:
    import httpx2

log = logger("gateway")

MAX_ANSWER = 32 << 20
"""Maximum size of an answer in bytes, streamed or not."""
MAX_EVENT = 4 << 20
UNHEALTHY_S = 5.0
STALL_S = 30.0
"""Maximum time between two chunks of a stream; a server that is silent for longer counts as hung."""
_MAX_SHOWN = 500
_MAX_WAIT_S = 300.0
_FRESH_S = 0.5
_DATA, _DONE = b"data:", b"[DONE]"


class _Lost(Exception):
    """The server does not have the requested version."""


class _Stalled(http.TooSlow):
    """The server stopped in the middle of a stream."""


class UpstreamServer:
    """The server of one profile, used over the OpenAI API."""

    def __init__(self, target: ProxyTarget, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._clients: dict[tuple[bool, bool], httpx2.AsyncClient] = {}
        self._num_active: Counter[str] = Counter()
        self._unhealthy: dict[str, float] = {}
        self._endpoints: dict[str | None, tuple[float, list[Endpoint]]] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._tried: dict[str, tuple[float, bool]] = {}
        """When a version was last reloaded, and whether that succeeded."""

    async def ask(
        self, path: str, body: Mapping[str, Any], adapter: ServedAdapter | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream, or the whole answer once; raises EngineError. Closing the iterator cancels."""
        for attempt in range(2):
            asked_at = time.monotonic()
            try:
                async with aclosing(self._ask_replicas(path, body, adapter)) as parts:
                    async for said in parts:
                        yield said
                return
            except _Lost:
                if attempt or adapter is None:
                    raise _failed("does not have the requested version", 503, retry_after_s=5.0) from None
                await self._reload(adapter, asked_at)

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.aclose()

    async def _ask_replicas(
        self, path: str, body: Mapping[str, Any], adapter: ServedAdapter | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Try the replicas in order until one accepts the request."""
        for endpoint in await self._in_order(adapter):
            self._num_active[endpoint.url] += 1
            try:
                async with aclosing(self._ask_one(endpoint, path, body)) as parts:
                    async for said in parts:
                        yield said
                self._unhealthy.pop(endpoint.url, None)
                return
            except http.NotReached:
                self._unhealthy[endpoint.url] = time.monotonic() + UNHEALTHY_S
                self._endpoints = {}
                log.warning("upstream_not_reached", url=endpoint.url)
            finally:
                self._num_active[endpoint.url] -= 1
        # a process of ours that died has a new address once it was loaded again
        raise _Lost if adapter is not None else _failed("cannot be reached", 503, retry_after_s=5.0)

    async def _in_order(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        """Healthy replicas first, the least busy first."""
        key, now = None if adapter is None else adapter.name, time.monotonic()
        known = self._endpoints  # another one, once something was lost
        found_at, endpoints = known.get(key, (0.0, []))
        if not endpoints or now - found_at > _FRESH_S:
            try:
                endpoints = await asyncio.to_thread(self._target.endpoints, adapter)
            except TargetError as error:
                log.warning("upstream_no_endpoint", reason=str(error))
                raise _Lost from None
            known[key] = (now, endpoints)
        return sorted(
            endpoints,
            key=lambda endpoint: (self._unhealthy.get(endpoint.url, 0.0) > now, self._num_active[endpoint.url]),
        )

    async def _reload(self, adapter: ServedAdapter, asked_at: float) -> None:
        """Reload a lost version through its target, once for all requests that were waiting."""
        async with self._loading.setdefault(adapter.name, asyncio.Lock()):
            tried_at, is_back = self._tried.get(adapter.name, (0.0, False))
            if tried_at < asked_at:
                is_back = await self._load(adapter)
                self._tried[adapter.name] = (time.monotonic(), is_back)
            if not is_back:
                raise _failed(f"lost {adapter.name} and cannot load it now", 503, retry_after_s=5.0)

    async def _load(self, adapter: ServedAdapter) -> bool:
        try:
            await asyncio.to_thread(self._target.load, adapter)
        except TunesmithError as error:
            log.warning("upstream_cannot_load", adapter=adapter.name, reason=str(error))
            return False
        self._unhealthy.clear()
        self._endpoints = {}
        return True

    async def _ask_one(
        self, endpoint: Endpoint, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        sent = {**endpoint.defaults, **body, **endpoint.extra, "model": endpoint.model}
        if "max_completion_tokens" in sent:  # the older name is the one that every server knows
            sent["max_tokens"] = sent.pop("max_completion_tokens")
        headers = {"Content-Type": "application/json", **http.IDENTITY, **endpoint.headers}
        has_begun = False
        try:
            with http.translated():
                async with self._client(endpoint.url).stream(
                    "POST", endpoint.url + path, content=orjson.dumps(sent), headers=headers
                ) as response:
                    if response.status_code != 200:
                        raise await self._refusal(response, endpoint)
                    has_begun = True
                    async with aclosing(_events(response) if body.get("stream") else _whole(response)) as parts:
                        stall_s: float | None = None
                        while (said := await _next(parts, stall_s)) is not None:
                            stall_s = STALL_S
                            yield _checked(said, endpoint)
        except http.TooSlow as error:
            self._unhealthy[endpoint.url] = time.monotonic() + UNHEALTHY_S  # other replicas first
            log.warning("upstream_hangs", url=endpoint.url, stalled=isinstance(error, _Stalled))
            how = "stopped in the middle of the answer" if isinstance(error, _Stalled) else "took too long"
            raise _failed(how, 504) from None
        except http.BrokeOff as error:
            if not has_begun:  # another replica may be tried
                raise http.NotReached(str(error)) from None
            raise _failed("broke off in the middle of the answer", 502) from None
        except http.TooLarge:
            raise _failed("sent more than the maximum size of an answer", 502) from None

    async def _refusal(self, response: httpx2.Response, endpoint: Endpoint) -> Exception:
        """The error to raise for a status of the upstream server."""
        status = response.status_code
        reply = http.Reply(status, await http.read_body(response, MAX_EVENT), response.headers)
        said = reply.json
        message = _message(said, endpoint) if isinstance(said, dict) else ""
        if status == 404:
            return _Lost()
        if status in (400, 413, 422):
            return EngineError(message or "the request was refused", code="invalid_request", http_status=400)
        if status in (401, 403):
            return _failed("rejected the API key; set its environment variable (key_env) for tunesmith serve", 502)
        if status in (429, 503):
            wait_s = 1.0 if reply.retry_after_s is None else min(reply.retry_after_s, _MAX_WAIT_S)
            return _failed("is busy" if status == 429 else "is not ready", status, retry_after_s=wait_s)
        log.warning("upstream_failed", status=status, reason=message)
        return _failed(f"failed with status {status}", 502)

    def _client(self, url: str) -> httpx2.AsyncClient:
        import httpx2

        kind = http.is_here(url), url.startswith("http://")  # what the options depend on
        if kind not in self._clients:
            self._clients[kind] = httpx2.AsyncClient(
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                **http.client_options(url, self._timeout_s),
            )
        return self._clients[kind]


def upstream_of(served: ServedProfile, root: Path, timeout_s: float) -> UpstreamServer:
    """The server behind one profile, by its target."""
    target = make_target(served.target.kind, served.target.options, root=root, profile=served.profile)
    return UpstreamServer(cast(ProxyTarget, target), timeout_s)


async def _next(parts: AsyncGenerator[dict[str, Any], None], stall_s: float | None) -> dict[str, Any] | None:
    """What comes next; None: that was all. Raises _Stalled where nothing comes in time."""
    try:
        async with asyncio.timeout(stall_s):
            return await anext(parts, None)
    except TimeoutError:
        raise _Stalled from None


async def _events(response: httpx2.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of an event stream; one that ends without [DONE] was cut off."""
    rest, size = b"", 0
    async for piece in response.aiter_raw():
        size += len(piece)
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_EVENT or size > MAX_ANSWER:
            raise http.TooLarge
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line.removeprefix(_DATA).strip()
            if data == _DONE:
                return
            yield _object(data)
    raise _failed("broke off in the middle of the answer", 502)


async def _whole(response: httpx2.Response) -> AsyncGenerator[dict[str, Any], None]:
    yield _object(await http.read_body(response, MAX_ANSWER))


def _object(data: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(data)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise _failed("answered with something that is not a JSON object", 502)
    return said


def _checked(said: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    if said.get("error"):
        log.warning("upstream_failed", reason=_message(said, endpoint))
        raise _failed("broke off with an error", 502)
    if endpoint.is_named and said.get("model") != endpoint.model:
        raise _failed("answered from another version than the requested one", 502)
    return said


def _message(said: Mapping[str, Any], endpoint: Endpoint) -> str:
    """The error message of a server: truncated, printable, without its address and key."""
    error = said.get("error")
    text = error.get("message") if isinstance(error, dict) else error
    key = endpoint.headers.get("Authorization", "").removeprefix("Bearer ")
    secrets = (key, endpoint.url, endpoint.url.partition("://")[2])
    return http.shown(str(text or ""), _MAX_SHOWN, dict.fromkeys(secrets, "…"))


def _failed(what: str, status: int, *, retry_after_s: float | None = None) -> EngineError:
    message = f"the upstream server of this profile {what}"
    return EngineError(message, code="upstream", http_status=status, retry_after_s=retry_after_s)
