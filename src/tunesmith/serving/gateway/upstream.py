"""Servers behind the gateway (vLLM, llama.cpp, Ollama): one request passed on, its answer streamed back.

Who asked learns what was wrong, never where the server is or with which key it was asked. Among replicas the one with
the fewest answers under way is asked; one that cannot be reached is left alone for a while.
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

from tunesmith.core.errors import TunesmithError
from tunesmith.core.http import is_here
from tunesmith.core.logs import logger
from tunesmith.deployment.targets.base import Door, Proxied, ServedAdapter, TargetError
from tunesmith.deployment.targets.registry import make_target
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.served_profiles import Place

if TYPE_CHECKING:
    import httpx2

log = logger("gateway")

MAX_ANSWER = 32 << 20
"""Longest answer in bytes, streamed or not."""
MAX_EVENT = 4 << 20
UNHEALTHY_S = 5.0
STALL_S = 30.0
"""Longest time between two chunks of a stream that has begun: a server that is silent for longer hangs."""
_CONNECT_S = 5.0
_MAX_SHOWN = 500
_MAX_WAIT_S = 300.0
_FRESH_S = 0.5
_DATA, _DONE = b"data:", b"[DONE]"


class _Lost(Exception):
    """The server does not have the version that it was asked for."""


class _NotReached(Exception):
    """Nobody took the request, so another replica may be asked."""


class _Stalled(Exception):
    """The server began to answer and says no more."""


class UpstreamServer:
    """One profile's server, asked over OpenAI's routes."""

    def __init__(self, target: Proxied, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._clients: dict[bool, httpx2.AsyncClient] = {}
        self._num_active: Counter[str] = Counter()
        self._unhealthy: dict[str, float] = {}
        self._doors: dict[str | None, tuple[float, list[Door]]] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._tried: dict[str, tuple[float, bool]] = {}
        """When a version was last loaded again, and whether that went well."""

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
                    raise _failed("does not have the version that was asked for", 503, retry_after_s=5.0) from None
                await self._load_again(adapter, asked_at)

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.aclose()

    async def _ask_replicas(
        self, path: str, body: Mapping[str, Any], adapter: ServedAdapter | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Ask one replica; the next one where nobody took the request."""
        for door in await self._in_order(adapter):
            self._num_active[door.url] += 1
            try:
                async with aclosing(self._ask_one(door, path, body)) as parts:
                    async for said in parts:
                        yield said
                self._unhealthy.pop(door.url, None)
                return
            except _NotReached:
                self._unhealthy[door.url] = time.monotonic() + UNHEALTHY_S
                self._doors = {}
                log.warning("upstream_not_reached", url=door.url)
            finally:
                self._num_active[door.url] -= 1
        # a process of ours that died has a new address once it was loaded again
        raise _Lost if adapter is not None else _failed("cannot be reached", 503, retry_after_s=5.0)

    async def _in_order(self, adapter: ServedAdapter | None) -> list[Door]:
        """Healthy replicas first, the least busy first."""
        key, now = None if adapter is None else adapter.name, time.monotonic()
        known = self._doors  # another one, once something was lost
        found_at, doors = known.get(key, (0.0, []))
        if not doors or now - found_at > _FRESH_S:
            try:
                doors = await asyncio.to_thread(self._target.doors, adapter)
            except TargetError as error:
                log.warning("upstream_has_no_door", reason=str(error))
                raise _Lost from None
            known[key] = (now, doors)
        return sorted(doors, key=lambda door: (self._unhealthy.get(door.url, 0.0) > now, self._num_active[door.url]))

    async def _load_again(self, adapter: ServedAdapter, asked_at: float) -> None:
        """Through the target, once for all who asked before that was tried."""
        async with self._loading.setdefault(adapter.name, asyncio.Lock()):
            tried_at, is_back = self._tried.get(adapter.name, (0.0, False))
            if tried_at < asked_at:
                is_back = await self._load(adapter)
                self._tried[adapter.name] = (time.monotonic(), is_back)
            if not is_back:
                raise _failed(f"has lost {adapter.name} and cannot load it now", 503, retry_after_s=5.0)

    async def _load(self, adapter: ServedAdapter) -> bool:
        try:
            await asyncio.to_thread(self._target.load, adapter)
        except TunesmithError as error:
            log.warning("upstream_cannot_load", adapter=adapter.name, reason=str(error))
            return False
        self._unhealthy.clear()
        self._doors = {}
        return True

    async def _ask_one(self, door: Door, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        import httpx2

        sent = {**door.defaults, **body, **door.extra, "model": door.model}
        if "max_completion_tokens" in sent:  # the older name is the one that every server knows
            sent["max_tokens"] = sent.pop("max_completion_tokens")
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **door.headers}
        has_begun = False
        try:
            async with self._client(door.url).stream(
                "POST", door.url + path, content=orjson.dumps(sent), headers=headers
            ) as response:
                if response.status_code != 200:
                    raise await self._refusal(response, door)
                has_begun = True
                async with aclosing(_events(response) if body.get("stream") else _whole(response)) as parts:
                    stall_s: float | None = None
                    while (said := await _next(parts, stall_s)) is not None:
                        stall_s = STALL_S
                        yield _checked(said, door)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError):
            raise _NotReached from None
        except (httpx2.TimeoutException, _Stalled) as error:
            self._unhealthy[door.url] = time.monotonic() + UNHEALTHY_S  # other replicas first
            log.warning("upstream_hangs", url=door.url, stalled=isinstance(error, _Stalled))
            how = "stopped in the middle of the answer" if isinstance(error, _Stalled) else "took too long"
            raise _failed(how, 504) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError):
            if not has_begun:
                raise _NotReached from None
            raise _failed("broke off in the middle of the answer", 502) from None

    async def _refusal(self, response: httpx2.Response, door: Door) -> Exception:
        """What a status means to who asked."""
        status = response.status_code
        told = _told(await _bounded(response, MAX_EVENT), door)
        if status == 404:
            return _Lost()
        if status in (400, 413, 422):
            return EngineError(told or "the request is refused", code="invalid_request", http_status=400)
        if status in (401, 403):
            return _failed("refuses the key it is asked with; set it where tunesmith serve runs", 502)
        if status in (429, 503):
            wait_s = _seconds(response.headers.get("retry-after"))
            return _failed("is busy" if status == 429 else "is not ready", status, retry_after_s=wait_s)
        log.warning("upstream_failed", status=status, reason=told)
        return _failed(f"failed with status {status}", 502)

    def _client(self, url: str) -> httpx2.AsyncClient:
        import httpx2

        here = is_here(url)
        if here not in self._clients:
            self._clients[here] = httpx2.AsyncClient(
                timeout=httpx2.Timeout(self._timeout_s, connect=min(_CONNECT_S, self._timeout_s)),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                follow_redirects=False,
                trust_env=not here,
            )
        return self._clients[here]


def upstream_of(place: Place, root: Path, timeout_s: float) -> UpstreamServer:
    """The server behind one profile, by its target."""
    target = make_target(place.target.kind, place.target.options, root=root, profile=place.profile)
    return UpstreamServer(cast(Proxied, target), timeout_s)


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
            raise _failed("says more than an answer can hold", 502)
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line.removeprefix(_DATA).strip()
            if data == _DONE:
                return
            yield _object(data)
    raise _failed("broke off in the middle of the answer", 502)


async def _whole(response: httpx2.Response) -> AsyncGenerator[dict[str, Any], None]:
    yield _object(await _bounded(response, MAX_ANSWER))


async def _bounded(response: httpx2.Response, most: int) -> bytes:
    pieces, size = [], 0
    async for piece in response.aiter_raw():
        size += len(piece)
        if size > most:
            raise _failed("says more than an answer can hold", 502)
        pieces.append(piece)
    return b"".join(pieces)


def _object(data: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(data)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise _failed("answered with something that is no JSON object", 502)
    return said


def _checked(said: dict[str, Any], door: Door) -> dict[str, Any]:
    if said.get("error"):
        log.warning("upstream_failed", reason=_message(said, door))
        raise _failed("broke off with an error", 502)
    if door.is_named and said.get("model") != door.model:
        raise _failed("answered from another version than the one asked for", 502)
    return said


def _told(body: bytes, door: Door) -> str:
    try:
        said = orjson.loads(body)
    except ValueError:
        return ""
    return _message(said, door) if isinstance(said, dict) else ""


def _message(said: Mapping[str, Any], door: Door) -> str:
    """What a server complains about: cut, printable, without its address and its key."""
    error = said.get("error")
    text = str(error.get("message") if isinstance(error, dict) else error or "")
    key = door.headers.get("Authorization", "").removeprefix("Bearer ")
    for secret in (key, door.url, door.url.partition("://")[2]):
        if secret:
            text = text.replace(secret, "…")
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown[:_MAX_SHOWN]


def _seconds(retry_after: str | None) -> float:
    try:
        return min(max(float(retry_after or 1.0), 0.0), _MAX_WAIT_S)
    except ValueError:
        return 1.0


def _failed(what: str, status: int, *, retry_after_s: float | None = None) -> EngineError:
    message = f"the server behind this profile {what}"
    return EngineError(message, code="upstream", http_status=status, retry_after_s=retry_after_s)
