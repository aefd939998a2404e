"""The embedded engines of this server: one per model folder, started when first asked, the idle one let go first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tunesmith.core.errors import ConfigError
from tunesmith.core.logs import logger
from tunesmith.profiles.base_model import base_digest, base_files
from tunesmith.profiles.settings import ServeSettings
from tunesmith.programs.readings import ProbeResult
from tunesmith.serving.gateway.adapter_cache import Pager
from tunesmith.serving.gateway.admission import Room
from tunesmith.serving.gateway.embedded import EmbeddedEngine
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.model_router import Route, Switchboard
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta

log = logger("gateway")
Device = Literal["auto", "cpu", "cuda"]
MakeEngine = Callable[[Route, Device], EmbeddedEngine]
_STEP_S = 0.02
_STOP_GRACE_S = 5.0
_HASH_AGAIN_S = 15.0


class Seat:
    """One engine, the adapters beside it, and how much is under way there."""

    def __init__(self, route: Route, engine: EmbeddedEngine, pager: Pager) -> None:
        self.folder = route.folder
        self.whole = route.version.name if route.version.is_whole else None
        """The fully tuned version that it is, where it is one."""
        self.engine = engine
        self.pager = pager
        self.num_active = 0
        self.used_at = time.monotonic()
        self._starting: asyncio.Task[None] | None = None
        self.base_digest: str | None = None
        self.hashed_start = 0
        """Which process of the engine read the base that was hashed."""
        self.hashed_at = 0.0

    @property
    def is_ready(self) -> bool:
        return self.engine.pid is not None

    async def start(self) -> None:
        """Returns at once while the engine runs. Whoever waits may leave: the start goes on for the others."""
        if self.is_ready:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_heard)
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        begun = time.monotonic()
        log.info("engine_starts", base=self.folder.name)
        await self.engine.start()
        log.info("engine_ready", base=self.folder.name, seconds=round(time.monotonic() - begun, 1))


def _heard(task: asyncio.Task[None]) -> None:
    """A failure that nobody waits for any more is no surprise: the next one to ask is told."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("engine_failed", problem=str(error))


async def _digest_of(folder: Path) -> str:
    try:
        await asyncio.to_thread(base_files, folder)
        return await asyncio.to_thread(base_digest, folder)
    except ConfigError as error:
        public = "the base model's files cannot be used; the server's log says why"
        log.warning("base_unusable", problem=error.message)
        raise EngineError(error.message, http_status=503, retry_after_s=_HASH_AGAIN_S, public=public) from None


class EnginePool:
    """Implements `hooks.Engines` and what the routes need."""

    def __init__(self, settings: ServeSettings, make_engine: MakeEngine) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._board: Switchboard | None = None
        self.pass_on: Callable[[Route, GenerationRequest], Awaitable[str]] | None = None
        """Asks the server that answers for a profile in our place."""
        self._seats: dict[Path, Seat] = {}
        self._rooms: dict[Path, Room] = {}
        self._opening = asyncio.Lock()
        self._aside: Literal["unload", "cpu"] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        """Engines that computed on the CPU meanwhile, and end when they have nothing to write any more."""

    def follow(self, board: Switchboard) -> None:
        """Whose names decide what is pinned; it needs us first, to have versions ready."""
        self._board = board

    async def _find_route(self, name: str) -> Route:
        assert self._board is not None, "the server joins them before its first request"
        return await self._board.resolve(name)

    # -- for the routes

    def room(self, folder: Path) -> Room:
        most = self._settings.max_batch + self._settings.max_waiting
        return self._rooms.setdefault(folder, Room(most))

    async def generate(self, route: Route, asked: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """One answer of a version, loaded where it is not; closing the iterator cancels it."""
        seat = await self._seat(route)
        seat.num_active += 1
        try:
            await self._prepare(seat, route)
            async with aclosing(seat.pager.answer(asked, route.beside)) as parts:
                async for part in parts:
                    yield part
        finally:
            seat.num_active -= 1
            seat.used_at = time.monotonic()

    async def get_ready(self, new: Route, old: Route) -> None:
        """Load what a name is about to mean, where an engine serves what it means; else the first request will."""
        seats = [self._seats.get(route.folder) for route in (new, old)]
        if new.place.is_embedded and any(seat is not None and seat.is_ready for seat in seats):
            await self.load(new)

    async def load(self, route: Route) -> None:
        """Have a version ready, starting its engine if need be."""
        seat = await self._seat(route)
        seat.num_active += 1
        try:
            await self._prepare(seat, route)
            if route.beside is not None:
                await seat.pager.load(route.beside)
        finally:
            seat.num_active -= 1

    async def read(
        self, route: Route, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult]:
        """What a version makes of prompts, for the parity probe."""
        seat = await self._seat(route)
        seat.num_active += 1
        try:
            await self._prepare(seat, route)
            async with seat.pager.using(route.beside) as name:
                return await seat.engine.read(name, prompts, max_tokens)
        finally:
            seat.num_active -= 1

    async def unload(self, name: str) -> None:
        for seat in list(self._seats.values()):
            await seat.pager.unload(name)

    # -- seats

    async def _seat(self, route: Route) -> Seat:
        folder = route.folder
        if self._aside == "unload":
            raise EngineError(
                "the device is lent to a training; ask again later", code="aside", http_status=503, retry_after_s=15.0
            )
        if (found := self._seats.get(folder)) is not None:
            return found
        async with self._opening:
            seat = self._seats.get(folder)
            if seat is None:
                await self._make_room()
                device: Device = "cpu" if self._aside == "cpu" else self._settings.device
                engine = self._make_engine(route, device)
                pager = Pager(
                    engine, max_adapters=self._settings.max_adapters, min_residency_s=self._settings.min_residency_s
                )
                seat = self._seats[folder] = Seat(route, engine, pager)
            return seat

    async def _prepare(self, seat: Seat, route: Route) -> None:
        """The engine runs, holds the base that the version was made for, and knows what is to stay."""
        seat.pager.pin(frozenset() if self._board is None else self._board.pinned())
        await seat.start()
        if not route.version.is_whole:  # there the engine itself compares, see server.py
            await self._check_base(seat, route)

    async def _make_room(self) -> None:
        """End the engine that was idle the longest, if there are as many as allowed."""
        while len(self._seats) >= self._settings.max_engines:
            idle = [seat for seat in self._seats.values() if not seat.num_active]
            if not idle:
                raise EngineError(
                    f"{len(self._seats)} base models are in use and serve.max_engines allows no more; ask again later",
                    code="engines_in_use",
                    http_status=503,
                    retry_after_s=5.0,
                )
            await self._close(min(idle, key=lambda seat: seat.used_at))

    async def _close(self, seat: Seat) -> None:
        self._seats.pop(seat.folder, None)
        log.info("engine_ends", base=seat.folder.name)
        await seat.engine.stop(0.0)

    async def _check_base(self, seat: Seat, route: Route) -> None:
        """An adapter of another base would answer nonsense, and a profile's bare base is the one it was locked with.

        Files are hashed once for every process that reads them.
        """
        wanted, start = route.version.base_digest, seat.engine.num_starts
        if seat.hashed_start != start:
            seat.base_digest, seat.hashed_start = await _digest_of(seat.folder), start
            seat.hashed_at = time.monotonic()
        if wanted is None or wanted == seat.base_digest:
            return
        if time.monotonic() - seat.hashed_at > _HASH_AGAIN_S:
            seat.hashed_at = time.monotonic()
            if await _digest_of(seat.folder) == wanted and not seat.num_active > 1:
                await self._close(seat)  # it was put back: the next one to ask starts an engine that reads it
        raise EngineError(
            f"{route.version.name} belongs to another base than {seat.folder.name} holds now; put that one back, "
            "and it answers again within a minute",
            code="base_changed",
            http_status=503,
            retry_after_s=_HASH_AGAIN_S,
        )

    # -- hooks.Engines

    @property
    def num_active(self) -> int:
        return sum(seat.num_active for seat in self._seats.values())

    async def step_aside(self, mode: Literal["unload", "cpu"], drain_s: float) -> None:
        """Answers under way may end, then every engine does; see `hooks.Engines`."""
        self._aside = mode
        deadline = time.monotonic() + drain_s
        while self.num_active and time.monotonic() < deadline:
            await asyncio.sleep(_STEP_S)
        async with self._opening:
            seats = list(self._seats.values())
            self._seats.clear()
        await asyncio.gather(*(seat.engine.stop(0.0) for seat in seats))

    async def answer(self, name: str, asked: GenerationRequest) -> str:
        """The whole answer of an exact version, for mirrored traffic; takes a place only where nobody waits."""
        route = await self._find_route(name)
        if not route.place.is_embedded:
            assert self.pass_on is not None, "the server joins them before its first request"
            return await self.pass_on(route, asked)
        room = self.room(route.folder)
        if room.num_rows >= self._settings.max_batch:
            raise EngineError("the engine is busy with people", code="busy", http_status=503, retry_after_s=5.0)
        room.enter(1)
        texts: list[str] = []
        try:
            row = replace(asked, adapter=route.beside.name if route.beside else None)
            async with aclosing(self.generate(route, row)) as parts:
                async for part in parts:
                    texts.append(part.text if isinstance(part, TextDelta) else "")
        finally:
            room.leave(1)
        return "".join(texts)

    async def come_back(self) -> None:
        if self._aside == "cpu":
            for seat in self._seats.values():
                task = asyncio.create_task(self._leave(seat))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
            self._seats.clear()
        self._aside = None

    async def _leave(self, seat: Seat) -> None:
        try:
            while seat.num_active:
                await asyncio.sleep(_STEP_S)
        finally:
            await seat.engine.stop(0.0)

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        seats = list(self._seats.values())
        self._seats.clear()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(seat.engine.stop(_STOP_GRACE_S) for seat in seats), return_exceptions=True)

    def held(self) -> list[str]:
        """The names of all versions that some engine has in memory."""
        wholes = [seat.whole for seat in self._seats.values() if seat.whole is not None and seat.is_ready]
        return sorted([*wholes, *(one["name"] for seat in self._seats.values() for one in seat.pager.state())])

    @property
    def problems(self) -> list[str]:
        """What is wrong with an engine now."""
        return [seat.engine.problem for seat in self._seats.values() if seat.engine.problem is not None]

    def state(self) -> list[dict[str, object]]:
        """Which engines there are, for /healthz."""
        return [
            {
                "base": seat.folder.name,
                "is_ready": seat.is_ready,
                "num_active": seat.num_active,
                "problem": seat.engine.problem,
                "num_starts": seat.engine.num_starts,
                "num_hung": seat.engine.num_hung,
                "last_hang": seat.engine.last_hang,
                "adapters": seat.pager.state(),
            }
            for seat in self._seats.values()
        ]
