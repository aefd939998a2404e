"""The adapter cache of an engine: loads adapters on first use and evicts the least recently used."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tunesmith.core.logs import logger
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.serving.gateway.engine_contract import Engine, EngineError
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta
from tunesmith.serving.rules.eviction import Budget, CachedAdapter, CannotEvict, plan_eviction

log = logger("gateway")
LOST = frozenset({"engine_died", "engine_hung", "unknown_adapter"})
"""Error codes of a lost engine; a retry is answered by a new one."""


class RestartedEngine(Engine, Protocol):
    """An engine that counts its processes: a new one holds none of the adapters."""

    num_starts: int


@dataclass
class _CacheEntry:
    adapter: ServedAdapter
    start: int
    """The number of the engine process that holds it."""
    num_bytes: int
    last_used_s: float


class AdapterCache:
    """LRU cache of one engine's adapters: counts users, loads each once, evicts as `rules/eviction.py` decides."""

    def __init__(
        self,
        engine: RestartedEngine,
        *,
        max_adapters: int = 8,
        min_residency_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._budget = Budget(max_adapters, min_residency_s)
        self._clock = clock
        self._entries: dict[str, _CacheEntry] = {}
        self._users: dict[str, int] = {}
        self._pins: frozenset[str] = frozenset()
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()

    def pin(self, names: Iterable[str]) -> None:
        """Replace the pinned versions: what is live, and the version before."""
        self._pins = frozenset(names)

    @contextlib.asynccontextmanager
    async def acquire(self, adapter: ServedAdapter | None) -> AsyncIterator[str | None]:
        """Load an adapter and keep it in memory during the block. Raises EngineError, 503 if nothing can be evicted."""
        if adapter is None:
            yield None
            return
        name = adapter.name
        self._users[name] = self._users.get(name, 0) + 1
        try:
            await self.load(adapter)
            yield name
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
            if name in self._entries:
                self._entries[name].last_used_s = self._clock()

    async def answer(
        self, request: GenerationRequest, adapter: ServedAdapter | None
    ) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """The answer of a version; retried once if the engine was lost before the first delta."""
        may_retry = True
        while True:
            try:
                async with self.acquire(adapter) as name:
                    stream = self.engine.generate(replace(request, adapter=name))
                    async with contextlib.aclosing(stream) as parts:
                        async for part in parts:
                            may_retry = False
                            yield part
                return
            except EngineError as error:
                if not may_retry or error.code not in LOST:
                    raise
                may_retry = False

    async def load(self, adapter: ServedAdapter) -> None:
        """Load an adapter unless it is loaded, and mark it as used now."""
        await self.engine.start()
        entry = self._held(adapter.name)
        if entry is not None:
            if entry.adapter.digest != adapter.digest:
                raise EngineError(
                    f"{adapter.name} is loaded with other content; a version name must not be reused",
                    code="name_taken",
                    http_status=409,
                )
            entry.last_used_s = self._clock()
            return
        task = self._loading.get(adapter.name)
        if task is None:
            task = self._loading[adapter.name] = asyncio.create_task(self._load(adapter))
            task.add_done_callback(self._forget)
        await asyncio.shield(task)  # the first requester may disconnect while others wait

    async def unload(self, name: str) -> None:
        """Unload an adapter now; refused while it is in use. An unknown name is not an error."""
        if self._users.get(name):
            raise EngineError(f"{name} is answering requests; drain it first", code="in_use", http_status=409)
        async with self._one_at_a_time:
            await self._evict(name)

    def state(self) -> list[dict[str, Any]]:
        """The adapters in memory, least recently used first."""
        now_s = self._clock()
        held = sorted(self._all_held(), key=lambda one: one.last_used_s)
        return [
            {
                "name": one.name,
                "digest": self._entries[one.name].adapter.digest,
                "bytes": self._entries[one.name].num_bytes,
                "users": one.num_users,
                "idle_s": round(now_s - one.last_used_s, 3),
                "pinned": one.is_pinned,
            }
            for one in held
        ]

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._loading = {name: one for name, one in self._loading.items() if one is not task}
        if not task.cancelled():
            task.exception()  # waiters get it; there may be none

    async def _load(self, adapter: ServedAdapter) -> None:
        async with self._one_at_a_time:
            wanted = CachedAdapter(adapter.name, 1, self._clock(), adapter.name in self._pins)
            plan = plan_eviction(self._all_held(), wanted, self._budget, self._clock())
            if isinstance(plan, CannotEvict):
                raise EngineError(
                    f"{adapter.name} cannot be loaded: {plan.reason}",
                    code="adapter_capacity",
                    http_status=503,
                    retry_after_s=plan.retry_after_s,
                )
            for name in plan.evicted:
                await self._evict(name)
            num_bytes = await self.engine.load(adapter)
            self._entries[adapter.name] = _CacheEntry(adapter, self.engine.num_starts, num_bytes, self._clock())
            log.info("adapter_loaded", adapter=adapter.name, bytes=num_bytes)

    async def _evict(self, name: str) -> None:
        entry = self._held(name)
        self._entries.pop(name, None)
        if entry is not None:
            await self.engine.unload(name)
            log.info("adapter_evicted", adapter=name)

    def _held(self, name: str) -> _CacheEntry | None:
        """The entry of an adapter that the present engine process holds."""
        entry = self._entries.get(name)
        if entry is not None and entry.start != self.engine.num_starts:
            del self._entries[name]
            return None
        return entry

    def _all_held(self) -> list[CachedAdapter]:
        entries = [entry for name in list(self._entries) if (entry := self._held(name)) is not None]
        return [
            CachedAdapter(
                entry.adapter.name,
                self._users.get(entry.adapter.name, 0),
                entry.last_used_s,
                entry.adapter.name in self._pins,
            )
            for entry in entries
        ]
