"""Adapters come into an engine when they are asked for, and go when others need the room."""

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
from tunesmith.serving.rules.eviction import Budget, Held, NoRoom, make_room

log = logger("gateway")
LOST = frozenset({"engine_died", "engine_hung", "unknown_adapter"})
"""The engine was lost: asked again, a new one answers."""


class RestartedEngine(Engine, Protocol):
    """An engine that tells when its process, and every adapter in it, is a new one."""

    num_starts: int


@dataclass
class _Place:
    adapter: ServedAdapter
    start: int
    """Of which process of the engine it is part."""
    num_bytes: int
    asked_s: float


class Pager:
    """Around one engine. Counts who uses what; loads on first need, once however many ask; lets go by decision."""

    def __init__(
        self,
        engine: RestartedEngine,
        *,
        max_adapters: int = 8,
        min_residency_s: float = 60.0,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._budget = Budget(max_adapters, max_bytes, min_residency_s)
        self._clock = clock
        self._places: dict[str, _Place] = {}
        self._users: dict[str, int] = {}
        self._pins: frozenset[str] = frozenset()
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._left = asyncio.Condition()

    def pin(self, names: Iterable[str]) -> None:
        """From now on these stay (what is live, and what was before), and no others."""
        self._pins = frozenset(names)

    @contextlib.asynccontextmanager
    async def using(self, adapter: ServedAdapter | None) -> AsyncIterator[str | None]:
        """Have it in memory, and keep it there meanwhile. Raises EngineError, 503 where there is no room."""
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
            if name in self._places:
                self._places[name].asked_s = self._clock()
            async with self._left:
                self._left.notify_all()

    async def answer(
        self, asked: GenerationRequest, adapter: ServedAdapter | None
    ) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """The answer of that version; asked again once if the engine was lost before anything was said."""
        may_repeat = True
        while True:
            try:
                async with self.using(adapter) as name:
                    said = self.engine.generate(replace(asked, adapter=name))
                    async with contextlib.aclosing(said) as pieces:
                        async for piece in pieces:
                            may_repeat = False
                            yield piece
                return
            except EngineError as error:
                if not may_repeat or error.code not in LOST:
                    raise
                may_repeat = False

    async def load(self, adapter: ServedAdapter) -> None:
        """Have it in memory, asked for now."""
        await self.engine.start()
        place = self._held(adapter.name)
        if place is not None:
            if place.adapter.digest != adapter.digest:
                raise EngineError(
                    f"{adapter.name} is loaded with other content; a version name must not be reused",
                    code="name_taken",
                    http_status=409,
                )
            place.asked_s = self._clock()
            return
        task = self._loading.get(adapter.name)
        if task is None:
            task = self._loading[adapter.name] = asyncio.create_task(self._load(adapter))
            task.add_done_callback(self._forget)
        await asyncio.shield(task)  # whoever asked first may go away; others still wait for it

    async def unload(self, name: str) -> None:
        """Let it go now; refused while it is in use. An unknown name is no error."""
        if self._users.get(name):
            raise EngineError(f"{name} is answering requests; drain it first", code="in_use", http_status=409)
        async with self._one_at_a_time:
            await self._let_go(name)

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Wait until nobody uses it; False if somebody still does after that time."""
        try:
            async with asyncio.timeout(timeout_s), self._left:
                await self._left.wait_for(lambda: not self._users.get(name))
        except TimeoutError:
            return False
        return True

    def num_users(self, name: str) -> int:
        return self._users.get(name, 0)

    def state(self) -> list[dict[str, Any]]:
        """What is in memory, the least recently asked first."""
        now_s = self._clock()
        held = sorted(self._all_held(), key=lambda one: one.asked_s)
        return [
            {
                "name": one.name,
                "digest": self._places[one.name].adapter.digest,
                "bytes": one.num_bytes,
                "users": one.num_users,
                "idle_s": round(now_s - one.asked_s, 3),
                "pinned": one.is_pinned,
            }
            for one in held
        ]

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._loading = {name: one for name, one in self._loading.items() if one is not task}
        if not task.cancelled():
            task.exception()  # whoever waits hears of it; it may be that nobody does

    async def _load(self, adapter: ServedAdapter) -> None:
        async with self._one_at_a_time:
            wanted = Held(adapter.name, _size(adapter), 1, self._clock(), adapter.name in self._pins)
            decided = make_room(self._all_held(), wanted, self._budget, self._clock())
            if isinstance(decided, NoRoom):
                raise EngineError(
                    f"no room for {adapter.name}: {decided.reason}",
                    code="no_room",
                    http_status=503,
                    retry_after_s=decided.retry_after_s,
                )
            for name in decided.let_go:
                await self._let_go(name)
            num_bytes = await self.engine.load(adapter)
            self._places[adapter.name] = _Place(adapter, self.engine.num_starts, num_bytes, self._clock())
            log.info("adapter_loaded", adapter=adapter.name, bytes=num_bytes)

    async def _let_go(self, name: str) -> None:
        place = self._held(name)
        self._places.pop(name, None)
        if place is not None:
            await self.engine.unload(name)
            log.info("adapter_let_go", adapter=name)

    def _held(self, name: str) -> _Place | None:
        """What is in the engine's memory; what an earlier process held is not."""
        place = self._places.get(name)
        if place is not None and place.start != self.engine.num_starts:
            del self._places[name]
            return None
        return place

    def _all_held(self) -> list[Held]:
        places = [place for name in list(self._places) if (place := self._held(name)) is not None]
        return [
            Held(
                place.adapter.name,
                place.num_bytes,
                self._users.get(place.adapter.name, 0),
                place.asked_s,
                place.adapter.name in self._pins,
            )
            for place in places
        ]


def _size(adapter: ServedAdapter) -> int:
    """About the bytes that it will take, from its file."""
    try:
        return (adapter.path / "adapter_model.safetensors").stat().st_size
    except OSError:
        return 0  # loading it says what is wrong
